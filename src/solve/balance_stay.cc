// SPDX-License-Identifier: Apache-2.0
// Names for the parts of a placement that is made without regard to the present one. Nodes are alike, and so are the
// GPUs of a node and the slots of a GPU, so each part can go where most of its experts are.
#include <algorithm>
#include <iterator>
#include <utility>

#include "src/solve/arena.h"
#include "src/solve/assignment.h"
#include "src/solve/balance_layer.h"

namespace moeccl::solve {
namespace {

std::vector<int32_t> distinct(std::span<const int32_t> block) {
  std::vector<int32_t> experts(block.begin(), block.end());
  std::sort(experts.begin(), experts.end());
  experts.erase(std::unique(experts.begin(), experts.end()), experts.end());
  return experts;
}

// Reorders n blocks so that the least experts are new in the place where they come to stand.
void place_blocks(std::span<int32_t> slots, std::span<const int32_t> current, size_t n) {
  const size_t block = slots.size() / n;
  std::vector<std::vector<int32_t>> now;
  for (size_t b = 0; b < n; ++b) now.push_back(distinct(current.subspan(b * block, block)));
  std::vector<int32_t> cost, capacity(n, 1), place(n), both;
  for (size_t b = 0; b < n; ++b) {
    const std::vector<int32_t> wanted = distinct(slots.subspan(b * block, block));
    for (const auto& held : now) {
      both.clear();
      std::set_intersection(wanted.begin(), wanted.end(), held.begin(), held.end(), std::back_inserter(both));
      cost.push_back(static_cast<int32_t>(wanted.size() - both.size()));
    }
  }
  const auto bins = static_cast<int32_t>(n);
  const size_t bytes = assignment_bytes(bins, bins);
  Result<Workspace> scratch = Workspace::make(nullptr, 0, bytes, "");
  assign({cost.data(), capacity.data(), bins, bins}, place.data(), scratch->arena());
  const std::vector<int32_t> before(slots.begin(), slots.end());
  for (size_t b = 0; b < n; ++b)
    std::copy_n(before.begin() + static_cast<std::ptrdiff_t>(b * block), block,
                slots.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(place[b]) * block));
}

// Exchanges a GPU's slots so that an expert that stays keeps its slot.
void keep_slots(std::span<int32_t> slots, std::span<const int32_t> current) {
  for (size_t s = 0; s < slots.size(); ++s)
    for (size_t t = 0; slots[s] != current[s] && t < slots.size(); ++t)
      if (slots[t] == current[s] && slots[t] != current[t]) std::swap(slots[s], slots[t]);
}

}  // namespace

Slots stay_near(const BalanceShape& shape, const Slots& slots, const int32_t* current, bool exchange_pools) {
  if (current == nullptr) return slots;
  Slots named = slots;
  const std::span<const int32_t> now(current, slots.size());
  if (exchange_pools) place_blocks(named, now, shape.pools);
  for (size_t p = 0; p < shape.pools; ++p)
    place_blocks(std::span(named).subspan(p * shape.pool_slots(), shape.pool_slots()),
                 now.subspan(p * shape.pool_slots(), shape.pool_slots()), shape.pool_gpus());
  for (size_t g = 0; g < shape.gpus; ++g)
    keep_slots(std::span(named).subspan(g * shape.per_gpu(), shape.per_gpu()),
               now.subspan(g * shape.per_gpu(), shape.per_gpu()));
  return named;
}

}  // namespace moeccl::solve
