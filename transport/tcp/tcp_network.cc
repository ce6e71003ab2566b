// SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/tcp_network.h"

#include <map>
#include <set>
#include <string>

#include "src/base/env.h"
#include "src/base/log.h"
#include "src/driver/interface.h"
#include "transport/tcp/mesh.h"
#include "transport/tcp/tcp_engine.h"

namespace moeccl::transport::tcp {
namespace {

// Used until they are measured: a small message between two Linux hosts takes some 25 us, and TCP carries 95.5 % of the
// line's rate in frames of 1500 bytes (docs/performance-networks.md).
constexpr double kAlphaNs = 25'000;
constexpr double kPayload = 0.955;

Result<std::vector<Nic>> own_nics(const std::string& met_at) {
  MOECCL_ASSIGN_OR_RETURN(const std::vector<driver::Interface> interfaces, driver::interfaces());
  return choose_nics(interfaces, env().socket_ifname, met_at);
}

class TcpEndpoint final : public Endpoint {
 public:
  TcpEndpoint(const NetworkOptions& options, std::unique_ptr<Mesh> mesh) : options_(options), mesh_(std::move(mesh)) {}

  Result<std::vector<std::byte>> offer() override {
    Writer out;
    write_nics(mesh_->nics(), out);
    const auto bytes = out.view();
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  }

  Result<NetworkLinks> connect(const LocalMemory& own, std::span<const Region>,
                               std::span<const std::vector<std::byte>> offers) override {
    std::map<uint32_t, std::vector<Nic>> others;
    for (uint32_t r = 0; r < options_.n_ranks(); ++r) {
      Reader in(offers[r]);
      std::vector<Nic> nics = read_nics(in);
      if (!in.done() || nics.empty()) {
        return error(moecclRemoteError, "rank {} sent a list of interfaces that this MoECCL cannot read", r);
      }
      if (options_.remote(r)) others.emplace(r, std::move(nics));
    }
    MOECCL_ASSIGN_OR_RETURN(std::vector<TcpPeer> peers, mesh_->connect(others));
    MOECCL_ASSIGN_OR_RETURN(auto engine, TcpEngine::create());
    TcpEngine& moves = *engine;
    NetworkLinks made;
    made.engine = std::move(engine);  // ends before its links even when what follows fails
    made.links.resize(options_.n_ranks());
    // A host's uplink is the sum of its rails. This rank knows those that it has connected itself.
    int64_t slowest = 0;
    for (TcpPeer& p : peers) {
      const uint32_t other = p.rank;
      if (p.mbit_per_s > 0 && (slowest == 0 || p.mbit_per_s < slowest)) slowest = p.mbit_per_s;
      const bool encrypted = p.cipher != Cipher::kNone;
      log(LogLevel::kInfo, "rank {} reaches rank {} at {} over {} TCP connections{}{}", own.rank, other, p.where,
          p.streams.size(), encrypted ? ", encrypted with " : "", encrypted ? cipher_name(p.cipher) : "");
      MOECCL_ASSIGN_OR_RETURN(made.links[other], moves.add(own, std::move(p)));
    }
    MOECCL_TRY(moves.start());
    made.alpha_ns = kAlphaNs;
    made.bytes_per_ns = static_cast<double>(slowest) * kPayload / 8000;
    return made;
  }

 private:
  NetworkOptions options_;
  std::unique_ptr<Mesh> mesh_;
};

}  // namespace

Probe probe() {
  const Result<std::vector<Nic>> nics = own_nics({});
  if (!nics.ok()) return {false, {}, nics.status().message()};
  Probe p{true, {}, {}};
  std::set<std::string> listed;  // an interface may have an address of each family
  for (const Nic& n : *nics) {
    if (!listed.insert(n.name).second) continue;
    const std::string rate = n.mbit_per_s > 0 ? format("{:g} Gbit/s", static_cast<double>(n.mbit_per_s) / 1e3)
                                              : std::string("rate not known");
    p.found += format("{}{} ({})", p.found.empty() ? "" : ", ", n.name, rate);
  }
  if (env().encrypt) p.found += format("; encrypts with {}", cipher_name(best_cipher()));
  return p;
}

Result<std::unique_ptr<Endpoint>> open(const NetworkOptions& options) {
  MeshOptions mesh;
  mesh.rank = options.rank;
  mesh.n_ranks = options.n_ranks();
  mesh.key = options.key;
  mesh.lost_after_ms = options.timeout_ms;
  mesh.streams_per_rail = env().socket_streams;
  mesh.congestion = env().socket_congestion;
  mesh.ports = env().port_range;
  mesh.one_machine = options.same_network;
  if (options.encrypt) mesh.cipher = best_cipher();
  mesh.watch = options.watch;
  mesh.deadline = options.deadline;
  MOECCL_ASSIGN_OR_RETURN(std::vector<Nic> chosen, own_nics(options.met_at));
  MOECCL_ASSIGN_OR_RETURN(auto listening, Mesh::listen(mesh, std::move(chosen)));
  return std::unique_ptr<Endpoint>(std::make_unique<TcpEndpoint>(options, std::move(listening)));
}

}  // namespace moeccl::transport::tcp
