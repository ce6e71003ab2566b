#include "src/algo/moe_simulation.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <queue>
#include <utility>

namespace moeccl::algo {

namespace {

// As in src/moe/moe_routing.cc: hops overlap with so many chunks, of at least this size.
constexpr uint64_t kPipelineChunks = 8, kPipelineBytes = 64 << 10;

enum class Do : uint8_t { kAwaitSlot, kSend, kAwaitData, kGiveSlot, kWork, kTell, kHear };

struct Op {
  Do what;
  uint32_t edge;  // or the number of a signal between own lanes
  double rows;    // gathered, scattered or summed at each chunk; kSend: also sent
};
struct LaneOps {
  uint32_t first = 0, last = 0;
};
constexpr uint32_t kLanes = 3;
constexpr double kNever = std::numeric_limits<double>::infinity();

// The programs of all ranks, written as moe_plan.cc does.
class Writer {
 public:
  Writer(const Traffic& traffic, uint32_t n_chunks)
      : t_(traffic), share_(1.0 / n_chunks), awaited_(traffic.edges.size(), 0) {}

  void dispatch(uint32_t rank) {
    begin(rank);
    for (const uint32_t e : turn(out(0), false)) send(e, static_cast<double>(t_.edges[e].rows));
    next_lane();
    bool forwards = false;
    for (uint32_t h = 1; h < t_.n_hops; ++h) {
      const std::vector<uint32_t> outs = turn(out(h), false);
      if (outs.empty()) continue;
      double rows = 0;
      for (const uint32_t e : outs) {
        add(Do::kAwaitSlot, e);
        rows += static_cast<double>(t_.edges[e].rows);
      }
      for (uint32_t g = 0; g < h; ++g) {
        for (const uint32_t i : turn(in(g), true)) {
          forwards = true;
          if (!std::exchange(awaited_[i], 1)) add(Do::kAwaitData, i);
        }
      }
      for (const uint32_t e : outs) add(Do::kSend, e, static_cast<double>(t_.edges[e].rows));
    }
    if (forwards) add(Do::kTell, 0);
    next_lane();
    add(Do::kWork, 0, static_cast<double>(t_.own[rank]));
    if (forwards) add(Do::kHear, 0);
    for (uint32_t h = 0; h < t_.n_hops; ++h) {
      for (const uint32_t i : turn(in(h), true)) {
        if (!awaited_[i]) add(Do::kAwaitData, i);
        add(Do::kWork, 0, static_cast<double>(t_.edges[i].delivered));
        add(Do::kGiveSlot, i);
      }
    }
    next_lane();
  }

  // Rows return on the reversed edges: what came in goes back, so in edges send and out edges receive.
  void combine(uint32_t rank) {
    begin(rank);
    bool later = false;
    const uint32_t first = t_.out_first[rank];
    std::vector<bool> awaited(t_.out_first[rank + 1] - first, false);
    const auto await = [&](uint32_t hop_from) {
      for (uint32_t e = first; e < t_.out_first[rank + 1]; ++e)
        if (t_.edges[e].hop >= hop_from && !awaited[e - first]) {
          awaited[e - first] = true;
          add(Do::kAwaitData, e);
        }
    };
    for (uint32_t h = t_.n_hops; h-- > 1;) {
      const std::vector<uint32_t> ins = turn(in(h), false);
      if (ins.empty()) continue;
      await(h + 1);
      for (const uint32_t i : ins) send(i, static_cast<double>(t_.edges[i].returned));
    }
    later = std::find(awaited.begin(), awaited.end(), true) != awaited.end();
    if (later) add(Do::kTell, 0);
    next_lane();
    if (later) add(Do::kHear, 0);
    const std::vector<uint32_t> ins = turn(in(0), false);
    if (!ins.empty()) await(1);
    for (const uint32_t i : ins) send(i, static_cast<double>(t_.edges[i].returned));
    const bool summed = std::find(awaited.begin(), awaited.end(), true) != awaited.end();
    if (summed) add(Do::kTell, 1);
    next_lane();
    if (summed) add(Do::kHear, 1);
    await(0);
    double rows = static_cast<double>(t_.own[rank]);
    for (uint32_t e = first; e < t_.out_first[rank + 1]; ++e) rows += static_cast<double>(t_.edges[e].returned);
    add(Do::kWork, 0, rows);
    for (uint32_t e = first; e < t_.out_first[rank + 1]; ++e) add(Do::kGiveSlot, e);
    next_lane();
  }

  std::vector<Op> ops;
  std::vector<LaneOps> lanes;  // [n_ranks * kLanes]

 private:
  void begin(uint32_t rank) {
    rank_ = rank;
    in_ = t_.in_of(rank);
    first_ = static_cast<uint32_t>(ops.size());
  }
  void next_lane() {
    lanes.push_back({first_, static_cast<uint32_t>(ops.size())});
    first_ = static_cast<uint32_t>(ops.size());
  }
  void add(Do what, uint32_t edge, double rows = 0) { ops.push_back({what, edge, rows * share_}); }
  void send(uint32_t e, double rows) {
    add(Do::kAwaitSlot, e);
    add(Do::kSend, e, rows);
  }
  std::vector<uint32_t> out(uint32_t hop) const {
    std::vector<uint32_t> list;
    for (uint32_t e = t_.out_first[rank_]; e < t_.out_first[rank_ + 1]; ++e)
      if (t_.edges[e].hop == hop) list.push_back(e);
    return list;
  }
  std::vector<uint32_t> in(uint32_t hop) const {
    std::vector<uint32_t> list;
    for (const uint32_t e : in_)
      if (t_.edges[e].hop == hop) list.push_back(e);
    return list;
  }
  // Greater ranks first, so that ranks do not all turn to one peer; reversed when receiving.
  std::vector<uint32_t> turn(std::vector<uint32_t> list, bool receive) const {
    const auto peer = [&](uint32_t e) { return t_.edges[e].from == rank_ ? t_.edges[e].to : t_.edges[e].from; };
    const auto middle = std::find_if(list.begin(), list.end(), [&](uint32_t e) { return peer(e) > rank_; });
    std::rotate(list.begin(), middle, list.end());
    if (receive) std::reverse(list.begin(), list.end());
    return list;
  }

  const Traffic& t_;
  double share_;
  uint32_t rank_ = 0, first_ = 0;
  std::span<const uint32_t> in_;
  std::vector<char> awaited_;  // dispatch, by edge: the forwarding lane of its receiver waits for it
};

// The chain of work that led to a moment, in ns.
struct Chain {
  float copy = 0, link = 0, step = 0;
};

class Clock {
 public:
  Clock(bool returns, const Traffic& traffic, const plan::LevelTree& tree, const plan::Profile& profile,
        const SimulatedRows& rows, const Writer& programs, uint32_t n_chunks)
      : t_(traffic), tree_(tree), profile_(profile), programs_(programs), n_chunks_(n_chunks), returns_(returns) {
    row_bytes_ = static_cast<double>(rows.row_bytes);
    depth_ = t_.n_hops > 1 ? 3 : 2;  // as moe_plan_shape()
    for (uint32_t l = 0; l < tree.depth(); ++l) {
      const bool known =
          l < profile.links.size() && (profile.links[l].alpha_ns > 0 || profile.links[l].bytes_per_ns > 0);
      links_.push_back(known ? profile.links[l] : tree.levels[l].link);
      egress_.emplace_back(tree.levels[l].n_groups, 0.0);
      ingress_.emplace_back(tree.levels[l].n_groups, 0.0);
      used_.emplace_back(tree.levels[l].n_groups, 0.0);
    }
    edges_.resize(t_.edges.size());
    arrivals_.resize(t_.edges.size() * depth_);
    freed_.resize(t_.edges.size() * depth_);
    ranks_.resize(t_.n_ranks);
    move_rate_ = returns ? profile.reduce_bytes_per_ns : profile.copy_bytes_per_ns;
  }

  SimulatedRun run() {
    for (uint32_t r = 0; r < t_.n_ranks; ++r) {
      ranks_[r].now = profile_.start_ns;
      ranks_[r].chain.step = static_cast<float>(profile_.start_ns);
      push(profile_.start_ns, r);
    }
    while (!events_.empty()) {
      const Event event = events_.top();
      events_.pop();
      go_on(event.rank, event.at);
    }
    result_.n_chunks = n_chunks_;
    for (uint32_t l = 0; l < tree_.depth(); ++l) {
      result_.busiest_ns.push_back(*std::max_element(used_[l].begin(), used_[l].end()));
      result_.level_bytes.push_back(0);
    }
    for (const TrafficEdge& e : t_.edges)
      result_.level_bytes[e.level] += (returns_ ? e.returned : e.rows) * static_cast<uint64_t>(row_bytes_);
    return std::move(result_);
  }

 private:
  struct Rank {
    double now = 0;
    uint32_t chunk[kLanes] = {}, op[kLanes] = {};  // op: relative to the lane's first
    uint32_t told[2] = {}, heard[2] = {};
    uint8_t lane = 0;
    bool done = false;
    double pending_at = kNever;
    Chain chain;
  };
  struct EdgeState {
    uint16_t sent = 0, freed = 0;
    bool data_awaited = false, slot_awaited = false;
  };
  struct Moment {
    double at = 0;
    Chain chain;
  };
  struct Event {
    double at;
    uint64_t number;  // breaks ties
    uint32_t rank;
    bool operator>(const Event& o) const { return at != o.at ? at > o.at : number > o.number; }
  };

  uint32_t sender(const TrafficEdge& e) const { return returns_ ? e.to : e.from; }
  uint32_t receiver(const TrafficEdge& e) const { return returns_ ? e.from : e.to; }
  // A rank has one event that counts, the earliest: it looks at everything that has arrived by then.
  void push(double at, uint32_t rank) {
    double& pending = ranks_[rank].pending_at;
    if (pending <= at) return;
    pending = at;
    events_.push({at, n_events_++, rank});
  }

  void go_on(uint32_t rank, double at) {
    Rank& r = ranks_[rank];
    if (r.done || at != r.pending_at) return;
    r.pending_at = kNever;
    r.now = std::max(r.now, at);
    double next = 0;
    while (advance(rank, &next)) {
      // Others must not be overtaken: links serve in order of time.
      if (sent_ && !events_.empty() && events_.top().at < r.now) return push(r.now, rank);
    }
    if (next < kNever) push(next, rank);
  }

  // Does one op of the rank's lanes; false when all wait (*next: until when, if that is known) or have ended.
  bool advance(uint32_t rank, double* next) {
    Rank& r = ranks_[rank];
    *next = kNever;
    bool ended = true;
    for (uint32_t tried = 0; tried < kLanes; ++tried, r.lane = static_cast<uint8_t>((r.lane + 1) % kLanes)) {
      const LaneOps& lane = programs_.lanes[size_t{rank} * kLanes + r.lane];
      uint32_t& chunk = r.chunk[r.lane];
      if (lane.first == lane.last || chunk == n_chunks_) continue;
      ended = false;
      const Op& op = programs_.ops[lane.first + r.op[r.lane]];
      if (!ready(r, op, chunk, next)) continue;
      perform(r, op, chunk);
      sent_ = op.what == Do::kSend;
      ++result_.n_steps;
      if (++r.op[r.lane] == lane.last - lane.first) r.op[r.lane] = 0, ++chunk;
      return true;
    }
    if (ended) finish(rank);
    return false;
  }

  void finish(uint32_t rank) {
    Rank& r = ranks_[rank];
    r.done = true;
    if (r.now <= result_.total_ns) return;
    result_.total_ns = r.now;
    result_.path = {};
    (returns_ ? result_.path.reduce_ns : result_.path.copy_ns) = r.chain.copy;
    result_.path.link_ns = r.chain.link;
    result_.path.step_ns = r.chain.step;
    result_.path.last_rank = rank;
  }

  bool ready(Rank& r, const Op& op, uint32_t chunk, double* next) {
    if (op.what == Do::kHear) return r.told[op.edge] > r.heard[op.edge];
    if (op.what != Do::kAwaitData && op.what != Do::kAwaitSlot) return true;
    const bool data = op.what == Do::kAwaitData;
    if (!data && chunk < depth_) return true;
    EdgeState& e = edges_[op.edge];
    if (data ? e.sent <= chunk : e.freed <= chunk - depth_) {
      (data ? e.data_awaited : e.slot_awaited) = true;
      return false;
    }
    const Moment& m = (data ? arrivals_ : freed_)[size_t{op.edge} * depth_ + chunk % depth_];
    if (m.at > r.now) {
      *next = std::min(*next, m.at);
      return false;
    }
    // The signal that ended a wait carries the chain that was waited for.
    if (const float mine = r.chain.copy + r.chain.link + r.chain.step;
        m.chain.copy + m.chain.link + m.chain.step > mine)
      r.chain = m.chain;
    return true;
  }

  void work(Rank& r, double ns, float Chain::*part) {
    r.now += ns;
    r.chain.*part += static_cast<float>(ns);
  }

  void perform(Rank& r, const Op& op, uint32_t chunk) {
    work(r, profile_.step_ns, &Chain::step);
    if (op.rows > 0) work(r, op.rows * row_bytes_ / move_rate_, &Chain::copy);
    if (op.what == Do::kTell) ++r.told[op.edge];
    if (op.what == Do::kHear) ++r.heard[op.edge];
    if (op.what == Do::kSend) send(r, op, chunk);
    if (op.what != Do::kGiveSlot) return;
    const TrafficEdge& edge = t_.edges[op.edge];
    const double at = r.now + latency(edge.level);
    freed_[size_t{op.edge} * depth_ + chunk % depth_] = {at, later(r.chain, at - r.now)};
    ++edges_[op.edge].freed;
    if (std::exchange(edges_[op.edge].slot_awaited, false)) push(at, sender(edge));
  }

  static Chain later(Chain chain, double link_ns) {
    chain.link += static_cast<float>(link_ns);
    return chain;
  }
  double latency(uint32_t level) const {
    return links_[level].alpha_ns > 0 ? links_[level].alpha_ns : profile_.signal_ns;
  }

  // Both uplinks carry the bytes, as in plan/cost_run.cc.
  void send(Rank& r, const Op& op, uint32_t chunk) {
    const TrafficEdge& edge = t_.edges[op.edge];
    double at = r.now;
    if (links_[edge.level].bytes_per_ns > 0 && op.rows > 0) {
      const double duration = op.rows * row_bytes_ / links_[edge.level].bytes_per_ns;
      const std::vector<uint32_t>& group = tree_.levels[edge.level].group_of_rank;
      const uint32_t a = group[sender(edge)], b = group[receiver(edge)];
      double &out = egress_[edge.level][a], &in = ingress_[edge.level][b];
      out = std::max(out, at) + duration;
      in = std::max(in, at) + duration;
      at = std::max(out, in);
      used_[edge.level][a] += duration;
    }
    at += latency(edge.level);
    arrivals_[size_t{op.edge} * depth_ + chunk % depth_] = {at, later(r.chain, at - r.now)};
    ++edges_[op.edge].sent;
    if (std::exchange(edges_[op.edge].data_awaited, false)) push(at, receiver(edge));
  }

  const Traffic& t_;
  const plan::LevelTree& tree_;
  const plan::Profile& profile_;
  const Writer& programs_;
  uint32_t n_chunks_, depth_;
  bool returns_;
  double row_bytes_ = 1, move_rate_ = 1;
  std::vector<plan::LinkCost> links_;
  std::vector<std::vector<double>> egress_, ingress_, used_;  // [level][group]
  std::vector<EdgeState> edges_;
  std::vector<Moment> arrivals_, freed_;  // [edge * depth + chunk % depth]
  std::vector<Rank> ranks_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  uint64_t n_events_ = 0;
  bool sent_ = false;  // the last op put bytes on a link
  SimulatedRun result_;
};

}  // namespace

SimulatedRun simulate_moe(moecclOp_t op, const Traffic& traffic, const plan::LevelTree& tree,
                          const plan::Profile& profile, const SimulatedRows& rows) {
  const uint64_t largest = traffic.largest_edge() * rows.row_bytes;
  uint32_t n_chunks = rows.n_chunks;
  if (n_chunks == 0)
    n_chunks = static_cast<uint32_t>(
        std::min(kPipelineChunks, std::bit_floor(std::max<uint64_t>(1, largest / kPipelineBytes))));
  Writer programs(traffic, n_chunks);
  for (uint32_t r = 0; r < traffic.n_ranks; ++r) {
    if (op == moecclOpDispatch)
      programs.dispatch(r);
    else
      programs.combine(r);
  }
  SimulatedRun run = Clock(op == moecclOpCombine, traffic, tree, profile, rows, programs, n_chunks).run();
  const uint64_t slot = (traffic.largest_edge() + n_chunks - 1) / n_chunks * rows.row_bytes;
  for (uint32_t r = 0; r < traffic.n_ranks; ++r) {
    const uint64_t slots = std::max<uint64_t>(traffic.out_first[r + 1] - traffic.out_first[r], traffic.in_of(r).size());
    run.staging_bytes = std::max(run.staging_bytes, slots * slot * (traffic.n_hops > 1 ? 3 : 2));
  }
  return run;
}

}  // namespace moeccl::algo
