// SPDX-License-Identifier: Apache-2.0
// Real machines, and machines that were invented to be awkward (tests/fixtures/topology/make). Each has its expected
// text. MOECCL_TEST_UPDATE=1 rewrites the texts, which must be read before they are committed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tests/unit/topology/fixture.h"
#include "topology/json.h"
#include "topology/merge.h"
#include "topology/synthetic.h"
#include "topology/text.h"
#include "topology/tree.h"

namespace moeccl::topology {
namespace {

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const auto& entry : std::filesystem::directory_iterator(fixture_folder()))
    if (entry.path().extension() == ".xml") all.push_back(entry.path().stem());
  std::sort(all.begin(), all.end());
  return all;
}

class Fixtures : public testing::TestWithParam<std::string> {};

TEST_P(Fixtures, MergeIntoTheExpectedGraph) {
  const std::string file = fixture_folder() + "/" + GetParam() + ".txt";
  const std::string text = to_text(fixture(GetParam()));
  if (std::getenv("MOECCL_TEST_UPDATE") != nullptr) std::ofstream(file) << text;
  EXPECT_EQ(text, read_file(file));
}

TEST_P(Fixtures, ComeBackFromJson) {
  const Graph graph = fixture(GetParam());
  const std::string json = to_json({&graph, 1});
  const auto back = read_json(json, "dump.json");
  ASSERT_TRUE(back.ok()) << back.status().message();
  ASSERT_EQ(back.value().size(), 1u);
  EXPECT_EQ(to_json(back.value()), json);
  EXPECT_EQ(to_text(back.value()[0]), to_text(graph));
}

// A graph depends only on its parts, and not on the order of the parts' nodes.
TEST_P(Fixtures, MergeIsCanonical) {
  Graph graph = fixture(GetParam());
  const std::string text = to_text(graph);
  std::reverse(graph.nodes.begin(), graph.nodes.end());
  std::reverse(graph.links.begin(), graph.links.end());
  const auto again = merge({graph, graph});
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(to_text(again.value()), text);
}

INSTANTIATE_TEST_SUITE_P(All, Fixtures, testing::ValuesIn(names()), [](const auto& info) { return info.param; });

std::string levels(const std::vector<Graph>& hosts, uint32_t n_ranks = 0) {
  const auto tree = level_tree(hosts, n_ranks);
  EXPECT_TRUE(tree.ok()) << tree.status().message();
  return tree.ok() ? to_synthetic(tree.value()) : "";
}

TEST(FixtureLevels, UnevenHostsGiveUnevenLevels) {
  EXPECT_EQ(levels({fixture("dgx_7gpus"), fixture("dgx")}), "host:2 rank:7+8(bw=450GB/s)");
  EXPECT_EQ(levels({fixture("two_islands"), fixture("dgx")}), "host:2 island:2+1 rank:4+4+8(bw=0.3TB/s)");
  EXPECT_EQ(levels({fixture("two_islands")}), "island:2 rank:4(bw=0.3TB/s)");
  EXPECT_EQ(levels({fixture("dgx"), fixture("dgx")}), "host:2 rank:8(bw=450GB/s)");
}

TEST(FixtureLevels, NvlinkAcrossSocketsHidesThem) {
  const auto tree = level_tree(std::vector<Graph>{fixture("crossed")});
  ASSERT_TRUE(tree.ok());
  ASSERT_EQ(tree.value().depth(), 2u);
  EXPECT_EQ(tree.value().levels[0].name, "island");
  EXPECT_EQ(tree.value().levels[0].group_of_rank, (std::vector<uint32_t>{0, 1, 0, 1}));
  // A text cannot say that, so what is printed does not look like one.
  const std::string text = to_synthetic(*tree);
  EXPECT_EQ(text.substr(0, text.find("(")), "island:2[0,2 1,3] rank:2");
  EXPECT_FALSE(parse_synthetic(text, 0).ok());
}

TEST(FixtureLevels, RanksOfProcessorsAndSharedGpus) {
  EXPECT_EQ(levels({fixture("sub_numa")}), "socket:2 numa:2 rank:4");
  EXPECT_EQ(levels({fixture("sub_numa")}, 4), "socket:2 rank:2");
  EXPECT_EQ(levels({fixture("sub_numa")}, 6), "socket:2 numa:2 rank:2+1+2+1");
  EXPECT_EQ(levels({fixture("sub_numa"), fixture("sub_numa")}), "host:2 socket:2 numa:2 rank:4");
  EXPECT_EQ(levels({fixture("two_islands")}, 16), "island:2 rank:8(bw=0.3TB/s)");
  EXPECT_EQ(levels({fixture("this_machine")}), "rank:2");
  EXPECT_EQ(levels({fixture("this_machine"), fixture("this_machine")}, 4), "host:2 rank:2");
}

TEST(FixtureLevels, RanksMustFitTheHosts) {
  const auto tree = level_tree(std::vector<Graph>{fixture("dgx_7gpus"), fixture("dgx")}, 16);
  ASSERT_FALSE(tree.ok());
  EXPECT_NE(tree.status().message().find("15 places for ranks, the communicator has 16"), std::string::npos);
}

}  // namespace
}  // namespace moeccl::topology
