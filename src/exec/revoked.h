// SPDX-License-Identifier: Apache-2.0
// Detects that a rank has revoked the communicator.
#pragma once

#include "src/exec/fabric.h"

namespace moeccl::exec {

// Returns Aborted, naming the rank, once a rank has revoked the communicator. Looks at one word of each peer.
Status check_revoked(const Fabric& fabric);

}  // namespace moeccl::exec
