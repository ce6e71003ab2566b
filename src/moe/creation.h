// What ranks that create something together tell each other: whether they can, and the fields that must be the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "moeccl/types.h"
#include "src/base/status.h"

namespace moeccl::comm {

template <size_t N>
struct AgreedFields {
  double fields[N] = {};
  int32_t code = moecclSuccess;
  int32_t padding = 0;
};

// All ranks see all answers, so they fail or go on together.
template <size_t N>
Status compare(const char* function, const char* const (&names)[N], std::span<const AgreedFields<N>> all) {
  for (uint32_t r = 0; r < all.size(); ++r)
    if (all[r].code != moecclSuccess)
      return error(moecclRemoteError, "rank {} fails in {} ({}): see its own error", r, function,
                   moecclGetErrorString(static_cast<moecclResult_t>(all[r].code)));
  for (uint32_t r = 1; r < all.size(); ++r)
    for (size_t i = 0; i < N; ++i)
      if (all[r].fields[i] != all[0].fields[i])
        return error(moecclMismatch, "ranks disagree on the config's {} in {}: rank 0 gives {}, rank {} gives {}",
                     names[i], function, all[0].fields[i], r, all[r].fields[i]);
  return {};
}

}  // namespace moeccl::comm
