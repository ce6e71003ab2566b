// SPDX-License-Identifier: Apache-2.0
#include "shim/nccl/comm.h"

#include <algorithm>
#include <chrono>
#include <shared_mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "shim/nccl/group.h"
#include "shim/nccl/real.h"
#include "shim/nccl/windows.h"

namespace moeccl::shim {
namespace {

struct Registry {
  std::shared_mutex mutex;
  std::unordered_map<ncclComm_t, CommPtr> live;
};

// Never destroyed: programs leave communicators behind when they exit.
Registry& registry() {
  static auto* const r = new Registry;
  return *r;
}

}  // namespace

ncclComm_t publish(CommPtr comm) {
  auto* handle = reinterpret_cast<ncclComm_t>(comm.get());
  const std::unique_lock lock(registry().mutex);
  registry().live.emplace(handle, std::move(comm));
  return handle;
}

Held hold(ncclComm_t handle) {
  const std::shared_lock lock(registry().mutex);
  const auto found = registry().live.find(handle);
  if (found == registry().live.end()) return {};
  found->second->users.fetch_add(1, std::memory_order_relaxed);  // the lock orders this against withdraw()
  return Held(found->second);
}

CommPtr withdraw(ncclComm_t handle) {
  const std::unique_lock lock(registry().mutex);
  const auto found = registry().live.find(handle);
  if (found == registry().live.end()) return nullptr;
  CommPtr comm = std::move(found->second);
  registry().live.erase(found);
  return comm;
}

void wait_unused(const Comm& comm) {
  if (comm.process != getpid()) return;  // threads of the parent process are counted, and are not here
  // Calls in progress end by themselves: their operations have MoECCL's deadlines, or were aborted.
  for (int i = 0; comm.users.load(std::memory_order_acquire) > 0; ++i) {  // released in ~Held()
    if (i < 100) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
}

bool others_go_on(const Comm& withdrawn) {
  const uint64_t group = withdrawn.group.load(std::memory_order_relaxed);
  if (group == 0) return false;
  const std::shared_lock lock(registry().mutex);
  return std::any_of(registry().live.begin(), registry().live.end(), [&](const auto& entry) {
    return entry.second->group.load(std::memory_order_relaxed) == group && !entry.second->given_up;
  });
}

void orphan(Comm& comm) {
  const CommPtr parent = std::exchange(comm.counted_by, nullptr);
  if (parent == nullptr) return;
  parent->orphans.fetch_add(1, std::memory_order_release);   // acquired in end()
  parent->children.fetch_sub(1, std::memory_order_release);  // acquired in resolve()
}

void cancel(Comm& comm) {
  const std::lock_guard lock(comm.mutex);
  comm.cancelled = true;
  if (comm.working != nullptr) (void)moecclCommAbort(comm.working);
}

void cancel_making_from(Comm& parent) {
  const std::lock_guard lock(parent.mutex);
  parent.aborted = true;
  for (Comm* made : parent.making) cancel(*made);
}

void works_on(Comm& comm, moecclComm_t working) {
  const std::lock_guard lock(comm.mutex);
  comm.working = working;
  if (working != nullptr && comm.cancelled) (void)moecclCommAbort(working);
}

void undo(Comm& comm) {
  works_on(comm, nullptr);
  if (comm.ours != nullptr) (void)moecclCommDestroy(std::exchange(comm.ours, nullptr));
}

ncclResult_t free_comm(Comm& comm) {
  drop_windows(reinterpret_cast<ncclComm_t>(&comm));
  if (comm.real != nullptr) {
    return forward_in_group([&] { return MOECCL_FORWARD(CommDestroy, std::exchange(comm.real, nullptr)); });
  }
  if (comm.ours == nullptr) return ncclSuccess;
  return from_moeccl(moecclCommDestroy(std::exchange(comm.ours, nullptr)));
}

ncclResult_t resolve(const char* function, ncclComm_t handle, Target* target, Need need) {
  if (handle == nullptr) {
    return fail(ncclInvalidArgument, std::string(function) + ": comm is NULL: give an initialised communicator");
  }
  Held held = hold(handle);
  if (!held) {
    if (real_if_open() == nullptr) {
      return fail(ncclInvalidArgument, std::string(function) +
                                           ": comm is not a live communicator: was it destroyed, or made by another "
                                           "copy of NCCL?");
    }
    target->real = handle;  // made by the real library, under its own id
    return ncclSuccess;
  }
  const ncclResult_t state = held->state.load(std::memory_order_acquire);  // released by the thread that made it
  // Until then only that thread touches `real` and `ours`.
  if (state != ncclInProgress && held->real != nullptr) {
    target->real = held->real;
    return ncclSuccess;
  }
  if (need != Need::kAny && state != ncclSuccess) {
    return fail(ncclInvalidArgument,
                std::string(function) + (state == ncclInProgress
                                             ? ": the communicator is still being made: ask ncclCommGetAsyncError first"
                                             : ": the communicator could not be made: abort it"));
  }
  if (need == Need::kUsable && held->children.load(std::memory_order_acquire) > 0) {  // released by their makers
    return fail(ncclInvalidArgument, std::string(function) +
                                         ": another communicator is being made from this one: wait until "
                                         "ncclCommGetAsyncError on it no longer says ncclInProgress");
  }
  if (need == Need::kUsable && held->suspended) {
    return fail(ncclInvalidUsage,
                std::string(function) + ": the communicator is suspended: call ncclCommResume on it first");
  }
  target->ours = std::move(held);
  return ncclSuccess;
}

}  // namespace moeccl::shim
