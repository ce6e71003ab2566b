// SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/stream.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "src/driver/socket.h"

namespace moeccl::transport::tcp {
namespace {

constexpr size_t kZeros = 64 << 10;
const std::byte zeros[kZeros] = {};

}  // namespace

// The additional state of an encrypted connection.
struct Stream::Records {
  static constexpr size_t kBytes = 2 * (kRecordBytes + kRecordOverhead);

  explicit Records(const RecordKeys& keys) : sealer(keys.cipher, keys.send), opener(keys.cipher, keys.receive) {}
  size_t n_in() const { return in_end - in_begin; }
  // Returns whether take_record() has something to do.
  bool ready() const { return n_in() >= sizeof(RecordHead) && (text == 0 || n_in() >= text + kRecordOverhead); }

  RecordSealer sealer;
  RecordOpener opener;
  std::unique_ptr<std::byte[]> out = std::make_unique_for_overwrite<std::byte[]>(kBytes);
  std::unique_ptr<std::byte[]> in = std::make_unique_for_overwrite<std::byte[]>(kBytes);
  size_t out_begin = 0, out_end = 0, in_begin = 0, in_end = 0;
  size_t text = 0;       // bytes of text in the record at in_begin; 0: its head was not read yet
  bool drained = false;  // the last read emptied the socket
};

Stream::Stream(Stream&&) noexcept = default;
Stream& Stream::operator=(Stream&&) noexcept = default;
Stream::~Stream() = default;

Stream::Stream(Fd fd, double weight, const RecordKeys& keys)
    : fd_(std::move(fd)),
      weight_(weight),
      records_(keys.cipher != Cipher::kNone ? std::make_unique<Records>(keys) : nullptr),
      send_(std::make_unique_for_overwrite<std::byte[]>(kSendBytes)),
      receive_(std::make_unique_for_overwrite<std::byte[]>(kReceiveBytes)) {}

size_t Stream::buffer_bytes() const {
  return kSendBytes + kReceiveBytes + (records_ != nullptr ? 2 * Records::kBytes : 0);
}

void Stream::append(const void* bytes, size_t n) {
  assert(n <= room());
  std::memcpy(send_.get() + send_end_, bytes, n);
  send_end_ += n;
}

void Stream::open_payload(const std::byte* src, size_t bytes) {
  assert(payload_left_ == 0);
  payload_ = src;
  payload_left_ = bytes;
}

bool Stream::has_records() const { return records_ != nullptr && records_->out_begin < records_->out_end; }

// Returns the next bytes of frames and payload.
Stream::Pieces Stream::pieces() const {
  return {
      {send_.get() + send_begin_, send_end_ - send_begin_},
      {payload_ != nullptr ? payload_ : zeros, payload_ != nullptr ? payload_left_ : std::min(payload_left_, kZeros)}};
}

// Drops bytes that have gone into the socket or into records.
void Stream::advance(size_t from_frames, size_t from_payload) {
  send_begin_ += from_frames;
  if (send_begin_ == send_end_) send_begin_ = send_end_ = 0;
  payload_left_ -= from_payload;
  if (payload_ != nullptr) payload_ += from_payload;
}

// Encrypts as many records as the buffer takes. A record has either frames or a piece of the payload, so that the peer
// decrypts that piece to its place.
void Stream::encrypt() {
  Records& r = *records_;
  while (r.out_end + kRecordOverhead < Records::kBytes) {
    const Pieces next = pieces();
    const bool frames = !next.frames.empty();
    const std::span<const std::byte> from = frames ? next.frames : next.payload;
    const size_t n = std::min({from.size(), kRecordBytes, Records::kBytes - kRecordOverhead - r.out_end});
    if (n == 0) return;
    r.sealer.seal(from.first(n), r.out.get() + r.out_end);
    r.out_end += n + kRecordOverhead;
    advance(frames ? n : 0, frames ? 0 : n);
  }
}

Result<driver::IoStep> Stream::send_records() {
  Records& r = *records_;
  if (r.out_begin == r.out_end) {
    r.out_begin = r.out_end = 0;
    encrypt();
  }
  MOECCL_ASSIGN_OR_RETURN(const driver::IoStep step,
                          driver::send_now(fd_.get(), {r.out.get() + r.out_begin, r.out_end - r.out_begin}));
  r.out_begin += step.n;
  return step;
}

Result<driver::IoStep> Stream::send_plain() {
  const Pieces next = pieces();
  MOECCL_ASSIGN_OR_RETURN(const driver::IoStep step, driver::send_two_now(fd_.get(), next.frames, next.payload));
  const size_t from_frames = std::min(step.n, next.frames.size());
  advance(from_frames, step.n - from_frames);
  return step;
}

Result<size_t> Stream::flush() {
  size_t sent = 0;
  while (has_output() && !full) {
    MOECCL_ASSIGN_OR_RETURN(const driver::IoStep step, encrypted() ? send_records() : send_plain());
    full = step.would_block;
    if (full) queue_unseen = true;
    sent += step.n;
  }
  // The rest of the small frames moves to the front, so that room() is all that is free.
  if (send_begin_ > 0) {
    std::memmove(send_.get(), send_.get() + send_begin_, send_end_ - send_begin_);
    send_end_ -= send_begin_;
    send_begin_ = 0;
  }
  return sent;
}

void Stream::consume(size_t n) {
  begin_ += n;
  if (begin_ == end_) begin_ = end_ = 0;
}

void Stream::look_again() {
  readable_ = true;
  if (records_ != nullptr) records_->drained = false;
}

void Stream::make_room() {
  if (begin_ == 0) return;
  std::memmove(receive_.get(), receive_.get() + begin_, end_ - begin_);
  end_ -= begin_;
  begin_ = 0;
}

Result<size_t> Stream::receive_records(bool* ended) {
  Records& r = *records_;
  if (r.ready()) return size_t{0};
  if (r.in_begin > 0) {
    std::memmove(r.in.get(), r.in.get() + r.in_begin, r.n_in());
    r.in_end -= r.in_begin;
    r.in_begin = 0;
  }
  const std::span<std::byte> spare(r.in.get() + r.in_end, Records::kBytes - r.in_end);
  MOECCL_ASSIGN_OR_RETURN(const driver::IoStep step, driver::recv_now(fd_.get(), spare));
  r.in_end += step.n;
  r.drained = step.n < spare.size() && (!at_end || step.would_block);
  readable_ = r.ready() || !r.drained;
  if (step.n == 0 && !step.would_block) *ended = true;
  return step.n;
}

Result<Stream::Text> Stream::take_record(std::span<std::byte> to) {
  Records& r = *records_;
  Text taken;
  if (!r.ready()) return taken;
  const std::byte* const record = r.in.get() + r.in_begin;
  if (r.text == 0) {
    MOECCL_ASSIGN_OR_RETURN(
        r.text, r.opener.announce(std::span<const std::byte, sizeof(RecordHead)>(record, sizeof(RecordHead))));
  }
  if (r.ready()) {
    const bool in_place = r.text <= to.size() && begin_ == end_;
    if (!in_place) {
      make_room();
      // What a parser leaves in the buffer is less than a small frame.
      if (r.text > kReceiveBytes - end_) return error(moecclRemoteError, "it sent a frame that does not end");
    }
    MOECCL_TRY(r.opener.open({record, r.text + kRecordOverhead}, in_place ? to.data() : receive_.get() + end_));
    taken = {r.text, in_place ? r.text : 0};
    if (!in_place) end_ += r.text;
    r.in_begin += r.text + kRecordOverhead;
    r.text = 0;
  }
  readable_ = r.ready() || !r.drained;
  return taken;
}

bool Stream::inside_record() const { return records_ != nullptr && records_->n_in() > 0; }

Result<size_t> Stream::receive(std::span<std::byte> to, bool* ended) {
  if (records_ != nullptr) return receive_records(ended);
  make_room();
  const size_t spare = kReceiveBytes - end_;
  const std::span<std::byte> spill(receive_.get() + end_, to.empty() ? spare : std::min(spare, kSpillBytes));
  MOECCL_ASSIGN_OR_RETURN(const driver::IoStep step, driver::recv_two_now(fd_.get(), to, spill));
  // A short read has emptied the socket; whatever comes later is a new event.
  if (step.n < to.size() + spill.size()) readable_ = at_end && !step.would_block;
  if (step.n == 0 && !step.would_block) *ended = true;
  if (step.n > to.size()) end_ += step.n - to.size();
  return step.n;
}

}  // namespace moeccl::transport::tcp
