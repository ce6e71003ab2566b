// SPDX-License-Identifier: Apache-2.0
// Elements of every data type for the naive references, written without looking at the library's kernels. The numbers
// stay exact under any order of reduction, so that a wrong value is wrong and never "rounding".
#pragma once

#include <cstddef>
#include <cstdint>

#include "moeccl/moeccl.h"

namespace moeccl::testing {

bool is_float(moecclDataType_t type);
bool is_signed(moecclDataType_t type);
const char* type_name(moecclDataType_t type);

// The value of an element: a double for floats, two's complement in u for integers.
struct Number {
  double f = 0;
  uint64_t u = 0;
};

Number load(moecclDataType_t type, const void* base, size_t i);
void store(moecclDataType_t type, void* base, size_t i, Number v);  // floats: rounded to nearest even; integers: cut
// Returns the largest n such that every integer of [-n, n] is exact in a float type.
int exact_limit(moecclDataType_t type);
// Returns the distance between neighbours relative to the value, for results that may round.
double epsilon(moecclDataType_t type);

constexpr int kPreMulSum = MOECCL_NUM_REDUCTIONS;  // stands in for the operator that each test creates
const char* reduction_name(int op);
Number combine(moecclDataType_t type, int op, Number a, Number b);  // Sum, Prod, Max, Min; Avg and premulsum add
Number divide(moecclDataType_t type, Number a, int n);              // Avg

uint64_t mix(uint64_t x);  // SplitMix64's finisher
inline uint64_t mix(uint64_t a, uint64_t b) { return mix(a ^ (b * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u)); }

// Returns element i of rank's input for a reduction over n ranks, chosen so that every partial result is exact.
Number input_for(moecclDataType_t type, int op, int n, int rank, size_t i, uint64_t seed);
// Returns the factor of this rank for premulsum.
Number scalar_for(moecclDataType_t type, int rank, uint64_t seed);
Number multiply(moecclDataType_t type, Number a, Number b);

}  // namespace moeccl::testing
