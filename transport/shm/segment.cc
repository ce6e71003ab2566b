// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/segment.h"

#include <utility>

namespace moeccl::transport::shm {
namespace {

constexpr size_t kMagicBytes = 64;
constexpr size_t kPage = 4096;  // staging starts on a page, so that a huge copy is aligned

// "MoECCL" and the layout's number. A segment of another build is refused.
constexpr uint64_t kMagic = 0x4d6f4543434c0003ull;

// A page fault at first use costs 0.1 to 0.5 us per page, in the middle of an operation. Populating all pages at init
// costs as much in total, so it is done only where that stays near 50 ms (65536 pages of all segments together).
bool populate(const SegmentShape& shape) { return shape.n_ranks * shape.staging_bytes <= (uint64_t{256} << 20); }

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

Segment::Segment(const SegmentShape& shape) : shape_(shape) {
  const size_t n = shape.n_ranks;
  board_ = kMagicBytes;
  signals_ = round_up(board_ + sizeof(Board), kLine);
  blocks_ = signals_ + n * kSigsPerPeer * sizeof(SignalLine);
  pace_ = round_up(blocks_ + 2 * n * sizeof(BlockWord), kLine);
  outboxes_ = round_up(pace_ + kPaceLevels * sizeof(PaceWords), alignof(Outbox));
  staging_ = round_up(outboxes_ + 2 * sizeof(Outbox), kPage);
  messages_ = round_up(staging_ + shape.staging_bytes, kPage);
  bytes_ = round_up(messages_ + n * kMessageSlots * shape.message_bytes, kPage);
}

Result<std::shared_ptr<Segment>> Segment::create(const SegmentShape& shape, bool shared) {
  std::shared_ptr<Segment> segment(new Segment(shape));
  if (shared) {
    MOECCL_ASSIGN_OR_RETURN(segment->fd_, driver::shared_segment(format("moeccl-rank{}", shape.rank), segment->bytes_));
    MOECCL_ASSIGN_OR_RETURN(segment->mapping_, driver::map_segment(segment->fd_, segment->bytes_));
    MOECCL_TRY(driver::reserve_huge_pages(segment->fd_, segment->mapping_, 0, segment->bytes_)
                   .with_context(format("shared segment of rank {}", shape.rank)));
    if (populate(shape)) driver::enter_pages(segment->mapping_);
  } else {
    MOECCL_ASSIGN_OR_RETURN(segment->mapping_, driver::private_memory(segment->bytes_));
  }
  segment->base_ = segment->mapping_.data();  // zeroed: all words start at 0
  *segment->at<uint64_t>(0) = kMagic;
  return segment;
}

Result<std::shared_ptr<Segment>> Segment::map(const SegmentShape& shape, const Fd& fd) {
  std::shared_ptr<Segment> segment(new Segment(shape));
  MOECCL_ASSIGN_OR_RETURN(segment->mapping_, driver::map_segment(fd, segment->bytes_, populate(shape)));
  segment->base_ = segment->mapping_.data();
  if (*segment->at<uint64_t>(0) != kMagic) {
    return error(moecclRemoteError, "rank {}'s shared segment has another layout: do all ranks run the same MoECCL?",
                 shape.rank);
  }
  return segment;
}

}  // namespace moeccl::transport::shm
