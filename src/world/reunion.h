// SPDX-License-Identifier: Apache-2.0
// How the ranks of a communicator meet once more without those that are gone. They need nothing of the communicator's
// links for that, whatever has become of them: each knows since init where each would wait for the others, and nobody
// listens there before.
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

// Where they meet. On one host under names that only holders of the key can know, else at ports that are kept.
struct MeetingPlaces {
  uint32_t rank = 0;
  bootstrap::Key key = {};                    // of the communicator, never sent
  std::vector<driver::SocketAddress> places;  // [n_ranks]
  Fd port;                                    // keeps this rank's
  uint64_t host_hash = 0;

  // address: of this host, as ranks of others reach it; empty: there are none. All ranks call it together.
  static Result<MeetingPlaces> arrange(bootstrap::Session& session, const bootstrap::Key& key,
                                       const std::string& address, Deadline deadline);
  Result<moecclUniqueId> id_of(uint32_t rank) const;
};

struct ReunionCall {
  bootstrap::RankSet excluded;              // [n_ranks] that stay away because the caller says so
  bool only_excluded = false;               // another one that is gone is a failure
  std::function<bool(uint32_t rank)> gone;  // whether a rank of before is, as far as this one sees
  Deadline deadline;
};

// Those that have met.
struct Reunion {
  std::unique_ptr<bootstrap::Session> session;
  std::vector<uint32_t> members;          // by the numbers of before, ascending
  uint32_t rank = 0;                      // this one's position among them
  bootstrap::Key key = {};                // of what they make next, never sent
  std::unique_ptr<bootstrap::Root> root;  // on the rank that all others came to
};

// Blocks until every rank has come that is neither excluded nor gone in the eyes of all that have come. The lowest one
// leads; when it dies meanwhile, the next does. Timeout names those that are missing; Mismatch: the ranks disagree on
// `excluded`; RemoteError, with only_excluded: names who is gone beside those.
Result<Reunion> meet_again(const MeetingPlaces& places, const ReunionCall& call);

}  // namespace moeccl::comm
