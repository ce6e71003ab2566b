// SPDX-License-Identifier: Apache-2.0
// The links to ranks on other hosts, over a network that all ranks can use.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/unique_id.h"
#include "src/exec/fabric.h"
#include "src/plan/levels.h"
#include "src/world/config.h"
#include "src/world/hosts.h"
#include "transport/transport.h"

namespace moeccl::comm {

struct NetworkResult {
  const transport::Network* network = nullptr;  // for further connections between the same ranks
  std::string why;           // which ranks lack the networks before it in the list, and why; empty: none does
  plan::LinkCost node_link;  // the slowest host's uplink; the same on all ranks
  // How NICs reach Fabric::device_memory, the same on all ranks ("dma-buf"). If empty, they do not, and why_no_device
  // gives the reason.
  std::string device, why_no_device;
};

// Returns whether MOECCL_NET, which is "", a name of the list or "plugin:NAME", leaves this network in the choice.
bool wanted(const transport::Network& network);

// Returns the address where ranks of other hosts can meet this one, whichever network carries the data: "10.0.0.1",
// "[fe80::1]".
Result<std::string> meeting_address(const bootstrap::Session& session);

// Connects one rank to all ranks on other hosts, for the contents of `memory`. Collective call of all ranks with the
// same network; requires hosts.n() > 1.
Result<transport::NetworkLinks> connect_network_links(bootstrap::Session& session, const transport::Network& network,
                                                      const Hosts& hosts, const bootstrap::Key& key,
                                                      const Config& config, const transport::LocalMemory& memory,
                                                      std::span<const transport::Region> regions, Deadline deadline);

// Fills fabric.engine and the fabric.links of all ranks on other hosts; fabric.own must exist. Collective call of all
// ranks. `network` is the one to use, or null to choose one according to MOECCL_NET.
Result<NetworkResult> connect_hosts(bootstrap::Session& session, const transport::Network* network, const Hosts& hosts,
                                    const bootstrap::Key& key, const Config& config, exec::Fabric& fabric,
                                    Deadline deadline);

}  // namespace moeccl::comm
