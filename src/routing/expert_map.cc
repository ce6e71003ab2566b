// SPDX-License-Identifier: Apache-2.0
#include "src/routing/expert_map.h"

#include <algorithm>
#include <utility>

namespace moeccl::algo {

ExpertMap::ExpertMap(std::vector<int32_t> slot_of, uint32_t top_k, uint64_t max_tokens)
    : slot_of_(std::move(slot_of)), expert_in_(slot_of_.size()), top_k_(top_k), max_tokens_(max_tokens) {
  for (size_t e = 0; e < slot_of_.size(); ++e) expert_in_[static_cast<size_t>(slot_of_[e])] = static_cast<int32_t>(e);
}

void ExpertMap::swap(int32_t a, int32_t b) {
  int32_t &slot_a = slot_of_[static_cast<size_t>(a)], &slot_b = slot_of_[static_cast<size_t>(b)];
  std::swap(slot_a, slot_b);
  expert_in_[static_cast<size_t>(slot_a)] = a;
  expert_in_[static_cast<size_t>(slot_b)] = b;
  ++version_;
}

void ExpertMap::to_slots(std::span<const int32_t> topk, std::vector<int32_t>& slots) const {
  slots.resize(topk.size());
  std::transform(topk.begin(), topk.end(), slots.begin(),
                 [this](int32_t e) { return e < 0 ? e : slot_of_[static_cast<size_t>(e)]; });
}

void ExpertMap::note_routing(std::span<const int32_t> topk, const MoeAlgorithm& algorithm) {
  const std::lock_guard lock(mutex_);
  seen_.algorithm = algorithm;
  ++seen_.n_updates;
  seen_.n_tokens += topk.size() / top_k_;
  const size_t most = max_tokens_ * top_k_;
  if (topk.size() > most) topk = topk.last(most);
  const size_t added = std::min(topk.size(), most - seen_.topk.size());
  seen_.topk.insert(seen_.topk.end(), topk.begin(), topk.begin() + static_cast<ptrdiff_t>(added));
  for (topk = topk.subspan(added); !topk.empty();) {
    const size_t n = std::min(topk.size(), most - oldest_);
    std::copy_n(topk.begin(), n, seen_.topk.begin() + static_cast<ptrdiff_t>(oldest_));
    oldest_ = (oldest_ + n) % most;
    topk = topk.subspan(n);
  }
}

void ExpertMap::note_step(double us) {
  const std::lock_guard lock(mutex_);
  seen_.steps_us += us;
  ++seen_.n_steps;
}

SeenRouting ExpertMap::take() {
  const std::lock_guard lock(mutex_);
  SeenRouting taken = seen_;
  seen_.n_updates = seen_.n_tokens = seen_.n_steps = 0;
  seen_.steps_us = 0;
  return taken;
}

}  // namespace moeccl::algo
