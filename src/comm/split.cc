// SPDX-License-Identifier: Apache-2.0
#include "src/comm/split.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include "src/base/env.h"
#include "src/bootstrap/bootstrap.h"
#include "src/comm/collective.h"
#include "src/driver/socket.h"
#include "src/exec/revoked.h"
#include "src/exec/task.h"

namespace moeccl::comm {
namespace {

// The time for a peer's end to become visible after something else has shown it, such as a rank that has heard of it
// and leaves (docs/decisions/142-a-peer-that-leaves.md).
constexpr int64_t kSeeMs = 200;

// The place where a part meets, or the reason why it cannot. Sent as raw bytes.
struct Offer {
  moecclUniqueId id = {};
  uint32_t code = 0;  // a moecclResult_t
  char why[252] = {};
};

// Returns MOECCL_SOCKET_ADDR without its port, at which only one of the parts could meet.
std::string socket_address() {
  const Result<driver::SocketAddress> address = driver::parse_ip_address(env().socket_addr);
  return address.ok() ? address->host() : env().socket_addr;
}

Offer make_offer(const std::string& address, int64_t timeout_ms) {
  Offer offer;
  const Result<moecclUniqueId> id = bootstrap::make_unique_id(address.empty() ? socket_address() : address, timeout_ms);
  if (id.ok()) {
    offer.id = id.value();
    return offer;
  }
  offer.code = static_cast<uint32_t>(id.status().code());
  const std::string& why = id.status().message();
  std::memcpy(offer.why, why.data(), std::min(why.size(), sizeof(offer.why)));
  return offer;
}

// The members of a part as the parent sees them, by the parent's rank numbers.
class Members {
 public:
  Members(Communicator& parent, std::span<const uint32_t> members) : parent_(parent), members_(members) {
    is_member_.resize(parent.n_ranks());
    for (const uint32_t r : members) is_member_[r] = true;
  }

  // Returns how one of them has failed or been lost, or that the parent was revoked, or success.
  Status alive() const {
    Status status = exec::check_peers(parent_.fabric(), [this](uint32_t r) { return is_member_[r]; });
    // As the next operation would; the other parts thus learn which rank it was.
    if (!status.ok() && status.code() != moecclAborted) parent_.fabric().fail(status);
    return status;
  }

  // The same while they meet, for which each of them has to stay.
  Status can_come() {
    MOECCL_TRY(alive());
    const auto left = std::find_if(members_.begin(), members_.end(), [this](uint32_t r) {
      return r != parent_.rank() && exec::has_left(parent_.fabric(), r);
    });
    if (left == members_.end()) return {};
    if (left_seen_.is_never()) left_seen_ = Deadline::after_ms(kSeeMs);
    if (!left_seen_.passed()) return {};
    return error(moecclRemoteError, "rank {} has destroyed its communicator and will not join its part", *left);
  }

 private:
  Communicator& parent_;
  std::span<const uint32_t> members_;
  std::vector<bool> is_member_;
  Deadline left_seen_;  // when it counts that one has left
};

}  // namespace

Status still_wanted(Communicator& parent) {
  MOECCL_TRY(parent.usable());
  return exec::check_revoked(parent.fabric());
}

Status all_gather_bytes(Communicator& comm, const void* mine, size_t bytes, void* all) {
  const Communicator::OwnExchange own(comm);
  return run_collective(comm,
                        {.op = moecclOpAllGather, .send = mine, .recv = all, .count = bytes, .type = moecclUint8});
}

Result<Config> config_of_part(Communicator& parent, const moecclConfig_t* given) {
  Config config = parent.config();
  // The parent's topology describes the parent's ranks.
  config.topology.clear();
  config.pace = false;
  if (given != nullptr) {
    MOECCL_ASSIGN_OR_RETURN(config, Config::from(given, true));
    // A part stays on its parent's device, whatever is current on the calling thread.
    if (parent.config().cuda_context != nullptr) config.cuda_context = parent.config().cuda_context;
  }
  if (config.pace && config.topology.empty() && parent.uplinks() == nullptr) {
    return error(moecclInvalidArgument,
                 "config.pace is 1 without a topology, and the communicator it comes from is not paced: give a "
                 "topology");
  }
  // Even if the part has few ranks, the parent's other ranks need the same cores.
  config.crowded = parent.fabric().crowded;
  return config;
}

namespace {

// Returns what the parent's profile says of the part's tree; without a source, nothing. If the part has its own
// topology, that says nothing about the parent's levels.
plan::Profile profile_for(Communicator& parent, const Config& config, const plan::LevelTree& tree) {
  const std::shared_ptr<const plan::Profile> profile = parent.selector().profile();
  if (!config.topology.empty() || profile->source.empty()) return {};
  return plan::profile_of_part(*profile, parent.tree(), tree);
}

}  // namespace

void hand_down(Communicator& parent, const Config& config, const std::vector<uint32_t>& members, Parent& from) {
  from.profile_for = [&](const plan::LevelTree& tree) { return profile_for(parent, config, tree); };
  if (!config.topology.empty()) return;
  if (config.pace) {
    from.uplinks = parent.uplinks()->of_part(members);
  } else if (parent.described() != nullptr) {
    from.described = std::make_shared<const plan::LevelTree>(parent.described()->part(members));
  }
}

void inherit_profile(Communicator& parent, const Config& config, Communicator& part) {
  plan::Profile of_part = profile_for(parent, config, part.tree());
  if (of_part.source.empty()) return;
  of_part.source += ", of the communicator that this one comes from";
  of_part.host_level = part.selector().profile()->host_level;
  part.selector().set_profile(of_part);
}

Result<std::unique_ptr<Communicator>> split(Communicator& parent, int color, int key, const moecclConfig_t* given) {
  MOECCL_TRY(parent.usable());
  const Result<Config> wanted = config_of_part(parent, given);
  struct Wish {
    int32_t color, key, code;
  };
  const Wish mine{color, key, wanted.status().code()};
  std::vector<Wish> wishes(parent.n_ranks());
  MOECCL_TRY(all_gather_bytes(parent, &mine, sizeof(mine), wishes.data()));
  MOECCL_TRY(wanted.status());
  wishes[parent.rank()] = mine;
  for (uint32_t r = 0; r < parent.n_ranks(); ++r)
    if (wishes[r].code != moecclSuccess)
      return error(moecclRemoteError, "rank {} could not split the communicator ({}): see its own error", r,
                   moecclGetErrorString(static_cast<moecclResult_t>(wishes[r].code)));
  const Config& config = *wanted;
  std::vector<uint32_t> members;
  for (uint32_t r = 0; r < parent.n_ranks(); ++r) {
    if (color >= 0 && wishes[r].color == color) members.push_back(r);
  }
  std::stable_sort(members.begin(), members.end(),
                   [&](uint32_t a, uint32_t b) { return wishes[a].key < wishes[b].key; });
  // The first member of each part makes its id. All ranks take part in passing the ids on.
  Offer offer;
  if (!members.empty() && members[0] == parent.rank()) offer = make_offer(parent.address(), config.init_timeout_ms);
  std::vector<Offer> offers(parent.n_ranks());
  MOECCL_TRY(all_gather_bytes(parent, &offer, sizeof(offer), offers.data()));
  if (members.empty()) return std::unique_ptr<Communicator>();
  const auto at = std::find(members.begin(), members.end(), parent.rank());
  Parent from;
  hand_down(parent, config, members, from);
  const Offer& chosen = offers[members[0]];
  if (chosen.code != 0) {
    return error(members[0] == parent.rank() ? static_cast<Code>(chosen.code) : moecclRemoteError,
                 "rank {}, the first of the part, cannot make its meeting point: {}", members[0],
                 std::string_view(chosen.why, strnlen(chosen.why, sizeof(chosen.why))));
  }
  from.still_wanted = [&] { return still_wanted(parent); };
  Members those(parent, members);
  from.others_alive = [&] { return those.can_come(); };
  auto made = Communicator::init(chosen.id, static_cast<int>(members.size()), static_cast<int>(at - members.begin()),
                                 config, from);
  if (!made.ok() && made.status().code() == moecclRemoteError) {
    // The part has new rank numbers. If the parent knows which rank is gone, report its number there.
    const Deadline deadline = Deadline::after_ms(kSeeMs);
    do {
      MOECCL_TRY(still_wanted(parent));  // this rank may have revoked the parent, and another heard of it first
      MOECCL_TRY(those.alive());
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    } while (!deadline.passed());
  }
  if (!made.ok()) return std::move(made).status().with_context("connecting the part, with its own rank numbers");
  inherit_profile(parent, config, **made);
  return made;
}

}  // namespace moeccl::comm
