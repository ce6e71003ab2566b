// SPDX-License-Identifier: Apache-2.0
// Which memory of which device a kernel and a copy may use.
#include "tests/unit/cuda_emulation/driver.h"

namespace moeccl::emulation {
namespace {

constexpr int kInvalidValue = 1, kIllegalAddress = 700;
const Settings kTwo = {{"MOECCL_TEST_CUDA_DEVICES", "2"}};

struct Location {
  int kind, device;
};
struct AccessTo {
  Location place;
  int flags;
};
AccessTo access_of(int device) { return {{1, device}, 3}; }
// Returns an address that no memory has. The undefined-behaviour sanitizer would report a null pointer before the
// driver does.
uint64_t* nowhere() { return reinterpret_cast<uint64_t*>(uintptr_t{64}); }

// Memory of device 0 that a kernel of device 1 stores to, with the calls that allow this and those that do not.
struct Memory {
  uint64_t p = 0;
  void* pool = nullptr;
};
Memory plain() { return {make_memory(), nullptr}; }
Memory pooled() {
  Memory m;
  EXPECT_EQ(call("cuMemAllocAsync", &m.p, size_t{4096}, static_cast<void*>(nullptr)), 0);
  EXPECT_EQ(call("cuDeviceGetDefaultMemPool", &m.pool, 0), 0);
  return m;
}
constexpr size_t kUnit = 2 << 20;
Memory mapped() {
  const int properties[12] = {1, 1, 1, 0};  // pinned, a descriptor, on device 0
  uint64_t handle = 0;
  Memory m;
  EXPECT_EQ(call("cuMemCreate", &handle, kUnit, static_cast<const void*>(properties), 0ull), 0);
  EXPECT_EQ(call("cuMemAddressReserve", &m.p, kUnit, size_t{0}, uint64_t{0}, 0ull), 0);
  EXPECT_EQ(call("cuMemMap", m.p, kUnit, size_t{0}, handle, 0ull), 0);
  const AccessTo own = access_of(0);
  EXPECT_EQ(call("cuMemSetAccess", m.p, kUnit, static_cast<const void*>(&own), size_t{1}), 0);
  return m;
}

// Returns the result of a kernel of device 1 that stores to memory of device 0.
int store_from_other_device(uint64_t p) {
  (void)use(1);
  void* const stream = make_stream();
  EXPECT_EQ(launch(make_function("emulated_store"), stream, StoreArgs{reinterpret_cast<uint64_t*>(p), 7}), 0);
  return synchronize(stream);
}
int copy_from_other_device(uint64_t p) {
  (void)use(1);
  const uint64_t own = make_memory();
  void* const stream = make_stream();
  const int rc = call("cuMemcpyAsync", own, p, size_t{64}, stream);
  EXPECT_EQ(synchronize(stream), 0);
  return rc;
}
void enable_peer() {
  (void)use(1);
  EXPECT_EQ(call("cuCtxEnablePeerAccess", context_of(0), 0u), 0);
}
bool checked() { return reinterpret_cast<int (*)()>(dlsym(library(), "moeccl_emulated_reach"))() != 0; }

class EmulatedReach : public ::testing::Test {
  void SetUp() override {
    if (!checked()) GTEST_SKIP() << "this processor has no protection keys: kernels' reach is not checked";
  }
};

TEST_F(EmulatedReach, MemoryOfCuMemAllocNeedsPeerAccessInThatDirection) {
  in_process(kTwo, [] {
    (void)use(0);
    const Memory m = plain();
    EXPECT_EQ(copy_from_other_device(m.p), 0) << "a copy engine needs none";
    (void)use(0);
    EXPECT_EQ(call("cuCtxEnablePeerAccess", context_of(1), 0u), 0);
    EXPECT_EQ(store_from_other_device(m.p), kIllegalAddress) << "that was the other direction";
  });
  in_process(kTwo, [] {
    (void)use(0);
    const Memory before = plain();
    enable_peer();
    (void)use(0);
    const Memory after = plain();
    EXPECT_EQ(store_from_other_device(before.p), 0);
    EXPECT_EQ(store_from_other_device(after.p), 0);
    uint64_t seen = 0;
    EXPECT_EQ(call("cuMemcpyDtoH_v2", static_cast<void*>(&seen), after.p, sizeof(seen)), 0);
    EXPECT_EQ(seen, 7u);
  });
}

TEST_F(EmulatedReach, AKernelThatTouchesWhatItMayNotFailsItsContextForGood) {
  in_process(kTwo, [] {
    (void)use(0);
    const Memory m = plain();
    void* const fine = make_stream();
    EXPECT_EQ(store_from_other_device(m.p), kIllegalAddress);
    void* p = nullptr;
    uint64_t q = 0;
    EXPECT_EQ(call("cuStreamCreate", &p, 1u), kIllegalAddress);
    EXPECT_EQ(call("cuMemAlloc_v2", &q, size_t{64}), kIllegalAddress);
    EXPECT_EQ(call("cuCtxSynchronize"), kIllegalAddress);
    EXPECT_EQ(call("cuStreamSynchronize", static_cast<void*>(nullptr)), kIllegalAddress);
    (void)use(0);
    EXPECT_EQ(launch(make_function("emulated_store"), fine, StoreArgs{reinterpret_cast<uint64_t*>(m.p), 7}), 0);
    EXPECT_EQ(synchronize(fine), 0) << "another context is not concerned";
    // Work that waits for it does not hang.
    EXPECT_EQ(launch(make_function("emulated_store"), fine, StoreArgs{nowhere(), 7}), 0);
    EXPECT_EQ(synchronize(fine), kIllegalAddress);
  });
}

TEST_F(EmulatedReach, AFailureEndsTheKernelsThatRunBesideIt) {
  in_process({}, [] {
    (void)use(0);
    void *waiting = make_stream(), *failing = make_stream();
    spin(make_function("emulated_spin"), waiting, make_pinned());
    EXPECT_EQ(launch(make_function("emulated_store"), failing, StoreArgs{nowhere(), 7}, 4, 64), 0);
    EXPECT_EQ(synchronize(failing), kIllegalAddress);
    EXPECT_EQ(synchronize(waiting), kIllegalAddress);
  });
}

TEST_F(EmulatedReach, PoolsNeedTheirOwnAccess) {
  in_process(kTwo, [] {
    (void)use(0);
    const Memory m = pooled();
    enable_peer();
    EXPECT_EQ(copy_from_other_device(m.p), kInvalidValue);
    const AccessTo one = access_of(1);
    EXPECT_EQ(call("cuMemPoolSetAccess", m.pool, static_cast<const void*>(&one), size_t{1}), 0);
    int flags = 0;
    EXPECT_EQ(call("cuMemPoolGetAccess", &flags, m.pool, static_cast<const void*>(&one.place)), 0);
    EXPECT_EQ(flags, 3);
    EXPECT_EQ(copy_from_other_device(m.p), 0);
    EXPECT_EQ(store_from_other_device(m.p), 0);
  });
  in_process(kTwo, [] {
    (void)use(0);
    const Memory m = pooled();
    enable_peer();
    EXPECT_EQ(store_from_other_device(m.p), kIllegalAddress) << "peer access is not for pools";
  });
}

TEST_F(EmulatedReach, MappedMemoryNeedsItsOwnersPermission) {
  in_process(kTwo, [] {
    (void)use(0);
    const Memory m = mapped();
    uint64_t base = 0, bytes = 0;
    EXPECT_EQ(call("cuPointerGetAttribute", static_cast<void*>(&bytes), 18, m.p + 100), 0);
    EXPECT_EQ(call("cuPointerGetAttribute", static_cast<void*>(&base), 19, m.p + 100), 0);
    EXPECT_EQ(base, m.p);
    EXPECT_EQ(bytes, kUnit);
    enable_peer();
    EXPECT_EQ(copy_from_other_device(m.p), kInvalidValue);
    const AccessTo one = access_of(1);
    EXPECT_EQ(call("cuMemSetAccess", m.p, kUnit, static_cast<const void*>(&one), size_t{1}), 0);
    EXPECT_EQ(copy_from_other_device(m.p), 0);
    EXPECT_EQ(store_from_other_device(m.p), 0);
  });
  in_process(kTwo, [] {
    (void)use(0);
    const Memory m = mapped();
    enable_peer();
    EXPECT_EQ(store_from_other_device(m.p), kIllegalAddress);
  });
}

TEST_F(EmulatedReach, TheHostDoesNotReachDeviceMemoryEvenWhileAKernelRuns) {
  EXPECT_DEATH(
      {
        (void)use(0);
        void* const stream = make_stream();
        const uint64_t p = make_memory();
        spin(make_function("emulated_spin"), stream, make_pinned());
        some_time();
        *reinterpret_cast<volatile char*>(p) = 1;
      },
      "");
}

TEST_F(EmulatedReach, CopiesAndFillsEndWithTheirMemory) {
  in_process({}, [] {
    (void)use(0);
    const uint64_t p = make_memory(4096);
    void* const stream = make_stream();
    EXPECT_EQ(call("cuMemsetD8Async", p, static_cast<unsigned char>(1), size_t{4097}, stream), kInvalidValue);
    EXPECT_EQ(call("cuMemcpyAsync", p + 4000, p, size_t{97}, stream), kInvalidValue);
    EXPECT_EQ(call("cuMemcpyAsync", p + 4000, p, size_t{96}, stream), 0);
    EXPECT_EQ(synchronize(stream), 0);
  });
}

}  // namespace
}  // namespace moeccl::emulation
