// SPDX-License-Identifier: Apache-2.0
#include "src/exec/fabric.h"

#include <algorithm>
#include <cstring>

#include "src/base/log.h"
#include "src/driver/thread.h"

namespace moeccl::exec {

Fabric::Fabric(uint32_t own_rank, uint32_t ranks, uint64_t staging_bytes)
    : rank(own_rank),
      n_ranks(ranks),
      links(ranks),
      paced(ranks, 0),
      half_bytes(staging_bytes / 2),
      sent(size_t{ranks} * transport::kSigsPerPeer, 0),
      awaited(sent),
      entered(ranks, 0),
      finished(ranks, 0),
      traffic(ranks),
      listed_({rank, n_ranks, &cuda, recorder.page(), entered.data(), finished.data()}) {}

namespace {

void write_health(transport::Board& board, transport::RankState state, Code code, const std::string& text) {
  auto& health = board.health;
  char bytes[transport::kFailureText] = {};
  std::memcpy(bytes, text.data(), std::min(text.size(), sizeof(bytes) - 1));
  for (size_t i = 0; i < sizeof(bytes) / 8; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + 8 * i, 8);
    health.text[i].store(word, std::memory_order_relaxed);
  }
  // Release: the text is visible to a peer that sees this code, also where the state stays the same.
  health.code.store(static_cast<uint32_t>(code), std::memory_order_release);
  // Pairs with the acquire load in check_peer_state(): code and text are visible there. Sequentially consistent: see
  // Board.
  health.state.store(static_cast<uint32_t>(state), std::memory_order_seq_cst);
  // A peer that reads a buffer of this rank looks at the state afterwards, behind a fence: if it saw the state of
  // before, it has not read what the buffer's owner stores later.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

// If memory runs out here, the engine's thread tells the peers later, or the end of the connection does.
void tell_peers(transport::Engine* engine) {
  if (engine != nullptr) (void)contained([&] { return engine->board_changed(true), Status(); });
}

}  // namespace

// A revocation by another thread writes to the board too. It comes later if it has seen the failure, because the lock
// is held until the board has it.
void Fabric::fail(const Status& status) noexcept {
  {
    const std::lock_guard lock(failure_mutex_);
    if (!failure_.ok()) return;
    failure_ = contained([&] { return status; });
    recorder.note_failure(status.code(), status.message());
    failed_.store(true, std::memory_order_release);
    // A revocation is not this rank's own abort: the communicator fails with the same code on all ranks.
    const bool own_abort = status.code() == moecclAborted && aborted.load(std::memory_order_relaxed);
    const auto state = own_abort ? transport::RankState::kAborted : transport::RankState::kFailed;
    write_health(own->board(), state, status.code(), status.message());
  }
  tell_peers(engine.get());
}

void Fabric::revoke(const Status& why) {
  fail(why);
  publish_state(transport::RankState::kFailed, why.code(), why.message());
}

Status Fabric::failure() const {
  const std::lock_guard lock(failure_mutex_);
  return failure_;
}

std::string Fabric::who() const {
  const std::string number = recorder.group() == 0 ? "" : format(" of communicator {:08x}", recorder.group() >> 32);
  return format("rank {} of {}{}{}", rank, n_ranks, number, name.empty() ? "" : " (" + name + ")");
}

void Fabric::log_recorder() const {
  constexpr size_t kLines = 8;
  for (const std::string& line : recorder.lines(kLines)) log(LogLevel::kError, "{}: flight recorder: {}", who(), line);
}

uint32_t Fabric::note_core() {
  const auto core = static_cast<uint32_t>(driver::current_core() + 1);
  std::atomic<uint32_t>& noted = own->board().progress.core;
  if (noted.load(std::memory_order_relaxed) != core) noted.store(core, std::memory_order_relaxed);
  return core;
}

void Fabric::publish_state(transport::RankState state, Code code, const std::string& text) {
  {
    const std::lock_guard lock(failure_mutex_);
    write_health(own->board(), state, code, text);
  }
  tell_peers(engine.get());
}

}  // namespace moeccl::exec
