// SPDX-License-Identifier: Apache-2.0
#include "src/solve/domain_step.h"

#include <algorithm>
#include <cmath>

#include "src/routing/hop_time.h"

namespace moeccl::solve {

namespace {

// The chunks of one expert in which ExpertGather and ExpertReturn move it (tuning::kExpertMove).
constexpr double kExpertChunk = 256 << 10;

}  // namespace

DomainModel::DomainModel(const moecclDomainProblem_t& problem, std::vector<std::vector<int32_t>> group_sizes,
                         int64_t n_gpus)
    : p_(problem), sizes_(std::move(group_sizes)), n_gpus_(static_cast<double>(n_gpus)) {}

std::vector<DomainModel::Level> DomainModel::levels_of(const int32_t* domain) const {
  std::vector<Level> levels;
  double held = 1;
  for (size_t l = 0; l < sizes_.size(); ++l) {
    Level level;
    level.own = 2;
    // Each level's AllGather also passes on the experts that were gathered further out, so that a GPU ends up with all
    // experts of its domain. A smaller last domain sends more tokens away; the slowest worker counts (Eq. 9).
    for (const int32_t n : sizes_[l]) {
      const int32_t s = std::min(domain[l], n), smallest = n % s == 0 ? s : n % s, count = (n + s - 1) / s;
      level.gather_bytes = std::max(level.gather_bytes, held * (s - 1));
      const double own = static_cast<double>(smallest) / n;
      if (own >= level.own) continue;
      level.own = own;
      level.domains = count;
      level.others.assign(static_cast<size_t>(count - 1), static_cast<double>(s) / n);
    }
    level.size = std::min(domain[l], sizes_[l].back());
    held *= level.size;
    levels.push_back(std::move(level));
  }
  return levels;
}

DomainTime DomainModel::time(const int32_t* domain) const {
  const std::vector<Level> levels = levels_of(domain);
  return p_.top_k == 0 ? paper_time(levels) : step_time(levels);
}

DomainTime DomainModel::paper_time(const std::vector<Level>& levels) const {
  DomainTime t;
  for (size_t l = 0; l < levels.size(); ++l) {
    t.all_gather_s += p_.expert_bytes / p_.compression * levels[l].gather_bytes / p_.bandwidth[l];  // Eq. 4
    t.all_to_all_s += 2 * p_.data_bytes * (1 - levels[l].own) / p_.bandwidth[l];  // Eq. 3, p of Definition 1
  }
  // Eq. 8: the computation before the experts hides the AllGather; the experts' own computation is hidden (Eq. 7).
  t.total_s = std::max(p_.pre_expert_s, t.all_gather_s) + t.all_to_all_s;
  return t;
}

// Returns the probability that one of a token's K experts is among `experts` of all E, if the gate is even and a
// token's experts differ: 1 - C(E - experts, K) / C(E, K), with factors for fractions of an expert too.
double DomainModel::token_rows(double experts) const {
  double none = 1;
  for (int32_t k = 0; k < p_.top_k; ++k) none *= std::max(0.0, 1 - experts / (p_.n_experts - k));
  return 1 - none;
}

// Returns the time of one dispatch or combine with the number of hops that takes the least time, as the layer's chooser
// does (routing_price.h).
double DomainModel::all_to_all(const std::vector<Level>& levels) const {
  double least = all_to_all(levels, 1);
  for (size_t hops = 2; hops <= levels.size(); ++hops) least = std::min(least, all_to_all(levels, hops));
  return least;
}

// With d hops, each level before the last hop carries a row once for each of its groups that a token needs (HierMoE Eq.
// 7). The last hop goes to the ranks themselves, across all levels that are left.
double DomainModel::all_to_all(const std::vector<Level>& levels, size_t hops) const {
  const double token_bytes = p_.data_bytes / p_.top_k;
  std::vector<algo::HopLoad> loads(hops);
  double all = 1;
  for (const Level& level : levels) all *= level.domains;
  double largest_edge = 0, prefixes = 1, senders = 1;
  for (size_t l = 0; l < levels.size(); ++l) {
    const Level& level = levels[l];
    const size_t hop = std::min(l, hops - 1);
    if (l < hops) senders = prefixes;  // the last hop's rows come from holders of this many prefixes
    prefixes *= level.domains;
    if (level.others.empty()) continue;
    // The targets below each of the other domains that the hop distinguishes.
    const double below = l + 1 < hops ? 1 : all / prefixes;
    double rows = 0;
    for (const double part : level.others)
      rows += below * token_rows(p_.n_experts * part * level.domains / (prefixes * below));
    const double bytes = token_bytes * rows * senders;
    loads[hop].link_us = std::max(loads[hop].link_us, bytes / p_.bandwidth[l] * 1e6);
    loads[hop].latency_us = std::max(loads[hop].latency_us, latency(l) * 1e6);
    largest_edge = std::max(largest_edge, bytes / (static_cast<double>(level.others.size()) * below));
  }
  std::erase_if(loads, [](const algo::HopLoad& h) { return h.link_us <= 0 && h.latency_us <= 0; });
  double least_us = INFINITY;
  const uint32_t most = algo::moe_pipeline_chunks(static_cast<uint64_t>(std::min(largest_edge, 1e18)));
  for (uint32_t chunks = 1; chunks <= most; chunks *= 2)
    least_us = std::min(least_us, algo::way_time({.hops = loads}, chunks).total_us);
  return least_us / 1e6;
}

// Returns the time of the AllGather inside domains, or of the return over its links: levels overlap chunk by chunk.
double DomainModel::exchange(const std::vector<Level>& levels, double gpu_bytes) const {
  const double expert_bytes = gpu_bytes * n_gpus_ / p_.n_experts;
  const double chunks = std::max(1.0, std::ceil(expert_bytes / kExpertChunk));
  double slowest = 0, all = 0, waits = 0;
  for (size_t l = 0; l < levels.size(); ++l) {
    if (levels[l].gather_bytes == 0) continue;
    const double s = gpu_bytes * levels[l].gather_bytes / p_.bandwidth[l];
    slowest = std::max(slowest, s);
    all += s;
    waits += latency(l);
  }
  return slowest + (all - slowest) / chunks + waits;
}

// Returns the time of the return with a codec: every holder encodes its gradients and sends them to the owners itself,
// and nothing is summed on the way. The levels' links work at the same time.
double DomainModel::encoded_return(const std::vector<Level>& levels, double gpu_bytes) const {
  double slowest = 0, wait = 0, inside = 1;
  for (size_t l = levels.size(); l-- > 0;) {
    const double holders = (levels[l].size - 1) * inside;  // of an expert, beyond this level's links
    inside *= levels[l].size;
    if (holders == 0) continue;
    slowest = std::max(slowest, gpu_bytes / p_.gradient_ratio * holders / p_.bandwidth[l]);
    wait = std::max(wait, latency(l));
  }
  const double foreign_bytes = gpu_bytes * (inside - 1);
  double codec = 0;
  if (p_.encode_bandwidth > 0) codec += foreign_bytes / p_.encode_bandwidth;
  if (p_.decode_bandwidth > 0) codec += foreign_bytes / p_.decode_bandwidth;  // what was not sent remains
  return slowest + wait + codec;
}

// An expert that every GPU has crosses each level's uplinks once for each group there and back, and the group's GPUs
// share the work.
double DomainModel::shared_all_reduce() const {
  const double bytes = p_.expert_bytes * n_gpus_ / p_.n_experts;
  double slowest = 0, waits = 0, groups = 1;
  for (size_t l = 0; l < sizes_.size(); ++l) {
    const double n = sizes_[l].back();
    groups *= n;
    if (n <= 1) continue;
    slowest = std::max(slowest, 2 * bytes * (n - 1) / n / (p_.bandwidth[l] * std::max(1.0, n_gpus_ / groups)));
    waits += 2 * latency(l);
  }
  return slowest + waits;
}

DomainTime DomainModel::step_time(const std::vector<Level>& levels) const {
  DomainTime t;
  double held = 1;
  for (const Level& level : levels) held *= level.size;
  const bool travels = held > 1;
  t.all_to_all_s = 2 * all_to_all(levels);
  t.all_gather_s = exchange(levels, p_.expert_bytes / p_.compression);
  double encode = 0, decode = 0;
  const bool encoded = travels && p_.compression > 1;
  if (encoded && p_.encode_bandwidth > 0) encode = p_.expert_bytes / p_.encode_bandwidth;
  if (encoded && p_.decode_bandwidth > 0) decode = held * p_.expert_bytes / p_.decode_bandwidth;
  t.codec_s = encode + decode;
  // Experts are decoded one after another while others arrive (migrate.h).
  const double experts = std::max(1.0, held * p_.n_experts / n_gpus_);
  const double arrival = std::max(t.all_gather_s, decode) + std::min(t.all_gather_s, decode) / experts;
  // Eq. 8. The experts' computation is between dispatch and combine, and the library does not overlap them.
  t.total_s = encode + std::max(p_.pre_expert_s, arrival) + t.all_to_all_s + p_.expert_s;
  if (p_.forward_only != 0) return t;
  // Backward: the same two AlltoAlls in reverse and twice the experts' computation. Then gradients return to their
  // owners in parallel with the backward pass of the computation before the experts.
  t.backward_s = t.all_to_all_s;
  const double hides = p_.backward_s > 0 ? p_.backward_s : 2 * p_.pre_expert_s;
  const double gradients = p_.gradient_bytes > 0 ? p_.gradient_bytes : p_.expert_bytes;
  if (travels) t.return_s = p_.gradient_ratio > 1 ? encoded_return(levels, gradients) : exchange(levels, gradients);
  if (travels && p_.compression > 1) t.return_s += shared_all_reduce();
  t.total_s += t.backward_s + 2 * p_.expert_s + std::max(hides, t.return_s);
  return t;
}

}  // namespace moeccl::solve
