// SPDX-License-Identifier: Apache-2.0
// What plans on the rows of experts share: where a rank's experts lie in its buffers, and a program with its lists.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "src/plan/binding.h"
#include "src/plan/plan.h"

namespace moeccl::algo {

// Where a rank's slots and shards begin in its buffers, in elements. Empty: an expert's elements, or a shard's, apart.
struct ExpertPlaces {
  std::span<const uint64_t> slots;   // [slots of the rank]
  std::span<const uint64_t> shards;  // [n_experts]

  uint64_t slot(uint32_t s, uint64_t count) const { return slots.empty() ? s * count : slots[s]; }
  uint64_t shard(uint32_t expert, uint64_t elements) const {
    return shards.empty() ? expert * elements : shards[expert];
  }
};

// A rank's program with the lists that its steps name. Those keep their place when a BoundRows is moved.
struct BoundRows {
  plan::Program program;
  std::vector<plan::RowBlock> rows;
  std::vector<plan::SumBlock> sums;
  std::vector<uint64_t> stretches;  // to which `sums` point
  plan::Binding binding;            // points to `rows` and `sums`
};

}  // namespace moeccl::algo
