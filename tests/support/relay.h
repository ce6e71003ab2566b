// SPDX-License-Identifier: Apache-2.0
// A relay between two ends of a TCP connection. It keeps what it sees, and may change what it passes on.
#pragma once

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include "src/driver/socket.h"
#include "transport/tcp/record.h"

namespace moeccl::tests {

class Relay {
 public:
  using Bytes = std::vector<std::byte>;
  // Returns what to send instead of the n-th record of the connecting side; nothing: close the connection.
  using Change = std::function<std::optional<std::vector<Bytes>>(const Relay& relay, size_t n, const Bytes& record)>;

  // before_records: bytes that the connecting side sends ahead of its first record. They are passed on unchanged.
  explicit Relay(const driver::SocketAddress& to, size_t before_records = 0, Change change = {})
      : to_(to), before_(before_records), change_(std::move(change)) {
    listener_ = std::move(*driver::listen_at(*driver::parse_ip_address("127.0.0.1")));
    address_ = *driver::local_address(listener_.get());
    accept_ = std::thread([this] { accept_all(); });
  }
  ~Relay() {
    stop_ = true;
    accept_.join();
    for (std::thread& t : threads_) t.join();
  }
  const driver::SocketAddress& address() const { return address_; }
  size_t n_seen() const {
    const std::lock_guard lock(mutex_);
    return seen_[0].size() + seen_[1].size();
  }
  bool has_seen(std::string_view text) const {
    const std::lock_guard lock(mutex_);
    for (const Bytes& way : seen_) {
      const std::string_view all(reinterpret_cast<const char*>(way.data()), way.size());
      if (all.find(text) != std::string_view::npos) return true;
    }
    return false;
  }
  // Returns what the accepting side has sent after its first `skip` bytes.
  Bytes came_back(size_t skip) const {
    const std::lock_guard lock(mutex_);
    return {seen_[1].begin() + static_cast<ptrdiff_t>(std::min(skip, seen_[1].size())), seen_[1].end()};
  }

 private:
  struct Pair {
    Fd from, to;
  };

  void accept_all() {
    while (!stop_) {
      if (!driver::wait_fd(listener_.get(), POLLIN, Deadline::after_ms(10)).ok()) continue;
      auto from = driver::accept_now(listener_.get());
      if (!from.ok() || !*from) continue;
      auto to = driver::connect_to(to_, Deadline::after_ms(5000));
      if (!to.ok()) continue;
      auto pair = std::make_shared<Pair>(Pair{std::move(*from), std::move(*to)});
      threads_.emplace_back([this, pair] { forward(pair->from.get(), pair->to.get(), true); });
      threads_.emplace_back([this, pair] { forward(pair->to.get(), pair->from.get(), false); });
    }
  }

  static void cut(int a, int b) {
    ::shutdown(a, SHUT_RDWR);
    ::shutdown(b, SHUT_RDWR);
  }
  static bool pass(int to, const Bytes& bytes) { return driver::send_all(to, bytes, Deadline::after_ms(10'000)).ok(); }

  void forward(int from, int to, bool there) {
    size_t plain = there && change_ ? before_ : SIZE_MAX, n_records = 0;
    Bytes waiting;
    while (!stop_) {
      Bytes piece(64 << 10);
      if (!driver::wait_fd(from, POLLIN, Deadline::after_ms(10)).ok()) continue;
      const auto got = driver::recv_now(from, piece);
      if (got.ok() && got->would_block) continue;
      if (!got.ok() || got->n == 0) return driver::end_of_stream(to);
      piece.resize(got->n);
      {
        const std::lock_guard lock(mutex_);
        Bytes& all = seen_[there ? 0 : 1];
        all.insert(all.end(), piece.begin(), piece.end());
      }
      const auto n_plain = static_cast<ptrdiff_t>(std::min(plain, piece.size()));
      if (!pass(to, {piece.begin(), piece.begin() + n_plain})) return cut(from, to);
      if (plain != SIZE_MAX) plain -= static_cast<size_t>(n_plain);
      waiting.insert(waiting.end(), piece.begin() + n_plain, piece.end());
      while (waiting.size() >= sizeof(transport::tcp::RecordHead)) {
        transport::tcp::RecordHead head;
        std::memcpy(&head, waiting.data(), sizeof(head));
        const size_t size = head.bytes + transport::tcp::kRecordOverhead;
        if (waiting.size() < size) break;
        const auto changed =
            change_(*this, n_records++, {waiting.begin(), waiting.begin() + static_cast<ptrdiff_t>(size)});
        waiting.erase(waiting.begin(), waiting.begin() + static_cast<ptrdiff_t>(size));
        if (!changed) return cut(from, to);
        for (const Bytes& b : *changed)
          if (!pass(to, b)) return cut(from, to);
      }
    }
  }

  driver::SocketAddress to_, address_;
  size_t before_;
  Change change_;
  Fd listener_;
  std::atomic<bool> stop_{false};
  mutable std::mutex mutex_;
  Bytes seen_[2];  // from the connecting and from the accepting side
  std::thread accept_;
  std::vector<std::thread> threads_;  // of accept_
};

}  // namespace moeccl::tests
