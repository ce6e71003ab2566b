// SPDX-License-Identifier: Apache-2.0
#include "src/solve/replica_split.h"

namespace moeccl::solve {

int64_t keep_capacity(std::vector<int64_t>& tokens, int64_t capacity) {
  const int64_t total = std::accumulate(tokens.begin(), tokens.end(), int64_t{0});
  if (total <= capacity) return total;
  // Rounds the ranks' running sum, so that the parts add up to the whole.
  int64_t before = 0, kept = 0;
  for (int64_t& t : tokens) {
    before += t;
    const int64_t upto = before * capacity / total;
    t = upto - kept;
    kept = upto;
  }
  return kept;
}

}  // namespace moeccl::solve
