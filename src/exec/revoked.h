// SPDX-License-Identifier: Apache-2.0
// Whether a communicator was revoked, by whichever of its ranks.
#pragma once

#include "src/exec/fabric.h"

namespace moeccl::exec {

// Aborted, naming the rank, once one has; looks at a word of each peer.
Status check_revoked(const Fabric& fabric);

}  // namespace moeccl::exec
