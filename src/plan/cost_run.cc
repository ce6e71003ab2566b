// SPDX-License-Identifier: Apache-2.0
#include "src/plan/cost_run.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace moeccl::plan {
namespace {

// A core's time for a message to another host, from the sender's call to the arrival in the receiver's memory; the
// larger part is the sender's. 8 ranks on 2 hosts of one core need 145 us for an AllToAll of 16 small messages from
// each core (docs/performance-networks.md).
constexpr double kMessageNs = 6000;
// The rate at which one core reads lines that are modified in another core's cache: 14 GB/s where the host has placed
// the two close together, 1.6 to 4 where they are far apart. The value lies in between, so that plans that depend on it
// are tried (src/select/trials.h).
constexpr double kModifiedBytesPerNs = 6;

bool caches_staging(const Program& program) {
  const auto caches = [](const Step& s) { return s.kind == StepKind::kCopy && s.read_again; };
  return std::any_of(program.lanes.begin(), program.lanes.end(),
                     [&](const plan::Lane& l) { return std::any_of(l.steps.begin(), l.steps.end(), caches); });
}

// Returns the rows that a rank writes in dispatch and reads in combine, however little staging they pass through.
uint64_t moved_rows(const Binding& b) {
  if (b.counts != nullptr) return std::reduce(b.counts->rows.begin(), b.counts->rows.end(), uint64_t{0});
  uint64_t n = 0;
  for (const RowBlock& block : b.rows) n += block.count;
  if (!b.rows.empty()) return n;
  for (const SumBlock& block : b.sums)
    if (block.offsets != nullptr) n += block.offsets[block.count] - block.offsets[0];
  return n;
}

}  // namespace

CostRun::CostRun(const Plan& plan, std::span<const Binding> bindings, const LevelTree& tree, const Profile& profile,
                 uint32_t n_chunks)
    : plan_(plan),
      bindings_(bindings),
      tree_(tree),
      profile_(profile),
      n_chunks_(n_chunks),
      runs_on_(bindings[0].counts != nullptr) {
  const uint32_t n = tree.n_ranks;
  for (uint32_t l = 0; l < tree.depth(); ++l) {
    links_.push_back(link_of(tree, profile, l));
    egress_.emplace_back(tree.levels[l].n_groups, 0.0);
    ingress_.emplace_back(tree.levels[l].n_groups, 0.0);
    used_.emplace_back(tree.levels[l].n_groups, 0.0);
  }
  links_.push_back({});
  const bool one_host = profile.host_level < 0 || static_cast<uint32_t>(profile.host_level) >= tree.depth();
  std::vector<uint32_t> host_of(n, 0), on_host(one_host ? 1 : tree.levels[profile.host_level].n_groups, 0), place(n);
  if (!one_host) host_of = tree.levels[static_cast<uint32_t>(profile.host_level)].group_of_rank;
  for (uint32_t r = 0; r < n; ++r) place[r] = on_host[host_of[r]]++;
  const uint32_t cores_per_host = std::clamp(profile.cores, 1u, *std::max_element(on_host.begin(), on_host.end()));
  ranks_.resize(n);
  cores_.resize(on_host.size() * cores_per_host);
  for (uint32_t r = 0; r < n; ++r) {
    ranks_[r].core = host_of[r] * cores_per_host + place[r] % cores_per_host;
    ++cores_[ranks_[r].core].n_active;
    set_rates(r, on_host[host_of[r]]);
    ranks_[r].caches_staging = caches_staging(plan.programs[r]);
  }
  number_pairs();
  cost_.level_bytes.assign(tree.depth(), 0);
  cost_.sent_bytes.assign(n, 0);
}

void CostRun::number_pairs() {
  const uint32_t n = static_cast<uint32_t>(ranks_.size());
  size_t n_pairs = 0, n_steps = 0;
  for (uint32_t r = 0; r < n; ++r) {
    const Program& program = plan_.programs[r];
    first_pair_.push_back(n_pairs);
    n_pairs += program.totals.size();
    for (const plan::Lane& lane : program.lanes) {
      ranks_[r].lanes.push_back(
          {lane.steps.data(), static_cast<uint32_t>(lane.steps.size()), 0, 0, lane.kind, n_steps});
      n_steps += lane.steps.size();
    }
  }
  pairs_.resize(n_pairs);
  // Totals are ordered by peer and sig, so senders that are taken in order meet their entries at each receiver in
  // order.
  std::vector<uint32_t> met(n, 0);
  for (uint32_t r = 0; r < n; ++r) {
    for (size_t i = 0; const Program::SigTotal& sent : plan_.programs[r].totals) {
      const size_t pair = first_pair_[r] + i++;
      if (i > 1 && (&sent - 1)->peer == sent.peer)
        pairs_[pair].place = static_cast<uint8_t>(pairs_[pair - 1].place + 1);
      if (sent.sent == 0) continue;
      const std::vector<Program::SigTotal>& theirs = plan_.programs[sent.peer].totals;
      uint32_t& at = met[sent.peer];
      const auto differs = [&](const Program::SigTotal& t) {
        return std::pair(t.peer, t.sig) < std::pair(r, sent.sig) ||
               (t.peer == r && t.sig == sent.sig && t.awaited == 0);
      };
      while (at < theirs.size() && differs(theirs[at])) ++at;
      if (at < theirs.size() && theirs[at].peer == r && theirs[at].sig == sent.sig)
        pairs_[pair].twin = static_cast<uint32_t>(first_pair_[sent.peer] + at);
    }
  }
  pair_.assign(n_steps, kNone);
  std::vector<uint32_t> sends(size_t{n} * kMaxSigs, kNone), awaits(size_t{n} * kMaxSigs, kNone);
  for (uint32_t r = 0; r < n; ++r) number_steps(r, sends, awaits);
}

// sends, awaits: [n_ranks][kMaxSigs], all kNone before and after.
void CostRun::number_steps(uint32_t rank, std::vector<uint32_t>& sends, std::vector<uint32_t>& awaits) {
  const Program& program = plan_.programs[rank];
  const auto mark = [&](bool clear) {
    for (size_t i = program.totals.size(); i-- > 0;) {
      const Program::SigTotal& t = program.totals[i];
      const size_t at = size_t{t.peer} * kMaxSigs + t.sig;
      const auto pair = clear ? kNone : static_cast<uint32_t>(first_pair_[rank] + i);
      if (t.sent > 0) sends[at] = pair;
      if (t.awaited > 0) awaits[at] = pair;
    }
  };
  mark(false);
  for (uint32_t l = 0; l < program.lanes.size(); ++l) {
    size_t next = ranks_[rank].lanes[l].first;
    for (const Step& step : program.lanes[l].steps) {
      uint32_t& pair = pair_[next++];
      if (step.kind == StepKind::kSignal) {
        pair = sends[size_t{step.peer} * kMaxSigs + step.sig];
      } else if (step.kind == StepKind::kWait) {
        pair = awaits[size_t{step.peer} * kMaxSigs + step.sig];
      } else if (step.dst.rank != rank) {
        for (size_t at = size_t{step.dst.rank} * kMaxSigs, i = at; i < at + kMaxSigs; ++i)
          pair = std::min({pair, sends[i], awaits[i]});
      }
    }
  }
  mark(true);
}

void CostRun::set_rates(uint32_t rank, uint32_t ranks_on_host) {
  const Shape& shape = plan_.shape;
  const Program& program = plan_.programs[rank];
  const Binding& b = bindings_[rank];
  const uint64_t out_bytes = out_blocks(shape) * b.count * b.element_bytes;
  uint64_t footprint = out_bytes + in_blocks(shape) * b.count * b.element_bytes;
  footprint += staging_elements(b, program) * b.element_bytes;
  footprint = std::max(footprint, moved_rows(b) * b.element_bytes);
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
    for (Lane& lane : ranks_[r].lanes) skip(lane);
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
  for (const std::vector<double>& level : used_)
    cost_.busiest_ns.push_back(*std::max_element(level.begin(), level.end()));
}

void CostRun::wake(uint32_t rank, double at) {
  Rank& r = ranks_[rank];
  if (r.state != State::kBlocked) return;
  r.state = State::kQueued;
  if (cores_[r.core].owner == kNone) {
    // The core's last rank may have run on past this event.
    start(r.core, rank, std::max(at, cores_[r.core].free_ns), false);
  } else {
    cores_[r.core].queue.push_back(rank);
  }
}

// A core goes round its ranks and passes those that still wait, each of which looks and yields. On average it reaches
// the first of `ready` ranks after blocked / (ready + 1) of them.
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
  c.free_ns = at;
  if (c.queue.empty()) return;
  const uint32_t next = c.queue.front();
  c.queue.pop_front();
  start(core, next, at, true);
}

void CostRun::go_on(uint32_t core) {
  const uint32_t rank = cores_[core].owner;
  Rank& r = ranks_[rank];
  for (Turn turn = advance(rank); turn != Turn::kBlocked; turn = advance(rank))
    if (turn == Turn::kPaused || (!runs_on_ && others_first(r.now))) return push(r.now, false, core);
  block_or_end(rank);
}

void CostRun::skip(Lane& lane) const {
  if (lane.n_steps == 0) lane.chunk = n_chunks_;
  while (lane.chunk < n_chunks_) {
    for (; lane.step < lane.n_steps; ++lane.step) {
      const When when = lane.steps[lane.step].when;
      if (when == When::kEvery || (when == When::kFirst ? lane.chunk == 0 : lane.chunk + 1 == n_chunks_)) return;
    }
    lane.step = 0;
    ++lane.chunk;
  }
}

bool CostRun::occupies(const Lane& lane, const Step& step) const {
  if (step.kind != StepKind::kSignal) return false;
  const uint32_t pair = pair_[lane.first + lane.step];
  return pairs_[pair - pairs_[pair].place].unsignalled > 0;
}

CostRun::Turn CostRun::advance(uint32_t rank) {
  Rank& r = ranks_[rank];
  const uint32_t n_lanes = static_cast<uint32_t>(r.lanes.size());
  for (uint32_t tried = 0; tried < n_lanes; ++tried, r.lane = r.lane + 1 < n_lanes ? r.lane + 1 : 0) {
    Lane& lane = r.lanes[r.lane];
    if (lane.chunk >= n_chunks_) continue;
    const Step& step = lane.steps[lane.step];
    if (step.kind == StepKind::kWait) {
      if (!take(rank, lane, step)) {
        if (runs_on_ && others_first(r.now)) return Turn::kPaused;
        continue;
      }
    } else if (runs_on_ && others_first(r.now) && occupies(lane, step)) {
      return Turn::kPaused;
    }
    work(rank, profile_.step_ns, &CriticalPath::step_ns);
    switch (step.kind) {
      case StepKind::kWait:
        break;
      case StepKind::kSignal:
        send(rank, lane, step);
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
    skip(lane);
    return Turn::kDone;
  }
  return Turn::kBlocked;
}

void CostRun::block_or_end(uint32_t rank) {
  Rank& r = ranks_[rank];
  bool ended = true;
  double next = std::numeric_limits<double>::infinity();
  for (uint32_t l = 0; l < r.lanes.size(); ++l) {
    const Lane& lane = r.lanes[l];
    if (lane.chunk >= n_chunks_) continue;
    ended = false;
    Pair& pair = pairs_[pair_[lane.first + lane.step]];
    if (pair.first != kNone) {
      next = std::min(next, arrivals_[pair.first].at);
    } else {
      pair.awaited = true;
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

bool CostRun::take(uint32_t rank, const Lane& lane, const Step& step) {
  if (lane.chunk < step.lag) return true;
  Rank& r = ranks_[rank];
  Pair& pair = pairs_[pair_[lane.first + lane.step]];
  if (pair.first == kNone || arrivals_[pair.first].at > r.now) return false;
  Arrival& signal = arrivals_[pair.first];
  // The signal that ended the wait carries the chain that the rank waited for.
  if (r.resumed && signal.at > r.blocked_ns) {
    r.path = signal.path;
    r.path.switch_ns += r.switch_ns;
    r.resumed = false;
  }
  free_arrival_ = std::exchange(pair.first, std::exchange(signal.next, free_arrival_));
  return true;
}

void CostRun::send(uint32_t rank, const Lane& lane, const Step& step) {
  Rank& r = ranks_[rank];
  const uint32_t level = tree_.level_between(rank, step.peer);
  const uint32_t pair = pair_[lane.first + lane.step];
  if (static_cast<int>(level) <= profile_.host_level) work(rank, kMessageNs, &CriticalPath::link_ns);
  Arrival sent{r.now, r.path, kNone};
  const uint32_t twin = pairs_[pair].twin;
  if (links_[level].alpha_ns > 0 || links_[level].bytes_per_ns > 0) {
    if (const double bytes = std::exchange(pairs_[pair - pairs_[pair].place].unsignalled, 0.0); bytes > 0)
      sent.at = occupy(level, rank, step.peer, bytes, r.now);
    sent.at += links_[level].alpha_ns;
  } else if (ranks_[step.peer].core != r.core) {
    sent.at += profile_.signal_ns;
  }
  sent.path.link_ns += sent.at - r.now;
  if (twin == kNone) return;
  uint32_t place = free_arrival_;
  if (place == kNone) {
    place = static_cast<uint32_t>(arrivals_.size());
    arrivals_.push_back(sent);
  } else {
    free_arrival_ = arrivals_[place].next;
    arrivals_[place] = sent;
  }
  Pair& theirs = pairs_[twin];
  (theirs.first == kNone ? theirs.first : arrivals_[theirs.last].next) = place;
  theirs.last = place;
  if (std::exchange(theirs.awaited, false)) push(sent.at, true, step.peer);
}

// Both uplinks carry the bytes, as on paced links (transport/paced). Returns when the last byte has crossed.
double CostRun::occupy(uint32_t level, uint32_t from, uint32_t to, double bytes, double now) {
  if (links_[level].bytes_per_ns <= 0) return now;
  const double duration = bytes / links_[level].bytes_per_ns;
  const std::vector<uint32_t>& group = tree_.levels[level].group_of_rank;
  double &out = egress_[level][group[from]], &in = ingress_[level][group[to]];
  out = std::max(out, now) + duration;
  in = std::max(in, now) + duration;
  used_[level][group[from]] += duration;
  return std::max(out, in);
}

void CostRun::work(uint32_t rank, double ns, double CriticalPath::*part) {
  Rank& r = ranks_[rank];
  r.now += ns;
  r.path.*part += ns;
  r.busy_ns[static_cast<size_t>(r.lanes[r.lane].kind)] += ns;
}

// Counts bytes that go from one rank to another.
void CostRun::transfer(uint32_t from, uint32_t to, double bytes) {
  if (from == to) return;
  const auto whole = static_cast<uint64_t>(bytes + 0.5);
  cost_.sent_bytes[from] += whole;
  cost_.level_bytes[tree_.level_between(from, to)] += whole;
}

void CostRun::put(uint32_t rank, const Lane& lane, uint32_t to, double bytes) {
  if (to == rank) return;
  transfer(rank, to, bytes);
  const uint32_t pair = pair_[lane.first + lane.step];
  if (pair != kNone) pairs_[pair].unsignalled += bytes;
}

void CostRun::move(uint32_t rank, const Lane& lane, const Step& step) {
  const Program& program = plan_.programs[rank];
  const Binding& b = bindings_[rank];
  Rank& r = ranks_[rank];
  const uint64_t length = governing_length(b, program, step);
  const uint64_t whole = resolve(b, program, step.dst, length, lane.chunk).length * b.element_bytes;
  if (whole == 0) return;
  const auto bytes = static_cast<double>(whole);
  for (uint32_t k = 0; k < step.n_srcs; ++k) {
    const uint32_t from = program.srcs[step.first_src + k].rank;
    if (from == rank) continue;
    transfer(from, rank, bytes);
    const double until = occupy(tree_.level_between(from, rank), from, rank, bytes, r.now);
    work(rank, until - r.now, &CriticalPath::link_ns);
  }
  const auto reads_modified = [&](const Ref& src) {
    const Rank& from = ranks_[src.rank];
    return from.caches_staging && src.buffer == Buffer::kStaging && from.core != r.core;
  };
  if (step.kind == StepKind::kReduce) {
    double ns = 0;
    for (uint32_t k = 0; k < step.n_srcs; ++k) {
      const bool modified = reads_modified(program.srcs[step.first_src + k]);
      ns += bytes / (modified ? std::min(r.reduce_rate, kModifiedBytesPerNs) : r.reduce_rate);
    }
    work(rank, ns, &CriticalPath::reduce_ns);
  } else if (const Ref& src = program.srcs[step.first_src];
             src.rank != rank && src.buffer != Buffer::kStaging && !plan_.shape.reach.views) {
    work(rank, profile_.read_call_ns + bytes / profile_.read_bytes_per_ns, &CriticalPath::copy_ns);
  } else {
    const bool past_cache = !step.read_again && streams_to_others(step.dst, rank, whole);
    double rate = past_cache ? r.staging_rate : step.dst.buffer == Buffer::kOutput ? r.output_rate : r.copy_rate;
    if (reads_modified(src)) rate = std::min(rate, kModifiedBytesPerNs);
    work(rank, bytes / rate, &CriticalPath::copy_ns);
  }
  put(rank, lane, step.dst.rank, bytes);
}

CostRun::Rows CostRun::rows_of(const Binding& b, const Step& step, uint32_t chunk) {
  const bool sums = step.kind == StepKind::kReduceRows;
  if (b.counts != nullptr) {
    const double share = 1.0 / b.chunking.n_chunks;
    if (!sums) return {b.counts->rows[step.rows] * share, b.counts->rows[step.rows] * share};
    const RowCounts::Sum& sum = b.counts->sums[step.rows];
    return {static_cast<double>(sum.rows) * share, static_cast<double>(sum.terms) * share};
  }
  const uint64_t list = uint64_t{step.rows} * b.chunking.n_chunks + chunk;
  if (list >= (sums ? b.sums.size() : b.rows.size())) return {};
  if (!sums) return {static_cast<double>(b.rows[list].count), static_cast<double>(b.rows[list].count)};
  const SumBlock& s = b.sums[list];
  if (s.count == 0) return {};
  if (s.src_first != nullptr) return {static_cast<double>(s.count), static_cast<double>(s.count * step.n_srcs)};
  return {static_cast<double>(s.count), static_cast<double>(s.offsets[s.count] - s.offsets[0])};
}

void CostRun::move_rows(uint32_t rank, const Lane& lane, const Step& step) {
  const Binding& b = bindings_[rank];
  Rank& r = ranks_[rank];
  const Rows rows = rows_of(b, step, lane.chunk);
  if (rows.written == 0) return;
  const double bytes = rows.written * b.element_bytes, read = rows.read * b.element_bytes;
  if (step.kind == StepKind::kReduceRows) {
    work(rank, std::max(read / r.reduce_rate, bytes / r.copy_rate), &CriticalPath::reduce_ns);
  } else {
    work(rank, bytes / r.copy_rate, &CriticalPath::copy_ns);
    const uint32_t from = plan_.programs[rank].srcs[step.first_src].rank;
    if (from != rank) {
      transfer(from, rank, bytes);
      const double until = occupy(tree_.level_between(from, rank), from, rank, bytes, r.now);
      work(rank, until - r.now, &CriticalPath::link_ns);
    }
  }
  put(rank, lane, step.dst.rank, bytes);
}

}  // namespace moeccl::plan
