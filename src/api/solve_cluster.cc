// SPDX-License-Identifier: Apache-2.0
// Entry points of the solvers that run once for a cluster: hybrid domains, pipeline chunks, layout.
#include "src/api/solve_args.h"
#include "src/base/adopt.h"
#include "src/solve/arena.h"
#include "src/solve/chunks.h"
#include "src/solve/compute.h"
#include "src/solve/domains.h"
#include "src/solve/layout.h"

using namespace moeccl;

moecclResult_t moecclDomainProportion(int32_t n_workers, double bandwidth, double pre_expert_s, double data_bytes,
                                      double expert_bytes, double* p, double* latency_s) {
  return api::guarded(nullptr, [&]() -> Status {
    const solve::OneLevel level{static_cast<double>(n_workers), bandwidth, pre_expert_s, data_bytes, expert_bytes};
    MOECCL_TRY(solve::check(level));
    MOECCL_TRY(api::require(p, "p", "the address of a double"));
    *p = solve::best_proportion(level);
    if (latency_s != nullptr) *latency_s = solve::latency(level, *p);
    return {};
  });
}

moecclResult_t moecclComputeLatency(const moecclComputeShape_t* shape, double* pre_expert_s, double* expert_s) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(const moecclComputeShape_t given, adopt(shape, "shape"));
    MOECCL_ASSIGN_OR_RETURN(const moecclComputeShape_t s, solve::checked_shape(given));
    const solve::ComputeTime t = solve::compute_time(s);
    if (pre_expert_s != nullptr) *pre_expert_s = t.pre_expert_s;
    if (expert_s != nullptr) *expert_s = t.expert_s;
    return {};
  });
}

moecclResult_t moecclSolveDomains(const moecclDomainProblem_t* problem, int32_t* domain, moecclDomainAnswer_t* answer) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(const moecclDomainProblem_t p, api::take(problem, solve::checked));
    MOECCL_TRY(api::require(domain, "domain", "room for n_levels sizes"));
    MOECCL_TRY(api::check_answer(answer));
    moecclDomainAnswer_t made{};
    solve::solve_domains(p, domain, &made);
    give(made, answer);
    return {};
  });
}

moecclResult_t moecclDomainLatency(const moecclDomainProblem_t* problem, const int32_t* domain, double* s) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(const moecclDomainProblem_t p, api::take(problem, solve::checked));
    MOECCL_TRY(api::require(domain, "domain", "n_levels sizes"));
    MOECCL_TRY(api::require(s, "s", "the address of a double"));
    MOECCL_TRY(solve::check_domain(p, domain));
    *s = solve::domain_time(p, domain).total_s;
    return {};
  });
}

moecclResult_t moecclDomainLocate(const moecclDomainProblem_t* problem, int64_t gpu, int32_t* location) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(const moecclDomainProblem_t p, api::take(problem, solve::checked));
    MOECCL_TRY(api::require(location, "location", "room for n_levels numbers"));
    return solve::locate(p, gpu, location);
  });
}

moecclResult_t moecclDomainLink(const moecclDomainProblem_t* problem, const int32_t* domain, int32_t level,
                                int64_t gpu_m, int64_t gpu_n, moecclDomainLink_t* link) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(const moecclDomainProblem_t p, api::take(problem, solve::checked));
    MOECCL_TRY(api::require(domain, "domain", "n_levels sizes"));
    MOECCL_TRY(api::require(link, "link", "the address of a moecclDomainLink_t"));
    MOECCL_TRY(solve::check_domain(p, domain));
    MOECCL_ASSIGN_OR_RETURN(*link, solve::link_at(p, domain, level, gpu_m, gpu_n));
    return {};
  });
}

moecclResult_t moecclSolveChunks(const moecclChunkProblem_t* problem, moecclChunkAnswer_t* answer) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(const moecclChunkProblem_t p, api::take(problem, solve::checked));
    MOECCL_TRY(api::require(answer, "answer", "the address of a moecclChunkAnswer_t"));
    MOECCL_TRY(api::check_answer(answer));
    moecclChunkAnswer_t made{};
    solve::solve_chunks(p, &made);
    give(made, answer);
    return {};
  });
}

moecclResult_t moecclChunkTime(const moecclChunkProblem_t* problem, moecclChunkStrategy_t strategy, int32_t n_chunks,
                               double* us) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(const moecclChunkProblem_t p, api::take(problem, solve::checked));
    MOECCL_TRY(api::require(us, "us", "the address of a double"));
    if (solve::raw(strategy) < 0 || solve::raw(strategy) > moecclChunkO3)
      return error(moecclInvalidArgument, "strategy is {}: give a moecclChunkStrategy_t", solve::raw(strategy));
    if (n_chunks < 1 || (strategy < moecclChunkO2 && n_chunks != 1))
      return error(moecclInvalidArgument, "n_chunks is {}: 1, or for O2 and O3 more", n_chunks);
    *us = solve::chunk_us(p, strategy, n_chunks);
    return {};
  });
}

moecclResult_t moecclSolveLayout(const moecclLayoutProblem_t* problem, moecclLayout_t* layouts, int32_t max_layouts,
                                 int32_t* n_layouts) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(const moecclLayoutProblem_t p, adopt(problem, "problem"));
    MOECCL_TRY(solve::check(p));
    if (max_layouts < 0) return error(moecclInvalidArgument, "max_layouts is {}: give 0 or more", max_layouts);
    if (max_layouts > 0) MOECCL_TRY(api::require(layouts, "layouts", "room for max_layouts layouts"));
    MOECCL_TRY(api::require(n_layouts, "n_layouts", "the address of an int32_t"));
    const auto found = solve::solve_layout(p);
    *n_layouts = static_cast<int32_t>(found.size());
    std::copy_n(found.begin(), std::min(found.size(), static_cast<size_t>(max_layouts)), layouts);
    return {};
  });
}

moecclResult_t moecclPriceLayout(const moecclLayoutProblem_t* problem, const moecclLayout_t* layout,
                                 moecclLayoutCost_t* cost) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(const moecclLayoutProblem_t p, adopt(problem, "problem"));
    MOECCL_TRY(solve::check(p));
    MOECCL_TRY(api::require(layout, "layout", "a moecclLayout_t of moecclSolveLayout"));
    MOECCL_TRY(solve::check(p, *layout));
    MOECCL_TRY(check_out(cost, "cost"));
    moecclLayout_t priced = *layout;
    solve::price_layout(p, priced);
    give(solve::step_of(p, priced), cost);
    return {};
  });
}
