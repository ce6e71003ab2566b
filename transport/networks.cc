// SPDX-License-Identifier: Apache-2.0
// The networks between hosts, best first. A new one needs its own folder and a line here.
#include <algorithm>

#include "transport/netplugin/plugin_network.h"
#include "transport/tcp/tcp_network.h"
#include "transport/transport.h"
#include "transport/verbs/verbs_network.h"

namespace moeccl::transport {
namespace {

constexpr Network kNetworks[] = {
    {"verbs", verbs::kCapabilities, verbs::probe, verbs::open, verbs::check},
    {"plugin", netplugin::kCapabilities, netplugin::probe, netplugin::open},
    {"tcp", tcp::kCapabilities, tcp::probe, tcp::open},
};

}  // namespace

std::span<const Network> networks() { return kNetworks; }

const Network* find_network(std::string_view name) {
  const auto at =
      std::find_if(std::begin(kNetworks), std::end(kNetworks), [&](const Network& n) { return name == n.name; });
  return at == std::end(kNetworks) ? nullptr : at;
}

}  // namespace moeccl::transport
