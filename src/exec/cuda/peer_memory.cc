// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/kernel_memory.h"

#include <map>
#include <mutex>
#include <vector>

#include "src/base/log.h"

namespace moeccl::exec {
namespace {

struct Circles {
  struct Circle {
    uint32_t members = 0;
    std::vector<KernelMemory> left;
  };
  std::mutex mutex;
  std::map<std::byte*, Circle> circles;      // keyed by the memory of their lowest rank
  std::map<std::byte*, std::byte*> head_of;  // from a rank's memory to that of its lowest rank

  static Circles& get() {
    static auto* const all = new Circles;
    return *all;
  }
};

}  // namespace

Result<KernelMemory> KernelMemory::create(driver::cuda::Context context, size_t bytes, bool for_processes) {
  KernelMemory m;
  if (for_processes) {
    auto made = driver::cuda::VirtualMemory::create(context, bytes);
    if (made.ok()) {
      m.object_ = std::move(*made);
      return m;
    }
    log(LogLevel::kInfo, "the persistent kernel's memory is shared by IPC handles, because descriptors failed: {}",
        made.status().message());
  }
  MOECCL_ASSIGN_OR_RETURN(m.memory_, driver::cuda::Memory::device(context, bytes));
  return m;
}

void KernelMemory::join(std::byte* own, std::byte* head) {
  Circles& all = Circles::get();
  const std::lock_guard lock(all.mutex);
  all.head_of[own] = head;
  ++all.circles[head].members;
}

void KernelMemory::leave(KernelMemory memory) {
  Circles& all = Circles::get();
  std::vector<KernelMemory> last;  // freed without the lock
  const std::lock_guard lock(all.mutex);
  const auto own = all.head_of.find(memory.data());
  if (own == all.head_of.end()) return;  // no other rank knew it
  const auto it = all.circles.find(own->second);
  all.head_of.erase(own);
  it->second.left.push_back(std::move(memory));
  if (--it->second.members > 0) return;
  last = std::move(it->second.left);
  all.circles.erase(it);
}

}  // namespace moeccl::exec
