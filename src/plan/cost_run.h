// The discrete-event run behind price(): all programs of a plan on a clock.
#pragma once

#include <deque>
#include <queue>
#include <unordered_map>
#include <utility>
#include <vector>

#include "src/plan/cost.h"

namespace moeccl::plan {

class CostRun {
 public:
  // Runs the first n_chunks chunks; `When::kLast` is the last of these.
  CostRun(const Plan& plan, std::span<const Binding> bindings, const LevelTree& tree, const Profile& profile,
          uint32_t n_chunks);
  void run();

  const Cost& cost() const { return cost_; }

 private:
  static constexpr uint32_t kNone = ~0u;

  struct Lane {
    uint32_t chunk = 0, step = 0;
  };
  enum class State : uint8_t { kBlocked, kQueued, kRunning, kDone };
  struct Rank {
    State state = State::kBlocked;
    uint32_t core = 0;
    uint32_t lane = 0;  // the one that runs
    std::vector<Lane> lanes;
    double now = 0;         // while it runs
    double queued_ns = 0;   // since when it could run
    double blocked_ns = 0;  // when it blocked
    double switch_ns = 0;   // what its last start cost
    bool resumed = false;   // no signal has been taken since it was blocked
    CriticalPath path;      // of the chain that led to `now`
    double busy_ns[4] = {};
    // How fast it moves bytes: into staging, into Output, and as sources of reductions.
    double copy_rate = 1, output_rate = 1, staging_rate = 1, reduce_rate = 1;
  };
  struct Core {
    uint32_t owner = kNone, last = kNone;
    uint32_t n_active = 0;       // ranks that have not finished
    std::deque<uint32_t> queue;  // ranks that could run
  };
  struct Arrival {
    double at = 0;
    CriticalPath path;
  };
  struct Channel {
    std::vector<Arrival> sent;
    bool awaited = false;
  };
  struct Event {
    double at = 0;
    uint64_t number = 0;  // breaks ties, so that prices are the same everywhere
    bool wakes = false;   // a rank becomes ready; else a core's owner goes on
    uint32_t id = 0;

    bool operator>(const Event& other) const { return at != other.at ? at > other.at : number > other.number; }
  };

  void set_rates(uint32_t rank, uint32_t ranks_on_host);
  void push(double at, bool wakes, uint32_t id);
  void wake(uint32_t rank, double at);
  void start(uint32_t core, uint32_t rank, double at, bool handed_over);
  void release(uint32_t core, double at);
  void go_on(uint32_t core);
  // Does one step of the rank's lanes; false when all wait or have ended.
  bool advance(uint32_t rank);
  void block_or_end(uint32_t rank);
  void skip(uint32_t rank, Lane& lane, uint32_t index);  // to the next step that runs at the lane's chunk

  const Arrival* arrival(uint32_t rank, const Lane& lane, const Step& step, Channel** channel);
  bool take(uint32_t rank, const Lane& lane, const Step& step);
  void send(uint32_t rank, const Step& step);
  void move(uint32_t rank, const Lane& lane, const Step& step);
  void move_rows(uint32_t rank, const Lane& lane, const Step& step);
  void work(uint32_t rank, double ns, double CriticalPath::*part);
  void transfer(uint32_t from, uint32_t to, uint64_t bytes);
  double occupy(uint32_t level, uint32_t from, uint32_t to, double bytes, double now);

  const Plan& plan_;
  std::span<const Binding> bindings_;
  const LevelTree& tree_;
  const Profile& profile_;
  uint32_t n_chunks_;
  std::vector<LinkCost> links_;                        // [depth + 1], the last one for a rank itself
  std::vector<std::vector<double>> egress_, ingress_;  // [level][group]: when the uplink is free
  std::vector<Rank> ranks_;
  std::vector<Core> cores_;
  std::unordered_map<uint64_t, Channel> channels_;
  std::unordered_map<uint64_t, uint64_t> unsignalled_;  // bytes put on a pair since its last signal
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  uint64_t n_events_ = 0;
  Cost cost_;
};

}  // namespace moeccl::plan
