// SPDX-License-Identifier: Apache-2.0
// The implementation of moecclMoeCreate, which layers with expert domains use too.
#pragma once

#include <memory>

#include "moeccl/moe.h"
#include "src/comm/communicator.h"
#include "src/routing/domains.h"

namespace moeccl::api {

// A rank that already refuses gives its reason, so that its peers hear it instead of waiting.
Status create_moe(moecclMoe_t* moe, moecclComm_t comm_handle, comm::Communicator& comm, const moecclMoeConfig_t* config,
                  std::shared_ptr<const algo::Domains> domains, const Status& refusal = {});

}  // namespace moeccl::api
