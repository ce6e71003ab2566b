// SPDX-License-Identifier: Apache-2.0
// Entry points of solve.h for sample placement on a thread of its own.
#include <memory>

#include "src/api/convert.h"
#include "src/api/solve_args.h"
#include "src/moe/background_solver.h"
#include "src/solve/sample.h"

using namespace moeccl;

namespace {

struct SolverHandle : comm::BackgroundSolver {
  static constexpr api::Words kWords{"solver", "solver", "moecclSampleSolverCreate"};
};
using SolverTable = api::HandleTable<SolverHandle, moecclSampleSolver_t, 0xC9>;

}  // namespace

moecclResult_t moecclSampleSolverCreate(moecclSampleSolver_t* solver) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_TRY(api::require(solver, "solver", "the address of a moecclSampleSolver_t"));
    MOECCL_ASSIGN_OR_RETURN(*solver, SolverTable::get().add(std::make_unique<SolverHandle>()));
    return {};
  });
}

moecclResult_t moecclSampleSolverSubmit(moecclSampleSolver_t handle, const moecclSampleProblem_t* problem) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(SolverHandle * solver, api::live<SolverTable>(handle));
    MOECCL_ASSIGN_OR_RETURN(const moecclSampleProblem_t p, api::take(problem, solve::checked));
    solver->submit(p);
    return {};
  });
}

moecclResult_t moecclSampleSolverFetch(moecclSampleSolver_t handle, double deadline_us, int32_t* placement,
                                       moecclSampleAnswer_t* answer, moecclAnswerSource_t* source) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(SolverHandle * solver, api::live<SolverTable>(handle));
    if (deadline_us != deadline_us)
      return error(moecclInvalidArgument, "deadline_us is not a number: give microseconds");
    if (solver->n_samples() > 0) MOECCL_TRY(api::require(placement, "placement", "room for n_samples devices"));
    MOECCL_TRY(api::check_answer(answer));
    moecclAnswerSource_t made = moecclAnswerCurrent;
    MOECCL_TRY(solver->fetch(deadline_us, placement, answer, &made));
    if (source != nullptr) *source = made;
    return {};
  });
}

moecclResult_t moecclSampleSolverDestroy(moecclSampleSolver_t handle) {
  return api::guarded(nullptr, [&] { return api::destroy<SolverTable>(handle); });
}
