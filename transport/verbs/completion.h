// SPDX-License-Identifier: Apache-2.0
// Explains a failed request to a person: which NIC, which address, what the device said, and where to look.
#pragma once

#include <string>

#include "src/driver/ibv_api.h"
#include "transport/verbs/rail.h"

namespace moeccl::transport::verbs {

struct FarEnd {
  uint32_t rank = 0;
  std::string where;          // "10.0.0.2 (mlx5_0:1)"
  std::string presence = {};  // "10.0.0.2:4711", see transport/common/presence.h; empty: none
};

// "mlx5_0:1 (10.0.0.1) to rank 2 at 10.0.0.2 (mlx5_1:1): transport retry counter exceeded (status 12, vendor 129): ..."
Status completion_error(const Rail& rail, const FarEnd& peer, int status, uint32_t vendor, int64_t now_ns);
// Returns what to look at, "" where the status says it all.
const char* hint_of(int status);

}  // namespace moeccl::transport::verbs
