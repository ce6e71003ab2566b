// SPDX-License-Identifier: Apache-2.0
#include "src/routing/domains.h"

#include <algorithm>

#include "moeccl/solve.h"
#include "src/solve/domains.h"
#include "tests/support/moe_cluster.h"

namespace moeccl {
namespace {

using algo::Domains;
using algo::MoeAlgorithm;
using algo::PathKind;
using algo::Placement;
using plan::LevelTree;
using test::NamedTree;
using test::Random;

std::vector<uint32_t> random_sizes(const LevelTree& tree, Random& random) {
  std::vector<uint32_t> sizes;
  for (uint32_t l = 0; l < tree.depth(); ++l) sizes.push_back(1 + random() % 5);
  return sizes;
}

// The two columns of Table VII: messages of all ranks in AllGather and AlltoAll.
struct Frequency {
  uint32_t gather = 0, tokens = 0;
};
Frequency frequency(uint32_t n, uint32_t size) {
  const LevelTree tree = LevelTree::flat(n);
  const Domains domains = *Domains::make(tree, {size});
  const Placement homes = *Placement::make(n, n, nullptr);
  const algo::Paths paths({PathKind::kHier, 1}, tree, homes, &domains);
  Frequency f{static_cast<uint32_t>(domains.sends().size()), 0};
  for (uint32_t a = 0; a < n; ++a)
    for (uint32_t b = 0; b < n; ++b) f.tokens += paths.edge(a, b);
  return f;
}

TEST(DomainsTest, MessagesAreThoseOfTableVII) {
  const struct {
    uint32_t n, size, tokens, gather;
  } rows[] = {{8, 1, 56, 0},    {8, 2, 24, 8},    {8, 4, 8, 24},    {8, 8, 0, 56},     {16, 1, 240, 0},
              {16, 2, 112, 16}, {16, 4, 48, 48},  {16, 8, 16, 112}, {16, 16, 0, 240},  {32, 1, 992, 0},
              {32, 2, 480, 32}, {32, 4, 224, 96}, {32, 8, 96, 224}, {32, 16, 32, 480}, {32, 32, 0, 992}};
  for (const auto& row : rows) {
    const Frequency f = frequency(row.n, row.size);
    EXPECT_EQ(f.tokens, row.tokens) << row.n << " ranks, domains of " << row.size;
    EXPECT_EQ(f.gather, row.gather) << row.n << " ranks, domains of " << row.size;
  }
}

// On even trees that the sizes divide, links are exactly those of Algorithm 1.
TEST(DomainsTest, LinksAreThoseOfAlgorithm1) {
  const LevelTree tree = test::tree_of({{"dc", {}, {2, 2, 2, 2}}, {"node", {}, {3, 3, 3, 3, 3, 3, 3, 3}}});
  const int32_t scale[] = {4, 2, 3};
  const double bandwidth[] = {1, 1, 1};
  moecclDomainProblem_t problem = MOECCL_DOMAIN_PROBLEM_INIT;
  problem.n_levels = 3;
  problem.scale = scale;
  problem.bandwidth = bandwidth;
  const Placement homes = *Placement::make(24, 24, nullptr);
  for (const std::vector<int32_t>& sizes :
       {std::vector<int32_t>{1, 1, 1}, {2, 1, 3}, {4, 2, 1}, {2, 2, 3}, {4, 2, 3}}) {
    const Domains domains = *Domains::make(tree, {sizes.begin(), sizes.end()});
    const algo::Paths paths({PathKind::kHier, 3}, tree, homes, &domains);
    std::vector<std::vector<bool>> gathers(24, std::vector<bool>(24, false));
    for (const Domains::Send& s : domains.sends()) gathers[s.from][s.to] = true;
    for (uint32_t a = 0; a < 24; ++a) {
      for (uint32_t b = 0; b < 24; ++b) {
        moecclDomainLink_t want = moecclLinkNone;
        for (int32_t l = 0; l < 3 && want == moecclLinkNone; ++l)
          want = *solve::link_at(*solve::checked(problem), sizes.data(), l, a, b);
        EXPECT_EQ(gathers[a][b], want == moecclLinkAllGather) << a << " to " << b;
        EXPECT_EQ(paths.edge(a, b), want == moecclLinkAllToAll) << a << " to " << b;
      }
    }
  }
}

TEST(DomainsTest, EveryExpertHasAHolderThatHoldsItAndAgreesWithThoseOnTheWay) {
  Random random(5);
  for (const NamedTree& t : test::moe_trees()) {
    const uint32_t n = t.tree.n_ranks, depth = t.tree.depth();
    const Placement homes = *Placement::make(n, n, nullptr);
    for (int round = 0; round < 6; ++round) {
      const Domains domains = *Domains::make(t.tree, random_sizes(t.tree, random));
      for (const MoeAlgorithm& a : algo::moe_candidates(t.tree)) {
        if (a.kind == PathKind::k2dh) continue;
        const algo::Paths paths(a, t.tree, homes, &domains);
        for (uint32_t rank = 0; rank < n; ++rank) {
          for (uint32_t home = 0; home < n; ++home) {
            const uint32_t holder = domains.holder(rank, home);
            const std::vector<uint32_t>& held = domains.held(holder, depth);
            ASSERT_EQ(std::count(held.begin(), held.end(), home), 1) << t.name << ", rank " << holder;
            for (uint32_t at = rank; at != holder; at = paths.next(at, holder)) {
              ASSERT_EQ(domains.holder(at, home), holder) << t.name << " from " << rank << " to " << home;
              ASSERT_TRUE(paths.edge(at, paths.next(at, holder)));
            }
            ASSERT_EQ(domains.holder(holder, home), holder);
          }
        }
        for (uint32_t rank = 0; rank < n; ++rank)
          for (const uint32_t home : domains.held(rank, depth)) ASSERT_EQ(domains.holder(rank, home), rank);
      }
    }
  }
}

TEST(DomainsTest, SizeOneIsPlainExpertParallelism) {
  for (const NamedTree& t : test::moe_trees()) {
    const Domains domains = *Domains::make(t.tree, std::vector<uint32_t>(t.tree.depth(), 1));
    EXPECT_TRUE(domains.plain());
    EXPECT_TRUE(domains.sends().empty());
    for (uint32_t r = 0; r < t.tree.n_ranks; ++r)
      for (uint32_t home = 0; home < t.tree.n_ranks; ++home) EXPECT_EQ(domains.holder(r, home), home);
  }
}

TEST(DomainsTest, WrongSizesAreRefused) {
  const LevelTree tree = LevelTree::flat(4);
  EXPECT_NE(Domains::make(tree, {1, 2}).status().message().find("2 sizes"), std::string::npos);
  EXPECT_NE(Domains::make(tree, {0}).status().message().find("domain[0]"), std::string::npos);
}

}  // namespace
}  // namespace moeccl
