// SPDX-License-Identifier: Apache-2.0
// Kernels for tests of the emulated driver; no GPU has them.
#pragma once

#include <cstdint>

namespace moeccl::emulation {

// emulated_spin runs until the word is at least the value. The blocks of emulated_spin_together need room all at once.
struct SpinArgs {
  const uint64_t* word;
  uint64_t value;
};
// emulated_store writes the value there.
struct StoreArgs {
  uint64_t* to;
  uint64_t value;
};

}  // namespace moeccl::emulation
