#include "src/plan/cost_run.h"

#include <algorithm>
#include <limits>

namespace moeccl::plan {
namespace {

// A core's time for a message to another host, from the sender's call to its arrival in the receiver's memory; the
// larger part of it is the sender's. 8 ranks on 2 hosts of one core need 145 us for an AllToAll of 16 small messages
// from each core (docs/tcp.md).
constexpr double kMessageNs = 6000;

}  // namespace

CostRun::CostRun(const Plan& plan, std::span<const Binding> bindings, const LevelTree& tree, const Profile& profile,
                 uint32_t n_chunks)
    : plan_(plan), bindings_(bindings), tree_(tree), profile_(profile), n_chunks_(n_chunks) {
  const uint32_t n = tree.n_ranks;
  for (uint32_t l = 0; l < tree.depth(); ++l) {
    const bool known = l < profile.links.size() && (profile.links[l].alpha_ns > 0 || profile.links[l].bytes_per_ns > 0);
    links_.push_back(known ? profile.links[l] : tree.levels[l].link);
    egress_.emplace_back(tree.levels[l].n_groups, 0.0);
    ingress_.emplace_back(tree.levels[l].n_groups, 0.0);
  }
  links_.push_back({});
  const uint32_t cores_per_host = std::max(1u, profile.cores);
  const bool one_host = profile.host_level < 0 || static_cast<uint32_t>(profile.host_level) >= tree.depth();
  std::vector<uint32_t> host_of(n, 0), on_host(1, 0);
  if (!one_host) host_of = tree.levels[static_cast<uint32_t>(profile.host_level)].group_of_rank;
  ranks_.resize(n);
  for (uint32_t r = 0; r < n; ++r) {
    on_host.resize(std::max<size_t>(on_host.size(), host_of[r] + 1), 0);
    ranks_[r].core = host_of[r] * cores_per_host + on_host[host_of[r]]++ % cores_per_host;
    ranks_[r].lanes.resize(plan.programs[r].lanes.size());
  }
  cores_.resize(on_host.size() * cores_per_host);
  for (uint32_t r = 0; r < n; ++r) {
    ++cores_[ranks_[r].core].n_active;
    set_rates(r, on_host[host_of[r]]);
  }
  cost_.level_bytes.assign(tree.depth(), 0);
  cost_.sent_bytes.assign(n, 0);
}

void CostRun::set_rates(uint32_t rank, uint32_t ranks_on_host) {
  const Shape& shape = plan_.shape;
  const Program& program = plan_.programs[rank];
  const Binding& b = bindings_[rank];
  const uint64_t out_bytes = out_blocks(shape) * b.count * b.element_bytes;
  uint64_t footprint = out_bytes + in_blocks(shape) * b.count * b.element_bytes;
  footprint += uint64_t{program.n_slots} * program.depth * b.slot_elements * b.element_bytes;
  const uint32_t cores = std::max(1u, profile_.cores);
  Rank& r = ranks_[rank];
  const double share = profile_.host_copy_bytes_per_ns / std::min(cores, ranks_on_host);
  r.staging_rate = std::min(profile_.stream_bytes_per_ns, share);
  if (footprint * ((ranks_on_host + cores - 1) / cores) <= profile_.cache_bytes) {
    r.copy_rate = r.output_rate = profile_.cached_copy_bytes_per_ns;
    r.reduce_rate = profile_.cached_reduce_bytes_per_ns;
    return;
  }
  r.copy_rate = std::min(profile_.copy_bytes_per_ns, share);
  r.output_rate = out_bytes * ranks_on_host > profile_.stream_from_bytes ? std::min(profile_.stream_bytes_per_ns, share)
                                                                         : r.copy_rate;
  r.reduce_rate = profile_.reduce_bytes_per_ns;
}

void CostRun::push(double at, bool wakes, uint32_t id) { events_.push({at, n_events_++, wakes, id}); }

void CostRun::run() {
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    for (uint32_t l = 0; l < ranks_[r].lanes.size(); ++l) skip(r, ranks_[r].lanes[l], l);
    ranks_[r].path.step_ns = profile_.start_ns;
    push(profile_.start_ns, true, r);
  }
  while (!events_.empty()) {
    const Event event = events_.top();
    events_.pop();
    if (event.wakes) {
      wake(event.id, event.at);
    } else {
      go_on(event.id);
    }
  }
}

void CostRun::wake(uint32_t rank, double at) {
  Rank& r = ranks_[rank];
  if (r.state != State::kBlocked) return;
  r.state = State::kQueued;
  r.queued_ns = at;
  if (cores_[r.core].owner == kNone) {
    start(r.core, rank, at, false);
  } else {
    cores_[r.core].queue.push_back(rank);
  }
}

// A core goes round its ranks: it passes those that still wait, each of which looks and yields. On average it meets the
// first of `ready` ranks after blocked / (ready + 1) of them.
void CostRun::start(uint32_t core, uint32_t rank, double at, bool handed_over) {
  Core& c = cores_[core];
  Rank& r = ranks_[rank];
  const double ready = static_cast<double>(c.queue.size()) + 1;
  const double blocked = static_cast<double>(c.n_active) - ready;
  const bool moved = c.last != kNone && c.last != rank;
  r.switch_ns =
      profile_.switch_ns * ((moved && c.n_active > 1 ? 1 : 0) + (c.last == kNone ? 0 : blocked / (ready + 1)));
  if (handed_over) {
    r.path = ranks_[c.last].path;
    r.resumed = false;
  }
  r.path.switch_ns += r.switch_ns;
  r.state = State::kRunning;
  r.now = at + r.switch_ns;
  c.owner = rank;
  push(r.now, false, core);
}

void CostRun::release(uint32_t core, double at) {
  Core& c = cores_[core];
  c.last = std::exchange(c.owner, kNone);
  if (c.queue.empty()) return;
  const uint32_t next = c.queue.front();
  c.queue.pop_front();
  start(core, next, at, true);
}

void CostRun::go_on(uint32_t core) {
  const uint32_t rank = cores_[core].owner;
  Rank& r = ranks_[rank];
  // Others must not be overtaken: links serve in order of time.
  while (advance(rank)) {
    if (!events_.empty() && events_.top().at < r.now) return push(r.now, false, core);
  }
  block_or_end(rank);
}

void CostRun::skip(uint32_t rank, Lane& lane, uint32_t index) {
  const std::vector<Step>& steps = plan_.programs[rank].lanes[index].steps;
  if (steps.empty()) lane.chunk = n_chunks_;
  while (lane.chunk < n_chunks_) {
    for (; lane.step < steps.size(); ++lane.step) {
      const When when = steps[lane.step].when;
      if (when == When::kEvery || (when == When::kFirst ? lane.chunk == 0 : lane.chunk + 1 == n_chunks_)) return;
    }
    lane.step = 0;
    ++lane.chunk;
  }
}

bool CostRun::advance(uint32_t rank) {
  Rank& r = ranks_[rank];
  const uint32_t n_lanes = static_cast<uint32_t>(r.lanes.size());
  for (uint32_t tried = 0; tried < n_lanes; ++tried, r.lane = (r.lane + 1) % n_lanes) {
    Lane& lane = r.lanes[r.lane];
    if (lane.chunk >= n_chunks_) continue;
    const Step& step = plan_.programs[rank].lanes[r.lane].steps[lane.step];
    if (step.kind == StepKind::kWait && !take(rank, lane, step)) continue;
    work(rank, profile_.step_ns, &CriticalPath::step_ns);
    switch (step.kind) {
      case StepKind::kWait:
        break;
      case StepKind::kSignal:
        send(rank, step);
        break;
      case StepKind::kPut:
      case StepKind::kCopy:
      case StepKind::kReduce:
        move(rank, lane, step);
        break;
      case StepKind::kGatherRows:
      case StepKind::kScatterRows:
      case StepKind::kReduceRows:
        move_rows(rank, lane, step);
        break;
    }
    ++lane.step;
    skip(rank, lane, r.lane);
    return true;
  }
  return false;
}

void CostRun::block_or_end(uint32_t rank) {
  Rank& r = ranks_[rank];
  bool ended = true;
  double next = std::numeric_limits<double>::infinity();
  for (uint32_t l = 0; l < r.lanes.size(); ++l) {
    const Lane& lane = r.lanes[l];
    if (lane.chunk >= n_chunks_) continue;
    ended = false;
    Channel* channel = nullptr;
    const Arrival* coming = arrival(rank, lane, plan_.programs[rank].lanes[l].steps[lane.step], &channel);
    if (coming) {
      next = std::min(next, coming->at);
    } else {
      channel->awaited = true;
    }
  }
  r.state = ended ? State::kDone : State::kBlocked;
  r.blocked_ns = r.now;
  r.resumed = true;
  if (next < std::numeric_limits<double>::infinity()) push(next, true, rank);
  if (ended) {
    --cores_[r.core].n_active;
    if (r.now > cost_.total_ns) {
      cost_.total_ns = r.now;
      cost_.path = r.path;
      cost_.path.last_rank = rank;
    }
    for (int kind = 0; kind < 4; ++kind) cost_.lane_busy_ns[kind] = std::max(cost_.lane_busy_ns[kind], r.busy_ns[kind]);
  }
  release(r.core, r.now);
}

const CostRun::Arrival* CostRun::arrival(uint32_t rank, const Lane& lane, const Step& step, Channel** channel) {
  const uint64_t chunk = step.when == When::kEvery ? lane.chunk - step.lag : 0;
  const uint64_t number = chunk * step.per_chunk + step.ordinal;
  *channel = &channels_[(uint64_t{step.peer} * ranks_.size() + rank) * kMaxSigs + step.sig];
  return number < (*channel)->sent.size() ? &(*channel)->sent[number] : nullptr;
}

bool CostRun::take(uint32_t rank, const Lane& lane, const Step& step) {
  if (lane.chunk < step.lag) return true;
  Channel* channel = nullptr;
  Rank& r = ranks_[rank];
  const Arrival* signal = arrival(rank, lane, step, &channel);
  if (!signal || signal->at > r.now) return false;
  // The signal that ended the wait carries the chain that the rank waited for.
  if (r.resumed && signal->at > r.blocked_ns) {
    r.path = signal->path;
    r.path.switch_ns += r.switch_ns;
    r.resumed = false;
  }
  return true;
}

void CostRun::send(uint32_t rank, const Step& step) {
  Rank& r = ranks_[rank];
  const uint32_t level = tree_.level_between(rank, step.peer);
  const uint64_t pair = uint64_t{rank} * ranks_.size() + step.peer;
  Arrival sent{r.now, r.path};
  if (static_cast<int>(level) <= profile_.host_level) {
    work(rank, kMessageNs, &CriticalPath::link_ns);
    sent.at = r.now;
    sent.path = r.path;
  }
  if (links_[level].alpha_ns > 0 || links_[level].bytes_per_ns > 0) {
    const auto put = unsignalled_.find(pair);
    if (put != unsignalled_.end()) {
      sent.at = occupy(level, rank, step.peer, static_cast<double>(put->second), r.now);
      unsignalled_.erase(put);
    }
    sent.at += links_[level].alpha_ns;
  } else if (ranks_[step.peer].core != r.core) {
    sent.at += profile_.signal_ns;
  }
  sent.path.link_ns += sent.at - r.now;
  Channel& channel = channels_[pair * kMaxSigs + step.sig];
  channel.sent.push_back(sent);
  if (std::exchange(channel.awaited, false)) push(sent.at, true, step.peer);
}

// Both uplinks carry the bytes, as paced links have it (transport/paced). Returns when the last one has crossed.
double CostRun::occupy(uint32_t level, uint32_t from, uint32_t to, double bytes, double now) {
  if (links_[level].bytes_per_ns <= 0) return now;
  const double duration = bytes / links_[level].bytes_per_ns;
  const std::vector<uint32_t>& group = tree_.levels[level].group_of_rank;
  double &out = egress_[level][group[from]], &in = ingress_[level][group[to]];
  out = std::max(out, now) + duration;
  in = std::max(in, now) + duration;
  return std::max(out, in);
}

void CostRun::work(uint32_t rank, double ns, double CriticalPath::*part) {
  Rank& r = ranks_[rank];
  r.now += ns;
  r.path.*part += ns;
  r.busy_ns[static_cast<size_t>(plan_.programs[rank].lanes[r.lane].kind)] += ns;
}

// Counts bytes that go from one rank to another.
void CostRun::transfer(uint32_t from, uint32_t to, uint64_t bytes) {
  if (from == to) return;
  cost_.sent_bytes[from] += bytes;
  cost_.level_bytes[tree_.level_between(from, to)] += bytes;
}

void CostRun::move(uint32_t rank, const Lane& lane, const Step& step) {
  const Program& program = plan_.programs[rank];
  const Binding& b = bindings_[rank];
  Rank& r = ranks_[rank];
  const uint64_t length = governing_length(b, program, step);
  const uint64_t bytes = resolve(b, program, step.dst, length, lane.chunk).length * b.element_bytes;
  if (bytes == 0) return;
  for (uint32_t k = 0; k < step.n_srcs; ++k) {
    const uint32_t from = program.srcs[step.first_src + k].rank;
    if (from == rank) continue;
    transfer(from, rank, bytes);
    const double until = occupy(tree_.level_between(from, rank), from, rank, static_cast<double>(bytes), r.now);
    work(rank, until - r.now, &CriticalPath::link_ns);
  }
  if (step.kind == StepKind::kReduce) {
    work(rank, static_cast<double>(bytes) * step.n_srcs / r.reduce_rate, &CriticalPath::reduce_ns);
  } else if (const Ref& src = program.srcs[step.first_src];
             src.rank != rank && src.buffer != Buffer::kStaging && !plan_.shape.reach.views) {
    work(rank, profile_.read_call_ns + static_cast<double>(bytes) / profile_.read_bytes_per_ns, &CriticalPath::copy_ns);
  } else {
    const bool past_cache = streams_to_others(step.dst, rank, bytes);
    const double rate = past_cache ? r.staging_rate : step.dst.buffer == Buffer::kOutput ? r.output_rate : r.copy_rate;
    work(rank, static_cast<double>(bytes) / rate, &CriticalPath::copy_ns);
  }
  if (step.dst.rank == rank) return;
  transfer(rank, step.dst.rank, bytes);
  unsignalled_[uint64_t{rank} * ranks_.size() + step.dst.rank] += bytes;
}

void CostRun::move_rows(uint32_t rank, const Lane& lane, const Step& step) {
  const Program& program = plan_.programs[rank];
  const Binding& b = bindings_[rank];
  Rank& r = ranks_[rank];
  const uint64_t list = uint64_t{step.rows} * b.chunking.n_chunks + lane.chunk;
  uint64_t bytes = 0;
  if (step.kind == StepKind::kReduceRows) {
    if (list >= b.sums.size() || b.sums[list].count == 0) return;
    const SumBlock& sums = b.sums[list];
    bytes = sums.count * b.element_bytes;
    const auto read = static_cast<double>((sums.offsets[sums.count] - sums.offsets[0]) * b.element_bytes);
    work(rank, std::max(read / r.reduce_rate, static_cast<double>(bytes) / r.copy_rate), &CriticalPath::reduce_ns);
  } else {
    if (list >= b.rows.size() || b.rows[list].count == 0) return;
    bytes = b.rows[list].count * b.element_bytes;
    work(rank, static_cast<double>(bytes) / r.copy_rate, &CriticalPath::copy_ns);
    const uint32_t from = program.srcs[step.first_src].rank;
    if (from != rank) {
      transfer(from, rank, bytes);
      const double until = occupy(tree_.level_between(from, rank), from, rank, static_cast<double>(bytes), r.now);
      work(rank, until - r.now, &CriticalPath::link_ns);
    }
  }
  if (step.dst.rank == rank) return;
  transfer(rank, step.dst.rank, bytes);
  unsignalled_[uint64_t{rank} * ranks_.size() + step.dst.rank] += bytes;
}

}  // namespace moeccl::plan
