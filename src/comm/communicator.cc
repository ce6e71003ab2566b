// SPDX-License-Identifier: Apache-2.0
#include "src/comm/communicator.h"

#include <algorithm>

#include "moeccl/version.h"
#include "src/base/env.h"
#include "src/base/log.h"
#include "src/bootstrap/launcher.h"
#include "src/comm/cuda_stream.h"
#include "src/driver/cuda/aside.h"
#include "src/driver/thread.h"
#include "src/exec/bounded_run.h"
#include "src/exec/cuda/runners.h"
#include "src/exec/cuda/stream_work.h"
#include "src/exec/revoked.h"
#include "src/exec/task.h"
#include "topology/synthetic.h"

namespace moeccl::comm {

Result<std::unique_ptr<Communicator>> Communicator::init(const moecclUniqueId& id, int n_ranks, int rank,
                                                         const Config& config, const Parent& parent) {
  if (config.pace && config.topology.empty() && parent.uplinks == nullptr) {
    return error(moecclInvalidArgument,
                 "config.pace is 1 without a topology: give one with bandwidths, such as node:2(bw=1GB/s) gpu:4");
  }
  MOECCL_ASSIGN_OR_RETURN(Membership m,
                          connect(id, static_cast<uint32_t>(n_ranks), static_cast<uint32_t>(rank), config, parent));
  return of(std::move(m));
}

Result<std::unique_ptr<Communicator>> Communicator::init(Reunion& met, const Config& config, const Parent& parent) {
  MOECCL_ASSIGN_OR_RETURN(Membership m, connect(met, config, parent));
  return of(std::move(m));
}

Result<std::unique_ptr<Communicator>> Communicator::of(Membership&& m) {
  m.fabric->kernels = env().kernels.empty() ? &kernels::best() : kernels::select(env().kernels.c_str());
  if (m.fabric->kernels == nullptr) {
    std::string names;
    for (const char* name : kernels::names()) {
      if (kernels::select(name) != nullptr) names += format("{}{}", names.empty() ? "" : " or ", name);
    }
    const Status status =
        error(moecclInvalidArgument, "MOECCL_KERNELS={}: this processor runs {}", env().kernels, names);
    m.fabric->fail(status);  // the peers have joined
    return status;
  }
  const uint32_t ranks = m.ranks_on_host, cores = m.cores_on_host;
  const plan::Reach reach = m.reach;
  std::unique_ptr<Communicator> c;
  // The peers may have finished and would wait for this rank in their first operation.
  Status status = contained([&]() -> Status {
    c.reset(new Communicator(std::move(m)));
    c->set_up(std::move(m));
    return c->selector_->force_from_text(c->config_.plan);
  });
  if (status.ok()) {
    if (c->rank_ == 0 && log_enabled(LogLevel::kInfo))
      (void)contained([&] { return write_log_line(LogLevel::kInfo, c->summary(ranks, cores, reach)), Status(); });
    return c;
  }
  if (c != nullptr)
    c->break_off(status);
  else
    m.fabric->fail(status);
  return status;
}

namespace {

// Returns true if the launcher has put more ranks on this host than it has cores; ranks of other communicators need
// them too.
bool launched_crowded() {
  const Result<bootstrap::LauncherInfo> info = bootstrap::detect_launcher();
  return info.ok() && info->n_local > driver::configured_cores();
}

}  // namespace

Communicator::Communicator(Membership&& m) noexcept
    : rank_(m.rank),
      n_ranks_(m.n_ranks),
      config_(std::move(m.config)),
      address_(std::move(m.address)),
      places_(std::move(m.places)),
      profile_text_(std::move(m.profile_text)),
      fabric_(std::move(m.fabric)),
      uplinks_(std::move(m.uplinks)),
      described_(std::move(m.described)),
      cuda_(std::move(m.cuda)),
      why_no_cuda_(std::move(m.why_no_cuda)) {}

// Uses what the constructor has left in `m`.
void Communicator::set_up(Membership&& m) {
  companions_ = std::make_shared<Companions>();
  config_.cancelled = nullptr;  // the caller's, for the time of its call
  // With a core for each rank, a signal arrives within a microsecond or two, so polling is cheaper than giving up the
  // core. With more ranks than cores, the rank we wait for may need ours. Measured in docs/decisions.md.
  const bool fits = m.ranks_on_host <= m.cores_on_host && !config_.crowded && !launched_crowded();
  fabric_->crowded = !fits;
  fabric_->stream_from_bytes = kernels::stream_threshold_bytes() / std::max(1u, m.ranks_on_host);
  // Polling a socket is a system call, and so is a yield.
  const uint32_t polls = fits ? 200 : fabric_->engine == nullptr ? 4 : 1;
  fabric_->spin_polls = env().spin_us == 0 ? 0 : polls;
  fabric_->spin_ns = std::max(env().spin_us, 0) * int64_t{1000};
  fabric_->priority.store(config_.priority, std::memory_order_relaxed);
  plan::Profile profile;
  profile.cores = m.cores;
  profile.host_level = m.host_level;
  if (m.host_level >= 0) {  // a profile counts the cores of one host
    profile.cores = std::max(1u, m.cores / m.tree.levels[static_cast<size_t>(m.host_level)].n_groups);
  }
  selector_ =
      std::make_unique<Selector>(Selector::Setting{rank_, std::move(m.tree), m.reach, m.heap_reach, m.reach.staging,
                                                   config_.deterministic, fabric_->half_bytes, profile});
  fabric_->ballot.heard = [this](std::span<const uint64_t> words) { selector_->trials().decide(words); };
  host_runner_ = exec::host_runner(*fabric_);
  eager_runner_ = exec::eager_runner(*fabric_);
  fabric_->outboxes.resize(n_ranks_);
  for (uint32_t p = 0; p < n_ranks_; ++p) {
    if (p != rank_) fabric_->outboxes[p] = fabric_->link(p).view().outboxes;
  }
  if (cuda_ == nullptr) return;
  cuda_->fabric().spin_polls = fabric_->spin_polls;
  cuda_->fabric().spin_ns = fabric_->spin_ns;
  CudaStream::prepare(cuda_->context());
}

std::string Communicator::summary(uint32_t ranks_on_host, uint32_t cores_on_host, plan::Reach reach) const {
  return format(
      "communicator{}{} of {} ranks: {} on this host, which has {} cores for them; topology {}; {}; kernels {}; MoECCL "
      "{}.{}.{}",
      config_.name.empty() ? "" : " ", config_.name, n_ranks_, ranks_on_host, cores_on_host,
      topology::to_synthetic(tree()),
      !reach.staging ? "ranks of other hosts are reached over the network"
      : reach.views  ? "all ranks are threads of this process and reach each other's buffers"
      : reach.reads  ? "ordinary buffers are read by process_vm_readv"
                     : "ordinary buffers are copied through shared memory",
      fabric_->kernels->name, MOECCL_VERSION_MAJOR, MOECCL_VERSION_MINOR, MOECCL_VERSION_PATCH);
}

Communicator::~Communicator() {
  if (birth_.here()) leave();
}

void Communicator::LetGo::operator()(Communicator* c) const {
  if (c->n_holds_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  // Launches that an abort has ended need their memory when their place comes, and in its stream a launch may stand
  // behind one of another communicator, which waits for its own peers.
  if (c->kernel() != nullptr && c->aborted())
    exec::bounded_run(kEndsIn_ns, [c] { delete c; });
  else
    delete c;
}

size_t Communicator::memory_bytes() const {
  const exec::Fabric& f = *fabric_;
  return f.own->bytes() + f.scratch_bytes.load(std::memory_order_relaxed) +
         (f.sent.capacity() + f.awaited.capacity()) * sizeof(uint32_t) +
         (f.entered.capacity() + f.finished.capacity()) * sizeof(uint64_t) + f.links.size() * sizeof(transport::Link) +
         (f.engine != nullptr ? f.engine->memory_bytes() : 0) + (cuda_ != nullptr ? cuda_->memory_bytes() : 0);
}

Status Communicator::force(moecclOp_t op, const std::string& algorithm) {
  // The selectors for host memory, for CUDA memory step by step, and for the persistent kernel.
  std::vector<Selector*> selectors{selector_.get()};
  if (cuda_ != nullptr) selectors.push_back(&cuda_->selector());
  if (cuda_ != nullptr && cuda_->kernel_side() != nullptr) selectors.push_back(&cuda_->kernel_side()->selector());
  const Status never = selector_->can_ever_run(op, algorithm);
  const bool somewhere =
      std::any_of(selectors.begin(), selectors.end(), [&](Selector* s) { return s->can_ever_run(op, algorithm).ok(); });
  if (!somewhere) return never;
  for (Selector* s : selectors) MOECCL_TRY(s->force(op, algorithm));
  return {};
}

bool Communicator::is_device_memory(const void* p) const {
  return cuda_ != nullptr && driver::cuda::pointed(p).on_device();
}

// A program may start CUDA after it has joined. Asking costs about a microsecond, so only calls 1, 2, 3, 5, 9, ... ask.
bool Communicator::may_meet_cuda() const {
  if (!why_no_cuda_.empty() || cuda_is_loaded_.load(std::memory_order_relaxed)) return true;
  const uint32_t n = n_asked_.load(std::memory_order_relaxed);
  n_asked_.store(n + 1, std::memory_order_relaxed);
  if ((n & (n - 1)) != 0 || !driver::cuda::loaded()) return false;
  cuda_is_loaded_.store(true, std::memory_order_relaxed);
  return true;
}

Status Communicator::check_reach(std::initializer_list<const void*> pointers) const {
  if (cuda_ != nullptr || !may_meet_cuda()) return {};
  for (const void* p : pointers) {
    if (p != nullptr && driver::cuda::pointed(p).on_device()) {
      const std::string nobody = driver::cuda::driver() == nullptr ? driver::cuda::why_absent()
                                 : config_.pace
                                     ? "its links are paced"
                                     : "no rank had a current CUDA context when it joined (call cudaSetDevice first)";
      return error(moecclUnsupported, "a buffer is CUDA memory, but this communicator has no CUDA side: {}",
                   why_no_cuda_.empty() ? nobody : why_no_cuda_);
    }
  }
  return {};
}

Status Communicator::copy_across(void* dst, const void* src, size_t bytes, Stream* stream) {
  if (bytes == 0) return {};
  CudaStream* const after = stream != nullptr ? stream->as_cuda() : nullptr;
  const driver::cuda::Current current(cuda_->context());
  MOECCL_ASSIGN_OR_RETURN(const auto earlier,
                          exec::EarlierWork::of(cuda_->context(), after != nullptr ? after->stream() : nullptr));
  MOECCL_TRY(earlier->wait(cuda_->fabric()));
  return driver::cuda::copy_aside(dst, src, bytes, "a table between host and device");
}

void Communicator::hint(Stream* stream) const {
  if (cuda_ == nullptr) return;
  cuda_->stream_decides = stream != nullptr && stream->as_cuda() != nullptr;
  if (cuda_->stream_decides) cuda_->used_last = true;
}

void Communicator::hint(const void* a, const void* b) const {
  if (cuda_ == nullptr || cuda_->stream_decides || (a == nullptr && b == nullptr)) return;
  cuda_->used_last = driver::cuda::pointed(a).on_device() || driver::cuda::pointed(b).on_device();
}

Communicator::OwnExchange::OwnExchange(const Communicator& comm)
    : used_last_(comm.cuda_ != nullptr ? &comm.cuda_->used_last : nullptr) {
  if (used_last_ != nullptr) before_ = std::exchange(*used_last_, false);
}
Communicator::OwnExchange::~OwnExchange() {
  if (used_last_ != nullptr) *used_last_ = before_;
}

Result<exec::Runner*> Communicator::place(const void* a, const void* b, Direct direct) {
  if (cuda_ == nullptr) {
    MOECCL_TRY(check_reach({a, b == a ? nullptr : b}));
    return host_runner_.get();
  }
  const driver::cuda::Pointed at_a = driver::cuda::pointed(a), at_b = b == a ? at_a : driver::cuda::pointed(b);
  bool on_device = at_a.on_device() || at_b.on_device();
  if (a == nullptr && b == nullptr) on_device = cuda_->used_last;
  cuda_->used_last = on_device;
  if (on_device && ((a != nullptr && at_a.type == 0) || (b != nullptr && at_b.type == 0))) {
    return error(moecclInvalidArgument,
                 "one buffer is CUDA memory and the other ordinary host memory: give two of a kind (page-locked memory "
                 "goes with both)");
  }
  if (!on_device) return host_runner_.get();
  MOECCL_TRY(cuda_->open_to_peers(a, direct.a_bytes, at_a));
  if (b != a || direct.b_bytes > direct.a_bytes) MOECCL_TRY(cuda_->open_to_peers(b, direct.b_bytes, at_b));
  return &cuda_->runner();
}

Status Communicator::prepare(exec::Operation& op, uint32_t root, bool scaled, bool in_place) {
  const PlanKey key{op.signature.op, root,    op.signature.count, static_cast<uint32_t>(op.element_bytes),
                    scaled,          in_place};
  KernelSide* walk = op.on_device() && op.signature.op != moecclOpAllToAllv ? cuda_->kernel_side() : nullptr;
  const uint64_t blocks = std::max(plan::in_blocks(key.op, n_ranks_), plan::out_blocks(key.op, n_ranks_));
  if (walk != nullptr && !walk->takes(key.count * key.element_bytes * blocks)) walk = nullptr;
  if (walk != nullptr) op.runner = &walk->runner();
  Selector& selector = walk != nullptr ? walk->selector() : selector_for(op.on_device());
  std::shared_ptr<PlanSlot> made;
  const std::shared_ptr<PlanSlot>* found = selector.again(key);
  if (found == nullptr) {
    MOECCL_ASSIGN_OR_RETURN(made, selector.get(key));
    found = &made;
  }
  attach(op, *found, root, scaled);
  return {};
}

void Communicator::attach(exec::Operation& op, const std::shared_ptr<PlanSlot>& cached, uint32_t root,
                          bool scaled) const {
  op.signature.root = root;
  op.binding.count = op.signature.count;
  op.scaled = scaled;
  op.priority = priority_of(op.signature.op);
  op.ran = nullptr;
  op.is_tried = !op.on_device() && !cached->tried.empty();
  if (op.keep != cached) op.keep = cached;
  run_as(op, *cached);
}

void Communicator::run_as(exec::Operation& op, const PlanSlot& cached) const {
  op.choice = cached.choice;
  op.if_reachable = cached.asks_reach ? &cached.choice_if_reachable : nullptr;
  op.reach_from_bytes = cached.reach_from_bytes;
  op.for_rest = cached.has_rest ? &cached.choice_for_rest : nullptr;
  if (!op.on_device()) op.runner = cached.eager ? eager_runner_.get() : host_runner_.get();
  if (cached.binding != nullptr) op.binding = *cached.binding;
  op.signature.plan = cached.signature;
  op.measured = &cached.measured;
}

Status Communicator::refresh(exec::Operation& op) {
  if (!op.is_tried) return {};
  const auto& slot = *static_cast<const PlanSlot*>(op.keep.get());
  MOECCL_ASSIGN_OR_RETURN(const Selector::Next next, selector_->next(slot, fabric_->sequence + 1, fabric_->ballot));
  if (next.slot != nullptr) run_as(op, *next.slot);
  if (slot.remake != nullptr) op.measured = &slot.measured;  // pages show the last call, whichever plan it ran
  op.ran = next.ran;
  return {};
}

template <class Body>
Status Communicator::run_turn(uint64_t ticket, Body&& body, const std::function<Status()>& rest) {
  const Turn turn(turns_, ticket);
  Status status = shielded(body);
  if (status.ok() && rest) status = contained(rest);
  if (exec::StreamWork* work = exec::StreamWork::current(); work != nullptr) work->end(status);
  if (!status.ok()) set_last_error(status.message());
  return status;
}

Status Communicator::begin_usable() {
  Status s = usable();
  if (!s.ok()) break_off(s);
  return s;
}

Status Communicator::run_message(const exec::Message& message) {
  return run_turn(take_ticket(), [&]() -> Status {
    MOECCL_TRY(begin_usable());
    exec::MessageTask task(*fabric_, message, nullptr);
    return exec::drive(task);
  });
}

Status Communicator::run(exec::Operation& op) {
  if (Status s = refresh(op); !s.ok()) {
    break_off(s);  // peers that have made their plan would wait for this rank
    return s;
  }
  return op.runner->run(op);
}

void Communicator::promise(exec::Operation& op) {
  if (exec::PersistentKernel* kernel = op.runner->kernel(); kernel != nullptr) op.promise = kernel->promise();
}

Status Communicator::run_in_turn(uint64_t ticket, exec::Operation& op, const std::function<Status()>& rest) {
  const auto body = [&]() -> Status {
    const exec::Promise until_run = std::move(op.promise);
    MOECCL_TRY(begin_usable());
    return run(op);
  };
  return run_turn(ticket, body, rest);
}

Status Communicator::run_on_device(uint64_t ticket, const std::function<void(const kernels::KernelTable&)>& body) {
  return run_turn(ticket, [&]() -> Status {
    MOECCL_TRY(usable());
    Status ran = cuda_->runner().begin();
    if (ran.ok()) {
      const exec::StreamEngine::Scope scope(cuda_->engine());
      body(exec::StreamEngine::table());
    }
    return cuda_->runner().end(std::move(ran));
  });
}

Result<void*> Communicator::announce(const void* ptr, size_t bytes) {
  constexpr uint64_t kAddressEnd = uint64_t{1} << 57;  // of 64-bit processors
  const auto begin = reinterpret_cast<uint64_t>(ptr);
  if (ptr == nullptr || bytes == 0 || begin >= kAddressEnd || bytes > kAddressEnd - begin)
    return error(moecclInvalidArgument, "ptr is {} and bytes {}: give memory to register", ptr, bytes);
  // Where no network needs it, a handle only stands for its call. The low byte distinguishes it from other handles.
  static std::atomic<uint64_t> made{0};
  void* const registration = reinterpret_cast<void*>(++made << 8 | 0xCA);
  auto* const base = static_cast<std::byte*>(const_cast<void*>(ptr));
  registrations_.emplace(registration, std::pair(base, bytes));
  if (fabric_->engine != nullptr) fabric_->engine->lend(base, bytes);
  return registration;
}

Status Communicator::forget(void* registration) {
  if (const auto at = registrations_.find(registration); at != registrations_.end()) {
    if (fabric_->engine != nullptr) fabric_->engine->take_back(at->second.first, at->second.second);
    registrations_.erase(at);
    return {};
  }
  return error(moecclInvalidArgument,
               "handle is {}: give one of moecclCommRegister on this communicator, each only once", registration);
}

Status forked_communicator() {
  return error(moecclInvalidUsage,
               "the communicator belongs to the process that this one was forked from: initialise one here");
}

Status Communicator::usable() const {
  if (!birth_.here()) return forked_communicator();
  if (fabric_->failed()) return fabric_->failure();
  if (cuda_ != nullptr && cuda_->fabric().failed()) return cuda_->fabric().failure();
  if (exec::PersistentKernel* const device = kernel(); device != nullptr) {
    // Nothing else notices a failure in a graph's replay.
    if (Status s = device->failure(); !s.ok()) {
      cuda_->fabric().fail(s);
      return cuda_->fabric().failure();
    }
  }
  if (fabric_->aborted.load(std::memory_order_relaxed)) {
    return error(moecclAborted, "the communicator was aborted: destroy it");
  }
  return {};
}

bool Communicator::settled() const {
  return turns_.idle() || (kernel() != nullptr && turns_.only_watches() && kernel()->idle());
}

void Communicator::abort() {
  fabric_->aborted.store(true, std::memory_order_relaxed);
  if (cuda_ != nullptr) {
    cuda_->fabric().aborted.store(true, std::memory_order_relaxed);
    cuda_->fabric().fail(error(moecclAborted, "rank {} aborted the communicator", rank_));
    if (kernel() != nullptr) kernel()->stop();
  }
  fabric_->fail(error(moecclAborted, "rank {} aborted the communicator", rank_));
  turns_.close();
  meetings_.call_off(error(moecclAborted, "rank {} aborted the communicator", rank_));
  companions_->for_each([](Communicator& c) { c.abort(); });
}

Status Communicator::without_turn() const {
  MOECCL_TRY(usable());
  return error(moecclAborted, "rank {} aborted the communicator", rank_);
}

void Communicator::revoke() {
  const Status why = error(moecclAborted, "rank {} revoked the communicator", rank_);
  if (cuda_ != nullptr) {
    cuda_->fabric().revoke(why);
    if (kernel() != nullptr) kernel()->stop();
  }
  fabric_->revoke(why);
  companions_->for_each([](Communicator& c) { c.revoke(); });
}

void Communicator::notice_peers() {
  if (!birth_.here()) return;
  exec::PersistentKernel* const device = kernel();
  if (fabric_->failed()) {  // on host memory, of which the kernel knows nothing
    if (device != nullptr && device->has_captured()) device->stop();
    return;
  }
  Status why = exec::check_revoked(*fabric_);
  // No task looks for peers that a graph's replay waits for, and the one that watches a launch may come behind one that
  // waits in the driver.
  if (why.ok() && device != nullptr)
    why = exec::check_peers(cuda_->fabric(), [&](uint32_t p) { return device->waits_for(p); });
  if (why.ok()) return;
  if (cuda_ != nullptr) cuda_->fabric().fail(why);
  if (device != nullptr) device->stop();
  fabric_->fail(why);
}

uint8_t Communicator::priority_of(moecclOp_t op) const {
  return static_cast<uint8_t>(exec::traffic_class(op, fabric_->priority.load(std::memory_order_relaxed)) + 1);
}

void Communicator::set_priority(int priority) { fabric_->priority.store(priority, std::memory_order_relaxed); }

void Communicator::leave() {
  if (cuda_ != nullptr && !cuda_->fabric().failed()) {
    // The stream may still have signals to store. The news that this rank has left must not overtake them: a peer that
    // waits for one would take the operation for one in which this rank does not take part.
    cuda_->engine().drain();
    cuda_->fabric().publish_state(transport::RankState::kLeft, moecclSuccess, "");
  }
  if (fabric_->failed() || fabric_->own == nullptr) return;
  fabric_->publish_state(transport::RankState::kLeft, moecclSuccess, "");
}

void Communicator::break_off(const Status& status) noexcept {
  if (!birth_.here()) return;
  fabric_->fail(status);
  if (cuda_ != nullptr) cuda_->fabric().fail(status);
}

void Communicator::set_last_error(const std::string& text) noexcept {
  if (!birth_.here()) return;
  const std::lock_guard lock(error_mutex_);
  try {
    last_error_ = text;
  } catch (const std::bad_alloc&) {
    last_error_ = "out of memory";  // short enough to need no memory
  }
}

std::string Communicator::last_error() const {
  const std::lock_guard lock(error_mutex_);
  return last_error_;
}

}  // namespace moeccl::comm
