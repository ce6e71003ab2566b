// SPDX-License-Identifier: Apache-2.0
#include "plugins/profiler_entry.h"

#include "src/base/format.h"

namespace moeccl::plugins {

std::string Member::title() const {
  return format("{}, rank {} of {}", name.empty() ? format("communicator {:08x}", group >> 32) : name, rank, n_ranks);
}

uint64_t bytes_of(std::string_view type, uint64_t count) {
  // Without a destructor, because a trace is written after those of the program have run. NCCL has a name for each type
  // but uint8, which it calls "Unknown".
  static constexpr std::pair<std::string_view, uint64_t> kSizes[] = {
      {"ncclInt8", 1},     {"ncclInt32", 4},      {"ncclUint32", 4},     {"ncclInt64", 8},
      {"ncclUint64", 8},   {"ncclFloat16", 2},    {"ncclFloat32", 4},    {"ncclFloat64", 8},
      {"ncclBfloat16", 2}, {"ncclFloat8e4m3", 1}, {"ncclFloat8e5m2", 1}, {"Unknown", 1}};
  for (const auto& [known, size] : kSizes)
    if (type == known) return count * size;
  return 0;
}

}  // namespace moeccl::plugins
