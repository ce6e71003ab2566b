#include "src/comm/calibrate.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "src/base/clock.h"
#include "src/base/env.h"
#include "src/base/hash.h"
#include "src/base/log.h"
#include "src/comm/collective.h"
#include "src/comm/heap.h"
#include "src/comm/simulate.h"
#include "src/comm/split.h"
#include "src/plan/fit.h"
#include "src/plan/profile_file.h"
#include "topology/synthetic.h"

namespace moeccl::comm {

namespace {

constexpr moecclOp_t kMeasured[] = {moecclOpAllReduce, moecclOpAllGather, moecclOpReduceScatter, moecclOpAllToAll,
                                    moecclOpBroadcast, moecclOpReduce,    moecclOpGather,        moecclOpScatter};
// Bytes of the larger buffer, coarse first: three sizes make a curve.
constexpr uint64_t kSizes[] = {64 << 10,  1 << 10,  4 << 20,   256 << 10, 8 << 10, 1 << 20, 16 << 20,
                               128 << 10, 32 << 10, 512 << 10, 2 << 20,   8 << 20, 64,      64 << 20};
constexpr size_t kFewestPoints = 3;
constexpr uint64_t kElement = sizeof(float);
// Buffers of the heap are worth asking for from here on: kAskReachBytes of selection.cc.
constexpr uint64_t kHeapFrom = 256 << 10;

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// A buffer of the symmetric heap, or ordinary memory.
class Memory {
 public:
  static Result<Memory> make(uint64_t bytes, bool heap) {
    Memory m;
    if (heap) {
      MOECCL_ASSIGN_OR_RETURN(SymmetricHeap* const from, SymmetricHeap::process_heap());
      MOECCL_ASSIGN_OR_RETURN(m.data_, from->allocate(bytes));
      m.heap_ = from;
    } else {
      m.own_.resize(bytes / kElement + 16);
      m.data_ = m.own_.data();
    }
    std::memset(m.data_, 0, bytes);
    return m;
  }
  Memory(Memory&& o) noexcept
      : data_(std::exchange(o.data_, nullptr)), heap_(std::exchange(o.heap_, nullptr)), own_(std::move(o.own_)) {}
  Memory& operator=(Memory&&) = delete;
  ~Memory() {
    if (heap_ == nullptr || data_ == nullptr) return;
    if (const Status s = heap_->release(data_); !s.ok()) log(LogLevel::kWarn, "calibration: {}", s.message());
  }
  void* data() const { return data_; }

 private:
  Memory() = default;
  void* data_ = nullptr;
  SymmetricHeap* heap_ = nullptr;
  std::vector<float> own_;
};

struct Sample {
  double ns = 0;  // slowest rank's
  bool out_of_time = false;
};

class Calibrator {
 public:
  Calibrator(Communicator& comm, const CalibrateOptions& options)
      : comm_(comm), options_(options), n_(comm.n_ranks()), start_ns_(now_ns()) {}

  Result<plan::Profile> run() {
    plan::Profile profile = comm_.selector().profile();
    profile.plans.clear();
    profile.levels.clear();
    profile.n_ranks = n_;
    profile.tree_hash = comm_.tree().hash();
    MOECCL_TRY(measure_levels(profile));
    MOECCL_TRY(measure_plans(false));
    if (comm_.selector().asks_reach()) MOECCL_TRY(measure_plans(true));
    for (Fit& f : fits_) {
      if (f.points.size() < kFewestPoints) continue;
      std::sort(f.points.begin(), f.points.end(), [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
      profile.plans.push_back({f.op, f.algorithm, f.reach, plan::fit_line(f.points), 1.0});
    }
    return profile;
  }

 private:
  struct Fit {
    moecclOp_t op;
    std::string algorithm;
    uint8_t reach;
    std::vector<plan::Curve::Point> points;
  };

  // What each rank took, and rank 0's clock: all see the same numbers and go on alike.
  Result<Sample> agree(double mine_ns) {
    const double mine[2] = {mine_ns, static_cast<double>(now_ns() - start_ns_) / 1e6};
    std::vector<double> all(size_t{n_} * 2);
    MOECCL_TRY(all_gather_bytes(comm_, mine, sizeof(mine), all.data()));
    Sample s;
    for (uint32_t r = 0; r < n_; ++r) s.ns = std::max(s.ns, all[size_t{r} * 2]);
    s.out_of_time = all[1] > options_.budget_ms;
    return s;
  }

  // Median over batches of `once`, per run.
  template <class Once>
  Result<Sample> timed(Once&& once) {
    std::vector<double> medians;
    Sample s;
    uint32_t repeat = 1;
    for (int batch = -1; batch < options_.n_batches; ++batch) {
      const int64_t begin = now_ns();
      for (uint32_t i = 0; i < repeat; ++i) MOECCL_TRY(once());
      MOECCL_ASSIGN_OR_RETURN(s, agree(static_cast<double>(now_ns() - begin) / repeat));
      if (batch < 0) {  // warms up, and says how many make a batch
        MOECCL_TRY(once());
        repeat = static_cast<uint32_t>(std::clamp(options_.batch_ms * 1e6 / std::max(s.ns, 100.0), 1.0, 200.0));
      } else {
        medians.push_back(s.ns);
      }
    }
    s.ns = median(medians);
    return s;
  }

  Status measure_plans(bool heap) {
    const uint64_t most = options_.max_bytes;
    MOECCL_ASSIGN_OR_RETURN(const Memory in, Memory::make(most, heap));
    MOECCL_ASSIGN_OR_RETURN(const Memory out, Memory::make(most, heap));
    for (const uint64_t bytes : kSizes) {
      if (bytes > most || (heap && bytes < kHeapFrom)) continue;
      for (const moecclOp_t op : kMeasured) {
        MOECCL_ASSIGN_OR_RETURN(const bool on_time, measure_op(op, bytes, heap, in.data(), out.data()));
        if (!on_time) return {};
      }
    }
    return {};
  }

  Result<bool> measure_op(moecclOp_t op, uint64_t bytes, bool heap, void* in, void* out) {
    const uint64_t blocks = std::max(plan::in_blocks(op, n_), plan::out_blocks(op, n_));
    const uint64_t count = std::max<uint64_t>(1, bytes / blocks / kElement);
    const PlanKey key{op, 0, count, kElement, false};
    const plan::Shape shape = comm_.selector().shape_of(key, heap);
    const uint8_t reach = plan::reach_bits(shape.reach.staging, shape.reach.views, shape.reach.reads);
    for (const algo::Algorithm& a : algo::algorithms()) {
      if (a.op != op || !a.applies(shape, comm_.tree()).ok()) continue;
      exec::Operation operation;
      operation.signature.op = op;
      operation.signature.type = moecclFloat32;
      operation.signature.count = count;
      operation.element_bytes = kElement;
      operation.input = in;
      operation.output = out;
      comm_.attach(operation, comm_.selector().build_named(key, a, heap), 0, false);
      operation.measured = nullptr;
      MOECCL_ASSIGN_OR_RETURN(const Sample s, timed([&] { return comm_.run_in_turn(comm_.take_ticket(), operation); }));
      add(op, a.name, reach, {static_cast<double>(count * kElement), s.ns});
      if (s.out_of_time) return false;
    }
    return true;
  }

  void add(moecclOp_t op, const char* algorithm, uint8_t reach, plan::Curve::Point point) {
    auto it = std::find_if(fits_.begin(), fits_.end(),
                           [&](const Fit& f) { return f.op == op && f.reach == reach && f.algorithm == algorithm; });
    if (it == fits_.end()) it = fits_.insert(it, {op, algorithm, reach, {}});
    for (const plan::Curve::Point& p : it->points)
      if (p.bytes == point.bytes) return;  // tiny sizes round to the same block
    it->points.push_back(point);
  }

  // Half of a round trip between rank 0 and the first rank beyond each level.
  Status measure_levels(plan::Profile& profile) {
    constexpr uint64_t kLevelSizes[] = {64, 4 << 10, 32 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20};
    MOECCL_ASSIGN_OR_RETURN(const Memory memory, Memory::make(2 << 20, false));
    profile.links.assign(comm_.tree().depth(), {});
    for (uint32_t l = 0; l < comm_.tree().depth(); ++l) {
      plan::LevelFit fit{comm_.tree().levels[l].name, {}};
      uint32_t peer = 1;
      while (peer < n_ && comm_.tree().level_between(0, peer) != l) ++peer;
      std::vector<plan::Curve::Point> points;
      for (const uint64_t bytes : kLevelSizes) {
        if (peer >= n_) break;
        const auto once = [&]() -> Status {
          if (comm_.rank() == 0) {
            MOECCL_TRY(message(memory.data(), bytes, peer, true));
            return message(memory.data(), bytes, peer, false);
          }
          if (comm_.rank() != peer) return {};
          MOECCL_TRY(message(memory.data(), bytes, 0, false));
          return message(memory.data(), bytes, 0, true);
        };
        MOECCL_ASSIGN_OR_RETURN(const Sample s, timed(once));
        points.push_back({static_cast<double>(bytes), s.ns / 2});
      }
      fit.curve = plan::fit_line(points);
      profile.levels.push_back(std::move(fit));
      // Paced links keep the figures that they are paced with; within a host the clock of cost.h prices copies itself.
      profile.links[l] = comm_.tree().levels[l].link;
    }
    return {};
  }

  Status message(void* data, uint64_t bytes, uint32_t peer, bool is_send) {
    exec::Message m;
    MOECCL_TRY(prepare_message(comm_, data, bytes, moecclUint8, static_cast<int>(peer), is_send, m));
    return comm_.run_message(m);
  }

  Communicator& comm_;
  CalibrateOptions options_;
  uint32_t n_;
  int64_t start_ns_;
  std::vector<Fit> fits_;
};

std::string cache_path(const Communicator& comm) {
  std::string folder;
  if (const char* xdg = std::getenv("XDG_CACHE_HOME"); xdg != nullptr && *xdg == '/') {
    folder = xdg;
  } else if (const char* home = std::getenv("HOME"); home != nullptr && *home == '/') {
    folder = std::string(home) + "/.cache";
  } else {
    return "";
  }
  return format("{}/moeccl/{:016x}-{}x{}.json", folder, hash_combine(comm.tree().hash(), comm.paced() ? 1 : 0),
                comm.n_ranks(), comm.selector().profile().cores);
}

// Rank 0's text on all ranks.
Result<std::string> from_rank_0(Communicator& comm, const std::string& text) {
  uint64_t size = text.size();
  std::vector<uint64_t> sizes(comm.n_ranks());
  MOECCL_TRY(all_gather_bytes(comm, &size, sizeof(size), sizes.data()));
  std::string all(sizes[0], '\0');
  if (sizes[0] == 0) return all;
  exec::Operation op;
  MOECCL_TRY(prepare_collective(
      comm, {.op = moecclOpBroadcast, .send = text.data(), .recv = all.data(), .count = sizes[0], .type = moecclUint8},
      op));
  MOECCL_TRY(comm.run_in_turn(comm.take_ticket(), op));
  return all;
}

}  // namespace

Result<plan::Profile> calibrate(Communicator& comm, const CalibrateOptions& options) {
  MOECCL_TRY(comm.usable());
  return Calibrator(comm, options).run();
}

Status use_profile(Communicator& comm, const plan::Profile& profile, Status why) {
  struct Word {
    uint64_t hash;
    uint64_t failed;
  };
  const Word mine{profile.hash(), why.ok() ? 0u : 1u};
  std::vector<Word> all(comm.n_ranks());
  MOECCL_TRY(all_gather_bytes(comm, &mine, sizeof(mine), all.data()));
  MOECCL_TRY(std::move(why));
  for (uint32_t r = 0; r < comm.n_ranks(); ++r)
    if (all[r].failed != 0) return error(moecclRemoteError, "rank {} has no profile: see its own error", r);
  for (uint32_t r = 0; r < comm.n_ranks(); ++r) {
    if (all[r].hash != all[0].hash)
      return error(moecclMismatch,
                   "ranks 0 and {} were given different profiles ({:016x} and {:016x}): give all ranks the same file",
                   r, all[0].hash, all[r].hash);
  }
  comm.selector().set_profile(profile);
  return {};
}

Status load_profile(Communicator& comm, const std::string& path) {
  const auto read = [&]() -> Result<plan::Profile> {
    MOECCL_ASSIGN_OR_RETURN(const std::string text, read_file(path));
    MOECCL_ASSIGN_OR_RETURN(plan::Profile profile, plan::read_profile(text, path));
    MOECCL_TRY(plan::profile_fits(profile, comm.tree()));
    return profile;
  };
  Result<plan::Profile> profile = read();
  return use_profile(comm, profile.ok() ? *profile : plan::Profile(), profile.status());
}

Status save_profile(const Communicator& comm, const std::string& path) {
  const std::string text = plan::write_profile(
      comm.selector().profile(), comm.paced() ? "EMULATED: links are paced" : "", topology::to_synthetic(comm.tree()));
  // Written beside and renamed, so that no reader sees half a file.
  const std::string beside = format("{}.{:x}.tmp", path, hash_combine(static_cast<uint64_t>(now_ns()), comm.rank()));
  std::ofstream out(beside, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  if (!out) return error(moecclSystemError, "{}: cannot be written: {}", beside, std::strerror(errno));
  std::error_code failure;
  std::filesystem::rename(beside, path, failure);
  if (!failure) return {};
  std::filesystem::remove(beside, failure);
  return error(moecclSystemError, "{}: cannot be replaced", path);
}

Status profile_at_init(Communicator& comm) {
  if (!env().profile.empty()) return load_profile(comm, env().profile);
  if (env().calibrate_ms <= 0 || comm.n_ranks() < 2) return {};
  const std::string path = cache_path(comm);
  std::string text;
  if (comm.rank() == 0 && !path.empty()) {
    if (Result<std::string> read = read_file(path); read.ok()) text = *read;
  }
  MOECCL_ASSIGN_OR_RETURN(text, from_rank_0(comm, text));
  if (!text.empty()) {
    Result<plan::Profile> cached = plan::read_profile(text, path);
    if (cached.ok() && cached->n_ranks == comm.n_ranks() && cached->tree_hash == comm.tree().hash())
      return use_profile(comm, *cached, {});
    log(LogLevel::kWarn, "the cached profile is not used: {}",
        cached.ok() ? "another topology" : cached.status().message());
  }
  CalibrateOptions options;
  options.budget_ms = static_cast<double>(env().calibrate_ms);
  MOECCL_ASSIGN_OR_RETURN(const plan::Profile profile, calibrate(comm, options));
  MOECCL_TRY(use_profile(comm, profile, {}));
  if (comm.rank() != 0 || path.empty()) return {};
  std::error_code failure;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), failure);
  if (const Status s = save_profile(comm, path); !s.ok()) log(LogLevel::kWarn, "profile cache: {}", s.message());
  return {};
}

}  // namespace moeccl::comm
