// SPDX-License-Identifier: Apache-2.0
// Shared by the solvers' entry points: problems, answers and sizes.
#pragma once

#include "src/api/convert.h"
#include "src/base/adopt.h"

namespace moeccl::api {

// Checks an answer that the caller may omit.
template <class T>
Status check_answer(const T* answer) {
  return answer == nullptr ? Status() : check_out(answer, "answer");
}

// Returns the caller's problem in this library's layout, as completed by a solver's checked().
template <class Problem>
Result<Problem> take(const Problem* problem, Result<Problem> (*checked)(const Problem&)) {
  MOECCL_ASSIGN_OR_RETURN(const Problem p, adopt(problem, "problem"));
  return checked(p);
}

// Reports how much memory a problem needs.
template <class Problem>
moecclResult_t query_size(const Problem* problem, Result<Problem> (*checked)(const Problem&),
                          size_t (*size_of)(const Problem&), size_t* out, const char* name = "bytes") {
  return guarded(nullptr, [&]() -> Status {
    MOECCL_TRY(require(out, name, "the address of a size_t"));
    MOECCL_ASSIGN_OR_RETURN(const Problem p, take(problem, checked));
    *out = size_of(p);
    return {};
  });
}

}  // namespace moeccl::api
