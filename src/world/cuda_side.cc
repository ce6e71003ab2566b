// SPDX-License-Identifier: Apache-2.0
#include "src/world/cuda_side.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <numeric>

#include "src/base/env.h"
#include "src/base/log.h"
#include "src/driver/cuda/idle.h"
#include "src/driver/cuda/peers.h"
#include "src/driver/process.h"
#include "src/exec/cuda/runners.h"
#include "src/exec/cuda/urgent_stream.h"
#include "src/exec/task.h"
#include "src/plan/hardware.h"
#include "src/world/device_staging.h"
#include "src/world/gpu_introduction.h"
#include "src/world/network.h"
#include "src/world/process_table.h"
#include "topology/assign.h"
#include "topology/discover.h"
#include "transport/cuda_ipc/cuda_link.h"
#include "transport/shm/shm_link.h"

namespace moeccl::comm {

namespace cuda = driver::cuda;
using transport::shm::Segment;

class CudaSide::Connector {
 public:
  Connector(bootstrap::Session& session, HostSession& host_session, const Neighbours& n)
      : session_(session), host_session_(host_session), n_(n), side_(new CudaSide(n)), staging_(n) {}

  Result<std::unique_ptr<CudaSide>> connect(std::string* why) {
    own_.asked = n_.config->cuda_context != nullptr;
    if (own_.asked) take_part();
    MOECCL_TRY(introduce());
    const bool asked = std::any_of(all_.begin(), all_.end(), [](const GpuIntroduction& i) { return i.asked; });
    if (!asked) return std::unique_ptr<CudaSide>();
    if (!everyone_able(why)) return std::unique_ptr<CudaSide>();
    Status status = map_memory();
    ProcessTable::get().remove(n_.key, n_.rank);
    for (const uint32_t r : here()) ProcessTable::get().remove(n_.key ^ n_.process[n_.rank], r);
    if (!status.ok()) refuse(status);
    MOECCL_TRY(exchange_answers());
    if (!everyone_able(why)) return std::unique_ptr<CudaSide>();
    MOECCL_TRY(make_fabric());
    MOECCL_TRY(make_kernel_side());
    note_sharing();
    warn_of_lazy_loading();
    return std::move(side_);
  }

 private:
  void refuse(const Status& status) {
    own_.answer.able = false;
    own_.answer.why = status.message();
  }

  void take_part() {
    Status status = [&]() -> Status {
      const auto context = static_cast<cuda::Context>(n_.config->cuda_context);
      MOECCL_ASSIGN_OR_RETURN(side_->engine_, exec::StreamEngine::create(context, n_.config->cuda_sms));
      const cuda::Current current(context);
      int device = 0;
      MOECCL_TRY(cuda::check(cuda::driver()->cuCtxGetDevice(&device), "the context's device"));
      int mps = 0;  // unknown to older drivers
      own_.mps = cuda::driver()->cuDeviceGetAttribute(&mps, cuda::kMpsEnabled, device) == 0 && mps != 0;
      MOECCL_TRY(cuda::check(cuda::driver()->cuDeviceGetUuid_v2(own_.uuid.data(), device), "the device's identity"));
      own_.pci = cuda::pci_address(context);
      auto made = Segment::create(n_.shape, !n_.one_process());
      if (!made.ok()) return std::move(made).status();
      own_segment_ = std::move(*made);
      MOECCL_TRY(pin(*own_segment_));
      ProcessTable::get().put(n_.key, n_.rank, own_segment_);
      MOECCL_ASSIGN_OR_RETURN(own_.staging, staging_.make(context, device));
      return {};
    }();
    own_.answer.able = status.ok();
    if (!status.ok()) refuse(status);
  }

  void note_sharing() const {
    uint32_t n = 0;
    for (uint32_t r = 0; r < n_.n_ranks; ++r) n += all_[r].uuid == own_.uuid && same_process(r);
    if (n > 1) exec::share_context(side_->engine_->context());
  }

  // The first launch of a kernel that is loaded lazily may not return before the operations in flight have ended, and
  // those of another rank on the device may wait for this rank's next call.
  void warn_of_lazy_loading() const {
    static std::atomic<bool> said{false};
    const auto same = [&](const GpuIntroduction& i) { return i.uuid == own_.uuid; };
    if (std::count_if(all_.begin(), all_.end(), same) < 2 || !cuda::loads_lazily() || said.exchange(true)) return;
    log(LogLevel::kWarn,
        "several ranks use CUDA device {}, and CUDA loads this program's kernels when it first launches them. A launch "
        "may then wait for another rank's operation, which waits for this rank: set CUDA_MODULE_LOADING=EAGER",
        own_.staging.device);
  }

  // The segment is page-locked because the stream stores signals in it and kernels move messages there.
  Status pin(Segment& segment) {
    constexpr unsigned kPortable = 1, kMapped = 2;
    std::byte* base = segment.base();
    const int rc = cuda::driver()->cuMemHostRegister_v2(base, segment.bytes(), kPortable | kMapped);
    if (rc != cuda::kAlreadyRegistered) {
      MOECCL_TRY(cuda::check(rc, format("page-locking {} bytes of shared memory", segment.bytes())));
      segment.end_mapping = [context = side_->engine_->context()](driver::Mapping mapping) {
        const auto kept = std::make_shared<driver::Mapping>(std::move(mapping));
        cuda::when_idle(context, [kept] { (void)cuda::driver()->cuMemHostUnregister(kept->data()); });
      };
    }
    cuda::Pointer seen = 0;
    MOECCL_TRY(cuda::check(cuda::driver()->cuMemHostGetDevicePointer_v2(&seen, base, 0), "mapping shared memory"));
    if (seen == reinterpret_cast<cuda::Pointer>(base)) return {};
    return error(moecclUnsupported, "this device sees host memory at other addresses than the host");
  }

  const std::vector<uint32_t>& here() const { return n_.hosts->around(n_.rank); }
  bool several_hosts() const { return n_.hosts->n() > 1; }
  bool same_process(uint32_t r) const { return n_.same_process(r); }
  uint32_t leader(uint32_t r) const {
    return static_cast<uint32_t>(std::find(n_.process.begin(), n_.process.end(), n_.process[r]) - n_.process.begin());
  }

  Status introduce() {
    MOECCL_ASSIGN_OR_RETURN(const auto blobs, session_.all_gather(own_.encode(), n_.deadline));
    for (uint32_t r = 0; r < n_.n_ranks; ++r) {
      MOECCL_ASSIGN_OR_RETURN(GpuIntroduction of_rank, GpuIntroduction::decode(blobs[r], r));
      all_.push_back(std::move(of_rank));
    }
    return {};
  }

  // Tells whether every rank reached everything.
  Status exchange_answers() {
    MOECCL_ASSIGN_OR_RETURN(const auto blobs, session_.all_gather(own_.answer.encode(), n_.deadline));
    for (uint32_t r = 0; r < n_.n_ranks; ++r) {
      MOECCL_ASSIGN_OR_RETURN(all_[r].answer, GpuAnswer::decode(blobs[r], r));
    }
    return {};
  }

  bool everyone_able(std::string* why) const {
    for (uint32_t r = 0; r < n_.n_ranks; ++r) {
      if (all_[r].answer.able) continue;
      *why = !all_[r].asked ? format("rank {} had no current CUDA context when it joined (call cudaSetDevice first)", r)
                            : format("rank {}: {}", r, all_[r].answer.why);
      return false;
    }
    return true;
  }

  Status map_memory() {
    std::vector<StagingOffer> offers;
    for (const GpuIntroduction& i : all_) offers.push_back(i.staging);
    MOECCL_TRY(staging_.exchange(host_session_, std::move(offers)));
    MOECCL_TRY(map_segments());
    const auto context = side_->engine_->context();
    const cuda::Current current(context);
    const Status reached = staging_.reach_all(context);
    own_.answer.reaches = reached.ok();
    if (!reached.ok()) own_.answer.why = reached.message();
    own_.answer.kernel_staging = kernel_staging();
    return {};
  }

  // Returns the first of the ranks that does not reach the memory of all ranks of its host, with its reason, or "".
  template <class Ranks>
  std::string unreached(const Ranks& ranks) const {
    for (const uint32_t r : ranks)
      if (!all_[r].answer.reaches) return format("rank {}: {}", r, all_[r].answer.why);
    return "";
  }
  std::string unreached_anywhere() const {
    std::vector<uint32_t> ranks(n_.n_ranks);
    std::iota(ranks.begin(), ranks.end(), 0u);
    return unreached(ranks);
  }

  // Each chunk of an operation costs two system-wide fences and a barrier of blocks, which takes microseconds in which
  // NVLink carries a megabyte. If NVLink joins the devices of each host and they have enough memory, chunks are
  // therefore larger.
  uint64_t kernel_staging() const {
    constexpr uint64_t kLargeDevice = uint64_t{32} << 30;
    const uint64_t usual = n_.shape.staging_bytes;
    if (env().cuda_staging_bytes > 0) return static_cast<uint64_t>(env().cuda_staging_bytes);
    if (!own_.answer.reaches || cuda::device_bytes(own_.staging.device) < kLargeDevice) return usual;
    std::vector<cuda::Uuid> devices;
    for (const uint32_t r : here()) devices.push_back(all_[r].uuid);
    const auto hidden = [&](size_t i) {
      const Result<topology::Discovery>& host = topology::discover_host();
      return host.ok() && topology::joined_by_nvlink(host->graph, own_.pci, all_[here()[i]].pci);
    };
    return cuda::joined_by_nvlink(own_.staging.device, devices, hidden) ? std::max(usual, kStagingOverNvlink) : usual;
  }

  // All ranks take both barriers, whatever failed on this one: the exchange afterwards tells the others.
  Status map_segments() {
    side_->segments_.resize(n_.n_ranks);
    Status mapped = map_others();
    MOECCL_TRY(session_.barrier(n_.deadline));
    for (const uint32_t r : here()) {
      if (side_->segments_[r] == nullptr)
        side_->segments_[r] = ProcessTable::get().find(same_process(r) ? n_.key : n_.key ^ n_.process[n_.rank], r);
      if (side_->segments_[r] == nullptr && mapped.ok())
        mapped = error(moecclInternalError, "no mapping of rank {}'s segment", r);
    }
    MOECCL_TRY(session_.barrier(n_.deadline));
    return mapped;
  }

  // A process's first rank maps the segments of the host's other processes.
  Status map_others() {
    if (!n_.one_process()) {
      bootstrap::RankSet wanted(n_.n_ranks, false);
      for (const uint32_t r : here()) wanted[leader(r)] = !same_process(r);
      const int fds[] = {own_segment_->fd().get()};
      MOECCL_ASSIGN_OR_RETURN(auto received, host_session_.all_gather_fds(fds, wanted, n_.deadline));
      const cuda::Current current(side_->engine_->context());
      for (const uint32_t r : here()) {
        if (leader(n_.rank) != n_.rank || same_process(r)) continue;
        if (received[r].empty()) return error(moecclRemoteError, "rank {} sent no descriptor of its segment", r);
        transport::shm::SegmentShape shape = n_.shape;
        shape.rank = r;
        auto mapped = Segment::map(shape, received[r][0]);
        if (!mapped.ok()) return std::move(mapped).status().with_context(format("memory of rank {}", r));
        MOECCL_TRY(pin(**mapped));
        side_->segments_[r] = *mapped;
        ProcessTable::get().put(n_.key ^ n_.process[n_.rank], r, *mapped);
      }
    }
    return {};
  }

  Status make_fabric() {
    // Each host decides for itself, because traffic between hosts goes through host memory in any case.
    exec::Fabric& f = side_->fabric_;
    f.device_memory.why_none = unreached(here());
    const bool device = f.device_memory.why_none.empty();
    exec::PeerMemory own = staging_.take_own();
    if (device)
      side_->staging_ = std::move(own);
    else
      log(LogLevel::kInfo, "rank {}: CUDA operations are staged in host memory: {}", n_.rank, f.device_memory.why_none);
    f.cuda = true;
    f.name = n_.config->name;
    f.own = own_segment_;
    f.timeout_ms = n_.config->timeout_ms;
    f.recorder.introduce({n_.rank, n_.n_ranks, bootstrap::public_number(n_.link_key), n_.config->name, true,
                          n_.hosts->json(), n_.profiler});
    f.kernels = &exec::StreamEngine::table();
    f.staging = side_->staging_.data();
    f.message_bytes = n_.message_bytes;
    CudaSide* side = side_.get();
    f.publish_completed = [side](uint64_t sequence) {
      auto& progress = side->fabric_.own->board().progress;
      side->engine_->write_word(&progress.uses_buffers_of_operation, 0);
      side->engine_->write_word(&progress.completed, sequence);
      if (side->net_ != nullptr) side->engine_->note(side->net_->tell_board());
    };
    side->runner_ = exec::stream_runner(f, *side->engine_);
    f.device_slots.resize(n_.n_ranks);
    for (const uint32_t r : here()) {
      if (r == n_.rank) continue;
      transport::shm::ShmPeer peer;
      peer.own_rank = n_.rank;
      peer.peer_rank = r;
      peer.segment = side_->segments_[r];
      peer.same_process = same_process(r);
      peer.pid = n_.pid[r];
      peer.process = n_.watches[r];
      auto words = std::make_unique<transport::shm::ShmLink>(std::move(peer));
      transport::cuda_ipc::CudaPeer gpu;
      gpu.stream = side_->engine_->stream();
      gpu.direct = same_process(r) && device;
      gpu.staging = device ? staging_.of(r) : side_->segments_[r]->staging();
      if (device && !same_process(r)) f.device_slots[r] = staging_.slots_with(r);
      if (device && !same_process(r) && own_.staging.way == StagingOffer::kByHandle)
        side_->holders_.push_back({side_->segments_[r], n_.watches[r]});
      gpu.opened = staging_.take_opened(r);
      f.links[r] = std::make_unique<transport::cuda_ipc::CudaLink>(std::move(words), std::move(gpu));
    }
    if (const std::string why = unreached_anywhere(); !why.empty())
      side_->path_ = format("staged in host memory ({})", why);
    if (several_hosts()) MOECCL_TRY(connect_network(device));
    plan::Reach reach;
    reach.staging = !several_hosts();
    reach.views = reach.reads = !several_hosts() && n_.one_process() && device;
    for (const uint32_t r : here()) {
      const int other = all_[r].staging.device;
      auto& known = side_->peer_devices_;
      if (device && same_process(r) && other != own_.staging.device &&
          std::find(known.begin(), known.end(), other) == known.end())
        known.push_back(other);
    }
    plan::Profile profile = plan::stream_hardware().profile;
    profile.host_level = n_.host_level;
    side_->selector_ = std::make_unique<Selector>(Selector::Setting{
        n_.rank, *n_.tree, reach, false, false, n_.config->deterministic, f.half_bytes, std::move(profile), true});
    return side_->selector_->force_from_text(n_.config->plan);
  }

  // Makes separate connections to the ranks of other hosts: to device memory if the NICs of all ranks reach it, and
  // otherwise through page-locked memory.
  Status connect_network(bool device) {
    exec::Fabric& f = side_->fabric_;
    transport::cuda_net::CudaNet::Staging s;
    s.context = side_->engine_->context();
    s.stream = side_->engine_->stream();
    s.own = f.own->memory(n_.rank);
    s.staging_bytes = n_.shape.staging_bytes;
    s.device_staging = device ? f.staging : nullptr;
    s.most_put_bytes = std::max(f.half_bytes, n_.shape.message_bytes);
    s.n_ranks = n_.n_ranks;
    MOECCL_ASSIGN_OR_RETURN(auto net, transport::cuda_net::CudaNet::create(s));
    f.arrivals = net.get();
    if (device && n_.network->can.device_memory) {
      MOECCL_ASSIGN_OR_RETURN(f.device_memory, net->device_memory());
    }
    MOECCL_ASSIGN_OR_RETURN(const NetworkResult made, connect_hosts(session_, n_.network, *n_.hosts, n_.cuda_link_key(),
                                                                    *n_.config, f, n_.deadline));
    MOECCL_TRY(net->use(!made.device.empty()));
    say_how(made);
    net->set_engine(std::move(f.engine));
    for (uint32_t r = 0; r < n_.n_ranks; ++r) {
      if (!n_.hosts->together(r, n_.rank)) f.links[r] = net->wrap(r, std::move(f.links[r]));
    }
    side_->net_ = net.get();
    f.engine = std::move(net);
    return {};
  }

  void say_how(const NetworkResult& made) {
    std::string text = made.device.empty() ? "through page-locked memory" : "by " + made.device;
    if (!made.why_no_device.empty()) text += format(" ({})", made.why_no_device);
    text += format(" between hosts over {}", made.network->name);
    std::string& path = side_->path_;
    path += (path.empty() ? "" : ", ") + text;
    log(LogLevel::kInfo, "rank {}: CUDA memory {}", n_.rank, path);
  }

  Status make_kernel_side() {
    KernelSide::Question q{session_, host_session_, n_, *side_->engine_, side_->fabric_};
    for (uint32_t r = 0; r < n_.n_ranks; ++r)
      q.seats.push_back({all_[r].staging.device, std::string(all_[r].uuid.begin(), all_[r].uuid.end()), all_[r].mps});
    q.unreached = unreached_anywhere();
    q.staging_bytes = std::numeric_limits<uint64_t>::max();
    for (const GpuIntroduction& i : all_) q.staging_bytes = std::min(q.staging_bytes, i.answer.kernel_staging);
    std::string why;
    MOECCL_ASSIGN_OR_RETURN(side_->kernel_side_, KernelSide::connect(q, &why));
    if (side_->kernel_side_ != nullptr) return side_->kernel_side_->selector().force_from_text(n_.config->plan);
    log(LogLevel::kInfo, "rank {}: no persistent kernel on CUDA memory: {}", n_.rank, why);
    return {};
  }

  bootstrap::Session& session_;
  HostSession& host_session_;
  const Neighbours& n_;
  std::unique_ptr<CudaSide> side_;
  std::shared_ptr<Segment> own_segment_;
  DeviceStaging staging_;
  GpuIntroduction own_;
  std::vector<GpuIntroduction> all_;  // [n_ranks]; the same on all ranks
};

Result<std::unique_ptr<CudaSide>> CudaSide::connect(bootstrap::Session& session, HostSession& host_session,
                                                    const Neighbours& n, std::string* why) {
  return Connector(session, host_session, n).connect(why);
}

CudaSide::CudaSide(const Neighbours& n) : fabric_(n.rank, n.n_ranks, n.shape.staging_bytes) {}

CudaSide::~CudaSide() {
  if (engine_ == nullptr) return;
  engine_->drain();
  // Peers may still use this rank's memory although this rank has nothing left to do.
  exec::wait_for_peers([&] {
    for (uint32_t r = 0; r < fabric_.n_ranks; ++r) {
      if (fabric_.links[r] == nullptr) continue;  // this rank, or a side that was never completed
      const transport::Board& board = fabric_.link(r).board();
      if (board.health.state.load() != static_cast<uint32_t>(transport::RankState::kRunning)) continue;
      if (board.progress.completed.load() < fabric_.sequence) return true;
      if (kernel_side_ == nullptr || kernel_side_->kernel().elsewhere(r)) continue;
      // A kernel of the peer may access this rank's memory as long as it runs.
      const uint64_t walked = board.progress.walked.load();
      if (walked < kernel_side_->kernel().launched() || walked < board.progress.walks_called.load()) return true;
    }
    return false;
  });
  kernel_side_ = nullptr;
  fabric_.engine = nullptr;  // publishes what peers do not know yet; ends before its links and the memory that it uses
  fabric_.links.clear();
  // Release: pairs with the load below, on a rank whose memory this one had open.
  if (fabric_.own != nullptr) fabric_.own->board().progress.closed.store(1, std::memory_order_release);
  // Memory shared by a handle must not be freed under a process that has it open. A rank that still runs has completed
  // this rank's operations; one that has left or failed may not have run what it has queued.
  exec::wait_for_peers([&] {
    return std::any_of(holders_.begin(), holders_.end(), [](const Holder& h) {
      const transport::Board& board = h.segment->board();
      return board.health.state.load() != static_cast<uint32_t>(transport::RankState::kRunning) &&
             board.progress.closed.load(std::memory_order_acquire) == 0 &&
             (h.process == nullptr || h.process->check().ok());
    });
  });
  holders_.clear();
  segments_.clear();
  fabric_.own = nullptr;
}

Status CudaSide::open_to_peers(const void* buffer, size_t bytes, const cuda::Pointed& what) const {
  if (peer_devices_.empty() || bytes == 0) return {};
  const cuda::Current current(context());
  return cuda::allow_peers(buffer, bytes, what, peer_devices_);
}

Status CudaSide::open_to_peers(const void* buffer, size_t bytes) const {
  if (peer_devices_.empty() || bytes == 0) return {};
  return open_to_peers(buffer, bytes, cuda::pointed(buffer));
}

size_t CudaSide::memory_bytes() const {
  return fabric_.own->bytes() + staging_.bytes() + engine_->memory_bytes() +
         (net_ != nullptr ? net_->memory_bytes() : 0) +
         (kernel_side_ != nullptr ? kernel_side_->kernel().memory_bytes() : 0);
}

}  // namespace moeccl::comm
