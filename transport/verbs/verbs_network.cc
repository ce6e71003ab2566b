// SPDX-License-Identifier: Apache-2.0
#include "transport/verbs/verbs_network.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <string>

#include "src/base/log.h"
#include "transport/common/presence.h"
#include "transport/common/rows.h"
#include "transport/common/uplink.h"
#include "transport/verbs/offer.h"
#include "transport/verbs/verbs_engine.h"

namespace moeccl::transport::verbs {
namespace {

// Used until they are measured: a small write between two hosts takes some 3 us, and RoCE v2 carries 4096 of 4166
// bytes.
constexpr double kAlphaNs = 3'000;
constexpr double kPayload = 0.97;
constexpr double kUnknownGbit = 10;

// Requests under way on a queue pair. They are fewer where a rail's completion queue could not hold those of all peers.
constexpr uint32_t kDepth = 128, kLeastDepth = 24;
// The words of a board are sent inline (see VerbsLink::tell_board()). A NIC with less room for them is not used.
constexpr uint32_t kInlineBytes = 128, kLeastInline = 32;

// Up to this size a put is copied and done at once: the copy takes about as long as the round trip for which a put from
// registered memory is held open. Calculated for a NIC, because none was available for measuring (docs/verbs.md).
constexpr size_t kCopyBytes = 16 << 10;

// The memory for the rings of all links together. More than 1024 links exceed it, because a ring holds two pieces of a
// copied put: one is sent while the next one is copied.
constexpr size_t kRingBudget = 64 << 20, kLeastRing = 64 << 10, kMostRing = 4 << 20;

size_t ring_bytes_for(size_t n_peers) {
  return std::clamp(kRingBudget / std::max<size_t>(1, n_peers), kLeastRing, kMostRing) / 4096 * 4096;
}

// Tries whether so many bytes may be locked on each rail, before the ranks agree on this network.
Status may_lock(std::span<const std::unique_ptr<Rail>> rails, size_t bytes) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur / 4 > bytes * rails.size()) return {};
  MOECCL_ASSIGN_OR_RETURN(const driver::Mapping memory, driver::private_memory(bytes));
  return Region::make(rails, memory.data(), memory.size(), driver::ibv_abi::kLocalWrite).status();
}

bool keeps_order(const Env& settings, std::span<const std::unique_ptr<Rail>> rails) {
  if (settings.ib_adaptive_routing >= 0) return settings.ib_adaptive_routing == 0;
  // InfiniBand switches route adaptively unless they are told not to, RoCE switches only where that has been set up.
  return std::all_of(rails.begin(), rails.end(), [](const auto& r) { return r->info().ethernet; });
}

struct Opened {
  std::unique_ptr<driver::IbvApi> api;
  std::vector<FoundRail> rails;
  std::unique_ptr<DeviceList> list;
};

Result<Opened> look(const Env& settings) {
  if (!settings.ib_refused.empty()) return error(moecclInvalidArgument, "{}", settings.ib_refused);
  if (settings.ib_library == "none")
    return error(moecclUnsupported, "MOECCL_IB_LIBRARY is none, or NCCL_IB_DISABLE is 1");
  MOECCL_ASSIGN_OR_RETURN(driver::IbvApi api, driver::IbvApi::load(settings.ib_library));
  // On kernels before 5.9, a write after a fork would go to a copy of a registered page, and the device would send the
  // old one. Elsewhere this does nothing.
  static const int forks = api.fork_init != nullptr ? api.fork_init() : 0;
  if (forks != 0) log(LogLevel::kInfo, "ibv_fork_init returned {}: do not fork while ranks use RDMA", forks);
  Opened o;
  o.api = std::make_unique<driver::IbvApi>(api);
  MOECCL_ASSIGN_OR_RETURN(DeviceList list, DeviceList::get(*o.api));
  o.list = std::make_unique<DeviceList>(std::move(list));
  MOECCL_ASSIGN_OR_RETURN(std::vector<FoundRail> found, o.list->look(settings));
  MOECCL_ASSIGN_OR_RETURN(o.rails, usable_rails(std::move(found)));
  return o;
}

std::string text_of(const RailInfo& r) {
  return format("{} {} {}, {} Gbit/s, MTU {}{}", r.name(), r.ethernet ? verbs::text_of(r.gid.kind) : "InfiniBand",
                verbs::text_of(r.gid.gid), r.gbit > 0 ? format("{:g}", r.gbit) : "unknown", 128u << r.mtu_code,
                r.dmabuf ? ", dma-buf" : "");
}

class VerbsEndpoint final : public Endpoint {
 public:
  VerbsEndpoint(const NetworkOptions& options, const Env& settings) : options_(options), settings_(settings) {}

  Status open() {
    MOECCL_ASSIGN_OR_RETURN(Opened opened, look(settings_));
    parts_.api = std::move(opened.api);
    parts_.presence = Presence::open(options_, settings_);
    std::vector<FoundRail> own = own_rails(std::move(opened.rails));
    own.resize(std::min<size_t>(own.size(), kMaxRails));
    for (const FoundRail& found : own) {
      MOECCL_ASSIGN_OR_RETURN(auto rail, Rail::open(*parts_.api, found));
      parts_.rails.push_back(std::move(rail));
    }
    size_t n_peers = 0;
    for (uint32_t r = 0; r < options_.n_ranks(); ++r) n_peers += options_.remote(r) ? 1 : 0;
    n_queues_ = std::min<uint32_t>(settings_.ib_queue_pairs, kMaxLanes / static_cast<uint32_t>(parts_.rails.size()));
    const size_t lanes = parts_.rails.size() * n_queues_;
    if (!rows_fit(options_.n_ranks(), n_peers * lanes * kAddressBytes)) {
      return error(
          moecclUnsupported,
          "the addresses of {} ranks with {} queue pairs to each peer are more than their meeting point passes "
          "on: lower MOECCL_IB_QPS_PER_CONNECTION ({}), name fewer NICs in MOECCL_IB_HCA ({} are used), or set "
          "MOECCL_NET=tcp",
          options_.n_ranks(), lanes, n_queues_, parts_.rails.size());
    }
    const size_t signals = options_.n_ranks() * kSigsPerPeer * sizeof(SignalLine);
    MOECCL_TRY(may_lock(parts_.rails, options_.memory_bytes + signals + copies_bytes() +
                                          n_peers * ring_bytes_for(n_peers) +
                                          (options_.wants_arrivals ? records_bytes() : 0)));
    return make_queues();
  }

  Status register_memory(const LocalMemory& own, std::span<const transport::Region> regions) override;
  Result<std::string> register_device(const DeviceMemory& memory) override;
  void forget_device() override { parts_.device = nullptr; }
  Result<std::vector<std::byte>> offer() override;
  std::vector<std::vector<std::byte>> rows() override { return rows_.sent_apart(); }
  Result<NetworkLinks> connect(const LocalMemory& own, std::span<const transport::Region>,
                               std::span<const std::vector<std::byte>> offers) override;

 private:
  enum Own : size_t { kStaging, kSignals, kCopies, kRings, kRecords };  // no kRecords where they are not wanted

  Status make_queues();
  std::vector<FoundRail> own_rails(std::vector<FoundRail> found) const;
  Status add_region(std::byte* base, size_t bytes, unsigned access) {
    MOECCL_ASSIGN_OR_RETURN(auto region, Region::make(parts_.rails, base, bytes, access));
    parts_.own.push_back(std::move(region));
    return {};
  }
  Result<std::vector<Lane>> connect_lanes(uint32_t peer, const Offer& theirs);
  PeerCopy* copies() const { return reinterpret_cast<PeerCopy*>(memory_->data()); }
  size_t copies_bytes() const { return (options_.n_ranks() * sizeof(PeerCopy) + 4095) / 4096 * 4096; }
  size_t records_bytes() const { return options_.n_ranks() * kPutRecords * sizeof(PutRecord); }

  NetworkOptions options_;
  Env settings_;
  uint32_t n_queues_ = 1;
  size_t ring_bytes_ = 0, n_peers_ = 0;
  const PutRecord* records_ = nullptr;  // null: not wanted
  // Copies of the peers' words, then rings, then records of the peers' puts; outlives its readers.
  std::shared_ptr<driver::Mapping> memory_;
  EngineParts parts_;  // before the queue pairs, so that those end first
  Offer mine_;
  std::vector<std::unique_ptr<QueuePair>> queues_;  // [n_ranks][rails][n_queues]; null for ranks of this host
  Rows rows_;                                       // their addresses
};

// Returns the NICs near this rank, nearest first. NICs that the user names are used as they are.
std::vector<FoundRail> VerbsEndpoint::own_rails(std::vector<FoundRail> found) const {
  if (!settings_.ib_hca.empty() || !options_.nearest) return found;
  std::vector<std::string> devices;
  for (const FoundRail& r : found)
    if (devices.empty() || devices.back() != r.info.device) devices.push_back(r.info.device);
  std::vector<FoundRail> own;
  for (const uint32_t d : options_.nearest(devices)) {
    for (const FoundRail& r : found)
      if (d < devices.size() && r.info.device == devices[d]) own.push_back(r);
  }
  return own.empty() ? found : own;
}

Status VerbsEndpoint::make_queues() {
  for (uint32_t r = 0; r < options_.n_ranks(); ++r) n_peers_ += options_.remote(r) ? 1 : 0;
  const size_t per_rail = std::max<size_t>(1, n_peers_ * n_queues_);
  uint32_t depth = kDepth;
  for (const auto& rail : parts_.rails) {
    MOECCL_TRY(rail->make_queue(static_cast<uint32_t>(std::min<size_t>(per_rail * kDepth + kFlushDepth, 1u << 24))));
    const uint32_t entries = rail->queue_entries() - std::min(rail->queue_entries(), kFlushDepth);
    depth = std::min(depth, static_cast<uint32_t>(entries / per_rail));
  }
  if (depth < kLeastDepth) {
    return error(moecclUnsupported, "{} has completion queues too short for {} queue pairs",
                 parts_.rails[0]->info().name(), per_rail);
  }
  uint32_t id = 0;
  for (uint32_t r = 0; r < options_.n_ranks(); ++r) {
    for (const auto& rail : parts_.rails) {
      for (uint32_t q = 0; q < n_queues_; ++q) {
        if (!options_.remote(r)) {
          queues_.push_back(nullptr);
          continue;
        }
        MOECCL_ASSIGN_OR_RETURN(auto queue, QueuePair::make(*rail, {depth, kInlineBytes, id++}));
        if (queue->inline_bytes() < kLeastInline) {
          return error(moecclUnsupported, "{} takes {} bytes of inline data: {} are needed", rail->info().name(),
                       queue->inline_bytes(), kLeastInline);
        }
        queues_.push_back(std::move(queue));
      }
    }
  }
  keep_queues_from_children();
  return {};
}

Status VerbsEndpoint::register_memory(const LocalMemory& own, std::span<const transport::Region> regions) {
  using namespace driver::ibv_abi;
  ring_bytes_ = ring_bytes_for(n_peers_);
  const size_t rings_bytes = n_peers_ * ring_bytes_, behind = copies_bytes() + rings_bytes;
  const size_t records = own.arrivals != nullptr ? records_bytes() : 0;
  MOECCL_ASSIGN_OR_RETURN(driver::Mapping memory, driver::private_memory(behind + records));
  memory_ = std::make_shared<driver::Mapping>(std::move(memory));
  parts_.memory_bytes = memory_->size();
  // What announces bytes is written in order; the bytes themselves may arrive in any order.
  constexpr unsigned kStrict = kLocalWrite | kRemoteWrite;
  MOECCL_TRY(add_region(own.staging, own.staging_bytes, kStrict | kRelaxedOrdering));
  const size_t signals = options_.n_ranks() * kSigsPerPeer * sizeof(SignalLine);
  MOECCL_TRY(add_region(reinterpret_cast<std::byte*>(own.signals), signals, kStrict));
  MOECCL_TRY(add_region(memory_->data(), copies_bytes(), kStrict));
  MOECCL_TRY(add_region(memory_->data() + copies_bytes(), rings_bytes, kLocalWrite));
  if (records > 0) {
    records_ = reinterpret_cast<const PutRecord*>(memory_->data() + behind);
    MOECCL_TRY(add_region(memory_->data() + behind, records, kStrict));
  }
  parts_.regions = std::make_unique<Regions>(parts_.rails);
  for (const transport::Region& r : regions) parts_.regions->add_heap(r);
  mine_.memory = {reinterpret_cast<uint64_t>(own.staging), own.staging_bytes, reinterpret_cast<uint64_t>(own.signals),
                  reinterpret_cast<uint64_t>(memory_->data()), reinterpret_cast<uint64_t>(records_)};
  return {};
}

Result<std::string> VerbsEndpoint::register_device(const DeviceMemory& memory) {
  MOECCL_ASSIGN_OR_RETURN(parts_.device, DeviceRegions::make(parts_.rails, memory));
  MOECCL_TRY(parts_.device->connect_flush(settings_, timeout_code(settings_, options_.timeout_ms),
                                          static_cast<uint32_t>(queues_.size())));
  keep_queues_from_children();
  return std::string(parts_.device->way());
}

Result<std::vector<std::byte>> VerbsEndpoint::offer() {
  if (parts_.device != nullptr) {
    mine_.memory.device = parts_.device->landing();
    mine_.memory.device_bytes = parts_.device->landing_bytes();
  }
  mine_.n_queues = n_queues_;
  mine_.presence = parts_.presence.address();
  mine_.ordered = keeps_order(settings_, parts_.rails);
  for (size_t i = 0; i < parts_.rails.size(); ++i) {
    const auto key = [&](Own which) { return parts_.own[which]->rkey(i); };
    PeerKeys keys{key(kStaging), key(kSignals), key(kCopies), records_ != nullptr ? key(kRecords) : 0, {}};
    if (parts_.device != nullptr) keys.device = parts_.device->landing_keys(i);
    mine_.rails.push_back({parts_.rails[i]->info(), std::move(keys)});
  }
  const size_t per_peer = parts_.rails.size() * n_queues_;
  rows_.to.assign(options_.n_ranks(), {});
  for (uint32_t r = 0; r < options_.n_ranks(); ++r) {
    if (!options_.remote(r)) continue;
    std::vector<QueueAddress> addresses;
    for (size_t i = 0; i < per_peer; ++i) addresses.push_back(queues_[r * per_peer + i]->address());
    rows_.to[r] = write_row(addresses);
  }
  return rows_.behind(write_offer(mine_), options_.rank);
}

// Rails pair by position, each rank's nearest first. In a rail-optimised cluster, the traffic of ranks at the same
// position of their hosts thus stays on one rail.
Result<std::vector<Lane>> VerbsEndpoint::connect_lanes(uint32_t peer, const Offer& theirs) {
  const size_t n_rails = std::min(mine_.rails.size(), theirs.rails.size());
  const uint32_t n_queues = std::min(n_queues_, theirs.n_queues);
  std::vector<Lane> lanes;
  for (size_t i = 0; i < n_rails; ++i) {
    const double rate = std::min(mine_.rails[i].info.gbit, theirs.rails[i].info.gbit);
    for (uint32_t q = 0; q < n_queues; ++q) {
      Lane lane;
      lane.pair = std::move(queues_[(peer * mine_.rails.size() + i) * n_queues_ + q]);
      lane.rail = static_cast<uint32_t>(i);
      lane.weight = rate > 0 ? rate : 1;
      lane.keys = theirs.rails[i].keys;
      const ConnectOptions to{theirs.queue(i, q), theirs.rails[i].info, timeout_code(settings_, options_.timeout_ms)};
      MOECCL_TRY(lane.pair->connect(settings_, to).with_context(format("connecting to rank {}", peer)));
      lanes.push_back(std::move(lane));
    }
  }
  return lanes;
}

Result<NetworkLinks> VerbsEndpoint::connect(const LocalMemory& own, std::span<const transport::Region>,
                                            std::span<const std::vector<std::byte>> offers) {
  std::map<uint32_t, std::map<std::string, double>> nics_of_host;
  std::vector<Offer> theirs;
  for (uint32_t r = 0; r < options_.n_ranks(); ++r) {
    MOECCL_ASSIGN_OR_RETURN(Offer offer, read_offer(offers[r], r));
    if (options_.remote(r) && offer.queues.empty()) return error(moecclRemoteError, "rank {} sent no queue pairs", r);
    for (const OfferedRail& rail : offer.rails)
      nics_of_host[options_.host_of[r]][rail.info.name()] = rail.info.gbit > 0 ? rail.info.gbit : kUnknownGbit;
    theirs.push_back(std::move(offer));
  }
  std::vector<std::string> presences;
  for (const Offer& offer : theirs) presences.push_back(offer.presence);
  parts_.questions = Questions(RollCall::of(options_, presences));
  struct Peer {
    uint32_t rank;
    std::vector<Lane> lanes;
  };
  std::vector<Peer> peers;
  for (uint32_t r = 0; r < options_.n_ranks(); ++r) {
    if (!options_.remote(r)) continue;
    MOECCL_ASSIGN_OR_RETURN(std::vector<Lane> lanes, connect_lanes(r, theirs[r]));
    peers.push_back({r, std::move(lanes)});
  }
  queues_.clear();  // of rails that a peer lacks
  const Region* const staging = parts_.own[kStaging].get();
  const Region* const rings = parts_.own[kRings].get();
  const DeviceRegions* const device = parts_.device.get();
  const bool ordered = mine_.ordered;
  NetworkLinks made;
  MOECCL_ASSIGN_OR_RETURN(auto engine, VerbsEngine::create(std::move(parts_)));
  VerbsEngine& moves = *engine;
  made.engine = std::move(engine);  // ends before its links even when what follows fails
  made.links.resize(options_.n_ranks());
  std::byte* ring = memory_->data() + copies_bytes();
  for (Peer& p : peers) {
    const Offer& offer = theirs[p.rank];
    LinkSetting setting;
    setting.own = own;
    setting.own_staging = staging;
    setting.device = device;
    setting.far = {p.rank, format("{} ({})", verbs::text_of(offer.rails[0].info.gid.gid), offer.rails[0].info.name()),
                   offer.presence};
    setting.peer = offer.memory_for(options_.rank);
    setting.ordered = ordered && offer.ordered;
    setting.copy_bytes = kCopyBytes;
    setting.copy = copies() + p.rank;
    setting.records = records_ != nullptr ? records_ + size_t{p.rank} * kPutRecords : nullptr;
    setting.ring = ring;
    setting.ring_bytes = ring_bytes_;
    setting.rings = rings;
    setting.memory = memory_;
    ring += ring_bytes_;
    log(LogLevel::kTrace, "rank {} reaches rank {} at {} over {} queue pairs{}", own.rank, p.rank, setting.far.where,
        p.lanes.size(), setting.ordered ? "" : ", signals wait for completions");
    made.links[p.rank] = moves.add(std::move(setting), std::move(p.lanes));
  }
  MOECCL_TRY(moves.start());
  log(LogLevel::kInfo, "rank {} reaches {} ranks of other hosts over up to {} queue pairs each", own.rank, peers.size(),
      mine_.rails.size() * n_queues_);
  std::vector<double> uplinks;  // by rank: all NICs of its host, whichever ranks use them
  for (const uint32_t host : options_.host_of) {
    const auto& nics = nics_of_host[host];
    const double gbit =
        std::accumulate(nics.begin(), nics.end(), 0.0, [](double sum, const auto& nic) { return sum + nic.second; });
    uplinks.push_back(gbit * kPayload / 8);
  }
  made.alpha_ns = kAlphaNs;
  made.bytes_per_ns = slowest_uplink(options_.host_of, uplinks);
  return made;
}

}  // namespace

Probe probe_with(const Env& settings) {
  const Result<Opened> opened = look(settings);
  if (!opened.ok()) return {false, {}, opened.status().message()};
  Probe p{true, {}, {}};
  for (const FoundRail& r : opened.value().rails) p.found += (p.found.empty() ? "" : "; ") + text_of(r.info);
  return p;
}

Probe probe() { return probe_with(env()); }

Result<std::unique_ptr<Endpoint>> open_with(const NetworkOptions& options, const Env& settings) {
  auto endpoint = std::make_unique<VerbsEndpoint>(options, settings);
  MOECCL_TRY(endpoint->open());
  return std::unique_ptr<Endpoint>(std::move(endpoint));
}

Result<std::unique_ptr<Endpoint>> open(const NetworkOptions& options) { return open_with(options, env()); }

}  // namespace moeccl::transport::verbs
