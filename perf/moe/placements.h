// SPDX-License-Identifier: Apache-2.0
// Placements of replicated experts for benchmarks.
#ifndef PERF_MOE_PLACEMENTS_H_
#define PERF_MOE_PLACEMENTS_H_

#include <moeccl/experts.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "perf/common/buffer.h"
#include "perf/common/fail.h"

namespace perf {

// Returns which expert each of n_ranks * slots slots holds, with each expert at least once. "random": slots are drawn;
// "contiguous": the same replicas side by side, as Algorithm 1 places them; "spread": on different ranks as far as
// possible.
inline std::vector<int32_t> make_placement(const std::string& kind, int n_ranks, int slots, int n_experts,
                                           uint64_t seed) {
  const int total = n_ranks * slots;
  if (total < n_experts) fail(std::to_string(total) + " slots do not hold " + std::to_string(n_experts) + " experts");
  std::mt19937_64 random(seed);
  std::vector<int32_t> experts;
  for (int s = 0; s < total; s++)
    experts.push_back(s < n_experts ? s : static_cast<int32_t>(random() % static_cast<uint64_t>(n_experts)));
  if (kind == "random") {
    std::shuffle(experts.begin(), experts.end(), random);
    return experts;
  }
  std::sort(experts.begin(), experts.end());
  if (kind == "contiguous") return experts;
  if (kind != "spread") fail("--placement " + kind + ": use random, contiguous or spread");
  // Replica i of the sorted list goes to rank i mod n: at most ceil(r / n) replicas of an expert share a rank.
  std::vector<int32_t> dealt(experts.size());
  for (int s = 0; s < total; s++)
    dealt[static_cast<size_t>(s % n_ranks * slots + s / n_ranks)] = experts[static_cast<size_t>(s)];
  return dealt;
}

// Returns a rank's slots that hold an expert, counted from 0.
inline std::vector<int> slots_of(const std::vector<int32_t>& experts, int slots, int rank, int expert) {
  std::vector<int> held;
  for (int s = 0; s < slots; s++)
    if (experts[static_cast<size_t>(rank * slots + s)] == expert) held.push_back(s);
  return held;
}

// The values of a rank's slots: small integers, so that sums are exact in any order.
class ExpertSlots {
 public:
  ExpertSlots() = default;
  ExpertSlots(int slots, int rank, size_t count, Memory memory)
      : slots_(static_cast<size_t>(slots)),
        first_(static_cast<size_t>(rank) * slots_),
        count_(count),
        buffer_(std::max<size_t>(1, slots_ * count * sizeof(float)), memory) {}

  float* data() const { return reinterpret_cast<float*>(buffer_.data()); }
  float* slot(size_t s) const { return data() + s * count_; }
  void set(float value) { std::fill_n(data(), slots_ * count_, value); }
  void fill() {
    for (size_t s = 0; s < slots_; s++)
      for (size_t i = 0; i < count_; i++) slot(s)[i] = value(first_ + s, i);
  }
  // Returns how many values are not the sum over all slots of their expert, after fill(). experts: of the slots of all
  // ranks.
  uint64_t count_wrong(const std::vector<int32_t>& experts) const {
    uint64_t wrong = 0;
    for (size_t s = 0; s < slots_; s++) {
      std::vector<float> sums(kPeriod, 0.0f);
      for (size_t other = 0; other < experts.size(); other++)
        if (experts[other] == experts[first_ + s])
          for (size_t i = 0; i < kPeriod; i++) sums[i] += value(other, i);
      for (size_t i = 0; i < count_; i++) wrong += slot(s)[i] != sums[i % kPeriod];
    }
    return wrong;
  }
  // Does what a program does with a library without replicas: adds up an expert's slots of this rank, calls
  // all_reduce(first slot) and copies back.
  template <class AllReduce>
  void reduce(const std::vector<int>& held, AllReduce&& all_reduce) {
    float* const first = slot(static_cast<size_t>(held[0]));
    for (size_t h = 1; h < held.size(); h++) {
      const float* const other = slot(static_cast<size_t>(held[h]));
      for (size_t i = 0; i < count_; i++) first[i] += other[i];
    }
    all_reduce(first);
    for (size_t h = 1; h < held.size(); h++) std::copy_n(first, count_, slot(static_cast<size_t>(held[h])));
  }

 private:
  static constexpr size_t kPeriod = 61;
  static float value(size_t slot, size_t i) { return static_cast<float>((slot * 5 + i % kPeriod) % 11) - 5; }

  size_t slots_ = 0, first_ = 0, count_ = 0;
  Buffer buffer_;
};

}  // namespace perf

#endif  // PERF_MOE_PLACEMENTS_H_
