// SPDX-License-Identifier: Apache-2.0
// The map from experts to the slots of a live layer, and the routing statistics that expert swap needs. Slot s is where
// expert s was when the layer was made. It stays on its rank, so the layer's paths, programs and tables hold for every
// map.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "src/routing/routing_paths.h"

namespace moeccl::algo {

// A layer's latest choices, and what its updates since the last take() did.
struct SeenRouting {
  std::vector<int32_t> topk;             // [kept tokens][top_k], by expert, in no order
  uint64_t n_updates = 0, n_tokens = 0;  // since the last take()
  double steps_us = 0;     // time of these updates' dispatches and combines on this rank, with the backward ones
  uint64_t n_steps = 0;    // operations that steps_us sums
  MoeAlgorithm algorithm;  // of the last update, the same on all ranks
};

class ExpertMap {
 public:
  // slot_of[E] is a permutation. The latest max_tokens tokens are kept, however many updates they came with: a pair
  // that is chosen from one small step would follow that step's noise.
  ExpertMap(std::vector<int32_t> slot_of, uint32_t top_k, uint64_t max_tokens);

  // These are for the caller's thread, which makes all calls of a layer.
  const std::vector<int32_t>& slot_of() const { return slot_of_; }
  const std::vector<int32_t>& expert_in() const { return expert_in_; }
  uint64_t version() const { return version_; }  // raised by every swap()
  void swap(int32_t a, int32_t b);

  // Translates choices of experts into slots. A choice is an expert's number or -1.
  void to_slots(std::span<const int32_t> topk, std::vector<int32_t>& slots) const;

  void note_routing(std::span<const int32_t> topk, const MoeAlgorithm& algorithm);
  void note_step(double us);  // any thread
  SeenRouting take();

 private:
  std::vector<int32_t> slot_of_, expert_in_;
  uint64_t version_ = 1;  // routings older than the layer's map have 0
  uint32_t top_k_;
  uint64_t max_tokens_;
  std::mutex mutex_;  // guards the members below
  SeenRouting seen_;
  size_t oldest_ = 0;  // where seen_.topk is overwritten next, once it is full
};

}  // namespace moeccl::algo
