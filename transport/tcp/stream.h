// SPDX-License-Identifier: Apache-2.0
// One TCP connection: a small buffer of frames to send, at most one payload that is sent from where it lies, and a
// small buffer of what has arrived. A stream never waits. It is not thread-safe: the engine's lock protects it.
//
// An encrypted connection has two more buffers, for records: frames and payloads are encrypted from where they lie into
// one, and what arrives in the other is decrypted to where it belongs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "src/base/fd.h"
#include "src/base/status.h"
#include "transport/tcp/record.h"

namespace moeccl::transport::tcp {

class Stream {
 public:
  // weight: bytes go to streams in proportion to it.
  Stream(Fd fd, double weight, const RecordKeys& keys = {});
  Stream(Stream&&) noexcept;
  Stream& operator=(Stream&&) noexcept;
  ~Stream();

  int fd() const { return fd_.get(); }
  double weight() const { return weight_; }
  size_t buffer_bytes() const;

  // --- Sending ---
  // Returns the room for small frames: none while a payload is open, because it must be finished first.
  size_t room() const { return payload_left_ > 0 ? 0 : kSendBytes - send_end_; }
  // Appends at most room() bytes to the buffer.
  void append(const void* bytes, size_t n);
  // Sends `src` after everything that is buffered. The caller must leave its memory alone until payload_left() is 0.
  void open_payload(const std::byte* src, size_t bytes);
  size_t payload_left() const { return payload_left_; }
  // The owner of the payload's memory takes it back: zeros are sent in its place.
  void abandon_payload() { payload_ = nullptr; }
  bool has_output() const { return send_begin_ < send_end_ || payload_left_ > 0 || has_records(); }
  // Sends until everything is gone or the socket is full, and returns how many bytes went. On an encrypted connection
  // the payload is gone once it is encrypted.
  Result<size_t> flush();
  uint32_t queues_seen = 0;   // for the owner
  bool queue_unseen = false;  // set by flush() where the socket takes no more, cleared by the owner
  bool full = false;          // the socket took no more; set by flush(), cleared by the owner when it is writable again

  // --- Receiving ---
  // Bytes that have arrived and are not consumed.
  std::span<const std::byte> arrived() const { return {receive_.get() + begin_, end_ - begin_}; }
  void consume(size_t n);
  // Reads once: first into `to` (may be empty), the rest into the buffer. Returns how many bytes came; 0: none now.
  // Sets `ended` at the peer's end. On an encrypted connection these are bytes of records, whose text take_record()
  // returns.
  Result<size_t> receive(std::span<std::byte> to, bool* ended);
  bool encrypted() const { return records_ != nullptr; }
  // The text of one record that has come on an encrypted connection: all of it in `to`, or all of it in the buffer.
  // RemoteError: it is not what the peer sent next.
  struct Text {
    size_t bytes = 0, in_place = 0;
  };
  Result<Text> take_record(std::span<std::byte> to);
  bool inside_record() const;  // the rest has not come yet
  // Returns whether something may be there; receive() and take_record() find out when there is nothing.
  bool readable() const { return readable_; }
  void look_again();  // there may be something new in the socket
  void stop_reading() { readable_ = false; }
  // The poller has reported the end. It does not report it again when data came with it, so receive() reads on up to
  // it.
  bool at_end = false;
  bool ended = false;  // receive() has found the end

  std::byte* put_to = nullptr;  // the open put that is arriving
  uint64_t put_left = 0;
  uint64_t put_offset = 0, put_bytes = 0;  // its range of this rank's staging
  uint64_t put_bytes_received = 0, put_bytes_sent = 0;
  bool stalled = false;  // its next frame waits for other streams

 private:
  static constexpr size_t kSendBytes = 48 << 10;     // frames up to kCopied and signals behind them
  static constexpr size_t kReceiveBytes = 36 << 10;  // frames that arrive together, up to one of kCopied and its signal
  static constexpr size_t kSpillBytes = 1 << 10;     // read beyond a large put: the next heads only, the rest in place

  struct Records;
  struct Pieces {
    std::span<const std::byte> frames, payload;
  };
  Pieces pieces() const;
  void advance(size_t from_frames, size_t from_payload);
  bool has_records() const;  // encrypted but not sent
  void encrypt();
  Result<driver::IoStep> send_plain();
  Result<driver::IoStep> send_records();
  Result<size_t> receive_records(bool* ended);
  void make_room();  // to receive

  Fd fd_;
  double weight_;
  bool readable_ = true;
  std::unique_ptr<Records> records_;  // null: not encrypted
  std::unique_ptr<std::byte[]> send_, receive_;
  size_t send_begin_ = 0, send_end_ = 0;
  const std::byte* payload_ = nullptr;
  size_t payload_left_ = 0;
  size_t begin_ = 0, end_ = 0;
};

}  // namespace moeccl::transport::tcp
