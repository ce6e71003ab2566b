// SPDX-License-Identifier: Apache-2.0
// Sums in two levels on CUDA memory, where the staging has slots for one part of a chunk. Their order is not that of
// the ranks, so the elements are integers.
#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

std::vector<char> values(size_t n, uint32_t of_rank) {
  std::vector<char> bytes(n * sizeof(uint32_t));
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t value = (i + 1) * of_rank;
    std::memcpy(&bytes[i * sizeof(value)], &value, sizeof(value));
  }
  return bytes;
}

void sum_on(int n, const char* topology, const char* persistent) {
  SCOPED_TRACE(std::string(topology) + ", MOECCL_CUDA_PERSISTENT=" + persistent);
  const Setting kernel("MOECCL_CUDA_PERSISTENT", persistent);
  RankOptions options = device_options(RankMode::kThreads);
  options.config.topology = topology;
  options.config.staging_bytes = 64 << 10;  // several chunks, the last of which may be short
  run_on_devices(n, options, [n](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    MOECCL_ASSERT_OK(moecclPlanForce(comm, moecclOpAllReduce, "hier"));
    const auto own = static_cast<uint32_t>(rank + 1), sum = static_cast<uint32_t>(n * (n + 1) / 2);
    for (const size_t count : {5, 700, 9001}) {
      for (const bool in_place : {false, true}) {
        DeviceBuffer in(device, count * sizeof(uint32_t)), out(device, count * sizeof(uint32_t));
        in.put(values(count, own));
        DeviceBuffer& to = in_place ? in : out;
        MOECCL_ASSERT_OK(
            moecclAllReduce(in.data(), to.data(), count, moecclUint32, moecclSum, comm, as_stream(stream)));
        EXPECT_TRUE(to.get(stream) == values(count, sum)) << count << " elements, in place: " << in_place;
        all_have_ended(comm);
      }
    }
  });
}

TEST(CudaTwoLevels, SumPartsOfManyChunks) {
  for (const char* persistent : {"1", "0"}) {
    sum_on(6, "node:3 gpu:2", persistent);
    sum_on(4, "node:2 gpu:1+3", persistent);
  }
}

}  // namespace
}  // namespace moeccl::testing
