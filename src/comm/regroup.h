// SPDX-License-Identifier: Apache-2.0
// New communicators from the remaining ranks of an existing one.
#pragma once

#include <memory>
#include <span>

#include "src/comm/communicator.h"

namespace moeccl::comm {

// `exclude` lists ranks of the parent; if empty, those that are gone are left out. Collective call of the ranks that
// stay; see moecclCommShrink.
Result<std::unique_ptr<Communicator>> shrink(Communicator& parent, std::span<const int> exclude,
                                             const moecclConfig_t* config, bool abort_first);

// Returns success, or a failure that names a rank of the parent that has ended.
Status all_live(Communicator& parent);

// Gives all ranks of the parent the id that some of them pass. `given` is null on ranks that have none. Collective
// call.
Result<moecclUniqueId> agree_on_id(Communicator& parent, const moecclUniqueId* given);

}  // namespace moeccl::comm
