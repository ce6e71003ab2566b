// SPDX-License-Identifier: Apache-2.0
// `moeccl solve domains|chunks|layout`: what is decided once for a cluster.
#include <fmt/format.h>

#include "tools/solve.h"

namespace tools {
namespace {

const OptionNames kDomainNames = {{"n_levels", "the number of --scale levels"},
                                  {"scale", "--scale"},
                                  {"bandwidth", "--gbps"},
                                  {"data_bytes", "--hidden-bytes"},
                                  {"expert_bytes", "--expert-mb"},
                                  {"pre_expert_s", "--pre-ms"},
                                  {"compression", "--compression"}};
const OptionNames kChunkNames = {{"bytes", "--hidden-bytes"},
                                 {"tensor", "--tensor"},
                                 {"expert", "--expert"},
                                 {"inter_bandwidth", "--inter-gbs"},
                                 {"intra_bandwidth", "--intra-gbs"},
                                 {"copy_bandwidth", "--copy-gbs"},
                                 {"start_us", "--start-us"}};
const OptionNames kLayoutNames = {{"n_gpus", "--gpus"},
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

struct DomainOptions {
  TraceOptions trace;
  std::vector<int32_t> scale = {4, 8};
  std::vector<double> gbps = {10, 128};
  double hidden_bytes = 8192, expert_mb = 8, pre_ms = 5, compression = 1;
};
void run_domains(const DomainOptions& o) {
  if (o.scale.size() != o.gbps.size()) fail("--gbps: give as many bandwidths as --scale has levels");
  double gpus = 1;
  for (const int32_t s : o.scale) gpus *= s;
  moecclDomainProblem_t p = MOECCL_DOMAIN_PROBLEM_INIT;
  const perf::Trace t = load_trace(o.trace);
  size_t rows = 0;
  for (const int32_t e : step_of(t, o.trace.layer, o.trace.step)) rows += e >= 0;
  std::vector<double> bandwidth;
  for (const double g : o.gbps) bandwidth.push_back(g * 1e9 / 8);
  p.n_levels = static_cast<int32_t>(o.scale.size());
  p.scale = o.scale.data();
  p.bandwidth = bandwidth.data();
  p.data_bytes = static_cast<double>(rows) * o.hidden_bytes / gpus;
  p.expert_bytes = o.expert_mb * 1e6;
  p.pre_expert_s = o.pre_ms * 1e-3;
  p.compression = o.compression;
  std::vector<int32_t> domain(o.scale.size());
  moecclDomainAnswer_t a{};
  a.size = sizeof(a);
  check(moecclSolveDomains(&p, domain.data(), &a), kDomainNames);
  std::printf("%.0f GPUs, %.2f MB of rows each way per GPU, experts %.2f MB / %.3g\n", gpus, p.data_bytes / 1e6,
              o.expert_mb, o.compression);
  for (size_t l = 0; l < domain.size(); ++l)
    std::printf("level %zu: domains of %d of %d workers, p = %.3f\n", l, domain[l], o.scale[l],
                o.scale[l] > 1 ? 1 - (domain[l] - 1.0) / (o.scale[l] - 1.0) : 1.0);
  std::printf("predicted us: EP %.0f, domains %.0f (AllGather %.0f, AlltoAll %.0f); %s, gain %.1f %%\n", a.before_us,
              a.after_us, a.all_gather_us, a.all_to_all_us, a.keep ? "keep EP" : "use domains", 100 * a.gain);
}

struct ChunkOptions {
  TraceOptions trace;
  double hidden_bytes = 16384, inter_gbs = 25, intra_gbs = 200, copy_gbs = 1600, start_us = 20;
  int tensor = 8, expert = 2;
};
void run_chunks(const ChunkOptions& o) {
  const int n_tokens = o.trace.path.empty() ? o.trace.tokens : load_trace(o.trace).n_tokens;
  moecclChunkProblem_t p = MOECCL_CHUNK_PROBLEM_INIT;
  p.bytes = static_cast<double>(n_tokens) * o.hidden_bytes;
  p.tensor = o.tensor;
  p.expert = o.expert;
  p.inter_bandwidth = o.inter_gbs * 1e9;
  p.intra_bandwidth = o.intra_gbs * 1e9;
  p.copy_bandwidth = o.copy_gbs * 1e9;
  p.start_us = o.start_us;
  moecclChunkAnswer_t a{};
  a.size = sizeof(a);
  check(moecclSolveChunks(&p, &a), kChunkNames);
  static const char* const names[] = {"AllToAll", "O1", "O2", "O3"};
  std::printf("I = %.1f MB (%d tokens), t = %d, e = %d\n", p.bytes / 1e6, n_tokens, o.tensor, o.expert);
  for (int s = 0; s < 4; ++s) std::printf("  %-8s %4d chunks  %10.1f us predicted\n", names[s], a.chunks[s], a.us[s]);
  std::printf("take %s with %d chunks: gain %.1f %%\n", names[a.strategy], a.n_chunks, 100 * a.gain);
}

struct LayoutOptions {
  moecclLayoutProblem_t p = MOECCL_LAYOUT_PROBLEM_INIT;
  TraceOptions trace;
  double gpu_gb = 80, intra_gbs = 200, inter_gbs = 25, dense_b = 1.6, moe_b = 45, tflops = 312;
  int rows = 10, recompute = 1;
};
void run_layout(LayoutOptions& o) {
  moecclLayoutProblem_t& p = o.p;
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
  check(moecclSolveLayout(&p, found.data(), o.rows, &n), kLayoutNames);
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
    check(moecclPriceLayout(&p, &v, &cost), kLayoutNames);
    std::printf("%5d%5d%5d%5d%5d  %-10s %12.1f %15.1f %17.1f %9.1f %9.1f %7.1f\n", v.tensor, v.expert, v.context,
                v.pipeline, v.data, v.vertical ? "vertical" : "horizontal", v.weight_bytes / 1e9,
                v.activation_bytes / 1e9, v.comm_us / 1e3, 100 * cost.bubble, cost.step_us / 1e3, 100 * cost.mfu);
  }
}

}  // namespace

void add_cluster(perf::App& solve, std::function<void()>& chosen) {
  auto d = std::make_shared<DomainOptions>();
  perf::App* domains = solve.add_subcommand("domains", "where experts travel instead of tokens (HybridEP)");
  add_trace_options(*domains, d->trace, Reads::kRows);
  domains->add_option("--scale", d->scale, "sub-workers of each level, outermost first")
      ->delimiter(',')
      ->check(perf::positive());
  domains->add_option("--gbps", d->gbps, "Gbit/s of each level, per GPU")->delimiter(',')->check(perf::positive());
  domains->add_option("--hidden-bytes", d->hidden_bytes, "bytes of a row")->check(perf::positive());
  domains->add_option("--expert-mb", d->expert_mb, "MB of a GPU's experts")->check(perf::positive());
  domains->add_option("--pre-ms", d->pre_ms, "computation before the experts, ms")->check(perf::not_negative());
  domains->add_option("--compression", d->compression, "ratio by which experts are compressed")
      ->check(perf::not_negative());
  domains->callback([d, &chosen] { chosen = [d] { run_domains(*d); }; });

  auto c = std::make_shared<ChunkOptions>();
  perf::App* chunks = solve.add_subcommand("chunks", "how many pipeline chunks, and which strategy (MoNTA)");
  add_trace_options(*chunks, c->trace, Reads::kTokens);
  chunks->add_option("--hidden-bytes", c->hidden_bytes, "bytes of a row")->check(perf::positive());
  chunks->add_option("--tensor", c->tensor, "tensor parallel degree")->check(perf::positive());
  chunks->add_option("--expert", c->expert, "expert parallel degree")->check(perf::positive());
  chunks->add_option("--inter-gbs", c->inter_gbs, "GB/s between nodes")->check(perf::positive());
  chunks->add_option("--intra-gbs", c->intra_gbs, "GB/s within a node")->check(perf::positive());
  chunks->add_option("--copy-gbs", c->copy_gbs, "GB/s of a device's memory")->check(perf::positive());
  chunks->add_option("--start-us", c->start_us, "fixed cost of a communication")->check(perf::not_negative());
  chunks->callback([c, &chosen] { chosen = [c] { run_chunks(*c); }; });

  auto l = std::make_shared<LayoutOptions>();
  moecclLayoutProblem_t& p = l->p;
  p.n_gpus = 64, p.gpus_per_node = 8, p.n_layers = 32, p.n_heads = 32, p.n_experts = 8, p.top_k = 2, p.hidden = 4096;
  p.sequence = 8192, p.global_batch = 256, p.zero_stage = 1, p.sequence_parallel = 1;
  perf::App* layout = solve.add_subcommand("layout", "parallel degrees that fit, by the time of a step (MoNTA)");
  perf::Option* const trace =
      layout->add_option("--trace", l->trace.path, "take experts and top-k from this routing trace");
  layout->add_option("--gpus", p.n_gpus, "GPUs")->check(perf::positive());
  layout->add_option("--gpus-per-node", p.gpus_per_node, "GPUs of a node")->check(perf::positive());
  layout->add_option("--gpu-gb", l->gpu_gb, "memory of a GPU")->check(perf::positive());
  layout->add_option("--intra-gbs", l->intra_gbs, "GB/s within a node")->check(perf::positive());
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
  layout->callback([l, &chosen] { chosen = [l] { run_layout(*l); }; });
}

}  // namespace tools
