// What the solvers' entry points share: answers and null checks.
#pragma once

#include "src/api/convert.h"
#include "src/base/adopt.h"

namespace moeccl::api {

// An answer that the caller may leave out.
template <class T>
Status check_answer(const T* answer) {
  return answer == nullptr ? Status() : check_out(answer, "answer");
}

inline Status require(const void* pointer, const char* name, const char* wanted) {
  return pointer == nullptr ? null_argument(name, wanted) : Status();
}

}  // namespace moeccl::api
