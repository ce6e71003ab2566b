// SPDX-License-Identifier: Apache-2.0
#include "transport/netplugin/plugin_network.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "src/base/env.h"
#include "src/base/log.h"
#include "src/bootstrap/handshake.h"
#include "transport/common/presence.h"
#include "transport/common/uplink.h"
#include "transport/netplugin/connecting.h"
#include "transport/netplugin/plugin_engine.h"

namespace moeccl::transport::netplugin {
namespace {

// Used until they are measured, and where a plugin reports none: as over TCP, two messages per put and a context
// switch.
constexpr double kAlphaNs = 30'000;
constexpr double kPayload = 0.95;
constexpr uint64_t kUnknownMbit = 10'000;

class PluginEndpoint final : public Endpoint {
 public:
  PluginEndpoint(const NetworkOptions& options, std::shared_ptr<PluginUse> use, int memory_type)
      : options_(options),
        use_(std::move(use)),
        memory_type_(memory_type),
        connecting_(std::make_shared<Connecting>(use_, options)) {
    connecting_->own().pieces_only = memory_type != abi::kPtrHost;
  }

  Status listen() {
    presence_ = Presence::open(options_, env());
    connecting_->own().presence = presence_.address();
    return connecting_->listen();
  }
  Result<std::vector<std::byte>> offer() override { return connecting_->offer(); }
  std::vector<std::vector<std::byte>> rows() override { return connecting_->rows(); }

  Result<NetworkLinks> connect(const LocalMemory& own, std::span<const Region>,
                               std::span<const std::vector<std::byte>> offers) override {
    std::vector<std::string> presences;
    MOECCL_ASSIGN_OR_RETURN(const std::vector<double> uplinks, read_uplinks(offers, presences));
    MOECCL_ASSIGN_OR_RETURN(std::vector<PeerComms> peers, connecting_->connect(offers));
    connecting_ = nullptr;
    NetworkLinks made;
    made.links.resize(options_.n_ranks());
    size_t n_rails = 1;
    for (const PeerComms& p : peers) n_rails = std::max(n_rails, p.pairs.size() - 1);
    auto engine = PluginEngine::create(use_, peers.size(), n_rails);
    Status status = engine.ok() ? Status() : engine.status();
    PluginEngine* const moves = engine.ok() ? engine->get() : nullptr;
    if (engine.ok()) made.engine = std::move(*engine);  // ends before its links even when what follows fails
    for (PeerComms& p : peers) {
      const uint32_t other = p.rank;
      if (!status.ok()) {  // close those that come after a failure
        for (const PeerComms::Pair& c : p.pairs) {
          (void)use_->api().close_send(c.out);
          (void)use_->api().close_receive(c.in);
        }
        continue;
      }
      log(LogLevel::kInfo, "rank {} reaches rank {} through net plugin {} over {} rails", own.rank, other,
          use_->api().text(), p.pairs.size() - 1);
      Result<std::unique_ptr<PluginLink>> link =
          moves->add(own, std::move(p), memory_type_, pieces_only_.contains(other));
      if (link.ok()) {
        made.links[other] = std::move(*link);
      } else {
        status = std::move(link).status();
      }
    }
    MOECCL_TRY(std::move(status));
    moves->ask_after(std::move(presence_), Questions(RollCall::of(options_, presences)));
    MOECCL_TRY(moves->start());
    made.alpha_ns = kAlphaNs;
    made.bytes_per_ns = slowest_uplink(options_.host_of, uplinks);
    return made;
  }

 private:
  // Returns the uplink that each rank offers, and adds where each can be asked after.
  Result<std::vector<double>> read_uplinks(std::span<const std::vector<std::byte>> offers,
                                           std::vector<std::string>& presences) {
    std::vector<double> uplinks;
    for (uint32_t r = 0; r < options_.n_ranks(); ++r) {
      Offer o;
      if (!o.read(offers[r])) {
        return error(moecclRemoteError, "rank {} sent an offer of a net plugin that this MoECCL cannot read", r);
      }
      if (o.pieces_only) pieces_only_.emplace(r, true);
      presences.push_back(o.presence);
      uplinks.push_back(static_cast<double>(o.mbit_per_s > 0 ? o.mbit_per_s : kUnknownMbit) * kPayload / 8000);
    }
    return uplinks;
  }

  NetworkOptions options_;
  std::shared_ptr<PluginUse> use_;
  int memory_type_;
  Presence presence_;
  std::shared_ptr<Connecting> connecting_;
  std::map<uint32_t, bool> pieces_only_;
};

PluginChoice chosen(const std::string& name, uint64_t comm_id) {
  PluginChoice c;
  c.list = env().net_plugin;
  c.wanted = name;
  c.comm_id = comm_id;
  return c;
}

}  // namespace

Probe probe() {
  const std::string& net = env().net;
  constexpr std::string_view kPrefix = "plugin:";
  const std::string name = net.starts_with(kPrefix) ? net.substr(kPrefix.size()) : "";
  const Result<PluginUse> use = use_plugin(chosen(name, 0));
  if (!use.ok()) return {false, {}, use.status().message()};
  Probe p{true, use.value().api().text(), {}};
  for (const PluginUse::Device& d : use.value().devices()) {
    p.found += format("{}{}", &d == use.value().devices().data() ? ": " : ", ", d.is.name);
    if (d.is.mbit_per_s > 0) p.found += format(" ({:g} Gbit/s)", static_cast<double>(d.is.mbit_per_s) / 1e3);
  }
  return p;
}

Result<std::unique_ptr<Endpoint>> open_with(const NetworkOptions& options, const PluginChoice& choice,
                                            int memory_type) {
  MOECCL_ASSIGN_OR_RETURN(PluginUse use, use_plugin(choice));
  auto endpoint = std::make_unique<PluginEndpoint>(options, std::make_shared<PluginUse>(std::move(use)), memory_type);
  MOECCL_TRY(endpoint->listen());
  return std::unique_ptr<Endpoint>(std::move(endpoint));
}

Result<std::unique_ptr<Endpoint>> open(const NetworkOptions& options) {
  const bootstrap::Key derived = bootstrap::derive_key(options.key, "moeccl net plugin: communicator");
  uint64_t id = 0;
  std::memcpy(&id, derived.data(), sizeof(id));
  return open_with(options, chosen(options.plugin, id), abi::kPtrHost);
}

}  // namespace moeccl::transport::netplugin
