// SPDX-License-Identifier: Apache-2.0
// What an ncclComm_t of the shim stands for, and which threads are using it.
#pragma once

#include <moeccl/moeccl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "shim/nccl/rma.h"
#include "shim/nccl/settings.h"

namespace moeccl::shim {

// One rank's communicator. It is served by MoECCL or, as a whole and on all its ranks, by the real NCCL.
struct Comm {
  moecclComm_t ours = nullptr;
  ncclComm_t real = nullptr;  // set: everything is forwarded to it
  int rank = -1, n_ranks = 0;
  int device = -1;             // CUDA ordinal, -1 without one
  bool shares_device = false;  // another rank, a thread of this process, uses the same device
  bool blocking = true;
  bool graph_mixing = true;  // false: the program promised not to mix graphs with other work (graphUsageMode)
  std::string name;
  const pid_t process = getpid();        // a forked child only forgets it
  std::array<unsigned char, 16> seed{};  // the same random bytes on all ranks, which keep them secret

  // ncclInProgress while it is being made, then the result.
  std::atomic<ncclResult_t> state{ncclSuccess};
  std::atomic<bool> settled{true};  // false while its parent still counts it, after it was made in the background
  std::atomic<int> children{0};     // communicators that are being made from this one in the background
  std::atomic<int> orphans{0};      // of them, those that were aborted and are no longer among `children`
  std::atomic<bool> revoked{false};
  std::atomic<bool> suspended{false};
  std::atomic<bool> finalized{false};
  std::atomic<bool> given_up{false};    // aborted, revoked or destroyed: no thread waits on it any longer
  std::atomic<uint64_t> group{0};       // the last group of several communicators that it was in; 0: called alone since
  std::atomic<int> users{0};            // threads inside a call on it
  std::atomic<bool> any_chosen{false};  // whether `chosen` has held anything

  Rma rma;  // puts and signals, while MoECCL serves it

  // Operators of ncclRedOpCreatePreMulSum, at number - ncclNumOps.
  struct PreMul {
    bool used = false;
    moecclRedOp_t made = 0;        // MoECCL's operator; or
    const void* scalar = nullptr;  // ncclScalarDevice in host memory: read when a collective is called
    ncclDataType_t type = ncclFloat32;
  };
  std::mutex mutex;                  // guards the members below
  bool abandoned = false;            // aborted while it was being made: the thread that makes it frees it
  std::shared_ptr<Comm> counted_by;  // the one whose `children` counts this one
  moecclComm_t working = nullptr;    // what the thread that makes it works on, for an abort
  bool aborted = false;              // with all that is being made from it:
  std::vector<Comm*> making;
  std::atomic<bool> cancelled{false};  // its making ends soon (shim_requests.h); set under `mutex`
  std::vector<PreMul> premuls;
  // What the last call with a config (call_config.h) forced for each operation, and what was forced before it.
  struct Chosen {
    std::string wanted, before;
    size_t count = 0;
    ncclDataType_t type = ncclFloat32;
  };
  std::map<moecclOp_t, Chosen> chosen;
};
using CommPtr = std::shared_ptr<Comm>;

// A communicator in use. It is not freed before the last holder lets go.
class Held {
 public:
  Held() = default;
  explicit Held(CommPtr comm) : comm_(std::move(comm)) {}  // hold() has raised `users`
  ~Held() {
    if (comm_) comm_->users.fetch_sub(1, std::memory_order_release);  // acquired in wait_unused()
  }
  Held(Held&& other) noexcept : comm_(std::move(other.comm_)) {}
  Held& operator=(Held&& other) noexcept {
    std::swap(comm_, other.comm_);
    return *this;
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  Comm* operator->() const { return comm_.get(); }
  Comm& operator*() const { return *comm_; }
  explicit operator bool() const { return comm_ != nullptr; }
  const CommPtr& pointer() const { return comm_; }

 private:
  CommPtr comm_;
};

// The handles that programs hold. A handle is the object's address; one that is not in this list is not ours.
ncclComm_t publish(CommPtr comm);
Held hold(ncclComm_t handle);
// Takes the handle out of the list: it is dead from now on. Returns null when it is not a live one of ours.
CommPtr withdraw(ncclComm_t handle);
// Waits until no thread is inside a call on a withdrawn communicator.
void wait_unused(const Comm& comm);
// Returns whether a communicator of its last group is still in use.
bool others_go_on(const Comm& withdrawn);

// Takes an aborted communicator off the count of the one that it is made from. Called under its mutex.
void orphan(Comm& comm);
// Ends the making of a communicator, or that of all that are being made from one.
void cancel(Comm& comm);
void cancel_making_from(Comm& parent);
// Called by the thread that makes a communicator: what an abort has to end from now on; null for nothing.
void works_on(Comm& comm, moecclComm_t working);
// Destroys what was made of a communicator so far.
void undo(Comm& comm);

// Frees what a communicator stands for, in whichever library. Its handle must be withdrawn, and no thread may use it.
ncclResult_t free_comm(Comm& comm);

// Where a call on a handle goes.
struct Target {
  Held ours;                  // a communicator of MoECCL, ready for use; or
  ncclComm_t real = nullptr;  // NCCL's own handle
};
enum class Need {
  kUsable,  // made, and not suspended
  kMade,
  kAny,  // also while it is being made
};
// InvalidArgument for a null or unknown handle, or one still being made; InvalidUsage for one that is suspended.
ncclResult_t resolve(const char* function, ncclComm_t handle, Target* target, Need need = Need::kUsable);

}  // namespace moeccl::shim
