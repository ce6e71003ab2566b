// SPDX-License-Identifier: Apache-2.0
#include "src/plan/plan.h"

#include <algorithm>

#include "src/base/names.h"

namespace moeccl::plan {

const char* step_kind_name(StepKind kind) {
  static constexpr const char* kNames[kNumStepKinds] = {"put",    "signal",      "wait",         "copy",
                                                        "reduce", "gather-rows", "scatter-rows", "reduce-rows"};
  return name_among(kNames, kind);
}

const char* lane_kind_name(LaneKind kind) {
  static constexpr const char* kNames[] = {"main", "inter", "intra", "copy"};
  return name_among(kNames, kind);
}

namespace {

// How often one rank's body uses one direction of one pair and sig.
struct Count {
  uint32_t n = 0;
  bool once = false;
};

void add_totals(std::vector<Program::SigTotal>& totals, uint32_t peer, uint8_t sig, Count sent, Count awaited) {
  if (sent.n != 0 && awaited.n != 0 && sent.once != awaited.once) {
    totals.push_back({peer, sig, sent.n, 0, sent.once});
    totals.push_back({peer, sig, 0, awaited.n, awaited.once});
  } else if (sent.n != 0 || awaited.n != 0) {
    totals.push_back({peer, sig, sent.n, awaited.n, sent.n != 0 ? sent.once : awaited.once});
  }
}

void count_copies(Lane& lane, const std::vector<Ref>& srcs) {
  for (size_t i = 0; i < lane.steps.size(); ++i) {
    Step& step = lane.steps[i];
    step.copies = 0;
    if (step.kind != StepKind::kReduce) continue;
    for (size_t j = i + 1; j < lane.steps.size(); ++j) {
      const Step& next = lane.steps[j];
      const bool moves = next.kind == StepKind::kPut || next.kind == StepKind::kCopy;
      if (!moves || next.when != step.when || !(srcs[next.first_src] == step.dst)) break;
      ++step.copies;
    }
  }
}

}  // namespace

void Program::finalize() {
  const auto foreign = [this](const Ref& ref) { return ref.rank != rank && ref.buffer != Buffer::kStaging; };
  touches_peers = std::any_of(srcs.begin(), srcs.end(), foreign);
  for (const Lane& lane : lanes) {
    touches_peers = touches_peers || std::any_of(lane.steps.begin(), lane.steps.end(), [&](const Step& s) {
                      return s.kind != StepKind::kSignal && s.kind != StepKind::kWait && foreign(s.dst);
                    });
  }
  uint32_t n_peers = 0;
  for (const Lane& lane : lanes)
    for (const Step& step : lane.steps)
      if (step.kind == StepKind::kSignal || step.kind == StepKind::kWait) n_peers = std::max(n_peers, step.peer + 1);
  // The arrays are dense: a body talks to most ranks, and counting must stay cheap for thousands of steps.
  std::vector<Count> sent(size_t{n_peers} * kMaxSigs), awaited(size_t{n_peers} * kMaxSigs);
  const auto count_of = [&](const Step& step) -> Count& {
    return (step.kind == StepKind::kSignal ? sent : awaited)[size_t{step.peer} * kMaxSigs + step.sig % kMaxSigs];
  };
  for (Lane& lane : lanes) {
    for (Step& step : lane.steps) {
      if (step.kind != StepKind::kSignal && step.kind != StepKind::kWait) continue;
      Count& count = count_of(step);
      step.ordinal = count.n++;
      count.once = step.when != When::kEvery;
    }
  }
  for (Lane& lane : lanes)
    for (Step& step : lane.steps)
      if (step.kind == StepKind::kSignal || step.kind == StepKind::kWait) step.per_chunk = count_of(step).n;
  for (Lane& lane : lanes) count_copies(lane, srcs);
  totals.clear();
  for (size_t i = 0; i < sent.size(); ++i)
    add_totals(totals, static_cast<uint32_t>(i / kMaxSigs), static_cast<uint8_t>(i % kMaxSigs), sent[i], awaited[i]);
}

uint32_t Program::block_slots(uint32_t slot) const {
  const auto after =
      std::partition_point(slot_runs.begin(), slot_runs.end(), [&](const SlotRun& run) { return run.first <= slot; });
  if (after == slot_runs.begin()) return 1;
  const SlotRun& run = *std::prev(after);
  return (slot - run.first) % run.width == 0 ? run.width : 0;
}

uint32_t Program::n_steps() const {
  size_t n = 0;
  for (const Lane& lane : lanes) n += lane.steps.size();
  return static_cast<uint32_t>(n);
}

uint32_t in_blocks(const Shape& shape) {
  return shape.most_in_blocks > 0 ? shape.most_in_blocks : in_blocks(shape.op, shape.n_ranks);
}

uint32_t out_blocks(const Shape& shape) {
  return shape.most_out_blocks > 0 ? shape.most_out_blocks : out_blocks(shape.op, shape.n_ranks);
}

}  // namespace moeccl::plan
