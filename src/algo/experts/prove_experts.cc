// SPDX-License-Identifier: Apache-2.0
#include "src/algo/experts/prove_experts.h"

#include <algorithm>
#include <span>

namespace moeccl::algo {

namespace {

constexpr uint32_t kLine = 64;
constexpr uint64_t kChunk = 3, kChunks = 3;  // elements; the last chunk has one
constexpr const char* kWrong = "the plan is wrong, please report it";

plan::ExpectedRow sum_of(const ReplicaPlacement& p, uint32_t expert, uint64_t count, uint64_t element, bool average) {
  plan::ExpectedRow row;
  const float weight = average ? 1.0f / static_cast<float>(p.n_replicas(expert)) : 1.0f;
  for (const ExpertHost& host : p.hosts[expert])
    for (const uint32_t slot : host.slots)
      row.terms.push_back({host.rank, static_cast<uint32_t>(slot * count + element), weight});
  return row;
}

}  // namespace

plan::BlockExpectation expected_sums(const ReplicaPlacement& p, bool average) {
  plan::BlockExpectation expected;
  for (uint32_t r = 0; r < p.n_ranks; ++r) {
    expected.input_blocks.push_back(p.n_slots(r));
    std::vector<plan::ExpectedRow>& blocks = expected.output.emplace_back();
    for (uint32_t s = p.first_slot[r]; s < p.first_slot[r + 1]; ++s)
      blocks.push_back(p.slot_expert[s] < 0 ? plan::ExpectedRow{{}, true}
                                            : sum_of(p, static_cast<uint32_t>(p.slot_expert[s]), 1, 0, average));
  }
  return expected;
}

plan::BlockExpectation expected_exchange(const ExpertExchangePlan& exchange) {
  const Placement& homes = exchange.homes();
  const bool gathers = exchange.shape().op == moecclOpExpertGather;
  plan::BlockExpectation expected;
  for (uint32_t r = 0; r < homes.n_ranks; ++r) {
    const std::vector<uint32_t>& held = exchange.held(r);
    expected.input_blocks.push_back(gathers ? homes.n_local(r) : static_cast<uint32_t>(held.size()));
    std::vector<plan::ExpectedRow>& blocks = expected.output.emplace_back();
    for (const uint32_t e : gathers ? std::span<const uint32_t>(held) : homes.experts_of(r)) {
      plan::ExpectedRow& block = blocks.emplace_back();
      if (gathers) {
        block.terms.push_back({homes.owner[e], homes.local_index[e], 1});
        continue;
      }
      for (uint32_t holder = 0; holder < homes.n_ranks; ++holder) {
        const std::vector<uint32_t>& theirs = exchange.held(holder);
        const auto at = std::lower_bound(theirs.begin(), theirs.end(), e);
        if (at != theirs.end() && *at == e)
          block.terms.push_back({holder, static_cast<uint32_t>(at - theirs.begin()), 1});
      }
    }
  }
  return expected;
}

plan::RowExpectation expected_rows(moecclOp_t op, const ReplicaPlacement& p, uint64_t count, bool average) {
  const uint64_t shard = shard_elements(count, p.n_ranks), shards = p.n_experts * shard;
  const bool places = op == moecclOpPlaceWeights;
  plan::RowExpectation expected;
  for (uint32_t r = 0; r < p.n_ranks; ++r) {
    const uint64_t slots = p.n_slots(r) * count;
    expected.input_rows.push_back(places ? shards : slots);
    // What no expert fills may hold anything: empty slots, and the ends of short shards.
    std::vector<plan::ExpectedRow>& rows =
        expected.output.emplace_back(places ? slots : shards, plan::ExpectedRow{{}, true});
    for (uint32_t s = 0; places && s < p.n_slots(r); ++s) {
      const int32_t e = p.slot_expert[p.first_slot[r] + s];
      for (uint64_t i = 0; e >= 0 && i < count; ++i)
        rows[s * count + i] = {{{static_cast<uint32_t>(i / shard),
                                 static_cast<uint32_t>(static_cast<uint64_t>(e) * shard + i % shard), 1}},
                               false};
    }
    const Shard mine = shard_of(count, p.n_ranks, r);
    for (uint32_t e = 0; !places && e < p.n_experts; ++e) {
      for (uint64_t i = 0; i < mine.length; ++i) {
        plan::ExpectedRow& row = rows[e * shard + i];
        if (op == moecclOpReduceGradients) {
          row = sum_of(p, e, count, mine.begin + i, average);
          continue;
        }
        const uint32_t source = gradient_source(p, e, r);
        const uint64_t first = p.host(e, source)->slots[0] * count;
        row = {{{source, static_cast<uint32_t>(first + mine.begin + i), 1}}, false};
      }
    }
  }
  return expected;
}

Status prove_blocks(plan::Plan plan, const plan::BlockExpectation& expected) {
  // Parts of an element for each rank must not be empty.
  const uint64_t chunk = kChunk + plan.shape.n_ranks;
  const uint64_t n_chunks = std::min<uint64_t>(plan.chunking.n_chunks, kChunks);
  plan.shape.element_bytes = kLine;
  plan.shape.count = n_chunks == 1 ? chunk : (n_chunks - 1) * chunk + 1;
  plan.shape.staging_bytes = ~uint64_t{0};  // the staging of the real size says nothing about this one
  plan.chunking = {chunk, static_cast<uint32_t>(n_chunks)};
  const std::vector<plan::Binding> bindings = plan::uniform_bindings(plan);
  plan::CheckInput input{plan, bindings};
  input.blocks = &expected;
  return plan::check(input).with_context(kWrong);
}

Status prove_rows(const WholeRows& rows, const ReplicaPlacement& placement, uint64_t count, bool average) {
  const plan::RowExpectation expected = expected_rows(rows.plan.shape.op, placement, count, average);
  return plan::check({rows.plan, rows.bindings, &expected}).with_context(kWrong);
}

Status prove_rows(const ReplicaPlacement& placement, bool average,
                  const std::function<Result<WholeRows>(const RowSize&)>& make) {
  constexpr uint64_t kShard = (kChunks - 1) * kChunk + 1;
  RowSize size{kShard * placement.n_ranks - 1, kLine, uint64_t{1} << 40};  // the last rank's shard is shorter
  MOECCL_ASSIGN_OR_RETURN(const WholeRows one_chunk, make(size));
  const plan::Program& program = one_chunk.plan.programs[0];
  const uint64_t staging = uint64_t{program.n_slots} * program.depth * one_chunk.bindings[0].slot_elements * kLine;
  if (staging == 0) return prove_rows(one_chunk, placement, size.count, average);
  size.staging_bytes = staging / kShard * kChunk;
  MOECCL_ASSIGN_OR_RETURN(const WholeRows rows, make(size));
  return prove_rows(rows, placement, size.count, average);
}

}  // namespace moeccl::algo
