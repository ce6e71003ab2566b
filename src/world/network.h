// SPDX-License-Identifier: Apache-2.0
// The ranks on other hosts: a network that all ranks can use is chosen, and links are made over it.
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
  const transport::Network* network = nullptr;  // for further connections of the same ranks
  std::string why;                              // why none of those before it in the list; empty: it is the first
  std::string address;                          // of this host towards the others: "10.0.0.1", "[fe80::1]"
  plan::LinkCost node_link;                     // the slowest host's uplink, the same on all ranks
  // How NICs reach Fabric::device_memory, the same on all ranks ("dma-buf"); empty: they do not, and why_no_device says
  // why.
  std::string device, why_no_device;
};

// Connections of one rank to all ranks on other hosts, for what `memory` holds. All ranks call it together, with the
// same network; hosts.n() > 1.
Result<transport::NetworkLinks> connect_network_links(bootstrap::Session& session, const transport::Network& network,
                                                      const Hosts& hosts, const bootstrap::Key& key,
                                                      const Config& config, const transport::LocalMemory& memory,
                                                      std::span<const transport::Region> regions, Deadline deadline);

// Fills fabric.engine and fabric.links of all ranks on other hosts; fabric.own is there. All ranks call it together.
// network: that to use, or null to choose one as MOECCL_NET says.
Result<NetworkResult> connect_hosts(bootstrap::Session& session, const transport::Network* network, const Hosts& hosts,
                                    const bootstrap::Key& key, const Config& config, exec::Fabric& fabric,
                                    Deadline deadline);

}  // namespace moeccl::comm
