#include <array>
#include <cstring>

#include "kernels/host/tables.h"

namespace moeccl::kernels {
namespace {

struct Choice {
  const char* name;
  bool (*supported)();
  const KernelTable& (*table)();
};

// __builtin_cpu_supports also asks whether the operating system saves the wide registers.
// Fastest first.
constexpr Choice kChoices[] = {
#if defined(MOECCL_KERNELS_X86)
    {"avx512",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
     },
     avx512_table},
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }, avx2_table},
#endif
    {"reference", [] { return true; }, reference_table},
};

const KernelTable& choose() {
  for (const Choice& c : kChoices) {
    if (c.supported()) return c.table();
  }
  return reference_table();
}

}  // namespace

const KernelTable& best() {
  static const KernelTable& table = choose();
  return table;
}

const KernelTable* select(const char* name) {
  if (!name) return nullptr;
  for (const Choice& c : kChoices) {
    if (std::strcmp(c.name, name) == 0) return c.supported() ? &c.table() : nullptr;
  }
  return nullptr;
}

size_t stream_threshold_bytes() { return size_t{4} << 20; }

}  // namespace moeccl::kernels
