// SPDX-License-Identifier: Apache-2.0
// Structs that begin with their size and grow at their end, so that older and newer callers both work.
#pragma once

#include "moeccl/moeccl.h"
#include "src/base/status.h"

namespace moeccl {

// A struct of the public headers, with its size in the first release that had it (`least`) and in this one.
struct SizedStruct {
  const char* name;
  size_t least, present;
};
template <class T>
SizedStruct sized_struct();  // Defined in adopt.cc. A struct without a row there does not link.

Status adopt_bytes(const SizedStruct& kind, const void* given, const char* argument, void* to);
Status check_sized(const SizedStruct& kind, const void* out, const char* argument);
void give_bytes(const SizedStruct& kind, const void* made, void* out);

// Returns the caller's struct in the present layout. Fields that an older caller does not know become zero, which is
// the default. Fields that only a newer caller knows must be zero, because this library would ignore them.
template <class T>
Result<T> adopt(const T* given, const char* argument) {
  T full{};
  MOECCL_TRY(adopt_bytes(sized_struct<T>(), given, argument, &full));
  return full;
}

// Checks that the caller's struct can take an answer. `out` may be NULL only where the call's own comment allows it.
template <class T>
Status check_out(const T* out, const char* argument) {
  return check_sized(sized_struct<T>(), out, argument);
}

// Writes as much of an answer as the caller's struct holds and zeroes the bytes that this library does not know.
template <class T>
void give(const T& made, T* out) {
  if (out != nullptr) give_bytes(sized_struct<T>(), &made, out);
}

}  // namespace moeccl
