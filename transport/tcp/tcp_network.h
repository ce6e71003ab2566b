// SPDX-License-Identifier: Apache-2.0
// TCP as a network: sockets on the interfaces that this host offers, and an engine that moves their bytes.
#pragma once

#include "transport/transport.h"

namespace moeccl::transport::tcp {

inline constexpr Capabilities kCapabilities = {.needs_pump = true, .encrypts = true};
Probe probe();
Result<std::unique_ptr<Endpoint>> open(const NetworkOptions& options);

}  // namespace moeccl::transport::tcp
