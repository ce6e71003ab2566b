// SPDX-License-Identifier: Apache-2.0
// The operators that moecclRedOpCreatePreMulSum has made for a communicator.
#pragma once

#include <algorithm>
#include <mutex>
#include <optional>
#include <vector>

#include "kernels/table.h"
#include "moeccl/types.h"

namespace moeccl::comm {

struct PreMul {
  moecclDataType_t type = moecclFloat32;
  kernels::Scalar scalar{};
  const void* scalar_at = nullptr;  // in CUDA memory, where each operation reads it
};

// Every function may be called from any thread, because a garbage collector may destroy an operator on any of them.
class PreMuls {
 public:
  moecclRedOp_t add(const PreMul& p) {
    const std::lock_guard lock(mutex_);
    auto free = std::find_if(all_.begin(), all_.end(), [](const auto& p) { return !p.has_value(); });
    if (free == all_.end()) free = all_.insert(free, std::nullopt);
    free->emplace(p);
    return static_cast<moecclRedOp_t>(free - all_.begin()) + MOECCL_NUM_REDUCTIONS;
  }
  // Returns nothing for a number that is no operator.
  std::optional<PreMul> find(moecclRedOp_t op) const {
    const std::lock_guard lock(mutex_);
    return is_one(op) ? all_[index(op)] : std::nullopt;
  }
  bool remove(moecclRedOp_t op) {
    const std::lock_guard lock(mutex_);
    if (!is_one(op)) return false;
    all_[index(op)].reset();
    return true;
  }

 private:
  static size_t index(moecclRedOp_t op) { return static_cast<size_t>(op) - MOECCL_NUM_REDUCTIONS; }
  bool is_one(moecclRedOp_t op) const {
    return op >= MOECCL_NUM_REDUCTIONS && index(op) < all_.size() && all_[index(op)].has_value();
  }

  mutable std::mutex mutex_;
  std::vector<std::optional<PreMul>> all_;
};

}  // namespace moeccl::comm
