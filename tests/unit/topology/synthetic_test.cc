// SPDX-License-Identifier: Apache-2.0
#include "topology/synthetic.h"

#include <gtest/gtest.h>

#include <random>

namespace moeccl::topology {
namespace {

using plan::LevelTree;

LevelTree parse(const std::string& text, uint32_t n_ranks = 0) {
  Result<LevelTree> tree = parse_synthetic(text, n_ranks);
  EXPECT_TRUE(tree.ok()) << text << ": " << tree.status().message();
  return tree.ok() ? *tree : LevelTree::flat(1);
}

std::vector<size_t> sizes(const LevelTree& tree, uint32_t level) {
  std::vector<size_t> all;
  const plan::Groups groups(tree.levels[level]);
  for (uint32_t g = 0; g < tree.levels[level].n_groups; ++g) all.push_back(groups.size(g));
  return all;
}

std::string complaint(std::string_view text, uint32_t n_ranks = 0) {
  const Result<LevelTree> tree = parse_synthetic(text, n_ranks);
  EXPECT_FALSE(tree.ok()) << text;
  return tree.status().message();
}

TEST(Synthetic, EvenLevelsMultiply) {
  const LevelTree tree = parse("dc:2(bw=1.25GB/s,lat=5ms) node:4 gpu:8", 64);
  ASSERT_EQ(tree.depth(), 3u);
  EXPECT_EQ(tree.levels[0].n_groups, 2u);
  EXPECT_EQ(tree.levels[1].n_groups, 8u);
  EXPECT_EQ(tree.levels[2].n_groups, 64u);
  EXPECT_EQ(tree.levels[2].name, "gpu");
  EXPECT_DOUBLE_EQ(tree.levels[0].link.bytes_per_ns, 1.25);
  EXPECT_DOUBLE_EQ(tree.levels[0].link.alpha_ns, 5e6);
  EXPECT_DOUBLE_EQ(tree.levels[1].link.bytes_per_ns, 0);
}

TEST(Synthetic, UnevenLevelsGiveOneNumberPerGroupAbove) {
  EXPECT_EQ(sizes(parse("node:2 gpu:7+8", 15), 0), (std::vector<size_t>{7, 8}));
  EXPECT_EQ(sizes(parse("node:3 gpu:1+4+3"), 0), (std::vector<size_t>{1, 4, 3}));
  const LevelTree deep = parse("dc:2 node:1+2 gpu:4+1+3");
  EXPECT_EQ(sizes(deep, 0), (std::vector<size_t>{4, 4}));
  EXPECT_EQ(sizes(deep, 1), (std::vector<size_t>{4, 1, 3}));
}

TEST(Synthetic, OneLevelIsFlat) {
  const LevelTree tree = parse("  gpu:5(lat=2us)  ");
  EXPECT_EQ(tree.depth(), 1u);
  EXPECT_EQ(tree.n_ranks, 5u);
  EXPECT_DOUBLE_EQ(tree.levels[0].link.alpha_ns, 2000);
}

TEST(Synthetic, UnitsOfBandwidthAndLatency) {
  const std::pair<const char*, double> rates[] = {{"8000000B/s", 0.008}, {"8000KB/s", 0.008}, {"8MB/s", 0.008},
                                                  {"2.5GB/s", 2.5},      {"1TB/s", 1000},     {"10Gbit/s", 1.25},
                                                  {"100Mbit/s", 0.0125}, {"1e-1GB/s", 0.1}};
  for (const auto& [text, gb] : rates)
    EXPECT_DOUBLE_EQ(parse("node:2(bw=" + std::string(text) + ") gpu:2").levels[0].link.bytes_per_ns, gb) << text;
  const std::pair<const char*, double> times[] = {{"7ns", 7}, {"0.5us", 500}, {"5ms", 5e6}, {"1s", 1e9}, {"0ns", 0}};
  for (const auto& [text, ns] : times)
    EXPECT_DOUBLE_EQ(parse("node:2(lat=" + std::string(text) + ") gpu:2").levels[0].link.alpha_ns, ns) << text;
}

TEST(Synthetic, ErrorsNameThePositionAndWhatIsAccepted) {
  EXPECT_EQ(complaint("node:2(bw=3XB/s) gpu:4"),
            "topology \"node:2(bw=3XB/s) gpu:4\", position 12: found \"XB/s) gpu:4\", wanted one of Mbit/s, Gbit/s, "
            "B/s, KB/s, MB/s, GB/s, TB/s");
  EXPECT_EQ(complaint("node:2 gpu:1+2+3"),
            "topology \"node:2 gpu:1+2+3\", position 8: found \"gpu:1+2+3\", wanted one number, or one for each of the "
            "2 groups above, not 3");
  EXPECT_EQ(complaint(""), "topology \"\", position 1: found the end, wanted a level such as node:2");
  EXPECT_NE(complaint("node:0 gpu:4").find("position 6: found \"0 gpu:4\", wanted a number between 1 and 1048576"),
            std::string::npos);
  EXPECT_NE(complaint("node:2 gpu:4", 9)
                .find("has 8 ranks, the communicator has 9: give config.topology or MOECCL_TOPOLOGY that many"),
            std::string::npos);
}

TEST(Synthetic, BrokenTextsAreRefused) {
  const char* broken[] = {" ",
                          "node",
                          "node:",
                          "node:x",
                          ":4",
                          "4",
                          "node:-1",
                          "node:2gpu:4",
                          "node:2,gpu:4",
                          "node:2+2",
                          "gpu:1+1",
                          "node:2 node:2",
                          "node:2(",
                          "node:2()",
                          "node:2(bw)",
                          "node:2(bw=)",
                          "node:2(bw=1)",
                          "node:2(bw=1GB/s",
                          "node:2(bw=1GB/s,)",
                          "node:2(bw=1GB/s lat=2us)",
                          "node:2(bw=1GB/s,bw=2GB/s)",
                          "node:2(bw=0GB/s)",
                          "node:2(bw=-1GB/s)",
                          "node:2(bw=1e-290GB/s)",
                          "node:2(bw=infGB/s)",
                          "node:2(bw=nanGB/s)",
                          "node:2(bw=1e999GB/s)",
                          "node:2(bw=1gb/s)",
                          "node:2(lat=5)",
                          "node:2(lat=5m)",
                          "node:2(lat=5 ms)",
                          "node:2 (lat=5ms)",
                          "node:2(lat=1e300s)",
                          "node:2(speed=1)",
                          "node:1048577",
                          "node:1024 gpu:1025",
                          "node:99999999999999999999",
                          "node:2 gpu:4+",
                          "node:2 gpu:+4",
                          "node:2 gpu:4++4",
                          "a:1 b:1 c:1 d:1 e:1 f:1 g:1 h:1 i:1",
                          "node:2\ngpu:4",
                          "node:2)gpu:4",
                          "n\xff:2",
                          "node:2 gpu:0x4",
                          "a_name_of_more_than_thirty_one_characters:2",
                          "node:2(lat=5ms)gpu:2"};
  for (const char* text : broken) EXPECT_FALSE(complaint(text).empty()) << text;
}

// Random damage to good texts never causes a crash or an invalid tree, and an accepted text can be reproduced from its
// own output.
TEST(Synthetic, SurvivesDamagedTexts) {
  const std::string good[] = {"dc:2(bw=1.25GB/s,lat=5ms) node:4 gpu:8", "node:2 gpu:7+8",
                              "dc:2 node:1+2 gpu:4+1+3(lat=3us)"};
  const std::string alphabet = "0123456789+:(),=/. abdegnopuwGBMs\t\n\xf0";
  std::mt19937 random(7);
  int n_refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string text = good[random() % 3];
    for (uint32_t n = 1 + random() % 4; n > 0 && !text.empty(); --n) {
      const size_t at = random() % text.size();
      switch (random() % 4) {
        case 0:
          text.erase(at, 1 + random() % 5);
          break;
        case 1:
          text.insert(at, 1, alphabet[random() % alphabet.size()]);
          break;
        case 2:
          text[at] = alphabet[random() % alphabet.size()];
          break;
        case 3:
          text += text.substr(at);
          break;
      }
    }
    const Result<LevelTree> tree = parse_synthetic(text, 0);
    if (!tree.ok()) {
      ++n_refused;
      EXPECT_NE(tree.status().message().find("topology"), std::string::npos);
      continue;
    }
    EXPECT_TRUE(tree->validate().ok()) << text;
    EXPECT_EQ(parse(to_synthetic(*tree)).hash(), tree->hash()) << text;
  }
  EXPECT_GT(n_refused, 300);
}

TEST(Synthetic, TextAndTreeRoundTrip) {
  for (const std::string text : {"dc:2(bw=1.25GB/s,lat=5ms) node:4 gpu:8", "node:2(bw=250MB/s) gpu:4", "node:2 gpu:7+8",
                                 "gpu:3", "dc:2 node:1+2 gpu:4+1+3", "a:2 b:1+3 c:2 d:1+2+3+4+5+6+7+8(lat=68ns)"})
    EXPECT_EQ(to_synthetic(parse(text)), text);
  std::mt19937 random(3);
  for (int i = 0; i < 500; ++i) {
    LevelTree tree = parse("node:2 gpu:3");
    tree.levels[0].link.bytes_per_ns = std::uniform_real_distribution<double>(1e-6, 1e3)(random);
    tree.levels[0].link.alpha_ns = std::uniform_real_distribution<double>(0, 1e8)(random);
    EXPECT_EQ(parse(to_synthetic(tree)).hash(), tree.hash()) << to_synthetic(tree);
  }
}

}  // namespace
}  // namespace moeccl::topology
