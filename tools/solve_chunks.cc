// SPDX-License-Identifier: Apache-2.0
// `moeccl solve chunks`: MoNTA's strategies and numbers of chunks.
#include <algorithm>
#include <cstdio>

#include "perf/solve/monta.h"
#include "tools/cluster.h"
#include "tools/solve.h"

namespace tools {
namespace {

const OptionNames kNames = {{"bytes", "--hidden-bytes"},
                            {"tensor", "--tensor"},
                            {"expert", "--expert"},
                            {"inter_bandwidth", "--inter-gbs"},
                            {"intra_bandwidth", "--intra-gbs"},
                            {"copy_bandwidth", "--copy-gbs"},
                            {"start_us", "--start-us"},
                            {"inter", "--r1"},
                            {"intra", "--r2"},
                            {"copy", "--r3"},
                            {"o3", "--o3-r2"}};

// Efficiencies at volumes, as points MB:EFFICIENCY.
struct CurveOption {
  std::vector<std::string> points;
  std::vector<double> bytes, efficiency;
  perf::Option* add(perf::App& app, const std::string& name, const std::string& help) {
    const auto check = [](const std::string& text) -> std::string {
      double mb = 0, share = 0;
      char end = 0;
      const bool read = std::sscanf(text.c_str(), "%lf:%lf%c", &mb, &share, &end) == 2;
      return read && mb > 0 && share > 0 && share <= 1 ? "" : "\"" + text + "\" is not MB:EFFICIENCY, such as 32:0.63";
    };
    return app.add_option(name, points, help + ", as points MB:EFFICIENCY that ascend, such as 8:0.43,32:0.63")
        ->delimiter(',')
        ->check(check)
        ->default_str("");
  }
  moecclCurve_t curve() {
    for (const std::string& point : points) {
      const size_t colon = point.find(':');
      bytes.push_back(std::stod(point.substr(0, colon)) * 1e6);
      efficiency.push_back(std::stod(point.substr(colon + 1)));
    }
    return {static_cast<int32_t>(bytes.size()), bytes.data(), efficiency.data()};
  }
};

struct Options {
  TraceOptions trace;
  Cluster cluster;
  double hidden_bytes = 16384, inter_gbs = 25, intra_gbs = 200, copy_gbs = 1600, start_us = 20, chunk_us = 0;
  CurveOption r1, r2, r3, o3_r2;
  int tensor = 8, expert = 2;
  bool monta = false;
  const perf::Option *tensor_given = nullptr, *expert_given = nullptr, *inter_given = nullptr, *intra_given = nullptr;
  const perf::Option *copy_given = nullptr, *start_given = nullptr;
};

void read_cluster(Options& o) {
  Cluster& c = o.cluster;
  if (!c.given()) return;
  c.read();
  fill(o.expert_given, o.expert, [&] { return c.nodes(); });
  fill(o.tensor_given, o.tensor, [&] { return c.n_ranks() / c.nodes(); });
  fill(o.inter_given, o.inter_gbs, [&] { return c.between_gbs(o.inter_gbs); });
  fill(o.intra_given, o.intra_gbs, [&] { return c.inside_gbs(); });
  fill(o.start_given, o.start_us, [&] { return std::max(c.between_alpha_us(), c.inside_alpha_us()); });
  if (const double copy = c.machine("copy_bytes_per_ns"); copy > 0)
    fill(o.copy_given, o.copy_gbs, [&] { return copy; });
  std::printf("%s", c.text({{"--inter-gbs", o.inter_given}, {"--intra-gbs", o.intra_given}}).c_str());
}

void run(Options& o) {
  const int n_tokens = o.trace.path.empty() ? o.trace.tokens : load_trace(o.trace).n_tokens;
  const perf::monta::A800 paper;
  moecclChunkProblem_t p = MOECCL_CHUNK_PROBLEM_INIT;
  if (o.monta) {
    p = paper.problem(n_tokens);
  } else {
    read_cluster(o);
    p.bytes = static_cast<double>(n_tokens) * o.hidden_bytes;
    p.tensor = o.tensor;
    p.expert = o.expert;
    p.inter_bandwidth = o.inter_gbs * 1e9;
    p.intra_bandwidth = o.intra_gbs * 1e9;
    p.copy_bandwidth = o.copy_gbs * 1e9;
    p.start_us = o.start_us;
    p.inter = o.r1.curve(), p.intra = o.r2.curve(), p.copy = o.r3.curve();
    p.o3.intra = o.o3_r2.curve();
    p.o2.chunk_us = p.o3.chunk_us = o.chunk_us;
  }
  moecclChunkAnswer_t a{};
  a.size = sizeof(a);
  check(moecclSolveChunks(&p, &a), kNames);
  static const char* const names[] = {"AllToAll", "O1", "O2", "O3"};
  std::printf("I = %.1f MB (%d tokens), t = %d, e = %d, B1 = %.4g, B2 = %.4g, B3 = %.4g GB/s\n", p.bytes / 1e6,
              n_tokens, p.tensor, p.expert, p.inter_bandwidth / 1e9, p.intra_bandwidth / 1e9, p.copy_bandwidth / 1e9);
  for (int s = 0; s < 4; ++s) std::printf("  %-8s %4d chunks  %10.1f us predicted\n", names[s], a.chunks[s], a.us[s]);
  std::printf("take %s with %d chunk%s: gain %.1f %%\n", names[a.strategy], a.n_chunks, a.n_chunks == 1 ? "" : "s",
              100 * a.gain);
  if (p.o3.intra.n_points == 0)
    std::printf("without --o3-r2, which says how far the copy slows O3's AllGather down, O3 is never slower than O2\n");
}

}  // namespace

void add_chunks(perf::App& solve, std::function<void()>& chosen) {
  auto c = std::make_shared<Options>();
  perf::App* chunks = solve.add_subcommand("chunks", "how many pipeline chunks, and which strategy (MoNTA)");
  add_trace_options(*chunks, c->trace, Reads::kTokens);
  c->cluster.add_options(*chunks);
  perf::Option* const tensor =
      chunks->add_option("--tensor", c->tensor, "tensor parallel degree")->check(perf::positive());
  perf::Option* const expert =
      chunks->add_option("--expert", c->expert, "expert parallel degree")->check(perf::positive());
  perf::Option* const inter =
      chunks->add_option("--inter-gbs", c->inter_gbs, "GB/s between nodes, per GPU")->check(perf::positive());
  perf::Option* const intra =
      chunks->add_option("--intra-gbs", c->intra_gbs, "GB/s within a node, per GPU")->check(perf::positive());
  perf::Option* const copy =
      chunks->add_option("--copy-gbs", c->copy_gbs, "GB/s of a device's memory")->check(perf::positive());
  perf::Option* const start =
      chunks->add_option("--start-us", c->start_us, "fixed cost of a communication")->check(perf::not_negative());
  c->tensor_given = tensor, c->expert_given = expert, c->inter_given = inter, c->intra_given = intra;
  c->copy_given = copy, c->start_given = start;
  perf::Option* const monta = chunks->add_flag(
      "--monta", c->monta,
      "MoNTA's cluster: 2 nodes of 8 A800, its efficiencies and chunks, and the contention that fits its choices");
  c->cluster.excludes(monta);
  for (perf::Option* figure :
       {tensor, expert, inter, intra, copy, start,
        chunks->add_option("--hidden-bytes", c->hidden_bytes, "bytes of a row")->check(perf::positive()),
        c->r1.add(*chunks, "--r1", "efficiency between nodes"), c->r2.add(*chunks, "--r2", "efficiency within a node"),
        c->r3.add(*chunks, "--r3", "efficiency of copies"),
        c->o3_r2.add(*chunks, "--o3-r2", "efficiency within a node while O3 copies"),
        chunks->add_option("--chunk-us", c->chunk_us, "fixed cost of each chunk of O2 and O3, us")
            ->check(perf::not_negative())})
    monta->excludes(figure);
  chunks->callback([c, &chosen] { chosen = [c] { run(*c); }; });
}

}  // namespace tools
