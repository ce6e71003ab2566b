// SPDX-License-Identifier: Apache-2.0
// Lets the ranks of a communicator meet again without those that are gone. This does not need the communicator's links,
// whatever state they are in: since init, each rank knows where every rank would wait for the others. Nothing listens
// there before.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/fd.h"
#include "src/base/status.h"
#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/unique_id.h"
#include "src/driver/socket.h"

namespace moeccl::comm {

// The addresses where ranks meet: on one host, names that only holders of the key can know; otherwise, reserved ports.
struct MeetingPlaces {
  uint32_t rank = 0;
  bootstrap::Key key = {};                    // of the communicator, never sent
  std::vector<driver::SocketAddress> places;  // [n_ranks]
  Fd port;                                    // reserves this rank's port
  uint64_t host_hash = 0;

  // `address` is this host's, as ranks of others reach it; empty if there are no others. Collective call of all ranks.
  static Result<MeetingPlaces> arrange(bootstrap::Session& session, const bootstrap::Key& key,
                                       const std::string& address, Deadline deadline);
  Result<moecclUniqueId> id_of(uint32_t rank) const;
};

struct ReunionCall {
  bootstrap::RankSet excluded;              // [n_ranks] ranks that stay away because the caller says so
  bool only_excluded = false;               // the loss of any other rank is a failure
  std::function<bool(uint32_t rank)> gone;  // returns true if, in this rank's view, an old rank is gone
  std::function<Status()> cancelled;        // see bootstrap::JoinOptions; may be empty
  Deadline deadline;
};

// The ranks that have met.
struct Reunion {
  std::unique_ptr<bootstrap::Session> session;
  std::vector<uint32_t> members;          // by their old numbers, ascending
  uint32_t rank = 0;                      // this rank's position among them
  bootstrap::Key key = {};                // for what they create next; never sent
  std::unique_ptr<bootstrap::Root> root;  // on the rank where the others have joined
};

// Blocks until every rank has joined that is neither excluded nor gone in the eyes of all that have joined. The lowest
// such rank leads; if it dies in the meantime, the next one does. Timeout names the missing ranks. Mismatch: the ranks
// disagree on `excluded`. RemoteError, with only_excluded: names the other ranks that are gone.
Result<Reunion> meet_again(const MeetingPlaces& places, const ReunionCall& call);

}  // namespace moeccl::comm
