// SPDX-License-Identifier: Apache-2.0
// Structs that begin with their size and grow at their end: those of an older caller, and those of a newer one.
#pragma once

#include "moeccl/moeccl.h"
#include "src/base/status.h"

namespace moeccl {

// A struct of the public headers: its bytes in the first release that had it, and in this one.
struct SizedStruct {
  const char* name;
  size_t least, present;
};
template <class T>
SizedStruct sized_struct();  // adopt.cc: a struct without a row there does not link

Status adopt_bytes(const SizedStruct& kind, const void* given, const char* argument, void* to);
Status check_sized(const SizedStruct& kind, const void* out, const char* argument);
void give_bytes(const SizedStruct& kind, const void* made, void* out);

// What the caller gives, in the present layout. Fields that an older caller does not know are zero, the default; fields
// of a newer caller must be zero, as nothing here would obey them.
template <class T>
Result<T> adopt(const T* given, const char* argument) {
  T full{};
  MOECCL_TRY(adopt_bytes(sized_struct<T>(), given, argument, &full));
  return full;
}

// Whether the caller's struct can take an answer; `out` may be NULL only where the call's comment says so.
template <class T>
Status check_out(const T* out, const char* argument) {
  return check_sized(sized_struct<T>(), out, argument);
}

// Writes as much of an answer as the caller's struct holds, and zeros behind what this library knows.
template <class T>
void give(const T& made, T* out) {
  if (out != nullptr) give_bytes(sized_struct<T>(), &made, out);
}

}  // namespace moeccl
