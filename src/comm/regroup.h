// SPDX-License-Identifier: Apache-2.0
// New communicators of those ranks of one that are left.
#pragma once

#include <memory>
#include <span>

#include "src/comm/communicator.h"

namespace moeccl::comm {

// exclude: of the parent's ranks; empty: whichever are gone. Collective over those that stay; see moecclCommShrink.
Result<std::unique_ptr<Communicator>> shrink(Communicator& parent, std::span<const int> exclude,
                                             const moecclConfig_t* config, bool abort_first);

// Success, or which rank of the parent has ended.
Status all_live(Communicator& parent);

// The id with which some ranks of the parent call, by all of them: given null where a rank has none. Collective.
Result<moecclUniqueId> agree_on_id(Communicator& parent, const moecclUniqueId* given);

}  // namespace moeccl::comm
