// SPDX-License-Identifier: Apache-2.0
// NCCL's net plugins as a network: the first of MOECCL_NET_PLUGIN that has devices (docs/plugins.md).
#pragma once

#include "transport/netplugin/loader.h"
#include "transport/transport.h"

namespace moeccl::transport::netplugin {

// CUDA memory: the receiving side can take it where the plugin can; puts from it go through a bounce.
inline constexpr Capabilities kCapabilities = {.needs_pump = true};
Probe probe();
Result<std::unique_ptr<Endpoint>> open(const NetworkOptions& options);
// The same with a given choice of plugin, and staging of a given kind (abi::kPtr*): for tests.
Result<std::unique_ptr<Endpoint>> open_with(const NetworkOptions& options, const PluginChoice& choice, int memory_type);

}  // namespace moeccl::transport::netplugin
