// SPDX-License-Identifier: Apache-2.0
// `moeccl solve sample`: NetMoE's sample placement.
#include <chrono>

#include "tools/cluster.h"
#include "tools/solve.h"
#include "tools/waiting.h"

namespace tools {
namespace {

const OptionNames kNames = {{"n_experts", "--experts"},
                            {"n_devices", "--devices"},
                            {"n_nodes", "--nodes"},
                            {"n_samples", "the number of samples (--tokens / --sample-tokens)"},
                            {"alpha_intra_us", "--intra-us"},
                            {"alpha_inter_us", "--inter-us"},
                            {"beta_intra_us", "--row-bytes / --intra-gbs"},
                            {"beta_inter_us", "--row-bytes / --inter-gbs"},
                            {"min_gain", "--min-gain"}};

struct Options {
  TraceOptions trace;
  Cluster cluster;
  int sample_tokens = 64, devices = 16, nodes = 2;
  double row_bytes = 4096, intra_gbs = 400, inter_gbs = 100, intra_us = 0, inter_us = 0, min_gain = 0;
  bool predict = false;
  const perf::Option *intra_gbs_given = nullptr, *inter_gbs_given = nullptr;
  const perf::Option *intra_us_given = nullptr, *inter_us_given = nullptr;
};

// The cluster's levels between nodes and devices.
struct Inner {
  std::vector<int32_t> group;
  std::vector<double> alpha_us, beta_us;
};

Inner read_cluster(Options& o) {
  Cluster& c = o.cluster;
  Inner inner;
  if (!c.given()) return inner;
  c.read();
  o.devices = c.n_ranks();
  o.nodes = c.groups(0);
  // Devices of one group of the last inner level meet over the innermost one.
  const size_t last = c.depth() - 1;
  fill(o.inter_gbs_given, o.inter_gbs, [&] { return c.node_gbs(0); });
  fill(o.inter_us_given, o.inter_us, [&] { return c.alpha_us(0); });
  fill(o.intra_gbs_given, o.intra_gbs, [&] { return c.node_gbs(last); });
  fill(o.intra_us_given, o.intra_us, [&] { return c.alpha_us(last); });
  for (size_t l = 1; l < last; ++l) {
    const int32_t devices_per_group = c.n_ranks() / c.groups(l);
    for (int32_t d = 0; d < c.n_ranks(); ++d) inner.group.push_back(d / devices_per_group);
    inner.alpha_us.push_back(c.alpha_us(l));
    inner.beta_us.push_back(o.row_bytes / c.node_gbs(l) * 1e-3);
  }
  std::printf("%s", c.text().c_str());
  return inner;
}

// Returns num[I][E] of whole samples.
std::vector<int32_t> count(const std::vector<int32_t>& topk, const perf::Trace& t, int sample_tokens, int n_samples) {
  const auto experts = static_cast<size_t>(t.n_experts);
  const size_t per_sample = static_cast<size_t>(sample_tokens) * static_cast<size_t>(t.k);
  std::vector<int32_t> num(static_cast<size_t>(n_samples) * experts);
  for (size_t at = 0; at < static_cast<size_t>(n_samples) * per_sample; ++at)
    if (topk[at] >= 0) ++num[at / per_sample * experts + static_cast<size_t>(topk[at])];
  return num;
}

void run(Options& o) {
  if (o.predict && o.trace.step == 0) fail("--predict needs --step 1 or more: it predicts from the steps before");
  const Inner inner = read_cluster(o);
  const perf::Trace t = load_trace(o.trace);
  moecclSampleProblem_t p = MOECCL_SAMPLE_PROBLEM_INIT;
  p.n_samples = t.n_tokens / o.sample_tokens;
  if (p.n_samples == 0)
    fail("--sample-tokens " + std::to_string(o.sample_tokens) + ": the trace has fewer tokens in a step");
  p.n_experts = t.n_experts;
  p.n_devices = o.devices;
  p.n_nodes = o.nodes;
  p.beta_intra_us = o.row_bytes / o.intra_gbs * 1e-3;
  p.beta_inter_us = o.row_bytes / o.inter_gbs * 1e-3;
  p.alpha_intra_us = o.intra_us;
  p.alpha_inter_us = o.inter_us;
  p.n_inner = static_cast<int32_t>(inner.alpha_us.size());
  p.inner_group = inner.group.data();
  p.inner_alpha_us = inner.alpha_us.data();
  p.inner_beta_us = inner.beta_us.data();
  p.min_gain = o.min_gain;
  const std::vector<int32_t> now = step_of(t, o.trace.layer, o.trace.step);
  const std::vector<int32_t> gather = count(now, t, o.sample_tokens, p.n_samples);
  std::vector<int32_t> scatter;
  const bool has_next = o.trace.layer + 1 < t.n_layers;
  if (o.predict && !has_next)
    fail("--predict: layer " + std::to_string(o.trace.layer) + " is the last one of the trace, and prediction is of " +
         "the next: give a smaller --layer");
  if (o.predict) {
    const auto experts = static_cast<size_t>(t.n_experts);
    std::vector<double> joint(experts * experts);
    for (int s = 0; s < o.trace.step; ++s)
      check(moecclPredictorUpdate(joint.data(), t.n_experts, t.n_experts, 0.9, t.step(o.trace.layer, s),
                                  t.step(o.trace.layer + 1, s), t.n_tokens, t.k),
            kNames);
    scatter.resize(gather.size());
    check(moecclPredictorApply(joint.data(), t.n_experts, t.n_experts, gather.data(), p.n_samples, scatter.data()),
          kNames);
  } else if (has_next) {
    scatter = count(step_of(t, o.trace.layer + 1, o.trace.step), t, o.sample_tokens, p.n_samples);
  }
  p.num_gather = gather.data();
  p.num_scatter = scatter.empty() ? nullptr : scatter.data();
  std::vector<int32_t> placement(static_cast<size_t>(p.n_samples));
  moecclSampleAnswer_t a{};
  a.size = sizeof(a);
  const auto start = std::chrono::steady_clock::now();
  check(watched("solve sample", [&] { return moecclSolveSamples(&p, placement.data(), &a, nullptr, 0); }), kNames);
  const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  std::printf("samples %d of %d tokens, %d devices on %d nodes; gather of layer %d%s\n", p.n_samples, o.sample_tokens,
              o.devices, o.nodes, o.trace.layer,
              scatter.empty() ? ""
              : o.predict     ? ", scatter of the next predicted"
                              : ", scatter of the next");
  std::printf("                       before         after   change\n");
  const auto line = [](const char* name, double before, double after) {
    std::printf("%-16s %12.0f  %12.0f  %6.1f %%\n", name, before, after, change(before, after));
  };
  line("inter-node tokens", static_cast<double>(a.inter_before), static_cast<double>(a.inter_after));
  line("intra-node tokens", static_cast<double>(a.intra_before), static_cast<double>(a.intra_after));
  line("predicted us", a.before_us, a.after_us);
  std::printf("%s: best gain %.1f %%; %d samples move, %d to another node; solved in %.3f ms\n",
              a.keep ? "keep" : "place", 100 * a.gain, a.moved, a.moved_nodes, ms);
}

}  // namespace

void add_samples(perf::App& solve, std::function<void()>& chosen) {
  auto o = std::make_shared<Options>();
  perf::App* app = solve.add_subcommand("sample", "which device each sample goes to (NetMoE)");
  add_trace_options(*app, o->trace);
  app->add_option("--sample-tokens", o->sample_tokens, "consecutive tokens of a sample")->check(perf::positive());
  o->cluster.add_options(*app);
  o->cluster.excludes(app->add_option("--devices", o->devices, "devices")->check(perf::positive()));
  o->cluster.excludes(app->add_option("--nodes", o->nodes, "nodes")->check(perf::positive()));
  app->add_option("--row-bytes", o->row_bytes, "bytes of a token's row")->check(perf::positive());
  o->intra_gbs_given = app->add_option("--intra-gbs", o->intra_gbs, "GB/s within a node, of all its devices together")
                           ->check(perf::positive());
  o->inter_gbs_given =
      app->add_option("--inter-gbs", o->inter_gbs, "GB/s between nodes, of a whole node")->check(perf::positive());
  o->intra_us_given = app->add_option("--intra-us", o->intra_us, "latency within a node")->check(perf::not_negative());
  o->inter_us_given = app->add_option("--inter-us", o->inter_us, "latency between nodes")->check(perf::not_negative());
  app->add_option("--min-gain", o->min_gain, "least gain to move for (0: 0.05)")->check(perf::within(-1, 1));
  app->add_flag("--predict", o->predict, "predict the next layer from the steps before instead of reading it");
  app->callback([o, &chosen] { chosen = [o] { run(*o); }; });
}

}  // namespace tools
