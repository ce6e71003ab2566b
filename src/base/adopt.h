// The caller's struct, which may be of an older and smaller version, or a newer one.
#pragma once

#include <algorithm>
#include <cstddef>

namespace moeccl {

// How many bytes of a struct of `known` bytes to take where the caller says `given`. Whole words alone: a size that
// ends within a pointer must not make half of one.
inline size_t adopted_bytes(size_t given, size_t known) { return std::min(given, known) & ~(sizeof(void*) - 1); }

}  // namespace moeccl
