#include "src/driver/fork_page.h"

#include <sys/mman.h>

#include "src/driver/memory.h"

namespace moeccl::driver {

const volatile uint32_t* fork_page() {
  static const volatile uint32_t* const page = []() -> const volatile uint32_t* {
    static const uint32_t always = 1;
    void* p = mmap(nullptr, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return &always;
    // Linux 4.14; without it a forked child is not noticed.
    (void)madvise(p, page_bytes(), MADV_WIPEONFORK);
    *static_cast<volatile uint32_t*>(p) = 1;
    return static_cast<uint32_t*>(p);
  }
  ();
  return page;
}

}  // namespace moeccl::driver
