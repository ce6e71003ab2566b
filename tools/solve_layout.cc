// SPDX-License-Identifier: Apache-2.0
// `moeccl solve layout`: parallel degrees of a cluster (MoNTA).
#include <fmt/format.h>

#include <algorithm>

#include "tools/cluster.h"
#include "tools/solve.h"
#include "tools/waiting.h"

namespace tools {
namespace {

const OptionNames kNames = {{"n_gpus", "--gpus"},
                            {"gpus_per_node", "--gpus-per-node"},
                            {"gpu_bytes", "--gpu-gb"},
                            {"intra_bandwidth", "--intra-gbs"},
                            {"inter_bandwidth", "--inter-gbs"},
                            {"n_layers", "--layers"},
                            {"n_heads", "--heads"},
                            {"n_experts", "--experts"},
                            {"top_k", "--topk"},
                            {"hidden", "--hidden"},
                            {"sequence", "--sequence"},
                            {"global_batch", "--global-batch"},
                            {"dense_parameters", "--dense-params"},
                            {"moe_parameters", "--moe-params"},
                            {"zero_stage", "--zero"},
                            {"switch_ranks", "--switch"},
                            {"gpu_flops", "--tflops"}};

struct Options {
  moecclLayoutProblem_t p = MOECCL_LAYOUT_PROBLEM_INIT;
  TraceOptions trace;
  Cluster cluster;
  double gpu_gb = 80, intra_gbs = 200, inter_gbs = 25, dense_b = 1.6, moe_b = 45, tflops = 312;
  int rows = 10, recompute = 1;
  const perf::Option *gpus_given = nullptr, *per_node_given = nullptr, *inter_given = nullptr, *intra_given = nullptr;
};

void read_cluster(Options& o) {
  Cluster& c = o.cluster;
  if (!c.given()) return;
  c.read();
  fill(o.gpus_given, o.p.n_gpus, [&] { return c.n_ranks(); });
  fill(o.per_node_given, o.p.gpus_per_node, [&] { return c.n_ranks() / c.nodes(); });
  fill(o.inter_given, o.inter_gbs, [&] { return c.between_gbs(o.inter_gbs); });
  fill(o.intra_given, o.intra_gbs, [&] { return c.inside_gbs(); });
  std::printf("%s", c.text({{"--inter-gbs", o.inter_given}, {"--intra-gbs", o.intra_given}}).c_str());
  std::printf("%d nodes of %d GPUs, %.4g GB/s of a GPU between nodes and %.4g inside\n", o.p.n_gpus / o.p.gpus_per_node,
              o.p.gpus_per_node, o.inter_gbs, o.intra_gbs);
}

void run(Options& o) {
  moecclLayoutProblem_t& p = o.p;
  read_cluster(o);
  if (!o.trace.path.empty()) {  // the model's experts as they were recorded
    const perf::Trace t = load_trace(o.trace);
    p.n_experts = t.n_experts;
    p.top_k = t.k;
  }
  p.gpu_bytes = o.gpu_gb * 1e9;
  p.intra_bandwidth = o.intra_gbs * 1e9;
  p.inter_bandwidth = o.inter_gbs * 1e9;
  p.dense_parameters = o.dense_b * 1e9;
  p.moe_parameters = o.moe_b * 1e9;
  p.recompute = static_cast<moecclRecompute_t>(o.recompute);
  p.gpu_flops = o.tflops * 1e12;
  std::vector<moecclLayout_t> found(static_cast<size_t>(o.rows));
  int32_t n = 0;
  check(watched("solve layout", [&] { return moecclSolveLayout(&p, found.data(), o.rows, &n); }), kNames);
  if (n == 0)
    fail(fmt::format("no layout fits into {:g} GB: give more --gpus or --gpu-gb, or a higher --zero", o.gpu_gb));
  std::printf(
      "%d layouts fit into %.0f GB\n   TP   EP   CP   PP   DP  CP/EP       weights GB  activations GB  communication ms"
      "  bubble %%   step ms   MFU %%\n",
      n, o.gpu_gb);
  for (int32_t i = 0; i < std::min(n, o.rows); ++i) {
    const moecclLayout_t& v = found[static_cast<size_t>(i)];
    moecclLayoutCost_t cost{};
    cost.size = sizeof(cost);
    check(moecclPriceLayout(&p, &v, &cost), kNames);
    std::printf("%5d%5d%5d%5d%5d  %-10s %12.1f %15.1f %17.1f %9.1f %9.1f %7.1f\n", v.tensor, v.expert, v.context,
                v.pipeline, v.data, v.vertical ? "vertical" : "horizontal", v.weight_bytes / 1e9,
                v.activation_bytes / 1e9, v.comm_us / 1e3, 100 * cost.bubble, cost.step_us / 1e3, 100 * cost.mfu);
  }
}

}  // namespace

void add_layout(perf::App& solve, std::function<void()>& chosen) {
  auto l = std::make_shared<Options>();
  moecclLayoutProblem_t& p = l->p;
  p.n_gpus = 64, p.gpus_per_node = 8, p.n_layers = 32, p.n_heads = 32, p.n_experts = 8, p.top_k = 2, p.hidden = 4096;
  p.sequence = 8192, p.global_batch = 256, p.zero_stage = 1, p.sequence_parallel = 1;
  perf::App* layout = solve.add_subcommand("layout", "parallel degrees that fit, by the time of a step (MoNTA)");
  perf::Option* const trace =
      layout->add_option("--trace", l->trace.path, "take experts and top-k from this routing trace");
  l->cluster.add_options(*layout);
  l->gpus_given = layout->add_option("--gpus", p.n_gpus, "GPUs")->check(perf::positive());
  l->per_node_given = layout->add_option("--gpus-per-node", p.gpus_per_node, "GPUs of a node")->check(perf::positive());
  layout->add_option("--gpu-gb", l->gpu_gb, "memory of a GPU")->check(perf::positive());
  l->intra_given =
      layout->add_option("--intra-gbs", l->intra_gbs, "GB/s within a node, per GPU")->check(perf::positive());
  l->inter_given =
      layout->add_option("--inter-gbs", l->inter_gbs, "GB/s between nodes, per GPU")->check(perf::positive());
  layout->add_option("--layers", p.n_layers, "transformer layers")->check(perf::positive());
  layout->add_option("--heads", p.n_heads, "attention heads")->check(perf::positive());
  layout->add_option("--experts", p.n_experts, "experts of a layer")->check(perf::positive())->excludes(trace);
  layout->add_option("--topk", p.top_k, "experts per token")->check(perf::positive())->excludes(trace);
  layout->add_option("--hidden", p.hidden, "hidden size")->check(perf::positive());
  layout->add_option("--sequence", p.sequence, "context length")->check(perf::positive());
  layout->add_option("--global-batch", p.global_batch, "sequences of a step")->check(perf::positive());
  layout->add_option("--dense-params", l->dense_b, "parameters outside the experts, in 1e9")
      ->check(perf::not_negative());
  layout->add_option("--moe-params", l->moe_b, "parameters of all experts, in 1e9")->check(perf::not_negative());
  layout->add_option("--zero", p.zero_stage, "ZeRO stage 0 to 3")->check(perf::range(0, 3));
  layout->add_option("--recompute", l->recompute, "0 none, 1 selective, 2 full")->check(perf::range(0, 2));
  layout->add_option("--tflops", l->tflops, "peak of a GPU, 1e12 operations a second; 0: communication alone")
      ->check(perf::not_negative());
  layout->add_option("--switch", p.switch_ranks, "most ep x cp ranks that the network between nodes joins; 0: any")
      ->check(perf::not_negative());
  layout->add_option("--rows", l->rows, "layouts to show")->check(perf::range(1, 100000));
  layout->callback([l, &chosen] { chosen = [l] { run(*l); }; });
}

}  // namespace tools
