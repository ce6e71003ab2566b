// SPDX-License-Identifier: Apache-2.0
#include "transport/verbs/bounce_ring.h"

namespace moeccl::transport::verbs {

namespace {
constexpr size_t kAlign = 64;
}

std::byte* BounceRing::take(size_t bytes) {
  if (taken_ != nullptr && taken_bytes_ >= bytes) return taken_;
  drop_taken();
  if (bytes == 0 || bytes > bytes_) return nullptr;
  size_t begin = 0;
  if (n_ == 0) {
    head_ = tail_ = 0;
  } else if (head_ > tail_) {  // used: [tail_, head_)
    if (bytes_ - head_ >= bytes) {
      begin = head_;
    } else if (tail_ > bytes) {  // never so full that head_ meets tail_
      begin = 0;
    } else {
      return nullptr;
    }
  } else {  // used: [tail_, end) and [0, head_)
    if (tail_ - head_ <= bytes) return nullptr;
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
  size_t end = begin + bytes;
  if (last) end = (end + kAlign - 1) / kAlign * kAlign;
  end = end < bytes_ ? end : bytes_;
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
