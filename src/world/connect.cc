// SPDX-License-Identifier: Apache-2.0
// From a unique id to links: finds out where each rank is, maps segments and heaps, and makes the links.
#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "src/base/hash.h"
#include "src/base/random.h"
#include "src/base/wire.h"
#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/handshake.h"
#include "src/bootstrap/place.h"
#include "src/bootstrap/unique_id.h"
#include "src/driver/process.h"
#include "src/world/heap.h"
#include "src/world/host_levels.h"
#include "src/world/hosts.h"
#include "src/world/introduction.h"
#include "src/world/know_connected.h"
#include "src/world/membership.h"
#include "src/world/network.h"
#include "src/world/process_table.h"
#include "src/world/staging.h"
#include "topology/pair_path.h"
#include "transport/paced/paced_link.h"
#include "transport/shm/shm_link.h"

namespace moeccl::comm {
namespace {

using transport::shm::Segment;
using transport::shm::SegmentShape;

class Connector {
 public:
  Connector(const moecclUniqueId& id, uint32_t n, uint32_t rank, const Config& config, const Parent& parent)
      : id_(id),
        n_(n),
        rank_(rank),
        config_(config),
        parent_(parent),
        ask_again_(parent.ask_again),
        deadline_(Deadline::earlier(parent.until, Deadline::after_ms(config.init_timeout_ms))) {
    key_ = hash_bytes(&id, sizeof(id));
    m_.described = parent.described;
  }
  Connector(Reunion& met, const Config& config, const Parent& parent)
      : Connector({}, static_cast<uint32_t>(met.members.size()), met.rank, config, parent) {
    link_key_ = met.key;
    key_ = hash_bytes(met.key.data(), met.key.size());
    session_ = std::move(met.session);
    again_ = true;
  }

  Result<Membership> connect() {
    if (session_ == nullptr) MOECCL_TRY(meet());
    Status status = contained([&] { return steps(); });
    ProcessTable::get().remove(key_, rank_);
    for (const uint32_t r : mapped_here_) ProcessTable::get().remove(key_ ^ all_[rank_].process, r);
    if (!status.ok()) {
      // Peers that already have all they need would wait for this rank in their first operation.
      if (m_.fabric != nullptr && m_.fabric->own != nullptr) m_.fabric->fail(status);
      (void)contained([&] { return session_->abandon(status), Status(); });
      return status;
    }
    // No rank waits for anything from these sessions any more, so a failure to close them is ignored.
    (void)contained([&] { return host_session_->close(), session_->close(), Status(); });
    return std::move(m_);
  }

 private:
  Status meet() {
    MOECCL_ASSIGN_OR_RETURN(const bootstrap::UniqueId given, bootstrap::decode_unique_id(id_));
    if (given.at_rank_0) {
      ask_again_ = [this, given] {
        return bootstrap::meet_at_place(given, rank_, deadline_, [this] { return not_cancelled(); });
      };
      MOECCL_ASSIGN_OR_RETURN(id_, ask_again_());
    }
    const bool known_before = given.at_rank_0 || given.derived;
    MOECCL_TRY(join(known_before));
    MOECCL_ASSIGN_OR_RETURN(const bootstrap::UniqueId met_by, bootstrap::decode_unique_id(id_));
    link_key_ = met_by.key;
    return known_before ? renew_key() : Status();
  }

  // `known_before`: the ranks have known the id before rank 0 came, as the ranks of other communicators do. Else a rank
  // that cannot even connect, for lack of descriptors, at least tells the other ranks of its process by the id.
  Status join(bool known_before) {
    const bool own_id = !known_before;
    MOECCL_ASSIGN_OR_RETURN(const bootstrap::UniqueId at, bootstrap::decode_unique_id(id_));
    bootstrap::JoinOptions options;
    // An id that was handed out names a root that is there. The next one has another id.
    options.wait_for_root = known_before && !at.address.is_unix();
    if (rank_ != 0 && ask_again_) {
      options.ask_again = [this]() -> Result<moecclUniqueId> {
        MOECCL_ASSIGN_OR_RETURN(id_, ask_again_());
        key_ = hash_bytes(&id_, sizeof(id_));
        return id_;
      };
    }
    options.others_alive = [this, own_id] {
      if (own_id) MOECCL_TRY(ProcessTable::get().given_up(key_));
      return parent_.others_alive ? parent_.others_alive() : Status();
    };
    options.cancelled = [this] { return not_cancelled(); };
    auto joined = bootstrap::Session::join(id_, static_cast<int>(rank_), static_cast<int>(n_), deadline_, options);
    if (joined.ok()) session_ = std::move(*joined);
    const Code code = joined.status().code();
    if (own_id && (code == moecclSystemError || code == moecclOutOfMemory))
      ProcessTable::get().give_up(key_,
                                  error(moecclRemoteError, "rank {} failed: {}", rank_, joined.status().message()));
    return std::move(joined).status();
  }

  Status not_cancelled() const {
    MOECCL_TRY(config_.not_cancelled());
    return parent_.still_wanted ? parent_.still_wanted() : Status();
  }

  // Other communicators meet at the same place, with the same key.
  Status renew_key() {
    bootstrap::Key nonce;
    MOECCL_TRY(random_bytes(nonce.data(), nonce.size()));
    MOECCL_ASSIGN_OR_RETURN(
        const auto nonces,
        session_->all_gather(rank_ == 0 ? std::span<const std::byte>(nonce) : std::span<const std::byte>(), deadline_));
    std::vector<std::byte> both(link_key_.begin(), link_key_.end());
    both.insert(both.end(), nonces[0].begin(), nonces[0].end());
    link_key_ = bootstrap::derive_key(both, "moeccl communicator of a place");
    key_ = hash_bytes(link_key_.data(), link_key_.size());
    return {};
  }

  Status steps() {
    m_.rank = rank_;
    m_.n_ranks = n_;
    m_.config = config_;
    MOECCL_TRY(introduce());
    MOECCL_TRY(check_hosts());
    MOECCL_TRY(make_tree());
    MOECCL_TRY(settle_staging());
    MOECCL_TRY(make_segment());
    MOECCL_ASSIGN_OR_RETURN(host_session_, HostSession::join(*session_, *hosts_, link_key_, deadline_));
    MOECCL_TRY(exchange_memory());
    MOECCL_TRY(probe_reads());
    prepare_fabric();
    MOECCL_TRY(arrange_places());
    MOECCL_TRY(reach_hosts());
    name_network();
    MOECCL_TRY(make_links());
    MOECCL_TRY(connect_cuda());
    return again_ ? know_all_connected(*session_, *m_.fabric, deadline_) : session_->barrier(deadline_);
  }

  Status introduce() {
    MOECCL_ASSIGN_OR_RETURN(heap_, SymmetricHeap::process_heap());
    MOECCL_ASSIGN_OR_RETURN(const Introduction mine, Introduction::of_this_process(config_, heap_->bytes()));
    MOECCL_ASSIGN_OR_RETURN(const auto blobs, session_->all_gather(mine.encode(), deadline_));
    for (uint32_t r = 0; r < n_; ++r) {
      MOECCL_ASSIGN_OR_RETURN(Introduction theirs, Introduction::decode(blobs[r], r));
      all_.push_back(std::move(theirs));
    }
    std::vector<HostOfRank> hosts;
    for (const Introduction& i : all_) hosts.push_back({i.host, i.host_name, i.network});
    hosts_.emplace(hosts);
    around_.n_hosts = hosts_->n();
    for (const auto& members : hosts_->members)
      around_.most_on_host = std::max(around_.most_on_host, static_cast<uint32_t>(members.size()));
    // Before it is known how much the others choose automatically, it is too early to compare.
    for (Introduction& i : all_) given_staging_.push_back(std::exchange(i.config.staging_bytes, 0));
    MOECCL_TRY(agree());
    // The first rank of a process is its leader. Only this host's processes count: ranks of other hosts are reached
    // through their links alone.
    for (const uint32_t r : hosts_->around(rank_)) processes_.emplace(all_[r].process, r);
    return {};
  }

  Status agree() const {
    for (uint32_t r = 0; r < n_; ++r) MOECCL_TRY(check_agreement(all_[0], all_[r], r));
    return {};
  }

  Status settle_staging() {
    m_.tree.n_far_levels = config_.pace ? m_.tree.depth() : plan::far_levels(m_.tree, hosts_->host_of);
    MOECCL_TRY(settle_line());
    // A rank may give the staging that the others choose automatically.
    for (uint32_t r = 0; r < n_; ++r) all_[r].config.staging_bytes = Config::staging_on(given_staging_[r], around_);
    MOECCL_TRY(agree());
    staging_bytes_ = all_[rank_].config.staging_bytes;
    m_.fabric = std::make_unique<exec::Fabric>(rank_, n_, shape_of(rank_).staging_bytes);
    m_.fabric->message_bytes = message_bytes(m_.tree, around_.line, shape_of(rank_));
    return {};
  }

  // The contents of a profile's file may differ from rank to rank, and so does the room of hosts.
  Status settle_line() {
    if (m_.tree.n_far_levels == 0) return {};
    const bool inherits = static_cast<bool>(parent_.profile_for);
    plan::Profile profile = inherits ? parent_.profile_for(m_.tree) : profile_of_variable(m_.tree, &m_.profile_text);
    if (config_.pace) profile.forget_links_within_hosts(m_.tree);  // only the topology's links are paced
    around_.line = plan::long_line(m_.tree, profile);
    const bool may_differ = !inherits && all_[0].has_profile;
    if (around_.line.bytes == 0 && !may_differ) return {};
    const auto of_process = [this](uint32_t r) { return same_process(r); };
    const std::vector<uint32_t>& here = hosts_->around(rank_);
    const Sharers sharers{static_cast<uint32_t>(here.size()),
                          static_cast<uint32_t>(std::count_if(here.begin(), here.end(), of_process)),
                          processes_.size() > 1, hosts_->n() > 1};
    MOECCL_ASSIGN_OR_RETURN(const LineAndRoom agreed,
                            agree_on_line(*session_, {around_.line, room_for_staging(sharers)}, deadline_));
    around_.line = agreed.line;
    around_.room = agreed.room;
    return {};
  }

  Status check_hosts() {
    if (hosts_->n() == 1 || !config_.pace) return {};
    return error(moecclUnsupported,
                 "config.pace is 1, but rank {} is on another host than rank 0: an emulated topology needs one host",
                 hosts_->members[1][0]);
  }

  Status make_tree() {
    if (parent_.uplinks != nullptr) {
      m_.tree = parent_.uplinks->own_tree();
    } else if (m_.described != nullptr) {
      m_.tree = *m_.described;
    } else {
      MOECCL_ASSIGN_OR_RETURN(m_.tree, tree_of_ranks(*session_, *hosts_, config_.topology, deadline_));
      if (m_.tree.depth() > transport::kPaceLevels) {
        return error(moecclInvalidArgument, "topology has {} levels: at most {} are supported", m_.tree.depth(),
                     transport::kPaceLevels);
      }
      if (!config_.topology.empty() && !config_.pace) m_.described = std::make_shared<const plan::LevelTree>(m_.tree);
    }
    return m_.tree.validate();
  }

  // Names the network on the outermost level whose groups are the hosts, if the tree has one.
  void name_network() {
    for (plan::Level& l : m_.tree.levels) {
      if (l.group_of_rank != hosts_->host_of) continue;
      l.network = network_text_;
      // The topology has no figures for its links, so use the network's, which are better than nothing.
      if (hosts_->n() > 1 && l.link.bytes_per_ns <= 0 && l.link.alpha_ns <= 0) {
        l.link = node_link_;
        m_.host_level = static_cast<int>(&l - m_.tree.levels.data());
      }
      return;
    }
  }

  bool leader() const { return processes_.at(all_[rank_].process) == rank_; }
  bool same_process(uint32_t r) const { return all_[r].process == all_[rank_].process; }

  SegmentShape shape_of(uint32_t rank) const { return segment_shape(n_, rank, staging_bytes_, around_.line); }

  Status make_segment() {
    auto made = Segment::create(shape_of(rank_), processes_.size() > 1);
    if (!made.ok()) return with_remedy_of_staging(std::move(made).status(), staging_bytes_);
    m_.fabric->own = std::move(*made);
    ProcessTable::get().put(key_, rank_, m_.fabric->own);
    return {};
  }

  // Leaders map the memory of other processes. The other ranks of a process then take the mappings from the table.
  Status exchange_memory() {
    segments_.resize(n_);
    watches_.resize(n_);
    MOECCL_TRY(check_processes(all_, hosts_->around(rank_), rank_, *host_session_));
    // With several hosts, one of them may run only a single process, so all ranks take both barriers.
    const bool several_hosts = hosts_->n() > 1;
    if (several_hosts || processes_.size() == 1) MOECCL_TRY(session_->barrier(deadline_));
    if (processes_.size() > 1) {
      bootstrap::RankSet wanted(n_, false);
      for (const auto& [process, r] : processes_) wanted[r] = process != all_[rank_].process;
      MOECCL_ASSIGN_OR_RETURN(const int line, driver::life_line());
      const int fds[] = {m_.fabric->own->fd().get(), heap_->fd().get(), line};
      MOECCL_ASSIGN_OR_RETURN(auto received,
                              host_session_->all_gather_fds({fds, leader() ? 3u : 1u}, wanted, deadline_));
      for (const uint32_t r : hosts_->around(rank_)) {
        if (!leader() || same_process(r)) continue;
        if (received[r].empty()) return error(moecclRemoteError, "rank {} sent no memory descriptor", r);
        auto mapped = Segment::map(shape_of(r), received[r][0]);
        if (!mapped.ok()) {
          return with_remedy_of_staging(std::move(mapped).status().with_context(format("memory of rank {}", r)),
                                        staging_bytes_);
        }
        segments_[r] = *mapped;
        ProcessTable::get().put(key_ ^ all_[rank_].process, r, *mapped);
        mapped_here_.push_back(r);
        if (received[r].size() > 2) {
          const uint64_t process = all_[r].process;
          MOECCL_ASSIGN_OR_RETURN(watches_[r],
                                  ProcessTable::get().watch(process, all_[r].pid, std::move(received[r][2])));
          auto heap = ProcessTable::get().heap(all_[r].process, std::move(received[r][1]), all_[r].heap_bytes);
          if (!heap.ok())
            return SymmetricHeap::with_remedy(
                std::move(heap).status().with_context(format("symmetric heap of rank {}", r)));
          heaps_[all_[r].process] = std::move(*heap);
        }
      }
    }
    if (several_hosts || processes_.size() > 1) MOECCL_TRY(session_->barrier(deadline_));
    for (const uint32_t r : hosts_->around(rank_)) {
      if (segments_[r] == nullptr)
        segments_[r] = ProcessTable::get().find(same_process(r) ? key_ : key_ ^ all_[rank_].process, r);
      if (segments_[r] == nullptr)
        return error(moecclRemoteError, "rank {} failed while its peers joined: its memory is not mapped", r);
      if (same_process(r)) continue;
      if (auto& heap = heaps_[all_[r].process]; heap == nullptr) heap = ProcessTable::get().find_heap(all_[r].process);
      if (watches_[r] != nullptr) continue;
      watches_[r] = ProcessTable::get().find_watch(all_[r].process);
      if (watches_[r] == nullptr)
        return error(moecclRemoteError, "rank {} failed while its peers joined: its process is not watched", r);
    }
    // No rank may remove a segment from the table, or leave, before all ranks have found theirs.
    MOECCL_TRY(session_->barrier(deadline_));
    m_.fabric->own->close_fd();
    return {};
  }

  // process_vm_readv depends on users, namespaces and ptrace rules, so trying it is the only reliable test.
  Status probe_reads() {
    const int64_t met_ns = unix_ns();  // a barrier has just ended
    bool all = true;
    for (const auto& [process, r] : processes_) {
      if (process == all_[rank_].process) continue;
      uint64_t value = 0;
      const driver::ProcessStamp& stamp = all_[r].stamp;
      all = all && stamp.address != 0 &&
            driver::read_process(all_[r].pid, stamp, stamp.address, &value, sizeof(value)).ok();
    }
    Writer mine;
    mine.u8(all);
    mine.i64(met_ns);
    MOECCL_ASSIGN_OR_RETURN(const auto answers, session_->all_gather(mine.view(), deadline_));
    std::vector<int64_t> times;
    for (const auto& a : answers) {
      Reader in(a);
      all = in.u8() == 1 && all;
      times.push_back(in.i64());
      all = in.done() && all;
    }
    hosts_->compare_clocks(times);
    // `processes_` holds only the processes of this host.
    const topology::PathFacts facts{hosts_->n() == 1, processes_.size() == 1, all, config_.pace};
    m_.reach = topology::reach_of_all(facts);
    m_.heap_reach = topology::heap_reaches_further(facts);
    can_read_ = all;
    return {};
  }

  // Sets up everything but the links.
  void prepare_fabric() {
    exec::Fabric& f = *m_.fabric;
    f.name = config_.name;
    f.heap = heap_->base();
    f.heap_bytes = heap_->bytes();
    f.shared_heap = heap_;
    f.timeout_ms = config_.timeout_ms;
    const uint64_t group = bootstrap::public_number(link_key_);
    profiler_ = profiler::Session::open(
        {group, config_.name, static_cast<int>(rank_), static_cast<int>(n_), static_cast<int>(hosts_->n())});
    f.recorder.introduce({rank_, n_, group, config_.name, false, hosts_->json(), profiler_});
    m_.ranks_on_host = static_cast<uint32_t>(hosts_->around(rank_).size());
    m_.cores_on_host = cores_of(all_, hosts_->around(rank_));
    m_.cores = 0;
    for (const auto& members : hosts_->members) m_.cores += cores_of(all_, members);
  }

  // Comes before the networks, some of which listen at ports that they could do without (MOECCL_PORT_RANGE).
  Status arrange_places() {
    if (hosts_->n() > 1) {
      MOECCL_ASSIGN_OR_RETURN(m_.address, meeting_address(*session_));
    }
    MOECCL_ASSIGN_OR_RETURN(m_.places, MeetingPlaces::arrange(*session_, link_key_, m_.address, deadline_));
    return {};
  }

  Status reach_hosts() {
    if (hosts_->n() == 1) return {};
    MOECCL_ASSIGN_OR_RETURN(const NetworkResult network,
                            connect_hosts(*session_, nullptr, *hosts_, link_key_, config_, *m_.fabric, deadline_));
    network_ = network.network;
    network_text_ = format("{}{}{}", network_->name, all_[rank_].encrypt ? ", encrypted" : "",
                           network.why.empty() ? "" : format(" ({})", network.why));
    node_link_ = network.node_link;
    return {};
  }

  // Makes the links to the ranks of this host.
  Status make_links() {
    exec::Fabric& f = *m_.fabric;
    if (config_.pace) m_.uplinks = parent_.uplinks;
    if (config_.pace && m_.uplinks == nullptr) {
      auto own = std::make_shared<SharedUplinks>(SharedUplinks{m_.tree, segments_, std::vector<uint32_t>(n_)});
      std::iota(own->member.begin(), own->member.end(), 0u);
      m_.uplinks = std::move(own);
    }
    for (const uint32_t r : hosts_->around(rank_)) {
      if (r == rank_) continue;
      transport::shm::ShmPeer peer;
      peer.own_rank = rank_;
      peer.peer_rank = r;
      peer.segment = segments_[r];
      peer.same_process = same_process(r);
      peer.pid = all_[r].pid;
      peer.stamp = all_[r].stamp;
      peer.can_read = topology::path_between({true, peer.same_process, can_read_}) == topology::PairPath::kReads;
      if (!peer.same_process) {
        peer.heap = heaps_[all_[r].process];
        // Another communicator may have mapped it, when the peer said another size.
        peer.heap_bytes = peer.heap != nullptr ? std::min<uint64_t>(all_[r].heap_bytes, peer.heap->size()) : 0;
        peer.process = watches_[r];
      }
      auto link = std::make_unique<transport::shm::ShmLink>(std::move(peer));
      const transport::paced::PacedUplinks uplinks =
          m_.uplinks != nullptr ? m_.uplinks->between(rank_, r) : transport::paced::PacedUplinks{};
      if (uplinks.cost.bytes_per_ns > 0) {
        f.paced[r] = 1;
        f.links[r] = std::make_unique<transport::paced::PacedLink>(std::move(link), uplinks);
      } else {
        f.links[r] = std::move(link);
      }
    }
    return {};
  }

  // Paced links are only for host memory, because the host sets their pace.
  Status connect_cuda() {
    Neighbours n;
    n.rank = rank_;
    n.n_ranks = n_;
    n.key = hash_combine(key_, 1);  // its segments are kept apart from those for host memory
    for (const Introduction& i : all_) {
      n.process.push_back(i.process);
      n.pid.push_back(i.pid);
    }
    n.watches = watches_;
    n.hosts = &*hosts_;
    n.network = network_;
    n.link_key = link_key_;
    n.host_level = m_.host_level;
    n.shape = shape_of(rank_);
    n.message_bytes = m_.fabric->message_bytes;
    Config config = config_;
    if (config.pace) config.cuda_context = nullptr;
    n.config = &config;
    n.profiler = profiler_;
    n.tree = &m_.tree;
    n.deadline = deadline_;
    MOECCL_ASSIGN_OR_RETURN(m_.cuda, CudaSide::connect(*session_, *host_session_, n, &m_.why_no_cuda));
    return {};
  }

  moecclUniqueId id_;
  uint32_t n_, rank_;
  const Config& config_;
  const Parent& parent_;
  std::function<Result<moecclUniqueId>()> ask_again_;
  Deadline deadline_;
  uint64_t key_ = 0, staging_bytes_ = 0;
  bool can_read_ = false;
  bool again_ = false;  // these ranks have met again
  bootstrap::Key link_key_ = {};
  std::unique_ptr<bootstrap::Session> session_;
  std::optional<Hosts> hosts_;
  std::shared_ptr<profiler::Session> profiler_;
  std::unique_ptr<HostSession> host_session_;
  plan::LinkCost node_link_;
  const transport::Network* network_ = nullptr;  // between hosts
  std::string network_text_;
  SymmetricHeap* heap_ = nullptr;
  std::vector<Introduction> all_;
  std::vector<uint64_t> given_staging_;  // [n_ranks] 0: automatic
  Config::Around around_;
  std::map<uint64_t, uint32_t> processes_;  // identity of a process -> its lowest rank
  std::vector<std::shared_ptr<Segment>> segments_;
  std::vector<std::shared_ptr<const driver::ProcessWatch>> watches_;  // [n_ranks], of other processes of this host
  std::map<uint64_t, std::shared_ptr<driver::Mapping>> heaps_;        // of other processes here, by their identity
  std::vector<uint32_t> mapped_here_;                                 // ranks whose segments this leader has mapped
  Membership m_;
};

}  // namespace

Result<Membership> connect(const moecclUniqueId& id, uint32_t n_ranks, uint32_t rank, const Config& config,
                           const Parent& parent) {
  return Connector(id, n_ranks, rank, config, parent).connect();
}

Result<Membership> connect(Reunion& met, const Config& config, const Parent& parent) {
  return Connector(met, config, parent).connect();
}

}  // namespace moeccl::comm
