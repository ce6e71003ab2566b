// SPDX-License-Identifier: Apache-2.0
// The registered memory of one link, taken and given back in order. Small puts, and puts from memory that no NIC may
// read, are copied to it; what is packed there (Rooms) is sent without another copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moeccl::transport::verbs {

// One thread at a time.
class BounceRing {
 public:
  BounceRing() = default;
  BounceRing(std::byte* base, size_t bytes, size_t most_pieces) : base_(base), bytes_(bytes) {
    pieces_.resize(most_pieces);
  }

  // Returns contiguous room, or null while there is none. The same memory is returned again until it is sent.
  std::byte* take(size_t bytes);
  // Returns whether no more pieces can be noted before the oldest is given back. There is no room then.
  bool full() const { return n_ == pieces_.size(); }
  // Notes that the beginning of the taken room is under way as request `number` of a lane; the rest stays taken. Not
  // while the ring is full().
  void sent(size_t bytes, uint32_t lane, uint64_t number);
  // Frees what was taken and not sent.
  void drop_taken() {
    taken_ = nullptr;
    taken_bytes_ = 0;
  }
  bool is_taken(const void* p, size_t bytes) const { return taken_ != nullptr && p == taken_ && bytes <= taken_bytes_; }
  // The request that must be done before more room appears.
  struct Oldest {
    uint32_t lane = 0;
    uint64_t number = 0;  // 0: nothing is under way
  };
  Oldest oldest() const { return n_ == 0 ? Oldest{} : Oldest{pieces_[first_].lane, pieces_[first_].number}; }
  // done(lane, number) returns whether the request has ended.
  template <class Done>
  void give_back(Done&& done) {
    while (n_ > 0 && done(pieces_[first_].lane, pieces_[first_].number)) {
      tail_ = pieces_[first_].end;
      first_ = (first_ + 1) % pieces_.size();
      --n_;
    }
    if (n_ == 0 && taken_ == nullptr) head_ = tail_ = 0;
  }
  size_t bytes() const { return bytes_; }

 private:
  struct Piece {
    size_t end = 0;  // offset of its end
    uint32_t lane = 0;
    uint64_t number = 0;
  };
  size_t rounded(size_t end) const;

  std::byte* base_ = nullptr;
  size_t bytes_ = 0;
  size_t head_ = 0, tail_ = 0;  // offsets: [tail_, head_) is under way, perhaps around the end
  std::byte* taken_ = nullptr;
  size_t taken_bytes_ = 0;
  std::vector<Piece> pieces_;  // a ring, from first_ on
  size_t first_ = 0, n_ = 0;
};

}  // namespace moeccl::transport::verbs
