// SPDX-License-Identifier: Apache-2.0
#include "src/plan/profile_file.h"

#include <gtest/gtest.h>

#include <chrono>
#include <random>

#include "tests/support/timing.h"

namespace moeccl::plan {
namespace {

Profile sample() {
  Profile p;
  p.n_ranks = 4;
  p.tree_hash = 0x0123456789abcdefu;
  p.cores = 2;
  p.signal_ns = 71.25;
  p.all_to_all.standard = {722000, 1.75};
  p.all_to_all.inter = {{497000, 1.89}, {301000, 8.5}};
  p.all_to_all.intra = {{571000, 7.87}};
  p.levels.push_back({"node", {{1000, 1.25}, 0.9991, {{64, 1050}, {65536, 53000.5}}}});
  p.levels.push_back({"rank", {{200, 9}, 0.97, {{64, 210}, {4096, 700}}}});
  p.links = {p.levels[0].curve.line, p.levels[1].curve.line};
  PlanFit fit;
  fit.op = moecclOpAllGather;
  fit.algorithm = "ring";
  fit.reach = 5;
  fit.curve = {{3000, 4}, 0.99, {{0, 2900}, {1024, 3300, 3500.5}, {1 << 20, 260000}}};
  p.plans.push_back(fit);
  return p;
}

TEST(ProfileFile, ComesBackToTheBit) {
  const Profile p = sample();
  const std::string text = write_profile(p, "a \"note\"", "node:2 gpu:2");
  auto back = read_profile(text, "p.json");
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_EQ(back->hash(), p.hash());
  EXPECT_EQ(write_profile(*back, "a \"note\"", "node:2 gpu:2"), text);
}

// Earlier versions wrote a factor that nothing ever set.
TEST(ProfileFile, ACorrectionOfAnEarlierVersionIsIgnored) {
  const Profile p = sample();
  std::string text = write_profile(p, "a note", "node:2 gpu:2");
  const size_t at = text.find("\"reach\": 5, ");
  ASSERT_NE(at, std::string::npos);
  text.insert(at, "\"correction\": 1.25, ");
  const auto back = read_profile(text, "p.json");
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_EQ(back->hash(), p.hash());
}

TEST(ProfileFile, HashDiffersWithEveryFigure) {
  const Profile p = sample();
  Profile q = p;
  q.plans[0].curve.points[0].ns += 1;
  EXPECT_NE(p.hash(), q.hash());
  q = p;
  q.step_ns += 1;
  EXPECT_NE(p.hash(), q.hash());
}

TEST(ProfileFile, NamesLineAndColumnOfAMistake) {
  const struct {
    const char *text, *where, *what;
  } cases[] = {
      {"", "p.json:1:1:", "end of input"},
      {"{}", "p.json:1:1:", "moeccl_profile"},
      {"{\"moeccl_profile\": 2}", "p.json:1:20:", "version"},
      {"{\"moeccl_profile\": 1,\n\"wrong\": 3}", "p.json:2:10:", "unknown field \"wrong\""},
      {"{\"moeccl_profile\": 1,\n \"machine\": {\"step_ns\": -1}}", "p.json:2:25:", "step_ns is -1"},
      {"{\"moeccl_profile\": 1, \"machine\": {\"cores\": 1.5}}", "p.json:1:44:", "whole number"},
      {"{\"moeccl_profile\": 1, \"n_ranks\": \"4\"}", "p.json:1:34:", "must be a number, not a text"},
      {"{\"moeccl_profile\": 1, \"n_ranks\": 4, \"n_ranks\": 5}", "p.json:1:37:", "twice"},
      {"{\"moeccl_profile\": 1, \"levels\": [{\"points\": [[2, 1], [1, 1]]}]}", "p.json:1:54:", "ascend"},
      {"{\"moeccl_profile\": 1, \"levels\": [{\"points\": [[2, 2, 1]]}]}", "p.json:1:53:", "upper quartile"},
      {"{\"moeccl_profile\": 1, \"levels\": [{\"points\": [[2, 2, 2, 2]]}]}", "p.json:1:46:", "a point is"},
      {"{\"moeccl_profile\": 1, \"plans\": [{\"op\": \"Fly\"}]}", "p.json:1:40:", "unknown operation"},
      {"{\"moeccl_profile\": 1, \"plans\": [{\"op\": \"AllGather\"}]}", "p.json:1:33:", "algorithm"},
      {"{\"moeccl_profile\": 1, \"topology_hash\": \"xyz\"}", "p.json:1:40:", "hexadecimal"},
      {"{\"moeccl_profile\": 1e999}", "p.json:1:20:", "too large"},
      {"{\"moeccl_profile\" 1}", "p.json:1:19:", "':'"},
      {"{\"moeccl_profile\": 1} x", "p.json:1:23:", "end of input"},
      {"{\"moeccl_profile\": 1,\n\n  \"n_ranks\": [1, {\"x\": 4}]}", "p.json:3:14:", "must be a number, not a list"},
      {"{\"moeccl_profile\":1,\"machine\":{\"cores\":12,\"cores\":3}}", "p.json:1:43:", "twice"},
      {"{\"moeccl_profile\": 1,\n \"note\": \"\xff\"}", "p.json:2:10:", "UTF-8"},
  };
  for (const auto& c : cases) {
    auto read = read_profile(c.text, "p.json");
    ASSERT_FALSE(read.ok()) << c.text;
    const std::string message = read.status().message();
    EXPECT_EQ(message.find(c.where), 0u) << message;
    EXPECT_NE(message.find(c.what), std::string::npos) << message;
  }
  EXPECT_FALSE(read_profile(std::string(100, '['), "p.json").ok());
}

// Reading is linear in the size of a file. Size, depth and number of values are limited, and the error names the place.
TEST(ProfileFile, LargeFilesAreReadOrRefusedAtOnce) {
  const auto refused = [](const std::string& text, const char* what) {
    const auto began = std::chrono::steady_clock::now();
    const auto read = read_profile(text, "p.json");
    ASSERT_FALSE(read.ok());
    EXPECT_EQ(read.status().message().find("p.json:"), 0u) << read.status().message();
    EXPECT_NE(read.status().message().find(what), std::string::npos) << read.status().message();
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(tests::patient_ms(5000)));
  };
  std::string fields = "{\"moeccl_profile\": 1";
  for (int i = 0; fields.size() < (3u << 20); ++i) fields += format(",\n\"f{}\": 0", i);
  refused(fields + "}", "unknown field \"f0\"");
  refused(fields + ",\"f0\": 0}", "twice");
  std::string lists = "[[]";
  while (lists.size() < (3u << 20)) lists += ",[]";
  refused(lists + "]", "values");
  refused(std::string(4u << 20, '['), "deep");
  refused(std::string((4u << 20) + 1, ' '), "bytes");
}

// Files are cut short, have a changed byte or a doubled piece. Each is read, or refused with file, line and column.
TEST(ProfileFile, ThreeHundredBrokenFilesAreRefusedWithTheirPlace) {
  const std::string good = write_profile(sample(), "note", "node:2 gpu:2");
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; refused < 300 && i < 5000; ++i) {
    std::string text = good;
    const size_t at = random() % text.size();
    switch (random() % 3) {
      case 0:
        text.resize(at);
        break;
      case 1:
        text[at] = static_cast<char>(random() % 256);
        break;
      default:
        text.insert(at, text.substr(random() % text.size(), 1 + random() % 20));
    }
    auto read = read_profile(text, "p.json");
    if (read.ok()) continue;
    ++refused;
    unsigned line = 0, column = 0;
    EXPECT_EQ(std::sscanf(read.status().message().c_str(), "p.json:%u:%u:", &line, &column), 2)
        << read.status().message();
  }
  EXPECT_EQ(refused, 300);
}

TEST(Curve, FollowsItsPoints) {
  const Curve c{{}, 0, {{0, 100}, {1000, 200}, {100000, 2000}}};
  EXPECT_DOUBLE_EQ(c.at(0), 100);
  EXPECT_DOUBLE_EQ(c.at(500), 150);
  EXPECT_NEAR(c.at(10000), std::sqrt(200.0 * 2000.0), 1e-6);
  EXPECT_DOUBLE_EQ(c.at(100000), 2000);
  EXPECT_NEAR(c.at(200000), 2000 + 100000 * (1800.0 / 99000), 1e-6);
}

TEST(ProfileFile, SaysWhatDoesNotFitATree) {
  EXPECT_TRUE(profile_fits(sample(), *LevelTree::from_sizes({{"node", {}, {2, 2}}})).ok());
  EXPECT_FALSE(profile_fits(sample(), LevelTree::flat(4)).ok());
}

}  // namespace
}  // namespace moeccl::plan
