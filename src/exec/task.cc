// SPDX-License-Identifier: Apache-2.0
#include "src/exec/task.h"

#include <sched.h>

#include <algorithm>
#include <cctype>
#include <compare>
#include <cstring>
#include <utility>
#include <vector>

#include "src/base/device_order.h"
#include "src/base/log.h"
#include "src/base/pause.h"
#include "src/driver/thread.h"
#include "src/exec/revoked.h"

namespace moeccl::exec {
namespace {

constexpr int64_t kCheckEvery_ns = 1'000'000;   // boards of peers, deadline: a few cache lines per peer
constexpr int64_t kAliveEvery_ns = 20'000'000;  // a system call per peer
constexpr uint64_t kPollsWithoutPause = 20;
constexpr int64_t kYieldFor_ns = 3'000'000;  // then sleep: yielding forever would take the cores from others
// Ranks that share cores sleep earlier when a yield finds nothing else to run on this core: only then does the kernel
// see an idle core and move a rank here that waits for another one (docs/decisions.md).
constexpr int64_t kLonely_ns = 3'000, kLonelyFor_ns = 100'000;
// If each rank has a core, whatever takes over a core that a rank gives up is foreign, and keeps it for a time slice.
// After a yield that cost this much, the next waits do not yield for a while. Two ranks are on one core only by the
// kernel's choice, which may take it 10 ms to undo: one of them moves.
constexpr int64_t kStranger_ns = 50'000, kWithoutYield_ns = 300'000, kMakeRoomEvery_ns = 2'000'000;
// A rank that fails or aborts may have finished this operation, and then all others may be able to finish it too. Ranks
// that have not moved for this long cannot: another rank is stuck.
constexpr int64_t kLastChance_ns = 200'000'000;
// A long wait is noted for observers in other processes.
constexpr int64_t kNoteAfter_ns = 10'000'000, kNoteEvery_ns = 100'000'000;
constexpr size_t kMostNamed = 400;   // characters of a message that name ranks
constexpr int64_t kSilent_ms = 250;  // longer than any queue between two hosts delays an acknowledgement
constexpr int64_t kShortSleep_ns = 50'000, kLongSleep_ns = 500'000;
constexpr int64_t kElsewhereEvery_ns = 20'000;  // WhileWaiting's function; a small operation has ended by then

thread_local void (*while_waiting)() = nullptr;

// Names the ranks that are not in the operation, those that are furthest behind first. If all are in it, the one that
// this rank waits for comes first.
std::string unresponsive(const Task& task) {
  struct Peer {
    bool entered, not_awaited;
    uint64_t done;
    uint32_t rank;
    auto operator<=>(const Peer&) const = default;
  };
  const Fabric& f = task.fabric();
  std::vector<Peer> peers;
  for (uint32_t p = 0; p < f.n_ranks; ++p) {
    if (p == f.rank || !task.needs(p)) continue;
    const uint64_t done = f.link(p).board().progress.completed.load(std::memory_order_relaxed);
    peers.push_back({task.has_entered(p), p != task.awaits(), done, p});
  }
  std::sort(peers.begin(), peers.end());
  std::string text;
  size_t n = 0;
  for (; n < peers.size() && text.size() <= kMostNamed; ++n) {
    const Peer& p = peers[n];
    if (p.entered && !peers[0].entered) break;
    text += format("{}rank {} ({}, last finished #{})", n == 0 ? "" : ", ", p.rank, f.link(p.rank).name(), p.done);
  }
  if (n == peers.size()) return text;
  return format("{}; {} {} {}", text, peers.size() - n, peers.size() - n == 1 ? "other is" : "others are",
                peers[n].entered ? "in it" : "not in it either");
}

// Names the ranks whose hosts do not answer.
std::string silent(const Task& task) {
  const Fabric& f = task.fabric();
  std::string text;
  size_t n_silent = 0, n_named = 0, n_far = 0;
  std::string why;
  for (uint32_t p = 0; p < f.n_ranks; ++p) {
    if (p == f.rank) continue;
    n_far += f.link(p).view().messages == nullptr ? 1 : 0;
    const int64_t silent_ms = task.needs(p) ? f.link(p).unacknowledged_ms() : 0;
    if (silent_ms < kSilent_ms) continue;
    if (++n_silent == 1) why = f.link(p).why_silent();
    if (text.size() > kMostNamed) continue;
    text += format("{}rank {} ({}, its host has acknowledged nothing for {} ms)", n_named == 0 ? "" : ", ", p,
                   f.link(p).name(), silent_ms);
    ++n_named;
  }
  if (n_named < n_silent) text += format("; the hosts of {} others do not answer either", n_silent - n_named);
  if (!why.empty()) return text + "; " + why;
  if (n_silent == n_far && n_far > 0) text += "; no other host answers: look at this host's network";
  return text;
}

Status timed_out(Task& task) {
  Fabric& f = task.fabric();
  // Ranks whose hosts answer are waiting for others themselves. If some hosts do not answer, only their ranks are
  // named.
  std::string late = silent(task);
  if (late.empty()) late = unresponsive(task);
  log(LogLevel::kError, "{}: deadline of {} ms passed; its last operations:", f.who(), f.timeout_ms);
  f.log_recorder();
  return error(moecclTimeout, "{} did not finish within {} ms; unresponsive: {}", task.describe(), f.timeout_ms,
               late.empty() ? "none known" : late);
}

void note_wait(Task& task, int64_t since_ns) {
  Fabric& f = task.fabric();
  FlightWait wait;
  wait.since_ns = since_ns;
  wait.sequence = task.sequence();
  wait.thread = driver::thread_number();
  wait.awaits = task.awaits();
  for (uint32_t p = 0; p < f.n_ranks; ++p) {
    if (p == f.rank || !task.needs(p)) continue;
    if (wait.n_peers < FlightWait::kPeers) wait.peers[wait.n_peers] = p;
    ++wait.n_peers;
  }
  copy_text(wait.text, task.describe());
  f.recorder.note_wait(wait);
}

}  // namespace

WhileWaiting::WhileWaiting(void (*function)()) : before_(std::exchange(while_waiting, function)) {}
WhileWaiting::~WhileWaiting() { while_waiting = before_; }

std::string failure_text(const transport::Board& board) {
  char bytes[transport::kFailureText];
  for (size_t i = 0; i < sizeof(bytes) / 8; ++i) {
    const uint64_t word = board.health.text[i].load(std::memory_order_relaxed);
    std::memcpy(bytes + 8 * i, &word, 8);
  }
  std::string text(bytes, strnlen(bytes, sizeof(bytes)));
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = '?';
  }
  return text;
}

namespace {

bool was_revoked(const transport::Board& board) {
  const auto state = static_cast<transport::RankState>(load_from_device(board.health.state));
  return state == transport::RankState::kFailed && board.health.code.load(std::memory_order_acquire) == moecclAborted;
}

}  // namespace

Status check_revoked(const Fabric& fabric) {
  for (uint32_t p = 0; p < fabric.n_ranks; ++p) {
    if (p == fabric.rank || !was_revoked(fabric.link(p).board())) continue;
    return error(moecclAborted, "{}", failure_text(fabric.link(p).board()));
  }
  return {};
}

namespace {

// Returns what a peer says of its end, or success if it has left in order, or runs.
Status how_ended(const transport::Board& board, uint32_t peer) {
  switch (static_cast<transport::RankState>(load_from_device(board.health.state))) {
    case transport::RankState::kFailed: {
      const uint32_t code = board.health.code.load(std::memory_order_relaxed);
      const bool same = code == moecclMismatch || code == moecclTimeout;
      const std::string text = failure_text(board);
      // What a peer heard from another one is passed on as it is: the first rank that failed is the one to look at.
      const bool heard = text.starts_with("rank ") && text.find(" failed: ") == text.find_first_not_of("0123456789", 5);
      return error(same ? static_cast<Code>(code) : moecclRemoteError, "{}{}",
                   heard ? "" : format("rank {} failed: ", peer), text);
    }
    case transport::RankState::kAborted:
      return error(moecclRemoteError, "rank {} aborted the communicator", peer);
    default:
      return {};
  }
}

}  // namespace

Status check_peers(const Fabric& fabric, const std::function<bool(uint32_t)>& counts) {
  MOECCL_TRY(check_revoked(fabric));
  for (uint32_t p = 0; p < fabric.n_ranks; ++p) {
    if (p == fabric.rank || !counts(p)) continue;
    const transport::Board& board = fabric.link(p).board();
    MOECCL_TRY(how_ended(board, p));
    Status lost = fabric.link(p).check_peer();
    const auto left = static_cast<uint32_t>(transport::RankState::kLeft);
    if (lost.ok() || load_from_device(board.health.state) == left) continue;
    MOECCL_TRY(how_ended(board, p));  // its own text says more, if it has arrived since
    return lost;
  }
  return {};
}

Status check_peer_state(Task& task, uint32_t peer, bool waits_long) {
  const transport::Board& board = task.fabric().link(peer).board();
  const auto state = static_cast<transport::RankState>(load_from_device(board.health.state));
  if (state == transport::RankState::kRunning) return {};
  if (was_revoked(board)) return error(moecclAborted, "{}", failure_text(board));
  if (!task.needs(peer) && (!waits_long || state == transport::RankState::kLeft)) return {};
  MOECCL_TRY(how_ended(board, peer));
  MOECCL_TRY(check_peers(task.fabric(), [](uint32_t) { return true; }));
  return error(moecclRemoteError, "rank {} has destroyed its communicator and will not take part in {}", peer,
               task.describe());
}

Status check_health(Task& task, int64_t since_ns, int64_t now, bool look_alive) {
  Fabric& f = task.fabric();
  if (f.aborted.load(std::memory_order_relaxed))
    return error(moecclAborted, "{} was aborted on this rank", task.describe());
  // Another thread has revoked the communicator, or another task of the group has failed. What the peers sent before
  // may still complete this one.
  if (f.failed()) {
    Status failure = f.failure();
    if (failure.code() == moecclAborted || now - since_ns > kLastChance_ns) return failure;
  }
  MOECCL_TRY(task.diagnose());
  for (uint32_t p = 0; p < f.n_ranks; ++p) {
    if (p == f.rank) continue;
    // It may have heard of another rank's end elsewhere, which shows here a moment later.
    if (task.has_left(p) && task.needs(p) && task.since_peer_left_ns(now) < kLastChance_ns) continue;
    MOECCL_TRY(check_peer_state(task, p, now - since_ns > kLastChance_ns));
  }
  if (look_alive) {
    for (uint32_t p = 0; p < f.n_ranks; ++p) {
      if (p == f.rank || task.has_left(p) || !task.needs(p)) continue;
      Status lost = f.link(p).check_peer();
      if (lost.ok()) continue;
      MOECCL_TRY(check_peer_state(task, p));  // its own text says more, if it has arrived since
      if (task.needs(p)) return lost;         // else it had done its part before it ended
    }
  }
  if (now > task.deadline_ns(since_ns)) return timed_out(task);
  return {};
}

namespace {

// Paces one blocked stretch of drive(): spins briefly, then yields, then sleeps.
class BlockedWait {
 public:
  explicit BlockedWait(Fabric& fabric) : fabric_(fabric) {}
  void reset() { polls_ = 0; }
  // Returns true when it is time for a health check.
  bool wait() {
    if (++polls_ <= fabric_.spin_polls) {
      // A peer that runs on another core answers within a few polls: a pause would only add its length.
      if (polls_ > kPollsWithoutPause) pause_core();
      return false;
    }
    if (polls_ == fabric_.spin_polls + 1) {
      since_ = checked_ = now_ = alive_ = shared_ = now_ns();
      beside_peer_ = !fabric_.crowded && shares_core();
      elsewhere_ = while_waiting;
      if (been_elsewhere_ == 0) been_elsewhere_ = now_;
    }
    int64_t now = 0;
    if (now_ - since_ < fabric_.spin_ns ||
        (!fabric_.crowded && !beside_peer_ && now_ - since_ < fabric_.waiting.before_yield_ns)) {
      pause_core();
    } else if (beside_peer_ && now_ - fabric_.waiting.made_room_ns > kMakeRoomEvery_ns) {
      fabric_.waiting.made_room_ns = now_;
      make_room();
      beside_peer_ = shares_core();
    } else if (now_ - since_ < kYieldFor_ns && !(fabric_.crowded && now_ - shared_ > kLonelyFor_ns)) {
      now = yield();
    } else {
      const bool briefly = elsewhere_ != nullptr || now_ - since_ < 10 * kYieldFor_ns;
      driver::sleep_ns(briefly ? kShortSleep_ns : kLongSleep_ns);
    }
    const int64_t before = std::exchange(now_, now != 0 ? now : now_ns());
    if (now_ - before > kStopped_ns) since_ += now_ - before;
    if (elsewhere_ != nullptr && now_ - been_elsewhere_ > kElsewhereEvery_ns) {
      elsewhere_();
      been_elsewhere_ = now_ = now_ns();
    }
    if (now_ - checked_ < kCheckEvery_ns) return false;
    checked_ = now_;
    return true;
  }
  int64_t since() const { return since_; }
  int64_t now() const { return now_; }
  // Called after wait() has returned true. Returns whether the waits are to be noted, and assumes that they then are.
  bool is_long() {
    if (now_ - since_ < kNoteAfter_ns || now_ - noted_ < kNoteEvery_ns) return false;
    noted_ = now_;
    return true;
  }
  // Called after wait() has returned true. Returns whether to check that the peers' processes are alive.
  bool looks_alive() {
    if (now_ - alive_ <= kAliveEvery_ns) return false;
    alive_ = now_;
    return true;
  }

 private:
  // Returns the time after it.
  int64_t yield() {
    sched_yield();
    const int64_t after = now_ns(), took = after - now_;
    if (took > kLonely_ns) shared_ = after;
    int64_t& before_yield_ns = fabric_.waiting.before_yield_ns;
    if (!fabric_.crowded && !beside_peer_)
      before_yield_ns = took > kStranger_ns ? kWithoutYield_ns : before_yield_ns / 2;
    return after;
  }
  // Returns whether a peer last ran on `core` (as noted). With `lower`, only peers of lower ranks count.
  bool runs_on(uint32_t core, bool lower) const {
    for (uint32_t p = 0; p < (lower ? fabric_.rank : fabric_.n_ranks); ++p) {
      if (p != fabric_.rank && fabric_.link(p).board().progress.core.load(std::memory_order_relaxed) == core)
        return true;
    }
    return false;
  }
  bool shares_core() const {
    const uint32_t here = fabric_.note_core();
    return here != 0 && runs_on(here, false);
  }
  // The lowest of the ranks on a core stays.
  void make_room() const {
    if (!runs_on(fabric_.note_core(), true)) return;
    driver::move_to_core([this](int core) { return !runs_on(static_cast<uint32_t>(core) + 1, false); });
  }

  Fabric& fabric_;
  bool beside_peer_ = false;
  void (*elsewhere_)() = nullptr;
  int64_t been_elsewhere_ = 0;
  int64_t shared_ = 0;  // when something else last ran on this core
  uint64_t polls_ = 0;
  int64_t since_ = 0, now_ = 0, checked_ = 0, alive_ = 0, noted_ = 0;
};

// Tells the fabrics' engines that this thread drives them while this object exists.
class Engines {
 public:
  explicit Engines(std::span<Task* const> tasks) : tasks_(tasks) {
    for (size_t i = 0; i < tasks.size(); ++i) {
      if (first_of_fabric(i)) tasks[i]->fabric().engine->begin();
    }
  }
  ~Engines() {
    for (size_t i = 0; i < tasks_.size(); ++i) {
      if (first_of_fabric(i)) tasks_[i]->fabric().engine->end();
    }
  }
  Engines(const Engines&) = delete;
  Engines& operator=(const Engines&) = delete;
  // Called between rounds of polls.
  void progress() const {
    for (size_t i = 0; i < tasks_.size(); ++i) {
      if (!first_of_fabric(i)) continue;
      tasks_[i]->fabric().engine->progress(tasks_.size() == 1 ? tasks_[i]->awaits() : transport::Engine::kAnyone);
    }
  }

 private:
  // Tasks of one fabric are usually adjacent, so the engine is called once for all of them.
  bool first_of_fabric(size_t i) const {
    const Fabric& f = tasks_[i]->fabric();
    return f.engine != nullptr && (i == 0 || &tasks_[i - 1]->fabric() != &f);
  }
  std::span<Task* const> tasks_;
};

}  // namespace

void wait_for_peers(const std::function<bool()>& in_use, int64_t most_ns) {
  for (const int64_t start = now_ns(); in_use() && now_ns() - start < most_ns;) driver::sleep_ns(kShortSleep_ns);
}

void take_sources_back(Fabric& fabric) {
  constexpr int64_t kReadsEnd_ns = 100'000'000;  // for all links together
  std::vector<transport::PostedPuts*> all;
  for (uint32_t p = 0; p < fabric.n_ranks; ++p)
    if (p != fabric.rank && fabric.link(p).posted_puts() != nullptr) all.push_back(fabric.link(p).posted_puts());
  const auto reads = [](transport::PostedPuts* posts) { return posts->reads_sources(); };
  wait_for_peers([&] { return std::any_of(all.begin(), all.end(), reads); }, kReadsEnd_ns);
  for (transport::PostedPuts* posts : all) posts->withdraw();
}

Status publish_failure(Task& task, const Status& status) {
  Fabric& f = task.fabric();
  // An abort or a revocation has set the failure already.
  const bool dumps = !f.dumped.exchange(true, std::memory_order_relaxed);
  if (dumps && !f.recorder.has_waits()) (void)contained([&] { return note_wait(task, now_ns()), Status(); });
  f.fail(status);
  if (dumps) dump_flight();
  Status first = contained([&] { return f.failure(); });
  (void)contained([&] { return task.let_go(), Status(); });
  return first;
}

Status give_up(Task& task, const Status& status) {
  Status first = publish_failure(task, status);
  (void)contained([&] { return task.abandon(), Status(); });
  return first;
}

Status drive(std::span<Task* const> tasks) {
  if (tasks.empty()) return {};
  Status first;
  size_t left = tasks.size();
  // Tasks that have ended are marked rather than removed, because their order is the order of polling.
  std::vector<uint8_t> ended_storage;
  enum : uint8_t { kRuns, kDone, kFailed };
  uint8_t ended_few[16] = {};
  uint8_t* ended = ended_few;
  if (tasks.size() > sizeof(ended_few)) {
    ended_storage.resize(tasks.size());
    ended = ended_storage.data();
  }
  const auto finish = [&](size_t i, Status status) {
    ended[i] = kDone;
    --left;
    if (status.ok()) return;
    ended[i] = kFailed;
    // First, because kernels that are stopped report a reason of their own.
    tasks[i]->fabric().fail(status);
    // Before it lets go: it may then wait for work on a device that stands behind another task's.
    for (size_t k = 0; k < tasks.size(); ++k)
      if (ended[k] == kRuns && &tasks[k]->fabric() == &tasks[i]->fabric()) tasks[k]->stop();
    status = publish_failure(*tasks[i], status);
    if (first.ok()) first = std::move(status);
  };
  const Engines engines(tasks);
  bool fresh = true, noted = false;
  const auto forget_waits = [&] {
    for (Task* const task : tasks) task->fabric().recorder.clear_waits();
    noted = false;
  };
  BlockedWait blocked(tasks[0]->fabric());
  constexpr uint32_t kRoundsOfMoves = 256;  // between looks for an abort
  for (uint32_t moves = 0; left > 0;) {
    bool moved = false;
    if (!fresh) engines.progress();  // the first sends of a task need not wait for the sockets
    fresh = false;
    for (size_t i = 0; i < tasks.size(); ++i) {
      if (ended[i]) continue;
      const Progress p = poll_contained(*tasks[i]);
      if (p == Progress::kBlocked) continue;
      moved = true;
      if (p == Progress::kDone) finish(i, {});
      if (p == Progress::kFailed) finish(i, tasks[i]->status());
    }
    if (moved) {
      blocked.reset();
      if (noted) forget_waits();
      if (++moves % kRoundsOfMoves != 0) continue;
      for (size_t i = 0; i < tasks.size(); ++i) {
        if (ended[i] || !tasks[i]->fabric().failed()) continue;
        if (Status s = tasks[i]->fabric().failure(); s.code() == moecclAborted) finish(i, std::move(s));
      }
      continue;
    }
    if (!blocked.wait()) continue;
    if (blocked.is_long()) {
      forget_waits();
      for (size_t i = 0; i < tasks.size(); ++i)
        if (!ended[i]) (void)contained([&] { return note_wait(*tasks[i], blocked.since()), Status(); });
      noted = true;
    }
    const bool look_alive = blocked.looks_alive();
    for (size_t i = 0; i < tasks.size(); ++i) {
      if (ended[i]) continue;
      Status s = contained([&] { return check_health(*tasks[i], blocked.since(), blocked.now(), look_alive); });
      if (s.ok()) continue;
      // What the peer did before it failed is visible now that its failure is, and may be all that was missing.
      const Progress p = poll_contained(*tasks[i]);
      if (p == Progress::kMoved) {
        blocked.reset();
      } else if (p == Progress::kFailed) {
        finish(i, tasks[i]->status());  // such as a mismatch with what a peer sent before it left
      } else {
        finish(i, p == Progress::kDone ? Status() : std::move(s));
      }
    }
  }
  // Only now, because a rank that this thread drives too may have used the buffers until its own task ended.
  for (size_t i = 0; i < tasks.size(); ++i)
    if (ended[i] == kFailed) (void)contained([&] { return tasks[i]->abandon(), Status(); });
  if (noted && first.ok()) forget_waits();
  return first;
}

}  // namespace moeccl::exec
