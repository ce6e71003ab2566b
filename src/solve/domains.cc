// SPDX-License-Identifier: Apache-2.0
#include "src/solve/domains.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "src/solve/checks.h"

namespace moeccl::solve {
namespace {

constexpr int32_t kMostLevels = 8;
constexpr int64_t kMostWorkers = 1 << 24;

// The sub-workers of each worker of the level above, for one level.
struct LevelSizes {
  const int32_t* sizes;  // null: even
  int64_t n_parents;
  int32_t even;

  int32_t at(int64_t parent) const { return sizes == nullptr ? even : sizes[parent]; }
  int64_t workers() const {
    if (sizes == nullptr) return n_parents * even;
    int64_t sum = 0;
    for (int64_t i = 0; i < n_parents; ++i) sum += sizes[i];
    return sum;
  }
};
std::vector<LevelSizes> levels_of(const moecclDomainProblem_t& p) {
  std::vector<LevelSizes> levels;
  int64_t parents = 1;
  const int32_t* at = p.sizes;
  for (int32_t l = 0; l < p.n_levels; ++l) {
    levels.push_back({at, parents, p.sizes ? 0 : p.scale[l]});
    if (at != nullptr) at += parents;
    parents = levels.back().workers();
  }
  return levels;
}
// Returns the distinct sizes of a level, which are all that its time depends on.
std::vector<int32_t> distinct(const LevelSizes& level) {
  std::vector<int32_t> sizes;
  if (level.sizes == nullptr) return {level.even};
  sizes.assign(level.sizes, level.sizes + level.n_parents);
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  return sizes;
}

Status check_sizes(const moecclDomainProblem_t& p) {
  int64_t workers = 1;
  const int32_t* at = p.sizes;
  for (int32_t l = 0; l < p.n_levels; ++l) {
    int64_t sum = 0;
    for (int64_t i = 0; i < (p.sizes ? workers : 1); ++i) {
      const int32_t size = p.sizes ? at[i] : p.scale[l];
      if (size < 1 || size > kMostWorkers)
        return error(moecclInvalidArgument, "problem.{} has {} at level {}: between 1 and {} sub-workers are possible",
                     p.sizes ? "sizes" : "scale", size, l, kMostWorkers);
      sum += size;
      if (sum > kMostWorkers) break;
    }
    const int64_t next = p.sizes ? sum : workers * sum;
    if (next > kMostWorkers)
      return error(moecclInvalidArgument, "problem.{} gives more than {} workers at level {}",
                   p.sizes ? "sizes" : "scale", kMostWorkers, l);
    if (p.sizes) at += workers;
    workers = next;
  }
  return {};
}

// Returns the sizes to try. On an even level, these are its divisors, so that all domains are alike, as in the paper.
std::vector<int32_t> candidates(const std::vector<int32_t>& sizes) {
  const int32_t most = sizes.back();
  std::vector<int32_t> all;
  for (int32_t s = 1; s <= most; ++s)
    if (s == most || most % s == 0 || (sizes.size() > 1 && s <= 64)) all.push_back(s);
  return all;
}

DomainModel model_of(const moecclDomainProblem_t& p) {
  std::vector<std::vector<int32_t>> sizes;
  const std::vector<LevelSizes> levels = levels_of(p);
  for (const LevelSizes& level : levels) sizes.push_back(distinct(level));
  return {p, std::move(sizes), levels.back().workers()};
}

// Tries all combinations while they are few; else improves one level after another until nothing changes.
void search(const DomainModel& model, int32_t* domain) {
  const size_t levels = model.sizes().size();
  std::vector<std::vector<int32_t>> choices;
  double combinations = 1;
  for (const auto& s : model.sizes()) {
    choices.push_back(candidates(s));
    combinations *= static_cast<double>(choices.back().size());
  }
  std::fill_n(domain, levels, 1);
  std::vector<int32_t> now(levels, 1);
  double best = model.time(domain).total_s;
  const auto consider = [&] {
    const double t = model.time(now.data()).total_s;
    if (!(t < best)) return false;
    best = t;
    std::copy(now.begin(), now.end(), domain);
    return true;
  };
  if (combinations <= 1e5) {
    std::vector<size_t> at(levels);
    for (size_t l = 0; l < levels;) {
      consider();
      for (l = 0; l < levels; ++l) {
        at[l] = (at[l] + 1) % choices[l].size();
        now[l] = choices[l][at[l]];
        if (at[l] != 0) break;
      }
    }
    return;
  }
  for (bool better = true; better;) {
    better = false;
    for (size_t l = 0; l < levels; ++l) {
      for (const int32_t s : choices[l]) {
        std::copy_n(domain, levels, now.begin());
        now[l] = s;
        better |= consider();
      }
    }
  }
}

Status check_step(const moecclDomainProblem_t& p) {
  MOECCL_TRY(between("problem.n_experts", p.n_experts, 1, 65535));
  MOECCL_TRY(between("problem.top_k", p.top_k, 1, p.n_experts));
  MOECCL_TRY(at_least_0({{"problem.expert_s", p.expert_s},
                         {"problem.backward_s", p.backward_s},
                         {"problem.gradient_bytes", p.gradient_bytes},
                         {"problem.encode_bandwidth", p.encode_bandwidth},
                         {"problem.decode_bandwidth", p.decode_bandwidth},
                         {"problem.gradient_ratio", p.gradient_ratio}}));
  if (p.gradient_ratio != 0 && p.gradient_ratio < 1)
    return error(moecclInvalidArgument, "problem.gradient_ratio is {}: a ratio of 1 or more, or 0", p.gradient_ratio);
  for (int32_t l = 0; p.latency_s != nullptr && l < p.n_levels; ++l)
    if (!(p.latency_s[l] >= 0) || p.latency_s[l] > 1e6)
      return error(moecclInvalidArgument, "problem.latency_s[{}] is {}: give seconds, 0 to 1000000", l, p.latency_s[l]);
  return {};
}

}  // namespace

Result<moecclDomainProblem_t> checked(const moecclDomainProblem_t& given) {
  moecclDomainProblem_t p = given;
  MOECCL_TRY(between("problem.n_levels", p.n_levels, 1, kMostLevels));
  if (p.scale == nullptr && p.sizes == nullptr)
    return error(moecclInvalidArgument, "problem.scale is NULL: give the sub-workers of each level, or sizes");
  if (p.bandwidth == nullptr)
    return error(moecclInvalidArgument, "problem.bandwidth is NULL: give bytes a second of each level");
  MOECCL_TRY(check_sizes(p));
  for (int32_t l = 0; l < p.n_levels; ++l)
    if (!(p.bandwidth[l] > 0) || p.bandwidth[l] > kMostNumber)
      return error(moecclInvalidArgument, "problem.bandwidth[{}] is {}: give bytes a second, at most {}", l,
                   p.bandwidth[l], kMostNumber);
  MOECCL_TRY(at_least_0({{"problem.data_bytes", p.data_bytes},
                         {"problem.expert_bytes", p.expert_bytes},
                         {"problem.pre_expert_s", p.pre_expert_s},
                         {"problem.compression", p.compression}}));
  if (p.compression != 0 && p.compression < 1)
    return error(moecclInvalidArgument, "problem.compression is {}: a ratio of 1 or more, or 0", p.compression);
  MOECCL_TRY(gain_share(p.min_gain));
  if (p.compression == 0) p.compression = 1;
  if (p.top_k != 0) MOECCL_TRY(check_step(p));
  return p;
}

Status check_domain(const moecclDomainProblem_t& p, const int32_t* domain) {
  for (int32_t l = 0; l < p.n_levels; ++l)
    if (domain[l] < 1)
      return error(moecclInvalidArgument, "domain[{}] is {}: a domain has 1 worker or more", l, domain[l]);
  return {};
}

Status check(const OneLevel& v) {
  if (!(v.workers >= 2)) return error(moecclInvalidArgument, "n_workers is {}: give 2 or more", v.workers);
  if (!(v.bandwidth > 0) || v.bandwidth > kMostNumber)
    return error(moecclInvalidArgument, "bandwidth is {}: give bytes a second, at most {}", v.bandwidth, kMostNumber);
  return at_least_0({{"pre_expert_s", v.pre_expert_s}, {"data_bytes", v.data_bytes}, {"expert_bytes", v.expert_bytes}});
}

double best_proportion(const OneLevel& v) {
  if (2 * v.data_bytes >= v.workers * v.expert_bytes) return 0;  // Case 2.2: AllGather alone
  // Case 1 and Case 2.1 meet where the AllGather is just hidden by the computation.
  const double p = 1 - v.bandwidth * v.pre_expert_s / (v.expert_bytes * (v.workers - 1));
  return std::clamp(p, 0.0, 1.0);
}

double latency(const OneLevel& v, double p) {
  const double gather = (1 - p) * v.expert_bytes * (v.workers - 1) / v.bandwidth;
  const double all_to_all = p * v.data_bytes * (v.workers - 1) / v.workers / v.bandwidth;
  return std::max(v.pre_expert_s, gather) + 2 * all_to_all;
}

DomainTime domain_time(const moecclDomainProblem_t& p, const int32_t* domain) { return model_of(p).time(domain); }

void tell(const DomainTime& t, moecclDomainAnswer_t* answer) {
  answer->after_us = t.total_s * 1e6;
  answer->all_gather_us = t.all_gather_s * 1e6;
  answer->all_to_all_us = t.all_to_all_s * 1e6;
  answer->backward_us = t.backward_s * 1e6;
  answer->return_us = t.return_s * 1e6;
  answer->codec_us = t.codec_s * 1e6;
}

void solve_domains(const moecclDomainProblem_t& p, int32_t* domain, moecclDomainAnswer_t* answer) {
  const DomainModel model = model_of(p);
  const std::vector<int32_t> plain(static_cast<size_t>(p.n_levels), 1);
  search(model, domain);
  *answer = {};
  const double before = model.time(plain.data()).total_s;
  answer->before_us = before * 1e6;
  answer->gain = before > 0 ? 1 - model.time(domain).total_s / before : 0;
  answer->keep = !(answer->gain > 0) || answer->gain < p.min_gain;
  if (answer->keep) std::copy(plain.begin(), plain.end(), domain);
  tell(model.time(domain), answer);
}

Status locate(const moecclDomainProblem_t& p, int64_t gpu, int32_t* location) {
  const std::vector<LevelSizes> levels = levels_of(p);
  MOECCL_TRY(between("gpu", gpu, 0, levels.back().workers() - 1));
  // From the innermost level outwards: finds the parent and the sub-worker. Even levels give Eq. 13's remainders.
  int64_t worker = gpu;
  for (size_t l = levels.size(); l-- > 0;) {
    int64_t parent = 0;
    if (levels[l].sizes == nullptr) {
      parent = worker / levels[l].even;
      worker %= levels[l].even;
    } else {
      while (worker >= levels[l].at(parent)) worker -= levels[l].at(parent++);
    }
    location[l] = static_cast<int32_t>(worker);
    worker = parent;
  }
  return {};
}

namespace {

// Returns how many workers of the level the parent of the one at `location` has.
int32_t siblings(const moecclDomainProblem_t& p, const int32_t* location, int32_t level) {
  const std::vector<LevelSizes> levels = levels_of(p);
  int64_t worker = 0;  // on the level above
  for (int32_t l = 0; l < level; ++l) {
    const LevelSizes& sizes = levels[static_cast<size_t>(l)];
    int64_t first = sizes.sizes == nullptr ? worker * sizes.even : 0;
    for (int64_t i = 0; sizes.sizes != nullptr && i < worker; ++i) first += sizes.sizes[i];
    worker = first + location[l];
  }
  return levels[static_cast<size_t>(level)].at(worker);
}

}  // namespace

Result<moecclDomainLink_t> link_at(const moecclDomainProblem_t& p, const int32_t* domain, int32_t level, int64_t m,
                                   int64_t n) {
  MOECCL_TRY(between("level", level, 0, p.n_levels - 1));
  int32_t at_m[kMostLevels], at_n[kMostLevels];
  MOECCL_TRY(locate(p, m, at_m));
  MOECCL_TRY(locate(p, n, at_n));
  // Algorithm 1 compares only the levels below. Workers of different parents are linked at the parents' level, so the
  // levels above must agree too.
  for (int32_t l = 0; l < p.n_levels; ++l)
    if (l != level && at_m[l] != at_n[l]) return moecclLinkNone;
  const int32_t s = domain[level], w_m = at_m[level], w_n = at_n[level];
  if (w_m == w_n) return moecclLinkNone;
  if (w_m / s == w_n / s) return moecclLinkAllGather;
  // Tokens go to the worker at the same place of the other domain, counted modulo its size, which may be smaller.
  const int32_t all = siblings(p, at_m, level);
  const auto meets = [&](int32_t from, int32_t to) { return from % s % std::min(s, all - to / s * s) == to % s; };
  return meets(w_m, w_n) || meets(w_n, w_m) ? moecclLinkAllToAll : moecclLinkNone;
}

}  // namespace moeccl::solve
