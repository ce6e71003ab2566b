// SPDX-License-Identifier: Apache-2.0
// One reliable connection of a rail to a peer, with the requests that are under way on it. Requests are numbered from
// 1; a completion says that all up to its number are done. Requests ask for one at intervals, or where it is needed, so
// that the queue never holds more than it was made for.
//
// Small requests are collected and posted with one call (flush()). One thread at a time.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "transport/verbs/completion.h"
#include "transport/verbs/rail.h"

namespace moeccl::transport::verbs {

// What both ends of a queue pair tell each other.
struct QueueAddress {
  uint32_t number = 0, first_packet = 0;
};

struct QueueOptions {
  uint32_t depth = 128;
  uint32_t inline_bytes = 128;  // wanted
  uint32_t id = 0;              // returned with completions, see id_of()
};

// What the peer says about its end, and what both ends agreed on.
struct ConnectOptions {
  QueueAddress peer;
  RailInfo peer_rail;
  uint8_t timeout_code = 18;
};

// Returns the code of the acknowledgement timeout: MOECCL_IB_TIMEOUT, else the largest up to 20 (the value that users
// know from NCCL) with which all retries together end within half of an operation's timeout.
uint8_t timeout_code(const Env& settings, int64_t operation_timeout_ms);

class QueuePair {
 public:
  static Result<std::unique_ptr<QueuePair>> make(Rail& rail, const QueueOptions& options);
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  QueueAddress address() const { return address_; }
  Status connect(const Env& settings, const ConnectOptions& options);

  Rail& rail() const { return rail_; }
  uint32_t id() const { return id_; }
  uint32_t inline_bytes() const { return inline_bytes_; }
  uint32_t depth() const { return depth_; }
  // Returns how many requests may be added now.
  uint32_t room() const { return depth_ - static_cast<uint32_t>(posted_ - completed_); }
  uint64_t posted() const { return posted_; }        // number of the last request
  uint64_t completed() const { return completed_; }  // all up to here are done
  bool idle() const { return posted_ == completed_; }
  uint64_t bytes_under_way() const { return bytes_posted_ - bytes_completed_; }
  // Returns whether a completion was asked for and has not come.
  bool awaits() const { return asked_ > completed_; }
  uint64_t asked() const { return asked_; }  // number of the last request whose completion was asked for

  struct Target {
    uint64_t address = 0;
    uint32_t key = 0;
  };
  // Both need room() > 0. The source of write() belongs to the NIC until the request is done, and `ask` asks for its
  // completion; that of write_small(), at most inline_bytes(), may be reused at once.
  void write(const Target& to, const void* from, uint32_t lkey, uint32_t bytes, bool ask);
  void write_small(const Target& to, const void* from, uint32_t bytes);
  // Reads `bytes` from the peer's memory, for flushes through this rank's device.
  void read(const Target& from, void* to, uint32_t lkey, uint32_t bytes);
  Status flush();
  // Ends every request. The NIC reads and writes nothing for this queue pair any more.
  void stop() noexcept;

  // A completion returns the request's tag: everything up to `number` on the queue pair `id` is done.
  static uint64_t tag(uint32_t id, uint64_t number) { return uint64_t{id} << 40 | (number & kNumberMask); }
  static uint32_t id_of(uint64_t tag) { return static_cast<uint32_t>(tag >> 40); }
  void done(uint64_t tag);

 private:
  static constexpr uint64_t kNumberMask = (uint64_t{1} << 40) - 1;
  static constexpr size_t kChain = 8;
  static constexpr size_t kSmall = 128;
  struct Request {
    driver::ibv_abi::SendRequest request;
    driver::ibv_abi::Piece piece;
    std::byte data[kSmall];
  };
  QueuePair(Rail& rail) : rail_(rail) {}
  Request& next(int opcode, const Target& to, uint32_t bytes, bool ask);
  Status modify(driver::ibv_abi::QueuePairAttr* attr, int mask, const char* to);

  Rail& rail_;
  driver::ibv_abi::QueuePair* pair_ = nullptr;
  QueueAddress address_;
  uint32_t id_ = 0, depth_ = 0, inline_bytes_ = 0;
  uint64_t posted_ = 0, completed_ = 0, asked_ = 0;
  uint64_t bytes_posted_ = 0, bytes_completed_ = 0;
  std::vector<uint64_t> bytes_until_;  // [number % depth_]: bytes posted up to this request
  std::array<Request, kChain> chain_;
  size_t n_chain_ = 0;
  Status failure_;  // the first of flush(); stays
};

}  // namespace moeccl::transport::verbs
