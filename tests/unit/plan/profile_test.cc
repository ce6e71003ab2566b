// SPDX-License-Identifier: Apache-2.0
#include "src/plan/profile.h"

#include <gtest/gtest.h>

namespace moeccl::plan {
namespace {

TEST(Profile, FiguresTextSaysWhyLinksHaveNoCost) {
  const LevelTree tree = LevelTree::flat(2);
  Profile profile;
  EXPECT_NE(figures_text(profile, tree).find("neither a profile nor the topology gives one"), std::string::npos);
  profile.links = {{}};
  profile.levels = {{"rank", {{770, 1.47}, 0.9, {{64, 800}, {4096, 3500}}}}};
  profile.source = "the profile p.json";
  EXPECT_EQ(figures_text(profile, tree),
            "links without a cost, because within a host copies are priced instead of the profile's lines; copies and "
            "sums from the profile p.json");
  profile.links = {{770, 1.47}};
  EXPECT_NE(figures_text(profile, tree).find("links from the profile p.json (r2 of the fits at least 0.9000)"),
            std::string::npos);
}

TEST(Profile, ALatencyAloneDoesNotMakeALinkFree) {
  const LevelTree tree = *LevelTree::from_sizes({{"node", {5e3, 1}, {4, 4}}});
  Profile profile;
  profile.links = {{9e3, 0}, {700, 0}};
  EXPECT_EQ(link_of(tree, profile, 0).bytes_per_ns, 1);
  EXPECT_EQ(link_of(tree, profile, 0).alpha_ns, 5e3);
  EXPECT_EQ(link_of(tree, profile, 1).alpha_ns, 700) << "the tree says nothing of this level";
  profile.links = {{9e3, 2}};
  EXPECT_EQ(link_of(tree, profile, 0).alpha_ns, 9e3);
}

}  // namespace
}  // namespace moeccl::plan
