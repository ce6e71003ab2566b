// SPDX-License-Identifier: Apache-2.0
#include "src/driver/fork_page.h"

#include <sys/mman.h>

#include "src/driver/memory.h"

namespace moeccl::driver {
namespace {

std::atomic<uint32_t>* page() {
  static std::atomic<uint32_t>* const made = []() -> std::atomic<uint32_t>* {
    static std::atomic<uint32_t> always{1};
    void* p = mmap(nullptr, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return &always;
    // Needs Linux 4.14. Older kernels leave a fork undetected.
    (void)madvise(p, page_bytes(), MADV_WIPEONFORK);
    return new (p) std::atomic<uint32_t>(0);
  }();
  return made;
}

}  // namespace

const std::atomic<uint32_t>* process_page() { return page(); }

uint32_t process_number() {
  static std::atomic<uint32_t> last{0};  // a child continues with its parent's value
  uint32_t now = page()->load(std::memory_order_relaxed);
  if (now != 0) return now;
  const uint32_t next = last.fetch_add(1, std::memory_order_relaxed) + 1;
  return page()->compare_exchange_strong(now, next, std::memory_order_relaxed) ? next : now;
}

}  // namespace moeccl::driver
