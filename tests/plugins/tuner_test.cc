// SPDX-License-Identifier: Apache-2.0
// Loads the tuner and asks it as NCCL does, on 1 to 512 hosts and in all versions of the interface.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "tests/plugins/tuner_host.h"

namespace moeccl::testing {
namespace {

using tuner::kAllGather;
using tuner::kAllReduce;
using tuner::kLL;
using tuner::kNvlsTree;
using tuner::kPat;
using tuner::kRing;
using tuner::kSimple;
using tuner::kTree;

const TunerFile& file() {
  static const TunerFile loaded(std::getenv("MOECCL_TEST_TUNER"));
  return loaded;
}

std::string fixture(const std::string& name) { return std::getenv("MOECCL_TEST_PROFILES") + ("/" + name) + ".json"; }

class Tuner : public ::testing::Test {
 protected:
  void SetUp() override {
    Log::clear();
    unsetenv("MOECCL_TUNER_RAILS");
    use(fixture("gigabit"));
  }
  void TearDown() override {
    if (!written_.empty()) unlink(written_.c_str());
  }
  static void use(const std::string& path) { setenv("MOECCL_PROFILE", path.c_str(), 1); }
  void use_text(const std::string& text) {
    written_ = ::testing::TempDir() + "tuner-" + std::to_string(getpid()) + ".json";
    std::ofstream(written_) << text;
    use(written_);
  }
  static int lines_with(const std::string& text) {
    int n = 0;
    for (const std::string& line : Log::lines()) n += line.find(text) != std::string::npos ? 1 : 0;
    return n;
  }

 private:
  std::string written_;
};

const Machine kSlowCard{"", 2, 2, 5, 0.625, false, false, 0};  // PCI; NCCL assumes 10 Gbit/s

TEST_F(Tuner, AnswersInEveryVersionOnEveryNumberOfHosts) {
  int changed = 0;
  for (int version = 3; version <= 7; ++version) {
    for (size_t nodes = 1; nodes <= 512; nodes = nodes < 8 ? nodes + 1 : nodes * 2 - nodes / 4) {
      const TunerContext context(file(), {.version = version, .n_ranks = nodes * 2, .n_nodes = nodes});
      ASSERT_EQ(context.init_result(), 0);
      for (int function = 0; function <= kAllReduce; ++function) {
        for (size_t bytes = 0; bytes <= size_t{1} << 36; bytes = bytes == 0 ? 1 : bytes * 5) {
          const CostTable before = nccl_costs(kSlowCard, nodes, function, std::max<size_t>(bytes, 1));
          CostTable after = before;
          ASSERT_EQ(context.ask(function, bytes, after), 0);
          for (size_t a = 0; a < 7; ++a) {
            for (size_t p = 0; p < 3; ++p) {
              ASSERT_EQ(after[a][p] == -1.0F, before[a][p] == -1.0F) << "ignored entries stay, others are not ignored";
              ASSERT_TRUE(std::isfinite(after[a][p]));
            }
          }
          ASSERT_GE(nccl_choice(after), 0);
          if (nodes == 1 || bytes == 0) {
            ASSERT_EQ(after, before) << "nothing is known of this";
          }
          changed += after != before ? 1 : 0;
        }
      }
    }
  }
  EXPECT_GT(changed, 100);
}

TEST_F(Tuner, TheVersionsAgreeBitForBit) {
  for (const size_t bytes : {16 << 10, 1 << 20, 1 << 24}) {
    std::vector<CostTable> answers;
    for (int version = 3; version <= 7; ++version) {
      const TunerContext context(file(), {.version = version, .n_ranks = 128, .n_nodes = 64});
      answers.push_back(nccl_costs(kSlowCard, 64, kAllReduce, bytes));
      ASSERT_EQ(context.ask(kAllReduce, bytes, answers.back()), 0);
    }
    for (const CostTable& answer : answers) EXPECT_EQ(answer, answers[0]) << "ranks must choose alike";
  }
}

TEST_F(Tuner, WithoutAProfileNothingChanges) {
  for (const char* path : {"", "/nonexistent.json"}) {
    use(path);
    const TunerContext context(file(), {});
    ASSERT_EQ(context.init_result(), 0);
    for (const size_t bytes : {1 << 10, 1 << 20, 1 << 28}) {
      const CostTable before = nccl_costs(kSlowCard, 2, kAllReduce, bytes);
      CostTable after = before;
      EXPECT_EQ(context.ask(kAllReduce, bytes, after), 0);
      EXPECT_EQ(after, before);
    }
  }
  EXPECT_EQ(lines_with("INFO TUNER/MoECCL: MOECCL_PROFILE names no profile"), 1);
  EXPECT_EQ(lines_with("WARN TUNER/MoECCL: the profile /nonexistent.json is of no use"), 1);
}

// Where the measured links are what NCCL assumes, the tuner keeps its choices.
TEST_F(Tuner, AFabricThatNcclKnowsIsLeftAlone) {
  use(fixture("infiniband"));
  setenv("MOECCL_TUNER_RAILS", "8", 1);
  const Machine dgx{"", 8, 16, 24, 24, true, true, 400};
  for (const size_t nodes : {2, 4, 8, 16, 32, 64, 128, 256, 512}) {
    const TunerContext context(file(), {.n_ranks = nodes * 8, .n_nodes = nodes});
    for (const int function : {int{kAllReduce}, int{kAllGather}}) {
      for (size_t bytes = 1024; bytes <= size_t{1} << 30; bytes *= 4) {
        const CostTable before = nccl_costs(dgx, nodes, function, bytes);
        CostTable after = before;
        EXPECT_EQ(context.ask(function, bytes, after), 0);
        EXPECT_EQ(entry_name(nccl_choice(after)), entry_name(nccl_choice(before))) << nodes << " hosts, " << bytes;
      }
    }
  }
}

// The card has a tenth of the rate that NCCL assumes. LL, which sends everything twice, stops being chosen at smaller
// sizes. Large sums leave the tree, which sends more than the ring, at the latest where only bytes count.
TEST_F(Tuner, MeasuredLinksDecide) {
  const TunerContext context(file(), {.n_ranks = 128, .n_nodes = 64});
  const auto choice = [&](size_t bytes) {
    CostTable table = nccl_costs(kSlowCard, 64, kAllReduce, bytes);
    EXPECT_EQ(context.ask(kAllReduce, bytes, table), 0);
    return nccl_choice(table);
  };
  EXPECT_EQ(entry_name(nccl_choice(nccl_costs(kSlowCard, 64, kAllReduce, 16 << 10))), "Tree/LL");
  EXPECT_EQ(entry_name(choice(16 << 10)), "Tree/Simple");
  EXPECT_EQ(entry_name(choice(512)), "Tree/LL") << "latency alone";
  EXPECT_EQ(entry_name(choice(1 << 30)), "Ring/Simple");
  EXPECT_EQ(lines_with("128 ranks on 64 hosts, priced by the profile"), 1);
  EXPECT_EQ(lines_with("EMULATED"), 1);
  EXPECT_EQ(lines_with("AllReduce of 16384 bytes on 64 hosts: Tree/Simple"), 1);
  EXPECT_EQ(lines_with("in place of Tree/LL"), 1);
  for (int i = 0; i < 100; ++i) (void)choice((16 << 10) + 8 * i);
  EXPECT_EQ(lines_with("in place of Tree/LL"), 1) << "one line for a power of two";
}

// The price of a message is known to the byte: in an AllGather between 2 hosts of one rank, each sends half of the
// bytes.
TEST_F(Tuner, ALargeTransferCostsItsBytes) {
  use_text(R"({"moeccl_profile": 1, "machine": {"host_level": 0}, "levels": [
    {"name": "host", "alpha_ns": 10000, "bytes_per_ns": 2.0}, {"name": "rank", "alpha_ns": 1, "bytes_per_ns": 100}]})");
  const TunerContext context(file(), {.n_ranks = 2, .n_nodes = 2});
  CostTable table = {};
  for (auto& row : table) row.fill(-1);
  table[kRing][kSimple] = 2e6F;
  table[kPat][kSimple] = 1e6F;  // NCCL's choice
  EXPECT_EQ(context.ask(kAllGather, size_t{1} << 30, table), 0);
  const double ring = 0.5 * (1 << 30) / 2000.0;
  EXPECT_NEAR(table[kRing][kSimple], ring, ring / 100);
  EXPECT_NEAR(table[kPat][kSimple], ring / 0.75, ring / 75);
  setenv("MOECCL_TUNER_RAILS", "4", 1);
  const TunerContext four(file(), {.n_ranks = 2, .n_nodes = 2});
  table[kRing][kSimple] = 2e6F;
  table[kPat][kSimple] = 1e6F;
  EXPECT_EQ(four.ask(kAllGather, size_t{1} << 30, table), 0);
  EXPECT_NEAR(table[kRing][kSimple], ring / 4, ring / 100);
}

// Hosts of one site do not pay for the link between sites, and those of two do.
TEST_F(Tuner, OnlyLevelsThatAreCrossedCount) {
  use(fixture("sites"));
  const auto ring_us = [&](size_t nodes) {
    const TunerContext context(file(), {.n_ranks = nodes, .n_nodes = nodes, .log = nullptr});
    CostTable table = {};
    for (auto& row : table) row.fill(-1);
    table[kRing][kLL] = 100;
    table[kTree][kLL] = 50;
    table[kRing][kSimple] = 40;  // NCCL's choice, which is never the best of these
    EXPECT_EQ(context.ask(kAllReduce, 8, table), 0);
    return std::pair{table[kRing][kLL], table[kTree][kLL]};
  };
  const auto [ring8, tree8] = ring_us(8);
  const auto [ring16, tree16] = ring_us(16);
  EXPECT_LT(ring8, 150);
  EXPECT_NEAR(ring16 - ring8, 2 * (2 * 200 + 6 * 6.5 + 4), 60) << "15 hops each way, two of them between sites";
  EXPECT_GT(tree16 - tree8, 2 * 200) << "up and down once";
  EXPECT_LT(tree16 - tree8, 2 * 215);
}

// NCCL keeps fp8 sums off long rings by a factor of 1024, because they lose precision there.
TEST_F(Tuner, WhatNcclHasPutOutOfReachStaysThere) {
  const TunerContext context(file(), {.n_ranks = 128, .n_nodes = 64});
  CostTable table = nccl_costs(kSlowCard, 64, kAllReduce, 1 << 24);
  for (float& cost : table[kRing]) {
    if (cost > 0) cost *= 1024;
  }
  EXPECT_EQ(context.ask(kAllReduce, 1 << 24, table), 0);
  EXPECT_EQ(nccl_choice(table) / 3, int{kTree});
}

// An algorithm without a formula gets no cheaper, and its cost is raised where the links cannot be as fast.
TEST_F(Tuner, UnknownAlgorithmsKeepTheirCostAboveTheLinksFloor) {
  const TunerContext context(file(), {.n_ranks = 32, .n_nodes = 4});
  CostTable table = {};
  for (auto& row : table) row.fill(-1);
  table[kRing][kSimple] = 5000;
  table[kTree][kLL] = 900;           // NCCL's choice, and not a good one
  table[kNvlsTree][kSimple] = 1000;  // 64 MiB in 1 ms over a card of 1 Gbit/s
  EXPECT_EQ(context.ask(kAllReduce, 64 << 20, table), 0);
  EXPECT_EQ(entry_name(nccl_choice(table)), "Ring/Simple");
  EXPECT_GT(table[kNvlsTree][kSimple], 2 * 64e6 / 140);
}

TEST_F(Tuner, OddQuestionsChangeNothing) {
  for (const auto& [ranks, nodes] : std::vector<std::pair<size_t, size_t>>{{0, 0}, {1, 1}, {1, 0}, {0, 4}, {2, 4}}) {
    const TunerContext context(file(), {.n_ranks = ranks, .n_nodes = nodes});
    CostTable table = nccl_costs(kSlowCard, 4, kAllReduce, 1 << 14);
    const CostTable before = table;
    EXPECT_EQ(context.ask(kAllReduce, 1 << 14, table), 0);
    EXPECT_EQ(table, before) << ranks << " ranks on " << nodes;
  }
  const TunerContext context(file(), {.n_ranks = 128, .n_nodes = 64});
  CostTable table = nccl_costs(kSlowCard, 64, kAllReduce, 16 << 10);
  const CostTable before = table;
  EXPECT_EQ(context.ask(kAllReduce, 16 << 10, nullptr), 0);
  EXPECT_EQ(context.ask(-1, 16 << 10, &table[0][0]), 0);
  EXPECT_EQ(context.ask(5, 16 << 10, &table[0][0]), 0);
  EXPECT_EQ(context.ask(1 << 30, 16 << 10, &table[0][0]), 0);
  EXPECT_EQ(context.ask(kAllReduce, 16 << 10, &table[0][0], 0), 0);
  EXPECT_EQ(context.ask(kAllReduce, 16 << 10, &table[0][0], 8), 0);
  EXPECT_EQ(context.ask(kAllReduce, 16 << 10, &table[0][0], -1), 0);
  EXPECT_EQ(context.ask(kAllReduce, 16 << 10, &table[0][0], 7, 4), 0);
  EXPECT_EQ(table, before);
  EXPECT_EQ(file().version<tuner::PluginV6>(7).get_coll_info(nullptr, kAllReduce, 1, 1, nullptr, 7, 3, 0, nullptr), 0);
  EXPECT_EQ(file().version<tuner::PluginV6>(7).finalize(nullptr), 0);
  EXPECT_EQ(file().version<tuner::PluginV3>(3).init(4, 2, nullptr, nullptr), 0);
  EXPECT_EQ(file().version<tuner::PluginV6>(6).get_chunk_size, nullptr) << "NCCL's own";

  // An older NCCL has no PAT: the seventh row does not belong to the tuner.
  EXPECT_EQ(context.ask(kAllReduce, 16 << 10, &table[0][0], 6), 0);
  EXPECT_EQ(table[kPat], before[kPat]);
  EXPECT_NE(table, before);
  // Costs that are not numbers stay; sizes beyond any memory and any number of fused operations get an answer.
  table = before;
  table[kNvlsTree] = {std::nanf(""), std::numeric_limits<float>::infinity(), -7};
  EXPECT_EQ(context.ask(kAllReduce, std::numeric_limits<size_t>::max(), &table[0][0], 7, 3, -4), 0);
  EXPECT_EQ(context.ask(kAllReduce, 16 << 10, &table[0][0], 7, 3, std::numeric_limits<int>::max()), 0);
  EXPECT_TRUE(std::isnan(table[kNvlsTree][0]) && std::isinf(table[kNvlsTree][1]) && table[kNvlsTree][2] == -7);
}

TEST_F(Tuner, ProfilesThatSayNothingOfTheNetworkAreNamed) {
  const std::pair<const char*, const char*> bad[] = {
      {"{", ":1:2: syntax error"},
      {R"({"moeccl_profile": 1})", "no measured links"},
      {R"({"moeccl_profile": 1, "levels": [{"name": "rank", "alpha_ns": 1, "bytes_per_ns": 1}]})", "on one host"},
      {R"({"moeccl_profile": 1, "machine": {"host_level": 3}, "levels": [{"name": "rank", "alpha_ns": 1}]})",
       "host_level is 3"},
      {R"({"moeccl_profile": 1, "machine": {"host_level": 0}, "levels": [{"name": "host", "alpha_ns": 1}]})",
       "no latency and rate"},
      {R"({"moeccl_profile": 1, "surprise": 1})", "surprise"}};
  for (const auto& [text, why] : bad) {
    Log::clear();
    use_text(text);
    const TunerContext context(file(), {});
    EXPECT_EQ(context.init_result(), 0);
    EXPECT_EQ(lines_with("WARN"), 1) << text;
    EXPECT_EQ(lines_with(why), 1) << text << ": " << (Log::lines().empty() ? "" : Log::lines()[0]);
    CostTable table = nccl_costs(kSlowCard, 2, kAllReduce, 16 << 10);
    const CostTable before = table;
    EXPECT_EQ(context.ask(kAllReduce, 16 << 10, table), 0);
    EXPECT_EQ(table, before);
  }
  use(fixture("gigabit"));
  setenv("MOECCL_TUNER_RAILS", "many", 1);
  const TunerContext context(file(), {});
  EXPECT_EQ(lines_with("MOECCL_TUNER_RAILS=many"), 1);
}

TEST_F(Tuner, NvlinkDomainsOfManyHostsAreNccls) {
  tuner::NvlDomains rack{1, 72, 72}, hosts{18, 4, 4}, none{72, 1, 1};
  const auto changes = [&](tuner::NvlDomains* domains) {
    const TunerContext context(file(), {.n_ranks = 72, .n_nodes = 18, .domains = domains});
    CostTable table = nccl_costs(kSlowCard, 18, kAllReduce, 16 << 10);
    const CostTable before = table;
    EXPECT_EQ(context.ask(kAllReduce, 16 << 10, table), 0);
    return table != before;
  };
  EXPECT_FALSE(changes(&rack));
  EXPECT_EQ(lines_with("reach beyond a host"), 1);
  (void)changes(&hosts);
  (void)changes(&none);
}

// NCCL's own constants, where it passes them, replace those that the tuner knows.
TEST_F(Tuner, NcclsConstantsCount) {
  tuner::Constants given = {};
  given.base[kRing][kSimple] = 1e6;
  const auto ring_us = [&](tuner::Constants* constants) {
    const TunerContext context(file(), {.version = 5, .n_ranks = 8, .n_nodes = 4, .constants = constants});
    CostTable table = {};
    for (auto& row : table) row.fill(-1);
    table[kRing][kSimple] = 1000;
    table[kTree][kSimple] = 2000;
    table[kTree][kLL] = 500;
    EXPECT_EQ(context.ask(kAllReduce, 1 << 20, table), 0);
    return table[kRing][kSimple];
  };
  EXPECT_GT(ring_us(&given), 1e6F);
  EXPECT_LT(ring_us(nullptr), 1e6F);
}

TEST_F(Tuner, ManyCommunicatorsInManyThreads) {
  constexpr int kThreads = 8;
  std::vector<CostTable> answers(kThreads);
  std::vector<std::thread> threads;
  const TunerContext shared(file(), {.n_ranks = 128, .n_nodes = 64});
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        const TunerContext own(file(), {.version = 3 + i % 5, .n_ranks = 128, .n_nodes = 64, .log = nullptr});
        CostTable table = nccl_costs(kSlowCard, 64, kAllReduce, 16 << 10), again = table;
        if (own.ask(kAllReduce, 16 << 10, table) != 0 || shared.ask(kAllReduce, 16 << 10, again) != 0) return;
        if (table != again) return;
        answers[static_cast<size_t>(t)] = table;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (const CostTable& answer : answers) EXPECT_EQ(answer, answers[0]);
  EXPECT_GT(answers[0][kTree][kSimple], 0);
  EXPECT_EQ(lines_with("in place of"), 1) << "the shared one said it once";
}

}  // namespace
}  // namespace moeccl::testing
