// SPDX-License-Identifier: Apache-2.0
#include "src/solve/predict.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "src/solve/checks.h"

namespace moeccl::solve {
namespace {

Status check_sizes(int32_t n_now, int32_t n_next) {
  if (n_now < 1 || n_now > 65535)
    return error(moecclInvalidArgument, "n_now is {}: between 1 and 65535 experts are possible", n_now);
  if (n_next < 1 || n_next > 65535)
    return error(moecclInvalidArgument, "n_next is {}: between 1 and 65535 experts are possible", n_next);
  return {};
}

Status check_index(const char* name, const int32_t* topk, int64_t n, int32_t bound) {
  for (int64_t i = 0; i < n; ++i)
    if (topk[i] < -1 || topk[i] >= bound)
      return error(moecclInvalidArgument, "{} names expert {} at index {}: between -1 and {} are possible", name,
                   topk[i], i, bound - 1);
  return {};
}

}  // namespace

Status update_predictor(double* joint, int32_t n_now, int32_t n_next, double decay, const TokenPairs& t) {
  MOECCL_TRY(check_sizes(n_now, n_next));
  if (!(decay >= 0 && decay <= 1))
    return error(moecclInvalidArgument, "decay is {}: give 0 (forget all) to 1 (forget nothing)", decay);
  MOECCL_TRY(between("n_tokens", t.n_tokens, 0, int64_t{1} << 40));
  MOECCL_TRY(between("top_k", t.top_k, 1, 64));
  MOECCL_TRY(check_index("topk_now", t.now, t.n_tokens * t.top_k, n_now));
  MOECCL_TRY(check_index("topk_next", t.next, t.n_tokens * t.top_k, n_next));
  const auto next = static_cast<size_t>(n_next);
  for (size_t i = 0; i < static_cast<size_t>(n_now) * next; ++i) joint[i] *= decay;
  for (int64_t token = 0; token < t.n_tokens; ++token) {
    for (int64_t a = token * t.top_k; a < (token + 1) * t.top_k; ++a) {
      if (t.now[a] < 0) continue;
      double* row = joint + static_cast<size_t>(t.now[a]) * next;
      for (int64_t b = token * t.top_k; b < (token + 1) * t.top_k; ++b)
        if (t.next[b] >= 0) row[t.next[b]] += 1;
    }
  }
  return {};
}

Status apply_predictor(const double* joint, int32_t n_now, int32_t n_next, const int32_t* num_now, int32_t n_samples,
                       int32_t* num_next) {
  MOECCL_TRY(check_sizes(n_now, n_next));
  if (n_samples < 0) return error(moecclInvalidArgument, "n_samples is {}: give 0 or more", n_samples);
  const auto now = static_cast<size_t>(n_now), next = static_cast<size_t>(n_next);
  std::vector<double> total(now), expected(next);
  for (size_t e = 0; e < now; ++e) {
    double seen = 0;
    for (size_t f = 0; f < next; ++f) {
      const double value = joint[e * next + f];
      if (!(value >= 0) || !std::isfinite(value))
        return error(moecclInvalidArgument, "joint[{}][{}] is {}: zero it at first and change it by updates alone", e,
                     f, value);
      seen += value;
    }
    total[e] = std::isfinite(seen) ? seen : 0;
  }
  for (size_t i = 0; i < static_cast<size_t>(n_samples); ++i) {
    const int32_t* num = num_now + i * now;
    double flat = 0;
    int64_t all = 0;
    expected.assign(next, 0);
    for (size_t e = 0; e < now; ++e) {
      if (num[e] < 0) return error(moecclInvalidArgument, "num_now[{}][{}] is {}: counts are 0 or more", i, e, num[e]);
      all += num[e];
      if (num[e] == 0) continue;
      if (total[e] == 0) flat += num[e];
      for (size_t f = 0; total[e] > 0 && f < next; ++f) expected[f] += num[e] * (joint[e * next + f] / total[e]);
    }
    if (all > INT32_MAX)
      return error(moecclInvalidArgument, "num_now: sample {} has {} tokens, at most {}", i, all, INT32_MAX);
    // Rounds the running sum, so that the row keeps its sum.
    double upto = 0;
    int64_t given = 0;
    for (size_t f = 0; f < next; ++f) {
      upto += expected[f] + flat / n_next;
      const int64_t rounded = f + 1 == next ? all : std::min(all, static_cast<int64_t>(std::llround(upto)));
      num_next[i * next + f] = static_cast<int32_t>(rounded - given);
      given = rounded;
    }
  }
  return {};
}

}  // namespace moeccl::solve
