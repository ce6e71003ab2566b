// SPDX-License-Identifier: Apache-2.0
#include "src/world/shared_uplinks.h"

#include <algorithm>

namespace moeccl::comm {

std::shared_ptr<const SharedUplinks> SharedUplinks::of_part(const std::vector<uint32_t>& ranks) const {
  auto part = std::make_shared<SharedUplinks>(SharedUplinks{tree, segments, {}});
  for (const uint32_t r : ranks) part->member.push_back(member[r]);
  for (uint32_t level = 0; level < tree.depth(); ++level)
    for (const uint32_t r : part->member) words(level, r)->shared.store(1, std::memory_order_relaxed);
  return part;
}

transport::paced::PacedUplinks SharedUplinks::between(uint32_t a, uint32_t b) const {
  const uint32_t level = tree.level_between(member[a], member[b]);
  return {tree.levels[level].link, words(level, member[a]), words(level, member[b])};
}

transport::PaceWords* SharedUplinks::words(uint32_t level, uint32_t member_rank) const {
  const std::vector<uint32_t>& group = tree.levels[level].group_of_rank;
  const auto first = std::find(group.begin(), group.end(), group[member_rank]) - group.begin();
  return &segments[static_cast<size_t>(first)]->pace(level);
}

}  // namespace moeccl::comm
