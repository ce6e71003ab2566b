// SPDX-License-Identifier: Apache-2.0
// Properties of each data type, in the order of moecclDataType_t.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "moeccl/types.h"

namespace moeccl {

// The type in which values are computed: a member of kernels::Scalar.
enum class Wide : uint8_t { kInt64, kFloat32, kFloat64 };

struct TypeFacts {
  const char* name;
  uint8_t bytes;
  Wide wide;
};

inline constexpr std::array<TypeFacts, MOECCL_NUM_DATA_TYPES + 1> kTypes = {{
    {"int8", 1, Wide::kInt64},
    {"uint8", 1, Wide::kInt64},
    {"int32", 4, Wide::kInt64},
    {"uint32", 4, Wide::kInt64},
    {"int64", 8, Wide::kInt64},
    {"uint64", 8, Wide::kInt64},
    {"float16", 2, Wide::kFloat32},
    {"float32", 4, Wide::kFloat32},
    {"float64", 8, Wide::kFloat64},
    {"bfloat16", 2, Wide::kFloat32},
    {"float8e4m3", 1, Wide::kFloat32},
    {"float8e5m2", 1, Wide::kFloat32},
    {"unknown type", 0, Wide::kInt64},  // for a value beyond the last type, which a peer may have announced
}};

constexpr const TypeFacts& type_facts(moecclDataType_t type) {
  const auto i = static_cast<size_t>(type);
  return kTypes[i < MOECCL_NUM_DATA_TYPES ? i : MOECCL_NUM_DATA_TYPES];
}
constexpr const char* type_name(moecclDataType_t type) { return type_facts(type).name; }

}  // namespace moeccl
