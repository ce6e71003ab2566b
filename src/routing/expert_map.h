// SPDX-License-Identifier: Apache-2.0
// Which slot of a live layer holds each expert, and what expert swap asks of the layer's steps. Slot s is what expert s
// was when the layer was made: it stays on its rank, so paths, programs and tables of the layer hold for every map.
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
  double steps_us = 0;                   // what these updates' dispatches and combines took on this rank, backward too
  uint64_t n_steps = 0;                  // of these
  MoeAlgorithm algorithm;                // of the last update, the same on all ranks
};

class ExpertMap {
 public:
  // slot_of[E] is a permutation. The latest max_tokens tokens are kept, however many updates they came with: a pair
  // that is chosen from one small step would follow that step's noise.
  ExpertMap(std::vector<int32_t> slot_of, uint32_t top_k, uint64_t max_tokens);

  // For the caller's thread, which makes all calls of a layer.
  const std::vector<int32_t>& slot_of() const { return slot_of_; }
  const std::vector<int32_t>& expert_in() const { return expert_in_; }
  uint64_t version() const { return version_; }  // raised by every swap()
  void swap(int32_t a, int32_t b);

  // slots: the choices as the layer knows them. Each is an expert's number or -1.
  void to_slots(std::span<const int32_t> topk, std::vector<int32_t>& slots) const;

  void note_routing(std::span<const int32_t> topk, const MoeAlgorithm& algorithm);
  void note_step(double us);  // any thread
  SeenRouting take();

 private:
  std::vector<int32_t> slot_of_, expert_in_;
  uint64_t version_ = 1;  // 0: of routings from before the layer had a map
  uint32_t top_k_;
  uint64_t max_tokens_;
  std::mutex mutex_;  // guards the members below
  SeenRouting seen_;
  size_t oldest_ = 0;  // where seen_.topk is overwritten next, once it is full
};

}  // namespace moeccl::algo
