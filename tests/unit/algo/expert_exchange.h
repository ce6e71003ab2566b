// SPDX-License-Identifier: Apache-2.0
// Properties of every exchange of experts inside their domains, in both directions. A test file names its builder:
//   INSTANTIATE_TYPED_TEST_SUITE_P(Gather, ExpertExchangeTest, algo::ExpertGather);
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "src/algo/experts/prove_experts.h"
#include "src/plan/checker.h"
#include "tests/support/moe_cluster.h"
#include "tests/support/mutate.h"
#include "tests/support/replicas.h"

namespace moeccl::algo::testing {

template <class Exchange>
class ExpertExchangeTest : public ::testing::Test {
 protected:
  static Status check(const plan::Plan& plan, const Exchange& exchange) {
    const std::vector<plan::Binding> bindings = plan::uniform_bindings(plan);
    const plan::BlockExpectation expected = expected_exchange(exchange);
    plan::CheckInput input{plan, bindings};
    input.blocks = &expected;
    return plan::check(input);
  }
  static Status prove(const Exchange& exchange) { return check(exchange.build_all(), exchange); }

  static Placement random_homes(uint32_t n_ranks, test::Random& random) {
    std::vector<int32_t> owner(1 + random() % (2 * n_ranks));
    for (int32_t& o : owner) o = static_cast<int32_t>(random() % n_ranks);
    return *Placement::make(static_cast<int64_t>(owner.size()), n_ranks, owner.data());
  }
  static Domains random_domains(const plan::LevelTree& tree, test::Random& random) {
    std::vector<uint32_t> sizes;
    for (uint32_t l = 0; l < tree.depth(); ++l) sizes.push_back(1 + random() % 5);
    return *Domains::make(tree, sizes);
  }
  // Returns staging for chunks of at most `elements`, where there is any.
  static uint64_t tight(const Domains& domains, const Placement& homes, ExpertExchange call, uint64_t elements) {
    call.staging_bytes = uint64_t{1} << 40;
    const plan::Program program = Exchange::make(domains, homes, call)->build(0);
    return std::max<uint64_t>(64, uint64_t{program.n_slots} * program.depth * elements * call.element_bytes);
  }
  // Four ranks on two nodes share all experts, in more chunks than there are rotations.
  struct Small {
    Domains domains = *Domains::make(test::tree_of({{"node", {}, {2, 2}}}), {2, 2});
    Placement homes = *Placement::make(5, 4, nullptr);
    ExpertExchange call{11, 64, {.staging = false}, 0};
    explicit Small(bool views) {
      call.reach.staging = call.reach.views = views;
      call.way = views ? ExpertExchange::Way::kDirect : ExpertExchange::Way::kStaged;
      call.staging_bytes = tight(domains, homes, call, 3);
    }
  };
};

TYPED_TEST_SUITE_P(ExpertExchangeTest);

TYPED_TEST_P(ExpertExchangeTest, ProvedForRandomPlacementsAndDomainsOnEveryTree) {
  test::Random random(31);
  for (const test::NamedTree& t : test::moe_trees()) {
    for (int round = 0; round < 8; ++round) {
      const Domains domains = this->random_domains(t.tree, random);
      const Placement homes = this->random_homes(t.tree.n_ranks, random);
      for (const auto way : {ExpertExchange::Way::kStaged, ExpertExchange::Way::kDirect}) {
        const bool views = way == ExpertExchange::Way::kDirect;
        ExpertExchange call{round == 0 ? 0 : random() % 9, 64, {.staging = views, .views = views}, 0};
        call.way = way;
        call.deterministic = round % 2 == 0 && !views;
        if (round % 3 == 2) call.round_trip_bytes.assign(t.tree.depth(), 1e9);  // a long line: more rotations
        call.staging_bytes = this->tight(domains, homes, call, 1 + random() % 2);
        const auto made = TypeParam::make(domains, homes, call);
        ASSERT_TRUE(made.ok()) << made.status().message();
        const Status status = this->prove(*made);
        ASSERT_TRUE(status.ok()) << status.message() << "; " << t.name << ", " << made->name() << ", round " << round;
      }
    }
  }
}

TYPED_TEST_P(ExpertExchangeTest, ProvedForEveryCountOfRanks) {
  test::Random random(32);
  for (uint32_t n = 1; n <= 16; ++n) {
    const plan::LevelTree tree =
        n == 1 ? plan::LevelTree::flat(1) : test::tree_of({{"node", {}, {(n + 1) / 2, n / 2}}});
    const Domains domains = this->random_domains(tree, random);
    const Placement homes = *Placement::make(2 * n + 1, n, nullptr);
    const auto made = TypeParam::make(domains, homes, {5, 64, {.staging = false}, 1 << 20});
    ASSERT_TRUE(made.ok()) << made.status().message();
    const Status status = this->prove(*made);
    ASSERT_TRUE(status.ok()) << status.message() << "; " << n << " ranks";
  }
}

// The proof notices any missing signal, wait or move, so plans contain no unnecessary steps.
TYPED_TEST_P(ExpertExchangeTest, LosesItsProofWithoutAnyOneStep) {
  for (const bool views : {false, true}) {
    const typename TestFixture::Small small(views);
    const auto made = TypeParam::make(small.domains, small.homes, small.call);
    ASSERT_TRUE(made.ok()) << made.status().message();
    const plan::Plan whole = made->build_all();
    if (!views) {
      ASSERT_GT(whole.chunking.n_chunks, whole.programs[0].depth);
    }
    test::without_each_step(whole, [&](const plan::Plan& broken, const std::string& step) {
      EXPECT_FALSE(this->check(broken, *made).ok()) << made->name() << ", without " << step;
    });
  }
}

// It notices any other change, too, except for changes after which the same values still flow.
TYPED_TEST_P(ExpertExchangeTest, RefusesRandomMutations) {
  for (const bool views : {false, true}) {
    const typename TestFixture::Small small(views);
    const auto made = TypeParam::make(small.domains, small.homes, small.call);
    ASSERT_TRUE(made.ok()) << made.status().message();
    const plan::Plan whole = made->build_all();
    uint32_t n_refused = 0, seed = 7;
    for (int kind = 0; kind < test::kNumMutationKinds; ++kind) {
      const auto which = static_cast<test::MutationKind>(kind);
      const bool moves_order = which == test::MutationKind::kSwap || which == test::MutationKind::kLag;
      test::Mutator mutator(whole, ++seed);
      for (int drawn = 0; drawn < 40; ++drawn) {
        const auto mutation = mutator.draw(which);
        if (!mutation) continue;
        const Status status = this->check(mutation->plan, *made);
        n_refused += !status.ok();
        EXPECT_TRUE(!status.ok() || moves_order) << made->name() << ": " << mutation->what;
        if (!status.ok()) {
          EXPECT_NE(status.message().find("rank"), std::string::npos) << status.message();
        }
      }
    }
    EXPECT_GT(n_refused, 50u) << made->name();
  }
}

TYPED_TEST_P(ExpertExchangeTest, TooLittleStagingIsRefused) {
  const Domains domains = *Domains::make(plan::LevelTree::flat(8), {8});
  const Placement homes = *Placement::make(8, 8, nullptr);
  const auto made = TypeParam::make(domains, homes, {1 << 20, 1, {.staging = false}, 512});
  ASSERT_FALSE(made.ok());
  EXPECT_NE(made.status().message().find("staging"), std::string::npos) << made.status().message();
}

REGISTER_TYPED_TEST_SUITE_P(ExpertExchangeTest, ProvedForRandomPlacementsAndDomainsOnEveryTree,
                            ProvedForEveryCountOfRanks, LosesItsProofWithoutAnyOneStep, RefusesRandomMutations,
                            TooLittleStagingIsRefused);

}  // namespace moeccl::algo::testing
