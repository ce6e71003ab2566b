// How well plans are chosen: calibrates, then measures every algorithm at sizes between those that were calibrated, and
// compares predictions with times, and the choice with the best. Ends with
//   regret geomean=G worst=W error_median=E r2_min=R points=N
// A point is a collective at a size, a number of ranks and a shape of the topology. Paced shapes are EMULATED.
#include <moeccl/moeccl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

namespace {

struct Shape {
  int ranks;
  const char* topology;  // null: one host; else paced
};
constexpr Shape kShapes[] = {{2, nullptr}, {4, nullptr}, {4, "node:2(bw=1GB/s,lat=20us) gpu:2"}, {8, nullptr}};
struct Op {
  moecclOp_t op;
  const char* name;
  std::vector<const char*> algorithms;
};
const std::vector<Op> kOps = {
    {moecclOpAllReduce, "allreduce", {"oneshot", "direct", "staged", "rd", "tree", "flat", "ring", "hier"}},
    {moecclOpAllGather, "allgather", {"oneshot", "direct", "staged", "flat", "ring", "hier"}},
    {moecclOpReduceScatter, "reduce_scatter", {"oneshot", "direct", "staged", "flat", "ring", "hier"}},
    {moecclOpAllToAll, "alltoall", {"oneshot", "direct", "staged", "flat", "2dh"}},
    {moecclOpBroadcast, "broadcast", {"oneshot", "direct", "staged", "flat", "tree", "ring"}},
    {moecclOpReduce, "reduce", {"oneshot", "direct", "staged", "flat", "tree"}},
    {moecclOpGather, "gather", {"oneshot", "direct", "staged", "flat"}},
    {moecclOpScatter, "scatter", {"oneshot", "direct", "staged", "flat"}}};
// Between the sizes that calibration takes.
constexpr size_t kSizes[] = {3 << 9, 3 << 12, 3 << 14, 3 << 15, 3 << 16, 3 << 17, 3 << 19, 3 << 20};
constexpr size_t kMost = 3 << 20;
constexpr int kMaxRanks = 8, kRounds = 7;

// Ranks are forked processes that share this page: a barrier and each one's time.
struct Shared {
  moecclUniqueId id;
  volatile int id_ready;
  int arrived, turn;
  double ns[kMaxRanks];
  double errors[4096], regrets[4096], r2_min;
  int n_points, worse_than_flat;
  int failed;
};
Shared* shared;

double now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return 1e9 * static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec);
}

void check(moecclResult_t result, const char* what, moecclComm_t comm = nullptr) {
  if (result == moecclSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, moecclGetLastError(comm));
  __atomic_store_n(&shared->failed, 1, __ATOMIC_RELEASE);
  std::_Exit(1);
}

void barrier(int n) {
  const int turn = __atomic_load_n(&shared->turn, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&shared->arrived, 1, __ATOMIC_ACQ_REL) == n) {
    __atomic_store_n(&shared->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&shared->turn, turn + 1, __ATOMIC_RELEASE);
    return;
  }
  while (__atomic_load_n(&shared->turn, __ATOMIC_ACQUIRE) == turn) {
    if (__atomic_load_n(&shared->failed, __ATOMIC_ACQUIRE) != 0) std::_Exit(1);
    usleep(20);
  }
}

// The slowest rank's; the same on all.
double slowest(int n, int rank, double mine) {
  shared->ns[rank] = mine;
  barrier(n);
  const double most = *std::max_element(shared->ns, shared->ns + n);
  barrier(n);
  return most;
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

class Rank {
 public:
  Rank(const Shape& shape, int rank) : shape_(shape), rank_(rank), in_(kMost / 4 + 64, 1.0f), out_(kMost / 4 + 64) {
    moecclConfig_t config = MOECCL_CONFIG_INIT;
    config.topology = shape.topology;
    config.pace = shape.topology != nullptr;
    check(moecclCommInitRankConfig(&comm_, shape.ranks, shared->id, rank, &config), "init");
  }
  void run(const char* profile) {
    check(moecclCalibrate(comm_, 30000, 4 << 20), "calibrate", comm_);
    if (rank_ == 0) {
      check(moecclProfileSave(comm_, profile), "save", comm_);
      note_fits(profile);
    }
    for (const Op& op : kOps)
      for (const size_t bytes : kSizes) point(op, bytes);
    check(moecclCommDestroy(comm_), "destroy");
  }

 private:
  size_t count_of(moecclOp_t op, size_t bytes) const {
    const bool whole = op == moecclOpAllReduce || op == moecclOpBroadcast || op == moecclOpReduce;
    return std::max<size_t>(1, bytes / 4 / (whole ? 1 : static_cast<size_t>(shape_.ranks)));
  }
  moecclResult_t call(moecclOp_t op, size_t count) {
    const float* in = in_.data();
    float* out = out_.data();
    switch (op) {
      case moecclOpAllReduce:
        return moecclAllReduce(in, out, count, moecclFloat32, moecclSum, comm_, nullptr);
      case moecclOpAllGather:
        return moecclAllGather(in, out, count, moecclFloat32, comm_, nullptr);
      case moecclOpReduceScatter:
        return moecclReduceScatter(in, out, count, moecclFloat32, moecclSum, comm_, nullptr);
      case moecclOpAllToAll:
        return moecclAllToAll(in, out, count, moecclFloat32, comm_, nullptr);
      case moecclOpBroadcast:
        return moecclBroadcast(in, out, count, moecclFloat32, 0, comm_, nullptr);
      case moecclOpReduce:
        return moecclReduce(in, out, count, moecclFloat32, moecclSum, 0, comm_, nullptr);
      case moecclOpGather:
        return moecclGather(in, out, count, moecclFloat32, 0, comm_, nullptr);
      default:
        return moecclScatter(in, out, count, moecclFloat32, 0, comm_, nullptr);
    }
  }
  moecclPlanInfo_t info(moecclOp_t op, size_t count) {
    moecclPlanInfo_t i{};
    i.size = sizeof(i);
    check(moecclPlanQuery(comm_, op, count, moecclFloat32, &i), "query", comm_);
    return i;
  }
  double batch(moecclOp_t op, size_t count, int repeat) {
    check(call(op, count), "warm up", comm_);
    barrier(shape_.ranks);
    const double start = now_ns();
    for (int i = 0; i < repeat; ++i) check(call(op, count), "run", comm_);
    return slowest(shape_.ranks, rank_, (now_ns() - start) / repeat);
  }

  void point(const Op& op, size_t bytes) {
    const size_t count = count_of(op.op, bytes);
    check(moecclPlanForce(comm_, op.op, "auto"), "force", comm_);
    const std::string chosen = info(op.op, count).algorithm;
    std::vector<std::string> names;
    std::vector<double> predicted;
    std::vector<int> repeats;
    for (const char* name : op.algorithms) {
      check(moecclPlanForce(comm_, op.op, name), "force", comm_);
      const moecclPlanInfo_t i = info(op.op, count);
      if (std::strcmp(i.algorithm, name) != 0) continue;  // it does not apply
      names.emplace_back(name);
      predicted.push_back(i.predicted_us * 1e3);
      const double once = batch(op.op, count, 3);
      repeats.push_back(static_cast<int>(std::clamp(1.5e6 / once, 2.0, 100.0)));
    }
    // Every algorithm in every round, so that a disturbance meets all of them.
    std::vector<std::vector<double>> times(names.size());
    for (int round = 0; round < kRounds; ++round) {
      for (size_t a = 0; a < names.size(); ++a) {
        check(moecclPlanForce(comm_, op.op, names[a].c_str()), "force", comm_);
        times[a].push_back(batch(op.op, count, repeats[a]));
      }
    }
    if (rank_ == 0) judge(op, bytes, chosen, names, predicted, times);
  }

  void judge(const Op& op, size_t bytes, const std::string& chosen, const std::vector<std::string>& names,
             const std::vector<double>& predicted, const std::vector<std::vector<double>>& times) {
    double best = 1e300, mine = 0, guess = 0, flat = 1e300;
    std::string fastest;
    for (size_t a = 0; a < names.size(); ++a) {
      const double t = median(times[a]);
      if (t < best) best = t, fastest = names[a];
      if (names[a] == "flat") flat = t;
      if (names[a] == chosen) mine = t, guess = predicted[a];
    }
    if (mine <= 0 || shared->n_points == 4096) return;
    const int n = shared->n_points++;
    shared->errors[n] = std::fabs(guess - mine) / mine;
    shared->regrets[n] = mine / best;
    shared->worse_than_flat += mine > 1.05 * flat ? 1 : 0;
    std::printf("%-15s %8zu %d ranks %-34s chose %-8s %9.1f us (predicted %9.1f)  best %-8s %9.1f us  regret %.3f\n",
                op.name, bytes, shape_.ranks, shape_.topology ? shape_.topology : "one host", chosen.c_str(),
                mine / 1e3, guess / 1e3, fastest.c_str(), best / 1e3, mine / best);
    std::fflush(stdout);
  }

  // r2 of the levels, from the profile's own file; a level that no pair of ranks crosses has no points.
  void note_fits(const char* profile) {
    std::ifstream in(profile);
    const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    size_t at = text.find("\"levels\"");
    const size_t end = text.find("\"plans\"");
    while (at != std::string::npos && (at = text.find("\"r2\": ", at)) < end) {
      const double r2 = std::atof(text.c_str() + at + 6);
      std::printf("# level fit r2 %.4f\n", r2);
      shared->r2_min = std::min(shared->r2_min, r2);
      ++at;
    }
  }

  Shape shape_;
  int rank_;
  moecclComm_t comm_ = nullptr;
  std::vector<float> in_, out_;
};

bool run_shape(const Shape& shape) {
  shared->id_ready = 0;
  shared->arrived = shared->turn = 0;
  char profile[] = "/tmp/plan_accuracy_XXXXXX";
  const int fd = mkstemp(profile);
  if (fd >= 0) close(fd);
  std::vector<pid_t> children;
  for (int r = 0; r < shape.ranks; ++r) {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
      if (r == 0) {
        check(moecclGetUniqueId(&shared->id), "id");
        __atomic_store_n(&shared->id_ready, 1, __ATOMIC_RELEASE);
      }
      while (__atomic_load_n(&shared->id_ready, __ATOMIC_ACQUIRE) == 0) usleep(100);
      Rank(shape, r).run(profile);
      std::fflush(stdout);
      std::_Exit(0);
    }
    children.push_back(child);
  }
  bool good = true;
  for (const pid_t child : children) {
    int status = 0;
    good = waitpid(child, &status, 0) == child && status == 0 && good;
  }
  unlink(profile);
  return good;
}

}  // namespace

int main() {
  void* page = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return 1;
  shared = new (page) Shared();
  shared->r2_min = 1;
  for (const Shape& shape : kShapes)
    if (!run_shape(shape)) return 1;
  const int n = shared->n_points;
  if (n == 0) return 1;
  double log_sum = 0, worst = 0;
  for (int i = 0; i < n; ++i) {
    log_sum += std::log(shared->regrets[i]);
    worst = std::max(worst, shared->regrets[i]);
  }
  std::printf("# chosen more than 5 %% slower than flat at %d of %d points\n", shared->worse_than_flat, n);
  std::printf("regret geomean=%.4f worst=%.3f error_median=%.4f r2_min=%.4f points=%d\n", std::exp(log_sum / n), worst,
              median(std::vector<double>(shared->errors, shared->errors + n)), shared->r2_min, n);
  return 0;
}
