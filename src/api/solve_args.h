// What the solvers' entry points share: structs of any version, answers, null checks.
#pragma once

#include <algorithm>
#include <cstring>

#include "src/api/convert.h"
#include "src/base/adopt.h"

namespace moeccl::api {

// The caller's struct, which may be of an older and smaller version, or a newer one: what it lacks is zero.
template <class T>
Result<T> adopt_struct(const T* given, const char* name) {
  if (given == nullptr) return error(moecclInvalidArgument, "{} is NULL: give its address", name);
  if (given->size < sizeof(size_t) || given->size > 4096)
    return error(moecclInvalidArgument, "{}.size is {}: set it to the struct's sizeof, as its _INIT macro does", name,
                 given->size);
  T full{};
  std::memcpy(&full, given, adopted_bytes(given->size, sizeof(T)));
  full.size = sizeof(T);
  return full;
}

// An answer that the caller may leave out or have smaller.
template <class T>
Status check_answer(const T* answer) {
  if (answer == nullptr) return {};
  if (answer->size < sizeof(size_t) || answer->size > 4096)
    return error(moecclInvalidArgument, "answer.size is {}: set it to the struct's sizeof", answer->size);
  return {};
}
template <class T>
void give_answer(T made, T* answer) {
  if (answer == nullptr) return;
  made.size = answer->size;
  std::memcpy(answer, &made, std::min(made.size, sizeof(T)));
}

inline Status require(const void* pointer, const char* name, const char* wanted) {
  return pointer == nullptr ? null_argument(name, wanted) : Status();
}

}  // namespace moeccl::api
