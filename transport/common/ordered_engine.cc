// SPDX-License-Identifier: Apache-2.0
#include "transport/common/ordered_engine.h"

#include "src/base/clock.h"

namespace moeccl::transport {

PutOrder& process_put_order() {
  static PutOrder order;
  return order;
}

void OrderedEngine::operation(uint32_t traffic_class, bool begins_now) {
  const uint32_t c = order_class(traffic_class);
  running_[c].fetch_add(begins_now ? 1 : -1, std::memory_order_relaxed);
  if (begins_now) {
    begins(*order_, c, now_ns());
  } else {
    ends(*order_, c);
  }
}

bool OrderedEngine::lets_go(uint32_t traffic_class, size_t bytes) {
  return may_go(*order_, traffic_class, bytes, now_ns());
}

void OrderedEngine::moved() {
  int64_t now = 0;
  for (uint32_t c = 0; c < kTrafficClasses; ++c) {
    if (running_[c].load(std::memory_order_relaxed) <= 0) continue;
    if (now == 0) now = now_ns();
    moves(*order_, c, now);
  }
}

bool OrderedEngine::any_runs() const {
  return std::any_of(std::begin(running_), std::end(running_),
                     [](const auto& n) { return n.load(std::memory_order_relaxed) > 0; });
}

}  // namespace moeccl::transport
