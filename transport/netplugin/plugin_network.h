// SPDX-License-Identifier: Apache-2.0
// NCCL's net plugins as a network: uses the first of MOECCL_NET_PLUGIN that has devices (docs/plugins.md).
#pragma once

#include "transport/netplugin/loader.h"
#include "transport/transport.h"

namespace moeccl::transport::netplugin {

// The receiving side can take CUDA memory where the plugin can; puts from CUDA memory go through a bounce.
inline constexpr Capabilities kCapabilities = {.needs_pump = true};
Probe probe();
Result<std::unique_ptr<Endpoint>> open(const NetworkOptions& options);
// Like open(), with a given choice of plugin and a given kind of staging (abi::kPtr*). For tests.
Result<std::unique_ptr<Endpoint>> open_with(const NetworkOptions& options, const PluginChoice& choice, int memory_type);

}  // namespace moeccl::transport::netplugin
