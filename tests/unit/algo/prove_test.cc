// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "src/algo/builder.h"
#include "tests/unit/algo/shapes.h"

namespace moeccl::algo::testing {
namespace {

// Proofs as moecclPlanProve and MOECCL_CHECK_PLANS make them: for the shape of a call, whatever its size.
TEST(Prove, AcceptsEveryAlgorithmForSmallAndLargeCalls) {
  for (const Algorithm& a : algorithms()) {
    for (const uint64_t count : {1ull, 1000ull, 10000000ull}) {
      for (const uint32_t n : {1u, 2u, 6u}) {
        plan::Shape shape = shape_of(a.op, n, count);
        shape.element_bytes = 4;
        for (const auto& [name, reach] : kReaches) {
          shape.reach = reach;
          const plan::LevelTree tree = n == 6 ? nodes({2, 4}) : plan::LevelTree::flat(n);
          if (!a.applies(shape, tree).ok()) continue;
          const Status proved = prove(a, shape, tree);
          EXPECT_TRUE(proved.ok()) << describe(a, shape) << ", reach " << name << ": " << proved.message();
        }
      }
    }
  }
}

TEST(Prove, NamesWhatIsWrong) {
  Algorithm broken = *find(moecclOpAllGather, "flat");
  broken.steps = [](ProgramBuilder& b, const plan::Shape&, const plan::LevelTree&, uint32_t rank) {
    b.copy(out(rank, rank), in(rank));
  };
  const Status proved = prove(broken, shape_of(moecclOpAllGather, 3, 100), plan::LevelTree::flat(3));
  EXPECT_EQ(proved.code(), moecclInternalError);
  EXPECT_NE(proved.message().find("rank 0"), std::string::npos) << proved.message();
}

}  // namespace
}  // namespace moeccl::algo::testing
