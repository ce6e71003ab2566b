// SPDX-License-Identifier: Apache-2.0
// Measures how well plans are chosen: calibrates, then measures every algorithm at sizes between those that were
// calibrated, and compares predictions with times, and the choice with the best. The last line is
//   regret geomean=G worst=W error_median=E r2_min=R points=N
// A point is a collective at a size, a number of ranks and a shape of the topology. Paced shapes and the two hosts,
// which are network namespaces joined at 1 Gbit/s, are EMULATED; without root the hosts are left out with a message.
//   plan_accuracy [--prices] [--shape N] [--op NAME] [--size BYTES]... [--candidates]
// --prices: do not calibrate, so that the regret is that of the prices alone. --shape: only the N-th shape. --op,
// --size: only these points. --candidates: print every plan's times, with the least and most in brackets; for finalists
// these are the last ones.
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
#include <sstream>
#include <string>
#include <vector>

#include "perf/common/hosts.h"
#include "perf/common/text.h"

namespace {

struct Shape {
  int ranks;
  const char* topology;  // null: one or two hosts; else paced
  bool two_hosts = false;
  size_t most = 3 << 20;  // bytes of the larger buffer
  const char* name() const { return topology ? topology : two_hosts ? "two hosts, 1 Gbit/s, TCP" : "one host"; }
};
constexpr Shape kShapes[] = {
    {2, nullptr}, {4, nullptr}, {4, "node:2(bw=1GB/s,lat=20us) gpu:2"}, {8, nullptr}, {4, nullptr, true, 3 << 17}};
struct Op {
  moecclOp_t op;
  std::vector<std::string> algorithms = {};
  const char* name() const { return moecclOpName(op); }
};
// Finds every algorithm that the library has for these operations.
std::vector<Op> all_ops() {
  std::vector<Op> ops = {{moecclOpAllReduce}, {moecclOpAllGather}, {moecclOpReduceScatter}, {moecclOpAllToAll},
                         {moecclOpBroadcast}, {moecclOpReduce},    {moecclOpGather},        {moecclOpScatter}};
  for (Op& op : ops) {
    char names[512];
    moecclPlanList(op.op, names, sizeof(names), nullptr);
    std::stringstream list(names);
    for (std::string name; std::getline(list, name, ',');) op.algorithms.push_back(name);
  }
  return ops;
}
const std::vector<Op> kOps = all_ops();
// Sizes between those that calibration takes.
constexpr size_t kSizes[] = {3 << 9, 3 << 12, 3 << 14, 3 << 15, 3 << 16, 3 << 17, 3 << 19, 3 << 20};
// The time of a plan depends on which pages its buffers happen to have, so rounds take turns through this much memory.
constexpr size_t kMemory = 16 << 20;
constexpr int kMaxRanks = 8, kRounds = 3, kFinalRounds = 5, kFinalSweeps = 2, kDoubtSweeps = 4;
constexpr int kMostTrials = 3, kTrialRuns = 120;
constexpr double kMayBeBest = 1.5;  // times the first median of the fastest one
constexpr double kDoubtful = 1.05;  // a point that loses this much is looked at again, at other times
constexpr double kBatchNs = 1e6;    // as in calibration
constexpr double kLeastRuns = 8;    // of a batch, so that the transition between runs counts for less, as in the trials
constexpr double kGoOnNs = 5e8;
constexpr const char* kAuto = "auto";  // what users get: the current choice

// Ranks are forked processes that share this page, which has a barrier and each rank's time.
struct Shared {
  moecclUniqueId id;
  volatile int id_ready;
  int arrived, turn;
  double ns[kMaxRanks];
  double errors[4096], regrets[4096], r2_min;
  int n_points, worse_than_flat, is_flat, flat_worse_than_flat;
  int failed;
};
Shared* shared;
bool with_profile = true, with_candidates = false;
const char* only_op = nullptr;
std::vector<size_t> sizes(std::begin(kSizes), std::end(kSizes));

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

// Returns the slowest rank's value, on all ranks.
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
    std::vector<Point> points;
    for (const Op& op : kOps) {
      if (only_op != nullptr && std::strcmp(only_op, op.name()) != 0) continue;
      for (const size_t bytes : sizes)
        if (bytes <= shape_.most) points.push_back(ask(op, bytes));
    }
    run_points(points);
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
  // Returns the slowest rank's time of one run of `algorithm`.
  double batch(moecclOp_t op, size_t count, const char* algorithm, int repeat) {
    check(moecclPlanForce(comm_, op, algorithm), "force", comm_);
    for (int i = 0; i < 2; ++i) check(call(op, count), "warm up", comm_);
    barrier(shape_.ranks);
    // Ranks that sleep in the barrier wake far apart, so an operation of the library itself lets them start together.
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
  struct Point {
    const Op* op;
    size_t bytes, count;
    std::string chosen;
    std::vector<Runner> runners;
    Runner* find(const std::string& name) {
      const auto it = std::find_if(runners.begin(), runners.end(), [&](const Runner& r) { return r.name == name; });
      return it == runners.end() ? nullptr : &*it;
    }
    Runner& fastest() {
      const auto time = [](const Runner& r) { return r.ns.empty() ? 1e300 : median(r.ns); };
      return *std::min_element(runners.begin(), runners.end(),
                               [&](const Runner& a, const Runner& b) { return time(a) < time(b); });
    }
  };

  // Returns the choice and its rivals before anything is measured.
  Point ask(const Op& op, size_t bytes) {
    Point p{&op, bytes, count_of(op.op, bytes), {}, {}};
    check(moecclPlanForce(comm_, op.op, "auto"), "force", comm_);
    p.chosen = info(op.op, p.count).algorithm;
    for (const std::string& name : op.algorithms) {
      const moecclResult_t forced = moecclPlanForce(comm_, op.op, name.c_str());
      if (forced == moecclUnsupported) continue;  // it can never run here
      check(forced, "force", comm_);
      const moecclPlanInfo_t i = info(op.op, p.count);
      if (name == i.algorithm) p.runners.push_back({name, i.predicted_us * 1e3, 0, {}});
    }
    p.runners.push_back({kAuto, 0, 0, {}});
    return p;
  }
  // Runs the library's own trial of close plans, as in a program's first operations of this size. It may change the
  // choice.
  void settle(Point& p) {
    check(moecclPlanForce(comm_, p.op->op, "auto"), "force", comm_);
    for (int i = 0; i < kMostTrials && info(p.op->op, p.count).trial == 1; ++i)
      for (int k = 0; k < kTrialRuns; ++k) check(call(p.op->op, p.count), "try", comm_);
    note_choice(p);
  }
  // In a program that runs for a second, close plans are tried again: after this many operations of a class.
  void go_on(Point& p) {
    check(moecclPlanForce(comm_, p.op->op, "auto"), "force", comm_);
    constexpr int kAgain = 8192 + 400;
    const double ns = median(p.find(kAuto)->ns);
    if (ns * kAgain > kGoOnNs) return;
    for (int i = 0; i < kAgain; ++i) check(call(p.op->op, p.count), "go on", comm_);
    note_choice(p);
  }
  void note_choice(Point& p) {
    const moecclPlanInfo_t i = info(p.op->op, p.count);
    p.chosen = i.algorithm;
    p.find(kAuto)->predicted_ns = i.predicted_us * 1e3;
  }

  // Alternates, so that a disturbance affects all of them; every other round runs backwards.
  void race(Point& p, std::vector<Runner*> runners, int rounds) {
    for (Runner* r : runners)
      if (r->repeat == 0)
        r->repeat =
            static_cast<int>(std::clamp(kBatchNs / batch(p.op->op, p.count, r->name.c_str(), 3), kLeastRuns, 2000.0));
    for (int i = 0; i < rounds; ++i, ++round_) {
      for (Runner* r : runners) r->ns.push_back(batch(p.op->op, p.count, r->name.c_str(), r->repeat));
      std::reverse(runners.begin(), runners.end());
    }
  }

  // Sweeps over the whole grid, so that each point is seen at times that are seconds apart. First all plans run, then
  // those that may be the best. The least of several noisy medians is lower than the best one's true time, so a plan
  // that looks better than the choice must show it again, in sweeps that did not make it the best. A point that loses
  // then is raced in further sweeps, and all its rounds count, because hosts move their cores, and a plan's time
  // changes with them.
  void run_points(std::vector<Point>& points) {
    const auto all_but_slow = [](Point& p, double times) {
      const double limit = times * median(p.fastest().ns);
      std::vector<Runner*> some;
      for (Runner& r : p.runners)
        if (!r.ns.empty() && (r.name == p.chosen || r.name == "flat" || median(r.ns) <= limit)) some.push_back(&r);
      return some;
    };
    for (Point& p : points) {
      std::vector<Runner*> all;
      for (Runner& r : p.runners)
        if (r.name != kAuto) all.push_back(&r);
      race(p, all, kRounds);
    }
    for (Point& p : points) race(p, all_but_slow(p, kMayBeBest), kRounds);
    std::vector<std::vector<Runner*>> finals;
    for (Point& p : points) {
      settle(p);
      Runner* const best = &p.fastest();
      std::vector<Runner*>& some = finals.emplace_back();
      for (Runner& r : p.runners)
        if (&r == best || r.name == kAuto || r.name == "flat") some.push_back(&r);
      for (Runner* r : some) r->ns.clear();
      race(p, some, kFinalRounds);
    }
    for (int sweep = 1; sweep < kFinalSweeps; ++sweep)
      for (size_t i = 0; i < points.size(); ++i) race(points[i], finals[i], kFinalRounds);
    std::vector<size_t> doubtful;
    for (size_t i = 0; i < points.size(); ++i)
      if (regret_of(points[i], finals[i]).by > kDoubtful || slower_than_flat(points[i])) doubtful.push_back(i);
    for (int sweep = 0; sweep < kDoubtSweeps; ++sweep)
      for (const size_t i : doubtful) {
        go_on(points[i]);
        race(points[i], finals[i], kFinalRounds);
      }
    for (size_t i = 0; i < points.size(); ++i)
      if (rank_ == 0) judge(points[i], finals[i]);
  }

  // Rounds of a race follow one another within milliseconds, but sweeps within seconds, in which hosts move their
  // cores. Plans are therefore compared round by round, and the median of these ratios counts.
  static double slower_by(const Runner& a, const Runner& b) {
    std::vector<double> ratios;
    for (size_t i = 0; i < a.ns.size(); ++i) ratios.push_back(a.ns[i] / b.ns[i]);
    return median(ratios);
  }

  struct Regret {
    double by = 1;
    const Runner* best = nullptr;
  };
  // All ranks have the same times, and therefore the same regret.
  static Regret regret_of(Point& p, const std::vector<Runner*>& finals) {
    const Runner& mine = *p.find(kAuto);
    Regret regret{1, &mine};
    for (const Runner* r : finals) {
      if (r->name == p.chosen) continue;  // the same plan
      const double by = slower_by(mine, *r);
      if (by > regret.by) regret = {by, r};
    }
    return regret;
  }

  static bool slower_than_flat(Point& p) {
    const Runner* flat = p.find("flat");
    return flat != nullptr && slower_by(*p.find(kAuto), *flat) > kDoubtful;
  }

  void judge(Point& p, const std::vector<Runner*>& finals) {
    if (shared->n_points == 4096) return;
    const Runner& mine = *p.find(kAuto);
    const auto [regret, best] = regret_of(p, finals);
    const int n = shared->n_points++;
    const double took = median(mine.ns), least = median(best->ns);
    shared->errors[n] = std::fabs(mine.predicted_ns - took) / took;
    shared->regrets[n] = regret;
    // Where flat itself is the choice, the same count shows how often the machine alone makes such a difference.
    const bool is_flat = p.chosen == "flat";
    const bool slower = slower_than_flat(p);
    const bool loses = slower && !is_flat;
    shared->worse_than_flat += loses ? 1 : 0;
    shared->is_flat += is_flat ? 1 : 0;
    shared->flat_worse_than_flat += slower && is_flat ? 1 : 0;
    std::printf("%-15s %8zu %d ranks %-34s chose %-8s %9.1f us (predicted %9.1f)  best %-8s %9.1f us  regret %.3f%s\n",
                p.op->name(), p.bytes, shape_.ranks, shape_.name(), p.chosen.c_str(), took / 1e3,
                mine.predicted_ns / 1e3, best == &mine ? p.chosen.c_str() : best->name.c_str(), least / 1e3, regret,
                loses    ? " slower than flat"
                : slower ? " flat beside itself"
                         : "");
    for (const Runner& r : p.runners) {
      if (!with_candidates || r.ns.empty()) continue;
      std::vector<double> v = r.ns;
      std::sort(v.begin(), v.end());
      std::printf("#   %-8s %9.1f us (%.1f to %.1f)  predicted %9.1f\n", r.name.c_str(), median(v) / 1e3,
                  v.front() / 1e3, v.back() / 1e3, r.predicted_ns / 1e3);
    }
    std::fflush(stdout);
  }

  // Reads r2 of the levels from the profile's own file. A level that no pair of ranks crosses has no points.
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
      while (__atomic_load_n(&shared->id_ready, __ATOMIC_ACQUIRE) == 0) {
        if (__atomic_load_n(&shared->failed, __ATOMIC_ACQUIRE) != 0) std::_Exit(1);
        usleep(100);
      }
      Rank(shape, r).run(profile);
      std::fflush(stdout);
      std::_Exit(0);
    }
    children.push_back(child);
  }
  // The first rank that fails ends the others' waits, whichever rank it is.
  bool good = true;
  while (!children.empty()) {
    const size_t left = children.size();
    std::erase_if(children, [&good](pid_t child) {
      int status = 0;
      const pid_t ended = waitpid(child, &status, WNOHANG);
      if (ended != 0 && (ended != child || status != 0)) good = false;
      return ended != 0;
    });
    if (!good) __atomic_store_n(&shared->failed, 1, __ATOMIC_RELEASE);
    if (children.size() == left) usleep(1000);
  }
  unlink(profile);
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  int only = -1;
  bool default_sizes = true;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--prices") == 0) {
      with_profile = false;
    } else if (std::strcmp(argv[i], "--candidates") == 0) {
      with_candidates = true;
    } else if (std::strcmp(argv[i], "--op") == 0 && i + 1 < argc) {
      only_op = argv[++i];
      if (std::none_of(kOps.begin(), kOps.end(), [](const Op& op) { return std::strcmp(op.name(), only_op) == 0; })) {
        std::fprintf(stderr, "--op %s: not one of", only_op);
        for (const Op& op : kOps) std::fprintf(stderr, " %s", op.name());
        std::fputc('\n', stderr);
        return 2;
      }
    } else if (std::strcmp(argv[i], "--size") == 0 && i + 1 < argc) {
      const double size = perf::parse_size(argv[++i]);
      if (size < 1) {
        std::fprintf(stderr, "--size %s: not a size: give bytes, or a number with K, M or G\n", argv[i]);
        return 2;
      }
      if (default_sizes) sizes.clear();
      default_sizes = false;
      sizes.push_back(static_cast<size_t>(size));
    } else if (std::strcmp(argv[i], "--shape") == 0 && i + 1 < argc) {
      char* end = nullptr;
      const long shape = std::strtol(argv[++i], &end, 10);
      if (*argv[i] == '\0' || *end != '\0' || shape < 0 || shape >= static_cast<long>(std::size(kShapes))) {
        std::fprintf(stderr, "--shape %s: not one of\n", argv[i]);
        for (size_t k = 0; k < std::size(kShapes); ++k)
          std::fprintf(stderr, "  %zu  %d ranks, %s\n", k, kShapes[k].ranks, kShapes[k].name());
        return 2;
      }
      only = static_cast<int>(shape);
    } else {
      const bool asked = std::strcmp(argv[i], "--help") == 0 || std::strcmp(argv[i], "-h") == 0;
      if (!asked) std::fprintf(stderr, "unknown option, or one without its value: %s\n", argv[i]);
      std::fputs("Usage: plan_accuracy [--prices] [--shape N] [--op NAME] [--size BYTES]... [--candidates]\n",
                 asked ? stdout : stderr);
      return asked ? 0 : 2;
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
  std::printf("# chosen more than 5 %% slower than flat at %d of %d points; flat itself, where chosen, at %d of %d\n",
              shared->worse_than_flat, n - shared->is_flat, shared->flat_worse_than_flat, shared->is_flat);
  std::printf("regret geomean=%.4f worst=%.3f error_median=%.4f r2_min=%.4f points=%d\n", std::exp(log_sum / n), worst,
              median(std::vector<double>(shared->errors, shared->errors + n)), shared->r2_min, n);
  return 0;
}
