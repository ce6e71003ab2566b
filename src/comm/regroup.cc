// SPDX-License-Identifier: Apache-2.0
#include "src/comm/regroup.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "src/comm/split.h"
#include "src/exec/task.h"

namespace moeccl::comm {
namespace {

// The time for a member's end to become visible after something else has shown it.
constexpr int64_t kSeeMs = 300;
// An operation that a failure, a revocation or an abort has ended waits for its peers for a second. Its group may
// continue on other communicators for much longer; the shrink does not wait for those.
constexpr int64_t kEnds_ns = 2'000'000'000;

// A rank that has destroyed the parent will not come either, but one that has failed will.
bool is_gone(Communicator& parent, uint32_t r) {
  transport::Link& link = parent.fabric().link(r);
  const auto state = static_cast<transport::RankState>(link.board().health.state.load(std::memory_order_acquire));
  return state == transport::RankState::kLeft || !link.check_peer().ok();
}

Result<bootstrap::RankSet> excluded_ranks(const Communicator& parent, std::span<const int> exclude) {
  bootstrap::RankSet set(parent.n_ranks(), false);
  for (size_t i = 0; i < exclude.size(); ++i) {
    const int r = exclude[i];
    if (r < 0 || r >= static_cast<int>(parent.n_ranks())) {
      return error(moecclInvalidArgument, "exclude_ranks[{}] is {}: give ranks of comm, 0 to {}", i, r,
                   parent.n_ranks() - 1);
    }
    if (r == static_cast<int>(parent.rank())) {
      return error(moecclInvalidArgument,
                   "exclude_ranks[{}] is {}, the calling rank: only ranks that stay make the call", i, r);
    }
    set[static_cast<size_t>(r)] = true;
  }
  return set;
}

// Makes a communicator of the ranks that have met.
Result<std::unique_ptr<Communicator>> make(Communicator& parent, Reunion& met, const Config& config, Deadline until) {
  Parent from;
  from.until = until;
  hand_down(parent, config, met.members, from);
  MOECCL_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> made, Communicator::init(met, config, from));
  if (met.root != nullptr) bootstrap::Root::detach(std::move(met.root));  // it ends when all have left it
  inherit_profile(parent, config, *made);
  return made;
}

bool lost_some(Communicator& parent, const std::vector<uint32_t>& members) {
  return std::any_of(members.begin(), members.end(),
                     [&](uint32_t r) { return r != parent.rank() && is_gone(parent, r); });
}

}  // namespace

Result<std::unique_ptr<Communicator>> shrink(Communicator& parent, std::span<const int> exclude,
                                             const moecclConfig_t* given, bool abort_first) {
  ReunionCall call;
  MOECCL_ASSIGN_OR_RETURN(call.excluded, excluded_ranks(parent, exclude));
  MOECCL_ASSIGN_OR_RETURN(const Config config, config_of_part(parent, given));
  if (abort_first) parent.abort();
  call.cancelled = [&config] { return config.not_cancelled(); };
  if (parent.usable().ok()) parent.wait_idle([&call] { return !call.cancelled().ok(); });
  call.deadline = Deadline::after_ms(config.init_timeout_ms);
  const auto waits = [&] { return !parent.idle() && call.cancelled().ok() && !call.deadline.passed(); };
  if (!parent.usable().ok()) exec::wait_for_peers(waits, kEnds_ns);
  MOECCL_TRY(call.cancelled());
  call.only_excluded = !exclude.empty();
  call.gone = [&parent](uint32_t r) { return is_gone(parent, r); };
  // A network without connections finds out that a peer has died only by sending to it, which it does while it is used.
  transport::EngineUse use;
  use.begin(parent.fabric().engine.get(), 0);
  for (;;) {
    Result<Reunion> met = meet_again(parent.places(), call);
    if (!met.ok()) return std::move(met).status().with_context("moecclCommShrink");
    auto made = make(parent, *met, config, call.deadline);
    if (made.ok() || made.status().code() != moecclRemoteError) return made;
    // If a rank has died since they met, the others meet again.
    met->root.reset();
    const Deadline seen = Deadline::earlier(call.deadline, Deadline::after_ms(kSeeMs));
    bool lost = false;
    while (!(lost = lost_some(parent, met->members)) && !seen.passed())
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (!lost || call.deadline.passed()) {
      return std::move(made).status().with_context("connecting the ranks that are left, by their new numbers");
    }
  }
}

Status all_live(Communicator& parent) {
  for (uint32_t r = 0; r < parent.n_ranks(); ++r) {
    if (r != parent.rank()) MOECCL_TRY(parent.fabric().link(r).check_peer());
  }
  return {};
}

Result<moecclUniqueId> agree_on_id(Communicator& parent, const moecclUniqueId* given) {
  struct Word {
    moecclUniqueId id = {};
    uint64_t known = 0;
  } mine;
  if (given != nullptr) mine = {*given, 1};
  std::vector<Word> all(parent.n_ranks());
  MOECCL_TRY(all_gather_bytes(parent, &mine, sizeof(mine), all.data()));
  const Word* first = nullptr;
  for (const Word& w : all) {
    if (w.known == 0) continue;
    if (first == nullptr) first = &w;
    if (std::memcmp(&first->id, &w.id, sizeof(w.id)) != 0) {
      return error(moecclInvalidArgument, "ranks {} and {} of comm give different ids: let one of them make it",
                   first - all.data(), &w - all.data());
    }
  }
  if (first == nullptr)
    return error(moecclInvalidArgument, "id is NULL on all ranks of comm: give one of moecclCommGetUniqueId on one");
  return first->id;
}

}  // namespace moeccl::comm
