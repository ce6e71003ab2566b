// SPDX-License-Identifier: Apache-2.0
#include "shim/nccl/windows.h"

#include <mutex>
#include <unordered_map>

#include "shim/nccl/core.h"
#include "shim/nccl/device.h"

namespace moeccl::shim {
namespace {

struct Window {
  ncclComm_t comm = nullptr;
  void *registration = nullptr, *buffer = nullptr;
  uint32_t number = Rma::kNoWindow;
};
struct Windows {
  std::mutex mutex;
  std::unordered_map<ncclWindow_t, Window> all;
};
Windows& windows() {
  static auto* const w = new Windows;  // never destroyed: programs free in their own destructors
  return *w;
}

// Called under the lock.
const Window* find(ncclWindow_t window, ncclComm_t comm) {
  const auto found = windows().all.find(window);
  return found != windows().all.end() && found->second.comm == comm ? &found->second : nullptr;
}

ncclResult_t not_its_window(const char* function) {
  return fail(ncclInvalidArgument, std::string(function) + ": win is no window of this communicator");
}

}  // namespace

bool find_window(ncclWindow_t window, ncclComm_t comm, uint32_t* number) {
  const std::lock_guard lock(windows().mutex);
  const Window* found = find(window, comm);
  if (found != nullptr) *number = found->number;
  return found != nullptr;
}

bool is_our_window(ncclWindow_t window) {
  const std::lock_guard lock(windows().mutex);
  return windows().all.contains(window);
}

void drop_windows(ncclComm_t comm) {
  const std::lock_guard lock(windows().mutex);
  std::erase_if(windows().all, [comm](const auto& entry) {
    if (entry.second.comm != comm) return false;
    delete reinterpret_cast<char*>(entry.first);
    return true;
  });
}

namespace core {

// Collectives use the window's memory like any registered memory; kernels cannot use it (see DevCommCreate).
ncclResult_t CommWindowRegister(ncclComm_t comm, void* buffer, size_t size, ncclWindow_t* window, int flags) {
  if (window == nullptr) return fail(ncclInvalidArgument, "ncclCommWindowRegister: win is NULL");
  *window = nullptr;
  MOECCL_OURS_OR_FORWARD_IN_GROUP(target, comm, Need::kUsable, CommWindowRegister, target.real, buffer, size, window,
                                  flags);
  void* registration = nullptr;
  const ncclResult_t result = from_moeccl(moecclCommRegister(target.ours->ours, buffer, size, &registration));
  if (result != ncclSuccess) {
    target.ours->rma.skip_window();
    return result;
  }
  auto* made = reinterpret_cast<ncclWindow_t>(new char);  // an address that names this window and nothing else
  const uint32_t number = target.ours->rma.add_window(buffer, size, device::owns(buffer));
  const std::lock_guard lock(windows().mutex);
  windows().all.emplace(made, Window{comm, registration, buffer, number});
  *window = made;
  return ncclSuccess;
}

ncclResult_t CommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  if (window == nullptr) return ncclSuccess;
  MOECCL_OURS_OR_FORWARD(target, comm, Need::kMade, CommWindowDeregister, target.real, window);
  Window gone;
  {
    const std::lock_guard lock(windows().mutex);
    const Window* found = find(window, comm);
    if (found == nullptr) return not_its_window("ncclCommWindowDeregister");
    gone = *found;
    windows().all.erase(window);
  }
  target.ours->rma.remove_window(gone.number);
  delete reinterpret_cast<char*>(window);
  return from_moeccl(moecclCommDeregister(target.ours->ours, gone.registration));
}

ncclResult_t WinGetUserPtr(ncclComm_t comm, ncclWindow_t window, void** pointer) {
  if (pointer == nullptr) return fail(ncclInvalidArgument, "ncclWinGetUserPtr: outUserPtr is NULL");
  *pointer = nullptr;
  MOECCL_OURS_OR_FORWARD(target, comm, Need::kMade, WinGetUserPtr, target.real, window, pointer);
  const std::lock_guard lock(windows().mutex);
  const Window* found = find(window, comm);
  if (found == nullptr) return not_its_window("ncclWinGetUserPtr");
  *pointer = found->buffer;
  return ncclSuccess;
}

}  // namespace core
}  // namespace moeccl::shim
