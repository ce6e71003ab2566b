// SPDX-License-Identifier: Apache-2.0
// What the solvers' entry points share: problems, answers and sizes.
#pragma once

#include "src/api/convert.h"
#include "src/base/adopt.h"

namespace moeccl::api {

// An answer that the caller may leave out.
template <class T>
Status check_answer(const T* answer) {
  return answer == nullptr ? Status() : check_out(answer, "answer");
}

// The caller's problem in this library's layout, as a solver's checked() completes it.
template <class Problem>
Result<Problem> take(const Problem* problem, Result<Problem> (*checked)(const Problem&)) {
  MOECCL_ASSIGN_OR_RETURN(const Problem p, adopt(problem, "problem"));
  return checked(p);
}

// How much memory a problem needs.
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
