// SPDX-License-Identifier: Apache-2.0
// The discrete-event run behind price(): all programs of a plan on a clock.
#pragma once

#include <deque>
#include <queue>
#include <utility>
#include <vector>

#include "src/plan/cost.h"

namespace moeccl::plan {

class CostRun {
 public:
  // Runs the first n_chunks chunks; `When::kLast` applies to the last of these.
  CostRun(const Plan& plan, std::span<const Binding> bindings, const LevelTree& tree, const Profile& profile,
          uint32_t n_chunks);
  void run();

  const Cost& cost() const { return cost_; }

 private:
  static constexpr uint32_t kNone = ~0u;

  // Large plans are bound by the cache lines that a step touches, so a lane points directly to its steps.
  struct Lane {
    const Step* steps = nullptr;
    uint32_t n_steps = 0;
    uint32_t chunk = 0, step = 0;
    LaneKind kind = LaneKind::kMain;
    size_t first = 0;  // of its first step in pair_
  };
  enum class State : uint8_t { kBlocked, kQueued, kRunning, kDone };
  struct Rank {
    State state = State::kBlocked;
    uint32_t core = 0;
    uint32_t lane = 0;  // the lane that runs
    std::vector<Lane> lanes;
    double now = 0;               // while it runs
    double blocked_ns = 0;        // when it blocked
    double switch_ns = 0;         // cost of its last start
    bool resumed = false;         // no signal has been taken since it blocked
    CriticalPath path;            // of the chain that led to `now`
    bool caches_staging = false;  // the data that it stages stays in its core's cache
    double busy_ns[4] = {};
    // How fast it moves bytes: into staging, into Output, and as sources of reductions.
    double copy_rate = 1, output_rate = 1, staging_rate = 1, reduce_rate = 1;
  };
  struct Core {
    uint32_t owner = kNone, last = kNone;
    double free_ns = 0;          // when the last one gave it up
    uint32_t n_active = 0;       // ranks that have not finished
    std::deque<uint32_t> queue;  // ranks that are ready to run
  };
  struct alignas(64) Arrival {  // one cache line, because large plans access arrivals in random order
    double at = 0;
    CriticalPath path;
    uint32_t next = kNone;  // in its channel or in the free list
  };
  // An entry of a program's totals. Signals that it awaits come through its channel, in order. Signals that it sends go
  // to its twin, the receiver's entry.
  struct Pair {
    uint32_t first = kNone, last = kNone;  // signals that were sent and not yet taken
    uint32_t twin = kNone;
    bool awaited = false;
    uint8_t place = 0;       // among the entries of the same peer
    double unsignalled = 0;  // bytes put since the last signal; only in the first entry of a peer
  };
  // The numbers of rows that a row step writes and reads.
  struct Rows {
    double written = 0, read = 0;
  };
  struct Event {
    double at = 0;
    uint64_t number = 0;  // breaks ties, so that prices are the same everywhere
    bool wakes = false;   // true: a rank becomes ready; false: a core's owner continues
    uint32_t id = 0;

    bool operator>(const Event& other) const { return at != other.at ? at > other.at : number > other.number; }
  };

  void set_rates(uint32_t rank, uint32_t ranks_on_host);
  void number_pairs();
  void number_steps(uint32_t rank, std::vector<uint32_t>& sends, std::vector<uint32_t>& awaits);
  void push(double at, bool wakes, uint32_t id);
  void wake(uint32_t rank, double at);
  void start(uint32_t core, uint32_t rank, double at, bool handed_over);
  void release(uint32_t core, double at);
  void go_on(uint32_t core);
  // Does one step of the rank's lanes, unless others must go first: they must not be overtaken where they could be met.
  enum class Turn : uint8_t { kDone, kPaused, kBlocked };
  Turn advance(uint32_t rank);
  bool others_first(double now) const { return !events_.empty() && events_.top().at < now; }
  bool occupies(const Lane& lane, const Step& step) const;
  void block_or_end(uint32_t rank);
  void skip(Lane& lane) const;  // advances to the next step that runs at the lane's chunk

  bool take(uint32_t rank, const Lane& lane, const Step& step);
  void send(uint32_t rank, const Lane& lane, const Step& step);
  void move(uint32_t rank, const Lane& lane, const Step& step);
  void move_rows(uint32_t rank, const Lane& lane, const Step& step);
  static Rows rows_of(const Binding& b, const Step& step, uint32_t chunk);
  void work(uint32_t rank, double ns, double CriticalPath::*part);
  void transfer(uint32_t from, uint32_t to, double bytes);
  void put(uint32_t rank, const Lane& lane, uint32_t to, double bytes);
  double occupy(uint32_t level, uint32_t from, uint32_t to, double bytes, double now);

  const Plan& plan_;
  std::span<const Binding> bindings_;
  const LevelTree& tree_;
  const Profile& profile_;
  uint32_t n_chunks_;
  // If true, ranks run on to where they may meet others, on a link or for lack of a signal. Otherwise they stop after
  // each step, which settles ties among ranks that run alike more evenly but takes longer: plans of counts have
  // millions of steps.
  bool runs_on_;
  std::vector<LinkCost> links_;                        // [depth + 1], the last one for a rank itself
  std::vector<std::vector<double>> egress_, ingress_;  // [level][group]: when the uplink is free
  std::vector<std::vector<double>> used_;              // [level][group]: how long the uplink was sending
  std::vector<Rank> ranks_;
  std::vector<Core> cores_;
  std::vector<size_t> first_pair_;  // [n_ranks] into pairs_
  std::vector<Pair> pairs_;         // of all programs
  std::vector<uint32_t> pair_;      // [steps of all lanes]; kNone: the step does not concern a peer
  std::vector<Arrival> arrivals_;
  uint32_t free_arrival_ = kNone;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  uint64_t n_events_ = 0;
  Cost cost_;
};

}  // namespace moeccl::plan
