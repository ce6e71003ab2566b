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

Stream::Stream(Fd fd, double weight)
    : fd_(std::move(fd)),
      weight_(weight),
      send_(std::make_unique_for_overwrite<std::byte[]>(kSendBytes)),
      receive_(std::make_unique_for_overwrite<std::byte[]>(kReceiveBytes)) {}

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

Result<size_t> Stream::flush() {
  size_t sent = 0;
  while (has_output() && !full) {
    const std::span<const std::byte> head(send_.get() + send_begin_, send_end_ - send_begin_);
    const std::span<const std::byte> body(payload_ != nullptr ? payload_ : zeros,
                                          payload_ != nullptr ? payload_left_ : std::min(payload_left_, kZeros));
    MOECCL_ASSIGN_OR_RETURN(const driver::IoStep step, driver::send_two_now(fd_.get(), head, body));
    if (step.would_block) {
      full = true;
      break;
    }
    sent += step.n;
    const size_t from_head = std::min(step.n, head.size());
    send_begin_ += from_head;
    if (send_begin_ == send_end_) send_begin_ = send_end_ = 0;
    payload_left_ -= step.n - from_head;
    if (payload_ != nullptr) payload_ += step.n - from_head;
  }
  // What is left of the small frames moves to the front, so that room() is all that is free.
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

Result<size_t> Stream::receive(std::span<std::byte> to, bool* ended) {
  if (begin_ > 0) {
    std::memmove(receive_.get(), receive_.get() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  const size_t spare = kReceiveBytes - end_;
  const std::span<std::byte> spill(receive_.get() + end_, to.empty() ? spare : std::min(spare, kSpillBytes));
  MOECCL_ASSIGN_OR_RETURN(const driver::IoStep step, driver::recv_two_now(fd_.get(), to, spill));
  // A short read has emptied the socket; whatever comes later is a new event.
  if (step.n < to.size() + spill.size()) readable = at_end && !step.would_block;
  if (step.n == 0 && !step.would_block) *ended = true;
  if (step.n > to.size()) end_ += step.n - to.size();
  return step.n;
}

}  // namespace moeccl::transport::tcp
