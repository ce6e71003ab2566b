// SPDX-License-Identifier: Apache-2.0
#include "transport/verbs/verbs_engine.h"

#include <algorithm>
#include <array>
#include <utility>

#include "src/base/clock.h"
#include "src/base/log.h"
#include "src/driver/thread.h"

namespace moeccl::transport::verbs {
namespace {

using driver::ibv_abi::Completion;

// While operations run, the thread checks this often for boards that no signal has carried, and for waiting words.
constexpr int64_t kLookEveryNs = 2'000'000;
constexpr int64_t kSleepNs = 1'000'000'000;
// What still waits for completions when a drive ends (a signal over several queue pairs) is given the time of a round
// trip; then the thread looks after it, this often.
constexpr int64_t kEndNs = 30'000;
constexpr int64_t kQuickNs = 50'000;
constexpr int64_t kSignEveryNs = 200'000'000;
// A connection to the presence wakes the thread at most this often, because a stranger may connect again and again.
constexpr int64_t kAnswerEveryNs = 50'000'000;
// The time for a leaving rank to deliver what it still has to say.
constexpr int64_t kFarewellMs = 1000, kFailedFarewellMs = 100;
constexpr size_t kCompletions = 16;  // taken at a time
// A flush takes about as long as a read over the bus; a device that is gone says so earlier than this.
constexpr int64_t kFlushMs = 2000;

}  // namespace

VerbsEngine::VerbsEngine(EngineParts parts, driver::WakeUp wake)
    : OrderedEngine("moeccl-verbs"),
      parts_(std::move(parts)),
      regions_(parts_.regions.get()),
      wake_(std::move(wake)),
      entries_{{wake_.fd(), POLLIN, 0}, {-1, POLLIN, 0}},
      listener_(parts_.presence.fd()) {
  for (const auto& rail : parts_.rails) entries_.push_back({rail->event_fd(), POLLIN, 0});
}

Result<std::unique_ptr<VerbsEngine>> VerbsEngine::create(EngineParts&& parts) {
  MOECCL_ASSIGN_OR_RETURN(driver::WakeUp wake, driver::WakeUp::create());
  return std::unique_ptr<VerbsEngine>(new VerbsEngine(std::move(parts), std::move(wake)));
}

std::unique_ptr<VerbsLink> VerbsEngine::add(LinkSetting setting, std::vector<Lane> lanes) {
  for (const Lane& lane : lanes) {
    if (queues_.size() <= lane.pair->id()) queues_.resize(lane.pair->id() + 1);
  }
  auto link = std::make_unique<VerbsLink>(std::move(setting), std::move(lanes), *this);
  for (auto* all : {&links_, &waiting_, &turn_of_}) all->reserve(links_.size() + 1);  // queue() never needs more
  for (const Lane& lane : link->lanes_) queues_[lane.pair->id()] = {link.get(), link->index_of(lane)};
  links_.push_back(link.get());
  return link;
}

VerbsEngine::~VerbsEngine() {
  if (!stop()) {
    for (VerbsLink* link : links_) {
      for (Lane& lane : link->lanes_) (void)lane.pair.release();
      link->lanes_.clear();
    }
    for (auto& region : parts_.own) (void)region.release();
    (void)parts_.device.release();
    (void)parts_.regions.release();
    for (auto& rail : parts_.rails) (void)rail.release();
    (void)parts_.api.release();
    return;
  }
  const std::lock_guard lock(mutex_);
  shielded([&] {
    for (VerbsLink* link : links_) link->abandon_puts();
    tell_boards();
    // A queue pair that ends drops what it has not sent, so the last signals must have arrived before.
    const Deadline deadline = Deadline::after_ms(kFarewellMs);
    const Deadline for_failed = Deadline::after_ms(kFailedFarewellMs);
    while (undelivered(!for_failed.passed()) && !deadline.passed()) {
      for (VerbsLink* link : links_) {
        if (!link->down_) link->drain();
      }
      turn();
      driver::sleep_ns(20'000);
    }
  });
  for (VerbsLink* link : links_) link->release_all();
  parts_.device.reset();
  parts_.regions.reset();
  parts_.own.clear();
  parts_.rails.clear();
}

bool VerbsEngine::undelivered(bool also_to_failed) const {
  return std::any_of(links_.begin(), links_.end(), [&](const VerbsLink* l) {
    // A peer that has left has ended its queue pairs: what goes there is never acknowledged. One that has failed may
    // have ended them.
    const bool listens = l->peer_is(RankState::kRunning) || (also_to_failed && !l->peer_is(RankState::kLeft));
    return !l->down_ && listens && (l->waits() || !l->idle());
  });
}

void VerbsEngine::queue(VerbsLink& link) {
  if (link.queued_) return;
  link.queued_ = true;
  waiting_.push_back(&link);
}

void VerbsEngine::poll() {
  std::array<Completion, kCompletions> came;
  for (const auto& rail : parts_.rails) {
    int n = static_cast<int>(kCompletions);
    while (n == static_cast<int>(kCompletions)) {
      n = rail->poll(came);
      const int64_t now = n > 0 ? now_ns() : 0;
      for (int i = 0; i < n; ++i) {
        const Completion& c = came[static_cast<size_t>(i)];
        const uint32_t id = QueuePair::id_of(c.wr_id);
        if (parts_.device != nullptr) parts_.device->completed(c);
        if (id >= queues_.size() || queues_[id].link == nullptr || queues_[id].link->down_) continue;
        VerbsLink& link = *queues_[id].link;
        if (c.status == driver::ibv_abi::kSuccess) {
          link.completed(queues_[id].lane, c.wr_id, now);
        } else {
          rail->take_events(now);
          link.lose(completion_error(*rail, link.s_.far, c.status, c.vendor_err, now));
        }
      }
    }
  }
}

Status VerbsEngine::flush() {
  if (parts_.device == nullptr) return {};
  const std::lock_guard lock(mutex_);
  MOECCL_TRY(parts_.device->begin_flush());
  for (const Deadline deadline = Deadline::after_ms(kFlushMs); parts_.device->flushing() && !deadline.passed();) poll();
  return parts_.device->end_flush();
}

void VerbsEngine::turn() {
  poll();
  if (waiting_.empty()) return;
  turn_of_.swap(waiting_);
  for (VerbsLink* link : turn_of_) {
    link->queued_ = false;
    if (link->down_) continue;
    if (link->board_waits_) link->tell_board();
    link->send_words();
  }
  turn_of_.clear();
}

void VerbsEngine::tell_boards() {
  untold_.take();
  for (VerbsLink* link : links_) {
    if (link->down_ || link->peer_is(RankState::kLeft) || !link->told_.lacks(*link->s_.own.board)) continue;
    if (link->failed_here()) link->abandon_puts();
    link->tell_board();
    link->send_words();
  }
}

void VerbsEngine::look(bool events) {
  const int64_t now = now_ns();
  for (const auto& rail : parts_.rails) {
    if (events) rail->take_events(now);
    const Status health = rail->health(now);
    if (health.ok()) continue;
    for (VerbsLink* link : links_) {
      const bool uses = std::any_of(link->lanes_.begin(), link->lanes_.end(),
                                    [&](const Lane& l) { return parts_.rails[l.rail] == rail; });
      if (uses) link->lose(health);
    }
  }
  regions_->look_at_heaps();
  const bool running = driving_.load() > 0 || any_runs();
  if (running && now - signs_ns_ > kSignEveryNs) {
    signs_ns_ = now;
    for (VerbsLink* link : links_) link->keep_alive();
  }
}

void VerbsEngine::find_silent(int64_t now) {
  if (!parts_.questions.due(now)) return;
  for (const VerbsLink* link : links_)
    if (!link->down_ && !link->peer_is(RankState::kLeft))
      parts_.questions.note(link->s_.far.rank, link->asked_since_ns_, now);
}

void VerbsEngine::ask() {
  if (links_.empty()) return;
  const std::vector<uint32_t> gone = parts_.questions.ask(links_[0]->s_.own.rank);
  if (gone.empty()) return;
  const std::lock_guard lock(mutex_);
  for (VerbsLink* link : links_)
    if (std::find(gone.begin(), gone.end(), link->s_.far.rank) != gone.end())
      link->lose(process_gone(link->s_.far.where));
}

void VerbsEngine::begin() {
  driving_.fetch_add(1);
  if (asleep_.load() && asleep_.exchange(false)) wake_.signal();
}

void VerbsEngine::end() {
  bool more = true;
  if (const std::unique_lock lock(mutex_, std::try_to_lock); lock.owns_lock()) {
    shielded([&] {
      turn();
      for (const int64_t until = waiting_.empty() ? 0 : now_ns() + kEndNs; !waiting_.empty() && now_ns() < until;)
        turn();
    });
    more = unsent();
  }
  driving_.fetch_sub(1);
  more = more || untold_.any();
  if (more) left_over_.store(true);
  if (more && asleep_.exchange(false)) wake_.signal();
}

void VerbsEngine::progress(uint32_t) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  shielded([&] { turn(); });
}

void VerbsEngine::board_changed(bool now) {
  untold_.set();
  if (now) {
    const std::lock_guard lock(mutex_);
    shielded([&] { tell_boards(); });
  }
  if (asleep_.load() && asleep_.exchange(false)) wake_.signal();
}

void VerbsEngine::step() {
  (void)contained([&] { return ask(), Status(); });
  left_over_.store(false);
  bool busy = driving_.load() > 0, quick = false;
  if (const std::unique_lock lock(mutex_, std::try_to_lock); lock.owns_lock()) {
    shielded([&] {
      look(events_);
      events_ = false;
      if (!links_.empty() && untold_.due(*links_[0]->s_.own.board)) tell_boards();
      turn();
      find_silent(now_ns());
    });
    quick = !busy && unsent();
    busy = busy || quick || parts_.questions.more() ||
           std::any_of(links_.begin(), links_.end(), [](const VerbsLink* l) { return l->asked_since_ns_ != 0; });
  } else {
    busy = true;
  }
  asleep_.store(!busy);
  // A change that was made before its thread saw this one asleep is noticed here.
  if (!busy && (driving_.load() > 0 || left_over_.load() || untold_.any())) busy = true;
  const bool answers = listener_ >= 0 && now_ns() - answered_ns_ >= kAnswerEveryNs;
  entries_[1] = {answers ? listener_ : -1, POLLIN, 0};
  const int64_t idle_ns = answers || listener_ < 0 ? kSleepNs : kAnswerEveryNs;
  const int64_t wait_ns = quick ? kQuickNs : busy ? kLookEveryNs : idle_ns;
  const timespec wait = {wait_ns / kSleepNs, wait_ns % kSleepNs};
  (void)::ppoll(entries_.data(), entries_.size(), &wait, nullptr);
  asleep_.store(false);
  if (entries_[0].revents != 0) wake_.clear();
  if (entries_[1].revents != 0) {
    if (!parts_.presence.answer()) listener_ = -1;  // or it would end every wait
    answered_ns_ = now_ns();
  }
  for (size_t i = 2; i < entries_.size(); ++i) {
    events_ = events_ || entries_[i].revents != 0;
    if ((entries_[i].revents & (POLLERR | POLLHUP | POLLNVAL)) != 0) entries_[i].fd = -1;  // it says no more
  }
}

}  // namespace moeccl::transport::verbs
