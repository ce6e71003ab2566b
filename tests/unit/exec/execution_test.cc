// SPDX-License-Identifier: Apache-2.0
// The host executor on every algorithm of every operation, with real bytes, compared with what the C header promises.
#include "src/exec/execution.h"

#include <gtest/gtest.h>

#include "src/algo/algorithm.h"
#include "tests/support/fabrics.h"
#include "tests/support/run_algorithm.h"

namespace moeccl::exec {
namespace {

using tests::Fabrics;

void run_on_all(Fabrics& fabrics, const algo::Algorithm& a, const plan::Shape& shape, const plan::LevelTree& tree) {
  const plan::Plan plan = algo::build_all(a, shape, tree);
  fabrics.run([&](uint32_t, Fabric& f) { EXPECT_EQ(tests::run_algorithm(f, a, shape, plan), ""); });
}

TEST(Execution, EveryAlgorithmMovesTheRightBytes) {
  for (const uint32_t n : {1u, 2u, 3u, 4u, 7u}) {
    Fabrics fabrics(n);
    const plan::LevelTree tree = plan::LevelTree::flat(n);
    for (const algo::Algorithm& a : algo::algorithms()) {
      for (const uint64_t count : {0ull, 1ull, 5ull, 1000ull, 300'001ull}) {
        plan::Shape shape;
        shape.op = a.op;
        shape.n_ranks = n;
        shape.root = n / 2;
        shape.count = count;
        shape.element_bytes = 8;
        shape.reach = {true, true, true};
        shape.staging_bytes = 2 << 20;
        if (!a.applies(shape, tree).ok()) continue;
        run_on_all(fabrics, a, shape, tree);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(Execution, RanksThatCallDifferentOperationsAreNamed) {
  Fabrics fabrics(3);
  const plan::LevelTree tree = plan::LevelTree::flat(3);
  fabrics.run([&](uint32_t rank, Fabric& f) {
    plan::Shape shape;
    shape.n_ranks = 3;
    shape.count = rank == 2 ? 4100 : 4096;
    shape.element_bytes = 8;
    const algo::Algorithm* a = algo::find(moecclOpAllReduce, "oneshot");
    const plan::Plan plan = algo::build_for(*a, shape, tree, rank);
    std::vector<int64_t> data(shape.count);
    Operation op;
    op.signature = {moecclOpAllReduce, moecclInt64, moecclSum, 0, shape.count, plan.hash};
    op.choice = {&plan.programs[0], plan.chunking, a->name, plan.hash};
    op.binding.count = shape.count;
    op.input = data.data();
    op.output = data.data();
    op.element_bytes = 8;
    Execution e(f, op);
    Task* task = &e;
    const Status status = drive({&task, 1});
    EXPECT_EQ(status.code(), moecclMismatch) << status.message();
    EXPECT_NE(status.message().find("rank 2"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("4100"), std::string::npos) << status.message();
  });
}

}  // namespace
}  // namespace moeccl::exec
