// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/kernel_program.h"

#include <algorithm>
#include <cstring>

namespace moeccl::exec {

using namespace moeccl::cuda;
using plan::Buffer;
using plan::Ref;
using plan::Step;
using plan::StepKind;
using plan::When;

namespace {

static_assert(kWalkSigs == plan::kMaxSigs);
static_assert(static_cast<int>(WalkBuffer::kStaging) == static_cast<int>(Buffer::kStaging));
static_assert(static_cast<int>(WalkWhen::kLast) == static_cast<int>(When::kLast));

WalkRef record(const Ref& r) { return {r.rank, r.index, r.part, r.parts, static_cast<uint8_t>(r.buffer), 0}; }

// Memory that a data step uses. A rank's Input and Output may be the same memory: that depends on the call, not on the
// plan.
struct Touch {
  Ref ref;
  bool writes;
  bool conflicts(const Touch& o, bool same_chunk) const {
    if ((!writes && !o.writes) || ref.rank != o.ref.rank) return false;
    const bool staging = ref.buffer == Buffer::kStaging;
    if (staging != (o.ref.buffer == Buffer::kStaging)) return false;
    // Chunks of a block do not overlap, but a slot is used again.
    if (!staging && !same_chunk) return false;
    if (ref.buffer != o.ref.buffer) return true;
    if (ref.index != o.ref.index) return false;
    return ref.parts != o.ref.parts || ref.part == o.ref.part;
  }
};

bool is_rows(const Step& s) {
  return s.kind == StepKind::kGatherRows || s.kind == StepKind::kScatterRows || s.kind == StepKind::kReduceRows;
}

// Rows of different lists do not overlap, and a rank reads only slots that others write.
std::vector<Touch> touches(const plan::Program& program, const Step& s) {
  if (is_rows(s)) return {};
  const auto memory = [&](Ref ref) {
    if (program.holds_part(ref)) ref.part = 0, ref.parts = 1;  // any part fills the slot
    return ref;
  };
  std::vector<Touch> out{{memory(s.dst), true}};
  for (uint32_t i = 0; i < s.n_srcs; ++i) out.push_back({memory(program.srcs[s.first_src + i]), false});
  return out;
}

bool is_data(const Step& s) { return s.kind != StepKind::kSignal && s.kind != StepKind::kWait; }

// Returns the steps of a lane before which its blocks must meet. The body is walked twice here, as in a loop. Steps
// that run only at some chunks separate nothing.
std::vector<bool> meetings(const plan::Program& program, const plan::Lane& lane) {
  std::vector<bool> meets(lane.steps.size(), false);
  std::vector<Touch> before, now;  // of the chunk before and of this one, since the blocks last met
  for (int pass = 0; pass < 2; ++pass) {
    for (size_t i = 0; i < lane.steps.size(); ++i) {
      const Step& s = lane.steps[i];
      if (!is_data(s)) {
        if (s.kind == StepKind::kSignal && s.when == When::kEvery) before.clear(), now.clear();
        continue;
      }
      const std::vector<Touch> own = touches(program, s);
      const auto hits = [&](const std::vector<Touch>& others, bool same_chunk) {
        return std::any_of(own.begin(), own.end(), [&](const Touch& t) {
          return std::any_of(others.begin(), others.end(), [&](const Touch& o) { return t.conflicts(o, same_chunk); });
        });
      };
      if (meets[i] || hits(now, true) || hits(before, false)) {
        meets[i] = true;
        if (s.when == When::kEvery) before.clear(), now.clear();
      }
      now.insert(now.end(), own.begin(), own.end());
    }
    before.insert(before.end(), now.begin(), now.end());
    now.clear();
  }
  return meets;
}

Result<WalkStep> record(const Step& s) {
  WalkStep out{};
  switch (s.kind) {
    case StepKind::kSignal:
      out.kind = static_cast<uint8_t>(WalkKind::kSignal);
      break;
    case StepKind::kWait:
      out.kind = static_cast<uint8_t>(WalkKind::kWait);
      break;
    case StepKind::kPut:
    case StepKind::kCopy:
      out.kind = static_cast<uint8_t>(WalkKind::kCopy);
      break;
    case StepKind::kReduce:
      out.kind = static_cast<uint8_t>(WalkKind::kReduce);
      if (s.n_srcs > kMaxSources) {
        return error(moecclUnsupported, "a reduction of {} buffers: the persistent kernel takes {}", s.n_srcs,
                     kMaxSources);
      }
      break;
    case StepKind::kGatherRows:
    case StepKind::kScatterRows:
      out.kind = static_cast<uint8_t>(WalkKind::kRows);
      break;
    case StepKind::kReduceRows:
      out.kind = static_cast<uint8_t>(WalkKind::kRowSums);
      if (s.n_srcs > kMaxSources) {
        return error(moecclUnsupported, "a sum of rows of {} buffers: the persistent kernel takes {}", s.n_srcs,
                     kMaxSources);
      }
      break;
  }
  out.when = static_cast<uint8_t>(s.when);
  out.sig = s.sig;
  out.flags = s.final_reduce ? kWalkFinal : 0;
  out.lag = s.lag;
  out.run = 1;
  out.peer = s.peer;
  out.ordinal = is_rows(s) ? s.rows : s.ordinal;
  out.per_chunk = s.per_chunk;
  out.dst = record(s.dst);
  out.first_src = s.first_src;
  out.n_srcs = s.n_srcs;
  out.divisor = s.divisor;
  return out;
}

}  // namespace

Result<KernelProgram> compile_kernel_program(const plan::Program& program) {
  KernelProgram out;
  for (const plan::Lane& lane : program.lanes) {
    if (lane.steps.empty()) continue;
    const auto first = static_cast<uint32_t>(out.steps.size());
    const std::vector<bool> meets = meetings(program, lane);
    for (size_t i = 0; i < lane.steps.size(); ++i) {
      MOECCL_ASSIGN_OR_RETURN(WalkStep step, record(lane.steps[i]));
      if (meets[i]) step.flags |= kWalkBarrier;
      out.steps.push_back(step);
    }
    // Counts the runs from the end. A device step holds at most 65535, which suffices for a lane of that many ranks.
    for (size_t i = out.steps.size() - 1; i > first; --i) {
      const WalkStep& next = out.steps[i];
      WalkStep& step = out.steps[i - 1];
      const bool flag = step.kind <= static_cast<uint8_t>(WalkKind::kWait);
      if (flag && step.kind == next.kind && step.when == next.when && next.run < 0xffff)
        step.run = static_cast<uint16_t>(next.run + 1);
    }
    out.lanes.push_back({first, static_cast<uint32_t>(out.steps.size()) - first});
  }
  if (out.lanes.empty()) out.lanes.push_back({0, 0});  // a rank that has nothing to do enters and leaves
  if (out.lanes.size() > kWalkMostLanes) {
    return error(moecclUnsupported, "a program of {} lanes: the persistent kernel takes {}", out.lanes.size(),
                 kWalkMostLanes);
  }
  for (const Ref& r : program.srcs) out.refs.push_back(record(r));
  for (const auto& t : program.totals)
    out.totals.push_back({t.peer * kWalkSigs + t.sig, t.sent, t.awaited, t.once ? 1u : 0u});
  return out;
}

namespace {
template <class T>
size_t room(const std::vector<T>& v) {
  return (v.size() * sizeof(T) + 15) / 16 * 16;
}
}  // namespace

size_t KernelProgram::bytes() const { return room(lanes) + room(steps) + room(refs) + room(totals); }

KernelProgram::Offsets KernelProgram::write(std::byte* image) const {
  Offsets at{};
  size_t used = 0;
  const auto put = [&](const auto& v, size_t& offset) {
    offset = used;
    if (!v.empty()) std::memcpy(image + used, v.data(), v.size() * sizeof(v[0]));
    std::memset(image + used + v.size() * sizeof(v[0]), 0, room(v) - v.size() * sizeof(v[0]));
    used += room(v);
  };
  put(lanes, at.lanes);
  put(steps, at.steps);
  put(refs, at.refs);
  put(totals, at.totals);
  return at;
}

}  // namespace moeccl::exec
