// SPDX-License-Identifier: Apache-2.0
#include "src/world/kernel_side.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "src/base/env.h"
#include "src/base/log.h"
#include "src/exec/cuda/runners.h"
#include "src/exec/cuda/urgent_stream.h"
#include "src/plan/hardware.h"
#include "src/world/device_objects.h"
#include "src/world/network.h"
#include "src/world/reserved_blocks.h"

namespace moeccl::comm {

namespace cuda = driver::cuda;

namespace {

// Kernels of two communicators may wait for each other through ranks that run them in a different order, so all must be
// resident at once, and blocks are never shared. Programs use 10 to 30 communicators, so each gets a small share of the
// free blocks.
constexpr uint32_t kBlocksPerSm = 2, kUsualBlocks = 16, kShares = 16;

struct Answer {
  uint8_t able = 0;
  uint8_t by_descriptor = 0;  // other processes open the memory so, and not by `handle`
  uint8_t padding[6] = {};
  uint64_t memory = 0, mapped = 0, most_bytes = 0, message_bytes = 0;
  cuda::IpcHandle handle{};
  char why[160] = {};
};

class Joining {
 public:
  explicit Joining(const KernelSide::Question& question)
      : s_(question), n_(question.neighbours), rank_(n_.rank), all_(n_.n_ranks) {}

  // Uses only what all ranks know about all ranks. If this already rules out the persistent kernel, nothing is
  // exchanged.
  std::string known_reason() const {
    if (s_.seats.size() > moeccl::cuda::kMaxSources) {
      return format("{} ranks: at most {} are possible", s_.seats.size(), moeccl::cuda::kMaxSources);
    }
    if (!s_.unreached.empty()) return "not all ranks reach each other's device memory (" + s_.unreached + ")";
    for (size_t a = 0; a < s_.seats.size(); ++a) {
      for (size_t b = 0; b < a; ++b) {
        const KernelSide::Seat &x = s_.seats[a], &y = s_.seats[b];
        if (x.uuid == y.uuid && n_.process[a] != n_.process[b] && !(x.mps && y.mps)) {
          return format(
              "ranks {} and {} share a device from two processes without MPS, whose kernels take turns on it: a kernel "
              "must not wait for another process's",
              b, a);
        }
      }
    }
    return "";
  }

  // Exchanges the ranks' answers; every rank sees the same ones.
  Status exchange() {
    MOECCL_ASSIGN_OR_RETURN(
        const auto blobs,
        s_.session.all_gather({reinterpret_cast<const std::byte*>(&own_), sizeof(own_)}, n_.deadline));
    for (size_t r = 0; r < all_.size(); ++r) {
      if (blobs[r].size() != sizeof(Answer))
        return error(moecclRemoteError, "rank {} sent an answer on the persistent kernel that cannot be read", r);
      std::memcpy(&all_[r], blobs[r].data(), sizeof(Answer));
      all_[r].why[sizeof(all_[r].why) - 1] = 0;
    }
    return {};
  }
  std::string refusal() const {
    for (size_t r = 0; r < all_.size(); ++r)
      if (all_[r].able == 0) return format("rank {}: {}", r, all_[r].why);
    return "";
  }
  void note(const Status& status) {
    own_.able = status.ok();
    if (!status.ok()) std::strncpy(own_.why, status.message().c_str(), sizeof(own_.why) - 1);
  }

  uint32_t ranks_here() const {
    return static_cast<uint32_t>(std::count_if(
        s_.seats.begin(), s_.seats.end(), [&](const KernelSide::Seat& w) { return w.uuid == s_.seats[rank_].uuid; }));
  }
  // Counts those of them that belong to this process.
  uint32_t own_ranks_here() const {
    uint32_t n = 0;
    for (uint32_t r = 0; r < n_.n_ranks; ++r) n += s_.seats[r].uuid == s_.seats[rank_].uuid && n_.same_process(r);
    return n;
  }
  uint32_t processes_here() const {
    std::set<uint64_t> processes;
    for (uint32_t r = 0; r < n_.n_ranks; ++r)
      if (s_.seats[r].uuid == s_.seats[rank_].uuid) processes.insert(n_.process[r]);
    return static_cast<uint32_t>(processes.size());
  }
  bool several_hosts() const { return n_.hosts->n() > 1; }
  // Returns true if this host has ranks of other processes.
  bool other_processes() const {
    const auto& here = n_.hosts->around(rank_);
    return std::any_of(here.begin(), here.end(), [&](uint32_t r) { return !n_.same_process(r); });
  }

  Result<uint32_t> reserve() const {
    if (!env().cuda_persistent) return error(moecclUnsupported, "MOECCL_CUDA_PERSISTENT=0");
    const uint32_t here = ranks_here();
    if (here > exec::hardware_queues()) {
      return error(moecclUnsupported, "{} ranks on a device of {} hardware queues: set CUDA_DEVICE_MAX_CONNECTIONS={}",
                   here, exec::hardware_queues(), std::min(32u, 2 * here));
    }
    int sms = 0;
    const cuda::Current current(s_.engine.context());
    MOECCL_TRY(cuda::check(cuda::driver()->cuDeviceGetAttribute(&sms, cuda::kMultiprocessors, s_.seats[rank_].device),
                           "the device's multiprocessors"));
    const uint32_t capacity = static_cast<uint32_t>(std::max(1, sms)) * kBlocksPerSm;
    // A user that limits the multiprocessors gets that limit, if it leaves half of the free blocks to others.
    const bool limited = n_.config->cuda_sms > 0;
    const uint32_t want = limited ? s_.engine.sm_limit() * kBlocksPerSm : kUsualBlocks;
    const uint32_t blocks = ReservedBlocks::get().take({.uuid = s_.seats[rank_].uuid,
                                                        .communicator = n_.key,
                                                        .ranks = own_ranks_here(),
                                                        .capacity = capacity,
                                                        .want = want,
                                                        .communicators = limited ? 2 : kShares,
                                                        .processes = processes_here()});
    if (blocks > 0) return blocks;
    if (want < ReservedBlocks::kLeast) {
      return error(moecclUnsupported, "MOECCL_CUDA_SMS={} is too few: the persistent kernel takes {} multiprocessors",
                   s_.engine.sm_limit(), ReservedBlocks::kLeast / kBlocksPerSm);
    }
    return error(moecclUnsupported, "its device has no room left for another communicator's persistent kernels");
  }

  // Collective call of the ranks of this host: sends descriptors of the memory to all ranks of other processes.
  Status exchange_descriptors(const exec::PersistentKernel& kernel) {
    const auto& here = n_.hosts->around(rank_);
    if (std::none_of(here.begin(), here.end(), [&](uint32_t r) { return all_[r].by_descriptor != 0; })) return {};
    MOECCL_ASSIGN_OR_RETURN(objects_, DeviceObjects::exchange(s_.host_session, n_, kernel.memory().object()));
    return {};
  }

  Result<transport::cuda_ipc::Opened> open(uint32_t r) const {
    const auto context = s_.engine.context();
    return all_[r].by_descriptor == 0 ? transport::cuda_ipc::Opened::open(context, all_[r].handle)
                                      : objects_.open(context, r, all_[r].mapped);
  }

  Status open_all(const exec::PersistentKernel& kernel, std::vector<std::byte*>& memories,
                  std::vector<transport::cuda_ipc::Opened>& opened) {
    opened.resize(all_.size());
    for (size_t r = 0; r < all_.size(); ++r) {
      if (!n_.hosts->together(static_cast<uint32_t>(r), rank_)) {
        memories.push_back(nullptr);
      } else if (r == rank_) {
        memories.push_back(kernel.memory().data());
      } else if (n_.same_process(static_cast<uint32_t>(r))) {
        memories.push_back(reinterpret_cast<std::byte*>(all_[r].memory));
        // Peer access covers only memory of cuMemAlloc.
        if (all_[r].by_descriptor != 0 && s_.seats[r].device != s_.seats[rank_].device) {
          const cuda::Current current(s_.engine.context());
          MOECCL_TRY(cuda::allow_access(memories[r], all_[r].mapped));
        }
      } else {
        MOECCL_ASSIGN_OR_RETURN(opened[r], open(static_cast<uint32_t>(r)));
        memories.push_back(opened[r].data());
      }
    }
    return {};
  }

  // Collective call. Makes separate connections for the persistent kernel, because the proxy may run while another
  // operation does.
  Status connect_network(exec::KernelProxy& proxy) const {
    const bootstrap::Key key = bootstrap::derive_key(n_.cuda_link_key(), "moeccl persistent kernel links");
    MOECCL_ASSIGN_OR_RETURN(
        transport::NetworkLinks wires,
        connect_network_links(s_.session, *n_.network, *n_.hosts, key, *n_.config, proxy.memory(), {}, n_.deadline));
    return proxy.start(std::move(wires.links), std::move(wires.engine));
  }

  Answer& own() { return own_; }
  uint64_t most_bytes() const { return least(&Answer::most_bytes); }
  uint64_t message_bytes() const { return least(&Answer::message_bytes); }

 private:
  uint64_t least(uint64_t Answer::*of) const {
    uint64_t found = ~uint64_t{0};
    for (const Answer& a : all_) found = std::min(found, a.*of);
    return found;
  }
  const KernelSide::Question& s_;
  const Neighbours& n_;
  uint32_t rank_;
  Answer own_;
  std::vector<Answer> all_;
  DeviceObjects objects_;
};

// What follows is much slower, so it is said once, by one rank.
void warn_of_many_ranks(const Neighbours& n) {
  static std::atomic<bool> said{false};
  if (n.rank != 0 || n.n_ranks <= moeccl::cuda::kMaxSources || !env().cuda_persistent || said.exchange(true)) return;
  log(LogLevel::kWarn,
      "{} ranks with CUDA buffers: the persistent kernel serves at most {}. Operations on CUDA memory launch a kernel "
      "for each peer and chunk instead, and cannot be captured in graphs; routing updates on a stream are refused "
      "(docs/cuda.md)",
      n.n_ranks, moeccl::cuda::kMaxSources);
}

}  // namespace

Result<std::unique_ptr<KernelSide>> KernelSide::connect(const Question& s, std::string* why) {
  const Neighbours& n = s.neighbours;
  warn_of_many_ranks(n);
  Joining joining(s);
  if (*why = joining.known_reason(); !why->empty()) return std::unique_ptr<KernelSide>();
  std::unique_ptr<KernelSide> w(new KernelSide);
  std::unique_ptr<exec::KernelProxy> proxy;
  const std::vector<uint32_t>& here = n.hosts->around(n.rank);
  joining.own().message_bytes = static_cast<uint64_t>(env().cuda_message_bytes);
  const auto make = [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(w->reserved_, joining.reserve());
    w->uuid_ = s.seats[n.rank].uuid;
    MOECCL_ASSIGN_OR_RETURN(w->kernel_,
                            exec::PersistentKernel::create(s.engine, {.n_ranks = n.n_ranks,
                                                                      .half_bytes = s.staging_bytes / 2,
                                                                      .most_blocks = w->reserved_,
                                                                      .message_area = exec::KernelMessages::area_bytes(
                                                                          here.size(), joining.own().message_bytes),
                                                                      .for_processes = joining.other_processes(),
                                                                      .graph_mixing = n.config->graph_mixing}));
    const exec::PeerMemory& memory = w->kernel_->memory();
    joining.own().memory = reinterpret_cast<uint64_t>(memory.data());
    joining.own().mapped = memory.bytes();
    joining.own().by_descriptor = memory.object() != nullptr;
    joining.own().most_bytes = static_cast<uint64_t>(env().cuda_persistent_bytes);
    if (joining.several_hosts()) {
      exec::KernelProxy::Rank p;
      p.context = s.engine.context();
      p.rank = n.rank;
      p.n_ranks = n.n_ranks;
      p.half_bytes = w->kernel_->half_bytes();
      p.own = &s.fabric.own->board();
      MOECCL_ASSIGN_OR_RETURN(proxy, exec::KernelProxy::create(p));
    }
    if (!joining.other_processes() || memory.object() != nullptr) return {};
    MOECCL_ASSIGN_OR_RETURN(joining.own().handle,
                            transport::cuda_ipc::export_memory(s.engine.context(), memory.data()));
    return {};
  };
  joining.note(make());
  MOECCL_TRY(joining.exchange());
  if (*why = joining.refusal(); !why->empty()) return std::unique_ptr<KernelSide>();
  w->most_bytes_ = joining.most_bytes();
  MOECCL_TRY(joining.exchange_descriptors(*w->kernel_));
  std::vector<std::byte*> memories;
  Status opened = joining.open_all(*w->kernel_, memories, w->opened_);
  if (proxy != nullptr) MOECCL_TRY(joining.connect_network(*proxy));
  std::unique_ptr<exec::KernelMessages> messages;
  if (const uint64_t bytes = joining.message_bytes(); bytes > 0)
    messages = std::make_unique<exec::KernelMessages>(s.fabric, here, bytes);
  if (opened.ok()) opened = w->kernel_->connect(s.fabric, memories, std::move(proxy), std::move(messages));
  joining.note(opened);
  MOECCL_TRY(joining.exchange());
  if (*why = joining.refusal(); !why->empty()) return std::unique_ptr<KernelSide>();
  w->runner_ = exec::kernel_runner(s.fabric, *w->kernel_);
  plan::Reach reach;
  reach.staging = !joining.several_hosts();
  reach.views = reach.reads = reach.staging && !joining.other_processes();
  plan::Profile profile = plan::kernel_hardware().profile;
  profile.host_level = n.host_level;
  w->selector_ = std::make_unique<Selector>(Selector::Setting{
      n.rank, *n.tree, reach, false, false, n.config->deterministic, w->kernel_->half_bytes(), std::move(profile)});
  return w;
}

KernelSide::~KernelSide() {
  kernel_ = nullptr;  // its kernels have left the device after this
  if (!uuid_.empty()) ReservedBlocks::get().give_back(uuid_, reserved_);
}

}  // namespace moeccl::comm
