// SPDX-License-Identifier: Apache-2.0
// The checker proves every algorithm of every operation on 1 to 33 ranks, with several trees, roots, counts and numbers
// of chunks. A new algorithm is covered by its line in the registry.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "src/plan/checker.h"
#include "tests/unit/algo/shapes.h"

namespace moeccl::algo::testing {
namespace {

// The block length and how it is cut. With elements as large as lines, parts can be as small as one element.
struct Cut {
  uint64_t count, chunk;
  uint32_t n_chunks;
};

std::vector<Cut> cuts(const Algorithm& a, uint32_t n) {
  const uint64_t odd = n < 10 ? 2 * n + 1 : n + 3;  // parts of unequal lengths, the last ones short
  if (std::string(a.name) == "oneshot") return {{0, 1, 1}, {1, 1, 1}, {odd, odd, 1}};  // it always has one chunk
  if (n > 16) return {{odd, odd, 1}, {odd + 2, odd, 2}, {2 * odd + 1, odd, 3}};
  return {{0, 1, 1}, {1, 1, 1}, {odd, odd, 1}, {odd + 2, odd, 2}, {3 * odd, odd, 3}, {4 * odd + 1, odd, 5}};
}

std::vector<uint32_t> roots(moecclOp_t op, uint32_t n) {
  if (!has_root(op)) return {0};
  if (n <= 5) {
    std::vector<uint32_t> all;
    for (uint32_t root = 0; root < n; ++root) all.push_back(root);
    return all;
  }
  return n > 16 ? std::vector<uint32_t>{n - 2} : std::vector<uint32_t>{0, n / 2, n - 1};
}

// Only two-level algorithms use the tree; the others are the same on all trees.
std::vector<NamedTree> trees_for(const Algorithm& a, uint32_t n) {
  const std::string name = a.name;
  if (name == "2dh" || name == "hier" || a.op == moecclOpTensorAllToAll) return trees(n);
  return {{"flat", plan::LevelTree::flat(n)}};
}

// The weakest reach suffices for algorithms that do not depend on it; `direct` does.
std::vector<plan::Reach> reaches_for(const Algorithm& a) {
  if (std::string(a.name) == "direct") return {{true, false, true}, {true, true, true}};
  const plan::Reach puts_only{false, false, false}, staging{true, false, false};
  const bool puts = a.applies(
                         [&] {
                           plan::Shape shape = shape_of(a.op, 4, 1);
                           shape.reach = puts_only;
                           return shape;
                         }(),
                         nodes({2, 2}))
                        .ok();
  return {puts ? puts_only : staging};
}

class Proof : public ::testing::TestWithParam<const Algorithm*> {
 protected:
  void prove(const plan::Shape& shape, const NamedTree& tree) {
    const Algorithm& a = *GetParam();
    if (!a.applies(shape, tree.tree).ok()) return;
    for (const Cut& cut : cuts(a, shape.n_ranks)) {
      plan::Shape cut_shape = shape;
      cut_shape.count = cut.count;
      const plan::Plan plan = plan_of(a, cut_shape, tree.tree, cut.chunk, cut.n_chunks);
      const Status status = plan::check(plan);
      ++n_proofs_;
      ASSERT_TRUE(status.ok()) << describe(a, cut_shape) << ", tree " << tree.name << ", " << cut.n_chunks
                               << " chunks: " << status.message();
    }
  }
  uint32_t n_proofs_ = 0;
};

// Iterates over all numbers of ranks. Under a sanitizer, which costs ten times as much, it skips most large ones.
uint32_t next(uint32_t n) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return n < 9 ? n + 1 : n + 8;
#else
  return n + 1;
#endif
}

TEST_P(Proof, EveryRankEndsWithTheRightBytes) {
  const Algorithm& a = *GetParam();
  for (uint32_t n = 1; n <= 33; n = next(n)) {
    for (const plan::Reach& reach : reaches_for(a)) {
      for (const NamedTree& tree : trees_for(a, n)) {
        for (const uint32_t root : roots(a.op, n)) {
          plan::Shape shape = shape_of(a.op, n, 0);
          shape.root = root;
          shape.reach = reach;
          ASSERT_NO_FATAL_FAILURE(prove(shape, tree));
          if (a.op == moecclOpAllToAllv || a.op == moecclOpTensorAllToAll) continue;  // out of place only
          shape.in_place = true;
          ASSERT_NO_FATAL_FAILURE(prove(shape, tree));
        }
      }
    }
  }
  RecordProperty("proofs", static_cast<int>(n_proofs_));
  EXPECT_GT(n_proofs_, 0u);
}

// Algorithms that apply in deterministic mode sum each element once, over ranks in ascending order, and only its own
// rank reads a scaled input. The checker verifies both.
TEST_P(Proof, HoldsForDeterministicAndScaledShapes) {
  const Algorithm& a = *GetParam();
  for (const uint32_t n : {1u, 2u, 3u, 6u, 9u}) {
    for (const NamedTree& tree : trees_for(a, n)) {
      for (const plan::Reach& reach : reaches_for(a)) {
        for (const auto& [deterministic, scaled] : {std::pair{true, false}, {false, true}, {true, true}}) {
          plan::Shape shape = shape_of(a.op, n, 0);
          shape.root = n - 1;
          shape.reach = reach;
          shape.deterministic = deterministic;
          shape.scaled = scaled;
          ASSERT_NO_FATAL_FAILURE(prove(shape, tree));
        }
      }
    }
  }
}

// On a long line, plans that cross it by puts have more rotations and lanes.
TEST_P(Proof, HoldsOnLongLines) {
  const Algorithm& a = *GetParam();
  for (uint32_t n = 1; n <= 16; n = next(n)) {
    for (const NamedTree& tree : trees(n)) {
      for (const uint32_t root : roots(a.op, n)) {
        for (const bool in_place : {false, true}) {
          if (in_place && (a.op == moecclOpAllToAllv || a.op == moecclOpTensorAllToAll)) continue;
          plan::Shape shape = shape_of(a.op, n, 0);
          shape.root = root;
          shape.in_place = in_place;
          shape.reach = {false, false, false};
          shape.element_bytes = 8 << 20;  // a block of one element is longer than any usual chunk
          shape.staging_bytes = uint64_t{1} << 50;
          shape.long_line = {0, uint64_t{50} << 20};
          ASSERT_NO_FATAL_FAILURE(prove(shape, tree));
        }
      }
    }
  }
}

// Blocks of 0 elements, of one element, and of several chunks, at places with gaps between them.
class UnequalBlocks {
 public:
  UnequalBlocks(const plan::Plan& plan, uint64_t most) : n_(plan.shape.n_ranks), bindings_(uniform_bindings(plan)) {
    in_offset_.resize(n_ * n_), in_length_ = out_offset_ = out_length_ = in_offset_;
    for (uint32_t a = 0; a < n_; ++a) {
      uint64_t in = 0, out = 0;
      for (uint32_t b = 0; b < n_; ++b) {
        in_offset_[a * n_ + b] = in;
        out_offset_[a * n_ + b] = out;
        in += in_length_[a * n_ + b] = length(a, b, most);
        out += out_length_[a * n_ + b] = length(b, a, most);
        ++in, out += b % 2;
      }
      bindings_[a].in_offset = &in_offset_[a * n_];
      bindings_[a].in_length = &in_length_[a * n_];
      bindings_[a].out_offset = &out_offset_[a * n_];
      bindings_[a].out_length = &out_length_[a * n_];
    }
  }
  std::span<const plan::Binding> bindings() const { return bindings_; }

 private:
  static uint64_t length(uint32_t from, uint32_t to, uint64_t most) {
    return from == 1 ? 0 : (from * 7 + to * 5) % (most + 1);
  }
  uint32_t n_;
  std::vector<plan::Binding> bindings_;
  std::vector<uint64_t> in_offset_, in_length_, out_offset_, out_length_;
};

TEST(ProofOfAllToAllV, HoldsForUnequalBlocks) {
  for (const char* name : {"staged", "flat", "direct"}) {
    const Algorithm* a = find(moecclOpAllToAllv, name);
    ASSERT_NE(a, nullptr) << name;
    for (const uint32_t n : {1u, 2u, 3u, 5u, 8u, 17u}) {
      for (const uint32_t n_chunks : {1u, 2u, 4u}) {
        plan::Shape shape = shape_of(moecclOpAllToAllv, n, 4 * n_chunks);
        shape.reach = {true, true, true};
        const plan::Plan plan = plan_of(*a, shape, plan::LevelTree::flat(n), 4, n_chunks);
        const UnequalBlocks blocks(plan, 4 * n_chunks);
        const Status status = plan::check(plan::CheckInput{plan, blocks.bindings(), nullptr, nullptr});
        EXPECT_TRUE(status.ok()) << describe(*a, shape) << ", " << n_chunks << " chunks: " << status.message();
      }
    }
  }
}

// Each rank decides by itself whether it works in place, so programs of both kinds run together.
TEST(ProofOfAllToAll, HoldsWhenOnlySomeRanksWorkInPlace) {
  for (const Algorithm& a : algorithms()) {
    if (a.op != moecclOpAllToAll) continue;
    plan::Shape shape = shape_of(a.op, 6, 23);
    shape.reach = {true, true, true};
    const plan::LevelTree tree = nodes({2, 4});
    plan::Plan plan = plan_of(a, shape, tree, std::string(a.name) == "oneshot" ? 23 : 5, 5);
    if (std::string(a.name) == "oneshot") plan.chunking.n_chunks = 1;
    std::vector<bool> in_place(6);
    for (uint32_t rank = 0; rank < 6; rank += 2) {
      in_place[rank] = shape.in_place = true;
      plan.programs[rank] = a.build(shape, tree, rank);
    }
    const std::vector<plan::Binding> bindings = plan::uniform_bindings(plan);
    const Status status = plan::check(plan::CheckInput{plan, bindings, nullptr, &in_place});
    EXPECT_TRUE(status.ok()) << a.name << ": " << status.message();
  }
}

// Between hosts, with staging for less than a block: sending and receiving have separate lanes.
TEST(ProofOfAllToAll, HoldsForSeveralChunksBetweenHosts) {
  const Algorithm& flat = *find(moecclOpAllToAll, "flat");
  for (const uint32_t n : {2u, 3u, 5u, 8u, 12u}) {
    for (const NamedTree& tree : trees(n)) {
      for (const uint64_t count : {7u, 8u, 23u, 64u}) {
        for (const bool in_place : {false, true}) {
          plan::Shape shape = shape_of(moecclOpAllToAll, n, count);
          shape.reach = {false, false, false};
          shape.in_place = in_place;
          shape.staging_bytes = uint64_t{4} * n * 2 * 64;  // slots of two elements in four rotations
          const plan::Plan plan = build_all(flat, shape, tree.tree);
          EXPECT_EQ(plan.programs[0].depth, 4u);
          const Status status = plan::check(plan);
          ASSERT_TRUE(status.ok()) << describe(flat, shape) << ", tree " << tree.name << ": " << status.message();
        }
      }
    }
  }
}

std::string name_of(const ::testing::TestParamInfo<const Algorithm*>& info) {
  return operation_name(info.param->op) + "_" + info.param->name;
}

INSTANTIATE_TEST_SUITE_P(All, Proof, ::testing::ValuesIn(all_algorithms()), name_of);

}  // namespace
}  // namespace moeccl::algo::testing
