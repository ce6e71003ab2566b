// SPDX-License-Identifier: Apache-2.0
#include "tests/conformance/element.h"

#include <cmath>
#include <cstring>

namespace moeccl::testing {
namespace {

// An IEEE-like small float: 1 sign bit, the given exponent and mantissa bits.
struct Format {
  int exponent_bits, mantissa_bits;
  bool no_infinity;  // e4m3: the top exponent holds numbers too
};

Format format_of(moecclDataType_t type) {
  switch (type) {
    case moecclFloat16:
      return {5, 10, false};
    case moecclBfloat16:
      return {8, 7, false};
    case moecclFloat8e4m3:
      return {4, 3, true};
    default:
      return {5, 2, false};
  }
}

double decode(Format f, uint32_t bits) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const uint32_t mantissa = bits & ((1u << f.mantissa_bits) - 1);
  const int exponent = static_cast<int>(bits >> f.mantissa_bits & ((1u << f.exponent_bits) - 1));
  const double sign = (bits >> (f.mantissa_bits + f.exponent_bits) & 1) != 0 ? -1 : 1;
  const int top = (1 << f.exponent_bits) - 1;
  if (exponent == top && !f.no_infinity) return mantissa != 0 ? NAN : sign * INFINITY;
  if (exponent == top && mantissa == (1u << f.mantissa_bits) - 1) return NAN;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - f.mantissa_bits);
  return sign * std::ldexp(mantissa + (1u << f.mantissa_bits), exponent - bias - f.mantissa_bits);
}

// Encodes finite values within range only. The tests make no others.
uint32_t encode(Format f, double v) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const uint32_t sign = std::signbit(v) ? 1u << (f.exponent_bits + f.mantissa_bits) : 0;
  if (v == 0) return sign;
  int exponent = 0;
  std::frexp(v, &exponent);
  const int unit = std::max(exponent - 1, 1 - bias) - f.mantissa_bits;  // exponent of the last mantissa bit
  const double steps = std::nearbyint(std::ldexp(std::fabs(v), -unit));
  // A carry out of the mantissa increments the exponent automatically.
  const auto magnitude = static_cast<uint32_t>(steps);
  const auto base = static_cast<uint32_t>(unit + f.mantissa_bits + bias - 1) << f.mantissa_bits;
  return sign | (base + magnitude);
}

template <class T>
T read(const void* base, size_t i) {
  T v;
  std::memcpy(&v, static_cast<const char*>(base) + i * sizeof(T), sizeof(T));
  return v;
}

template <class T>
void write(void* base, size_t i, T v) {
  std::memcpy(static_cast<char*>(base) + i * sizeof(T), &v, sizeof(T));
}

Number integer(int64_t v) { return {0, static_cast<uint64_t>(v)}; }
Number number(moecclDataType_t type, int64_t v) {
  return is_float(type) ? Number{static_cast<double>(v), 0} : integer(v);
}

// Cuts to the type's width, with sign extension or zero extension.
Number wrap(moecclDataType_t type, uint64_t u) {
  const int bits = static_cast<int>(moecclTypeSize(type)) * 8;
  if (bits == 64) return {0, u};
  const uint64_t low = u & ((uint64_t{1} << bits) - 1);
  const bool negative = is_signed(type) && (low >> (bits - 1) & 1) != 0;
  return {0, negative ? low | ~((uint64_t{1} << bits) - 1) : low};
}

}  // namespace

bool is_float(moecclDataType_t type) { return type >= moecclFloat16; }
bool is_signed(moecclDataType_t type) {
  return is_float(type) || type == moecclInt8 || type == moecclInt32 || type == moecclInt64;
}

const char* type_name(moecclDataType_t type) { return moecclTypeName(type); }

const char* reduction_name(int op) {
  static const char* const names[] = {"sum", "prod", "max", "min", "avg", "premulsum"};
  return names[op];
}

Number load(moecclDataType_t type, const void* base, size_t i) {
  switch (type) {
    case moecclInt8:
      return integer(read<int8_t>(base, i));
    case moecclUint8:
      return integer(read<uint8_t>(base, i));
    case moecclInt32:
      return integer(read<int32_t>(base, i));
    case moecclUint32:
      return integer(read<uint32_t>(base, i));
    case moecclInt64:
      return integer(read<int64_t>(base, i));
    case moecclUint64:
      return {0, read<uint64_t>(base, i)};
    case moecclFloat32:
      return {read<float>(base, i), 0};
    case moecclFloat64:
      return {read<double>(base, i), 0};
    case moecclFloat16:
    case moecclBfloat16:
      return {decode(format_of(type), read<uint16_t>(base, i)), 0};
    default:
      return {decode(format_of(type), read<uint8_t>(base, i)), 0};
  }
}

void store(moecclDataType_t type, void* base, size_t i, Number v) {
  switch (type) {
    case moecclInt8:
    case moecclUint8:
      return write(base, i, static_cast<uint8_t>(v.u));
    case moecclInt32:
    case moecclUint32:
      return write(base, i, static_cast<uint32_t>(v.u));
    case moecclInt64:
    case moecclUint64:
      return write(base, i, v.u);
    case moecclFloat32:
      return write(base, i, static_cast<float>(v.f));
    case moecclFloat64:
      return write(base, i, v.f);
    case moecclFloat16:
    case moecclBfloat16:
      return write(base, i, static_cast<uint16_t>(encode(format_of(type), v.f)));
    default:
      return write(base, i, static_cast<uint8_t>(encode(format_of(type), v.f)));
  }
}

int exact_limit(moecclDataType_t type) {
  if (type == moecclFloat32 || type == moecclFloat64) return 1 << 20;
  return 1 << (format_of(type).mantissa_bits + 1);
}

double epsilon(moecclDataType_t type) {
  if (type == moecclFloat64) return 0x1p-52;
  if (type == moecclFloat32) return 0x1p-23;
  return std::ldexp(1, -format_of(type).mantissa_bits);
}

Number combine(moecclDataType_t type, int op, Number a, Number b) {
  const bool larger = is_float(type)    ? a.f > b.f
                      : is_signed(type) ? static_cast<int64_t>(a.u) > static_cast<int64_t>(b.u)
                                        : a.u > b.u;
  if (op == moecclMax) return larger ? a : b;
  if (op == moecclMin) return larger ? b : a;
  if (op == moecclProd) return multiply(type, a, b);
  return is_float(type) ? Number{a.f + b.f, 0} : wrap(type, a.u + b.u);
}

Number multiply(moecclDataType_t type, Number a, Number b) {
  return is_float(type) ? Number{a.f * b.f, 0} : wrap(type, a.u * b.u);
}

Number divide(moecclDataType_t type, Number a, int n) {
  if (is_float(type)) return {a.f / n, 0};
  if (is_signed(type)) return integer(static_cast<int64_t>(a.u) / n);
  return {0, a.u / static_cast<uint64_t>(n)};
}

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

Number input_for(moecclDataType_t type, int op, int n, int rank, size_t i, uint64_t seed) {
  const uint64_t h = mix(seed + static_cast<uint64_t>(rank) * 0x51ed2701u, i);
  if (!is_float(type) && op != moecclAvg) return wrap(type, h);  // any bits: integers wrap
  if (op == moecclProd) {
    // For each element, only one factor is not 1, so that products stay small. Signs come from all ranks.
    const bool mine = static_cast<size_t>(rank) == i % static_cast<size_t>(n);
    const int64_t magnitude = mine ? static_cast<int64_t>(2 + (h >> 8 & 1)) : 1;
    return number(type, (h & 1) != 0 ? -magnitude : magnitude);
  }
  if (op == moecclMax || op == moecclMin) {
    const int64_t limit = exact_limit(type);
    return number(type, static_cast<int64_t>(h % static_cast<uint64_t>(2 * limit + 1)) - limit);
  }
  const int64_t most = is_float(type) ? exact_limit(type) : 127;
  const int64_t each = most / n;
  if (each == 0) {  // fp8 with many ranks: +-1 from as many ranks as the format can add exactly
    const int64_t stride = (n + most - 1) / most;
    if ((rank + static_cast<int64_t>(i)) % stride != 0) return number(type, 0);
    return number(type, is_signed(type) && (h & 1) != 0 ? -1 : 1);
  }
  if (!is_signed(type)) return number(type, static_cast<int64_t>(h % static_cast<uint64_t>(each + 1)));
  return number(type, static_cast<int64_t>(h % static_cast<uint64_t>(2 * each + 1)) - each);
}

Number scalar_for(moecclDataType_t type, int rank, uint64_t seed) {
  const bool odd = (mix(seed, static_cast<uint64_t>(rank)) & 1) != 0;
  if (is_float(type)) return {odd ? -1.0 : 1.0, 0};  // keeps sums exact
  return integer(odd ? 3 : 2);
}

}  // namespace moeccl::testing
