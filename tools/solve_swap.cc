// SPDX-License-Identifier: Apache-2.0
// `moeccl solve swap`: HierMoE's expert swap.
#include "tools/solve.h"

namespace tools {
namespace {

struct Options {
  TraceOptions trace;
  std::vector<int32_t> groups = {4, 8, 16, 32};
  double row_bytes = 14336, migrate_us = 0, horizon = 1;
  int swaps = 8;
  bool count_duplicates = false;
};

void run(const Options& o) {
  const perf::Trace t = load_trace(o.trace);
  moecclSwapProblem_t p = MOECCL_SWAP_PROBLEM_INIT;
  p.n_experts = t.n_experts;
  p.top_k = t.k;
  p.n_levels = static_cast<int32_t>(o.groups.size());
  p.n_groups = o.groups.data();
  p.row_bytes = o.row_bytes;
  p.migrate_us = o.migrate_us;
  p.horizon = o.horizon;
  p.count_duplicates = o.count_duplicates ? 1 : 0;
  std::vector<int32_t> pairs(static_cast<size_t>(2 * o.swaps)), placement(static_cast<size_t>(t.n_experts));
  moecclSwapAnswer_t a{};
  a.size = sizeof(a);
  check(moecclSolveSwapSequence(&p, t.step(o.trace.layer, o.trace.step), t.n_tokens, o.swaps, pairs.data(),
                                placement.data(), &a));
  std::printf("experts %d, tokens %d, top-%d, dimension %d of %d\n", t.n_experts, t.n_tokens, t.k, a.dimension,
              p.n_levels);
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

void add_swap(CLI::App& solve, std::function<void()>& chosen) {
  auto o = std::make_shared<Options>();
  CLI::App* app = solve.add_subcommand("swap", "which experts change places (HierMoE)");
  add_trace_options(*app, o->trace);
  app->add_option("--groups", o->groups, "groups of each level, outermost first; the last are the GPUs")
      ->delimiter(',')
      ->check(perf::positive());
  app->add_option("--swaps", o->swaps, "most swaps")->check(CLI::Range(1, 100000));
  app->add_option("--row-bytes", o->row_bytes, "bytes of a token's row")->check(perf::positive());
  app->add_option("--migrate-us", o->migrate_us, "price of a swap")->check(perf::not_negative());
  app->add_option("--horizon", o->horizon, "iterations that a swap has to pay for itself")->check(perf::not_negative());
  app->add_flag("--count-duplicates", o->count_duplicates, "count as SmartMoE does, for comparison");
  app->callback([o, &chosen] { chosen = [o] { run(*o); }; });
}

}  // namespace tools
