#include <algorithm>
#include <vector>

#include "src/algo/algorithm.h"
#include "src/algo/families.h"
#include "src/base/hash.h"

namespace moeccl::algo {
namespace {

std::vector<Algorithm> join_families() {
  std::vector<Algorithm> all;
  for (const auto family : {oneshot_algorithms, direct_algorithms, staged_algorithms, rd_algorithms, tree_algorithms,
                            flat_algorithms, ring_algorithms, two_d_algorithms, hier_algorithms, tensor_algorithms}) {
    const auto members = family();
    all.insert(all.end(), members.begin(), members.end());
  }
  std::stable_sort(all.begin(), all.end(), [](const Algorithm& a, const Algorithm& b) { return a.op < b.op; });
  return all;
}

plan::Plan plan_without_programs(const Algorithm& algorithm, const plan::Shape& shape, const plan::LevelTree& tree) {
  plan::Plan plan{algorithm.name, shape, algorithm.chunking(shape, tree), 0, {}};
  if (shape.op == moecclOpTensorAllToAll) {
    plan.shape.group_of = tree.tensor_groups();
    plan.shape.most_in_blocks = plan.shape.most_out_blocks = tree.n_tensor_groups();
  }
  plan.hash = plan_hash(algorithm, shape, plan.chunking, tree);
  return plan;
}

}  // namespace

std::span<const Algorithm> algorithms() {
  static const auto* const all = new std::vector<Algorithm>(join_families());  // outlives threads that outlive main()
  return *all;
}

const Algorithm* find(moecclOp_t op, std::string_view name) {
  for (const Algorithm& algorithm : algorithms())
    if (algorithm.op == op && algorithm.name == name) return &algorithm;
  return nullptr;
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
  // in_place is missing: it is private to a rank.
  for (const uint64_t word :
       {static_cast<uint64_t>(shape.op), uint64_t{shape.n_ranks}, uint64_t{shape.root}, shape.count,
        uint64_t{shape.element_bytes}, uint64_t{shape.deterministic}, uint64_t{shape.scaled},
        uint64_t{shape.reach.staging}, uint64_t{shape.reach.views}, uint64_t{shape.reach.reads}, shape.staging_bytes,
        chunking.chunk, uint64_t{chunking.n_chunks}, tree.hash()})
    hash = hash_combine(hash, word);
  return hash;
}

}  // namespace moeccl::algo
