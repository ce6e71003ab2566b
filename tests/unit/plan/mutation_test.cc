// SPDX-License-Identifier: Apache-2.0
// Damages the plans of all algorithms, one change at a time. The checker must refuse each, except for changes after
// which the same values still flow: another order of independent steps (swaps, lags), or reading another rank's copy of
// the same value, where reach allows it. Such a plan must then work in any interleaving, on numbers.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "src/algo/algorithm.h"
#include "src/plan/checker.h"
#include "tests/support/block_machine.h"
#include "tests/support/mutate.h"

namespace moeccl::plan {
namespace {

std::vector<Plan> plans_of(const algo::Algorithm& a, uint32_t n) {
  std::vector<Plan> plans;
  Result<LevelTree> nodes = LevelTree::from_sizes({{"node", {}, {n / 2, n - n / 2}}});
  for (const LevelTree& tree : {LevelTree::flat(n), nodes.ok() ? *nodes : LevelTree::flat(n)}) {
    for (const Reach reach :
         {Reach{true, true, true}, Reach{true, false, true}, Reach{true, false, false}, Reach{false, false, false}}) {
      Shape shape;
      shape.op = a.op;
      shape.n_ranks = n;
      shape.root = n - 1;
      shape.element_bytes = 64;
      shape.reach = reach;
      const uint64_t chunk = 2 * n + 1;
      shape.count = 3 * chunk;
      if (!a.applies(shape, tree).ok()) continue;
      Plan plan = algo::build_all(a, shape, tree);
      plan.chunking = {chunk, 3};
      if (!check(plan).ok()) {  // algorithms that only run one chunk
        plan.shape.count = chunk;
        plan.chunking = {chunk, 1};
      }
      EXPECT_TRUE(check(plan).ok()) << a.name << ": " << check(plan).message();
      plans.push_back(std::move(plan));
    }
  }
  return plans;
}

bool may_be_equivalent(const test::Mutation& m) {
  if (m.kind == test::MutationKind::kPeer)
    return m.plan.shape.reach.staging && m.what.starts_with("other rank's memory");
  return m.kind == test::MutationKind::kSwap || m.kind == test::MutationKind::kLag;
}

class Mutations : public ::testing::TestWithParam<const algo::Algorithm*> {};

TEST_P(Mutations, AreRefusedUnlessTheyOnlyMoveTheOrder) {
  const algo::Algorithm& a = *GetParam();
  uint32_t n_refused = 0, n_accepted = 0, seed = 1;
  for (const uint32_t n : {2u, 3u, 4u, 6u}) {
    for (const Plan& plan : plans_of(a, n)) {
      for (int kind = 0; kind < test::kNumMutationKinds; ++kind) {
        test::Mutator mutator(plan, ++seed);
        for (int drawn = 0; drawn < 12; ++drawn) {
          const auto mutation = mutator.draw(static_cast<test::MutationKind>(kind));
          if (!mutation) continue;
          const Status status = check(mutation->plan);
          if (!status.ok()) {
            ++n_refused;
            EXPECT_NE(status.message().find("rank"), std::string::npos) << status.message();
            continue;
          }
          ++n_accepted;
          EXPECT_TRUE(may_be_equivalent(*mutation))
              << a.name << " of op " << a.op << ", " << n << " ranks: " << mutation->what;
          for (uint32_t run = 0; run < 20; ++run) {
            const std::string verdict = test::BlockMachine(mutation->plan, 1000 + run).run();
            EXPECT_EQ(verdict, "") << a.name << " of op " << a.op << ", " << n << " ranks: " << mutation->what;
          }
        }
      }
    }
  }
  RecordProperty("refused", static_cast<int>(n_refused));
  RecordProperty("only_order", static_cast<int>(n_accepted));
  EXPECT_GT(n_refused, 100u);
}

// Tests the judge itself: it accepts the plans, and finds most damage.
TEST_P(Mutations, MachineAgreesThatPlansAreRight) {
  for (const uint32_t n : {2u, 5u})
    for (const Plan& plan : plans_of(*GetParam(), n))
      for (uint32_t seed = 0; seed < 20; ++seed) EXPECT_EQ(test::BlockMachine(plan, seed).run(), "");
}

std::vector<const algo::Algorithm*> all() {
  std::vector<const algo::Algorithm*> list;
  for (const algo::Algorithm& a : algo::algorithms()) list.push_back(&a);
  return list;
}

INSTANTIATE_TEST_SUITE_P(All, Mutations, ::testing::ValuesIn(all()), [](const auto& info) {
  return "Op" + std::to_string(info.param->op) + "_" + info.param->name;
});

}  // namespace
}  // namespace moeccl::plan
