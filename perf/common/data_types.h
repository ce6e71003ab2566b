// SPDX-License-Identifier: Apache-2.0
// The data types of moeccl/types.h as the perf tools see them: their names, sizes, and which numbers are exact.
#ifndef PERF_COMMON_DATA_TYPES_H_
#define PERF_COMMON_DATA_TYPES_H_

#include <moeccl/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace perf {

struct DataType {
  moecclDataType_t type;
  const char* nccl_name;  // in nccl-tests' table and JSON, by which scripts group results
  size_t bytes;
  bool is_float;
  bool is_signed;
  int exponent_bits;  // floats only
  int mantissa_bits;  // stored bits; floats only
  int64_t exact;      // every integer in 0..exact is exact in the type
  // The library's name.
  const char* name() const { return moecclTypeName(type); }
};

const DataType& data_type(moecclDataType_t type);
// Parses nccl-tests' "float", the library's "float32", "bf16", "all", ...; returns nothing when the name is unknown.
std::vector<moecclDataType_t> parse_data_types(const std::string& name);
// Returns nccl-tests' names of all types, for messages: "int8/uint8/...".
std::string nccl_type_names();

// Returns the bits of `value`, which must be exact in the type and a normal number or zero (a multiple of 1/2 is).
uint64_t encode(const DataType& type, double value);
// Writes one element.
void store(const DataType& type, double value, void* element);

// The operators that -o selects. kMulSum is created with moecclRedOpCreatePreMulSum().
enum class RedOp { kSum, kProd, kMax, kMin, kAvg, kMulSum };
const char* red_op_name(RedOp op);
// Parses "sum", ..., "all"; returns nothing when the name is unknown.
std::vector<RedOp> parse_red_ops(const std::string& name);
// Returns the scalar of kMulSum on a rank: 1 or 2, so that products stay exact.
int premul_scalar(int rank);

}  // namespace perf

#endif  // PERF_COMMON_DATA_TYPES_H_
