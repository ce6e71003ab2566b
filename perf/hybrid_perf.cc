// SPDX-License-Identifier: Apache-2.0
// Measures hybrid placement (HybridEP): the messages of Table VII, the time of a step for each domain size compared
// with the solver's choice, and hybrid against the flat AlltoAll between data centres (Table V). All timed runs use
// paced links: EMULATED.
#include <moeccl/moeccl.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "perf/common/fail.h"
#include "perf/common/shared_options.h"
#include "perf/common/text.h"
#include "perf/hybrid/hybrid_bench.h"

namespace perf {
namespace {

using nlohmann::json;

struct HybridOptions {
  JobOptions job;
  std::string what = "sweep", output_file;
  std::vector<int32_t> levels, domain, top_k = {2, 4, 8};
  HybridShape shape;
  double pre_expert_us = 0;
  int iters = 5, warmup = 1;
  double scale = 64;
};

HybridOptions parse(int argc, char** argv) {
  HybridOptions o;
  o.job.threads = 0;
  App app(
      "Times a step of a MoE layer whose experts travel inside domains and whose tokens travel between them, "
      "after checking every row and every expert",
      "hybrid_perf");
  app.add_option(
         "--what", o.what,
         "sweep: all domain sizes of one topology (--levels); table7: counts messages at 8, 16 and 32 ranks (or "
         "--ranks); minimum: ten shapes, the best sizes of a step beside the solver's; datacentres: Table V")
      ->check(is_member({"sweep", "table7", "minimum", "datacentres"}))
      ->capture_default_str();
  app.add_option("--levels", o.levels, "sweep: groups in a group, level by level, as --topology has")
      ->delimiter(',')
      ->check(positive());
  app.add_option("--domain", o.domain, "sweep: these sizes alone")->delimiter(',');
  add_size(app, "-b,--data", o.shape.data_bytes, "tokens of a rank (bytes); D is K times that");
  add_size(app, "-x,--expert", o.shape.expert_bytes, "one expert (bytes)");
  add_size(app, "--row", o.shape.row_bytes, "one token's row (bytes of float)");
  app.add_option("--experts-per-rank", o.shape.experts_per_rank, "experts that a rank owns")->check(positive());
  app.add_option("--pre-expert", o.pre_expert_us, "computation before the experts (us); slept");
  app.add_option("-k,--topk", o.top_k, "minimum: experts of a token; sweep takes the first")
      ->delimiter(',')
      ->check(positive());
  app.add_flag("--forward-only", o.shape.forward_only, "no backward pass");
  app.add_option("-n,--iters", o.iters, "timed iterations")->check(positive())->capture_default_str();
  app.add_option("-w,--warmup_iters", o.warmup, "iterations before timing")->check(not_negative());
  app.add_option("--scale", o.scale, "datacentres: bytes and bandwidths are divided by this; times stay")
      ->check(positive())
      ->capture_default_str();
  add_output(app, "-J,--output_file", o.output_file, "write the figures as JSON");
  add_job_options(app, o.job, Memories::kNone);
  app.remove_option("--pace");  // always on
  parse_or_exit(app, argc, argv);
  if (o.shape.row_bytes < sizeof(float) || o.shape.row_bytes % sizeof(float) != 0)
    fail("--row is " + std::to_string(o.shape.row_bytes) + ": give a multiple of 4 bytes");
  o.shape.pre_expert_s = o.pre_expert_us / 1e6;
  return o;
}

std::string sizes_text(const std::vector<int32_t>& sizes) {
  std::string text;
  for (const int32_t s : sizes) text += (text.empty() ? "" : "x") + std::to_string(s);
  return text;
}

// Runs body on every rank of a new job and returns rank 0's value.
template <class T, class Body>
T on_ranks(JobOptions job_options, int n_ranks, const std::string& topology, Body&& body) {
  job_options.threads = n_ranks;
  job_options.topology = topology;
  job_options.pace = true;
  job_options.memory = Memory::kMalloc;
  Job job(job_options);
  return job.run<T>(true, [&](int, const Team& team) { return body(team); });
}

// ---- Table VII ----

constexpr uint64_t table7_tokens(uint64_t n, uint64_t size) { return n * (n / size - 1); }
constexpr uint64_t table7_gather(uint64_t n, uint64_t size) { return n * (size - 1); }
static_assert(table7_tokens(32, 4) == 224 && table7_gather(16, 8) == 112);  // two of the paper's numbers

uint64_t table7(const HybridOptions& o, json& out) {
  std::printf("# Messages of all ranks in real runs, beside Table VII of HybridEP\n# %6s %8s %10s %8s %10s %8s\n",
              "ranks", "domain", "AlltoAll", "paper", "AllGather", "paper");
  const std::vector<int> counts = o.job.threads > 0 ? std::vector<int>{o.job.threads} : std::vector<int>{8, 16, 32};
  uint64_t wrong = 0;
  for (const int n : counts) {
    const auto measured =
        on_ranks<std::vector<HybridBench::Messages>>(o.job, n, "gpu:" + std::to_string(n), [&](const Team& team) {
          HybridShape shape;
          shape.row_bytes = 64;
          shape.data_bytes = 64 * static_cast<size_t>(n);
          shape.expert_bytes = 512;
          HybridBench bench(team, shape);
          std::vector<HybridBench::Messages> all;
          for (int32_t size = 1; size <= n; size *= 2) all.push_back(bench.count({size}));
          return all;
        });
    for (size_t i = 0; i < measured.size(); i++) {
      const uint64_t size = uint64_t{1} << i, ranks = static_cast<uint64_t>(n);
      const uint64_t tokens = table7_tokens(ranks, size), gather = table7_gather(ranks, size);
      wrong += (measured[i].tokens != tokens) + (measured[i].gather != gather);
      std::printf("  %6d %8llu %10llu %8llu %10llu %8llu\n", n, static_cast<unsigned long long>(size),
                  static_cast<unsigned long long>(measured[i].tokens), static_cast<unsigned long long>(tokens),
                  static_cast<unsigned long long>(measured[i].gather), static_cast<unsigned long long>(gather));
      out.push_back({{"ranks", n},
                     {"domain", size},
                     {"all_to_all", measured[i].tokens},
                     {"all_gather", measured[i].gather},
                     {"paper_all_to_all", tokens},
                     {"paper_all_gather", gather}});
    }
  }
  std::printf("# %llu of the counts differ from the paper\n", static_cast<unsigned long long>(wrong));
  return wrong;
}

// ---- Iteration time over domain sizes ----

struct Case {
  std::string name, topology;
  std::vector<int32_t> levels;
  HybridShape shape;
};

struct Sweep {
  std::vector<HybridTime> times;
  size_t model = 0, measured = 0;  // index of each minimum
};

Sweep sweep(const HybridOptions& o, const Case& c, json& out) {
  int n = 1;
  for (const int32_t s : c.levels) n *= s;
  Sweep result;
  result.times = on_ranks<std::vector<HybridTime>>(o.job, n, c.topology, [&](const Team& team) {
    HybridBench bench(team, c.shape);
    std::vector<HybridChoice> choices;
    for (const auto& domain : o.domain.empty() ? domains_of(c.levels) : std::vector<std::vector<int32_t>>{o.domain})
      choices.push_back({domain});
    return bench.run(choices, o.iters, o.warmup);
  });
  const auto least = [&](double HybridTime::*field) {
    size_t best = 0;
    for (size_t i = 1; i < result.times.size(); i++)
      if (result.times[i].*field < result.times[best].*field) best = i;
    return best;
  };
  result.model = least(&HybridTime::model_us);
  result.measured = least(&HybridTime::measured_us);
  std::printf(
      "# %s: %s; K %d, tokens %zu B, %d experts of %zu B a rank, pre-expert %.1f ms\n"
      "# %10s %12s %12s %12s %12s %12s %8s\n",
      c.name.c_str(), c.topology.c_str(), c.shape.top_k, c.shape.data_bytes, c.shape.experts_per_rank,
      c.shape.expert_bytes, c.shape.pre_expert_s * 1e3, "domain", "model(ms)", "step(ms)", "gather(ms)", "tokens(ms)",
      "return(ms)", "#wrong");
  for (size_t i = 0; i < result.times.size(); i++) {
    const HybridTime& t = result.times[i];
    std::printf("  %10s %12.2f %12.2f %12.2f %12.2f %12.2f %8llu%s%s\n", sizes_text(t.domain).c_str(), t.model_us / 1e3,
                t.measured_us / 1e3, t.gather_us / 1e3, t.tokens_us / 1e3, t.return_us / 1e3,
                static_cast<unsigned long long>(t.wrong), i == result.model ? " solver's" : "",
                i == result.measured ? " best" : "");
    out.push_back({{"shape", c.name},
                   {"topology", c.topology},
                   {"top_k", c.shape.top_k},
                   {"domain", t.domain},
                   {"model_us", t.model_us},
                   {"measured_us", t.measured_us},
                   {"gather_us", t.gather_us},
                   {"tokens_us", t.tokens_us},
                   {"return_us", t.return_us},
                   {"wrong", t.wrong},
                   {"model_minimum", i == result.model},
                   {"measured_minimum", i == result.measured}});
  }
  std::fflush(stdout);
  return result;
}

// From experts that are small compared with the tokens to experts that are not worth moving, on one level and on two,
// with latencies of a line between data centres. Bandwidths are so low that the threads' own work is small compared
// with the links.
std::vector<Case> ten_shapes() {
  const auto shape = [](const char* name, const char* topology, std::vector<int32_t> sizes, size_t token_kib,
                        size_t expert_kib, double pre_s) {
    HybridShape s;
    s.row_bytes = 1024;
    s.data_bytes = token_kib << 10;
    s.expert_bytes = expert_kib << 10;
    s.experts_per_rank = 2;
    s.pre_expert_s = pre_s;
    return Case{name, topology, std::move(sizes), s};
  };
  const char* const one = "gpu:8(bw=4MB/s)";
  return {shape("experts of a tenth", one, {8}, 256, 24, 0.012),
          shape("experts of a third", one, {8}, 256, 96, 0.012),
          shape("experts as large as the tokens", one, {8}, 256, 256, 0.012),
          shape("experts too large", one, {8}, 128, 512, 0),
          shape("hidden by computation", one, {8}, 256, 256, 0.3),
          shape("two data centres", "dc:2(bw=4MB/s,lat=10ms) gpu:4(bw=40MB/s,lat=100us)", {2, 4}, 256, 64, 0.012),
          shape("four data centres", "dc:4(bw=2MB/s,lat=20ms) gpu:2(bw=20MB/s,lat=100us)", {4, 2}, 128, 48, 0.012),
          shape("large experts, two data centres", "dc:2(bw=8MB/s,lat=10ms) gpu:4(bw=16MB/s,lat=100us)", {2, 4}, 128,
                256, 0),
          shape("long line", "dc:2(bw=12MB/s,lat=100ms) gpu:4(bw=16MB/s)", {2, 4}, 128, 64, 0.05),
          shape("sixteen ranks", "gpu:16(bw=3MB/s)", {16}, 64, 16, 0.006)};
}

uint64_t minimum(const HybridOptions& o, json& out) {
  uint64_t wrong = 0;
  for (const int32_t k : o.top_k) {
    int agree = 0, within = 0, slower = 0, n = 0;
    for (Case c : ten_shapes()) {
      c.shape.top_k = k;
      const Sweep s = sweep(o, c, out);
      for (const HybridTime& t : s.times) wrong += t.wrong;
      const double solver = s.times[s.model].measured_us, plain = s.times[0].measured_us;
      agree += s.model == s.measured;
      within += solver <= 1.05 * s.times[s.measured].measured_us;
      slower += solver > plain;
      n++;
    }
    std::printf(
        "# K %d: the solver's sizes are the best measured ones in %d of %d shapes, within 5 %% of the best in %d, "
        "slower "
        "than plain expert parallelism in %d (EMULATED)\n",
        k, agree, n, within, slower);
  }
  return wrong;
}

// ---- Table V ----

// compute_s is the computation of one layer and direction: the paper's time of HybridEP at 6 MB, where communication
// hardly counts, divided by layers and two directions (Cluster-M 2.48 s in 12 layers, Cluster-L 3.49 s in 16).
struct Cluster {
  const char* name;
  int dcs;
  double compute_s;
  double paper_speedup[6];
};
constexpr Cluster kClusters[] = {{"M", 2, 2.48 / 24, {1.03, 1.64, 2.15, 2.75, 4.22, 5.47}},
                                 {"L", 4, 3.49 / 32, {1.09, 2.10, 3.08, 3.59, 4.49, 5.60}}};
constexpr int kDataMb[] = {6, 12, 24, 48, 96, 192};
constexpr double kExpertBytes = 0.36e6;
constexpr int kExperts = 32, kGpusPerDc = 8;

std::string bandwidth_text(double bytes_per_s) { return std::to_string(static_cast<long>(bytes_per_s / 1e3)) + "KB/s"; }

uint64_t datacentres(const HybridOptions& o, json& out) {
  uint64_t wrong = 0;
  for (const Cluster& cluster : kClusters) {
    const std::string topology = "dc:" + std::to_string(cluster.dcs) + "(bw=" + bandwidth_text(1.25e9 / o.scale) +
                                 ",lat=50us) gpu:" + std::to_string(kGpusPerDc) +
                                 "(bw=" + bandwidth_text(16e9 / o.scale) + ")";
    std::printf(
        "# Cluster-%s of Table V, EMULATED: %d data centres x %d ranks, 10 Gbit/s between data centres, 128 Gbit/s to "
        "a "
        "rank, all bytes and bandwidths divided by %g; experts as they are, no codec; computation %.1f ms a layer and "
        "direction\n# %8s %12s %12s %12s %12s %10s %10s %8s\n",
        cluster.name, cluster.dcs, kGpusPerDc, o.scale, cluster.compute_s * 1e3, "D(MB)", "flat(ms)", "hybrid(ms)",
        "model(ms)", "domain", "speed-up", "paper", "#wrong");
    for (size_t d = 0; d < std::size(kDataMb); d++) {
      const int n = cluster.dcs * kGpusPerDc;
      struct Pair {
        HybridTime flat, hybrid;
      };
      const Pair pair = on_ranks<Pair>(o.job, n, topology, [&](const Team& team) {
        HybridShape shape;
        shape.row_bytes = 1024;
        shape.data_bytes = static_cast<size_t>(kDataMb[d] * 1e6 / o.scale);
        shape.experts_per_rank = std::max(1, kExperts / n);
        shape.expert_bytes = static_cast<size_t>(kExpertBytes / o.scale);
        shape.pre_expert_s = cluster.compute_s;
        shape.forward_only = o.shape.forward_only;
        HybridBench bench(team, shape);
        const std::vector<HybridTime> both = bench.run({{{1, 1}, "flat"}, {}}, o.iters, o.warmup);
        return Pair{both[0], both[1]};
      });
      wrong += pair.flat.wrong + pair.hybrid.wrong;
      const double speedup = pair.flat.measured_us / pair.hybrid.measured_us;
      std::printf("  %8d %12.1f %12.1f %12.1f %12s %10.2f %10.2f %8llu\n", kDataMb[d], pair.flat.measured_us / 1e3,
                  pair.hybrid.measured_us / 1e3, pair.hybrid.model_us / 1e3, sizes_text(pair.hybrid.domain).c_str(),
                  speedup, cluster.paper_speedup[d],
                  static_cast<unsigned long long>(pair.flat.wrong + pair.hybrid.wrong));
      std::fflush(stdout);
      out.push_back({{"cluster", cluster.name},
                     {"data_mb", kDataMb[d]},
                     {"flat_us", pair.flat.measured_us},
                     {"hybrid_us", pair.hybrid.measured_us},
                     {"model_us", pair.hybrid.model_us},
                     {"domain", pair.hybrid.domain},
                     {"speedup", speedup},
                     {"paper_speedup", cluster.paper_speedup[d]}});
    }
  }
  return wrong;
}

int hybrid_main(int argc, char** argv) {
  const HybridOptions o = parse(argc, argv);
  json results = json::array();
  uint64_t wrong = 0;
  if (o.what == "table7") wrong = table7(o, results);
  if (o.what == "minimum") wrong = minimum(o, results);
  if (o.what == "datacentres") wrong = datacentres(o, results);
  if (o.what == "sweep") {
    if (o.levels.empty() || o.job.topology.empty())
      fail("give --topology and --levels, such as --topology 'dc:2(bw=20MB/s) gpu:4(bw=1GB/s)' --levels 2,4");
    int n = 1;
    for (const int32_t size : o.levels) n *= size;
    if (o.job.threads > 0 && o.job.threads != n)
      fail("--ranks is " + std::to_string(o.job.threads) + ", and --levels has " +
           counted(static_cast<size_t>(n), "rank") + ": leave --ranks out");
    HybridShape shape = o.shape;
    shape.top_k = o.top_k.front();
    const Sweep s = sweep(o, {"sweep", o.job.topology, o.levels, shape}, results);
    for (const HybridTime& t : s.times) wrong += t.wrong;
  }
  const json page = {{"version", 1}, {"what", o.what}, {"emulated", true}, {"wrong", wrong}, {"results", results}};
  write_or_fail({{o.output_file, page.dump(1) + "\n"}});
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace perf

int main(int argc, char** argv) { return perf::hybrid_main(argc, argv); }
