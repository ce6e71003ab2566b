// SPDX-License-Identifier: Apache-2.0
// `moeccl solve swap`: HierMoE's expert swap.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tools/cluster.h"
#include "tools/solve.h"
#include "tools/waiting.h"

namespace tools {
namespace {

const OptionNames kNames = {
    {"n_experts", "--experts"}, {"top_k", "--topk"},          {"n_levels", "the number of --groups levels"},
    {"n_groups", "--groups"},   {"row_bytes", "--row-bytes"}, {"migrate_us", "--migrate-us"},
    {"horizon", "--horizon"},   {"max_swaps", "--swaps"}};

struct Options {
  TraceOptions trace;
  std::vector<int32_t> groups;
  std::string profile;
  double row_bytes = 14336, migrate_us = 0, horizon = 1;
  int swaps = 8;
  bool count_duplicates = false;
};

// HierMoE's four levels, or as many of them as there are experts for.
std::vector<int32_t> usual_groups(int32_t n_experts) {
  constexpr int32_t kMostGpus = 32, kFewest = 4;
  int32_t gpus = 1;
  while (2 * gpus <= std::min(n_experts, kMostGpus)) gpus *= 2;
  std::vector<int32_t> groups = {gpus};
  while (groups.front() > kFewest) groups.insert(groups.begin(), groups.front() / 2);
  return groups;
}

// The alpha and beta of a problem's levels.
struct Costs {
  std::vector<double> inter_alpha, inter_beta, intra_alpha, intra_beta;
  void give_to(moecclSwapProblem_t& p) const {
    p.inter_alpha_us = inter_alpha.data(), p.inter_beta_us = inter_beta.data();
    p.intra_alpha_us = intra_alpha.data(), p.intra_beta_us = intra_beta.data();
  }
};

Costs read_costs(const std::string& path, size_t n_levels) {
  const nlohmann::json profile = read_profile_file(path);
  Costs costs;
  try {
    const nlohmann::json& all = profile.at("alltoall");
    const auto add = [](const nlohmann::json& fit, std::vector<double>& alpha, std::vector<double>& beta) {
      alpha.push_back(fit.at("alpha_ns").get<double>() / 1e3);
      beta.push_back(1 / fit.at("bytes_per_ns").get<double>() / 1e3);
    };
    add(all.at("standard"), costs.intra_alpha, costs.intra_beta);
    for (size_t l = 1; l < n_levels; ++l) {
      add(all.at("inter").at(l - 1), costs.inter_alpha, costs.inter_beta);
      add(all.at("intra").at(l - 1), costs.intra_alpha, costs.intra_beta);
    }
  } catch (const nlohmann::json::exception&) {
    fail(fmt::format(
        "--profile {}: {} levels of --groups need \"alltoall\" with its \"standard\" and {} fits of \"inter\" "
        "and of \"intra\"; moeccl calibrate measures them",
        path, n_levels, n_levels - 1));
  }
  // No AlltoAll crosses the innermost level alone.
  costs.inter_alpha.push_back(0);
  costs.inter_beta.push_back(0);
  return costs;
}

void run(const Options& o) {
  const perf::Trace t = load_trace(o.trace);
  const std::vector<int32_t> groups = o.groups.empty() ? usual_groups(t.n_experts) : o.groups;
  moecclSwapProblem_t p = MOECCL_SWAP_PROBLEM_INIT;
  p.n_experts = t.n_experts;
  p.top_k = t.k;
  p.n_levels = static_cast<int32_t>(groups.size());
  p.n_groups = groups.data();
  p.row_bytes = o.row_bytes;
  p.migrate_us = o.migrate_us;
  p.horizon = o.horizon;
  p.count_duplicates = o.count_duplicates ? 1 : 0;
  Costs costs;
  if (!o.profile.empty()) {
    costs = read_costs(o.profile, groups.size());
    costs.give_to(p);
  }
  std::vector<int32_t> pairs(static_cast<size_t>(2 * o.swaps)), placement(static_cast<size_t>(t.n_experts));
  moecclSwapAnswer_t a{};
  a.size = sizeof(a);
  const auto solve = [&] {
    return moecclSolveSwapSequence(&p, t.step(o.trace.layer, o.trace.step), t.n_tokens, o.swaps, pairs.data(),
                                   placement.data(), &a);
  };
  check(watched("solve swap", solve), kNames);
  fmt::print("experts {}, tokens {}, top-{}, groups {}, dimension {} of {}\n", t.n_experts, t.n_tokens, t.k,
             fmt::join(groups, ","), a.dimension, p.n_levels);
  fmt::print("predicted for rows of {:g} bytes with the AlltoAlls of {}\n", o.row_bytes,
             o.profile.empty() ? "HierMoE's Fig. 9, four nodes of eight A6000 (give --profile for another cluster)"
                               : o.profile);
  std::printf("                       before         after   change\n");
  std::printf("%-16s %12ld  %12ld  %6.1f %%\n", "fullest GPU", static_cast<long>(a.max_load_before),
              static_cast<long>(a.max_load_after),
              change(static_cast<double>(a.max_load_before), static_cast<double>(a.max_load_after)));
  std::printf("%-16s %12.0f  %12.0f  %6.1f %%\n", "predicted us", a.before_us, a.after_us,
              change(a.before_us, a.after_us));
  std::printf("%s", a.keep ? "keep: no swap gains enough" : "swap");
  for (int s = 0; s < a.n_swaps; ++s)
    std::printf(" %d<->%d", pairs[static_cast<size_t>(2 * s)], pairs[static_cast<size_t>(2 * s + 1)]);
  std::printf("\n");
}

}  // namespace

void add_swap(perf::App& solve, std::function<void()>& chosen) {
  auto o = std::make_shared<Options>();
  perf::App* app = solve.add_subcommand("swap", "which experts change places (HierMoE)");
  add_trace_options(*app, o->trace);
  app->add_option(
         "--groups", o->groups,
         "groups of each level, outermost first; the last are the GPUs (default: 4,8,16,32, or fewer for fewer "
         "experts)")
      ->delimiter(',')
      ->check(perf::positive())
      ->default_str("");
  app->add_option("--profile", o->profile,
                  "profile file whose \"alltoall\" has the cluster's figures, see docs/calibration.md (default: "
                  "HierMoE's Fig. 9)");
  app->add_option("--swaps", o->swaps, "most swaps")->check(perf::range(1, 100000));
  app->add_option("--row-bytes", o->row_bytes, "bytes of a token's row")->check(perf::positive());
  app->add_option("--migrate-us", o->migrate_us, "price of a swap")->check(perf::not_negative());
  app->add_option("--horizon", o->horizon, "iterations that a swap has to pay for itself")->check(perf::not_negative());
  app->add_flag("--count-duplicates", o->count_duplicates, "count as SmartMoE does, for comparison");
  app->callback([o, &chosen] { chosen = [o] { run(*o); }; });
}

}  // namespace tools
