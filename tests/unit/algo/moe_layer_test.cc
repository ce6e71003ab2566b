// SPDX-License-Identifier: Apache-2.0
#include "src/moe/moe_layer.h"

#include <atomic>
#include <cmath>
#include <functional>
#include <numeric>

#include "src/moe/moe_replace.h"
#include "src/world/config.h"
#include "tests/support/moe_cluster.h"
#include "tests/support/moe_threads.h"

namespace moeccl {
namespace {

using comm::MoeHost;
using comm::MoeLayer;
using comm::MoeRouting;
using comm::MoeSlots;
using test::HostTraits;
using test::Random;

constexpr size_t kWidth = 4;  // floats a row

moecclMoeConfig_t config_of(int32_t top_k, int32_t n_experts, size_t max_tokens, moecclMoeLayout_t layout) {
  moecclMoeConfig_t c = MOECCL_MOE_CONFIG_INIT;
  c.hidden_bytes = kWidth * sizeof(float);
  c.type = moecclFloat32;
  c.top_k = top_k;
  c.n_experts = n_experts;
  c.max_tokens = max_tokens;
  c.layout = layout;
  return c;
}

// Top-k of one rank, as a function of (rank, step), so that every rank knows all choices.
struct Choices {
  std::vector<int32_t> index;
  std::vector<float> weight;
  uint64_t n_tokens;
  Choices(const moecclMoeConfig_t& c, uint32_t rank, uint32_t step) {
    Random random(1000 * step + rank);
    const auto k = static_cast<uint32_t>(c.top_k), n = static_cast<uint32_t>(c.n_experts);
    n_tokens = (rank + step) % 4 == 3 ? 0 : random() % (c.max_tokens + 1);
    std::vector<int32_t> all(n);
    std::iota(all.begin(), all.end(), 0);
    for (uint64_t t = 0; t < n_tokens; ++t)
      for (uint32_t i = 0; i < k; ++i) {
        std::swap(all[i], all[i + random() % (n - i)]);
        index.push_back(random() % 8 == 0 ? -1 : all[i]);
        weight.push_back(0.25f * static_cast<float>(1 + random() % 7));
      }
  }
};

float token_value(uint32_t rank, uint64_t token, size_t column) {
  return static_cast<float>(rank * 1000 + token) + 0.125f * static_cast<float>(column);
}
std::vector<float> tokens_of(uint32_t rank, uint64_t n) {
  std::vector<float> rows;
  for (uint64_t t = 0; t < n; ++t)
    for (size_t j = 0; j < kWidth; ++j) rows.push_back(token_value(rank, t, j));
  return rows;
}
// Returns the result of "expert e" for a token.
float expert_value(int32_t expert, float in) { return in * static_cast<float>(expert + 1) * 0.0625f; }

// Runs one step on one rank, forward and backward, and compares with each token's result by definition.
void check_step(MoeHost& host, MoeRouting& routing, const moecclMoeConfig_t& c, uint32_t step) {
  const Choices mine(c, host.rank(), step);
  const bool expert_major = c.layout == moecclLayoutExpertMajor;
  const Status updated = routing.update(mine.index.data(), mine.weight.data(), mine.n_tokens);
  ASSERT_TRUE(updated.ok()) << updated.message();
  moecclRoutingInfo_t info{};
  info.size = sizeof(info);
  ASSERT_TRUE(routing.info(&info).ok());
  const std::vector<float> in = tokens_of(host.rank(), mine.n_tokens);
  std::vector<float> rows(info.n_rows * kWidth, -1.0f);
  ASSERT_TRUE(routing.dispatch(in.data(), rows.data(), nullptr).ok());
  // Runs the experts and, for Rows, applies the caller's weights.
  std::vector<float> results(rows.size(), 0.0f);
  for (uint64_t r = 0; r < info.n_rows; ++r) {
    for (size_t j = 0; j < kWidth; ++j) {
      const float x = rows[r * kWidth + j];
      if (info.row_source[r] < 0) {
        ASSERT_EQ(x, 0.0f) << "padding";
        continue;
      }
      ASSERT_EQ(x, token_value(static_cast<uint32_t>(info.row_source[r]), static_cast<uint64_t>(info.row_token[r]), j));
      if (expert_major) {
        int32_t e = 0;
        while (info.expert_offsets[e + 1] <= static_cast<int64_t>(r)) ++e;
        results[r * kWidth + j] = expert_value(info.local_experts[e], x);
      } else {
        for (int64_t i = info.choice_offsets[r]; i < info.choice_offsets[r + 1]; ++i)
          results[r * kWidth + j] += info.choice_weight[i] * expert_value(info.local_experts[info.choice_expert[i]], x);
      }
    }
  }
  const auto k = static_cast<size_t>(c.top_k);
  std::vector<float> out(in.size(), -1.0f), grad(in.size(), -1.0f), grad_rows(rows.size(), -1.0f);
  std::vector<float> grad_weight(mine.n_tokens * k, -1.0f);
  ASSERT_TRUE(routing.combine(results.data(), out.data(), nullptr).ok());
  ASSERT_TRUE(routing.dispatch_backward(rows.data(), grad.data(), nullptr).ok());
  // grad_out of combine := in.
  // A rank without tokens passes any pointer to show that it takes part.
  float nothing = 0;
  float* const wanted = !expert_major ? nullptr : grad_weight.empty() ? &nothing : grad_weight.data();
  ASSERT_TRUE(
      routing.combine_backward({in.data(), grad_rows.data(), expert_major ? results.data() : nullptr, wanted}, nullptr)
          .ok());
  for (uint64_t t = 0; t < mine.n_tokens; ++t) {
    std::vector<uint32_t> ranks;
    size_t n_rows = 0;
    for (size_t i = 0; i < k; ++i) {
      const int32_t e = mine.index[t * k + i];
      double dot = 0;
      for (size_t j = 0; j < kWidth && e >= 0; ++j)
        dot += static_cast<double>(in[t * kWidth + j]) * static_cast<double>(expert_value(e, in[t * kWidth + j]));
      if (expert_major) {
        ASSERT_NEAR(grad_weight[t * k + i], dot, 1e-3 * (1 + dot)) << "token " << t;
      }
      if (e < 0) continue;
      const uint32_t owner = routing.layer().config().placement.owner[static_cast<size_t>(e)];
      if (expert_major || std::find(ranks.begin(), ranks.end(), owner) == ranks.end()) ++n_rows;
      ranks.push_back(owner);
    }
    for (size_t j = 0; j < kWidth; ++j) {
      const float x = in[t * kWidth + j];
      double sum = 0;
      for (size_t i = 0; i < k; ++i)
        if (mine.index[t * k + i] >= 0)
          sum +=
              static_cast<double>(mine.weight[t * k + i]) * static_cast<double>(expert_value(mine.index[t * k + i], x));
      ASSERT_NEAR(out[t * kWidth + j], sum, 1e-4 * (1 + sum)) << "token " << t;
      ASSERT_NEAR(grad[t * kWidth + j], static_cast<double>(n_rows) * static_cast<double>(x), 1e-2) << "token " << t;
    }
  }
  for (uint64_t r = 0; r < info.n_rows; ++r)
    for (size_t j = 0; j < kWidth; ++j) {
      const float w = info.row_source[r] < 0 ? 0.0f : expert_major ? info.choice_weight[r] : 1.0f;
      ASSERT_EQ(grad_rows[r * kWidth + j], w * rows[r * kWidth + j]);
    }
}

TEST(MoeLayerTest, ForwardAndBackwardOnEveryTreeAndAlgorithm) {
  for (const test::NamedTree& t : test::moe_trees()) {
    std::vector<std::string> names{"auto", "flat:ordered"};
    for (const algo::MoeAlgorithm& a : algo::moe_candidates(t.tree)) names.push_back(a.name());
    for (const std::string& name : names) {
      for (const moecclMoeLayout_t layout : {moecclLayoutRows, moecclLayoutExpertMajor}) {
        SCOPED_TRACE(format("{} ranks {} {}", t.name, t.tree.n_ranks, name));
        // Small staging gives several chunks.
        const HostTraits traits{t.tree, name.size() % 2 == 0, 64u << 10};
        test::on_all_ranks(traits, [&](MoeHost& host) {
          moecclMoeConfig_t c = config_of(3, 11, 40, layout);
          c.algorithm = name.c_str();
          if (layout == moecclLayoutExpertMajor) c.align_rows = 3;
          auto layer = MoeLayer::create(host, &c);
          ASSERT_TRUE(layer.ok()) << layer.status().message();
          MoeRouting routing(**layer);
          for (uint32_t step = 0; step < 3; ++step) check_step(host, routing, c, step);
          const auto page = routing.explain();
          ASSERT_TRUE(page.ok());
          EXPECT_NE(page->find("candidates"), std::string::npos);
        });
        if (HasFailure()) return;
      }
    }
  }
}

// Runs `body` on three ranks with an expert each.
void on_three_ranks(const std::function<void(MoeHost&, MoeRouting&)>& body) {
  const HostTraits traits{plan::LevelTree::flat(3), false, 1u << 20};
  test::on_all_ranks(traits, [&](MoeHost& host) {
    const moecclMoeConfig_t c = config_of(1, 3, 4, moecclLayoutRows);
    auto layer = MoeLayer::create(host, &c);
    ASSERT_TRUE(layer.ok());
    MoeRouting routing(**layer);
    body(host, routing);
  });
}

TEST(MoeLayerTest, AMistakeOnOneRankIsAnErrorOnAll) {
  on_three_ranks([](MoeHost& host, MoeRouting& routing) {
    const int32_t good[] = {0, 1}, bad[] = {0, 3};
    const Status status = routing.update(host.rank() == 1 ? bad : good, nullptr, 2);
    EXPECT_EQ(status.code(), host.rank() == 1 ? moecclInvalidArgument : moecclRemoteError);
    EXPECT_NE(status.message().find(host.rank() == 1 ? "topk_index[1][0] is 3" : "rank 1"), std::string::npos)
        << status.message();
    float row[kWidth];
    EXPECT_EQ(routing.combine(row, row, nullptr).code(), moecclInvalidUsage);
    EXPECT_TRUE(routing.update(good, nullptr, 2).ok());
    // One rank passes weights and another none. Rank 2 has no tokens and is not asked.
    const float weights[] = {1, 1};
    const Status mixed = routing.update(good, host.rank() == 1 ? weights : nullptr, host.rank() == 2 ? 0 : 2);
    EXPECT_EQ(mixed.code(), moecclMismatch) << mixed.message();
    EXPECT_EQ(routing.update(good, nullptr, host.rank() == 0 ? 5 : 2).code(),
              host.rank() == 0 ? moecclInvalidArgument : moecclRemoteError);
  });
}

// As when a rank's choices are CUDA memory that cannot be copied.
TEST(MoeLayerTest, ARankThatCannotReadItsChoicesTellsTheOthers) {
  on_three_ranks([](MoeHost& host, MoeRouting& routing) {
    const int32_t index[] = {0, 1};
    ASSERT_TRUE(routing.update(index, nullptr, 2).ok());
    const Status refusal = host.rank() == 1 ? error(moecclSystemError, "unreadable") : Status();
    EXPECT_EQ(routing.update(index, nullptr, 2, refusal).code(),
              host.rank() == 1 ? moecclSystemError : moecclRemoteError);
    moecclRoutingInfo_t info{};
    info.size = sizeof(info);
    EXPECT_EQ(routing.info(&info).code(), moecclInvalidUsage) << "the routing is empty";
  });
}

TEST(MoeLayerTest, DifferentConfigsNameTheRanks) {
  const HostTraits traits{plan::LevelTree::flat(3), false, 1u << 20};
  test::on_all_ranks(traits, [&](MoeHost& host) {
    moecclMoeConfig_t c = config_of(1, 3, 4, moecclLayoutRows);
    if (host.rank() == 2) c.max_tokens = 5;
    const auto layer = MoeLayer::create(host, &c);
    EXPECT_EQ(layer.status().code(), moecclMismatch);
    for (const char* part : {"rank 2", "rank 0", "max_tokens", "5"})
      EXPECT_NE(layer.status().message().find(part), std::string::npos) << layer.status().message();
    moecclMoeConfig_t bad = config_of(0, 3, 4, moecclLayoutRows);
    const auto refused = MoeLayer::create(host, host.rank() == 1 ? &bad : &c);
    EXPECT_EQ(refused.status().code(), host.rank() == 1 ? moecclInvalidArgument : moecclRemoteError);
  });
}

TEST(MoeConfigTest, EveryLimitIsNamed) {
  const plan::LevelTree tree = plan::LevelTree::flat(4);
  const auto message = [&](auto change) {
    moecclMoeConfig_t c = config_of(2, 8, 16, moecclLayoutRows);
    change(c);
    const auto config = comm::MoeConfig::from(&c, tree, false);
    EXPECT_EQ(config.status().code(), moecclInvalidArgument);
    return config.status().message();
  };
  const auto names = [&](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  names(message([](auto& c) { c.size = 3; }), "config.size is 3");
  names(message([](auto& c) { c.hidden_bytes = 0; }), "hidden_bytes is 0");
  names(message([](auto& c) { c.top_k = 9; }), "top_k is 9");
  names(message([](auto& c) { c.n_experts = 70000; }), "n_experts is 70000");
  names(message([](auto& c) { c.max_tokens = 0; }), "max_tokens is 0");
  names(message([](auto& c) { c.align_rows = 4; }), "align_rows is 4");
  names(message([](auto& c) { c.capacity = -1; }), "capacity is -1");
  names(message([](auto& c) { c.algorithm = "hier:9"; }), "hier:9");
  names(message([](auto& c) { c.algorithm = "hier:9"; }), "or flat:ordered");
}

TEST(MoeConfigTest, SumsByChoiceRunFlatWithoutGroupsAndOnlyByName) {
  const plan::LevelTree tree = plan::LevelTree::flat(4);
  const auto config = [&](const char* algorithm) {
    moecclMoeConfig_t c = config_of(2, 8, 16, moecclLayoutRows);
    c.algorithm = algorithm;
    return comm::MoeConfig::from(&c, tree, true).value();
  };
  const comm::MoeConfig ordered = config("flat:ordered"), flat = config("flat");
  EXPECT_EQ(ordered.algorithms, flat.algorithms);
  EXPECT_TRUE(ordered.shape.by_choice && !ordered.shape.grouped);
  EXPECT_TRUE(!flat.shape.by_choice && flat.shape.grouped);
  EXPECT_FALSE(config("auto").shape.by_choice);
  EXPECT_NE(ordered.hash(), flat.hash()) << "ranks that differ would not notice";
}

TEST(MoeLayerTest, SamplesDoNotMoveOnALayerWithSumsByChoice) {
  const HostTraits traits{plan::LevelTree::flat(2), false, 1u << 20};
  test::on_all_ranks(traits, [&](MoeHost& host) {
    for (const char* algorithm : {"flat", "flat:ordered"}) {
      moecclMoeConfig_t c = config_of(2, 8, 16, moecclLayoutRows);
      c.algorithm = algorithm;
      const auto layer = MoeLayer::create(host, &c);
      ASSERT_TRUE(layer.ok()) << layer.status().message();
      moecclReplaceConfig_t samples = MOECCL_REPLACE_CONFIG_INIT;
      samples.sample_tokens = 4;
      const Status status = comm::MoeReplacement::create(**layer, &samples).status();
      if (std::string_view(algorithm) == "flat") {
        EXPECT_TRUE(status.ok()) << status.message();
        continue;
      }
      EXPECT_EQ(status.code(), moecclUnsupported);
      EXPECT_NE(status.message().find("flat:ordered"), std::string::npos) << status.message();
    }
  });
}

TEST(MoeConfigTest, DomainsOfAnotherNumberOfRanksAreRefused) {
  const moecclMoeConfig_t c = config_of(2, 8, 16, moecclLayoutRows);
  const auto domains =
      std::make_shared<const algo::Domains>(algo::Domains::make(plan::LevelTree::flat(2), {2}).value());
  for (const uint32_t n_ranks : {1u, 2u, 4u}) {
    const auto config = comm::MoeConfig::from(&c, plan::LevelTree::flat(n_ranks), false, domains);
    EXPECT_EQ(config.status().code(), n_ranks == 2 ? moecclSuccess : moecclInvalidArgument);
    if (config.ok()) continue;
    EXPECT_NE(config.status().message().find("domains are of 2 ranks"), std::string::npos) << config.status().message();
  }
}

TEST(MoeConfigTest, ABudgetThatIsTooSmallSaysWhatIsNeeded) {
  const plan::LevelTree tree = plan::LevelTree::flat(8);
  moecclMoeConfig_t c = config_of(2, 8, 16, moecclLayoutRows);
  c.hidden_bytes = 10000;
  const auto config = comm::MoeConfig::from(&c, tree, false);
  ASSERT_TRUE(config.ok());
  const auto small = comm::fitting(*config, tree, 100000);
  EXPECT_EQ(small.status().code(), moecclOutOfMemory);
  EXPECT_NE(small.status().message().find("140000 bytes of staging"), std::string::npos) << small.status().message();
  EXPECT_TRUE(comm::fitting(*config, tree, 140000).ok());
}

// DeepSeek-V3's rows on hosts of 8 ranks. Blocks of the hop inside a host hold rows of one rank of each host.
TEST(MoeConfigTest, HierarchyFitsTheDefaultStagingOfAnyNumberOfHosts) {
  for (const uint32_t hosts : {2u, 11u, 12u, 32u, 128u, 512u}) {
    const plan::LevelTree tree = test::tree_of({{"node", {}, std::vector<uint32_t>(hosts, 8)}});
    moecclMoeConfig_t c = config_of(8, static_cast<int32_t>(8 * hosts), 4096, moecclLayoutRows);
    c.hidden_bytes = 14336;
    c.algorithm = nullptr;
    const auto config = comm::MoeConfig::from(&c, tree, false);
    ASSERT_TRUE(config.ok()) << config.status().message();
    const auto fit = comm::fitting(*config, tree, comm::granted_staging(comm::Config::staging_on(0, {hosts, 8})));
    ASSERT_TRUE(fit.ok()) << fit.status().message();
    EXPECT_EQ(fit->left_out, "") << hosts << " hosts";
    if (hosts < 32) continue;
    const auto less = comm::fitting(*config, tree, comm::granted_staging(uint64_t{hosts} << 19));
    ASSERT_TRUE(less.ok()) << less.status().message();
    EXPECT_EQ(less->left_out.find("hier:2 needs staging_bytes (MOECCL_STAGING_BYTES) of "), 0u) << less->left_out;
  }
}

TEST(MoeLayerTest, MemoryStaysBelowTheQueriedSizeAndTheCap) {
  const HostTraits traits{test::tree_of({{"node", {}, {2, 2}}}), false, 1u << 20};
  for (const bool all_to_one : {false, true}) {
    for (const uint64_t cap : {uint64_t{0}, uint64_t{1} << 19}) {
      test::on_all_ranks(traits, [&](MoeHost& host) {
        moecclMoeConfig_t c = config_of(4, 16, 200, moecclLayoutExpertMajor);
        c.memory_cap_bytes = cap;
        const auto config = comm::MoeConfig::from(&c, host.tree(), false);
        const auto bound = comm::query_size(*config, host.tree(), host.staging_bytes());
        ASSERT_TRUE(bound.ok());
        auto layer = MoeLayer::create(host, &c);
        ASSERT_TRUE(layer.ok()) << layer.status().message();
        MoeRouting routing(**layer);
        Choices mine(c, 1 + host.rank() % 2, 4);
        if (all_to_one)
          for (size_t i = 0; i < mine.index.size(); ++i) mine.index[i] = static_cast<int32_t>(i % 4);
        const Status status = routing.update(mine.index.data(), mine.weight.data(), mine.n_tokens);
        if (!status.ok()) {
          EXPECT_GT(cap, 0u) << status.message();
          EXPECT_EQ(status.code(), moecclOutOfMemory) << status.message();
          return;
        }
        const MoeSlots& slots = (*layer)->candidates()[0]->slots;
        EXPECT_LE(
            routing.memory_bytes() + algo::moe_staging_bytes((*layer)->config().shape, slots.plan, slots.slot_rows),
            *bound);
      });
    }
  }
}

// Links between nodes have 1 GB/s and links inside are free, so duplicates across nodes must cost more than a second
// hop.
TEST(MoeLayerTest, AutoPrefersDedupWhereTheLinkIsSlow) {
  plan::LevelTree tree = test::tree_of({{"node", {1000, 1}, {4, 4}}});
  const HostTraits traits{tree, false, 8u << 20};
  test::on_all_ranks(traits, [&](MoeHost& host) {
    moecclMoeConfig_t c = config_of(8, 64, 200, moecclLayoutRows);
    c.hidden_bytes = 4096;
    auto layer = MoeLayer::create(host, &c);
    ASSERT_TRUE(layer.ok());
    MoeRouting routing(**layer);
    const Choices mine(c, host.rank(), 5);
    ASSERT_TRUE(routing.update(mine.index.data(), mine.weight.data(), mine.n_tokens).ok());
    moecclRoutingInfo_t info{};
    info.size = sizeof(info);
    ASSERT_TRUE(routing.info(&info).ok());
    EXPECT_STREQ(info.algorithm, "hier:2");
    EXPECT_GT(info.predicted_dispatch_us, 0);
    if (host.rank() == 0) {
      std::string page = *routing.explain();
      EXPECT_NE(page.find("* hier:2"), std::string::npos) << page;
    }
  });
  tree.levels[0].link = {};
  const HostTraits memory{tree, false, 8u << 20};
  test::on_all_ranks(memory, [&](MoeHost& host) {
    moecclMoeConfig_t c = config_of(8, 64, 200, moecclLayoutRows);
    auto layer = MoeLayer::create(host, &c);
    ASSERT_TRUE(layer.ok());
    MoeRouting routing(**layer);
    const Choices mine(c, host.rank(), 5);
    ASSERT_TRUE(routing.update(mine.index.data(), mine.weight.data(), mine.n_tokens).ok());
    moecclRoutingInfo_t info{};
    info.size = sizeof(info);
    ASSERT_TRUE(routing.info(&info).ok());
    EXPECT_STREQ(info.algorithm, "hier:1");
    EXPECT_EQ(info.predicted_dispatch_us, 0);
  });
}

}  // namespace
}  // namespace moeccl
