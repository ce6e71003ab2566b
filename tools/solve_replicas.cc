// SPDX-License-Identifier: Apache-2.0
// `moeccl solve replicate`: replicas by popularity and where they stand.
#include <numeric>

#include "tools/cluster.h"
#include "tools/solve.h"
#include "tools/waiting.h"

namespace tools {
namespace {

const OptionNames kNames = {{"n_experts", "--experts"},        {"n_ranks", "--ranks"},
                            {"slots_per_rank", "--slots"},     {"n_nodes", "--nodes"},
                            {"capacity_factor", "--capacity"}, {"beta_inter_us", "--row-bytes / --inter-gbs"},
                            {"compute_us", "--compute-us"}};

struct Options {
  TraceOptions trace;
  Cluster cluster;
  int ranks = 32, slots = 16, nodes = 4;
  double capacity = 1.0, row_bytes = 4096, inter_gbs = 100, compute_us = 0.1;
  const perf::Option* inter_gbs_given = nullptr;
};

void read_cluster(Options& o) {
  Cluster& c = o.cluster;
  if (!c.given()) return;
  c.read();
  o.ranks = c.n_ranks();
  o.nodes = c.groups(0);
  fill(o.inter_gbs_given, o.inter_gbs, [&] { return c.node_gbs(0); });
  std::printf("%s", c.text().c_str());
}

void run(Options& o) {
  read_cluster(o);
  const perf::Trace t = load_trace(o.trace);
  const auto experts = static_cast<size_t>(t.n_experts), ranks = static_cast<size_t>(o.ranks);
  const std::vector<int32_t> topk = step_of(t, o.trace.layer, o.trace.step);
  std::vector<int32_t> demand(ranks * experts);
  std::vector<double> popularity(experts);
  for (size_t at = 0; at < topk.size(); ++at) {
    if (topk[at] < 0) continue;
    const size_t rank = at / static_cast<size_t>(t.k) * ranks / static_cast<size_t>(t.n_tokens);
    ++demand[rank * experts + static_cast<size_t>(topk[at])];
    popularity[static_cast<size_t>(topk[at])] += 1;
  }
  const int32_t n_slots = o.ranks * o.slots;
  if (n_slots < t.n_experts)
    fail("--ranks " + std::to_string(o.ranks) + " with --slots " + std::to_string(o.slots) + " have " +
         std::to_string(n_slots) + " slots: " + std::to_string(t.n_experts) + " experts need one each");
  std::vector<int32_t> uniform(experts), adaptive(experts), slots(static_cast<size_t>(n_slots));
  for (size_t e = 0; e < experts; ++e)
    uniform[e] = n_slots / t.n_experts + (static_cast<int32_t>(e) < n_slots % t.n_experts ? 1 : 0);
  check(moecclReplicaCounts(popularity.data(), t.n_experts, n_slots, adaptive.data()), kNames);
  double before = 0, after = 0;
  check(moecclReplicaDrops(popularity.data(), uniform.data(), t.n_experts, n_slots, o.capacity, &before), kNames);
  check(moecclReplicaDrops(popularity.data(), adaptive.data(), t.n_experts, n_slots, o.capacity, &after), kNames);
  moecclReplicaProblem_t p = MOECCL_REPLICA_PROBLEM_INIT;
  p.n_experts = t.n_experts;
  p.n_ranks = o.ranks;
  p.slots_per_rank = o.slots;
  p.n_nodes = o.nodes;
  p.beta_inter_us = o.row_bytes / o.inter_gbs * 1e-3;
  p.compute_us = o.compute_us;
  p.demand = demand.data();
  p.counts = adaptive.data();
  moecclReplicaAnswer_t a{};
  a.size = sizeof(a);
  check(watched("solve replicate", [&] { return moecclSolveReplicas(&p, slots.data(), &a); }), kNames);
  const double all = std::accumulate(popularity.begin(), popularity.end(), 0.0);
  std::printf("experts %d in %d slots (%d ranks, %d nodes); capacity factor %.2f\n", t.n_experts, n_slots, o.ranks,
              o.nodes, o.capacity);
  std::printf(
      "predicted for %.6g us per token between nodes (%.6g bytes at %.6g GB/s) and %.6g us per token of a rank\n",
      p.beta_inter_us, o.row_bytes, o.inter_gbs, p.compute_us);
  std::printf("                       before         after   change\n");
  std::printf("%-16s %11.2f %%  %11.2f %%  %6.1f %%  (uniform, Algorithm 1)\n", "dropped tokens", 100 * before / all,
              100 * after / all, change(before, after));
  const auto line = [](const char* name, double b, double c) {
    std::printf("%-16s %12.0f  %12.0f  %6.1f %%  (contiguous, improved)\n", name, b, c, change(b, c));
  };
  line("inter-node tokens", static_cast<double>(a.inter_before), static_cast<double>(a.inter_after));
  line("fullest rank", static_cast<double>(a.max_load_before), static_cast<double>(a.max_load_after));
  line("predicted us", a.before_us, a.after_us);
  std::printf("%s\n", a.keep ? "keep the contiguous placement" : "use this placement");
}

}  // namespace

void add_replicas(perf::App& solve, std::function<void()>& chosen) {
  auto o = std::make_shared<Options>();
  perf::App* app =
      solve.add_subcommand("replicate", "how many replicas each expert gets, and where (adaptive replication)");
  add_trace_options(*app, o->trace);
  o->cluster.add_options(*app);
  o->cluster.excludes(app->add_option("--ranks", o->ranks, "ranks")->check(perf::range(1, 65536)));
  app->add_option("--slots", o->slots, "expert slots of a rank")->check(perf::range(1, 1024));
  o->cluster.excludes(app->add_option("--nodes", o->nodes, "nodes")->check(perf::positive()));
  app->add_option("--capacity", o->capacity, "capacity factor")->check(perf::positive());
  app->add_option("--row-bytes", o->row_bytes, "bytes of a token's row")->check(perf::positive());
  o->inter_gbs_given =
      app->add_option("--inter-gbs", o->inter_gbs, "GB/s between nodes, of a whole node")->check(perf::positive());
  app->add_option("--compute-us", o->compute_us, "us that a rank computes for a token")->check(perf::positive());
  app->callback([o, &chosen] { chosen = [o] { run(*o); }; });
}

}  // namespace tools
