// The host executor on every algorithm of every operation, with real bytes, against what the C header promises.
#include "src/exec/execution.h"

#include <gtest/gtest.h>

#include <numeric>

#include "src/algo/algorithm.h"
#include "tests/support/fabrics.h"

namespace moeccl::exec {
namespace {

using tests::Fabrics;

int64_t input_value(uint32_t rank, uint64_t i) {
  return static_cast<int64_t>(rank + 1) * 1000003 + static_cast<int64_t>(i * 7);
}

// What element i of rank's output must be, for int64 sums.
int64_t expected(const plan::Shape& s, uint32_t rank, uint64_t i) {
  const uint64_t block = s.count == 0 ? 0 : i / s.count, at = s.count == 0 ? 0 : i % s.count;
  const auto sum = [&](uint64_t j) {
    int64_t total = 0;
    for (uint32_t r = 0; r < s.n_ranks; ++r) total += input_value(r, j);
    return total;
  };
  switch (s.op) {
    case moecclOpAllReduce:
    case moecclOpReduce:
      return sum(i);
    case moecclOpReduceScatter:
      return sum(rank * s.count + i);
    case moecclOpBroadcast:
      return input_value(s.root, i);
    case moecclOpScatter:
      return input_value(s.root, rank * s.count + i);
    case moecclOpTensorAllToAll:  // a flat tree is one group, whose ranks hold the same
      return input_value(0, i);
    case moecclOpAllGather:
    case moecclOpGather:
      return input_value(static_cast<uint32_t>(block), at);
    default:
      return input_value(static_cast<uint32_t>(block), rank * s.count + at);
  }
}

bool has_output(const plan::Shape& s, uint32_t rank) {
  return (s.op != moecclOpReduce && s.op != moecclOpGather) || rank == s.root;
}

void run_algorithm(Fabrics& fabrics, const algo::Algorithm& a, const plan::Shape& shape, const plan::LevelTree& tree) {
  const plan::Plan plan = algo::build_all(a, shape, tree);
  fabrics.run([&](uint32_t rank, Fabric& f) {
    std::vector<int64_t> in(plan::in_blocks(shape.op, shape.n_ranks) * shape.count);
    std::vector<int64_t> out(plan::out_blocks(shape.op, shape.n_ranks) * shape.count, -1);
    for (uint64_t i = 0; i < in.size(); ++i) in[i] = input_value(shape.op == moecclOpTensorAllToAll ? 0 : rank, i);
    Operation op;
    op.signature = {shape.op, moecclInt64, moecclSum, shape.root, shape.count, plan.hash};
    op.choice = {&plan.programs[rank], plan.chunking, a.name, plan.hash};
    op.binding.count = shape.count;
    op.input = in.data();
    op.output = out.data();
    op.element_bytes = 8;
    if (shape.op == moecclOpAllToAllv) {
      op.send_counts.assign(shape.n_ranks, shape.count);
      op.recv_counts = op.send_counts;
      for (uint32_t r = 0; r < shape.n_ranks; ++r) op.send_displs.push_back(r * shape.count);
      op.recv_displs = op.send_displs;
      op.signature.count = 0;
    }
    Execution e(f, op);
    Task* task = &e;
    const Status status = drive({&task, 1});
    ASSERT_TRUE(status.ok()) << status.message();
    if (!has_output(shape, rank)) return;
    for (uint64_t i = 0; i < out.size(); ++i) {
      ASSERT_EQ(out[i], expected(shape, rank, i)) << a.name << " of " << op_name(shape.op) << " n " << shape.n_ranks
                                                  << " count " << shape.count << " rank " << rank << " element " << i;
    }
  });
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
        run_algorithm(fabrics, a, shape, tree);
        if (HasFatalFailure()) return;
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
