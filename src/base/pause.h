// SPDX-License-Identifier: Apache-2.0
// What a thread does between two polls of a word that another core will write.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moeccl {

// Tells the core that this thread polls: for some tens of nanoseconds the core saves power, and its other thread runs.
inline void pause_core() {
#if defined(__x86_64__)
  _mm_pause();
#else
  // `yield` does nothing on Arm's cores; a barrier for instructions empties the pipeline, which takes about as long as
  // x86's pause.
  asm volatile("isb" ::: "memory");
#endif
}

}  // namespace moeccl
