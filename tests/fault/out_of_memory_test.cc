// SPDX-License-Identifier: Apache-2.0
// Any one allocation of a process fails: its rank gets an error, the peers hear of it at once instead of waiting for
// the deadline, and nothing aborts or hangs (scoreboard line 15). MOECCL_TEST_SCALE tries more allocations; from about
// 100 on it tries every one.
#include <cerrno>
#include <cstdlib>
#include <new>

#include "tests/fault/one_failure.h"

using moeccl::testing::fails;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
// Sanitizers have their own malloc, so only the allocations of C++ fail there.
void* operator new(size_t bytes) {
  void* p = fails() ? nullptr : std::malloc(bytes);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return fails() ? nullptr : std::malloc(bytes); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
#else
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t n, size_t bytes);
void* __libc_realloc(void* p, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

void* malloc(size_t bytes) noexcept {
  if (!fails()) return __libc_malloc(bytes);
  errno = ENOMEM;
  return nullptr;
}
void* calloc(size_t n, size_t bytes) noexcept {
  if (!fails()) return __libc_calloc(n, bytes);
  errno = ENOMEM;
  return nullptr;
}
void* realloc(void* p, size_t bytes) noexcept {
  if (!fails()) return __libc_realloc(p, bytes);
  errno = ENOMEM;
  return nullptr;
}
void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
  if (!fails()) return __libc_memalign(alignment, bytes);
  errno = ENOMEM;
  return nullptr;
}
}
#endif

namespace moeccl::testing {
namespace {

// Returns kInternalError if the calling thread still has an open group.
Verdict init_all(long nth, long* counted) {
  moecclConfig_t config = MOECCL_CONFIG_INIT;
  config.init_timeout_ms = 200;
  config.staging_bytes = 1 << 16;
  moecclComm_t comms[kRanks] = {};
  moecclUniqueId unused;
  (void)moecclGetUniqueId(&unused);  // reads the environment, where libc asks for the user's home and aborts
  failing = nth;
  counts = true;
  (void)moecclCommInitAll(comms, kRanks, &config);
  counts = false;
  *counted = n_calls;
  const bool open = moecclGroupCancel() == moecclSuccess;
  for (moecclComm_t comm : comms) (void)moecclCommDestroy(comm);
  return open ? kInternalError : kGood;
}

TEST(OutOfMemory, AnyAllocationThatFailsIsAnErrorForAll) { fail_some(scenario, 150, "allocation", 1000); }
TEST(OutOfMemory, InitAllLeavesNoGroupOpen) {
  constexpr long kBeforeTheJoins = 16;  // allocations, of which some are made in the group
  for (long nth = 0; nth <= kBeforeTheJoins; ++nth) EXPECT_EQ(in_child(init_all, nth, nullptr), 0) << nth;
}
TEST(OutOfMemory, APeerOnAnotherHostHearsOfItToo) { fail_some(between_hosts, 40, "allocation", 1000); }

}  // namespace
}  // namespace moeccl::testing
