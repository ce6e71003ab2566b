// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "src/algo/builder.h"
#include "src/algo/families.h"
#include "src/algo/tuning.h"
#include "src/base/hash.h"
#include "src/plan/op.h"

namespace moeccl::algo {
namespace {

std::vector<Algorithm> join_families() {
  std::vector<Algorithm> all;
#define MOECCL_JOIN_FAMILY(name) \
  for (const Algorithm& a : name##_algorithms()) all.push_back(a);
  MOECCL_ALGORITHM_FAMILIES(MOECCL_JOIN_FAMILY)
#undef MOECCL_JOIN_FAMILY
  std::stable_sort(all.begin(), all.end(), [](const Algorithm& a, const Algorithm& b) { return a.op < b.op; });
  return all;
}

plan::Plan plan_without_programs(const Algorithm& algorithm, const plan::Shape& shape, const plan::LevelTree& tree) {
  plan::Plan plan{algorithm.name, shape, algorithm.chunking(shape, tree), 0, {}};
  if (plan::facts(shape.op).in == plan::Blocks::kGroups) {
    plan.shape.group_of = tree.tensor_groups();
    plan.shape.most_in_blocks = plan.shape.most_out_blocks = tree.n_tensor_groups();
  }
  plan.hash = plan_hash(algorithm, shape, plan.chunking, tree);
  return plan;
}

// Returns the program of a single rank: its input is its result.
plan::Program solo(const plan::Shape& shape) {
  ProgramBuilder b(shape, 0, Layout{});
  const Ref own = in(0);
  if (plan::reduces(shape.op)) {
    b.reduce(out(0), {&own, 1}, true);
  } else {
    b.copy(out(0), own);
  }
  return std::move(b).finish();
}

}  // namespace

Status Algorithm::applies(const plan::Shape& shape, const plan::LevelTree& tree) const {
  if (needs & kNodes) MOECCL_TRY(needs_nodes(shape, tree));
  if (shape.n_ranks > 1) {
    if (needs & kStagingViews) MOECCL_TRY(needs_staging_views(shape));
    if (needs & kViews) MOECCL_TRY(needs_views(shape));
    if (needs & kReads) MOECCL_TRY(needs_reads(shape));
    if (needs & kUnscaled) MOECCL_TRY(needs_no_scaling(shape));
    if (needs & kAnyOrder) MOECCL_TRY(needs_any_order(shape, name));
  }
  const Layout slots = layout(shape, tree);
  return chunk_bytes == kWhole && slots.n_slots > 0 ? whole_fits(shape, slots) : chunks_fit(shape, slots);
}

plan::Chunking Algorithm::chunking(const plan::Shape& shape, const plan::LevelTree& tree) const {
  const uint64_t bytes = chunk_bytes_for != nullptr ? chunk_bytes_for(shape, tree) : chunk_bytes;
  if (bytes == kWhole) return whole(shape);
  const Layout slots = layout(shape, tree);
  return cut(shape, slots, shape.coarse && slots.n_slots == 0 ? bytes * tuning::kCoarse : bytes);
}

plan::Program Algorithm::build(const plan::Shape& shape, const plan::LevelTree& tree, uint32_t rank) const {
  if (shape.n_ranks == 1) return solo(shape);
  ProgramBuilder b(shape, rank, layout(shape, tree));
  steps(b, shape, tree, rank);
  return std::move(b).finish();
}

std::span<const Algorithm> algorithms() {
  static const auto* const all = new std::vector<Algorithm>(join_families());  // outlives threads that outlive main()
  return *all;
}

const Algorithm* find(moecclOp_t op, std::string_view name) {
  for (const Algorithm& algorithm : algorithms())
    if (algorithm.op == op && algorithm.name == name) return &algorithm;
  return nullptr;
}

std::string names_of(moecclOp_t op, const char* separator) {
  std::string names;
  for (const char c : std::string_view(plan::facts(op).algorithms)) names += c == ',' ? separator : std::string(1, c);
  for (const Algorithm& a : algorithms())
    if (a.op == op) names += (names.empty() ? "" : separator) + std::string(a.name);
  return names;
}

plan::Plan build_all(const Algorithm& algorithm, const plan::Shape& shape, const plan::LevelTree& tree) {
  plan::Plan plan = plan_without_programs(algorithm, shape, tree);
  for (uint32_t rank = 0; rank < shape.n_ranks; ++rank) plan.programs.push_back(algorithm.build(shape, tree, rank));
  return plan;
}

plan::Plan build_for(const Algorithm& algorithm, const plan::Shape& shape, const plan::LevelTree& tree, uint32_t rank) {
  plan::Plan plan = plan_without_programs(algorithm, shape, tree);
  plan.programs.push_back(algorithm.build(shape, tree, rank));
  return plan;
}

uint64_t plan_hash(const Algorithm& algorithm, const plan::Shape& shape, const plan::Chunking& chunking,
                   const plan::LevelTree& tree) {
  uint64_t hash = hash_string(algorithm.name);
  // in_place is left out, because it is private to a rank.
  for (const uint64_t word :
       {static_cast<uint64_t>(shape.op), uint64_t{shape.n_ranks}, uint64_t{shape.root}, shape.count,
        uint64_t{shape.element_bytes}, uint64_t{shape.deterministic}, uint64_t{shape.scaled},
        uint64_t{shape.reach.staging}, uint64_t{shape.reach.views}, uint64_t{shape.reach.reads}, shape.staging_bytes,
        shape.long_line.bytes, chunking.chunk, uint64_t{chunking.n_chunks}, tree.hash()})
    hash = hash_combine(hash, word);
  return hash;
}

}  // namespace moeccl::algo
