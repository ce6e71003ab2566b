// SPDX-License-Identifier: Apache-2.0
// The last round of ranks that have met again, after which each knows that all are connected.
#pragma once

#include "src/base/clock.h"
#include "src/base/status.h"
#include "src/bootstrap/bootstrap.h"
#include "src/exec/fabric.h"

namespace moeccl::comm {

// Returns success when all ranks are connected. The rank that leads them may die or fall silent while it says so, and
// then only some have heard it. These say it on their boards, because they go on in the new communicator, and others
// that met again without them would be a second group.
Status know_all_connected(bootstrap::Session& session, exec::Fabric& fabric, Deadline deadline);

}  // namespace moeccl::comm
