// SPDX-License-Identifier: Apache-2.0
// What a rank tells each other rank alone, before they connect: Endpoint::rows().
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "src/bootstrap/bootstrap.h"

namespace moeccl::transport {

struct Rows {
  std::vector<std::vector<std::byte>> to;  // [n_ranks]

  // With two ranks, offers have one reader as well. The row then follows the offer and needs no round of its own.
  bool in_offer() const { return to.size() == 2; }
  std::vector<std::byte> behind(std::vector<std::byte> offer, uint32_t own_rank) const {
    if (!in_offer()) return offer;
    const std::vector<std::byte>& row = to[1 - own_rank];
    offer.insert(offer.end(), row.begin(), row.end());
    return offer;
  }
  std::vector<std::vector<std::byte>> sent_apart() const {
    return in_offer() ? std::vector<std::vector<std::byte>>() : to;
  }
};

// Returns whether the ranks' meeting point passes the rows on if each rank's rows have `bytes` in all.
inline bool rows_fit(size_t n_ranks, size_t bytes) {
  const size_t sent = bytes + n_ranks * sizeof(uint32_t);  // each row has its size before it
  return sent <= bootstrap::kMaxRowsBytes && n_ranks * sent <= bootstrap::kMaxAllRowsBytes;
}

}  // namespace moeccl::transport
