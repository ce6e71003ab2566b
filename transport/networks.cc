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
    {"verbs", verbs::kCapabilities, verbs::probe, verbs::open},
    {"plugin", netplugin::kCapabilities, netplugin::probe, netplugin::open},
    {"tcp", tcp::kCapabilities, tcp::probe, tcp::open},
};

}  // namespace

std::string text_of(const Capabilities& capabilities) {
  std::string text;
  const auto add = [&](bool set, const char* what) {
    if (set) text += (text.empty() ? "" : ", ") + std::string(what);
  };
  add(capabilities.ordered, "keeps the order of puts");
  add(capabilities.views, "loads from and stores to the peer's memory");
  add(capabilities.reads, "reads the peer's memory");
  add(capabilities.one_sided, "needs no CPU of the receiver");
  add(capabilities.device_memory, "may reach CUDA memory");
  add(capabilities.needs_pump, "moves bytes by a thread of each rank");
  add(capabilities.encrypts, "can encrypt");
  return text;
}

std::span<const Network> networks() { return kNetworks; }

const Network* find_network(std::string_view name) {
  const auto at =
      std::find_if(std::begin(kNetworks), std::end(kNetworks), [&](const Network& n) { return name == n.name; });
  return at == std::end(kNetworks) ? nullptr : at;
}

}  // namespace moeccl::transport
