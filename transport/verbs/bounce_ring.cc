// SPDX-License-Identifier: Apache-2.0
#include "transport/verbs/bounce_ring.h"

#include <algorithm>

namespace moeccl::transport::verbs {

namespace {
constexpr size_t kAlign = 64;
}

// What ends at `end` holds the bytes up to here, where the next room may begin.
size_t BounceRing::rounded(size_t end) const { return std::min((end + kAlign - 1) / kAlign * kAlign, bytes_); }

std::byte* BounceRing::take(size_t bytes) {
  if (full()) return nullptr;
  if (taken_ != nullptr && taken_bytes_ >= bytes) return taken_;
  drop_taken();
  if (bytes == 0 || bytes > bytes_) return nullptr;
  size_t begin = 0;
  if (n_ == 0) {
    head_ = tail_ = 0;
  } else if (head_ > tail_) {  // used: [tail_, head_)
    if (bytes_ - head_ >= bytes) {
      begin = head_;
    } else if (rounded(bytes) < tail_) {  // never so full that head_ meets tail_
      begin = 0;
    } else {
      return nullptr;
    }
  } else {  // used: [tail_, end) and [0, head_)
    if (bytes >= tail_ - head_ || rounded(head_ + bytes) >= tail_) return nullptr;
    begin = head_;
  }
  taken_ = base_ + begin;
  taken_bytes_ = bytes;
  return taken_;
}

void BounceRing::sent(size_t bytes, uint32_t lane, uint64_t number) {
  const auto begin = static_cast<size_t>(taken_ - base_);
  // The last piece of what was taken ends where the next room may begin.
  const bool last = bytes >= taken_bytes_;
  const size_t end = last ? rounded(begin + bytes) : begin + bytes;
  pieces_[(first_ + n_) % pieces_.size()] = {end, lane, number};
  ++n_;
  head_ = end;
  if (last) {
    taken_ = nullptr;
    taken_bytes_ = 0;
  } else {
    taken_ += bytes;
    taken_bytes_ -= bytes;
  }
}

}  // namespace moeccl::transport::verbs
