// SPDX-License-Identifier: Apache-2.0
// The launch emulation itself, with the features that the kernels' tests rely on.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "kernels/cuda/device.cuh"

namespace moeccl::emulation {
namespace {

struct SumArgs {
  const uint32_t* in;
  uint32_t* out;
  uint32_t n;
};
// A tree over shared memory, which gives wrong results without barriers that hold every thread.
MOECCL_KERNEL(test_sum, SumArgs) {
  MOECCL_SHARED uint32_t sums[256];
  uint32_t own = 0;
  for (uint32_t i = cuda::thread_index(); i < a.n; i += cuda::block_threads()) own += a.in[i];
  sums[cuda::thread_index()] = own;
  for (uint32_t width = cuda::block_threads() / 2; width > 0; width /= 2) {
    cuda::block_sync();
    if (cuda::thread_index() < width) sums[cuda::thread_index()] += sums[cuda::thread_index() + width];
  }
  cuda::block_sync();
  if (cuda::thread_index() == 0) a.out[cuda::block_index()] = sums[0];
}

struct FlagArgs {
  uint64_t* flag;
  uint32_t* order;
};
// Block 0 waits for block 1, so only concurrent blocks finish.
MOECCL_KERNEL(test_flag, FlagArgs) {
  if (cuda::block_index() == 1) {
    if (cuda::thread_index() == 1) a.order[1] = 7;
    cuda::block_sync();
    if (cuda::thread_index() == 0) cuda::store_release_system(a.flag, 1);
    return;
  }
  if (cuda::thread_index() == 0) {
    while (cuda::load_acquire_system(a.flag) == 0) cuda::pause();
    a.order[0] = a.order[1];
  }
}
// Half of the block never reaches the barrier.
MOECCL_KERNEL(test_divergent, FlagArgs) {
  if (cuda::thread_index() % 2 == 0) {
    (void)cuda::shuffle(a.order[0], 1);
  } else {
    cuda::block_sync();
  }
}

// Both halves reach a barrier, but not the same one.
MOECCL_KERNEL(test_two_barriers, FlagArgs) {
  if (cuda::thread_index() % 2 == 0)
    cuda::block_sync();
  else
    cuda::block_sync();
  if (a.order != nullptr) a.order[0] = 1;
}

const Kernel& kernel(const char* name) { return *find_kernel(name); }

TEST(Emulation, BarriersHoldEveryThreadInEveryOrder) {
  std::vector<uint32_t> in(1000);
  std::iota(in.begin(), in.end(), 1u);
  for (uint64_t seed = 0; seed < 50; ++seed) {
    uint32_t out[3] = {};
    const SumArgs args{in.data(), out, 1000};
    launch(kernel("test_sum"), &args, {.blocks = 3, .threads = 64u << seed % 3, .seed = seed});
    for (const uint32_t sum : out) ASSERT_EQ(sum, 500500u) << "seed " << seed;
  }
}

TEST(Emulation, ConcurrentBlocksMayWaitForEachOther) {
  for (int i = 0; i < 20; ++i) {
    uint64_t flag = 0;
    uint32_t order[2] = {};
    const FlagArgs args{&flag, order};
    launch(kernel("test_flag"), &args, {.blocks = 2, .threads = 64, .concurrent = true});
    ASSERT_EQ(order[0], 7u);
  }
}

TEST(EmulationDeathTest, ABarrierThatSomeThreadsNeverReachEndsTheProcess) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  uint32_t order[2] = {};
  const FlagArgs args{nullptr, order};
  EXPECT_DEATH(launch(kernel("test_divergent"), &args, {.threads = 32}), "test_divergent: a block waits for ever");
}

TEST(EmulationDeathTest, ABlockWhoseThreadsStandAtDifferentBarriersEndsTheProcess) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  uint32_t order[2] = {};
  const FlagArgs args{nullptr, order};
  EXPECT_DEATH(launch(kernel("test_two_barriers"), &args, {.threads = 32}), "at different barriers");
}

#if defined(__SANITIZE_THREAD__)
struct RaceArgs {
  uint32_t* out;
  uint32_t kind;
};
enum : uint32_t { kOrdered, kWithoutBarrier, kByShuffle };
// Each thread reads the value that the next lane of its warp has written.
MOECCL_KERNEL(test_race, RaceArgs) {
  MOECCL_SHARED uint32_t values[64];
  const uint32_t t = cuda::thread_index();
  values[t] = t;
  if (a.kind == kOrdered) cuda::warp_sync();
  if (a.kind == kByShuffle) (void)cuda::shuffle(t, 0);
  a.out[t] = values[t ^ 1];
}

TEST(EmulationDeathTest, TheThreadSanitizerSeesRacesOfABlocksThreads) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  uint32_t out[64] = {};
  const auto run = [&](uint32_t kind) {
    const RaceArgs args{out, kind};
    launch(kernel("test_race"), &args, {.threads = 64});
  };
  run(kOrdered);
  EXPECT_EQ(out[5], 4u);
  EXPECT_DEATH(run(kWithoutBarrier), "data race");
  EXPECT_DEATH(run(kByShuffle), "data race") << "a shuffle orders no memory";
}
#endif

}  // namespace
}  // namespace moeccl::emulation
