// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstring>
#include <iterator>

#if defined(MOECCL_KERNELS_X86)
#include <cpuid.h>
#endif

#include "kernels/host/tables.h"

namespace moeccl::kernels {
namespace {

struct Choice {
  const char* name;
  bool (*supported)();
  const KernelTable& (*table)();
};

#if defined(MOECCL_KERNELS_X86)
// __builtin_cpu_supports also checks that the operating system saves the wide registers.
bool runs_avx2() {
  // Clang's builtin does not know f16c. Its registers are those of avx2.
  unsigned eax, ebx, ecx, edx;
  return __builtin_cpu_supports("avx2") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Fastest first.
constexpr Choice kChoices[] = {
#if defined(MOECCL_KERNELS_X86)
    {"avx512", runs_avx512, avx512_table},
    {"avx2", runs_avx2, avx2_table},
#elif defined(MOECCL_KERNELS_NEON)
    {"neon", [] { return true; }, neon_table},
#endif
    {"reference", [] { return true; }, reference_table},
};

constexpr auto kNames = [] {
  std::array<const char*, std::size(kChoices)> names{};
  for (size_t i = 0; i < names.size(); ++i) names[i] = kChoices[i].name;
  return names;
}();

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

std::span<const char* const> names() { return kNames; }

// Measured on Zen 4 with 32 MiB of last-level cache, one core copying the same buffers again and again: copy reaches 63
// GB/s at 8 MiB and 39 at 16 MiB, copy_stream 55 and 51. Source and destination together no longer fit.
size_t stream_threshold_bytes() { return size_t{8} << 20; }

}  // namespace moeccl::kernels
