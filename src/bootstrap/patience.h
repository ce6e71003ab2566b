// SPDX-License-Identifier: Apache-2.0
// Shared by everything that waits for ranks which may arrive much later.
#pragma once

#include <cstdint>
#include <utility>

#include "src/base/clock.h"

namespace moeccl::bootstrap {

// Such a wait may be long, or have no end, and no data shows meanwhile that a host is lost. After this time without a
// sign of it, it is.
inline constexpr int64_t kLostMs = 3'600'000;

// How long a root stays after a failure, so that ranks that are still on their way are told the reason instead of being
// refused.
inline constexpr int64_t kLingerMs = 5000;

// The pause between two tries.
inline constexpr int64_t kRetryMs = 5;

// Tells a rank that tries again and again when to say so.
class Patience {
 public:
  // Returns true once, after half a minute.
  bool ends() { return end_.passed() && !std::exchange(ended_, true); }

 private:
  const Deadline end_ = Deadline::after_ms(30'000);
  bool ended_ = false;
};

}  // namespace moeccl::bootstrap
