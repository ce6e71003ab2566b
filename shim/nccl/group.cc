// SPDX-License-Identifier: Apache-2.0
#include "shim/nccl/group.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "shim/nccl/device.h"
#include "shim/nccl/real.h"
#include "src/base/blocked_signals.h"

namespace moeccl::shim {
namespace {

struct Group {
  int depth = 0;
  bool real_open = false;
  ncclResult_t failure = ncclSuccess;  // a call failed its checks: the end reports it and issues nothing
  std::vector<Call> calls;
  std::vector<Job> jobs;
  std::vector<std::function<ncclResult_t()>> puts, waits;
  std::vector<std::function<void()>> afterwards;
};
thread_local Group group;

bool good(ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; }

// Returns the first failure of two results; in-progress takes precedence over success.
ncclResult_t first(ncclResult_t a, ncclResult_t b) {
  if (!good(a)) return a;
  return b == ncclSuccess ? a : b;
}

void refuse(const Job& job) {
  withdraw(reinterpret_cast<ncclComm_t>(job.comm.get()));
  *job.out = nullptr;
}

// While this exists, an abort of the parent ends the making of the job's communicator.
class MadeFrom {
 public:
  explicit MadeFrom(const Job& job) : comm_(*job.comm), parent_(job.parent != nullptr ? &**job.parent : nullptr) {
    if (parent_ == nullptr) return;
    const std::lock_guard lock(parent_->mutex);
    parent_->making.push_back(&comm_);
    if (parent_->aborted) cancel(comm_);
  }
  ~MadeFrom() {
    if (parent_ == nullptr) return;
    const std::lock_guard lock(parent_->mutex);
    std::erase(parent_->making, &comm_);
  }
  MadeFrom(const MadeFrom&) = delete;
  MadeFrom& operator=(const MadeFrom&) = delete;

 private:
  Comm& comm_;
  Comm* parent_;
};

// MoECCL serves the memory of the device that is current where a communicator is made, and a helper thread has none.
ncclResult_t make(const Job& job) {
  const device::Current current(job.comm->device);
  if (!current.ok()) {
    return fail(ncclUnhandledCudaError, "CUDA device " + std::to_string(job.comm->device) + " cannot be used");
  }
  const MadeFrom from(job);
  const ncclResult_t result = contained([&] { return job.work(*job.comm); });
  works_on(*job.comm, nullptr);
  // Its default stream may hold up work on its parent's.
  if (job.parent != nullptr && (*job.parent)->shares_device) job.comm->shares_device = true;
  return result;
}

// Runs one job to its end and gives the program's variable its final value.
ncclResult_t run(const Job& job) {
  Comm& comm = *job.comm;
  ncclResult_t result = make(job);
  const std::lock_guard lock(comm.mutex);
  if (result == ncclSuccess && comm.abandoned) {
    (void)free_comm(comm);
    result = fail(ncclInvalidUsage, "the communicator was aborted while it was being made");
  }
  // The message stays that of the failure.
  if (result != ncclSuccess && comm.ours != nullptr) (void)moecclCommDestroy(std::exchange(comm.ours, nullptr));
  const bool joined = comm.ours != nullptr || comm.real != nullptr;
  if (result != ncclSuccess || !joined) refuse(job);
  comm.state.store(result, std::memory_order_release);  // acquired in resolve()
  return result;
}

// Jobs that run one after another, because they use the same parent and all ranks must do so in the same order.
using Chain = std::vector<Job>;

std::vector<Chain> chains_of(std::vector<Job> jobs) {
  std::vector<Chain> chains;
  for (Job& job : jobs) {
    const auto same = [&](const Chain& c) {
      return c[0].parent != nullptr && job.parent != nullptr && &**c[0].parent == &**job.parent;
    };
    const auto at = std::find_if(chains.begin(), chains.end(), same);
    if (at != chains.end())
      at->push_back(std::move(job));
    else
      chains.push_back({std::move(job)});
  }
  return chains;
}

// Counts a communicator among those that are being made from its parent, as an orphan if it was aborted before.
void count(Comm& comm, const Held& parent) {
  const std::lock_guard lock(comm.mutex);
  parent->children.fetch_add(1, std::memory_order_relaxed);
  comm.counted_by = parent.pointer();
  if (comm.cancelled) orphan(comm);
}
void uncount(Comm& comm, Comm& parent) {
  const std::lock_guard lock(comm.mutex);
  const bool orphaned = std::exchange(comm.counted_by, nullptr) == nullptr;
  (orphaned ? parent.orphans : parent.children).fetch_sub(1, std::memory_order_release);  // acquired in resolve()
}

void run_in_background(const Chain& chain) {
  // Nothing else may run on the parent meanwhile, because its ranks would not agree on the order.
  for (const Job& job : chain) {
    if (job.parent != nullptr) count(*job.comm, *job.parent);
    job.comm->settled.store(false, std::memory_order_relaxed);
  }
  // A program that polls the parent may use the child next, and one that polls the child the parent.
  const auto end = [](const Job& job) {
    if (job.parent != nullptr) uncount(*job.comm, **job.parent);
    job.comm->settled.store(true, std::memory_order_release);
  };
  const auto background = [chain, end] {
    for (const Job& job : chain) {
      Comm& comm = *job.comm;
      const ncclResult_t result = make(job);
      {
        // The program learns of a failure from ncclCommGetAsyncError, so the handle stays until it is aborted.
        const std::lock_guard lock(comm.mutex);
        comm.state.store(result, std::memory_order_release);  // acquired in resolve()
        if (comm.abandoned) (void)free_comm(comm);
      }
      end(job);
    }
  };
  try {
    const BlockedSignals blocked;
    std::thread(background).detach();
  } catch (const std::exception& e) {
    const ncclResult_t refused = fail_thrown(e);
    for (const Job& job : chain) {
      job.comm->state.store(refused, std::memory_order_release);
      end(job);
    }
  }
}

// The first failure among jobs that run side by side, with its message.
struct Failure {
  std::mutex mutex;
  ncclResult_t result = ncclSuccess;
  bool elsewhere = false;
  std::string text;
};

// Ends all jobs after the first failure, because their ranks may wait for each other without a limit.
void end_all(const std::vector<Chain>& chains, ncclResult_t result, Failure& failure) {
  {
    const std::lock_guard lock(failure.mutex);
    if (failure.result != ncclSuccess) return;
    failure.result = result;
    failure.elsewhere = failed_elsewhere();
    failure.text = last_error();
  }
  for (const Chain& chain : chains) {
    for (const Job& job : chain) {
      cancel(*job.comm);
      if (job.parent == nullptr || job.comm->state.load() != ncclInProgress) continue;
      // Nothing else ends an exchange on the parent. After a revocation its other ranks would wait for this one.
      Comm& parent = **job.parent;
      parent.given_up = true;
      (void)moecclCommAbort(parent.ours);
    }
  }
}

// Runs the jobs that block.
ncclResult_t run_jobs(std::vector<Job> jobs) {
  const std::vector<Chain> chains = chains_of(std::move(jobs));
  Failure failure;
  std::vector<std::thread> threads;
  threads.reserve(chains.size());
  for (const Chain& chain : chains) {
    const ncclResult_t started = contained([&] {
      const BlockedSignals blocked;
      threads.emplace_back([&] {
        for (const Job& job : chain) {
          if (const ncclResult_t result = run(job); !good(result)) end_all(chains, result, failure);
        }
      });
      return ncclSuccess;
    });
    if (started == ncclSuccess) continue;
    end_all(chains, started, failure);
    for (const Job& job : chain) refuse(job);
  }
  for (std::thread& t : threads) t.join();
  // The jobs that were ended have said so since.
  if (failure.elsewhere)
    fail_elsewhere();
  else if (failure.result != ncclSuccess && failure.text != last_error())
    (void)fail(failure.result, failure.text);
  return failure.result;
}

// A call and where it goes; `call` belongs to the group.
struct Ready {
  const Call* call;
  Target target;
};

// MoECCL chooses the plans of a group at its end: one algorithm for each operation of a communicator.
ncclResult_t check_selections(const std::vector<Ready>& ready) {
  std::map<std::pair<const Comm*, moecclOp_t>, const std::string*> wanted;
  for (const Ready& r : ready) {
    if (r.target.real != nullptr) continue;
    const std::string& names = wanted_algorithms(*r.call);
    const auto [at, fresh] = wanted.emplace(std::pair{&*r.target.ours, r.call->kind}, &names);
    if (fresh || *at->second == names) continue;
    return fail(ncclInvalidUsage,
                std::string(r.call->function) + ": the configs of one group ask for the algorithms \"" + *at->second +
                    "\" and \"" + names + "\" for the same operation: put the calls into groups of their own");
  }
  return ncclSuccess;
}

// Notes, for an abort, that the calls on several communicators end together.
void note_group(const std::vector<Ready>& ready) {
  static std::atomic<uint64_t> groups{0};
  const Comm* one = nullptr;
  bool several = false;
  for (const Ready& r : ready) {
    if (r.target.real != nullptr) continue;
    several |= one != nullptr && one != &*r.target.ours;
    one = &*r.target.ours;
  }
  const uint64_t number = several ? groups.fetch_add(1, std::memory_order_relaxed) + 1 : 0;
  for (const Ready& r : ready) {
    if (r.target.real == nullptr) r.target.ours->group.store(number, std::memory_order_relaxed);
  }
}

ncclResult_t issue_all(const std::vector<Ready>& ready, ncclSimInfo_t* simulate, double* predicted_us) {
  ncclResult_t result = ncclSuccess;
  const bool any_real =
      std::any_of(ready.begin(), ready.end(), [](const Ready& r) { return r.target.real != nullptr; });
  const bool any_ours =
      std::any_of(ready.begin(), ready.end(), [](const Ready& r) { return r.target.real == nullptr; });
  // NCCL first: it only puts work on streams, while MoECCL may block until the peers have come.
  if (any_real || group.real_open) {
    if (!group.real_open) result = MOECCL_FORWARD(GroupStart);
    for (const Ready& r : ready) {
      if (r.target.real != nullptr) result = first(result, issue_real(*r.call, r.target.real));
    }
    group.real_open = false;
    result = first(result, simulate != nullptr ? MOECCL_FORWARD(GroupSimulateEnd, simulate) : MOECCL_FORWARD(GroupEnd));
  }
  if (!any_ours) return result;
  if (simulate != nullptr) {
    std::map<const Comm*, double> per_comm;  // operations of one communicator run one after another
    for (const Ready& r : ready) {
      if (r.target.real == nullptr) per_comm[&*r.target.ours] += predict_us(*r.call, *r.target.ours);
    }
    for (const auto& [comm, us] : per_comm) *predicted_us = std::max(*predicted_us, us);
    return result;
  }
  const ncclResult_t agreed = check_selections(ready);
  if (agreed != ncclSuccess) return first(result, agreed);
  note_group(ready);
  result = first(result, from_moeccl(moecclGroupStart()));
  for (const Ready& r : ready) {
    if (r.target.real != nullptr) continue;
    const ncclResult_t refused = issue_ours(*r.call, *r.target.ours);
    if (refused == ncclSuccess) continue;
    // Nothing is issued once a call was refused, by MoECCL or before it got there.
    (void)moecclGroupCancel();
    return first(result, refused);
  }
  return first(result, from_moeccl(moecclGroupEnd()));
}

ncclResult_t run_all(const std::vector<std::function<ncclResult_t()>>& puts,
                     const std::vector<std::function<ncclResult_t()>>& waits, ncclResult_t result) {
  for (const auto* list : {&puts, &waits}) {
    for (const auto& work : *list) {
      if (good(result)) result = first(result, contained(work));
    }
  }
  return result;
}

}  // namespace

ncclResult_t submit(Call call, const ncclCollConfig_t* config) {
  Target target;
  ncclResult_t result = resolve(call.function, call.comm, &target);
  if (result == ncclSuccess && config != nullptr) {
    auto copy = std::make_shared<CallConfig>();
    result = CallConfig::from(call.function, *config, copy.get());
    call.config = std::move(copy);
  }
  if (result != ncclSuccess) return fail_group(result);
  if (group.depth > 0) {
    group.calls.push_back(std::move(call));
    return ncclSuccess;
  }
  if (target.real != nullptr) return issue_real(call, target.real);
  target.ours->group.store(0, std::memory_order_relaxed);
  return issue_ours(call, *target.ours);
}

ncclResult_t start(Job job) {
  // Before other threads can see it: they may abort it while it is being made.
  job.comm->state.store(ncclInProgress, std::memory_order_relaxed);
  *job.out = job.joins ? publish(job.comm) : nullptr;
  if (group.depth > 0) {
    group.jobs.push_back(std::move(job));
    return ncclSuccess;
  }
  if (!job.blocks()) {
    run_in_background({job});
    return ncclInProgress;
  }
  return run(job);
}

void drop_jobs_from(const Comm& parent) {
  std::erase_if(group.jobs, [&](const Job& job) {
    if (job.parent == nullptr || &**job.parent != &parent) return false;
    refuse(job);
    (void)fail_group(fail(ncclInvalidUsage, "a communicator was ended in the group that was to make another from it"));
    return true;
  });
}

bool group_open() { return group.depth > 0; }

ncclResult_t group_start() {
  ++group.depth;
  return ncclSuccess;
}

ncclResult_t group_end(ncclSimInfo_t* simulate) {
  if (group.depth == 0) return fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--group.depth > 0) return ncclSuccess;
  const std::vector<Call> calls = std::exchange(group.calls, {});
  std::vector<Job> jobs = std::exchange(group.jobs, {}), later;
  const auto puts = std::exchange(group.puts, {}), waits = std::exchange(group.waits, {});
  const auto afterwards = std::exchange(group.afterwards, {});
  ncclResult_t result = std::exchange(group.failure, ncclSuccess);
  double predicted_us = 0;
  if (good(result)) {
    const auto from = std::stable_partition(jobs.begin(), jobs.end(), [](const Job& job) { return job.blocks(); });
    later.assign(std::make_move_iterator(from), std::make_move_iterator(jobs.end()));
    jobs.erase(from, jobs.end());
    result = run_jobs(std::move(jobs));
  } else {
    for (const Job& job : jobs) refuse(job);
  }
  std::vector<Ready> ready(calls.size());
  for (size_t i = 0; i < calls.size() && good(result); ++i) {
    ready[i].call = &calls[i];
    result = first(result, resolve(calls[i].function, calls[i].comm, &ready[i].target));
  }
  if (good(result)) {
    result = first(result, issue_all(ready, simulate, &predicted_us));
    if (simulate == nullptr) result = run_all(puts, waits, result);
    if (simulate != nullptr) {
      simulate->estimatedTime = std::max(simulate->estimatedTime, static_cast<float>(predicted_us));
    }
  } else if (std::exchange(group.real_open, false)) {
    (void)MOECCL_FORWARD(GroupEnd);
  }
  // The group's calls come first on the communicators from which others are made in the background.
  if (!good(result)) {
    for (const Job& job : later) refuse(job);
  } else if (!later.empty()) {
    for (const Chain& chain : chains_of(std::move(later))) run_in_background(chain);
    result = first(result, ncclInProgress);
  }
  for (const auto& work : afterwards) work();
  return result;
}

ncclResult_t enter_real_group() {
  if (group.depth == 0 || group.real_open) return ncclSuccess;
  group.real_open = true;
  return MOECCL_FORWARD(GroupStart);
}

ncclResult_t fail_group(ncclResult_t result) {
  if (group.depth > 0) group.failure = first(group.failure, result);
  return result;
}

void at_group_end(bool waits, std::function<ncclResult_t()> work) {
  (waits ? group.waits : group.puts).push_back(std::move(work));
}

void after_group(std::function<void()> work) {
  if (group.depth > 0) {
    group.afterwards.push_back(std::move(work));
  } else {
    work();
  }
}

}  // namespace moeccl::shim
