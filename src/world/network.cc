#include "src/world/network.h"

#include <algorithm>
#include <map>

#include "src/base/env.h"
#include "src/base/log.h"
#include "src/bootstrap/handshake.h"
#include "src/driver/interface.h"
#include "transport/tcp/mesh.h"
#include "transport/tcp/tcp_engine.h"

namespace moeccl::comm {
namespace {

using transport::tcp::Nic;

// Until somebody measures: a small message between two Linux hosts takes some 25 us, and TCP carries 95.5 % of the
// line's rate in frames of 1500 bytes (docs/tcp.md). An interface that does not know its rate counts as 10 Gbit/s.
constexpr double kAlphaNs = 25'000;
constexpr double kPayload = 0.955;
constexpr int64_t kUnknownMbit = 10'000;
constexpr int64_t kNewsMs = 200;

std::string without_port(const driver::SocketAddress& a) {
  const std::string text = a.str();
  return text.substr(0, text.rfind(':'));
}

// A host's uplink is the sum of its interfaces; of unequal hosts the slowest counts.
plan::LinkCost node_link(const Hosts& hosts, const std::vector<std::vector<Nic>>& nics) {
  int64_t slowest = 0;
  for (const auto& members : hosts.members) {
    int64_t rate = 0;
    for (const Nic& n : nics[members[0]]) rate += n.mbit_per_s;
    if (rate == 0) rate = kUnknownMbit;
    slowest = slowest == 0 ? rate : std::min(slowest, rate);
  }
  return {kAlphaNs, static_cast<double>(slowest) * kPayload / 8000};
}

}  // namespace

Result<NetworkLinks> connect_network_links(bootstrap::Session& session, const Hosts& hosts, const bootstrap::Key& key,
                                           const Config& config, const transport::LocalMemory& memory,
                                           Deadline deadline) {
  const uint32_t rank = memory.rank, n_ranks = static_cast<uint32_t>(hosts.host_of.size());
  MOECCL_ASSIGN_OR_RETURN(const std::vector<driver::Interface> interfaces, driver::interfaces());
  MOECCL_ASSIGN_OR_RETURN(std::vector<Nic> chosen, transport::tcp::choose_nics(interfaces, env().socket_ifname));
  transport::tcp::MeshOptions options;
  options.rank = rank;
  options.n_ranks = n_ranks;
  options.key = bootstrap::derive_key(key, "moeccl links");
  options.lost_after_ms = config.timeout_ms;
  options.streams_per_rail = env().socket_streams;
  options.congestion = env().socket_congestion;
  options.one_machine = !env().host_id.empty();
  options.news = session.news_fd();
  options.deadline = deadline;
  MOECCL_ASSIGN_OR_RETURN(const auto mesh, transport::tcp::Mesh::listen(options, std::move(chosen)));
  Writer mine;
  transport::tcp::write_nics(mesh->nics(), mine);
  MOECCL_ASSIGN_OR_RETURN(const auto blobs, session.all_gather(mine.view(), deadline));
  std::vector<std::vector<Nic>> nics;
  std::map<uint32_t, std::vector<Nic>> others;
  for (uint32_t r = 0; r < n_ranks; ++r) {
    Reader in(blobs[r]);
    nics.push_back(transport::tcp::read_nics(in));
    if (!in.done() || nics.back().empty()) {
      return error(moecclRemoteError, "rank {} sent a list of interfaces that this MoECCL cannot read", r);
    }
    if (!hosts.together(r, rank)) others.emplace(r, nics.back());
  }
  Result<std::vector<transport::tcp::TcpPeer>> connected = mesh->connect(others);
  if (!connected.ok()) {
    // A connection breaks before the meeting point says whose fault it is.
    if (connected.status().code() == moecclRemoteError) MOECCL_TRY(session.news(kNewsMs));
    return std::move(connected).status();
  }
  std::vector<transport::tcp::TcpPeer> peers = std::move(*connected);
  NetworkLinks wires;
  wires.memory = memory;
  MOECCL_ASSIGN_OR_RETURN(auto made, transport::tcp::TcpEngine::create());
  auto* const engine = made.get();
  wires.engine = std::move(made);  // also when what follows fails it ends before its links
  wires.links.resize(n_ranks);
  for (transport::tcp::TcpPeer& p : peers) {
    const uint32_t other = p.rank;
    log(LogLevel::kInfo, "rank {} reaches rank {} at {} over {} TCP connections", rank, other, p.where,
        p.streams.size());
    MOECCL_ASSIGN_OR_RETURN(wires.links[other], engine->add(memory, std::move(p)));
  }
  MOECCL_TRY(engine->start());
  wires.result = NetworkResult{without_port(mesh->nics()[0].address), node_link(hosts, nics)};
  return wires;
}

Result<NetworkResult> connect_hosts(bootstrap::Session& session, const Hosts& hosts, const bootstrap::Key& key,
                                    const Config& config, exec::Fabric& fabric, Deadline deadline) {
  transport::LocalMemory memory = fabric.own->memory(fabric.rank);
  memory.arrivals = fabric.arrivals;
  MOECCL_ASSIGN_OR_RETURN(NetworkLinks wires, connect_network_links(session, hosts, key, config, memory, deadline));
  for (uint32_t r = 0; r < fabric.n_ranks; ++r)
    if (wires.links[r] != nullptr) fabric.links[r] = std::move(wires.links[r]);
  fabric.engine = std::move(wires.engine);
  return wires.result;
}

}  // namespace moeccl::comm
