// SPDX-License-Identifier: Apache-2.0
// One rank's membership: everything that its operations need, and their order.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "src/comm/collective_call.h"
#include "src/comm/group_holds.h"
#include "src/comm/turns.h"
#include "src/driver/fork_page.h"
#include "src/exec/eager.h"
#include "src/exec/execution.h"
#include "src/exec/fabric.h"
#include "src/exec/message.h"
#include "src/select/selection.h"
#include "src/world/config.h"
#include "src/world/membership.h"
#include "src/world/shared_uplinks.h"

namespace moeccl::comm {

class Communicator {
 public:
  // parent: the communicator that this one is split from, whose uplinks it shares.
  static Result<std::unique_ptr<Communicator>> init(const moecclUniqueId& id, int n_ranks, int rank,
                                                    const Config& config, const Parent& parent = {});
  // Of ranks that have met again.
  static Result<std::unique_ptr<Communicator>> init(Reunion& met, const Config& config, const Parent& parent);
  ~Communicator();

  uint32_t rank() const { return rank_; }
  uint32_t n_ranks() const { return n_ranks_; }
  const Config& config() const { return config_; }
  exec::Fabric& fabric() { return *fabric_; }
  Selector& selector() { return *selector_; }
  const Selector& selector() const { return *selector_; }
  // What the last call of an operation ran, for one with the same placement (expert_calls.cc) or the same sizes
  // (tensor_blocks_call.cc).
  std::shared_ptr<const void>& kept_plan(moecclOp_t op) { return kept_plans_[op]; }
  // Forces an algorithm for host and CUDA memory alike.
  Status force(moecclOp_t op, const std::string& algorithm);

  // CUDA memory; null when ranks joined without CUDA.
  CudaSide* cuda() const { return cuda_.get(); }
  // Of one kind of memory; the persistent kernel has a selector of its own.
  Selector& selector_for(bool on_device) const { return on_device ? cuda_->selector() : *selector_; }
  exec::Fabric& fabric_for(bool on_device) { return on_device ? cuda_->fabric() : *fabric_; }
  // Between host and CUDA memory, for the small tables that the host works on. Waits.
  bool is_device_memory(const void* p) const;
  Status copy_across(void* dst, const void* src, size_t bytes);
  // What runs an operation, step by step, on the kind of memory that a call's buffers are. Null ones say nothing, and a
  // call without any uses what the last one did. Of CUDA buffers so many bytes are opened to kernels of this process's
  // other ranks, which use them directly.
  struct Direct {
    size_t a_bytes = 0, b_bytes = 0;
  };
  Result<exec::Runner*> place(const void* a, const void* b, Direct direct);
  Result<exec::Runner*> place(const void* a, const void* b) { return place(a, b, Direct()); }
  const plan::LevelTree& tree() const { return selector_->tree(); }
  bool paced() const { return config_.pace; }
  const std::shared_ptr<const SharedUplinks>& uplinks() const { return uplinks_; }
  // The class of calls from now on; 0: by operation.
  void set_priority(int priority);
  uint8_t priority_of(moecclOp_t op) const;  // of a call made now
  // Where ranks on other hosts reach this one; empty: all ranks are on this host.
  const std::string& address() const { return address_; }
  // Where its ranks meet when some are lost.
  const MeetingPlaces& places() const { return places_; }
  uint64_t operation_staging_bytes() const { return fabric_->half_bytes; }
  size_t memory_bytes() const;

  // Fills an operation's plan and divisor for a standard collective.
  Status prepare(exec::Operation& op, uint32_t root, bool scaled, bool in_place);
  // A blocking call's: waits for its turn and has `body` (Status of a PreparedCalls&) run on this thread.
  template <class Body>
  Status in_turn(Body&& body) {
    const Turn turn(turns_, take_ticket());
    return shielded([&] { return body(calls_); });
  }
  // Runs a part of an operation. When it throws, peers would wait for this rank: the communicator fails, and they hear
  // of it.
  template <class Body>
  Status shielded(Body&& body) {
    try {
      return body();
    } catch (const std::exception& e) {
      Status status = caught(e);
      break_off(status);
      return status;
    }
  }
  // Ends the communicator with this failure, which the peers are told.
  void break_off(const Status& status) noexcept;
  bool runs_eagerly(const exec::Operation& op) const { return op.runner == eager_runner_.get(); }
  // Whether an operation on host memory can run without a look at where its buffers are.
  bool runs_on_host() const { return cuda_ == nullptr && why_no_cuda_.empty(); }
  // Of an AllToAllv whose plans are tried; see Trials.
  exec::Operation::Ran* still_small() { return selector_->trials().still_small(); }
  // The same with a plan that is at hand.
  void attach(exec::Operation& op, const std::shared_ptr<PlanSlot>& cached, uint32_t root, bool scaled) const;
  // Sends or receives in its turn.
  Status run_message(const exec::Message& message);
  // Before an operation runs, in its turn: makes its choice again when the profile was corrected since. All ranks have
  // corrected it after the same operations, and so all choose alike.
  Status refresh(exec::Operation& op);
  // Runs a prepared operation on this thread, when its turn has come.
  Status run(exec::Operation& op);
  // Waits for the ticket's turn, runs, keeps the sentence of a failure, and gives the turn on.
  Status run_in_turn(uint64_t ticket, exec::Operation& op);
  // This rank's own work on CUDA memory in its turn, with the engine's kernels: comes after what the rank's stream has,
  // and on no stream of the caller's waits for its end. Needs cuda().
  Status run_on_device(uint64_t ticket, const std::function<void(const kernels::KernelTable&)>& body);

  // Operations run in the order in which their calls were made, whatever stream they are on.
  uint64_t take_ticket(bool watches = false) { return turns_.take(watches); }
  void wait_turn(uint64_t ticket) { turns_.wait(ticket); }
  void end_turn() { turns_.end(); }
  Status wait_idle();
  bool idle() const { return turns_.idle(); }
  // Every operation has run, although a thread that watched the device may not have seen it yet.
  bool settled() const;

  Status usable() const;  // the failure, abort or fork that forbids further operations
  // The same for runs_on_host(), without the sentence.
  bool is_usable() const {
    return birth_.here() && !fabric_->failed() && !fabric_->aborted.load(std::memory_order_relaxed);
  }
  void abort();
  // Ends all operations on all ranks, and forbids further ones; see moecclCommRevoke. Any thread.
  void revoke();
  // Fails this rank too, when another one has revoked the communicator. Any thread.
  void notice_revoke();
  // Says to the peers that this rank will take no further part.
  void leave();

  // Any thread.
  void set_last_error(const std::string& text) noexcept;
  std::string last_error() const;

  // Calls of open groups.
  GroupHolds& group_holds() { return group_holds_; }

  // premulsum operators, by number - MOECCL_NUM_REDUCTIONS.
  struct PreMul {
    bool used = false;
    moecclDataType_t type = moecclFloat32;
    kernels::Scalar scalar{};
    const void* scalar_at = nullptr;  // in CUDA memory: read by each operation
  };
  std::vector<PreMul> premuls;

  // Numbers of routings, by which their dispatches and combines are told apart.
  uint64_t next_number() { return ++numbers_; }

  // Memory that the caller announced, by handle; each handle is used once in a process.
  Result<void*> announce(const void* ptr, size_t bytes);
  Status forget(void* registration);

 private:
  static Result<std::unique_ptr<Communicator>> of(Membership&& m);
  explicit Communicator(Membership&& m) noexcept;
  void set_up(Membership&& m);
  void run_as(exec::Operation& op, const PlanSlot& cached) const;  // op.keep owns `cached`, or what owns it

  uint32_t rank_, n_ranks_;
  Config config_;
  std::string address_;
  MeetingPlaces places_;
  const driver::Birth birth_;
  GroupHolds group_holds_;
  std::map<void*, std::pair<std::byte*, size_t>> registrations_;  // by handle
  std::unique_ptr<exec::Fabric> fabric_;
  std::unique_ptr<exec::Runner> host_runner_, eager_runner_;
  std::shared_ptr<const SharedUplinks> uplinks_;
  std::unique_ptr<CudaSide> cuda_;
  std::string why_no_cuda_;
  std::unique_ptr<Selector> selector_;
  std::shared_ptr<const void> kept_plans_[MOECCL_NUM_OPS];

  std::atomic<uint64_t> numbers_{0};
  Turns turns_;
  PreparedCalls calls_;

  mutable std::mutex error_mutex_;
  std::string last_error_;
};

// Why a forked child cannot use its parent's.
Status forked_communicator();

}  // namespace moeccl::comm
