// SPDX-License-Identifier: Apache-2.0
// Small plans written by hand, as examples of the language and as test cases of the checker and the cost model.
#pragma once

#include <utility>
#include <vector>

#include "src/plan/checker.h"
#include "src/plan/plan.h"

namespace moeccl::plan::testing {

inline Ref in(uint32_t rank, uint16_t block = 0) { return {rank, Buffer::kInput, block, 0, 1}; }
inline Ref out(uint32_t rank, uint16_t block = 0) { return {rank, Buffer::kOutput, block, 0, 1}; }
inline Ref slot(uint32_t rank, uint16_t index) { return {rank, Buffer::kStaging, index, 0, 1}; }
inline Ref part(Ref ref, uint32_t part, uint32_t parts) {
  ref.part = static_cast<uint16_t>(part);
  ref.parts = static_cast<uint16_t>(parts);
  return ref;
}

class Writer {
 public:
  Writer(uint32_t rank, uint32_t n_slots, uint32_t depth = 1) {
    p_.rank = rank;
    p_.n_slots = n_slots;
    p_.depth = depth;
    p_.lanes.emplace_back();
  }
  Writer& lane(LaneKind kind) {
    p_.lanes.push_back({kind, {}});
    return *this;
  }
  Writer& move(StepKind kind, Ref dst, std::vector<Ref> srcs, bool final = false, uint32_t rows = kNoRows) {
    Step s;
    s.kind = kind;
    s.when = when_;
    s.dst = dst;
    s.first_src = static_cast<uint32_t>(p_.srcs.size());
    s.n_srcs = static_cast<uint32_t>(srcs.size());
    s.final_reduce = final;
    s.rows = rows;
    p_.srcs.insert(p_.srcs.end(), srcs.begin(), srcs.end());
    p_.lanes.back().steps.push_back(s);
    return *this;
  }
  Writer& put(Ref dst, Ref src) { return move(StepKind::kPut, dst, {src}); }
  Writer& copy(Ref dst, Ref src) { return move(StepKind::kCopy, dst, {src}); }
  Writer& reduce(Ref dst, std::vector<Ref> srcs, bool final = true) {
    return move(StepKind::kReduce, dst, std::move(srcs), final);
  }
  Writer& signal(uint32_t peer, uint8_t sig) { return sync(StepKind::kSignal, peer, sig, 0); }
  Writer& wait(uint32_t peer, uint8_t sig, uint16_t lag = 0) { return sync(StepKind::kWait, peer, sig, lag); }
  Writer& when(When when) {
    when_ = when;
    return *this;
  }
  Program done() {
    p_.finalize();
    return p_;
  }

 private:
  Writer& sync(StepKind kind, uint32_t peer, uint8_t sig, uint16_t lag) {
    Step s;
    s.kind = kind;
    s.when = when_;
    s.peer = peer;
    s.sig = sig;
    s.lag = lag;
    p_.lanes.back().steps.push_back(s);
    return *this;
  }
  Program p_;
  When when_ = When::kEvery;
};

inline Plan plan_for(moecclOp_t op, uint32_t n_ranks, uint64_t chunk, uint32_t n_chunks) {
  Plan plan;
  plan.algorithm = "by hand";
  plan.shape.op = op;
  plan.shape.n_ranks = n_ranks;
  plan.shape.count = chunk * n_chunks;
  plan.shape.element_bytes = 64;
  plan.chunking = {chunk, n_chunks};
  return plan;
}

// Rank 0 puts chunks into two rotating slots of rank 1, which returns credits. sig 0: filled, sig 1: emptied.
inline Plan broadcast_with_credits(uint64_t chunk = 4, uint32_t n_chunks = 5) {
  Plan plan = plan_for(moecclOpBroadcast, 2, chunk, n_chunks);
  plan.shape.reach = {false, false, false};
  plan.programs = {
      Writer(0, 1, 2).wait(1, 1, 2).put(slot(1, 0), in(0)).signal(1, 0).copy(out(0), in(0)).done(),
      Writer(1, 1, 2).wait(0, 0).copy(out(1), slot(1, 0)).signal(0, 1).done(),
  };
  return plan;
}

// All buffers are accessible: each rank sums its part of all Inputs into its own Output and puts it to the others.
inline Plan direct_all_reduce(uint32_t n, uint64_t chunk, uint32_t n_chunks) {
  Plan plan = plan_for(moecclOpAllReduce, n, chunk, n_chunks);
  plan.shape.reach = {true, true, true};
  for (uint32_t r = 0; r < n; ++r) {
    Writer w(r, 0);
    std::vector<Ref> all;
    for (uint32_t p = 0; p < n; ++p) all.push_back(part(in(p), r, n));
    const auto meet = [&](When when, uint8_t sig) {
      w.when(when);
      for (uint32_t p = 0; p < n; ++p)
        if (p != r) w.signal(p, sig);
      for (uint32_t p = 0; p < n; ++p)
        if (p != r) w.wait(p, sig);
      w.when(When::kEvery);
    };
    meet(When::kFirst, 0);
    w.reduce(part(out(r), r, n), all);
    for (uint32_t p = 0; p < n; ++p)
      if (p != r) w.put(part(out(p), r, n), part(out(r), r, n));
    meet(When::kLast, 1);
    plan.programs.push_back(w.done());
  }
  return plan;
}

// Only puts: every rank sends its blocks to its peers' slots, one slot per sender, and copies out. With two rotations,
// a peer that signals chunk c + 1 has already emptied its slots of chunk c - 1.
inline Plan flat_all_to_all(uint32_t n, uint64_t chunk, uint32_t n_chunks, moecclOp_t op = moecclOpAllToAll) {
  Plan plan = plan_for(op, n, chunk, n_chunks);
  plan.shape.reach = {false, false, false};
  for (uint32_t r = 0; r < n; ++r) {
    Writer w(r, n, 2);
    w.copy(out(r, static_cast<uint16_t>(r)), in(r, static_cast<uint16_t>(r)));
    for (uint32_t i = 1; i < n; ++i) {
      const uint32_t p = (r + i) % n;
      w.put(slot(p, static_cast<uint16_t>(r)), in(r, static_cast<uint16_t>(p))).signal(p, 0);
    }
    for (uint32_t i = 1; i < n; ++i) {
      const uint32_t p = (r + n - i) % n;
      w.wait(p, 0).copy(out(r, static_cast<uint16_t>(p)), slot(r, static_cast<uint16_t>(p)));
    }
    plan.programs.push_back(w.done());
  }
  return plan;
}

}  // namespace moeccl::plan::testing
