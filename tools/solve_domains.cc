// SPDX-License-Identifier: Apache-2.0
// `moeccl solve domains`: HybridEP's expert domains.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/cluster.h"
#include "tools/solve.h"
#include "tools/waiting.h"

namespace tools {
namespace {

const OptionNames kNames = {{"n_levels", "the number of --scale levels"},
                            {"scale", "--scale"},
                            {"bandwidth", "--gbps"},
                            {"data_bytes", "--hidden-bytes"},
                            {"expert_bytes", "--expert-mb"},
                            {"pre_expert_s", "--pre-ms"},
                            {"compression", "--compression"},
                            {"top_k", "--topk"},
                            {"n_experts", "--experts"},
                            {"latency_s", "--lat-us"},
                            {"expert_s", "--expert-ms"},
                            {"backward_s", "--backward-ms"},
                            {"encode_bandwidth", "--codec-gbs"},
                            {"decode_bandwidth", "--codec-gbs"},
                            {"gradient_ratio", "--gradient-ratio"}};

struct Options {
  TraceOptions trace;
  Cluster cluster;
  std::vector<int32_t> scale = {4, 8};
  std::vector<double> gbps = {10, 128}, lat_us;
  // An H200's kernels on one expert of 32 MiB (docs/gpu-results.md, bench.codec-encode).
  std::vector<double> codec_gbs = {26, 264};
  double hidden_bytes = 8192, expert_mb = 8, pre_ms = 5, compression = 1, expert_ms = 0, backward_ms = 0;
  double gradient_ratio = 1;
  bool forward_only = false;
  const perf::Option *gbps_given = nullptr, *lat_given = nullptr, *codec_given = nullptr;
};

constexpr double kNotCrossed = 1;  // Gbit/s of a level that no data crosses; the solver wants a figure

void read_cluster(Options& o) {
  Cluster& c = o.cluster;
  if (!c.given()) return;
  c.read();
  std::vector<double> gbps, lat_us;
  o.scale.clear();
  for (size_t l = 0; l < c.depth(); ++l) {
    o.scale.push_back(c.scale(l));
    if (o.gbps_given->empty()) gbps.push_back(c.crossed(l) ? c.gbs(l) * 8 : kNotCrossed);
    lat_us.push_back(c.alpha_us(l));
  }
  fill(o.gbps_given, o.gbps, [&] { return gbps; });
  // The paper's model has no latency.
  if (!o.forward_only) fill(o.lat_given, o.lat_us, [&] { return lat_us; });
  const double encode = c.machine("encode_bytes_per_ns"), decode = c.machine("decode_bytes_per_ns");
  if (encode > 0 && decode > 0) fill(o.codec_given, o.codec_gbs, [&] { return std::vector{encode, decode}; });
  fmt::print("{}", c.text({{"--gbps", o.gbps_given}, {"--lat-us", o.lat_given}}));
}

void run(Options& o) {
  read_cluster(o);
  if (o.scale.size() != o.gbps.size()) fail("--gbps: give as many bandwidths as --scale has levels");
  if (!o.lat_us.empty() && o.lat_us.size() != o.scale.size())
    fail("--lat-us: give as many latencies as --scale has levels");
  if (o.codec_gbs.size() != 2) fail("--codec-gbs: give two rates, for encoding and decoding");
  double gpus = 1;
  for (const int32_t s : o.scale) gpus *= s;
  const perf::Trace t = load_trace(o.trace);
  size_t rows = 0;
  for (const int32_t e : step_of(t, o.trace.layer, o.trace.step)) rows += e >= 0;
  std::vector<double> bandwidth, latency;
  for (const double g : o.gbps) bandwidth.push_back(g * 1e9 / 8);
  for (const double us : o.lat_us) latency.push_back(us * 1e-6);
  moecclDomainProblem_t p = MOECCL_DOMAIN_PROBLEM_INIT;
  p.n_levels = static_cast<int32_t>(o.scale.size());
  p.scale = o.scale.data();
  p.bandwidth = bandwidth.data();
  p.data_bytes = static_cast<double>(rows) * o.hidden_bytes / gpus;
  p.expert_bytes = o.expert_mb * 1e6;
  p.pre_expert_s = o.pre_ms * 1e-3;
  p.compression = o.compression;
  if (!o.forward_only) {
    p.top_k = t.k;
    p.n_experts = t.n_experts;
    p.latency_s = latency.empty() ? nullptr : latency.data();
    p.expert_s = o.expert_ms * 1e-3;
    p.backward_s = o.backward_ms * 1e-3;
    p.encode_bandwidth = o.codec_gbs[0] * 1e9;
    p.decode_bandwidth = o.codec_gbs[1] * 1e9;
    p.gradient_ratio = o.gradient_ratio;
  }
  std::vector<int32_t> domain(o.scale.size());
  moecclDomainAnswer_t a{};
  a.size = sizeof(a);
  check(watched("solve domains", [&] { return moecclSolveDomains(&p, domain.data(), &a); }), kNames);
  fmt::print("{:.0f} GPUs, {:.2f} MB of rows each way per GPU, experts {:.2f} MB / {:.3g}\n", gpus, p.data_bytes / 1e6,
             o.expert_mb, o.compression);
  for (size_t l = 0; l < domain.size(); ++l)
    fmt::print("level {}: domains of {} of {} workers, p = {:.3f}\n", l, domain[l], o.scale[l],
               o.scale[l] > 1 ? 1 - (domain[l] - 1.0) / (o.scale[l] - 1.0) : 1.0);
  if (o.forward_only) {
    fmt::print(
        "predicted us of a forward pass (Eq. 8): EP {:.0f}, domains {:.0f} (AllGather {:.0f}, AlltoAll {:.0f})\n",
        a.before_us, a.after_us, a.all_gather_us, a.all_to_all_us);
  } else {
    fmt::print("predicted us of a step, top-{} of {} experts: EP {:.0f}, domains {:.0f}\n", t.k, t.n_experts,
               a.before_us, a.after_us);
    fmt::print(
        "  forward: AllGather {:.0f}, AlltoAll {:.0f}, codec {:.0f}; backward: AlltoAll {:.0f}, return of the "
        "gradients {:.0f}\n",
        a.all_gather_us, a.all_to_all_us, a.codec_us, a.backward_us, a.return_us);
  }
  fmt::print("{}, gain {:.1f} %\n", a.keep ? "keep EP" : fmt::format("use domains {}", fmt::join(domain, "x")),
             100 * a.gain);
}

}  // namespace

void add_domains(perf::App& solve, std::function<void()>& chosen) {
  auto o = std::make_shared<Options>();
  perf::App* app = solve.add_subcommand("domains", "where experts travel instead of tokens (HybridEP)");
  add_trace_options(*app, o->trace, Reads::kRows);
  o->cluster.add_options(*app);
  perf::Option* const scale = app->add_option("--scale", o->scale, "sub-workers of each level, outermost first")
                                  ->delimiter(',')
                                  ->check(perf::positive());
  o->cluster.excludes(scale);
  o->gbps_given =
      app->add_option("--gbps", o->gbps, "Gbit/s of each level, per GPU")->delimiter(',')->check(perf::positive());
  app->add_option("--hidden-bytes", o->hidden_bytes, "bytes of a row")->check(perf::positive());
  app->add_option("--expert-mb", o->expert_mb, "MB of a GPU's experts")->check(perf::positive());
  app->add_option("--pre-ms", o->pre_ms, "computation before the experts, ms")->check(perf::not_negative());
  app->add_option("--compression", o->compression, "ratio by which experts are compressed")
      ->check(perf::not_negative());
  perf::Option* const lat = app->add_option("--lat-us", o->lat_us, "us one way of each level (default: 0)")
                                ->delimiter(',')
                                ->check(perf::not_negative())
                                ->default_str("");
  perf::Option* const codec = app->add_option("--codec-gbs", o->codec_gbs,
                                              "GB/s at which a GPU encodes and decodes experts and gradients where "
                                              "they are compressed; 0: takes no time")
                                  ->delimiter(',')
                                  ->check(perf::not_negative());
  o->lat_given = lat, o->codec_given = codec;
  perf::Option* const step[] = {
      lat, codec,
      app->add_option("--expert-ms", o->expert_ms, "computation of a GPU's experts, forward, ms")
          ->check(perf::not_negative()),
      app->add_option("--backward-ms", o->backward_ms,
                      "computation that hides the return of the gradients, ms; 0: twice --pre-ms")
          ->check(perf::not_negative()),
      app->add_option("--gradient-ratio", o->gradient_ratio, "ratio by which gradients are compressed")
          ->check(perf::not_negative())};
  perf::Option* const forward =
      app->add_flag("--forward-only", o->forward_only,
                    "the paper's model, Eq. 8: the forward pass alone, in which every row travels by itself");
  for (perf::Option* option : step) forward->excludes(option);
  app->callback([o, &chosen] { chosen = [o] { run(*o); }; });
}

}  // namespace tools
