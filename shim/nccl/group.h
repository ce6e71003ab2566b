// SPDX-License-Identifier: Apache-2.0
// Calls, and how they reach a library: at once, or together at the outermost ncclGroupEnd.
#pragma once

#include <functional>

#include "shim/nccl/call_config.h"
#include "shim/nccl/comm.h"

namespace moeccl::shim {

// One collective or message, as the program called it.
struct Call {
  moecclOp_t kind = moecclOpAllReduce;
  const char* function = "";  // its public name, for errors
  const void* send = nullptr;
  void* recv = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t op = ncclSum;
  int peer = 0;  // root or peer
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  bool sends = false;                             // of messages: ncclSend
  std::shared_ptr<const CallConfig> config = {};  // null: the function without one was called
};

// Issues the call now, or keeps it for the end of the thread's group. `config` applies to the call.
ncclResult_t submit(Call call, const ncclCollConfig_t* config = nullptr);

// In calls.cc: each hands one call to its library. Calls to MoECCL that belong together are inside
// moecclGroupStart/End.
ncclResult_t issue_ours(const Call& call, Comm& comm);
ncclResult_t issue_real(const Call& call, ncclComm_t real);
// Returns MoECCL's prediction in microseconds; 0 when it has none.
double predict_us(const Call& call, Comm& comm);

// The making of a communicator, which waits for other ranks.
struct Job {
  CommPtr comm;
  ncclComm_t* out = nullptr;  // the program's variable; NULL when it fails, or when `comm` joins nothing
  std::function<ncclResult_t(Comm&)> work;
  // The communicator that it is made from: in use until the job has ended, in progress while the job is in the
  // background.
  std::shared_ptr<Held> parent = {};
  bool joins = true;     // false: this rank takes part in a split and gets no communicator
  bool is_part = false;  // of the parent: a split or a shrink, which blocks if the parent does, as in NCCL
  bool blocks() const { return (is_part ? **parent : *comm).blocking; }
};
// Publishes comm and sets *out, then runs the job: now, in the background when the job does not block
// (ncclInProgress), or at the end of the thread's group, where several jobs run side by side.
ncclResult_t start(Job job);

// The calling thread's group.
bool group_open();
ncclResult_t group_start();
ncclResult_t group_end(ncclSimInfo_t* simulate);
// Called before the real library gets a call of an open group that is not a Call: opens its group as well.
ncclResult_t enter_real_group();
// Makes such a call.
template <class F>
ncclResult_t forward_in_group(F call) {
  const ncclResult_t opened = enter_real_group();
  return opened == ncclSuccess ? call() : opened;
}
// Notes that a call of an open group failed its checks: the group issues nothing and ends with this. Returns `result`.
ncclResult_t fail_group(ncclResult_t result);
// Adds work to an open group. It runs at the group's end, after its collectives and messages; work that waits runs
// last. A failure of the work is the group's.
void at_group_end(bool waits, std::function<ncclResult_t()> work);
// Refuses what the thread's open group would make from this communicator, which ends before the group does. The group
// issues nothing and ends with ncclInvalidUsage.
void drop_jobs_from(const Comm& parent);
// Runs the work at the end of an open group, after its calls; now when there is none.
void after_group(std::function<void()> work);

}  // namespace moeccl::shim
