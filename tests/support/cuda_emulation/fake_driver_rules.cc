// SPDX-License-Identifier: Apache-2.0
// Rules of a real driver that concern several calls: nothing works in a process that was forked after cuInit, memory is
// not zeroed, and kernels do not reach the program's own memory.
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "tests/support/cuda_emulation/fake_driver.h"

namespace moeccl::emulation::driver {
namespace {

constexpr unsigned char kLeft = 0xc7;  // as a float, some -1e5
bool forked = false;                   // written only in a process of one thread

void watch_forks() {
  static const int once = pthread_atfork(nullptr, nullptr, [] { forked = true; });
  (void)once;
}

}  // namespace

bool is_fork() { return forked; }

void spoil(void* p, size_t bytes) {
  if (rule("GARBAGE")) std::memset(p, kLeft, bytes);
}
void spoil(int fd, size_t bytes) {
  constexpr size_t kPart = size_t{1} << 20;
  if (!rule("GARBAGE")) return;
  static const auto* const left = new std::vector<unsigned char>(kPart, kLeft);
  (void)!pwrite(fd, left->data(), std::min(bytes, kPart), 0);
}

bool is_pageable(uint64_t p) {
  // The end of a range may be passed where it has no bytes.
  if (find_device(p) != nullptr || find_device(p - 1) != nullptr || is_pinned(p) || is_pinned(p - 1)) return false;
  unsigned char resident = 0;
  return mincore(reinterpret_cast<void*>(p / 4096 * 4096), 1, &resident) == 0;
}

size_t find_pageable(const char* args, size_t bytes) {
  // The process's memory lies between these. A small number in the lower half is one of 32 bits, with padding behind
  // it.
  constexpr uint64_t kLeast = uint64_t{1} << 32, kMost = uint64_t{1} << 47;
  constexpr uint32_t kSmall = 1u << 24;
  if (!rule("ARGUMENTS")) return bytes;
  const std::lock_guard lock(machine().mutex);
  for (size_t at = 0; at + sizeof(uint64_t) <= bytes; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, args + at, sizeof(word));
    if (word > kLeast && word < kMost && static_cast<uint32_t>(word) >= kSmall && is_pageable(word)) return at;
  }
  return bytes;
}

}  // namespace moeccl::emulation::driver

using namespace moeccl::emulation::driver;

EXPORT int cuInit(unsigned flags) {
  MOECCL_CALL();
  watch_forks();
  return flags == 0 ? kOk : kInvalidValue;
}
