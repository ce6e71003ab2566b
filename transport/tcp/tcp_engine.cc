// SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/tcp_engine.h"

#include <poll.h>

#include <algorithm>

#include "src/base/clock.h"
#include "src/base/log.h"
#include "src/driver/socket.h"

namespace moeccl::transport::tcp {
namespace {

// While operations run, the thread checks this often whether they still do, and sends boards that no signal has
// carried.
constexpr int kLookEveryMs = 2;
constexpr int kSleepMs = 1000;
// Up to this many sockets are read without asking the poller, except every kAskEvery-th time.
constexpr size_t kReadUnasked = 2;
constexpr uint32_t kAskEvery = 64;
// A rank that waits for one other rank checks all sockets once in this many calls.
constexpr uint32_t kLookEvery = 8;
// The time for a leaving rank to deliver what it still has to say.
constexpr int64_t kFarewellMs = 1000;

uint64_t tag_of(size_t link, size_t stream) { return uint64_t{link} << 8 | stream; }

}  // namespace

Result<std::unique_ptr<TcpEngine>> TcpEngine::create() {
  MOECCL_ASSIGN_OR_RETURN(driver::Poller poller, driver::Poller::create());
  MOECCL_ASSIGN_OR_RETURN(driver::WakeUp wake, driver::WakeUp::create());
  return std::unique_ptr<TcpEngine>(new TcpEngine(std::move(poller), std::move(wake)));
}

Result<std::unique_ptr<TcpLink>> TcpEngine::add(const LocalMemory& own, TcpPeer peer) {
  auto link = std::make_unique<TcpLink>(own, std::move(peer), *this);
  // Make room first: the engine must not know a link that is not handed out.
  const uint32_t rank = link->peer_.rank;
  if (link_of_rank_.size() <= rank) link_of_rank_.resize(rank + 1, nullptr);
  for (auto* all : {&links_, &ready_, &turn_of_, &sending_}) all->reserve(links_.size() + 1);  // each has a link once
  // Edge-triggered: an event says that something changed since the socket was last found empty or full.
  for (size_t i = 0; i < link->peer_.streams.size(); ++i) {
    MOECCL_TRY(
        poller_.add(link->peer_.streams[i].fd(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, tag_of(links_.size(), i)));
  }
  n_streams_ += link->peer_.streams.size();
  links_.push_back(link.get());
  link_of_rank_[rank] = link.get();
  return link;
}

size_t TcpEngine::memory_bytes() const {
  size_t bytes = 0;
  for (const TcpLink* link : links_)
    for (const Stream& s : link->peer_.streams) bytes += s.buffer_bytes();
  return bytes;
}

TcpEngine::~TcpEngine() {
  if (!stop()) return;
  const std::lock_guard lock(mutex_);
  shielded([&] {
    for (TcpLink* link : links_) link->abandon_puts();
    tell_boards();
  });
  const Deadline deadline = Deadline::after_ms(kFarewellMs);
  const auto wait = [&](int most_ms) {
    pollfd entry{poller_.fd(), POLLIN, 0};
    (void)::poll(&entry, 1, std::min(deadline.remaining_ms(), most_ms));
    shielded([&] { turn(); });
  };
  while (unsent() && !deadline.passed()) wait(50);
  // A socket that is closed while it holds unread data, or receives some later, drops what its peer has not
  // acknowledged. The end of a stream is acknowledged at once.
  for (TcpLink* link : links_) {
    for (const Stream& s : link->peer_.streams) driver::end_of_stream(s.fd());
  }
  while (unacknowledged() && !deadline.passed()) wait(1);
  for (TcpLink* link : links_) link->peer_.streams.clear();
}

void TcpEngine::sends(TcpLink& link) {
  if (std::exchange(link.sending_, true)) return;
  sending_.push_back(&link);
}

bool TcpEngine::unsent() {
  std::erase_if(sending_, [](TcpLink* l) {
    l->sending_ = !l->down_ && (l->new_words_ != 0 || l->board_waits_ ||
                                std::any_of(l->peer_.streams.begin(), l->peer_.streams.end(),
                                            [](const Stream& s) { return s.has_output(); }));
    return !l->sending_;
  });
  return !sending_.empty();
}

bool TcpEngine::unacknowledged() const {
  return std::any_of(links_.begin(), links_.end(), [](const TcpLink* l) {
    return !l->down_ && std::any_of(l->peer_.streams.begin(), l->peer_.streams.end(),
                                    [](const Stream& s) { return driver::unacknowledged_bytes(s.fd()) > 0; });
  });
}

void TcpEngine::queue(TcpLink& link) {
  if (link.queued_) return;
  link.queued_ = true;
  ready_.push_back(&link);
}

// Drops links that need no turn any more: a small put asks for one, but its signal has usually sent it before that
// comes.
void TcpEngine::drop_satisfied() {
  std::erase_if(ready_, [](TcpLink* link) {
    link->queued_ = link->wants_turn();
    return !link->queued_;
  });
}

// The driving thread reads a few sockets without asking: a read costs as much as asking whether there is something to
// read. The poller still reports room to send, and what came while no thread read.
bool TcpEngine::read_unasked(std::span<TcpLink* const> links, uint32_t ask_every) {
  if (++turns_ % ask_every == 0) return false;
  drop_satisfied();
  if (!ready_.empty()) return false;
  for (const TcpLink* link : links) {
    for (const Stream& s : link->peer_.streams) {
      if (s.full || s.has_output()) return false;
    }
  }
  for (TcpLink* link : links) {
    for (size_t i = 0; i < link->peer_.streams.size(); ++i) {
      link->peer_.streams[i].look_again();
      link->receive(i);
    }
    if (link->wants_turn()) queue(*link);
  }
  return ready_.empty();
}

void TcpEngine::turn() {
  const Result<std::span<const epoll_event>> events = poller_.look();
  if (events.ok()) {
    for (const epoll_event& e : *events) {
      TcpLink& link = *links_[e.data.u64 >> 8];
      Stream& s = link.peer_.streams[e.data.u64 & 0xff];
      if ((e.events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) s.look_again();
      if ((e.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) s.at_end = true;
      if ((e.events & (EPOLLOUT | EPOLLERR)) != 0) s.full = false;
      queue(link);
    }
  }
  turn_of_.swap(ready_);
  for (TcpLink* link : turn_of_) {
    link->queued_ = false;
    for (size_t i = 0; i < link->peer_.streams.size(); ++i) {
      link->receive(i);
      link->flush(i);
    }
    link->send_small();
    if (link->wants_turn()) queue(*link);
  }
  turn_of_.clear();
}

void TcpEngine::lose_all(const Status& why) noexcept {
  for (TcpLink* link : links_) link->lose(why);
  for (TcpLink* link : links_) link->queued_ = false;
  ready_.clear();
  turn_of_.clear();
}

void TcpEngine::tell_boards() {
  untold_.take();
  const bool failed = !links_.empty() && links_[0]->own_.board->health.state.load(std::memory_order_acquire) != 0;
  for (TcpLink* link : links_) {
    if (link->down_ || !link->board_is_new()) continue;
    if (failed) link->abandon_puts();
    link->board_waits_ = true;
    link->send_small();
    if (failed) queue(*link);  // the rest of a put that was given up
  }
}

void TcpEngine::end() {
  bool more = false;
  if (const std::unique_lock lock(mutex_, std::try_to_lock); lock.owns_lock()) {
    shielded([&] {
      drop_satisfied();
      if (!ready_.empty() || unsent()) turn();
    });
    more = unsent();
  } else {
    more = true;
  }
  driving_.fetch_sub(1);
  if (more || (untold_.any() && asleep_.exchange(false))) wake_.signal();
}

void TcpEngine::board_changed(bool now) {
  OrderedEngine::board_changed(now);
  // A drive that began while the thread slept has not woken it, and may wait for long.
  if (!now && asleep_.load() && asleep_.exchange(false)) wake_.signal();
}

void TcpEngine::progress(uint32_t awaited) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  shielded([&] { progress_locked(awaited); });
}

void TcpEngine::progress_locked(uint32_t awaited) {
  if (n_streams_ <= 1 || awaited == kAnyone) {
    if (n_streams_ <= kReadUnasked && read_unasked(links_, kAskEvery)) return;
    return turn();
  }
  // Only one of many sockets matters to a small operation, or none while it waits for a rank of its own host.
  TcpLink* const link = awaited < link_of_rank_.size() ? link_of_rank_[awaited] : nullptr;
  const bool few = link == nullptr || link->peer_.streams.size() == 1;
  if (!few || !read_unasked({&link, link != nullptr ? 1u : 0u}, kLookEvery)) turn();
}

void TcpEngine::step() {
  const bool theirs = driven();
  pollfd entries[2] = {{wake_.fd(), POLLIN, 0}, {poller_.fd(), POLLIN, 0}};
  int wait_ms = kLookEveryMs;
  if (!theirs) {
    const std::lock_guard lock(mutex_);
    shielded([&] { turn(); });
    if (!ready_.empty()) return;
    asleep_.store(true);
    if (!untold_.any()) wait_ms = kSleepMs;
  }
  (void)::poll(entries, theirs ? 1 : 2, wait_ms);
  asleep_.store(false);
  if (entries[0].revents != 0) {
    wake_.clear();
    (void)takes_over();
  }
  if (!links_.empty()) look_at_board(*links_[0]->own_.board);
}

}  // namespace moeccl::transport::tcp
