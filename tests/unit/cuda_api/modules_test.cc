// SPDX-License-Identifier: Apache-2.0
// Loading of kernels: how often, when, and the error message when the driver refuses them.
#include <barrier>
#include <chrono>
#include <thread>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

constexpr size_t kCount = 3000;

std::vector<char> bytes_of(const std::vector<int32_t>& values) {
  std::vector<char> bytes(values.size() * sizeof(values[0]));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

TEST(CudaModules, AreLoadedOnceForAllRanksAndCommunicatorsOfADevice) {
  const RankOptions options = device_options(RankMode::kThreads);
  moecclUniqueId id{};
  std::barrier both(2);
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        ASSERT_TRUE(device.ok());
        if (!device.emulated()) GTEST_SKIP() << "counts the calls of the emulated driver";
        uint64_t functions = 0;
        for (uint64_t round = 1; round <= 2; ++round) {
          if (rank == 0) {
            MOECCL_EXPECT_OK(moecclGetUniqueId(&id));
          }
          both.arrive_and_wait();
          moecclComm_t comms[3] = {};
          MOECCL_ASSERT_OK(moecclCommInitRankConfig(&comms[0], 2, id, rank, &options.config));
          for (int i = 1; i < 3; ++i) MOECCL_ASSERT_OK(moecclCommSplit(comms[0], 0, rank, &comms[i], nullptr));
          both.arrive_and_wait();
          EXPECT_EQ(device.calls("cuModuleLoadDataEx"), round);
          if (round == 1) functions = device.calls("cuFuncLoad");
          EXPECT_GT(functions, 50u);
          EXPECT_EQ(device.calls("cuFuncLoad"), round * functions);
          EXPECT_EQ(device.calls("cuModuleUnload"), round - 1) << "somebody has lost the kernels";
          both.arrive_and_wait();
          // Rank 1's first communicator is the last one in the context.
          for (int i = 2; i >= 0; --i) {
            if (i == 0 && rank == 1) both.arrive_and_wait();
            MOECCL_EXPECT_OK(moecclCommDestroy(comms[i]));
            if (i == 0 && rank == 0) {
              EXPECT_EQ(device.calls("cuModuleUnload"), round - 1);
              both.arrive_and_wait();
            }
          }
          both.arrive_and_wait();
          EXPECT_EQ(device.calls("cuModuleUnload"), round);
          both.arrive_and_wait();
        }
      },
      options);
}

// Checks the error of an operation on CUDA memory where the kernels cannot be loaded.
void refused(const std::vector<std::string>& words, uint64_t loads) {
  run_on_devices(2, device_options(RankMode::kThreads), [&](int, moecclComm_t comm, CudaDevice& device, void* stream) {
    if (!device.emulated()) GTEST_SKIP() << "needs a driver that refuses on purpose";
    DeviceBuffer in(device, kCount * 4);
    EXPECT_EQ(moecclAllReduce(in.data(), in.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)),
              moecclUnsupported);
    const std::string said = moecclGetLastError(comm);
    for (const std::string& w : words) EXPECT_NE(said.find(w), std::string::npos) << w << " in: " << said;
    EXPECT_EQ(device.calls("cuModuleLoadDataEx"), loads) << said;
  });
}

TEST(CudaModules, ThatADriverRefusesAreReportedWithItsLog) {
  const Setting error("MOECCL_TEST_CUDA_IMAGE_ERROR", "222");
  refused({"loading the CUDA kernels", "unsupported toolchain", "(222)", "CUDA 1", "the driver's log: emulated linker"},
          2);  // each rank tries
}

TEST(CudaModules, TooNewForTheDriverAreNotTriedAndSayWhichOneTheyNeed) {
  const Setting version("MOECCL_TEST_CUDA_DRIVER_VERSION", "11080");
  refused({"the CUDA driver is of CUDA 11.8", "need a driver of CUDA 1", ".0 (R5", "update the driver"}, 0);
}

// Loading a function may wait for all kernels of the device. The first launch must not load, because it could wait for
// a kernel of another rank that waits for this rank.
TEST(CudaModules, AreWholeBeforeTheFirstOperation) {
  const Setting rule("MOECCL_TEST_CUDA_LAZY_LOADING", "1"), lazy("CUDA_MODULE_LOADING", "LAZY");
  const RankOptions options = device_options(RankMode::kThreads, 60'000, 15'000);
  std::barrier both(2);
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        moecclComm_t comm = join(rank, 2, device, options), alone = nullptr;
        ASSERT_NE(comm, nullptr);
        MOECCL_ASSERT_OK(moecclCommSplit(comm, rank, 0, &alone, nullptr));
        void* stream = device.make_stream();
        DeviceBuffer in(device, kCount * 4), sum(device, kCount * 4);
        in.put(floats(kCount, 1));
        moecclRedOp_t twice{};
        const int32_t two = 2;
        MOECCL_ASSERT_OK(moecclRedOpCreatePreMulSum(&twice, &two, moecclInt32, alone));
        const std::vector<int32_t> ones(kCount, 1), twos(kCount, 2);
        DeviceBuffer d_ones(device, kCount * 4), d_twos(device, kCount * 4);
        d_ones.put(bytes_of(ones));
        const int launches = device.emulated() ? device.launches() : 0;
        both.arrive_and_wait();
        if (rank == 1) {
          // Rank 0's kernel runs and waits for this rank, which first uses another function.
          for (int i = 0; i < 2000 && device.emulated() && device.launches() == launches; ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
          MOECCL_EXPECT_OK(
              moecclAllReduce(d_ones.data(), d_twos.data(), kCount, moecclInt32, twice, alone, as_stream(stream)));
          EXPECT_EQ(d_twos.get(stream), bytes_of(twos));
        }
        MOECCL_EXPECT_OK(
            moecclAllReduce(in.data(), sum.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
        EXPECT_EQ(sum.get(stream), floats(kCount, 2));

        constexpr size_t kTokens = 16, kHidden = 64;
        moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
        config.hidden_bytes = kHidden * 4;
        config.type = moecclFloat32;
        config.top_k = 1;
        config.n_experts = 2;
        config.max_tokens = kTokens;
        moecclMoe_t moe = nullptr;
        MOECCL_ASSERT_OK(moecclMoeCreate(&moe, comm, &config));
        std::vector<int32_t> topk(kTokens);
        for (size_t t = 0; t < kTokens; ++t) topk[t] = static_cast<int32_t>(t % 2);
        const std::vector<float> weights(kTokens, 1);
        DeviceBuffer d_topk(device, kTokens * 4), d_weights(device, kTokens * 4);
        device.upload(d_topk.data(), topk.data(), kTokens * 4);
        device.upload(d_weights.data(), weights.data(), kTokens * 4);
        DeviceBuffer tokens(device, kTokens * kHidden * 4), rows(device, 2 * kTokens * kHidden * 4),
            back(device, kTokens * kHidden * 4);
        tokens.put(floats(kTokens * kHidden, static_cast<float>(rank + 1)));
        for (const bool on_device : {false, true}) {
          moecclRouting_t routing = nullptr;
          MOECCL_ASSERT_OK(
              moecclRoutingCreate(&routing, moe, on_device ? static_cast<const int32_t*>(d_topk.data()) : topk.data(),
                                  on_device ? static_cast<const float*>(d_weights.data()) : weights.data(), kTokens));
          MOECCL_EXPECT_OK(moecclDispatch(routing, tokens.data(), rows.data(), as_stream(stream)));
          MOECCL_EXPECT_OK(moecclCombine(routing, rows.data(), back.data(), as_stream(stream)));
          EXPECT_EQ(back.get(stream), floats(kTokens * kHidden, static_cast<float>(rank + 1)));
          MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
        }
        MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
        MOECCL_EXPECT_OK(moecclRedOpDestroy(twice, alone));
        MOECCL_EXPECT_OK(moecclCommDestroy(alone));
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        device.end_stream(stream);
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
