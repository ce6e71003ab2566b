// SPDX-License-Identifier: Apache-2.0
#include "src/plan/discipline.h"

#include <map>
#include <tuple>

namespace moeccl::plan {

std::string ref_name(const Ref& ref) {
  const char* what = ref.buffer == Buffer::kInput    ? "input block"
                     : ref.buffer == Buffer::kOutput ? "output block"
                                                     : "slot";
  const std::string part = ref.parts == 1 ? "" : format("part {}/{} of ", ref.part, ref.parts);
  return format("{}{} {} of rank {}", part, what, ref.index, ref.rank);
}

std::string step_name(const Program& program, uint32_t lane, uint32_t step) {
  const Step& s = program.lanes[lane].steps[step];
  std::string what = step_kind_name(s.kind);
  if (s.kind == StepKind::kSignal) what += format(" to rank {}, sig {}", s.peer, s.sig);
  if (s.kind == StepKind::kWait) what += format(" for rank {}, sig {}", s.peer, s.sig);
  return format("rank {}, {} lane {}, step {} ({})", program.rank, lane_kind_name(program.lanes[lane].kind), lane, step,
                what);
}

namespace {

bool is_sync(const Step& step) { return step.kind == StepKind::kSignal || step.kind == StepKind::kWait; }
bool is_rows(const Step& step) {
  return step.kind == StepKind::kGatherRows || step.kind == StepKind::kScatterRows ||
         step.kind == StepKind::kReduceRows;
}

// Returns the first fault of a Ref, or "" if it has none.
std::string ref_fault(const Plan& plan, const Program& program, const Step& step, const Ref& ref, bool is_dst) {
  const Shape& shape = plan.shape;
  const bool own = ref.rank == program.rank;
  if (ref.rank >= shape.n_ranks) return format("there are {} ranks", shape.n_ranks);
  if (ref.parts == 0 || ref.part >= ref.parts) return "no such part";
  if (ref.buffer == Buffer::kStaging) {
    if (const uint32_t n = program.n_slots + program.n_part_slots; ref.index >= n)
      return format("there are {} slots", n);
    if (program.holds_part(ref) && ref.parts != program.slot_parts)
      return format("the slot has room for one of {} parts", program.slot_parts);
    const bool pushed = is_dst && (step.kind == StepKind::kPut || step.kind == StepKind::kGatherRows ||
                                   step.kind == StepKind::kReduceRows);
    if (!own && !pushed && !shape.reach.staging) return "the staging of a peer is out of reach here: put instead";
    return "";
  }
  if (is_dst && ref.buffer == Buffer::kInput) return "an Input is never written";
  const uint32_t blocks = ref.buffer == Buffer::kInput ? in_blocks(shape) : out_blocks(shape);
  if (ref.index >= blocks) return format("there are {} blocks", blocks);
  if (own) return "";
  if (shape.scaled && reduces(shape.op) && ref.buffer == Buffer::kInput)
    return "a scaled Input is read by its own rank alone";
  const bool copied_from = step.kind == StepKind::kCopy && !is_dst && shape.reach.reads;
  if (!shape.reach.views && !copied_from) return "the buffers of a peer are out of reach here";
  // A peer publishes only where the block for this rank starts in its Input.
  if (facts(shape.op).private_sizes && (ref.buffer == Buffer::kOutput || ref.index != program.rank))
    return "where that block of the peer starts is not known";
  return "";
}

// Returns how a step's fields, apart from its Refs, violate the rules of its kind, or "".
std::string shape_fault(const Plan& plan, const Program& program, const Step& step) {
  const bool own_dst = step.dst.rank == program.rank;
  const bool own_src = step.n_srcs > 0 && program.srcs[step.first_src].rank == program.rank;
  if (step.final_reduce && step.kind != StepKind::kReduce && step.kind != StepKind::kReduceRows)
    return "final_reduce belongs to reductions";
  if (step.divisor > 0 && !step.final_reduce) return "a divisor belongs to the last reduction";
  if (is_rows(step) != (step.rows != kNoRows)) return "row steps, and they alone, have a row list";
  if (is_rows(step) && !facts(plan.shape.op).rows) return "this operation moves blocks, not rows";
  if (!is_rows(step) && facts(plan.shape.op).rows) return "this operation moves rows, not blocks";
  switch (step.kind) {
    case StepKind::kSignal:
    case StepKind::kWait:
      return "";
    case StepKind::kPut:
      if (own_dst) return "a put goes to a peer: copy instead";
      if (!own_src) return "a put sends own memory";
      break;
    case StepKind::kCopy:
      if (!own_dst) return "a copy stays on its own rank: put instead";
      break;
    case StepKind::kReduce:
      if (!reduces(plan.shape.op)) return "this operation reduces nothing";
      return step.n_srcs == 0 ? "nothing to reduce" : "";
    case StepKind::kGatherRows:
      break;
    case StepKind::kScatterRows:
      if (!own_dst) return "scatter-rows spreads into own memory";
      break;
    case StepKind::kReduceRows:
      return "";
  }
  return step.n_srcs == 1 ? "" : "exactly one source is possible";
}

Status check_data_step(const Plan& plan, const Program& program, uint32_t lane, uint32_t index) {
  const Step& step = program.lanes[lane].steps[index];
  const auto fail = [&](const std::string& why) {
    return error(moecclInternalError, "{}: {}", step_name(program, lane, index), why);
  };
  if (uint64_t{step.first_src} + step.n_srcs > program.srcs.size()) return fail("its sources are beyond the list");
  if (const std::string why = shape_fault(plan, program, step); !why.empty()) return fail(why);
  if (const std::string why = ref_fault(plan, program, step, step.dst, true); !why.empty())
    return fail("destination " + ref_name(step.dst) + ": " + why);
  for (uint32_t i = 0; i < step.n_srcs; ++i) {
    const Ref& src = program.srcs[step.first_src + i];
    if (const std::string why = ref_fault(plan, program, step, src, false); !why.empty())
      return fail("source " + ref_name(src) + ": " + why);
  }
  return {};
}

// One end of a channel: all signals, or all waits, of an ordered pair and sig.
struct End {
  uint32_t n = 0;
  uint32_t lane = 0;
  uint32_t first_step = 0;
  When when = When::kEvery;
};
struct Channel {
  End sent, awaited;
};
using ChannelKey = std::tuple<uint32_t, uint32_t, uint8_t>;  // from, to, sig
using Channels = std::map<ChannelKey, Channel>;

Status add_sync_step(const Plan& plan, const Program& program, uint32_t lane, uint32_t index, Channels& channels) {
  const Step& step = program.lanes[lane].steps[index];
  const auto fail = [&](const std::string& why) {
    return error(moecclInternalError, "{}: {}", step_name(program, lane, index), why);
  };
  if (step.peer >= plan.shape.n_ranks) return fail(format("there are {} ranks", plan.shape.n_ranks));
  if (step.sig >= kMaxSigs) return fail(format("sigs are below {}", kMaxSigs));
  if (step.n_srcs != 0) return fail("it has no sources");
  const bool sends = step.kind == StepKind::kSignal;
  if (step.lag != 0 && (sends || step.when != When::kEvery)) return fail("only waits of every chunk can lag");
  const ChannelKey key =
      sends ? ChannelKey(program.rank, step.peer, step.sig) : ChannelKey(step.peer, program.rank, step.sig);
  End& end = sends ? channels[key].sent : channels[key].awaited;
  if (end.n == 0) end = {0, lane, index, step.when};
  if (end.lane != lane)
    return fail(format("lane {} uses the same sig: one lane of a rank must hold them all", end.lane));
  if (end.when != step.when)
    return fail(format("step {} uses the same sig at other chunks (first, last, every)", end.first_step));
  if (step.ordinal != end.n) return fail(format("ordinal {} should be {}: finalize() comes last", step.ordinal, end.n));
  ++end.n;
  return {};
}

Status check_channel(const Plan& plan, const ChannelKey& key, const Channel& channel) {
  const auto [from, to, sig] = key;
  const End &sent = channel.sent, &awaited = channel.awaited;
  if (sent.n != awaited.n)
    return error(moecclInternalError, "rank {} signals rank {} {} times on sig {}, which waits {} times ({})", from, to,
                 sent.n, sig, awaited.n,
                 sent.n > 0 ? step_name(plan.programs[from], sent.lane, sent.first_step)
                            : step_name(plan.programs[to], awaited.lane, awaited.first_step));
  if (sent.when != awaited.when)
    return error(moecclInternalError, "{}: its waits run at other chunks (first, last, every)",
                 step_name(plan.programs[from], sent.lane, sent.first_step));
  const auto check_count = [&](const Program& program, const End& end) -> Status {
    for (const Step& step : program.lanes[end.lane].steps) {
      const bool sends = step.kind == StepKind::kSignal;
      if (!is_sync(step) || step.sig != sig || sends != (&end == &sent)) continue;
      if (step.peer == (sends ? to : from) && step.per_chunk != end.n)
        return error(moecclInternalError, "rank {}: per_chunk {} should be {}: finalize() comes last", program.rank,
                     step.per_chunk, end.n);
    }
    return {};
  };
  MOECCL_TRY(check_count(plan.programs[from], sent));
  return check_count(plan.programs[to], awaited);
}

}  // namespace

Status check_discipline(const Plan& plan) {
  if (plan.programs.size() != plan.shape.n_ranks)
    return error(moecclInternalError, "{} programs for {} ranks", plan.programs.size(), plan.shape.n_ranks);
  Channels channels;
  for (uint32_t r = 0; r < plan.programs.size(); ++r) {
    const Program& program = plan.programs[r];
    if (program.rank != r) return error(moecclInternalError, "program {} says it is of rank {}", r, program.rank);
    if (program.depth == 0) return error(moecclInternalError, "rank {}: a depth of 0", r);
    const Program& first = plan.programs[0];
    if (program.n_slots != first.n_slots || program.depth != first.depth)
      return error(moecclInternalError, "rank {} has {} slots in {} rotations, rank 0 {} in {}", r, program.n_slots,
                   program.depth, first.n_slots, first.depth);
    if (program.n_part_slots != first.n_part_slots || program.slot_parts != first.slot_parts)
      return error(moecclInternalError, "rank {} has {} slots of a chunk's {} parts, rank 0 {} of {}", r,
                   program.n_part_slots, program.slot_parts, first.n_part_slots, first.slot_parts);
    for (uint32_t l = 0; l < program.lanes.size(); ++l)
      for (uint32_t s = 0; s < program.lanes[l].steps.size(); ++s)
        MOECCL_TRY(is_sync(program.lanes[l].steps[s]) ? add_sync_step(plan, program, l, s, channels)
                                                      : check_data_step(plan, program, l, s));
  }
  for (const auto& [key, channel] : channels) MOECCL_TRY(check_channel(plan, key, channel));
  return {};
}

}  // namespace moeccl::plan
