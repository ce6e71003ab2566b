// SPDX-License-Identifier: Apache-2.0
#include "perf/common/data_types.h"

#include <array>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstring>

namespace perf {
namespace {

constexpr std::array<DataType, MOECCL_NUM_DATA_TYPES> kTypes = {{
    {moecclInt8, "int8", 1, false, true, 0, 0, 127},
    {moecclUint8, "uint8", 1, false, false, 0, 0, 255},
    {moecclInt32, "int32", 4, false, true, 0, 0, INT32_MAX},
    {moecclUint32, "uint32", 4, false, false, 0, 0, UINT32_MAX},
    {moecclInt64, "int64", 8, false, true, 0, 0, INT64_MAX},
    {moecclUint64, "uint64", 8, false, false, 0, 0, INT64_MAX},
    {moecclFloat16, "half", 2, true, true, 5, 10, 1 << 11},
    {moecclFloat32, "float", 4, true, true, 8, 23, 1 << 24},
    {moecclFloat64, "double", 8, true, true, 11, 52, int64_t{1} << 53},
    {moecclBfloat16, "bfloat16", 2, true, true, 8, 7, 1 << 8},
    {moecclFloat8e4m3, "f8e4m3", 1, true, true, 4, 3, 1 << 4},
    {moecclFloat8e5m2, "f8e5m2", 1, true, true, 5, 2, 1 << 3},
}};

struct Alias {
  const char* name;
  moecclDataType_t type;
};
constexpr Alias kAliases[] = {
    {"char", moecclInt8},       {"int", moecclInt32},       {"fp16", moecclFloat16},
    {"fp32", moecclFloat32},    {"fp64", moecclFloat64},    {"bf16", moecclBfloat16},
    {"e4m3", moecclFloat8e4m3}, {"e5m2", moecclFloat8e5m2}, {"fp8", moecclFloat8e4m3},
};
constexpr const char* kOpNames[] = {"sum", "prod", "max", "min", "avg", "mulsum"};

}  // namespace

const DataType& data_type(moecclDataType_t type) { return kTypes[static_cast<size_t>(type)]; }

std::vector<moecclDataType_t> parse_data_types(const std::string& name) {
  std::vector<moecclDataType_t> types;
  for (const DataType& t : kTypes)
    if (name == t.nccl_name || name == t.name() || name == "all") types.push_back(t.type);
  for (const Alias& a : kAliases)
    if (name == a.name) types.push_back(a.type);
  return types;
}

std::string nccl_type_names() {
  std::string names;
  for (const DataType& t : kTypes) names += std::string(names.empty() ? "" : "/") + t.nccl_name;
  return names;
}

uint64_t encode(const DataType& type, double value) {
  if (!type.is_float) return static_cast<uint64_t>(static_cast<int64_t>(value));
  if (value == 0) return 0;
  int exponent = 0;
  const double fraction = std::frexp(std::fabs(value), &exponent) * 2 - 1;  // value = (1 + fraction) * 2^(exponent - 1)
  const int bias = (1 << (type.exponent_bits - 1)) - 1;
  const double scaled = std::ldexp(fraction, type.mantissa_bits);
  const int biased = exponent - 1 + bias;
  assert(biased >= 1 && biased < (1 << type.exponent_bits) && scaled == std::floor(scaled));
  const uint64_t sign = value < 0 ? uint64_t{1} << (type.exponent_bits + type.mantissa_bits) : 0;
  return sign | static_cast<uint64_t>(biased) << type.mantissa_bits | static_cast<uint64_t>(scaled);
}

void store(const DataType& type, double value, void* element) {
  static_assert(std::endian::native == std::endian::little);
  const uint64_t bits = encode(type, value);
  std::memcpy(element, &bits, type.bytes);
}

const char* red_op_name(RedOp op) { return kOpNames[static_cast<size_t>(op)]; }

std::vector<RedOp> parse_red_ops(const std::string& name) {
  std::vector<RedOp> ops;
  for (size_t i = 0; i < std::size(kOpNames); i++)
    if (name == kOpNames[i] || name == "all") ops.push_back(static_cast<RedOp>(i));
  return ops;
}

int premul_scalar(int rank) { return 1 + rank % 2; }

}  // namespace perf
