// How well plans are chosen: calibrates, then measures every algorithm at sizes between those that were calibrated, and
// compares predictions with times, and the choice with the best. Ends with
//   regret geomean=G worst=W error_median=E r2_min=R points=N
// A point is a collective at a size, a number of ranks and a shape of the topology. Paced shapes and the two hosts,
// which are network namespaces joined at 1 Gbit/s, are EMULATED; without root the hosts are left out, and it says so.
//   plan_accuracy [--prices] [--shape N]
// --prices: without calibration, so that the regret is that of the prices alone. --shape: only the N-th shape.
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
#include <memory>
#include <string>
#include <vector>

#include "perf/common/hosts.h"

namespace {

struct Shape {
  int ranks;
  const char* topology;  // null: one host, or two; else paced
  bool two_hosts = false;
  size_t most = 3 << 20;  // bytes of the larger buffer
  const char* name() const { return topology ? topology : two_hosts ? "two hosts, 1 Gbit/s, TCP" : "one host"; }
};
constexpr Shape kShapes[] = {
    {2, nullptr}, {4, nullptr}, {4, "node:2(bw=1GB/s,lat=20us) gpu:2"}, {8, nullptr}, {4, nullptr, true, 3 << 17}};
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
// What a plan takes depends on which pages its buffers happen to have: rounds take turns through this much memory.
constexpr size_t kMemory = 16 << 20;
constexpr int kMaxRanks = 8, kRounds = 5, kFinalRounds = 7;
constexpr double kBatchNs = 1.5e6;  // as calibration has it

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
bool with_profile = true;

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
  Rank(const Shape& shape, int rank) : shape_(shape), rank_(rank), in_(kMemory / 4, 1.0f), out_(kMemory / 4) {
    moecclConfig_t config = MOECCL_CONFIG_INIT;
    config.topology = shape.topology;
    config.pace = shape.topology != nullptr;
    check(moecclCommInitRankConfig(&comm_, shape.ranks, shared->id, rank, &config), "init");
  }
  void run(const char* profile) {
    const double start = now_ns();
    if (with_profile) check(moecclCalibrate(comm_, 30000, shape_.two_hosts ? 1 << 20 : 4 << 20), "calibrate", comm_);
    if (rank_ == 0 && with_profile) {
      std::printf("# %d ranks, %s: calibrated in %.1f s\n", shape_.ranks, shape_.name(), (now_ns() - start) / 1e9);
      check(moecclProfileSave(comm_, profile), "save", comm_);
      note_fits(profile);
    }
    for (const Op& op : kOps)
      for (const size_t bytes : kSizes)
        if (bytes <= shape_.most) point(op, bytes);
    check(moecclCommDestroy(comm_), "destroy");
  }

 private:
  size_t count_of(moecclOp_t op, size_t bytes) const {
    const bool whole = op == moecclOpAllReduce || op == moecclOpBroadcast || op == moecclOpReduce;
    return std::max<size_t>(1, bytes / 4 / (whole ? 1 : static_cast<size_t>(shape_.ranks)));
  }
  moecclResult_t call(moecclOp_t op, size_t count) {
    const size_t at = round_ % 5 * (kMemory / 4 / 5) / 1024 * 1024;
    const float* in = in_.data() + at;
    float* out = out_.data() + at;
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
  // Slowest rank's time of one run of `algorithm`.
  double batch(moecclOp_t op, size_t count, const char* algorithm, int repeat) {
    check(moecclPlanForce(comm_, op, algorithm), "force", comm_);
    for (int i = 0; i < 2; ++i) check(call(op, count), "warm up", comm_);
    barrier(shape_.ranks);
    // The barrier's sleepers wake far apart: an operation of the library's own lets them start together.
    float in = 1, out = 0;
    check(moecclAllReduce(&in, &out, 1, moecclFloat32, moecclSum, comm_, nullptr), "align", comm_);
    const double start = now_ns();
    for (int i = 0; i < repeat; ++i) check(call(op, count), "run", comm_);
    return slowest(shape_.ranks, rank_, (now_ns() - start) / repeat);
  }

  struct Runner {
    std::string name;
    double predicted_ns = 0;
    int repeat = 1;
    std::vector<double> ns;
  };

  // Alternating, so that a disturbance meets all of them.
  void race(const Op& op, size_t count, const std::vector<Runner*>& runners, int rounds) {
    for (round_ = 0; round_ < static_cast<size_t>(rounds); ++round_)
      for (Runner* r : runners) r->ns.push_back(batch(op.op, count, r->name.c_str(), r->repeat));
  }

  void point(const Op& op, size_t bytes) {
    const size_t count = count_of(op.op, bytes);
    check(moecclPlanForce(comm_, op.op, "auto"), "force", comm_);
    const std::string chosen = info(op.op, count).algorithm;
    std::vector<Runner> runners;
    for (const char* name : op.algorithms) {
      check(moecclPlanForce(comm_, op.op, name), "force", comm_);
      const moecclPlanInfo_t i = info(op.op, count);
      if (std::strcmp(i.algorithm, name) != 0) continue;  // it does not apply
      const double once = batch(op.op, count, name, 3);
      runners.push_back({name, i.predicted_us * 1e3, static_cast<int>(std::clamp(kBatchNs / once, 2.0, 2000.0)), {}});
    }
    std::vector<Runner*> all;
    for (Runner& r : runners) all.push_back(&r);
    race(op, count, all, kRounds);
    Runner* mine = nullptr;
    Runner* flat = nullptr;
    Runner* best = nullptr;
    for (Runner& r : runners) {
      if (r.name == chosen) mine = &r;
      if (r.name == "flat") flat = &r;
      if (best == nullptr || median(r.ns) < median(best->ns)) best = &r;
    }
    if (mine == nullptr) return;
    // The least of several noisy medians is lower than the best one's true time: whoever looks better than the choice
    // must show it again, head to head.
    const auto once_more = [&](Runner* other) {
      mine->ns.clear();
      other->ns.clear();
      race(op, count, {mine, other}, kFinalRounds);
    };
    if (best != mine) once_more(best);
    if (flat != nullptr && flat != mine && flat != best && median(mine->ns) > 1.05 * median(flat->ns)) once_more(flat);
    if (rank_ == 0) judge(op, bytes, *mine, median(best->ns) < median(mine->ns) ? *best : *mine, flat);
  }

  void judge(const Op& op, size_t bytes, const Runner& mine, const Runner& best, const Runner* flat) {
    if (shared->n_points == 4096) return;
    const int n = shared->n_points++;
    const double took = median(mine.ns), least = median(best.ns);
    shared->errors[n] = std::fabs(mine.predicted_ns - took) / took;
    shared->regrets[n] = took / least;
    const bool loses = flat != nullptr && took > 1.05 * median(flat->ns);
    shared->worse_than_flat += loses ? 1 : 0;
    std::printf("%-15s %8zu %d ranks %-34s chose %-8s %9.1f us (predicted %9.1f)  best %-8s %9.1f us  regret %.3f%s\n",
                op.name, bytes, shape_.ranks, shape_.name(), mine.name.c_str(), took / 1e3, mine.predicted_ns / 1e3,
                best.name.c_str(), least / 1e3, took / least, loses ? " slower than flat" : "");
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
      const size_t points = text.find("\"points\": [", at++);
      if (points == std::string::npos || text[points + 11] == ']') continue;
      std::printf("# level fit r2 %.4f\n", r2);
      shared->r2_min = std::min(shared->r2_min, r2);
    }
  }

  Shape shape_;
  int rank_;
  size_t round_ = 0;
  moecclComm_t comm_ = nullptr;
  std::vector<float> in_, out_;
};

bool run_shape(const Shape& shape) {
  std::unique_ptr<moeccl::perf::TwoHosts> hosts;
  if (shape.two_hosts) {
    std::string why;
    hosts = moeccl::perf::TwoHosts::create("1gbit", &why);
    if (hosts == nullptr) {
      std::printf("# two hosts are left out: %s\n", why.c_str());
      return true;
    }
  }
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
      if (hosts != nullptr && !hosts->enter(r * 2 / shape.ranks)) std::_Exit(1);
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

int main(int argc, char** argv) {
  int only = -1;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--prices") == 0) {
      with_profile = false;
    } else if (std::strcmp(argv[i], "--shape") == 0 && i + 1 < argc) {
      only = std::atoi(argv[++i]);
    } else {
      std::fprintf(stderr, "unknown option %s: there are --prices and --shape N\n", argv[i]);
      return 2;
    }
  }
  void* page = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return 1;
  shared = new (page) Shared();
  shared->r2_min = 1;
  for (int i = 0; i < static_cast<int>(std::size(kShapes)); ++i)
    if ((only < 0 || only == i) && !run_shape(kShapes[i])) return 1;
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
