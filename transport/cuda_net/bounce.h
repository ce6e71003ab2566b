// SPDX-License-Identifier: Apache-2.0
// A ring of rooms for puts in the bounce memory between a device and a network. Rooms are taken in order and given back
// in any order. The class is pure: it never touches the memory.
#pragma once

#include <array>
#include <cstddef>

namespace moeccl::transport::cuda_net {

class Bounce {
 public:
  void use(std::byte* base, size_t bytes) {
    base_ = base;
    bytes_ = bytes;
  }
  // Returns contiguous room, aligned to kAlign, or null while there is none. An empty bounce has room for all its
  // bytes.
  std::byte* take(size_t bytes);
  void give_back(const std::byte* begin);
  void give_back_all() { n_ = 0; }
  bool empty() const { return n_ == 0; }

 private:
  static constexpr size_t kAlign = 256, kMostPieces = 512;
  struct Piece {
    size_t begin = 0, end = 0;
    bool free = false;  // given back, but older pieces are not
  };
  Piece& piece(size_t i) { return pieces_[(first_ + i) % kMostPieces]; }

  std::byte* base_ = nullptr;
  size_t bytes_ = 0;
  std::array<Piece, kMostPieces> pieces_;  // a ring, in the order in which the pieces were taken
  size_t first_ = 0, n_ = 0;
};

}  // namespace moeccl::transport::cuda_net
