#include "src/comm/communicator.h"

#include <algorithm>

#include "src/base/env.h"
#include "src/base/log.h"
#include "src/comm/calibrate.h"

namespace moeccl::comm {

Result<std::unique_ptr<Communicator>> Communicator::init(const moecclUniqueId& id, int n_ranks, int rank,
                                                         const Config& config) {
  MOECCL_ASSIGN_OR_RETURN(Membership m,
                          connect(id, static_cast<uint32_t>(n_ranks), static_cast<uint32_t>(rank), config));
  m.fabric->kernels = env().kernels.empty() ? &kernels::best() : kernels::select(env().kernels.c_str());
  if (m.fabric->kernels == nullptr) {
    return error(moecclInvalidArgument,
                 "MOECCL_KERNELS={}: give reference, avx2 or avx512, as far as this processor runs them",
                 env().kernels);
  }
  std::unique_ptr<Communicator> c(new Communicator(std::move(m)));
  MOECCL_TRY(c->selector_->force_from_text(c->config_.plan));
  MOECCL_TRY(profile_at_init(*c));
  return c;
}

Communicator::Communicator(Membership m)
    : rank_(m.rank),
      n_ranks_(m.n_ranks),
      config_(std::move(m.config)),
      address_(std::move(m.address)),
      fabric_(std::move(m.fabric)) {
  // With a core for each rank a signal arrives within a microsecond or two: polling is cheaper than giving up the core.
  // With more ranks than cores the one we wait for may need ours. Measured in docs/decisions.md.
  const bool fits = m.ranks_on_host <= m.cores_on_host;
  fabric_->spin_polls = env().spin_us >= 0 ? static_cast<uint32_t>(env().spin_us) * 50u : fits ? 200u : 4u;
  plan::Profile profile;
  profile.cores = m.cores;
  selector_ = std::make_unique<Selector>(rank_, std::move(m.tree), m.reach, m.heap_reach, m.reach.staging,
                                         config_.deterministic, fabric_->half_bytes, profile);
  fabric_->outboxes.resize(n_ranks_);
  for (uint32_t p = 0; p < n_ranks_; ++p) {
    if (p != rank_) fabric_->outboxes[p] = fabric_->link(p).outbox(0);
  }
}

Communicator::~Communicator() {
  if (*not_forked_ != 0) leave();
}

size_t Communicator::memory_bytes() const {
  const exec::Fabric& f = *fabric_;
  return f.own->bytes() + f.scratch.capacity() + (f.sent.capacity() + f.awaited.capacity()) * sizeof(uint32_t) +
         f.entered.capacity() * sizeof(uint64_t) + f.links.size() * sizeof(transport::Link);
}

Status Communicator::prepare(exec::Operation& op, uint32_t root, bool scaled, bool in_place) {
  const PlanKey key{op.signature.op, root,    op.signature.count, static_cast<uint32_t>(op.element_bytes),
                    scaled,          in_place};
  std::shared_ptr<CachedPlan> made;
  const std::shared_ptr<CachedPlan>* found = selector_->again(key);
  if (found == nullptr) {
    MOECCL_ASSIGN_OR_RETURN(made, selector_->get(key));
    found = &made;
  }
  attach(op, *found, root, scaled);
  return {};
}

void Communicator::attach(exec::Operation& op, const std::shared_ptr<CachedPlan>& cached, uint32_t root,
                          bool scaled) const {
  op.choice = cached->choice;
  op.if_reachable = cached->asks_reach ? &cached->choice_if_reachable : nullptr;
  op.for_rest = cached->has_rest ? &cached->choice_for_rest : nullptr;
  op.eager = cached->eager;
  op.signature.plan = cached->signature;
  op.signature.root = root;
  op.binding.count = op.signature.count;
  op.scaled = scaled;
  op.measured = &cached->measured;
  if (op.keep != cached) op.keep = cached;
}

Status Communicator::run_message(const exec::Message& message) {
  MOECCL_TRY(wait_turn(take_ticket()));
  Status status = usable();
  if (status.ok()) {
    exec::MessageTask one(*fabric_, message, nullptr);
    exec::Task* task = &one;
    status = exec::drive({&task, 1});
  }
  if (!status.ok()) set_last_error(status.message());
  end_turn();
  return status;
}

Status Communicator::run(const exec::Operation& op) {
  const auto drive = [](exec::Task&& task) {
    exec::Task* one = &task;
    return exec::drive({&one, 1});
  };
  return op.eager ? drive(exec::Eager(*fabric_, op)) : drive(exec::Execution(*fabric_, op));
}

Status Communicator::run_timed(const exec::Operation& op, double* measured_us) {
  const int64_t start = now_ns();
  Status s = run(op);
  if (measured_us != nullptr) *measured_us = static_cast<double>(now_ns() - start) / 1e3;
  return s;
}

Status Communicator::run_in_turn(uint64_t ticket, const exec::Operation& op, double* measured_us) {
  MOECCL_TRY(wait_turn(ticket));
  Status status = usable();
  if (status.ok()) status = measured_us == nullptr ? run(op) : run_timed(op, measured_us);
  if (!status.ok()) set_last_error(status.message());
  end_turn();
  return status;
}

Status Communicator::wait_turn(uint64_t ticket) {
  turns_.wait(ticket);
  return {};
}

Status Communicator::wait_idle() {
  const uint64_t ticket = take_ticket();
  Status s = wait_turn(ticket);
  end_turn();
  return s;
}

Status Communicator::usable() const {
  if (*not_forked_ == 0) {
    return error(moecclInvalidUsage,
                 "the communicator belongs to the process that this one was forked from: initialise one here");
  }
  if (fabric_->failed()) return fabric_->failure();
  if (fabric_->aborted.load(std::memory_order_relaxed)) {
    return error(moecclAborted, "the communicator was aborted: destroy it");
  }
  return {};
}

void Communicator::abort() {
  fabric_->aborted.store(true, std::memory_order_relaxed);
  fabric_->fail(error(moecclAborted, "rank {} aborted the communicator", rank_));
}

void Communicator::leave() {
  if (fabric_->failed() || fabric_->own == nullptr) return;
  fabric_->publish_state(transport::RankState::kLeft, moecclSuccess, "");
}

void Communicator::set_last_error(const std::string& text) {
  const std::lock_guard lock(error_mutex_);
  last_error_ = text;
}

const char* Communicator::last_error() {
  const std::lock_guard lock(error_mutex_);
  last_error_shown_ = last_error_;
  return last_error_shown_.c_str();
}

}  // namespace moeccl::comm
