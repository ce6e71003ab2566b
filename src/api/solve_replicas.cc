// SPDX-License-Identifier: Apache-2.0
// Entry points of expert replication and expert load balance.
#include "src/api/solve_args.h"
#include "src/solve/balance.h"
#include "src/solve/checks.h"
#include "src/solve/replica_place.h"
#include "src/solve/replicate.h"

using namespace moeccl;

namespace {

Status check_factor(double capacity_factor) {
  constexpr double kMost = 1e9;
  if (capacity_factor > 0 && capacity_factor <= kMost) return {};
  return error(moecclInvalidArgument, "capacity_factor is {}: give a number above 0, at most {}", capacity_factor,
               kMost);
}

}  // namespace

moecclResult_t moecclReplicaCounts(const double* popularity, int32_t n_experts, int32_t n_slots, int32_t* counts) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_TRY(solve::check_popularity(popularity, n_experts, n_slots));
    MOECCL_TRY(api::require(counts, "counts", "room for n_experts numbers"));
    solve::replica_counts(popularity, n_experts, n_slots, counts);
    return {};
  });
}

moecclResult_t moecclReplicaCountsFewestDrops(const double* popularity, int32_t n_experts, int32_t n_slots,
                                              double capacity_factor, int32_t* counts) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_TRY(solve::check_popularity(popularity, n_experts, n_slots));
    MOECCL_TRY(check_factor(capacity_factor));
    MOECCL_TRY(api::require(counts, "counts", "room for n_experts numbers"));
    solve::fewest_drops(popularity, n_experts, n_slots, capacity_factor, counts);
    return {};
  });
}

moecclResult_t moecclReplicaDrops(const double* popularity, const int32_t* counts, int32_t n_experts, int32_t n_slots,
                                  double capacity_factor, double* dropped) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_TRY(solve::check_popularity(popularity, n_experts, n_slots));
    MOECCL_TRY(check_factor(capacity_factor));
    MOECCL_TRY(api::require(counts, "counts", "replicas of each expert"));
    MOECCL_TRY(solve::check_counts(counts, n_experts, n_slots));
    MOECCL_TRY(api::require(dropped, "dropped", "the address of a double"));
    *dropped = solve::dropped(popularity, counts, n_experts, n_slots, capacity_factor);
    return {};
  });
}

moecclResult_t moecclSolveReplicas(const moecclReplicaProblem_t* problem, int32_t* slot_expert,
                                   moecclReplicaAnswer_t* answer) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(const moecclReplicaProblem_t p, api::take(problem, solve::checked));
    MOECCL_TRY(api::require(slot_expert, "slot_expert", "room for n_ranks * slots_per_rank experts"));
    MOECCL_TRY(api::check_answer(answer));
    moecclReplicaAnswer_t made{};
    solve::solve_replicas(p, slot_expert, &made);
    give(made, answer);
    return {};
  });
}

moecclResult_t moecclReplicaSplit(const moecclReplicaProblem_t* problem, const int32_t* slot_expert, int32_t* split) {
  return api::guarded(nullptr, [&]() -> Status {
    const auto without_counts = +[](const moecclReplicaProblem_t& given) {
      moecclReplicaProblem_t adopted = given;
      adopted.counts = nullptr;
      return solve::checked(adopted);
    };
    MOECCL_ASSIGN_OR_RETURN(const moecclReplicaProblem_t p, api::take(problem, without_counts));
    MOECCL_TRY(api::require(slot_expert, "slot_expert", "the expert of each slot"));
    MOECCL_TRY(api::require(split, "split", "room for [n_slots][n_ranks] counts"));
    MOECCL_TRY(solve::check_slots(slot_expert, p.n_ranks * p.slots_per_rank, p.n_experts));
    solve::split_tokens(p, slot_expert, split);
    return {};
  });
}

moecclResult_t moecclSolveBalance(const moecclBalanceProblem_t* problem, int32_t* slot_expert,
                                  moecclBalanceAnswer_t* answer) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(const moecclBalanceProblem_t p, api::take(problem, solve::checked));
    MOECCL_TRY(api::require(slot_expert, "slot_expert", "room for n_layers * n_slots experts"));
    MOECCL_TRY(api::check_answer(answer));
    moecclBalanceAnswer_t made{};
    solve::solve_balance(p, slot_expert, &made);
    give(made, answer);
    return {};
  });
}

moecclResult_t moecclGradSources(const int32_t* slot_expert, int32_t n_experts, int32_t n_ranks, int32_t slots_per_rank,
                                 int32_t* source, int64_t* sends) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_TRY(api::require(slot_expert, "slot_expert", "the expert of each slot"));
    MOECCL_TRY(api::require(source, "source", "room for [n_experts][n_ranks] ranks"));
    MOECCL_TRY(solve::between("n_experts", n_experts, 1, 65535));
    MOECCL_TRY(solve::between("n_ranks", n_ranks, 1, 1 << 16));
    MOECCL_TRY(solve::between("slots_per_rank", slots_per_rank, 1, 1024));
    MOECCL_TRY(solve::check_slots(slot_expert, n_ranks * slots_per_rank, n_experts));
    solve::grad_sources(slot_expert, n_experts, n_ranks, slots_per_rank, source, sends);
    return {};
  });
}

moecclResult_t moecclReplicaCommTime(const moecclReplicaCost_t* cost, double* static_s, double* adaptive_s) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(const moecclReplicaCost_t c, adopt(cost, "cost"));
    MOECCL_TRY(api::require(static_s, "static_s", "the address of a double"));
    MOECCL_TRY(api::require(adaptive_s, "adaptive_s", "the address of a double"));
    return solve::replica_comm_time(c, static_s, adaptive_s);
  });
}
