// SPDX-License-Identifier: Apache-2.0
// Device memory between processes by IPC handles.
#include "tests/unit/cuda_emulation/driver.h"

namespace moeccl::emulation {
namespace {

constexpr int kInvalidValue = 1, kInvalidContext = 201;

struct Handle {
  char bytes[64];
};
int export_memory(uint64_t p, Handle* handle) { return call("cuIpcGetMemHandle", static_cast<void*>(handle), p); }
int open_memory(const Handle& handle, uint64_t* p) {
  auto* const f = reinterpret_cast<int (*)(uint64_t*, Handle, unsigned)>(dlsym(library(), "cuIpcOpenMemHandle_v2"));
  return f(p, handle, 1u);
}
int close_memory(uint64_t p) { return call("cuIpcCloseMemHandle", p); }

TEST(EmulatedSharing, HandlesAreForWholeAllocationsOfCuMemAllocAndForOtherProcesses) {
  in_process({}, [] {
    (void)use(0);
    const uint64_t memory = make_memory(8192);
    uint64_t pooled = 0, opened = 0;
    Handle handle{};
    EXPECT_EQ(export_memory(memory + 4096, &handle), kInvalidValue) << "not from the middle";
    EXPECT_EQ(export_memory(address(make_pinned()), &handle), kInvalidValue);
    EXPECT_EQ(call("cuMemAllocAsync", &pooled, size_t{64}, static_cast<void*>(nullptr)), 0);
    EXPECT_EQ(export_memory(pooled, &handle), kInvalidValue) << "pools have none";
    constexpr size_t kUnit = 2 << 20;
    const int properties[12] = {1, 1, 1, 0};
    const int access[3] = {1, 0, 3};
    uint64_t object = 0, mapped = 0;
    EXPECT_EQ(call("cuMemCreate", &object, kUnit, static_cast<const void*>(properties), 0ull), 0);
    EXPECT_EQ(call("cuMemAddressReserve", &mapped, kUnit, size_t{0}, uint64_t{0}, 0ull), 0);
    EXPECT_EQ(call("cuMemMap", mapped, kUnit, size_t{0}, object, 0ull), 0);
    EXPECT_EQ(call("cuMemSetAccess", mapped, kUnit, static_cast<const void*>(access), size_t{1}), 0);
    EXPECT_EQ(export_memory(mapped, &handle), kInvalidValue) << "nor has cuMemMap";
    EXPECT_EQ(export_memory(memory, &handle), 0);
    EXPECT_EQ(open_memory(handle, &opened), kInvalidContext) << "a process does not open its own";
  });
}

TEST(EmulatedSharing, AnotherProcessOpensItOnceForEachContextAndClosesItAsOften) {
  int to_owner[2], to_user[2];
  ASSERT_EQ(pipe(to_owner), 0);
  ASSERT_EQ(pipe(to_user), 0);
  const pid_t owner = fork();
  ASSERT_GE(owner, 0);
  if (owner == 0) {
    close(to_owner[1]);
    (void)use(0);
    Handle handle{};
    const uint64_t memory = make_memory();
    EXPECT_EQ(export_memory(memory, &handle), 0);
    EXPECT_EQ(write(to_user[1], &handle, sizeof(handle)), static_cast<ssize_t>(sizeof(handle)));
    char end = 0;
    EXPECT_EQ(read(to_owner[0], &end, 1), 1);
    uint64_t seen = 0;
    EXPECT_EQ(call("cuMemcpyDtoH_v2", static_cast<void*>(&seen), memory, sizeof(seen)), 0);
    EXPECT_EQ(seen, 7u);
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  close(to_user[1]);
  in_process({{"MOECCL_TEST_CUDA_DEVICES", "2"}, {"MOECCL_TEST_CUDA_IMPLICIT_SYNC", "1"}}, [&] {
    Handle handle{};
    ASSERT_EQ(read(to_user[0], &handle, sizeof(handle)), static_cast<ssize_t>(sizeof(handle)));
    (void)use(0);
    uint64_t first = 0, again = 0, elsewhere = 0;
    EXPECT_EQ(open_memory(handle, &first), 0);
    EXPECT_EQ(open_memory(handle, &again), 0);
    EXPECT_EQ(first, again);
    Handle passed_on{};
    EXPECT_EQ(export_memory(first, &passed_on), kInvalidValue);
    EXPECT_EQ(call("cuMemFree_v2", first), kInvalidValue) << "it is closed, not freed";
    (void)use(1);
    EXPECT_EQ(open_memory(handle, &elsewhere), 0);
    EXPECT_NE(elsewhere, first) << "another context maps it for itself";
    EXPECT_EQ(close_memory(elsewhere), 0);
    (void)use(0);
    void *stream = make_stream(), *spinning = make_function("emulated_spin");
    uint64_t* const word = make_pinned();
    EXPECT_EQ(launch(make_function("emulated_store"), stream, StoreArgs{reinterpret_cast<uint64_t*>(first), 7}), 0);
    EXPECT_EQ(synchronize(stream), 0);
    EXPECT_EQ(close_memory(first), 0);
    spin(spinning, stream, word);
    EXPECT_TRUE(waits([&] { EXPECT_EQ(close_memory(first), 0); }, [&] { store(word, 1); }, true))
        << "closing waits for what may use it";
    EXPECT_EQ(close_memory(first), kInvalidValue);
  });
  EXPECT_EQ(write(to_owner[1], "e", 1), 1);
  int status = 0;
  ASSERT_EQ(waitpid(owner, &status, 0), owner);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace moeccl::emulation
