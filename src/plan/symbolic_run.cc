// SPDX-License-Identifier: Apache-2.0
#include "src/plan/symbolic_run.h"

#include <algorithm>

#include "src/plan/discipline.h"

namespace moeccl::plan {

namespace {

std::vector<uint64_t> input_sizes(const std::vector<UserMemory>& users) {
  std::vector<uint64_t> sizes;
  for (const UserMemory& user : users) sizes.push_back(user.in_size);
  return sizes;
}

}  // namespace

SymbolicRun::SymbolicRun(const CheckInput& input, std::vector<UserMemory> users)
    : plan_(input.plan),
      bindings_(input.bindings),
      allow_waste_(input.allow_waste),
      users_(std::move(users)),
      values_(input_sizes(users_)) {
  const uint32_t n = plan_.shape.n_ranks;
  first_lane_.push_back(0);
  for (uint32_t r = 0; r < n; ++r) {
    const Program& program = plan_.programs[r];
    const UserMemory& user = users_[r];
    // Ranks of one group hold equal Inputs: equal values, named after those of the group's first rank.
    const std::vector<uint32_t>& group = plan_.shape.group_of;
    const auto same_input =
        group.empty() ? r : static_cast<uint32_t>(std::find(group.begin(), group.end(), group[r]) - group.begin());
    user_.emplace_back(std::max(user.in_first + user.in_size, user.out_first + user.out_size));
    for (uint64_t i = 0; i < user.in_size; ++i) {
      Unit& unit = user_[r][user.in_first + i];
      unit.value = values_.leaf(same_input, i);
      unit.input_intact = true;
    }
    staging_.emplace_back(staging_elements(bindings_[r], program));
    for (uint32_t l = 0; l < program.lanes.size(); ++l) {
      lanes_.emplace_back();
      lanes_.back().rank = r;
      lanes_.back().lane = l;
    }
    first_lane_.push_back(static_cast<uint32_t>(lanes_.size()));
  }
  for (LaneState& lane : lanes_) lane.clock.assign(lanes_.size(), 0);
  last_touch_.assign(n, std::vector<uint32_t>(lanes_.size(), 0));
}

Status SymbolicRun::run() {
  for (uint32_t id = static_cast<uint32_t>(lanes_.size()); id-- > 0;) ready_.push_back(id);
  while (!ready_.empty()) {
    const uint32_t id = ready_.back();
    ready_.pop_back();
    MOECCL_TRY(run_lane(id));
  }
  MOECCL_TRY(check_all_ended());
  MOECCL_TRY(check_peers_left());
  return check_staging_used();
}

bool SymbolicRun::runs(const Step& step, uint32_t chunk) const {
  switch (step.when) {
    case When::kEvery:
      return true;
    case When::kFirst:
      return chunk == 0;
    case When::kLast:
      return chunk + 1 == plan_.chunking.n_chunks;
  }
  return false;
}

Status SymbolicRun::run_lane(uint32_t id) {
  LaneState& lane = lanes_[id];
  const std::vector<Step>& steps = program_of(id).lanes[lane.lane].steps;
  for (; lane.chunk < plan_.chunking.n_chunks; ++lane.chunk, lane.step = 0) {
    for (; lane.step < steps.size(); ++lane.step) {
      const Step& step = steps[lane.step];
      if (!runs(step, lane.chunk)) continue;
      if (step.kind == StepKind::kWait && !take_signal(id, step)) return {};
      lane.clock[id] = ++lane.time;
      switch (step.kind) {
        case StepKind::kWait:
          break;
        case StepKind::kSignal:
          send_signal(id, step);
          break;
        case StepKind::kPut:
        case StepKind::kCopy:
        case StepKind::kReduce:
          MOECCL_TRY(move_blocks(id, step));
          break;
        case StepKind::kGatherRows:
        case StepKind::kScatterRows:
          MOECCL_TRY(gather_or_scatter_rows(id, step));
          break;
        case StepKind::kReduceRows:
          MOECCL_TRY(reduce_rows(id, step));
          break;
      }
    }
  }
  return {};
}

SymbolicRun::Channel& SymbolicRun::channel(uint32_t from, uint32_t to, uint8_t sig) {
  return channels_[(uint64_t{from} * plan_.shape.n_ranks + to) * kMaxSigs + sig];
}

void SymbolicRun::send_signal(uint32_t id, const Step& step) {
  LaneState& lane = lanes_[id];
  if (!lane.snapshot) lane.snapshot = std::make_shared<const Clock>(lane.clock);
  Channel& to = channel(lane.rank, step.peer, step.sig);
  to.sent.push_back({lane.snapshot, now(id)});
  if (to.waiter != kNoLane) ready_.push_back(std::exchange(to.waiter, kNoLane));
}

bool SymbolicRun::take_signal(uint32_t id, const Step& step) {
  LaneState& lane = lanes_[id];
  if (lane.chunk < step.lag) return true;
  const uint64_t chunk = step.when == When::kEvery ? lane.chunk - step.lag : 0;
  const uint64_t number = chunk * step.per_chunk + step.ordinal;
  Channel& from = channel(step.peer, lane.rank, step.sig);
  if (number >= from.sent.size()) {
    from.waiter = id;
    return false;
  }
  Sent& sent = from.sent[number];
  for (size_t i = 0; i < lane.clock.size(); ++i) lane.clock[i] = std::max(lane.clock[i], (*sent.clock)[i]);
  lane.clock[sent.by.lane] = std::max(lane.clock[sent.by.lane], sent.by.time);
  lane.snapshot.reset();
  sent.clock.reset();  // each signal is taken once
  return true;
}

Range SymbolicRun::range_of(uint32_t rank, const Step& step, const Ref& ref, uint32_t chunk) const {
  const Binding& own = bindings_[rank];
  const uint64_t length = governing_length(own, plan_.programs[rank], step);
  Range range = resolve(own, plan_.programs[rank], ref, length, chunk);
  // A peer's Input block is where the peer says: this is the only thing that a rank learns at run time.
  if (ref.rank != rank && ref.buffer == Buffer::kInput && bindings_[ref.rank].in_offset)
    range.offset += bindings_[ref.rank].in_offset[ref.index] - block_offset(own, ref);
  return range;
}

Result<SymbolicRun::Place> SymbolicRun::locate(uint32_t id, const Step& step, const Ref& ref) {
  const LaneState& lane = lanes_[id];
  const Range range = range_of(lane.rank, step, ref, lane.chunk);
  Place place{&user_[ref.rank], range.offset, range.length, ref.buffer};
  if (range.length == 0) return place;
  uint64_t end = 0;
  if (ref.buffer == Buffer::kStaging) {
    place.memory = &staging_[ref.rank];
    const Binding& own = bindings_[lane.rank];
    end = slot_base(own, program_of(id), ref, lane.chunk) + elements_of_slot(own, program_of(id), ref);
  } else {
    const UserMemory& user = users_[ref.rank];
    const bool in = ref.buffer == Buffer::kInput;
    place.first += in ? user.in_first : user.out_first;
    end = in ? user.in_first + user.in_size : user.out_first + user.out_size;
  }
  if (place.first + range.length > end || end > place.memory->size())
    return fail(id, format("{} ends {} elements beyond its memory", ref_name(ref), place.first + range.length - end));
  MOECCL_TRY(note_peer(id, ref));
  return place;
}

Status SymbolicRun::note_peer(uint32_t id, const Ref& ref) {
  LaneState& lane = lanes_[id];
  if (ref.rank == lane.rank || ref.buffer == Buffer::kStaging) return {};
  bool entered = false;
  for (uint32_t l = first_lane_[ref.rank]; l < first_lane_[ref.rank + 1]; ++l) entered |= lane.clock[l] > 0;
  if (!entered) return fail(id, format("{} is touched before a signal of that rank came", ref_name(ref)));
  last_touch_[ref.rank][id] = lane.time;
  return {};
}

Status SymbolicRun::move_blocks(uint32_t id, const Step& step) {
  MOECCL_ASSIGN_OR_RETURN(const Place dst, locate(id, step, step.dst));
  const Program& program = program_of(id);
  std::vector<Place> srcs;
  for (uint32_t k = 0; k < step.n_srcs; ++k) {
    const Ref& ref = program.srcs[step.first_src + k];
    MOECCL_ASSIGN_OR_RETURN(const Place src, locate(id, step, ref));
    if (src.length != dst.length)
      return fail(
          id, format("{} holds {} elements, {} holds {}", ref_name(ref), src.length, ref_name(step.dst), dst.length));
    if (src.memory == dst.memory && src.first != dst.first && src.first < dst.first + dst.length &&
        dst.first < src.first + src.length)
      return fail(id, format("{} overlaps {} in part", ref_name(ref), ref_name(step.dst)));
    srcs.push_back(src);
  }
  // In place, a copy of an element onto itself touches nothing; executors skip it.
  const bool onto_itself = step.kind == StepKind::kCopy && srcs[0].memory == dst.memory && srcs[0].first == dst.first &&
                           srcs[0].buffer == Buffer::kInput && !(plan_.shape.scaled && reduces(plan_.shape.op));
  for (uint64_t i = 0; i < dst.length; ++i) {
    if (onto_itself && dst[i].input_intact) {
      dst[i].output_defined = true;
      continue;
    }
    children_.clear();
    for (uint32_t k = 0; k < step.n_srcs; ++k) {
      const Ref& ref = program.srcs[step.first_src + k];
      ValueId value = kUndefined;
      MOECCL_TRY(read(id, srcs[k], i, ref, value));
      if (step.kind == StepKind::kReduce && values_.is_final(value))
        return fail(id, format("element {} of {} is final and is reduced again", i, ref_name(ref)));
      children_.push_back({value, step.divisor > 1 ? 1.0f / static_cast<float>(step.divisor) : 1.0f});
    }
    MOECCL_TRY(write(id, dst, i, step.dst, values_.sum(children_, step.final_reduce)));
  }
  return {};
}

Result<SymbolicRun::Place> SymbolicRun::locate_rows(uint32_t id, const Ref& ref) {
  const LaneState& lane = lanes_[id];
  const Binding& b = bindings_[lane.rank];
  if (ref.buffer == Buffer::kStaging)
    return Place{&staging_[ref.rank], slot_base(b, program_of(id), ref, lane.chunk),
                 program_of(id).block_slots(ref.index) * b.slot_elements, ref.buffer};
  const UserMemory& user = users_[ref.rank];
  const bool in = ref.buffer == Buffer::kInput;
  return Place{&user_[ref.rank], in ? user.in_first : user.out_first, in ? user.in_size : user.out_size, ref.buffer};
}

Status SymbolicRun::gather_or_scatter_rows(uint32_t id, const Step& step) {
  const LaneState& lane = lanes_[id];
  const Binding& b = bindings_[lane.rank];
  const uint64_t list = uint64_t{step.rows} * plan_.chunking.n_chunks + lane.chunk;
  if (list >= b.rows.size()) return fail(id, format("row list {} is beyond the binding", step.rows));
  const RowBlock& rows = b.rows[list];
  if (rows.count == 0) return {};
  const Ref& src_ref = program_of(id).srcs[step.first_src];
  MOECCL_ASSIGN_OR_RETURN(const Place src, locate_rows(id, src_ref));
  MOECCL_ASSIGN_OR_RETURN(const Place dst, locate_rows(id, step.dst));
  MOECCL_TRY(note_peer(id, src_ref));
  MOECCL_TRY(note_peer(id, step.dst));
  for (uint64_t i = 0; i < rows.count; ++i) {
    const uint64_t from = rows.src_index ? rows.src_index[i] : rows.src_first + i;
    const uint64_t to = rows.dst_index ? rows.dst_index[i] : rows.dst_first + i;
    ValueId value = kUndefined;
    MOECCL_TRY(read(id, src, from, src_ref, value));
    if (step.kind == StepKind::kScatterRows && rows.weights) {
      children_.assign(1, {value, rows.weights[i]});
      value = values_.sum(children_, false);
    }
    MOECCL_TRY(write(id, dst, to, step.dst, value));
  }
  return {};
}

Status SymbolicRun::reduce_rows(uint32_t id, const Step& step) {
  const LaneState& lane = lanes_[id];
  const Binding& b = bindings_[lane.rank];
  const uint64_t list = uint64_t{step.rows} * plan_.chunking.n_chunks + lane.chunk;
  if (list >= b.sums.size()) return fail(id, format("sum list {} is beyond the binding", step.rows));
  const SumBlock& sums = b.sums[list];
  if (sums.count == 0) return {};
  const Program& program = program_of(id);
  std::vector<Place> srcs;
  for (uint32_t k = 0; k < step.n_srcs; ++k) {
    MOECCL_ASSIGN_OR_RETURN(const Place src, locate_rows(id, program.srcs[step.first_src + k]));
    srcs.push_back(src);
  }
  MOECCL_ASSIGN_OR_RETURN(const Place dst, locate_rows(id, step.dst));
  MOECCL_TRY(note_peer(id, step.dst));
  const bool of_stretches = sums.src_first != nullptr;
  for (uint64_t i = 0; i < sums.count; ++i) {
    children_.clear();
    for (uint32_t k = 0; of_stretches && k < step.n_srcs; ++k) {
      MOECCL_TRY(add_child(id, srcs[k], sums.src_first[k] + i, program.srcs[step.first_src + k],
                           step.divisor > 1 ? 1.0f / static_cast<float>(step.divisor) : 1.0f));
    }
    for (uint64_t t = of_stretches ? 0 : sums.offsets[i]; !of_stretches && t < sums.offsets[i + 1]; ++t) {
      const RowTermRef& term = sums.terms[t];
      if (term.segment >= step.n_srcs)
        return fail(id, format("term {} names source {} of {}", t, term.segment, step.n_srcs));
      MOECCL_TRY(add_child(id, srcs[term.segment], term.row, program.srcs[step.first_src + term.segment],
                           sums.weights ? sums.weights[t] : 1.0f));
    }
    const uint64_t to = sums.dst_index ? sums.dst_index[i] : sums.dst_first + i;
    MOECCL_TRY(write(id, dst, to, step.dst, values_.sum(children_, step.final_reduce)));
  }
  return {};
}

Status SymbolicRun::add_child(uint32_t id, const Place& src, uint64_t row, const Ref& ref, float weight) {
  MOECCL_TRY(note_peer(id, ref));
  ValueId value = kUndefined;
  MOECCL_TRY(read(id, src, row, ref, value));
  if (values_.is_final(value))
    return fail(id, format("row {} of {} is final and is reduced again", row, ref_name(ref)));
  children_.push_back({value, weight});
  return {};
}

Status SymbolicRun::read(uint32_t id, const Place& place, uint64_t i, const Ref& ref, ValueId& value) {
  if (i >= place.length || place.first + i >= place.memory->size())
    return fail(id, format("element {} is beyond {}", i, ref_name(ref)));
  Unit& unit = place[i];
  const Access access = read_unit(unit, place.buffer, now(id), lanes_[id].clock);
  value = unit.value;
  return access.fault == Fault::kNone ? Status() : explain(id, access, ref, i);
}

Status SymbolicRun::write(uint32_t id, const Place& place, uint64_t i, const Ref& ref, ValueId value) {
  if (i >= place.length || place.first + i >= place.memory->size())
    return fail(id, format("element {} is beyond {}", i, ref_name(ref)));
  place[i].used |= allow_waste_;
  const Access access = write_unit(place[i], value, now(id), lanes_[id].clock);
  return access.fault == Fault::kNone ? Status() : explain(id, access, ref, i);
}

Status SymbolicRun::explain(uint32_t id, const Access& access, const Ref& ref, uint64_t i) const {
  const std::string what = format("element {} of {}", i, ref_name(ref));
  switch (access.fault) {
    case Fault::kNone:
      return {};
    case Fault::kUndefined:
      return fail(id, format("reads {}, which nobody has written", what));
    case Fault::kOverwritten:
      return fail(id, format("reads {} after {} overwrote it in place", what, past(access.other)));
    case Fault::kRaceWithWrite:
      return fail(id, format("touches {} unordered with the write of {}", what, past(access.other)));
    case Fault::kRaceWithRead:
      return fail(id, format("writes {} unordered with the read of {}", what, past(access.other)));
    case Fault::kDeadStore:
      return fail(id, format("overwrites {} before anyone read what {} wrote", what, past(access.other)));
  }
  return {};
}

Status SymbolicRun::check_all_ended() const {
  for (uint32_t id = 0; id < lanes_.size(); ++id) {
    const LaneState& lane = lanes_[id];
    if (lane.chunk == plan_.chunking.n_chunks) continue;
    const Step& step = program_of(id).lanes[lane.lane].steps[lane.step];
    return fail(id, format("waits for ever: signal {} of chunk {} is never sent", step.ordinal, lane.chunk - step.lag));
  }
  return {};
}

// Checks that no rank touches a user's buffers after the owner has ended its program.
Status SymbolicRun::check_peers_left() const {
  for (uint32_t r = 0; r < plan_.shape.n_ranks; ++r) {
    Clock end(lanes_.size(), 0);
    for (uint32_t l = first_lane_[r]; l < first_lane_[r + 1]; ++l)
      for (size_t i = 0; i < end.size(); ++i) end[i] = std::max(end[i], lanes_[l].clock[i]);
    for (uint32_t id = 0; id < lanes_.size(); ++id)
      if (last_touch_[r][id] > end[id])
        return error(moecclInternalError, "{}: touches a buffer of rank {}, which may have ended its program before",
                     past({id, last_touch_[r][id]}), r);
  }
  return {};
}

Status SymbolicRun::check_staging_used() const {
  if (allow_waste_) return {};
  for (uint32_t r = 0; r < staging_.size(); ++r)
    for (uint64_t i = 0; i < staging_[r].size(); ++i)
      if (!staging_[r][i].used)
        return error(moecclInternalError, "{}: writes staging element {} of rank {}, which nobody reads",
                     past(staging_[r][i].written), i, r);
  return {};
}

std::string SymbolicRun::position(uint32_t id) const {
  const LaneState& lane = lanes_[id];
  return format("{} at chunk {}", step_name(program_of(id), lane.lane, lane.step), lane.chunk);
}

std::string SymbolicRun::past(Epoch epoch) const {
  const LaneState& lane = lanes_[epoch.lane];
  const std::vector<Step>& steps = program_of(epoch.lane).lanes[lane.lane].steps;
  uint32_t time = 0;
  for (uint32_t chunk = 0; chunk < plan_.chunking.n_chunks; ++chunk)
    for (uint32_t s = 0; s < steps.size(); ++s)
      if (runs(steps[s], chunk) && ++time == epoch.time)
        return format("{} at chunk {}", step_name(program_of(epoch.lane), lane.lane, s), chunk);
  return "the start";
}

Status SymbolicRun::fail(uint32_t id, const std::string& why) const {
  return error(moecclInternalError, "{}: {}", position(id), why);
}

}  // namespace moeccl::plan
