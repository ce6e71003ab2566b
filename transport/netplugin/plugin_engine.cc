// SPDX-License-Identifier: Apache-2.0
#include "transport/netplugin/plugin_engine.h"

#include <algorithm>
#include <chrono>

#include "src/base/clock.h"
#include "src/base/log.h"
#include "src/driver/thread.h"

namespace moeccl::transport::netplugin {
namespace {

// While operations run, the thread checks this often whether they still do, and sends boards that no signal has
// carried.
constexpr int64_t kLookEvery_ns = 2'000'000;
constexpr int64_t kSignEvery_ns = 200'000'000;   // peers are asked for an answer
constexpr int64_t kAnswerEvery_ns = 50'000'000;  // those who ask after this rank are answered
// Without operations it polls at once while something moves, then less and less often, and never for more than a
// twentieth of the time.
constexpr int64_t kShortest_ns = 20'000, kLongest_ns = 1'000'000;
constexpr int64_t kShare = 20;
// A rank that waits for one other rank polls all links once in this many calls.
constexpr uint32_t kAllEvery = 8;
// The time for a leaving rank to deliver what it still has to say.
constexpr int64_t kFarewellMs = 1000;
// The size of the pool: pieces for each rail of each link, within bounds.
constexpr size_t kPiecesPerRail = 4, kLeastPieces = 16, kMostPieces = 128;

}  // namespace

PluginEngine::PluginEngine(std::shared_ptr<PluginUse> use)
    : OrderedEngine("moeccl-plugin"), use_(std::move(use)), pause_ns_(kShortest_ns) {}

Result<std::unique_ptr<PluginEngine>> PluginEngine::create(std::shared_ptr<PluginUse> use, size_t n_links,
                                                           size_t n_rails) {
  note_in_use();
  std::unique_ptr<PluginEngine> engine(new PluginEngine(std::move(use)));
  const size_t pieces = std::clamp(n_links * n_rails * kPiecesPerRail, kLeastPieces, kMostPieces);
  MOECCL_ASSIGN_OR_RETURN(engine->pool_, BouncePool::create(pieces));
  return engine;
}

Result<std::unique_ptr<PluginLink>> PluginEngine::add(const LocalMemory& own, PeerComms peer, int memory_type,
                                                      bool pieces_only) {
  const uint32_t rank = peer.rank;
  auto link = std::make_unique<PluginLink>(own, std::move(peer), memory_type, *this);
  // Make room first: the engine must not know a link that is not handed out.
  if (link_of_rank_.size() <= rank) {
    link_of_rank_.resize(rank + 1, nullptr);
    pieces_only_.resize(rank + 1, false);
  }
  links_.reserve(links_.size() + 1);
  if (Status s = link->open(); !s.ok()) {
    link->close();
    return std::move(s).with_context(format("rank {}", rank));
  }
  links_.push_back(link.get());
  link_of_rank_[rank] = link.get();
  pieces_only_[rank] = pieces_only;
  return link;
}

PluginEngine::~PluginEngine() {
  if (!stop()) {
    new std::shared_ptr<PluginUse>(std::move(use_));  // the plugin may not be told that this use of it ends
    return;
  }
  const std::lock_guard lock(mutex_);
  shielded([&] { say_farewell(); });
  bool left_open = false;
  for (PluginLink* link : links_) {
    if (link->gone_) {
      link->leave_open();
      left_open = true;
    } else {
      link->close();
    }
  }
  if (!left_open) return;
  // Memory and plugin stay for what the plugin still has under way.
  new BouncePool(std::move(pool_));
  new std::shared_ptr<PluginUse>(std::move(use_));
}

void PluginEngine::say_farewell() {
  for (PluginLink* link : links_) {
    link->abandon_puts();
    link->say_bye();
  }
  const Deadline deadline = Deadline::after_ms(kFarewellMs);
  const auto heard = [](const PluginLink* l) { return l->down_ || l->ending_ || l->drained(); };
  while (!std::all_of(links_.begin(), links_.end(), heard) && !deadline.passed()) {
    if (!turn()) driver::sleep_ns(kShortest_ns);
  }
  for (const PluginLink* link : links_) {
    if (heard(link)) continue;
    log(LogLevel::kInfo, "rank {} leaves without rank {}'s answer within {} ms", link->own_.rank, link->peer_.rank,
        kFarewellMs);
  }
}

size_t PluginEngine::memory_bytes() const { return pool_.bytes() + links_.size() * 2 * kBuffers * kMessageBytes; }

bool PluginEngine::unsent() {
  return std::any_of(links_.begin(), links_.end(), [](const PluginLink* l) { return l->unsent(); });
}

bool PluginEngine::turn() {
  bool any = false;
  for (PluginLink* link : links_) any = link->turn() || any;
  if (any) moved();
  return any;
}

void PluginEngine::tell_boards() {
  untold_.take();
  const bool failed = !links_.empty() && links_[0]->own_.board->health.state.load(std::memory_order_acquire) != 0;
  for (PluginLink* link : links_) {
    if (link->down_ || link->ending_ || !link->news_.any(*link->own_.board)) continue;
    if (failed) link->abandon_puts();
    link->board_waits_ = true;
    link->send_small();
    bool moved = false;
    if (Status s = link->turn_sends(&moved); !s.ok()) link->end(s);
  }
}

void PluginEngine::wake() {
  {
    const std::lock_guard lock(sleep_mutex_);
    woken_ = true;
  }
  sleep_.notify_one();
}

void PluginEngine::end() {
  bool more = true;
  if (const std::unique_lock lock(mutex_, std::try_to_lock); lock.owns_lock()) {
    shielded([&] {
      if (unsent()) turn();
    });
    more = unsent();
  }
  driving_.fetch_sub(1);
  if (more || untold_.any()) wake();
}

void PluginEngine::progress(uint32_t awaited) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  shielded([&] {
    PluginLink* const link = awaited < link_of_rank_.size() ? link_of_rank_[awaited] : nullptr;
    if (awaited == kAnyone || ++turns_ % kAllEvery == 0) {
      turn();
    } else if (link != nullptr && link->turn()) {
      moved();
    }
  });
}

void PluginEngine::ask() {
  const int64_t now = now_ns();
  if (links_.empty() || now - looked_ns_ < kLookEvery_ns) return;
  looked_ns_ = now;
  if (presence_.fd() >= 0 && now - answered_ns_ >= kAnswerEvery_ns) {
    answered_ns_ = now;
    (void)presence_.answer();
  }
  if (const std::unique_lock lock(mutex_, std::try_to_lock); lock.owns_lock()) {
    shielded([&] {
      const bool signs = (driving_.load() > 0 || any_runs()) && now - signs_ns_ > kSignEvery_ns;
      if (signs) signs_ns_ = now;
      const bool due = questions_.due(now);
      if (!signs && !due) return;
      const auto silent = [&](PluginLink* link) { return Questions::too_long(link->silent_since_ns(), now); };
      // What has come meanwhile may be an answer, or the farewell of a peer that has left.
      if (due && std::any_of(links_.begin(), links_.end(), silent)) turn();
      for (PluginLink* link : links_) {
        if (signs) link->ask_for_answer();
        if (due) questions_.note(link->peer_.rank, link->silent_since_ns(), now);
      }
    });
  }
  const std::vector<uint32_t> gone = questions_.ask(links_[0]->own_.rank);
  if (gone.empty()) return;
  const std::lock_guard lock(mutex_);
  shielded([&] {
    turn();
    for (const uint32_t rank : gone) link_of_rank_[rank]->lose_ended_process();
  });
}

void PluginEngine::step() {
  (void)contained([&] { return ask(), Status(); });
  int64_t wait_ns = kLookEvery_ns;
  if (!driven()) {
    bool any = false;
    const int64_t begin = now_ns();
    {
      const std::lock_guard lock(mutex_);
      shielded([&] { any = turn(); });
    }
    const int64_t took = now_ns() - begin;
    pause_ns_ = any ? kShortest_ns : std::min(2 * pause_ns_, std::max(kLongest_ns, kShare * took));
    wait_ns = any ? 0 : std::max(pause_ns_, kShare * took);
    if (any) std::this_thread::yield();
  }
  if (wait_ns > 0) {
    std::unique_lock lock(sleep_mutex_);
    sleep_.wait_for(lock, std::chrono::nanoseconds(wait_ns), [&] { return woken_; });
    if (woken_ && takes_over()) pause_ns_ = kShortest_ns;
    woken_ = false;
  }
  if (!links_.empty()) look_at_board(*links_[0]->own_.board);
}

}  // namespace moeccl::transport::netplugin
