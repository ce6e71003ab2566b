// SPDX-License-Identifier: Apache-2.0
#include "src/world/network.h"

#include <algorithm>

#include "src/base/env.h"
#include "src/base/hash.h"
#include "src/base/log.h"
#include "src/base/wire.h"
#include "src/bootstrap/handshake.h"
#include "src/driver/cuda/peers.h"
#include "src/driver/interface.h"
#include "topology/assign.h"
#include "topology/discover.h"
#include "transport/common/rails.h"

namespace moeccl::comm {
namespace {

using transport::Endpoint;
using transport::Network;
using transport::NetworkLinks;
using transport::NetworkOptions;

constexpr int64_t kNewsMs = 200;
constexpr size_t kMaxWhy = 1000;    // limit in bytes for a sentence that is sent
constexpr size_t kNamedRanks = 4;   // in a sentence about some of the ranks
constexpr size_t kToldReasons = 4;  // why some ranks lack a network
constexpr std::string_view kPlugin = "plugin";

// Returns this host's address towards the meeting point. Over it, the rank has just reached another host; empty: that
// is not known.
std::string joined_at(const bootstrap::Session& session) {
  if (session.over_unix()) return {};
  const Result<driver::SocketAddress> joined = session.local_address();
  return joined.ok() && !joined->is_loopback() ? joined->host() : "";
}

NetworkOptions options_of(const bootstrap::Session& session, const Hosts& hosts, uint32_t rank,
                          const bootstrap::Key& key, const Config& config, Deadline deadline) {
  NetworkOptions o;
  o.rank = rank;
  o.host_of = hosts.host_of;
  o.key = bootstrap::derive_key(key, "moeccl links");
  o.timeout_ms = config.timeout_ms;
  o.watch = {session.news_fd(), session.cancelled()};
  o.deadline = deadline;
  o.encrypt = env().encrypt;
  // Names for parts of one machine are given where its own network is not known, too.
  const bool one_machine = !env().host_id.empty() && !hosts.share_network(rank, rank);
  for (uint32_t r = 0; r < o.n_ranks(); ++r) o.same_network.push_back(one_machine || hosts.share_network(rank, r));
  o.met_at = joined_at(session);
  // The NICs of the rank's GPU; a communicator may have any of a host's GPUs, so its position among the ranks says
  // less.
  const auto context = static_cast<driver::cuda::Context>(config.cuda_context);
  o.nearest = [at = hosts.index_of[rank], n = static_cast<uint32_t>(hosts.around(rank).size()),
               pci = driver::cuda::pci_address(context)](std::span<const std::string> devices) {
    static const topology::Graph nothing;
    const Result<topology::Discovery>& host = topology::discover_host();
    const topology::Graph& graph = host.ok() ? host->graph : nothing;
    std::vector<uint32_t> own = topology::devices_of_gpu(graph, devices, pci);
    return own.empty() ? topology::devices_of_rank(graph, devices, at, n) : own;
  };
  const std::string& wanted = env().net;
  if (wanted.starts_with(kPlugin) && wanted.size() > kPlugin.size()) o.plugin = wanted.substr(kPlugin.size() + 1);
  return o;
}

// NICs must reach the device memory of all ranks or of none, so that all ranks treat their peers alike. Otherwise
// returns the reason. Ranks whose host stages in host memory, and so have no `memory`, take part too.
Result<std::string> agree_on_device(bootstrap::Session& session, Endpoint& endpoint,
                                    const transport::DeviceMemory& memory, Deadline deadline) {
  const Result<std::string> own =
      memory.context != nullptr
          ? endpoint.register_device(memory)
          : error(moecclUnsupported, "the ranks of its host stage in host memory ({})", memory.why_none);
  Writer out;
  out.u8(own.ok() ? 1 : 0);
  out.string((own.ok() ? *own : own.status().message()).substr(0, kMaxWhy));
  MOECCL_ASSIGN_OR_RETURN(const auto words, session.all_gather(out.view(), deadline));
  std::string ways;
  for (uint32_t r = 0; r < words.size(); ++r) {
    Reader in(words[r]);
    const bool able = in.u8() == 1;
    const std::string text = in.string(kMaxWhy);
    if (!in.done()) return error(moecclRemoteError, "rank {} sent no readable answer about its GPU and NICs", r);
    if (!able) {
      endpoint.forget_device();
      return error(moecclUnsupported, "rank {}: {}", r, text);
    }
    if (ways.find(text) == std::string::npos) ways += (ways.empty() ? "" : " and ") + text;
  }
  return ways;
}

// Ranks may see different uplinks, and all must plan with the same one.
Status agree_on_uplink(bootstrap::Session& session, Deadline deadline, NetworkLinks* links) {
  Writer out;
  out.f64(links->bytes_per_ns);
  MOECCL_ASSIGN_OR_RETURN(const auto rates, session.all_gather(out.view(), deadline));
  double slowest = 0;
  for (uint32_t r = 0; r < rates.size(); ++r) {
    Reader in(rates[r]);
    const double rate = in.f64();
    if (!in.done()) return error(moecclRemoteError, "rank {} sent no readable rate of its uplink", r);
    if (rate > 0 && (slowest <= 0 || rate < slowest)) slowest = rate;
  }
  links->bytes_per_ns = slowest;
  return {};
}

Result<NetworkLinks> connect_endpoint(bootstrap::Session& session, Endpoint& endpoint,
                                      const transport::LocalMemory& memory, std::span<const transport::Region> regions,
                                      Deadline deadline) {
  MOECCL_TRY(endpoint.register_memory(memory, regions));
  MOECCL_ASSIGN_OR_RETURN(const std::vector<std::byte> mine, endpoint.offer());
  MOECCL_ASSIGN_OR_RETURN(auto offers, session.all_gather(mine, deadline));
  if (const std::vector<std::vector<std::byte>> to_each = endpoint.rows(); !to_each.empty()) {
    MOECCL_ASSIGN_OR_RETURN(const auto rows, session.all_to_all(to_each, deadline));
    for (size_t r = 0; r < offers.size(); ++r) offers[r].insert(offers[r].end(), rows[r].begin(), rows[r].end());
  }
  Result<NetworkLinks> links = endpoint.connect(memory, regions, offers);
  // A connection may break before the meeting point tells which rank caused it.
  if (!links.ok() && links.status().code() == moecclRemoteError) MOECCL_TRY(session.news(kNewsMs));
  MOECCL_TRY(links.status());
  MOECCL_TRY(agree_on_uplink(session, deadline, &*links));
  return links;
}

// What a rank says about one network.
struct Answer {
  enum Has : uint8_t { kUsable, kNotWanted, kRefused, kAbsent };  // refused: because of the value of a variable
  Has has = kAbsent;
  uint64_t why = 0;  // the hash of the reason, if it is not usable
};

// Returns all ranks' answers, by network and rank. `own`: whether this rank's variables are accepted.
Result<std::vector<std::vector<Answer>>> exchange(bootstrap::Session& session, Status own, std::span<const Answer> mine,
                                                  Deadline deadline) {
  Writer out;
  out.u32(static_cast<uint32_t>(own.code()));
  for (const Answer& a : mine) {
    out.u8(a.has);
    out.u64(a.why);
  }
  MOECCL_ASSIGN_OR_RETURN(const auto blobs, session.all_gather(out.view(), deadline));
  MOECCL_TRY(std::move(own));
  std::vector<std::vector<Answer>> answers(mine.size());
  for (uint32_t r = 0; r < blobs.size(); ++r) {
    Reader in(blobs[r]);
    const auto code = static_cast<moecclResult_t>(in.u32());
    bool known = true;
    for (std::vector<Answer>& of_ranks : answers) {
      const uint8_t has = in.u8();
      known = known && has <= Answer::kAbsent;
      of_ranks.push_back({static_cast<Answer::Has>(has), in.u64()});
    }
    if (!in.done() || !known)
      return error(moecclRemoteError, "rank {} sent a list of networks that this MoECCL cannot read", r);
    if (code != moecclSuccess)
      return error(moecclRemoteError, "rank {} has a variable with a value that is not accepted: see its error", r);
  }
  return answers;
}

// A network that not all ranks can use, and why.
struct Lack {
  struct Reason {
    uint64_t hash;
    std::vector<uint32_t> ranks;
    std::string text = {};
  };
  size_t network;
  std::vector<Reason> told = {};  // kToldReasons at most
  size_t untold = 0;              // ranks with other reasons

  Lack(size_t number, std::span<const Answer> of_ranks) : network(number) {
    for (uint32_t r = 0; r < of_ranks.size(); ++r) {
      if (of_ranks[r].has == Answer::kUsable) continue;
      auto at = std::find_if(told.begin(), told.end(), [&](const Reason& x) { return x.hash == of_ranks[r].why; });
      if (at == told.end() && told.size() == kToldReasons) {
        ++untold;
        continue;
      }
      if (at == told.end()) at = told.insert(at, {of_ranks[r].why, {}});
      at->ranks.push_back(r);
    }
  }

  // Names the ranks, with their hosts: "ranks 1 (b), 2 (b): the reason".
  std::string text(const Hosts& hosts) const {
    std::string all;
    for (const auto& [hash, ranks, why] : told) {
      std::string names = ranks.size() == hosts.host_of.size() ? "any rank" : ranks.size() == 1 ? "rank " : "ranks ";
      for (size_t i = 0; i < ranks.size() && ranks.size() < hosts.host_of.size(); ++i) {
        if (i == kNamedRanks) {
          names += format(" and {} more", ranks.size() - i);
          break;
        }
        names += format("{}{} ({})", i == 0 ? "" : ", ", ranks[i], hosts.names[hosts.host_of[ranks[i]]]);
      }
      all += format("{}{}: {}", all.empty() ? "" : ", on ", names, why);
    }
    return untold == 0 ? all : format("{}, and on {} more ranks", all, untold);
  }
};

// Each text is sent by the first rank that has it: those of all ranks would be long. `own`: this rank's reasons, by
// network.
Status exchange_reasons(bootstrap::Session& session, uint32_t rank, std::span<const std::string> own,
                        std::vector<Lack>& lacks, Deadline deadline) {
  if (lacks.empty()) return {};
  Writer out;
  for (const Lack& lack : lacks)
    for (const Lack::Reason& reason : lack.told)
      if (reason.ranks[0] == rank) out.string(std::string_view(own[lack.network]).substr(0, kMaxWhy));
  MOECCL_ASSIGN_OR_RETURN(const auto blobs, session.all_gather(out.view(), deadline));
  std::vector<Reader> texts(blobs.begin(), blobs.end());
  for (Lack& lack : lacks)
    for (Lack::Reason& reason : lack.told) reason.text = texts[reason.ranks[0]].string(kMaxWhy);
  for (uint32_t r = 0; r < texts.size(); ++r)
    if (!texts[r].done()) return error(moecclRemoteError, "rank {} did not say why it lacks a network", r);
  return {};
}

struct Chosen {
  const Network* network = nullptr;
  std::unique_ptr<Endpoint> endpoint;
  std::string why;
  bool warns = false;
};

// Opens the networks that this rank has, and chooses the first that all ranks have.
Result<Chosen> choose_network(bootstrap::Session& session, const NetworkOptions& options, const Hosts& hosts) {
  const std::span<const Network> all = transport::networks();
  std::vector<std::unique_ptr<Endpoint>> open(all.size());
  std::vector<Answer> mine(all.size());
  std::vector<std::string> whys(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    mine[i].has = Answer::kNotWanted;
    whys[i] = format("MOECCL_NET is \"{}\"", env().net);
    if (!wanted(all[i])) continue;
    mine[i].has = Answer::kAbsent;
    if (whys[i] = all[i].refused(options.encrypt); !whys[i].empty()) continue;
    const bool last = i + 1 == all.size();
    // The last resort is opened only if nothing else works; its failure is the communicator's.
    Status status = last ? Status() : contained([&]() -> Status {
      MOECCL_ASSIGN_OR_RETURN(open[i], all[i].open(options));
      return {};
    });
    const bool refused = status.code() == moecclInvalidArgument;
    mine[i].has = status.ok() ? Answer::kUsable : refused ? Answer::kRefused : Answer::kAbsent;
    whys[i] = status.message();
  }
  for (size_t i = 0; i < all.size(); ++i) mine[i].why = hash_string(whys[i]);
  MOECCL_ASSIGN_OR_RETURN(const auto answers, exchange(session, {}, mine, options.deadline));
  Chosen chosen;
  std::vector<Lack> lacks;
  for (size_t i = 0; i < all.size() && chosen.network == nullptr; ++i) {
    const std::vector<Answer>& of_ranks = answers[i];
    const auto any = [&](Answer::Has has) {
      return std::any_of(of_ranks.begin(), of_ranks.end(), [&](const Answer& a) { return a.has == has; });
    };
    const bool usable = any(Answer::kUsable), refused = any(Answer::kRefused), absent = any(Answer::kAbsent);
    if (usable && !refused && !absent && !any(Answer::kNotWanted)) {
      chosen.network = &all[i];
      chosen.endpoint = std::move(open[i]);
    } else if (usable || refused || absent) {  // otherwise no rank wants it
      lacks.emplace_back(i, of_ranks);
      chosen.warns = chosen.warns || usable || refused;
    }
  }
  MOECCL_TRY(exchange_reasons(session, options.rank, whys, lacks, options.deadline));
  for (const Lack& lack : lacks)
    chosen.why += format("{}no {} on {}", chosen.why.empty() ? "" : "; ", all[lack.network].name, lack.text(hosts));
  if (chosen.network != nullptr) return chosen;
  return error(moecclUnsupported, "MOECCL_NET is \"{}\", but {}: unset it to use what all ranks have", env().net,
               chosen.why.empty() ? "the ranks have no such network in common" : chosen.why);
}

}  // namespace

bool wanted(const Network& network) {
  const std::string& text = env().net;
  return text.empty() || text == network.name || (text.starts_with("plugin:") && network.name == kPlugin);
}

// The first interface may be a bridge that no other host sees.
Result<std::string> meeting_address(const bootstrap::Session& session) {
  if (env().socket_ifname.empty()) {
    if (std::string joined = joined_at(session); !joined.empty()) return joined;
  }
  MOECCL_ASSIGN_OR_RETURN(const std::vector<driver::Interface> interfaces, driver::interfaces());
  MOECCL_ASSIGN_OR_RETURN(const auto nics, transport::choose_nics(interfaces, env().socket_ifname, joined_at(session)));
  return nics[0].address.host();
}

Result<NetworkLinks> connect_network_links(bootstrap::Session& session, const Network& network, const Hosts& hosts,
                                           const bootstrap::Key& key, const Config& config,
                                           const transport::LocalMemory& memory,
                                           std::span<const transport::Region> regions, Deadline deadline) {
  MOECCL_ASSIGN_OR_RETURN(const auto endpoint,
                          network.open(options_of(session, hosts, memory.rank, key, config, deadline)));
  return connect_endpoint(session, *endpoint, memory, regions, deadline);
}

Result<NetworkResult> connect_hosts(bootstrap::Session& session, const Network* network, const Hosts& hosts,
                                    const bootstrap::Key& key, const Config& config, exec::Fabric& fabric,
                                    Deadline deadline) {
  transport::LocalMemory memory = fabric.own->memory(fabric.rank);
  memory.arrivals = fabric.arrivals;
  NetworkOptions options = options_of(session, hosts, fabric.rank, key, config, deadline);
  options.memory_bytes = memory.staging_bytes;
  options.wants_arrivals = memory.arrivals != nullptr;
  Chosen chosen;
  if (network == nullptr) {
    MOECCL_ASSIGN_OR_RETURN(chosen, choose_network(session, options, hosts));
    network = chosen.network;
    // What all ranks know need not be said by all of them.
    log(chosen.warns && fabric.rank == 0 ? LogLevel::kWarn : LogLevel::kInfo, "rank {}: network {} between hosts{}{}",
        fabric.rank, network->name, chosen.why.empty() ? "" : "; ", chosen.why);
  }
  if (chosen.endpoint == nullptr) {
    MOECCL_ASSIGN_OR_RETURN(chosen.endpoint, network->open(options));
  }
  NetworkResult result{network, std::move(chosen.why), {}, {}, {}};
  if (fabric.cuda && network->can.device_memory) {
    Result<std::string> ways = agree_on_device(session, *chosen.endpoint, fabric.device_memory, deadline);
    if (ways.status().code() == moecclUnsupported) {
      result.why_no_device = ways.status().message();
    } else {
      MOECCL_ASSIGN_OR_RETURN(result.device, std::move(ways));
      memory.arrivals = nullptr;  // data that lands in device memory must not be copied
    }
  }
  std::vector<transport::Region> regions;
  if (fabric.heap != nullptr) {
    const bool shrinks = fabric.shared_heap != nullptr;
    regions.push_back({fabric.heap, fabric.heap_bytes, shrinks ? &fabric.shared_heap->generation() : nullptr});
  }
  MOECCL_ASSIGN_OR_RETURN(NetworkLinks wires, connect_endpoint(session, *chosen.endpoint, memory, regions, deadline));
  for (uint32_t r = 0; r < fabric.n_ranks; ++r)
    if (wires.links[r] != nullptr) fabric.links[r] = std::move(wires.links[r]);
  fabric.engine = std::move(wires.engine);
  result.node_link = {wires.alpha_ns, wires.bytes_per_ns};
  return result;
}

}  // namespace moeccl::comm
