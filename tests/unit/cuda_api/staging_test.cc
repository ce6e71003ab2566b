// SPDX-License-Identifier: Apache-2.0
// Device memory through which ranks of several processes pass their data: message slots, and the persistent kernel's
// staging. The emulated driver counts the cost.
#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

std::vector<char> pattern(size_t bytes, size_t seed) {
  std::vector<char> made(bytes);
  for (size_t i = 0; i < bytes; ++i) made[i] = static_cast<char>((i * 31 + i / 4096 * 7 + seed * 101) % 251);
  return made;
}

struct Signals {
  std::atomic<uint64_t> of_8_mib;
};

// Sends around a ring of processes on one device. Returns how many stores one rank's stream needs to signal 8 MiB.
uint64_t signals_with(const char* slot_bytes) {
  const Setting slots("MOECCL_CUDA_MESSAGE_BYTES", slot_bytes);
  constexpr int kRanks = 3;
  const Shared<Signals> signals;
  run_on_devices(kRanks, device_options(RankMode::kProcesses),
                 [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
                   const int to = (rank + 1) % kRanks, from = (rank + kRanks - 1) % kRanks;
                   for (const size_t bytes : {size_t{1}, size_t{4095}, kMiB - 1, kMiB, 3 * kMiB + 5, 8 * kMiB}) {
                     SCOPED_TRACE(std::to_string(bytes) + " bytes");
                     DeviceBuffer in(device, bytes), out(device, bytes);
                     in.put(pattern(bytes, static_cast<size_t>(rank)));
                     const uint64_t before = device.calls("cuStreamWriteValue64_v2");
                     // Two messages in each direction, so that the second follows the first through the same slots.
                     for (int i = 0; i < 2; ++i) {
                       MOECCL_ASSERT_OK(moecclGroupStart());
                       MOECCL_EXPECT_OK(moecclSend(in.data(), bytes, moecclInt8, to, comm, as_stream(stream)));
                       MOECCL_EXPECT_OK(moecclRecv(out.data(), bytes, moecclInt8, from, comm, as_stream(stream)));
                       MOECCL_ASSERT_OK(moecclGroupEnd());
                     }
                     EXPECT_TRUE(out.get(stream) == pattern(bytes, static_cast<size_t>(from)));
                     if (rank == 0 && bytes == 8 * kMiB)
                       signals->of_8_mib = (device.calls("cuStreamWriteValue64_v2") - before) / 2;
                   }
                 });
  return signals->of_8_mib;
}

TEST(CudaStaging, MessagesBetweenProcessesTakeFewLargeSlotsOnTheDevice) {
  const uint64_t through_host = signals_with("0"), small = signals_with("256K"), usual = signals_with("1M");
  if (through_host == 0) GTEST_SKIP() << "calls are counted by the emulated driver";
  std::printf("signals of a Send and a Recv of 8 MiB: through host memory %lu, slots of 256K %lu, of 1M %lu\n",
              static_cast<unsigned long>(through_host), static_cast<unsigned long>(small),
              static_cast<unsigned long>(usual));
  EXPECT_GE(through_host, 2u * 64);
  EXPECT_LE(small, 2u * 32 + 2);
  EXPECT_LE(usual, 2u * 8 + 2);
}

TEST(CudaStaging, MessagesGoThroughHostMemoryWhereMemoryIsSharedByHandles) {
  const Setting handles("MOECCL_TEST_CUDA_NO_VMM", "1");
  const uint64_t signals = signals_with("1M");
  if (signals == 0) GTEST_SKIP() << "calls are counted by the emulated driver";
  EXPECT_GE(signals, 2u * 64);
}

struct Cost {
  std::atomic<uint64_t> releases, memory;
};

// Runs an AllReduce of 8 MiB on two processes with one device each, or on two of each of two hosts, and counts what one
// rank's kernel releases to the whole system.
void reduce_with(const char* nvlink, const char* staging, Cost& cost, TestHosts* hosts = nullptr) {
  const int n = hosts == nullptr ? 2 : 4;
  const Setting devices("MOECCL_TEST_CUDA_DEVICES", "4"), links("MOECCL_TEST_CUDA_NVLINK", nvlink),
      usual("MOECCL_STAGING_BYTES", "1M"), own("MOECCL_CUDA_STAGING_BYTES", staging);
  RankOptions options = device_options(RankMode::kProcesses);
  options.hosts = hosts;
  run_ranks(
      n,
      [&](int rank, moecclComm_t) {
        CudaDevice device(rank);
        if (!device.emulated()) return;
        moecclComm_t comm = join(rank, n, device, options);
        ASSERT_NE(comm, nullptr);
        void* stream = device.make_stream();
        {
          DeviceBuffer in(device, 8 * kMiB), out(device, 8 * kMiB);
          in.put(floats(2 * kMiB, static_cast<float>(rank + 1)));
          const uint64_t before = device.releases();
          MOECCL_ASSERT_OK(
              moecclAllReduce(in.data(), out.data(), 2 * kMiB, moecclFloat32, moecclSum, comm, as_stream(stream)));
          EXPECT_TRUE(out.get(stream) == floats(2 * kMiB, n == 2 ? 3 : 10));
          size_t memory = 0;
          MOECCL_EXPECT_OK(moecclCommMemoryUsage(comm, &memory));
          if (rank == 0) cost.releases = device.releases() - before, cost.memory = memory;
        }
        device.end_stream(stream);
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      options);
}

TEST(CudaStaging, IsLargerWhereNvlinkJoinsTheDevices) {
  const Shared<Cost> apart, joined, limited;
  reduce_with("0", "0", *apart);
  reduce_with("1", "0", *joined);
  reduce_with("1", "1M", *limited);
  if (apart->releases == 0) GTEST_SKIP() << "releases are counted by the emulated driver";
  std::printf("releases of an AllReduce of 8 MiB: %lu with 1 MiB of staging, %lu with 64 MiB\n",
              static_cast<unsigned long>(apart->releases), static_cast<unsigned long>(joined->releases));
  EXPECT_GE(joined->memory, apart->memory + 60 * kMiB);
  EXPECT_LT(joined->releases * 3, apart->releases);
  EXPECT_EQ(limited->memory, apart->memory) << "MOECCL_CUDA_STAGING_BYTES says how much";
  EXPECT_EQ(limited->releases, apart->releases);
}

TEST(CudaStaging, IsLargerWhereNvlinkJoinsTheDevicesOfEachHost) {
  const auto hosts = named_hosts({1, 1});
  const Shared<Cost> apart, joined;
  reduce_with("0", "0", *apart, hosts.get());
  reduce_with("1", "0", *joined, hosts.get());
  if (apart->releases == 0) GTEST_SKIP() << "releases are counted by the emulated driver";
  EXPECT_GE(joined->memory, apart->memory + 60 * kMiB);
}

}  // namespace
}  // namespace moeccl::testing
