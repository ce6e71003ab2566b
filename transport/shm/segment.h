// SPDX-License-Identifier: Apache-2.0
// A rank's segment: its board, the signals that its peers send it, and its staging, in one shared mapping.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "src/base/fd.h"
#include "src/driver/memory.h"
#include "transport/transport.h"

namespace moeccl::transport::shm {

// All ranks use the same shape, from which the offsets follow.
struct SegmentShape {
  uint32_t n_ranks = 1;
  uint32_t rank = 0;           // the owner
  uint64_t staging_bytes = 0;  // both halves together
  uint64_t message_bytes = 0;  // Send/Recv: bytes of one slot; each peer has kMessageSlots
};
inline constexpr uint32_t kMessageSlots = 2;

class Segment {
 public:
  // Creates this rank's own segment: shared when ranks of other processes will map it (then fd() is valid), else
  // private memory.
  static Result<std::shared_ptr<Segment>> create(const SegmentShape& shape, bool shared);
  // Maps a peer's segment from the descriptor that the peer sent; the mapping does not need it any longer.
  static Result<std::shared_ptr<Segment>> map(const SegmentShape& shape, const Fd& fd);

  Board& board() const { return *at<Board>(board_); }
  SignalLine& signal(uint32_t src_rank, uint32_t sig) const {
    return at<SignalLine>(signals_)[static_cast<size_t>(src_rank) * kSigsPerPeer + sig];
  }
  BlockWord* blocks(uint64_t seq) const { return at<BlockWord>(blocks_) + (seq % 2) * shape_.n_ranks; }
  Outbox* outbox(uint64_t seq) const { return at<Outbox>(outboxes_) + seq % 2; }
  PaceWords& pace(uint32_t level) const { return at<PaceWords>(pace_)[level]; }
  std::byte* staging() const { return base_ + staging_; }
  // The bytes from staging() on that peers may put into: the staging and the message slots.
  uint64_t put_bytes() const { return bytes_ - staging_; }
  // Returns the parts that a link without a view of its peer needs.
  LocalMemory memory(uint32_t rank) const {
    return {rank, &board(), &signal(0, 0), {blocks(0), blocks(1)}, staging(), put_bytes()};
  }
  // Returns slot `slot` for messages from src_rank.
  std::byte* message(uint32_t src_rank, uint32_t slot) const {
    return base_ + messages_ + (static_cast<size_t>(src_rank) * kMessageSlots + slot) * shape_.message_bytes;
  }
  uint64_t message_offset(uint32_t src_rank, uint32_t slot) const {
    return messages_ - staging_ + (static_cast<size_t>(src_rank) * kMessageSlots + slot) * shape_.message_bytes;
  }
  const SegmentShape& shape() const { return shape_; }
  size_t bytes() const { return bytes_; }
  std::byte* base() const { return base_; }
  // Takes the mapping in the end, for code that told a device about it and has to tell it first that it ends.
  std::function<void(driver::Mapping mapping)> end_mapping;
  ~Segment() {
    if (end_mapping && base_ != nullptr) end_mapping(std::move(mapping_));
  }
  const Fd& fd() const { return fd_; }
  // For use when all peers have the descriptor: a mapping needs none.
  void close_fd() { fd_.reset(); }

 private:
  explicit Segment(const SegmentShape& shape);
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

  SegmentShape shape_;
  size_t board_ = 0, signals_ = 0, blocks_ = 0, pace_ = 0, outboxes_ = 0, staging_ = 0, messages_ = 0, bytes_ = 0;
  Fd fd_;
  driver::Mapping mapping_;
  std::byte* base_ = nullptr;
};

}  // namespace moeccl::transport::shm
