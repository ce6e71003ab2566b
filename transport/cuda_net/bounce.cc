// SPDX-License-Identifier: Apache-2.0
#include "transport/cuda_net/bounce.h"

namespace moeccl::transport::cuda_net {

std::byte* Bounce::take(size_t bytes) {
  const size_t need = (bytes + kAlign - 1) / kAlign * kAlign;
  if (n_ == kMostPieces) return nullptr;
  size_t at = 0;
  if (n_ == 0) {
    if (need > bytes_) return nullptr;
  } else {
    const Piece &oldest = piece(0), &newest = piece(n_ - 1);
    const bool wrapped = newest.begin < oldest.begin;
    const size_t end = wrapped ? oldest.begin : bytes_;
    if (need <= end - newest.end) {
      at = newest.end;
    } else if (wrapped || need > oldest.begin) {
      return nullptr;
    }
  }
  piece(n_++) = {at, at + need, false};
  return base_ + at;
}

void Bounce::give_back(const std::byte* begin) {
  const auto at = static_cast<size_t>(begin - base_);
  for (size_t i = 0; i < n_; ++i) {
    if (piece(i).free || piece(i).begin != at) continue;
    piece(i).free = true;
    break;
  }
  while (n_ > 0 && piece(0).free) {
    first_ = (first_ + 1) % kMostPieces;
    --n_;
  }
}

}  // namespace moeccl::transport::cuda_net
