// SPDX-License-Identifier: Apache-2.0
// Calls of the kernel that take long, as they do beside programs that keep the cores busy.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/support/ranks.h"

namespace {

std::atomic<int> collapses{0};
constexpr std::chrono::milliseconds kStands{1500};

}  // namespace

// Is found before libc's function, by the library as well.
extern "C" __attribute__((visibility("default"))) int madvise(void* at, size_t bytes, int advice) noexcept {
  static const auto next = reinterpret_cast<decltype(&madvise)>(dlsym(RTLD_NEXT, "madvise"));
  constexpr int kCollapse = 25;
  if (advice == kCollapse) {
    ++collapses;
    std::this_thread::sleep_for(kStands);
  }
  return next(at, bytes, advice);
}

namespace moeccl::testing {
namespace {

void* allocated(size_t bytes) {
  void* p = nullptr;
  MOECCL_EXPECT_OK(moecclMemAlloc(&p, bytes));
  return p;
}

TEST(SlowKernel, HugePagesThatStandAreAskedForOnce) {
  run_ranks(1,
            [](int, moecclComm_t) {
              constexpr size_t kSmall = 4096, kLarge = size_t{6} << 20;
              void* const small = allocated(kSmall);
              void* large = nullptr;
              std::thread stands([&] { large = allocated(kLarge); });
              while (collapses == 0) std::this_thread::yield();
              // Another thread's memory does not wait for the kernel.
              const auto began = std::chrono::steady_clock::now();
              MOECCL_EXPECT_OK(moecclMemFree(small));
              void* const other = allocated(kSmall);
              EXPECT_LT(std::chrono::steady_clock::now() - began, kStands / 2);
              stands.join();
              void* const second = allocated(kLarge);
              EXPECT_EQ(collapses, 1);
              for (void* p : {other, large, second}) MOECCL_EXPECT_OK(moecclMemFree(p));
            },
            {.mode = RankMode::kProcesses, .init = false, .destroy = false});
}

}  // namespace
}  // namespace moeccl::testing
