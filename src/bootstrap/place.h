// SPDX-License-Identifier: Apache-2.0
// Ranks that all know one "host:port" and nothing else, as with NCCL_COMM_ID: each makes the same id of it, and rank 0
// listens there once it joins. The text must be the same on all ranks.
#pragma once

#include <functional>
#include <string>

#include "moeccl/comm.h"
#include "src/base/clock.h"
#include "src/base/status.h"
#include "src/bootstrap/patience.h"
#include "src/bootstrap/unique_id.h"

namespace moeccl::bootstrap {

// Returns the id, in which at_rank_0 is set. At a loopback address, where all ranks are processes of this user on this
// host, it holds the name of a handout. Elsewhere its key comes from the text and MOECCL_SECRET or MOECCL_SECRET_FILE,
// and InvalidUsage says that neither is set; its addresses are what this host knows rank 0's host by. A name that is
// loopback on this host alone counts as loopback where there is no secret. InvalidArgument: the text is no place.
// Timeout: the name service does not answer.
Result<moecclUniqueId> unique_id_of_place(const std::string& place, Deadline deadline);

// Returns the id under which the ranks of such an id meet this time; rank 0 starts its root and detaches it. The others
// may have to wait for that: here for a handout, which they ask again when that root has gone (JoinOptions::ask_again),
// and otherwise in Session::join(..., wait_for_root = true). `cancelled` ends the wait here, and so does
// `lost_after_ms` (JoinOptions).
Result<moecclUniqueId> meet_at_place(const UniqueId& id, uint32_t rank, Deadline deadline,
                                     const std::function<Status()>& cancelled, int64_t lost_after_ms = kLostMs);

}  // namespace moeccl::bootstrap
