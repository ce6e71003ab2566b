// SPDX-License-Identifier: Apache-2.0
// One rank's membership: everything that its operations need, and the order in which they run.
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
#include "src/comm/companions.h"
#include "src/comm/group_holds.h"
#include "src/comm/meeting.h"
#include "src/comm/premuls.h"
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

class Stream;

class Communicator {
 public:
  // `parent` is the communicator from which this one is split and whose uplinks it shares.
  static Result<std::unique_ptr<Communicator>> init(const moecclUniqueId& id, int n_ranks, int rank,
                                                    const Config& config, const Parent& parent = {});
  // Makes a communicator of ranks that have met again.
  static Result<std::unique_ptr<Communicator>> init(Reunion& met, const Config& config, const Parent& parent);
  ~Communicator();
  // The communicator's memory stays while there are holds. A handle has one, and so has work on a stream until it
  // begins: after an abort, Destroy does not wait for that work, which then only reports the abort.
  struct LetGo {
    void operator()(Communicator* c) const;
  };
  // The longest wait of an object's end after an abort. The memory that a peer may still use is kept for a second.
  static constexpr int64_t kEndsIn_ns = 1'500'000'000;
  using Hold = std::unique_ptr<Communicator, LetGo>;
  Hold hold() {
    n_holds_.fetch_add(1, std::memory_order_relaxed);
    return Hold(this);
  }

  uint32_t rank() const { return rank_; }
  uint32_t n_ranks() const { return n_ranks_; }
  const Config& config() const { return config_; }
  exec::Fabric& fabric() { return *fabric_; }
  Selector& selector() { return *selector_; }
  const Selector& selector() const { return *selector_; }
  // Returns what the last call of an operation ran, for another call with the same placement (expert_calls.cc) or the
  // same sizes (tensor_blocks_call.cc).
  std::shared_ptr<const void>& kept_plan(moecclOp_t op) { return kept_plans_[op]; }
  // Forces an algorithm for both host and CUDA memory.
  Status force(moecclOp_t op, const std::string& algorithm);

  // Returns the part for CUDA memory, or null if the ranks joined without CUDA.
  CudaSide* cuda() const { return cuda_.get(); }
  // Returns its persistent kernel, or null if there is none.
  exec::PersistentKernel* kernel() const {
    KernelSide* const side = cuda_ != nullptr ? cuda_->kernel_side() : nullptr;
    return side != nullptr ? &side->kernel() : nullptr;
  }
  // Return the selector and the fabric for one kind of memory. The persistent kernel has a selector of its own.
  Selector& selector_for(bool on_device) const { return on_device ? cuda_->selector() : *selector_; }
  exec::Fabric& fabric_for(bool on_device) { return on_device ? cuda_->fabric() : *fabric_; }
  // For copies between host and CUDA memory of the small tables that the host works on. copy_across() comes after the
  // earlier work of a CUDA stream, or otherwise of the default stream, and waits.
  bool is_device_memory(const void* p) const;
  // Returns an error if a pointer is to CUDA memory that this communicator cannot reach. Called before the host reads
  // or writes what the caller gave.
  Status check_reach(std::initializer_list<const void*> pointers) const;
  Status copy_across(void* dst, const void* src, size_t bytes, Stream* stream = nullptr);
  // Returns the runner that executes an operation step by step on the kind of memory of a call's buffers. Null buffers
  // do not determine the kind, and a call without any uses that of the last call. The given numbers of bytes of CUDA
  // buffers are opened to kernels of this process's other ranks, which use them directly.
  struct Direct {
    size_t a_bytes = 0, b_bytes = 0;
  };
  Result<exec::Runner*> place(const void* a, const void* b, Direct direct);
  Result<exec::Runner*> place(const void* a, const void* b) { return place(a, b, Direct()); }
  const plan::LevelTree& tree() const { return selector_->tree(); }
  bool paced() const { return config_.pace; }
  const std::shared_ptr<const SharedUplinks>& uplinks() const { return uplinks_; }
  const std::shared_ptr<const plan::LevelTree>& described() const { return described_; }  // see Membership
  // Sets the class of calls from now on; 0 means by operation.
  void set_priority(int priority);
  uint8_t priority_of(moecclOp_t op) const;  // for a call made now
  // Returns the address where ranks on other hosts reach this one; empty if all ranks are on this host.
  const std::string& address() const { return address_; }
  // Returns the places where its ranks meet when some are lost.
  const MeetingPlaces& places() const { return places_; }
  // See Membership; only the first call returns it.
  std::string take_profile_text() { return std::exchange(profile_text_, {}); }
  uint64_t operation_staging_bytes() const { return fabric_->half_bytes; }
  size_t memory_bytes() const;

  // Fills an operation's plan and divisor for a standard collective.
  Status prepare(exec::Operation& op, uint32_t root, bool scaled, bool in_place);
  // For blocking calls: waits for its turn and runs `body` (Status of a PreparedCalls&) on this thread.
  template <class Body>
  Status in_turn(Body&& body) {
    const Turn turn(turns_, take_ticket());
    if (!turn.came()) return without_turn();  // another thread may still use what the body would change
    return shielded([&] { return body(calls_); });
  }
  // Returns why there are no turns any more.
  Status without_turn() const;
  // Runs a part of an operation. If it throws, peers would wait for this rank, so the communicator fails and they are
  // told.
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
  // Fails the communicator for good and tells the peers.
  void break_off(const Status& status) noexcept;
  // Returns usable(). If one kind of memory has failed, both have: peers may wait for this rank on the other one.
  Status begin_usable();
  bool runs_eagerly(const exec::Operation& op) const { return op.runner == eager_runner_.get(); }
  // Returns true if an operation on host memory can run without checking where its buffers are.
  bool runs_on_host() const { return cuda_ == nullptr && why_no_cuda_.empty(); }
  // For an AllToAllv whose plans are tried; see Trials.
  exec::Operation::Ran* still_small() { return selector_->trials().still_small(); }
  // Fills an operation like prepare(), with an existing plan.
  void attach(exec::Operation& op, const std::shared_ptr<PlanSlot>& cached, uint32_t root, bool scaled) const;
  // Sends or receives in its turn.
  Status run_message(const exec::Message& message);
  // Called in an operation's turn before it runs: picks the plan that a trial runs next.
  Status refresh(exec::Operation& op);
  // Runs a prepared operation on this thread once its turn has come.
  Status run(exec::Operation& op);
  // Records the kind of memory of a call that may carry no bytes. It is taken from the stream, or from the pointers.
  void hint(Stream* stream) const;
  void hint(const void* a, const void* b) const;
  // The library's own exchanges leave the kind of the program's last call as it was.
  class OwnExchange {
   public:
    explicit OwnExchange(const Communicator& comm);
    ~OwnExchange();
    OwnExchange(const OwnExchange&) = delete;
    OwnExchange& operator=(const OwnExchange&) = delete;

   private:
    bool* used_last_;
    bool before_ = false;
  };
  // For an operation that a thread runs later than the calls of its own thread that follow: keeps its place among them.
  static void promise(exec::Operation& op);
  // Waits for the ticket's turn, runs, ends the operation's promise, stores the message of a failure, and passes the
  // turn on. `rest`, if given, is what a call still does after an operation that succeeded; the turn lasts until then.
  Status run_in_turn(uint64_t ticket, exec::Operation& op, const std::function<Status()>& rest = nullptr);
  // Runs this rank's own work on CUDA memory in its turn, with the engine's kernels. It follows the earlier work of the
  // rank's stream. For a call that is on none of the caller's streams, it waits until the work has ended. Requires
  // cuda().
  Status run_on_device(uint64_t ticket, const std::function<void(const kernels::KernelTable&)>& body);

  // Operations run in the order of their calls, whatever stream they are on.
  uint64_t take_ticket() { return turns_.take(); }
  // For work on a stream: begin_queued() comes before the wait for the turn. It returns false if the communicator was
  // aborted before; the turn then does not come, and is not ended.
  uint64_t queue_ticket(bool watches = false) { return turns_.take_queued(watches); }
  bool begin_queued() { return turns_.begin(); }
  void wait_turn(uint64_t ticket) { turns_.wait(ticket); }
  void end_turn() { turns_.end(); }
  void wait_idle(const std::function<bool()>& given_up = {}) { turns_.wait_idle(given_up); }
  bool idle() const { return turns_.idle(); }
  // Returns true if every operation has run, even if a thread that watches the device has not noticed yet.
  bool settled() const;

  Status usable() const;  // returns the failure, abort or fork that forbids further operations
  // The same for runs_on_host(), without the message.
  bool is_usable() const {
    return birth_.here() && !fabric_->failed() && !fabric_->aborted.load(std::memory_order_relaxed);
  }
  void abort();
  bool aborted() const { return fabric_->aborted.load(std::memory_order_relaxed); }
  // Ends all operations on all ranks and forbids further ones; see moecclCommRevoke. Any thread.
  void revoke();
  // Fails this rank too if another one has revoked the communicator, or, where an operation on the device may be
  // waiting for it, has failed or been lost. Any thread.
  void notice_peers();
  // Tells the peers that this rank will take no further part.
  void leave();

  // May be called from any thread.
  void set_last_error(const std::string& text) noexcept;
  std::string last_error() const;

  // Counts the calls in open groups.
  GroupHolds& group_holds() { return group_holds_; }

  Meetings& meetings() { return meetings_; }

  // The communicators that end with an abort or a revocation of this one.
  const std::shared_ptr<Companions>& companions() const { return companions_; }

  PreMuls& premuls() { return premuls_; }

  // Returns a number for a routing, which distinguishes its dispatches and combines from others.
  uint64_t next_number() { return ++numbers_; }

  // Memory that the caller has registered, by handle. Each handle is used only once in a process.
  Result<void*> announce(const void* ptr, size_t bytes);
  Status forget(void* registration);

 private:
  static Result<std::unique_ptr<Communicator>> of(Membership&& m);
  explicit Communicator(Membership&& m) noexcept;
  void set_up(Membership&& m);
  // Returns a sentence for MOECCL_DEBUG=INFO: ranks, hosts, cores, levels and how buffers are reached.
  std::string summary(uint32_t ranks_on_host, uint32_t cores_on_host, plan::Reach reach) const;
  bool may_meet_cuda() const;
  // Runs `body`, which checks usable(), and then `rest` in the ticket's turn; notes how they ended.
  template <class Body>
  Status run_turn(uint64_t ticket, Body&& body, const std::function<Status()>& rest = nullptr);
  void run_as(exec::Operation& op, const PlanSlot& cached) const;  // op.keep must own `cached` or its owner

  uint32_t rank_, n_ranks_;
  Config config_;
  std::string address_;
  MeetingPlaces places_;
  std::string profile_text_;
  const driver::Birth birth_;
  std::atomic<uint32_t> n_holds_{1};
  GroupHolds group_holds_;
  std::shared_ptr<Companions> companions_;
  PreMuls premuls_;
  std::map<void*, std::pair<std::byte*, size_t>> registrations_;  // by handle
  std::unique_ptr<exec::Fabric> fabric_;
  std::unique_ptr<exec::Runner> host_runner_, eager_runner_;
  std::shared_ptr<const SharedUplinks> uplinks_;
  std::shared_ptr<const plan::LevelTree> described_;
  std::unique_ptr<CudaSide> cuda_;
  std::string why_no_cuda_;
  mutable std::atomic<uint32_t> n_asked_{0};  // see may_meet_cuda()
  mutable std::atomic<bool> cuda_is_loaded_{false};
  std::unique_ptr<Selector> selector_;
  std::shared_ptr<const void> kept_plans_[MOECCL_NUM_OPS];

  std::atomic<uint64_t> numbers_{0};
  Turns turns_;
  Meetings meetings_;
  PreparedCalls calls_;

  mutable std::mutex error_mutex_;
  std::string last_error_;
};

// Ends the hold of a communicator's handle.
inline void dispose(Communicator* comm) { Communicator::LetGo()(comm); }

// Returns the error for a forked child that uses its parent's communicator.
Status forked_communicator();

}  // namespace moeccl::comm
