// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "src/algo/algorithm.h"
#include "src/plan/checker.h"

namespace moeccl::algo {

Status prove(const Algorithm& algorithm, const plan::Shape& shape, const plan::LevelTree& tree) {
  plan::Plan plan = build_all(algorithm, shape, tree);
  // The steps of this shape run over few elements, each as large as a line, so that parts are as fine as one element.
  // Three chunks, the last one short, cover the loop's beginning, middle and end; operations on blocks need no element
  // for every rank.
  const plan::OpFacts& op = plan::facts(shape.op);
  const bool blocks = op.in != plan::Blocks::kOne || op.out != plan::Blocks::kOne;
  const uint64_t chunk = blocks ? 3 : shape.n_ranks + 3;
  const uint32_t n_chunks = std::min(plan.chunking.n_chunks, 3u);
  plan.shape.element_bytes = 64;
  plan.shape.count = n_chunks == 1 ? chunk : (n_chunks - 1) * chunk + 1;
  plan.chunking = {chunk, n_chunks};
  return plan::check(plan).with_context("the plan is wrong, please report it");
}

}  // namespace moeccl::algo
