// SPDX-License-Identifier: Apache-2.0
#include "src/calibrate/measure.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ctime>
#include <map>

#include "src/algo/tuning.h"
#include "src/base/clock.h"
#include "src/base/log.h"
#include "src/comm/collective.h"
#include "src/comm/split.h"
#include "src/driver/thread.h"
#include "src/exec/eager.h"
#include "src/plan/fit.h"
#include "src/world/heap.h"

namespace moeccl::comm {
namespace {

constexpr moecclOp_t kMeasured[] = {moecclOpAllReduce, moecclOpAllGather, moecclOpReduceScatter,
                                    moecclOpAllToAll,  moecclOpBroadcast, moecclOpReduce,
                                    moecclOpGather,    moecclOpScatter,   moecclOpAllToAllv};
// Bytes of the larger buffer, coarse first: a small budget covers every algorithm before it covers sizes. kEagerEnd:
// the size where eager operations end, because their times rise steeply up to there (docs/decisions.md).
constexpr uint64_t kEagerEnd = 1;
constexpr uint64_t kSizes[] = {64 << 10, 1 << 10,  4 << 20,   256 << 10, 8 << 10,   kEagerEnd,
                               1 << 20,  16 << 20, 128 << 10, 32 << 10,  512 << 10, 16 << 10,
                               2 << 20,  4 << 10,  8 << 20,   64,        64 << 20};
constexpr uint64_t kElement = sizeof(float);
// A plan's time depends on which pages of memory its buffers happen to have, so each round uses others.
constexpr uint64_t kMemoryBytes = 16 << 20, kPageBytes = 4096;
// A plan that takes this many times as long as the fastest one is not measured more closely: it will not be chosen.
constexpr double kGiveUp = 3;
constexpr uint32_t kMostRepeats = 3000;
// A level that is predicted less well than this is measured again, in at most kTries tries. Links between hosts are
// lines, disturbances are not. Within a host, large messages are faster than a line through small ones: MoNTA's
// r(size).
constexpr double kGoodFit = 0.99;
constexpr int kTries = 12;

double quantile_of(std::vector<double> v, double q) {
  const auto at = v.begin() + static_cast<ptrdiff_t>(q * static_cast<double>(v.size() - 1) + 0.5);
  std::nth_element(v.begin(), at, v.end());
  return *at;
}

// A buffer of the symmetric heap or of ordinary memory.
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

// Restores the communicator's own choice, whatever happens.
class Pin {
 public:
  explicit Pin(Selector& selector) : selector_(selector) {}
  ~Pin() { selector_.unpin(); }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;
  void to(const PlanKey& key, std::shared_ptr<PlanSlot> plan) { selector_.pin(key, std::move(plan)); }

 private:
  Selector& selector_;
};

// Times the plans of one size of one operation, each pinned while it runs.
class PlanTimer {
 public:
  PlanTimer(Communicator& comm, Stopwatch& watch, uint64_t most_bytes, bool heap)
      : comm_(comm), watch_(watch), heap_(heap), most_(most_bytes) {}

  // Each pass uses memory of its own.
  Status measure(uint32_t pass) {
    pass_ = pass;
    const uint64_t size = heap_ ? most_ : std::max(most_, kMemoryBytes);
    const Result<Memory> in = Memory::make(size, heap_), out = Memory::make(size, heap_);
    const char has_memory = in.ok() && out.ok() ? 1 : 0;
    std::vector<char> all(comm_.n_ranks());
    MOECCL_TRY(all_gather_bytes(comm_, &has_memory, 1, all.data()));
    // The heap of some rank is small or full. Buffers there keep prices instead of times.
    if (std::find(all.begin(), all.end(), 0) != all.end()) return {};
    size_ = size;
    for (const uint64_t bytes : kSizes) {
      if (bytes > most_ || (heap_ && bytes < algo::tuning::kAskReach)) continue;
      for (const moecclOp_t op : kMeasured) {
        if (watch_.out_of_time()) return {};
        if (op == moecclOpAllToAllv && (heap_ || bytes < 1024)) continue;
        const uint64_t at = bytes == kEagerEnd ? eager_end(op) : bytes;
        if (at > most_) continue;
        MOECCL_TRY(measure_op(op, at, static_cast<std::byte*>(in->data()), static_cast<std::byte*>(out->data())));
      }
    }
    return {};
  }

  void add_fits(std::vector<plan::PlanFit>& fits) const {
    for (const auto& [where, table] : tables_) {
      const auto [op, block] = where;
      const std::vector<plan::Curve::Point> points = plan::summarize_rounds(table.rounds);
      for (size_t i = 0; i < table.names.size(); ++i) {
        plan::Curve::Point p = i < points.size() ? points[i] : plan::Curve::Point{};
        if (p.ns <= 0) p.ns = p.high_ns = table.first_look[i];
        p.bytes = static_cast<double>(block);
        if (p.ns > 0) add(fits, {op, table.names[i], table.reach, {}}, p);
      }
    }
  }

 private:
  // Returns the size of the larger buffer of the largest operation that can run eagerly.
  uint64_t eager_end(moecclOp_t op) const {
    const uint32_t n = comm_.n_ranks();
    const uint64_t block = transport::kEagerBytes / exec::eager_bytes(op, n, 1);
    return block * std::max(plan::in_blocks(op, n), plan::out_blocks(op, n));
  }

  // Returns the offset of the round's window of `bytes`; windows follow one another.
  uint64_t window(uint64_t bytes, uint32_t round) const {
    const uint64_t stride = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    return round % std::max<uint64_t>(1, size_ / stride) * stride;
  }

  Status measure_op(moecclOp_t op, uint64_t bytes, std::byte* in, std::byte* out) {
    const uint32_t n = comm_.n_ranks();
    const bool is_v = op == moecclOpAllToAllv;
    const uint64_t blocks = is_v ? n : std::max(plan::in_blocks(op, n), plan::out_blocks(op, n));
    const uint64_t count = std::max<uint64_t>(1, bytes / blocks / kElement);
    const uint64_t used = blocks * count * kElement;  // more than `bytes` when there are more blocks than elements
    CollectiveCall call{.op = op, .count = is_v ? 0 : count, .type = moecclFloat32};
    const std::vector<size_t> counts(n, count);
    std::vector<size_t> displs(n);
    for (uint32_t r = 0; r < n; ++r) displs[r] = r * count;
    if (is_v) {
      call.send_counts = call.recv_counts = counts.data();
      call.send_displs = call.recv_displs = displs.data();
    }
    const PlanKey key{op, 0, is_v ? 0 : count, kElement, false};
    const plan::Shape shape = comm_.selector().shape_of(key, heap_);
    std::vector<const char*> names;
    std::vector<Stopwatch::Once> things;
    Pin pin(comm_.selector());
    for (const algo::Algorithm& a : algo::algorithms()) {
      if (a.op != op || !a.applies(shape, comm_.tree()).ok()) continue;
      std::shared_ptr<PlanSlot> plan = comm_.selector().build_named(key, a, heap_);
      names.push_back(plan->eager && !is_v ? plan::kEagerName : a.name);
      things.emplace_back([&, key, plan = std::move(plan)](uint32_t round) {
        pin.to(key, plan);
        call.send = in + window(used, round);
        call.recv = out + window(used, round);
        return run_collective(comm_, call);
      });
    }
    MOECCL_ASSIGN_OR_RETURN(const Stopwatch::Times times, watch_.time(things, kGiveUp, pass_));
    // Tiny sizes round to the same block, and then to the same plans.
    Table& table = tables_[{op, count * kElement}];
    table.names = names;
    table.reach = plan::reach_bits(shape.reach.staging, shape.reach.views, shape.reach.reads);
    table.first_look.resize(names.size());
    for (size_t i = 0; i < names.size(); ++i)
      if (times.ns[i] > 0) table.first_look[i] = times.ns[i];
    table.rounds.insert(table.rounds.end(), times.rounds.begin(), times.rounds.end());
    return {};
  }

  static void add(std::vector<plan::PlanFit>& fits, const plan::PlanFit& what, plan::Curve::Point point) {
    auto it = std::find_if(fits.begin(), fits.end(), [&](const plan::PlanFit& f) {
      return f.op == what.op && f.reach == what.reach && f.algorithm == what.algorithm;
    });
    if (it == fits.end()) it = fits.insert(it, what);
    it->curve.points.push_back(point);
  }

  Communicator& comm_;
  Stopwatch& watch_;
  bool heap_;
  uint64_t most_, size_ = 0;
  uint32_t pass_ = 0;

  // The times of all plans of an operation on blocks of one size.
  struct Table {
    std::vector<const char*> names;
    uint8_t reach = 0;
    std::vector<double> first_look;
    std::vector<std::vector<double>> rounds;
  };
  std::map<std::pair<moecclOp_t, uint64_t>, Table> tables_;
};

class LinkTimer {
 public:
  LinkTimer(Communicator& comm, Stopwatch& watch) : comm_(comm), watch_(watch), n_(comm.n_ranks()) {}

  Status measure(plan::Profile& profile) {
    const plan::LevelTree& tree = comm_.tree();
    MOECCL_ASSIGN_OR_RETURN(const Memory memory, Memory::make(kMostBytes, false));
    profile.links.assign(tree.depth(), {});
    for (uint32_t l = 0; l < tree.depth(); ++l) {
      plan::LevelFit fit{tree.levels[l].name, {}};
      uint32_t peer = 1;
      while (peer < n_ && tree.level_between(0, peer) != l) ++peer;
      // Within a host, the clock of cost.h prices copies itself, and only the level's points describe its links. So it
      // is with a pace, which is exactly what the topology states.
      const plan::LinkCost& stated = tree.levels[l].link;
      const bool is_line = stated.bytes_per_ns > 0 && !comm_.paced();
      if (peer < n_) MOECCL_TRY(ping_pong(memory.data(), peer, is_line, fit.curve));
      if (stated.bytes_per_ns > 0) {
        if (!is_line || fit.curve.line.bytes_per_ns <= 0) fit.curve.line = stated;
        profile.links[l] = fit.curve.line;
      }
      profile.levels.push_back(std::move(fit));
    }
    return all_to_alls(profile.all_to_all);
  }

 private:
  static constexpr uint64_t kMostBytes = 2 << 20;
  static constexpr uint64_t kLeastRoom = 128 << 10;  // shorter messages show a latency, and hardly a bandwidth

  // Returns the sizes of messages by which a level is measured. On a line, they fit into the slots of a pair of ranks:
  // longer messages wait for the receiver, once for each round of slots, and would show a line that gets slower with
  // its length.
  Result<std::vector<uint64_t>> sizes(uint32_t peer, bool is_line) {
    std::vector<uint64_t> all = {64,        4 << 10,   32 << 10, 128 << 10, 256 << 10,
                                 512 << 10, 768 << 10, 1 << 20,  3 << 19,   kMostBytes};
    if (!is_line) return all;
    const uint64_t room = comm_.rank() == 0 ? comm_.fabric().message_bytes[peer] * transport::shm::kMessageSlots : 0;
    std::vector<uint64_t> rooms(n_);
    MOECCL_TRY(all_gather_bytes(comm_, &room, sizeof(room), rooms.data()));
    if (rooms[0] < kLeastRoom) return all;
    const uint64_t most = std::min(rooms[0], kMostBytes);
    for (size_t i = 0; i < all.size(); ++i) all[i] = std::max<uint64_t>(1, most * all[i] / kMostBytes);
    return all;
  }

  // Measures half of a round trip between rank 0 and the first rank beyond a level.
  Status ping_pong(void* data, uint32_t peer, bool is_line, plan::Curve& best) {
    MOECCL_ASSIGN_OR_RETURN(const std::vector<uint64_t> level_sizes, sizes(peer, is_line));
    std::vector<Stopwatch::Once> things;
    for (const uint64_t bytes : level_sizes) {
      if (comm_.rank() != 0 && comm_.rank() != peer) {
        things.emplace_back();
        continue;
      }
      things.emplace_back([=, this](uint32_t) -> Status {
        if (comm_.rank() == 0) {
          MOECCL_TRY(message(data, bytes, peer, true));
          return message(data, bytes, peer, false);
        }
        MOECCL_TRY(message(data, bytes, 0, false));
        return message(data, bytes, 0, true);
      });
    }
    // A disturbance is either over before the end of a try, and then each size's least time over all tries is free of
    // it; or it lasts, like the place of the two cores, and then the times of one try belong together.
    std::vector<plan::Curve::Point> least;
    for (const uint64_t bytes : level_sizes) least.push_back({static_cast<double>(bytes), 1e300});
    for (int t = 0; t < kTries && best.r2 < kGoodFit && (t == 0 || !watch_.out_of_time()); ++t) {
      MOECCL_ASSIGN_OR_RETURN(const Stopwatch::Times times, watch_.time_links(things));
      if (t == 0) MOECCL_TRY(watch_.enough(times, "sizes of a link"));
      std::vector<plan::Curve::Point> now = least;
      for (size_t i = 0; i < things.size(); ++i) {
        now[i].ns = times.ns[i] > 0 ? times.ns[i] / 2 : 1e300;
        least[i].ns = std::min(least[i].ns, now[i].ns);
      }
      for (const auto& points : {least, now}) {
        plan::Curve curve = fit_level(points, is_line);
        if (best.points.empty() || curve.r2 > best.r2) best = std::move(curve);
      }
    }
    return {};
  }

  static plan::Curve fit_level(std::vector<plan::Curve::Point> points, bool is_line) {
    std::erase_if(points, [](const plan::Curve::Point& p) { return p.ns >= 1e300; });
    plan::Curve curve = plan::fit_line(points);
    if (!is_line && curve.r2 < kGoodFit) curve.r2 = plan::curve_r2(points);
    return curve;
  }

  Status message(void* data, uint64_t bytes, uint32_t peer, bool is_send) {
    exec::Message m;
    MOECCL_TRY(prepare_message(comm_, data, bytes, moecclUint8, static_cast<int>(peer), is_send, m));
    return comm_.run_message(m);
  }

  // Returns whether ranks a and b meet in the Inter-level AlltoAll of `level`: same parent, other group, same place in
  // it.
  bool meet_between(uint32_t level, uint32_t a, uint32_t b) const {
    const auto& levels = comm_.tree().levels;
    const bool same_parent = level == 0 || levels[level - 1].group_of_rank[a] == levels[level - 1].group_of_rank[b];
    return same_parent && levels[level].group_of_rank[a] != levels[level].group_of_rank[b] &&
           places_[level][a] == places_[level][b];
  }
  // Notes the place of each rank in its group of each level.
  void find_places() {
    for (const auto& level : comm_.tree().levels) {
      std::vector<uint32_t>& places = places_.emplace_back(n_);
      std::vector<uint32_t> so_far(level.n_groups, 0);
      for (uint32_t r = 0; r < n_; ++r) places[r] = so_far[level.group_of_rank[r]]++;
    }
  }

  // Measures HierMoE's figures: alpha and beta of the AlltoAll of all ranks, of those that meet across a level, and of
  // those within its groups. n of Eq. 2, 4 and 5 is what one rank gives, including its own block.
  Status all_to_alls(plan::AllToAllCosts& costs) {
    costs = {};
    if (places_.empty()) find_places();
    MOECCL_TRY(all_to_all([](uint32_t, uint32_t) { return true; }, costs.standard));
    const auto& levels = comm_.tree().levels;
    for (uint32_t l = 0; l + 1 < comm_.tree().depth(); ++l) {
      MOECCL_TRY(all_to_all([&](uint32_t a, uint32_t b) { return a == b || meet_between(l, a, b); },
                            costs.inter.emplace_back()));
      MOECCL_TRY(
          all_to_all([&](uint32_t a, uint32_t b) { return levels[l].group_of_rank[a] == levels[l].group_of_rank[b]; },
                     costs.intra.emplace_back()));
    }
    return {};
  }

  Status all_to_all(const std::function<bool(uint32_t, uint32_t)>& meet, plan::AllToAllCosts::Fit& fit) {
    constexpr uint64_t kBlocks[] = {1 << 10, 8 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10};
    uint32_t most = 1;
    for (uint32_t a = 0; a < n_; ++a) {
      uint32_t met = 0;
      for (uint32_t b = 0; b < n_; ++b) met += meet(a, b) ? 1 : 0;
      most = std::max(most, met);
    }
    // With many ranks, the small blocks suffice for a line, and the large ones would take gigabytes on each rank.
    constexpr uint64_t kMostBuffer = 64 << 20;
    constexpr size_t kFewestBlocks = 3;
    std::vector<uint64_t> blocks;
    for (const uint64_t block : kBlocks)
      if (blocks.size() < kFewestBlocks || most * block <= kMostBuffer) blocks.push_back(block);
    std::vector<std::byte> in(most * blocks.back()), out(in.size());
    std::vector<std::vector<size_t>> counts, displs;
    for (const uint64_t block : blocks) {
      std::vector<size_t>& c = counts.emplace_back(n_, 0);
      std::vector<size_t>& d = displs.emplace_back(n_, 0);
      size_t at = 0;
      for (uint32_t r = 0; r < n_; ++r) {
        if (!meet(comm_.rank(), r)) continue;
        c[r] = block;
        d[r] = at;
        at += block;
      }
    }
    std::vector<Stopwatch::Once> things;
    for (size_t i = 0; i < blocks.size(); ++i) {
      things.emplace_back([&, i](uint32_t) {
        CollectiveCall call{.op = moecclOpAllToAllv, .send = in.data(), .recv = out.data(), .type = moecclUint8};
        call.send_counts = call.recv_counts = counts[i].data();
        call.send_displs = call.recv_displs = displs[i].data();
        return run_collective(comm_, call);
      });
    }
    MOECCL_ASSIGN_OR_RETURN(const Stopwatch::Times times, watch_.time(things, 0, 0));
    MOECCL_TRY(watch_.enough(times, "sizes of a link"));
    std::vector<plan::Curve::Point> points;
    for (size_t i = 0; i < blocks.size(); ++i) points.push_back({static_cast<double>(most * blocks[i]), times.ns[i]});
    const plan::Curve curve = plan::fit_line(points);
    fit = {curve.line, curve.r2};
    return {};
  }

  Communicator& comm_;
  Stopwatch& watch_;
  uint32_t n_;
  std::vector<std::vector<uint32_t>> places_;  // [level][rank]
};

}  // namespace

Stopwatch::Stopwatch(Communicator& comm, const CalibrateOptions& options)
    : comm_(comm), options_(options), start_ns_(now_ns()) {}

Result<double> Stopwatch::batch(const Once& once, const Batch& b) {
  // After this, the round's memory is in the caches as far as it fits, including both halves of the staging.
  for (int i = 0; i < 2 && once; ++i) MOECCL_TRY(once(b.round));
  // All ranks leave this exchange together.
  uint32_t mine_here = 1;
  std::vector<uint32_t> all_here(comm_.n_ranks());
  MOECCL_TRY(all_gather_bytes(comm_, &mine_here, sizeof(mine_here), all_here.data()));
  const int64_t begin = now_ns();
  for (uint32_t i = 0; i < b.repeat && once; ++i) MOECCL_TRY(once(b.round));
  const int64_t end = now_ns();
  const double mine[2] = {static_cast<double>(end - begin) / b.repeat, static_cast<double>(end - start_ns_) / 1e6};
  if (!once) {
    const double sleep_ns = std::min(0.8 * b.expected_ns * b.repeat, 1e9);
    driver::sleep_ns(static_cast<int64_t>(std::max(0.0, sleep_ns - 1)));
  }
  std::vector<double> all(size_t{comm_.n_ranks()} * 2);
  MOECCL_TRY(all_gather_bytes(comm_, mine, sizeof(mine), all.data()));
  took_ms_ = all[1];
  out_of_time_ = took_ms_ > share_ * options_.budget_ms;
  double slowest = 0;
  for (size_t r = 0; r < comm_.n_ranks(); ++r) slowest = std::max(slowest, all[2 * r]);
  return slowest;
}

Result<Stopwatch::Times> Stopwatch::rounds(const std::vector<Once>& things, const Rounds& how) {
  Times times;
  times.ns.assign(things.size(), 0);
  std::vector<uint32_t> repeats(things.size(), 0);
  double fastest = 1e300;
  for (size_t i = 0; i < things.size() && took_ms_ <= options_.budget_ms; ++i) {
    MOECCL_ASSIGN_OR_RETURN(const double first, batch(things[i], {how.first, 2, 0}));
    MOECCL_ASSIGN_OR_RETURN(const double second, batch(things[i], {how.first + 1, 3, first}));
    times.ns[i] = std::max(1.0, std::min(first, second));
    fastest = std::min(fastest, times.ns[i]);
  }
  for (size_t i = 0; i < things.size(); ++i) {
    if (times.ns[i] <= 0 || (how.give_up > 0 && times.ns[i] > how.give_up * fastest)) continue;
    repeats[i] =
        static_cast<uint32_t>(std::clamp<double>(how.batch_ms * 1e6 / std::max(times.ns[i], 50.0), 2.0, kMostRepeats));
  }
  std::vector<std::vector<double>> samples(things.size());
  for (int round = 0; round < how.n && !out_of_time_; ++round) {
    times.rounds.emplace_back(things.size(), 0.0);
    for (size_t i = 0; i < things.size() && !out_of_time_; ++i) {
      if (repeats[i] == 0) continue;
      MOECCL_ASSIGN_OR_RETURN(const double ns,
                              batch(things[i], {how.first + static_cast<uint32_t>(round), repeats[i], times.ns[i]}));
      samples[i].push_back(ns);
      times.rounds.back()[i] = std::max(ns, 1.0);
    }
  }
  for (size_t i = 0; i < things.size(); ++i)
    if (!samples[i].empty()) times.ns[i] = std::max(quantile_of(samples[i], how.quantile), 1.0);
  times.out_of_time = out_of_time_;
  return times;
}

Status Stopwatch::enough(const Times& times, const char* what) const {
  const auto n = std::count_if(times.ns.begin(), times.ns.end(), [](double ns) { return ns > 0; });
  if (n == std::ssize(times.ns)) return {};
  // Links get a quarter of the budget, and this was one of several.
  return error(moecclInvalidArgument,
               "calibration: the budget of {:.0f} ms ended when {} of {} {} were timed: give at least {:.0f} ms",
               options_.budget_ms, n, times.ns.size(), what,
               4 * took_ms_ * static_cast<double>(times.ns.size()) / static_cast<double>(std::max<ptrdiff_t>(1, n)));
}

Result<Stopwatch::Times> Stopwatch::time(const std::vector<Once>& things, double give_up, uint32_t pass) {
  const auto n = static_cast<uint32_t>(options_.n_batches);
  return rounds(things, {options_.n_batches, pass * n, options_.batch_ms, 0.5, give_up});
}

Result<Stopwatch::Times> Stopwatch::time_links(const std::vector<Once>& things) {
  return rounds(things, {7 * options_.n_batches, 0, options_.batch_ms / 4, 0.25, 0});
}

Status measure_links(Communicator& comm, Stopwatch& watch, plan::Profile& profile) {
  return LinkTimer(comm, watch).measure(profile);
}

Status measure_plans(Communicator& comm, Stopwatch& watch, const CalibrateOptions& options, plan::Profile& profile) {
  PlanTimer ordinary(comm, watch, options.max_bytes, false), heap(comm, watch, options.max_bytes, true);
  for (uint32_t pass = 0; pass < static_cast<uint32_t>(options.n_passes); ++pass) {
    MOECCL_TRY(ordinary.measure(pass));
    if (comm.selector().asks_reach()) MOECCL_TRY(heap.measure(pass));
  }
  std::vector<plan::PlanFit> fits;
  ordinary.add_fits(fits);
  heap.add_fits(fits);
  for (plan::PlanFit& f : fits) {
    if (f.curve.points.size() < 2) continue;
    std::sort(f.curve.points.begin(), f.curve.points.end(),
              [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
    f.curve = plan::fit_line(f.curve.points);
    profile.plans.push_back(std::move(f));
  }
  return {};
}

}  // namespace moeccl::comm
