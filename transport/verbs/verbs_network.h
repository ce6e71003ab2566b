// SPDX-License-Identifier: Apache-2.0
// InfiniBand and RoCE as a network: RDMA writes over reliable queue pairs, with libibverbs, which is opened at run
// time.
#pragma once

#include "src/base/env.h"
#include "transport/transport.h"

namespace moeccl::transport::verbs {

// Where the wire does not keep the order (MOECCL_IB_ADAPTIVE_ROUTING), the links do.
inline constexpr Capabilities kCapabilities = {.one_sided = true, .device_memory = true};
Probe probe();
Result<std::unique_ptr<Endpoint>> open(const NetworkOptions& options);

// Like probe() and open(), but with settings other than the process's. For tests and tools.
Probe probe_with(const Env& settings);
Result<std::unique_ptr<Endpoint>> open_with(const NetworkOptions& options, const Env& settings);

}  // namespace moeccl::transport::verbs
