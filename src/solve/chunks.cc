// SPDX-License-Identifier: Apache-2.0
#include "src/solve/chunks.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "src/solve/checks.h"

namespace moeccl::solve {
namespace {

constexpr double kMinBytes = 65536;
constexpr int32_t kMaxChunks = 1024;

Status check_curve(const char* name, const moecclCurve_t& c) {
  if (c.n_points < 0 || c.n_points > 1 << 20)
    return error(moecclInvalidArgument, "problem.{}.n_points is {}: between 0 and {} are possible", name, c.n_points,
                 1 << 20);
  if (c.n_points > 0 && (c.bytes == nullptr || c.efficiency == nullptr))
    return error(moecclInvalidArgument, "problem.{} has {} points and a NULL array", name, c.n_points);
  for (int32_t i = 0; i < c.n_points; ++i) {
    if (!(c.bytes[i] > 0) || c.bytes[i] > 1e30 || (i > 0 && !(c.bytes[i] > c.bytes[i - 1])))
      return error(moecclInvalidArgument, "problem.{}.bytes[{}] is {}: volumes are above 0 and ascend", name, i,
                   c.bytes[i]);
    if (!(c.efficiency[i] > 0 && c.efficiency[i] <= 1))
      return error(moecclInvalidArgument, "problem.{}.efficiency[{}] is {}: above 0 and at most 1", name, i,
                   c.efficiency[i]);
  }
  return {};
}

double efficiency(const moecclCurve_t& c, double bytes) {
  if (c.n_points == 0) return 1;
  const auto at = std::lower_bound(c.bytes, c.bytes + c.n_points, bytes) - c.bytes;
  if (at == 0) return c.efficiency[0];
  if (at == c.n_points) return c.efficiency[at - 1];
  const double share = std::log(bytes / c.bytes[at - 1]) / std::log(c.bytes[at] / c.bytes[at - 1]);
  return c.efficiency[at - 1] + share * (c.efficiency[at] - c.efficiency[at - 1]);
}

const moecclChunkContention_t& contention_of(const moecclChunkProblem_t& p, moecclChunkStrategy_t strategy) {
  static constexpr moecclChunkContention_t kNone{};
  return strategy == moecclChunkO2 ? p.o2 : strategy == moecclChunkO3 ? p.o3 : kNone;
}

// Eq. 8 to 10 for one chunk of N, in us, with the efficiencies of the strategy.
struct Times {
  double all_to_all, all_gather, copy;
};
Times chunk_times(const moecclChunkProblem_t& p, moecclChunkStrategy_t strategy, int32_t n) {
  const double part = p.bytes / n, t = p.tensor, e = p.expert;
  const moecclChunkContention_t& own = contention_of(p, strategy);
  const auto r = [](const moecclCurve_t& mine, const moecclCurve_t& common, double bytes) {
    return efficiency(mine.n_points > 0 ? mine : common, bytes);
  };
  return {p.start_us + 1e6 * part / t * (e - 1) / e / (p.inter_bandwidth * r(own.inter, p.inter, part / t)),
          p.start_us + 1e6 * part * (t - 1) / t / (p.intra_bandwidth * r(own.intra, p.intra, part)),
          1e6 * part / (p.copy_bandwidth * r(own.copy, p.copy, part))};
}

}  // namespace

Result<moecclChunkProblem_t> checked(const moecclChunkProblem_t& given) {
  moecclChunkProblem_t p = given;
  MOECCL_TRY(above_0({{"problem.bytes", p.bytes},
                      {"problem.inter_bandwidth", p.inter_bandwidth},
                      {"problem.intra_bandwidth", p.intra_bandwidth},
                      {"problem.copy_bandwidth", p.copy_bandwidth}}));
  MOECCL_TRY(at_least_0({{"problem.min_bytes", p.min_bytes}, {"problem.start_us", p.start_us}}));
  MOECCL_TRY(between("problem.tensor", p.tensor, 1, 1 << 20));
  MOECCL_TRY(between("problem.expert", p.expert, 1, 1 << 20));
  MOECCL_TRY(between("problem.max_chunks", p.max_chunks, 0, 1 << 20));
  MOECCL_TRY(check_curve("inter", p.inter));
  MOECCL_TRY(check_curve("intra", p.intra));
  MOECCL_TRY(check_curve("copy", p.copy));
  for (const auto& [name, own] : {std::pair{"o2", &p.o2}, std::pair{"o3", &p.o3}}) {
    MOECCL_TRY(at_least_0({{"problem.o2 or o3.chunk_us", own->chunk_us}}));
    for (const auto& [field, curve] :
         {std::pair{".inter", &own->inter}, std::pair{".intra", &own->intra}, std::pair{".copy", &own->copy}})
      MOECCL_TRY(check_curve((std::string(name) + field).c_str(), *curve));
  }
  MOECCL_TRY(gain_share(p.min_gain));
  if (p.min_bytes == 0) p.min_bytes = kMinBytes;
  if (p.max_chunks == 0) p.max_chunks = kMaxChunks;
  return p;
}

double chunk_us(const moecclChunkProblem_t& p, moecclChunkStrategy_t strategy, int32_t n) {
  const double e = p.expert;
  if (strategy == moecclChunkBaseline)  // the whole volume between nodes
    return p.start_us + 1e6 * p.bytes * (e - 1) / e / (p.inter_bandwidth * efficiency(p.inter, p.bytes));
  const Times one = chunk_times(p, strategy, n);
  if (strategy == moecclChunkO1) return one.all_to_all + one.all_gather;  // Eq. 11
  const double fixed = n * contention_of(p, strategy).chunk_us;
  if (strategy == moecclChunkO2) {  // Algorithm 1, lines 13 to 17
    const double inside = one.all_gather + one.copy;
    return fixed + (one.all_to_all < inside ? one.all_to_all + inside * n : one.all_to_all * n + inside);
  }
  return fixed + (one.all_to_all < one.all_gather ? one.all_to_all + one.all_gather * n + one.copy  // Algorithm 2
                                                  : one.all_to_all * n + one.all_gather + one.copy);
}

void solve_chunks(const moecclChunkProblem_t& p, moecclChunkAnswer_t* answer) {
  *answer = {};
  for (const auto s : {moecclChunkBaseline, moecclChunkO1, moecclChunkO2, moecclChunkO3}) {
    answer->chunks[s] = 1;
    answer->us[s] = chunk_us(p, s, 1);
    if (s < moecclChunkO2) continue;
    // The paper's listing assigns T = T_min where the smaller one is found, but it means T_min = T.
    for (int32_t n = 2; n <= p.max_chunks && p.bytes / n / p.tensor >= p.min_bytes; ++n) {
      const double us = chunk_us(p, s, n);
      if (us < answer->us[s]) answer->us[s] = us, answer->chunks[s] = n;
    }
  }
  auto best = moecclChunkBaseline;
  for (const auto s : {moecclChunkO1, moecclChunkO2, moecclChunkO3})
    if (answer->us[s] < answer->us[best]) best = s;
  answer->before_us = answer->us[moecclChunkBaseline];
  answer->gain = answer->before_us > 0 ? 1 - answer->us[best] / answer->before_us : 0;
  answer->keep = !(answer->gain > 0) || answer->gain < p.min_gain;
  answer->strategy = answer->keep ? moecclChunkBaseline : best;
  answer->n_chunks = answer->chunks[answer->strategy];
  answer->after_us = answer->us[answer->strategy];
}

}  // namespace moeccl::solve
