// SPDX-License-Identifier: Apache-2.0
// Entry points of sample placement.

#include "src/api/solve_args.h"
#include "src/solve/assignment.h"
#include "src/solve/checks.h"
#include "src/solve/predict.h"
#include "src/solve/sample.h"

using namespace moeccl;

namespace {

Status solve_into(const moecclSampleProblem_t* problem, int32_t* placement, moecclSampleAnswer_t* answer,
                  void* workspace, size_t workspace_bytes) {
  MOECCL_ASSIGN_OR_RETURN(const moecclSampleProblem_t p, api::take(problem, solve::checked));
  if (p.n_samples > 0) MOECCL_TRY(api::require(placement, "placement", "room for n_samples devices"));
  MOECCL_TRY(api::check_answer(answer));
  MOECCL_ASSIGN_OR_RETURN(auto w, solve::Workspace::make(workspace, workspace_bytes, solve::sample_bytes(p),
                                                         "moecclSolveSamplesWorkspace"));
  moecclSampleAnswer_t made{};
  solve::solve_samples(p, placement, &made, w.arena());
  give(made, answer);
  return {};
}

Status evaluate(const moecclSampleProblem_t* problem, const int32_t* placement, moecclSampleAnswer_t* answer) {
  MOECCL_ASSIGN_OR_RETURN(const moecclSampleProblem_t p, api::take(problem, solve::checked));
  if (p.n_samples > 0) MOECCL_TRY(api::require(placement, "placement", "n_samples devices"));
  MOECCL_TRY(api::require(answer, "answer", "the address of a moecclSampleAnswer_t"));
  MOECCL_TRY(api::check_answer(answer));
  MOECCL_TRY(solve::check_placement(p, placement));
  MOECCL_ASSIGN_OR_RETURN(auto w, solve::Workspace::make(nullptr, 0, solve::sample_bytes(p), ""));
  moecclSampleAnswer_t made{};
  solve::evaluate_samples(p, placement, &made, w.arena());
  give(made, answer);
  return {};
}

Status check_bins(int32_t n_items, int32_t n_bins) {
  MOECCL_TRY(solve::between("n_items", n_items, 0, 1 << 28));
  MOECCL_TRY(solve::between("n_bins", n_bins, 1, 1 << 15));
  return {};
}

Status assignment(const solve::Assignment& a, int32_t* bin, int64_t* total, void* workspace, size_t workspace_bytes) {
  MOECCL_TRY(check_bins(a.n_items, a.n_bins));
  MOECCL_TRY(api::require(a.capacity, "capacity", "n_bins numbers"));
  if (a.n_items > 0) {
    MOECCL_TRY(api::require(a.cost, "cost", "costs[n_items][n_bins]"));
    MOECCL_TRY(api::require(bin, "bin", "room for n_items bins"));
  }
  MOECCL_TRY(check(a));
  MOECCL_ASSIGN_OR_RETURN(
      auto w, solve::Workspace::make(workspace, workspace_bytes, solve::assignment_bytes(a.n_items, a.n_bins),
                                     "moecclSolveAssignmentWorkspace"));
  const int64_t sum = solve::assign(a, bin, w.arena());
  if (total != nullptr) *total = sum;
  return {};
}

}  // namespace

moecclResult_t moecclSolveSamples(const moecclSampleProblem_t* problem, int32_t* placement,
                                  moecclSampleAnswer_t* answer, void* workspace, size_t workspace_bytes) {
  return api::guarded(nullptr, [&] { return solve_into(problem, placement, answer, workspace, workspace_bytes); });
}

moecclResult_t moecclSolveSamplesWorkspace(const moecclSampleProblem_t* problem, size_t* bytes) {
  return api::query_size(problem, solve::checked, solve::sample_bytes, bytes);
}

moecclResult_t moecclEvaluateSamples(const moecclSampleProblem_t* problem, const int32_t* placement,
                                     moecclSampleAnswer_t* answer) {
  return api::guarded(nullptr, [&] { return evaluate(problem, placement, answer); });
}

moecclResult_t moecclSolveAssignment(const int32_t* cost, const int32_t* capacity, int32_t n_items, int32_t n_bins,
                                     int32_t* bin, int64_t* total, void* workspace, size_t workspace_bytes) {
  return api::guarded(nullptr, [&] {
    return assignment({cost, capacity, n_items, n_bins}, bin, total, workspace, workspace_bytes);
  });
}

moecclResult_t moecclSolveAssignmentWorkspace(int32_t n_items, int32_t n_bins, size_t* bytes) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_TRY(api::require(bytes, "bytes", "the address of a size_t"));
    MOECCL_TRY(check_bins(n_items, n_bins));
    *bytes = solve::assignment_bytes(n_items, n_bins);
    return {};
  });
}

moecclResult_t moecclPredictorUpdate(double* joint, int32_t n_now, int32_t n_next, double decay,
                                     const int32_t* topk_now, const int32_t* topk_next, int64_t n_tokens,
                                     int32_t top_k) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_TRY(api::require(joint, "joint", "zeroed memory of n_now * n_next doubles"));
    if (n_tokens > 0) {
      MOECCL_TRY(api::require(topk_now, "topk_now", "experts[n_tokens][top_k]"));
      MOECCL_TRY(api::require(topk_next, "topk_next", "experts[n_tokens][top_k]"));
    }
    return solve::update_predictor(joint, n_now, n_next, decay, {topk_now, topk_next, n_tokens, top_k});
  });
}

moecclResult_t moecclPredictorApply(const double* joint, int32_t n_now, int32_t n_next, const int32_t* num_now,
                                    int32_t n_samples, int32_t* num_next) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_TRY(api::require(joint, "joint", "what moecclPredictorUpdate filled"));
    if (n_samples > 0) {
      MOECCL_TRY(api::require(num_now, "num_now", "counts[n_samples][n_now]"));
      MOECCL_TRY(api::require(num_next, "num_next", "room for [n_samples][n_next]"));
    }
    return solve::apply_predictor(joint, n_now, n_next, num_now, n_samples, num_next);
  });
}
