// SPDX-License-Identifier: Apache-2.0
// The emulated driver's memory for NICs. The words of MOECCL_TEST_CUDA_RDMA say what the device allows: "dmabuf", and
// how remote writes become visible to kernels: "call" (by cuFlushGPUDirectRDMAWrites) or "ordered" (without a flush),
// otherwise by a read of the NIC. When it is not set, no NIC reaches the memory.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/support/cuda_emulation/fake_driver.h"

namespace moeccl::emulation::driver {
namespace {
std::atomic<void (*)()> flushes{nullptr};
}  // namespace

int rdma_attribute(int attribute) {
  const char* set = std::getenv("MOECCL_TEST_CUDA_RDMA");
  const std::string words = set == nullptr ? "" : set;
  const auto has = [&](const char* word) { return words.find(word) != std::string::npos; };
  switch (attribute) {
    case 117:  // ways to flush
      return has("call") ? 1 : 0;
    case 118:  // order of remote writes
      return has("ordered") ? 100 : 0;
    case 124:  // dma-buf
      return has("dmabuf") ? 1 : 0;
    default:  // NICs reach memory of cuMemAlloc (116), of cuMemMap (110)
      return set != nullptr ? 1 : 0;
  }
}

}  // namespace moeccl::emulation::driver

using namespace moeccl::emulation::driver;

// For tests: sets the function that performs a flush.
EXPORT void moeccl_emulated_on_flush(void (*flush)()) { flushes = flush; }

// Returns the file that holds an address, positioned there, as nvidia-peermem asks the driver.
EXPORT int moeccl_emulated_file(uint64_t p, size_t bytes) {
  const std::lock_guard lock(machine().mutex);
  uint64_t base = 0;
  const Allocation* const a = find_device(p, &base);
  if (a == nullptr || a->fd < 0 || p + bytes > base + a->bytes) return -1;
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/self/fd/%d", a->fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd >= 0) (void)lseek(fd, static_cast<off_t>(p - base), SEEK_SET);
  return fd;
}

EXPORT int cuMemGetHandleForAddressRange(void* handle, uint64_t p, size_t bytes, int kind, unsigned long long) {
  MOECCL_IN_CONTEXT(context);
  if (kind != 1 || p % 4096 != 0 || bytes == 0 || bytes % 4096 != 0) return kInvalidValue;
  if (rdma_attribute(124) == 0) return 801;  // not supported
  const int fd = moeccl_emulated_file(p, bytes);
  if (fd < 0) return kInvalidValue;
  return *static_cast<int*>(handle) = fd, kOk;
}
EXPORT int cuFlushGPUDirectRDMAWrites(int target, int scope) {
  MOECCL_IN_CONTEXT(context);
  if (target != 0 || (scope != 100 && scope != 200)) return kInvalidValue;
  if (rdma_attribute(117) == 0) return 801;
  if (auto* const flush = flushes.load(); flush != nullptr) flush();
  return kOk;
}
