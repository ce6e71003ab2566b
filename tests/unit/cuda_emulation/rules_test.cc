// SPDX-License-Identifier: Apache-2.0
// Processes that fork, memory as it is given out, what kernels may be passed, page-locking, and arguments.
#include <sys/mman.h>

#include "tests/unit/cuda_emulation/driver.h"

namespace moeccl::emulation {
namespace {

constexpr int kInvalidValue = 1, kNotInitialized = 3, kIllegalAddress = 700, kAlreadyRegistered = 712,
              kNotRegistered = 713;
constexpr size_t kPage = 4096;

int lock_pages(void* p, size_t bytes, unsigned flags = 3) { return call("cuMemHostRegister_v2", p, bytes, flags); }
int unlock_pages(void* p) { return call("cuMemHostUnregister", p); }
char* make_pages(size_t n) {
  void* const p = mmap(nullptr, n * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPECT_NE(p, MAP_FAILED);
  return static_cast<char*>(p);
}

TEST(EmulatedRules, NothingWorksInAProcessThatWasForkedAfterTheDriverBegan) {
  in_process({}, [] {
    EXPECT_EQ(call("cuInit", 0u), 0);
    (void)use(0);
    in_process({}, [] {
      void* context = nullptr;
      uint64_t memory = 0;
      EXPECT_EQ(call("cuInit", 0u), kNotInitialized);
      EXPECT_EQ(call("cuCtxGetCurrent", &context), kNotInitialized);
      EXPECT_EQ(call("cuDevicePrimaryCtxRetain", &context, 0), kNotInitialized);
      EXPECT_EQ(call("cuMemAlloc_v2", &memory, size_t{64}), kNotInitialized);
    });
    EXPECT_NE(make_memory(), 0u) << "the parent goes on";
  });
  in_process({}, [] { EXPECT_EQ(call("cuInit", 0u), 0) << "it forked before"; });
}

TEST(EmulatedRules, NewMemoryIsNotZero) {
  in_process({}, [] {
    (void)use(0);
    const uint64_t memory = make_memory();
    uint64_t seen = 0;
    EXPECT_EQ(call("cuMemcpyDtoH_v2", static_cast<void*>(&seen), memory + kPage - sizeof(seen), sizeof(seen)), 0);
    EXPECT_NE(seen, 0u);
    void* locked = nullptr;
    EXPECT_EQ(call("cuMemHostAlloc", &locked, size_t{64}, 0u), 0);
    EXPECT_NE(*static_cast<uint64_t*>(locked), 0u);
  });
}

TEST(EmulatedRules, KernelsArePassedOnlyAddressesThatADeviceReaches) {
  in_process({}, [] {
    (void)use(0);
    void *const stream = make_stream(), *const storing = make_function("emulated_store");
    auto* const locked = reinterpret_cast<uint64_t*>(make_pages(1));
    EXPECT_EQ(lock_pages(locked, kPage), 0);
    EXPECT_EQ(launch(storing, stream, StoreArgs{locked, 7}), 0);
    EXPECT_EQ(launch(storing, stream, StoreArgs{make_pinned(), 7}), 0);
    EXPECT_EQ(launch(storing, stream, StoreArgs{reinterpret_cast<uint64_t*>(make_memory()), 7}), 0);
    EXPECT_EQ(synchronize(stream), 0);
    EXPECT_EQ(load(locked), 7u);
    // The emulation takes a small lower half for a number of 32 bits.
    uint64_t* own = nullptr;
    while (static_cast<uint32_t>(address(own)) < 1u << 24) own = reinterpret_cast<uint64_t*>(make_pages(1));
    EXPECT_EQ(launch(storing, stream, StoreArgs{own, 7}), 0);
    EXPECT_EQ(synchronize(stream), kIllegalAddress);
  });
}

TEST(EmulatedRules, PageLockedRangesDoNotOverlap) {
  in_process({}, [] {
    (void)use(0);
    char* const pages = make_pages(8);
    EXPECT_EQ(lock_pages(pages + 2 * kPage, 2 * kPage), 0);
    EXPECT_EQ(lock_pages(pages + 2 * kPage, 2 * kPage), kAlreadyRegistered);
    EXPECT_EQ(lock_pages(pages + 3 * kPage, kPage), kAlreadyRegistered) << "a part";
    EXPECT_EQ(lock_pages(pages, 3 * kPage), kAlreadyRegistered) << "it begins before";
    EXPECT_EQ(lock_pages(pages, 8 * kPage), kAlreadyRegistered) << "more than all of it";
    EXPECT_EQ(lock_pages(pages, 2 * kPage), 0) << "a neighbour";
    EXPECT_EQ(unlock_pages(pages + 3 * kPage), kNotRegistered);
    EXPECT_EQ(call("cuMemFreeHost", static_cast<void*>(pages)), kInvalidValue) << "it is the program's";
    EXPECT_EQ(unlock_pages(pages), 0);
    EXPECT_EQ(unlock_pages(make_pinned()), kNotRegistered) << "it is the driver's";
    EXPECT_EQ(lock_pages(pages, 0), kInvalidValue);
    EXPECT_EQ(lock_pages(pages, kPage, 16), kInvalidValue);
    EXPECT_EQ(munmap(pages + 7 * kPage, kPage), 0);
    EXPECT_EQ(lock_pages(pages + 6 * kPage, 2 * kPage), kInvalidValue) << "half of it is no memory";
  });
}

TEST(EmulatedRules, ALaunchWaitsWhereAStreamTakesNoMore) {
  in_process({{"MOECCL_TEST_CUDA_QUEUE", "4"}}, [] {
    (void)use(0);
    void *const stream = make_stream(), *const other = make_stream(), *const storing = make_function("emulated_store");
    uint64_t *const word = make_pinned(), *const go = make_pinned();
    EXPECT_EQ(call("cuStreamWaitValue64_v2", stream, address(go), uint64_t{1}, 0u), 0);
    const auto launch_on = [&](void* s) { EXPECT_EQ(launch(storing, s, StoreArgs{word, 1}), 0); };
    some_time();  // the wait has begun
    for (int i = 0; i < 4; ++i) launch_on(stream);
    launch_on(other);
    EXPECT_EQ(synchronize(other), 0) << "other streams take launches";
    EXPECT_TRUE(waits([&] { launch_on(stream); }, [&] { store(go, 1); }, true));
    EXPECT_EQ(synchronize(stream), 0);
  });
}

TEST(EmulatedRules, UnknownFlagsAndLargeBlocksAreRefused) {
  in_process({}, [] {
    (void)use(0);
    void *const stream = make_stream(), *event = nullptr, *p = nullptr;
    uint64_t* const word = make_pinned();
    EXPECT_EQ(call("cuEventCreate", &event, 8u), kInvalidValue);
    EXPECT_EQ(call("cuEventCreate", &event, 2u), 0);
    EXPECT_EQ(call("cuEventRecordWithFlags", event, stream, 2u), kInvalidValue);
    EXPECT_EQ(call("cuStreamWaitEvent", stream, event, 2u), kInvalidValue);
    EXPECT_EQ(call("cuMemHostAlloc", &p, size_t{64}, 8u), kInvalidValue);
    EXPECT_EQ(call("cuStreamWriteValue64_v2", stream, address(word), uint64_t{1}, 2u), kInvalidValue);
    EXPECT_EQ(call("cuStreamWaitValue64_v2", stream, address(word), uint64_t{1}, 4u), kInvalidValue);
    EXPECT_EQ(launch(make_function("emulated_store"), stream, StoreArgs{word, 1}, 1, 257), kInvalidValue);
    EXPECT_EQ(launch(make_function("emulated_store"), stream, StoreArgs{word, 1}, 1, 256), 0);
    EXPECT_EQ(synchronize(stream), 0);
  });
}

}  // namespace
}  // namespace moeccl::emulation
