// SPDX-License-Identifier: Apache-2.0
// What the plans of a placement must leave on every rank, and proofs that they do, as MOECCL_CHECK_PLANS asks for them.
// A proof takes experts of few elements, each as large as a line, in three chunks: steps depend on the placement and
// the way, and hardly on the size.
#pragma once

#include <functional>

#include "src/algo/experts/expert_exchange.h"
#include "src/algo/experts/expert_rows.h"
#include "src/plan/checker.h"

namespace moeccl::algo {

// With more ranks, a proof takes too long to be made while a program runs.
inline constexpr uint32_t kMostProvedRanks = 64;

// ExpertAllReduce: every slot has the sum, or the mean, of its expert's replicas.
plan::BlockExpectation expected_sums(const ReplicaPlacement& placement, bool average);
// ExpertGather: the held experts. ExpertReduce: own experts, summed over all ranks that hold them.
plan::BlockExpectation expected_exchange(const ExpertExchangePlan& exchange);
// CollectGradients, ReduceGradients and PlaceWeights, with experts of `count` elements.
plan::RowExpectation expected_rows(moecclOp_t op, const ReplicaPlacement& placement, uint64_t count, bool average);

// Proves a plan of blocks, with the programs of all ranks, for experts of any size.
Status prove_blocks(plan::Plan plan, const plan::BlockExpectation& expected);

// make: builds all ranks' rows of a call for experts of this size.
Status prove_rows(const ReplicaPlacement& placement, bool average,
                  const std::function<Result<WholeRows>(const RowSize&)>& make);
// Does the same for rows that were built for experts of `count` elements, each as large as a line.
Status prove_rows(const WholeRows& rows, const ReplicaPlacement& placement, uint64_t count, bool average);

}  // namespace moeccl::algo
