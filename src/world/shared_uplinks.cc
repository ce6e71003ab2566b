// SPDX-License-Identifier: Apache-2.0
#include "src/world/shared_uplinks.h"

#include <algorithm>
#include <map>

namespace moeccl::comm {

std::shared_ptr<const SharedUplinks> SharedUplinks::of_part(const std::vector<uint32_t>& ranks) const {
  auto part = std::make_shared<SharedUplinks>(SharedUplinks{tree, segments, {}});
  for (const uint32_t r : ranks) part->member.push_back(member[r]);
  for (uint32_t level = 0; level < tree.depth(); ++level)
    for (const uint32_t r : part->member) words(level, r)->shared.store(1, std::memory_order_relaxed);
  return part;
}

plan::LevelTree SharedUplinks::own_tree() const {
  const auto n = static_cast<uint32_t>(member.size());
  plan::LevelTree own{n, {}};
  for (uint32_t l = 0; l < tree.depth(); ++l) {
    plan::Level level{tree.levels[l].name, tree.levels[l].link, {}, 0};
    std::map<uint32_t, uint32_t> number;
    for (const uint32_t r : member)
      level.group_of_rank.push_back(
          number.try_emplace(tree.levels[l].group_of_rank[r], static_cast<uint32_t>(number.size())).first->second);
    level.n_groups = static_cast<uint32_t>(number.size());
    const bool last = l + 1 == tree.depth();
    if (!last && (level.n_groups == 1 || level.n_groups == n)) {
      // Where every rank is alone, the outermost such level's link is theirs.
      if (level.n_groups == 1) continue;
      own.levels.push_back(std::move(level));
      return own;
    }
    own.levels.push_back(std::move(level));
  }
  return own;
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
