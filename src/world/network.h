// The ranks on other hosts: interfaces chosen, connections made, links over them.
#pragma once

#include <memory>

#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/unique_id.h"
#include "src/exec/fabric.h"
#include "src/plan/levels.h"
#include "src/world/config.h"
#include "src/world/hosts.h"

namespace moeccl::comm {

struct NetworkResult {
  std::string address;       // of this host towards the others: "10.0.0.1", "[fe80::1]"
  plan::LinkCost node_link;  // the slowest host's uplink, the same on all ranks
};

// Connections of one rank to all ranks on other hosts, for what `memory` holds.
struct NetworkLinks {
  transport::LocalMemory memory;
  std::vector<std::unique_ptr<transport::Link>> links;  // [n_ranks], null for ranks of this host
  std::unique_ptr<transport::Engine> engine;            // behind the links, so that it ends before them
  NetworkResult result;
};
// All ranks call it together; hosts.n() > 1.
Result<NetworkLinks> connect_network_links(bootstrap::Session& session, const Hosts& hosts, const bootstrap::Key& key,
                                           const Config& config, const transport::LocalMemory& memory,
                                           Deadline deadline);

// Fills fabric.engine and fabric.links of all ranks on other hosts; fabric.own is there. All ranks call it together.
Result<NetworkResult> connect_hosts(bootstrap::Session& session, const Hosts& hosts, const bootstrap::Key& key,
                                    const Config& config, exec::Fabric& fabric, Deadline deadline);

}  // namespace moeccl::comm
