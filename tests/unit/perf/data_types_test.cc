// SPDX-License-Identifier: Apache-2.0
#include "perf/common/data_types.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>

#include "perf/common/text.h"

namespace perf {
namespace {

TEST(DataTypes, EncodesFloatsAsTheProcessorDoes) {
  for (const double v : {0.0, 1.0, -1.0, 0.5, 3.0, -1000.0, 16777216.0}) {
    EXPECT_EQ(encode(data_type(moecclFloat32), v), std::bit_cast<uint32_t>(static_cast<float>(v))) << v;
    EXPECT_EQ(encode(data_type(moecclFloat64), v), std::bit_cast<uint64_t>(v)) << v;
    EXPECT_EQ(encode(data_type(moecclBfloat16), v == -1000.0 ? -256.0 : v),
              std::bit_cast<uint32_t>(static_cast<float>(v == -1000.0 ? -256.0 : v)) >> 16)
        << v;
  }
}

TEST(DataTypes, EncodesSmallFloats) {
  EXPECT_EQ(encode(data_type(moecclFloat16), 1.0), 0x3c00u);
  EXPECT_EQ(encode(data_type(moecclFloat16), -2048.0), 0xe800u);
  EXPECT_EQ(encode(data_type(moecclFloat8e4m3), 1.0), 0x38u);
  EXPECT_EQ(encode(data_type(moecclFloat8e4m3), 16.0), 0x58u);
  EXPECT_EQ(encode(data_type(moecclFloat8e4m3), -0.5), 0xb0u);
  EXPECT_EQ(encode(data_type(moecclFloat8e5m2), 1.0), 0x3cu);
  EXPECT_EQ(encode(data_type(moecclFloat8e5m2), 6.0), 0x46u);
}

TEST(DataTypes, StoresNegativeIntegersInTheirWidth) {
  int8_t small = 0;
  store(data_type(moecclInt8), -3, &small);
  EXPECT_EQ(small, -3);
  int64_t large = 0;
  store(data_type(moecclInt64), -3, &large);
  EXPECT_EQ(large, -3);
}

TEST(DataTypes, NamesAreThoseOfNcclTests) {
  // The order in which nccl-tests runs -d all.
  EXPECT_EQ(nccl_type_names(), "int8/uint8/int32/uint32/int64/uint64/half/float/double/bfloat16/f8e4m3/f8e5m2");
  for (int t = 0; t < MOECCL_NUM_DATA_TYPES; t++) {
    const DataType& type = data_type(static_cast<moecclDataType_t>(t));
    EXPECT_EQ(parse_data_types(type.nccl_name), std::vector{type.type});
    EXPECT_EQ(parse_data_types(type.name()), std::vector{type.type});
  }
  EXPECT_EQ(parse_data_types("bf16"), std::vector{moecclBfloat16});
  EXPECT_EQ(parse_data_types("all").size(), size_t{MOECCL_NUM_DATA_TYPES});
  EXPECT_TRUE(parse_data_types("complex").empty());
  EXPECT_EQ(parse_red_ops("all").size(), 6u);
  EXPECT_EQ(parse_red_ops("mulsum"), std::vector{RedOp::kMulSum});
  EXPECT_TRUE(parse_red_ops("xor").empty());
}

TEST(Sizes, UnitsAreBinary) {
  EXPECT_EQ(parse_size("8"), 8);
  EXPECT_EQ(parse_size("4K"), 4096);
  EXPECT_EQ(parse_size("1.5m"), 1572864);
  EXPECT_EQ(parse_size("2G"), 2147483648.0);
  EXPECT_LT(parse_size("x"), 0);
  EXPECT_LT(parse_size("4Q"), 0);
  EXPECT_LT(parse_size("-1"), 0);
}

}  // namespace
}  // namespace perf
