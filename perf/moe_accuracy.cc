// SPDX-License-Identifier: Apache-2.0
// Measures how well `auto` chooses among the plans of a MoE layer, on a grid of paced trees, so that all is EMULATED.
// At each point every forced plan, `auto`, and flat a second time run in alternating rounds, and the median of the
// slowest rank counts. The exit status is 0 when the limits hold, 1 when one does not, and 2 when a point could not be
// measured. See --help and docs/performance.md.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "perf/common/fail.h"
#include "perf/common/shared_options.h"
#include "perf/common/stats.h"
#include "perf/common/text.h"
#include "perf/moe/accuracy.h"
#include "perf/moe/moe_bench.h"

namespace perf {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kRounds = 7, kMostRounds = 60;
constexpr double kPointUs = 2e6;    // there are as many rounds as this allows, within the two limits above
constexpr double kDoubtful = 1.05;  // a point where auto loses this much is measured again
constexpr const char* kM1 = "node:2(bw=10GB/s,lat=2ms) qpi:2(bw=10GB/s,lat=2ms) gpu:2(bw=10GB/s,lat=2ms)";

struct Options {
  std::vector<size_t> tokens = {4, 64, 512};
  std::vector<std::string> latencies = {"5us", "100us", "2ms"}, routings = {"uniform", "zipf:1"};
  std::vector<int> levels = {2, 3, 4};
  std::string links, json_file, plot_file;
  bool quick = false, list = false, report_only = false;
  int timed_again = 2;
  size_t scale = 32;  // --links: one token stands for this many
};

Options parse(int argc, char** argv) {
  Options o;
  App app("Compares the plan that `auto` chooses for a MoE layer with every forced plan, on paced (EMULATED) trees",
          "moe_accuracy");
  app.add_flag("--quick", o.quick, "a grid of about a minute");
  auto* tokens = app.add_option("--tokens", o.tokens, "tokens of a rank")->delimiter(',')->capture_default_str();
  auto* latencies = app.add_option("--latency", o.latencies, "of every level")->delimiter(',')->capture_default_str();
  auto* routings =
      app.add_option("--routing", o.routings, "uniform, zipf:EXPONENT")->delimiter(',')->capture_default_str();
  auto* levels = app.add_option("--levels", o.levels, "of the tree; four have 16 ranks, others 8")
                     ->delimiter(',')
                     ->check(range(2, 4))
                     ->capture_default_str();
  app.add_option("--links", o.links,
                 "Table IV's shapes on the links of this profile (docs/profiles/hiermoe-a6000.json)")
      ->check(existing_file());
  app.add_option(
         "--scale", o.scale,
         "with --links: tokens and rates are divided by this, latencies are not; links then take what they take at "
         "full size, and the copying that a GPU would do disturbs less")
      ->check(positive())
      ->capture_default_str();
  app.add_option("--again", o.timed_again, "times that a point is measured again when auto loses there")
      ->check(not_negative())
      ->capture_default_str();
  add_output(app, "-J,--output_file", o.json_file, "write results as JSON");
  add_output(app, "--plot", o.plot_file, "draw them (SVG)");
  app.add_flag("--report-only", o.report_only, "end with 0 even where a limit does not hold, unless rows are wrong");
  app.add_flag("--list", o.list, "print every plan's time beside its prediction");
  parse_or_exit(app, argc, argv);
  if (!o.links.empty() && tokens->empty()) o.tokens = {1024};
  if (!o.quick) return o;
  if (tokens->empty() && o.links.empty()) o.tokens = {4, 512};
  if (latencies->empty()) o.latencies = {"5us", "2ms"};
  if (routings->empty()) o.routings = {"uniform"};
  if (levels->empty()) o.levels = {2, 3};
  return o;
}

// Rates fall towards the root, and a level's groups share its uplink. Four levels of at least two need 16 ranks.
std::string tree(int levels, const std::string& latency) {
  const std::string at = ",lat=" + latency + ")";
  if (levels == 2) return "node:2(bw=2GB/s" + at + " gpu:4(bw=8GB/s" + at;
  if (levels == 3) return "node:2(bw=2GB/s" + at + " qpi:2(bw=4GB/s" + at + " gpu:2(bw=8GB/s" + at;
  return "node:2(bw=2GB/s" + at + " qpi:2(bw=4GB/s" + at + " pcie:2(bw=6GB/s" + at + " gpu:2(bw=8GB/s" + at;
}

// Cells of the same tree follow one another.
std::vector<AccuracyCell> grid(const Options& o) {
  std::vector<AccuracyCell> cells;
  bool with_m1 = false;
  for (const int levels : o.levels)
    for (const std::string& latency : o.latencies) {
      with_m1 = with_m1 || (levels == 3 && latency == "2ms");
      for (const size_t tokens : o.tokens)
        for (const std::string& routing : o.routings) {
          AccuracyCell cell;
          cell.topology = tree(levels, latency);
          cell.latency = latency;
          cell.ranks = levels == 4 ? 16 : 8;
          cell.levels = levels;
          cell.tokens = tokens;
          cell.routing = routing;
          cells.push_back(cell);
        }
    }
  if (with_m1) {
    AccuracyCell cell;  // dispatch_combine_perf's shape
    cell.topology = kM1;
    cell.latency = "2ms";
    cell.levels = 3;
    cell.tokens = 4;
    cell.hidden = 7168, cell.top_k = 8, cell.n_experts = 256;
    cell.of_m1 = true;
    cells.push_back(cell);
  }
  return cells;
}

// HierMoE's Table IV on the levels of Fig. 9, where n is one rank's buffer, so that a group's uplink carries that rate
// for each of its ranks. A token stands for `scale` tokens: see --help.
std::vector<AccuracyCell> table_iv(const Options& o) {
  std::ifstream file(o.links);
  const Json profile = Json::parse(file, nullptr, false);
  if (profile.is_discarded() || !profile.contains("alltoall")) fail(o.links + ": no profile with AlltoAlls");
  const Json& costs = profile["alltoall"];
  const auto link = [&](const Json& cost, int ranks) {
    return "(bw=" + number_text(cost.at("bytes_per_ns").get<double>() * ranks / static_cast<double>(o.scale)) +
           "GB/s,lat=" + number_text(cost.at("alpha_ns").get<double>() / 1e3) + "us)";
  };
  const Json &inter = costs.at("inter"), &intra = costs.at("intra");
  if (inter.size() != 3 || intra.size() != 3) fail(o.links + ": not the levels of Fig. 9 (node qpi nvl gpu)");
  const std::string host = "qpi:2" + link(inter[1], 4) + " nvl:2" + link(inter[2], 2) + " gpu:2" + link(intra[2], 1);
  struct Shape {
    int top_k, n_experts;
  };
  std::vector<AccuracyCell> cells;
  for (const int ranks : {8, 16})
    for (const Shape& s : {Shape{6, 128}, Shape{8, 128}, Shape{10, 128}, Shape{8, 64}, Shape{8, 256}})
      for (const size_t tokens : o.tokens) {
        AccuracyCell cell;
        cell.topology = ranks == 8 ? host : "node:2" + link(inter[0], 8) + " " + host;
        cell.ranks = ranks;
        cell.levels = ranks == 8 ? 3 : 4;
        cell.tokens = std::max<size_t>(1, tokens / o.scale);
        cell.top_k = s.top_k, cell.n_experts = s.n_experts;
        cells.push_back(cell);
      }
  return cells;
}

std::vector<std::string> plans_of(const AccuracyCell& cell) {
  std::vector<std::string> plans = {"flat", "2dh"};
  for (int d = 1; d <= cell.levels; d++) plans.push_back("hier:" + std::to_string(d));
  plans.push_back("auto");
  plans.push_back(kFlatAgain);
  return plans;
}

MoeOptions options_of(const AccuracyCell& cell) {
  MoeOptions o;
  o.job.procs = cell.ranks;
  o.job.topology = cell.topology;
  o.job.pace = true;
  o.tokens = cell.tokens;
  o.hidden = cell.hidden;
  o.top_k = cell.top_k;
  o.n_experts = cell.n_experts;
  o.routing = cell.routing;
  o.update = true;
  return o;
}

void note_plan(PlanTimes& t, const std::vector<std::string>& ran) {
  std::map<std::string, size_t> times;
  for (const std::string& name : ran) times[name]++;
  for (const auto& [name, n] : times)
    if (n > t.n_ran) t.ran = name, t.n_ran = n;
}

// Runs in every rank. All ranks see the same times, and therefore decide alike.
AccuracyPoint measure(const AccuracyCell& cell, int timed_again, const Team& team, Progress* progress) {
  MoeOptions options = options_of(cell);
  const std::vector<RankRouting> routing = make_routing(options, cell.ranks);
  const std::vector<int32_t> owner = contiguous_owners(cell.n_experts, cell.ranks);
  MoeBench bench(options, routing, owner, team, progress);
  AccuracyPoint point;
  point.cell = cell;
  size_t auto_at = 0;
  for (const std::string& asked : plans_of(cell)) {
    const size_t at = bench.add(asked == kFlatAgain ? "flat" : asked);
    if (asked == "auto") auto_at = at;
    point.plans.push_back({asked, "", 0, {}, 0});
  }
  point.steps_to_settle = bench.settle(auto_at);
  const double round_us = team.slowest({team.timed_us([&] { bench.run_rounds(1, false); })});
  const int rounds = std::clamp(static_cast<int>(kPointUs / round_us), kRounds, kMostRounds);
  for (point.times_again = 0;; point.times_again++) {
    bench.run_rounds(rounds, true);
    const std::vector<std::vector<double>> us = bench.total_us();
    for (size_t i = 0; i < us.size(); i++) point.plans[i].us = us[i];
    const double limit = kDoubtful * point.noise();
    if (point.times_again >= timed_again || (point.regret() <= limit && !point.loses_to_flat())) break;
  }
  const std::vector<MoeResult> results = bench.finish();
  for (size_t i = 0; i < results.size(); i++) {
    note_plan(point.plans[i], results[i].ran);
    point.plans[i].predicted_us = results[i].predicted_us;
    point.n_wrong += results[i].n_wrong;
  }
  return point;
}

Json to_json(const AccuracyPoint& p) {
  Json j = {{"settle", p.steps_to_settle}, {"again", p.times_again}, {"nwrong", p.n_wrong}, {"plans", Json::array()}};
  for (const PlanTimes& t : p.plans) j["plans"].push_back({t.asked, t.ran, t.predicted_us, t.us, t.n_ran});
  return j;
}

AccuracyPoint from_json(const Json& j, const AccuracyCell& cell) {
  AccuracyPoint p;
  p.cell = cell;
  p.steps_to_settle = j["settle"], p.times_again = j["again"], p.n_wrong = j["nwrong"];
  for (const Json& t : j["plans"])
    p.plans.push_back({t[0].get<std::string>(), t[1].get<std::string>(), t[2].get<double>(),
                       t[3].get<std::vector<double>>(), t[4].get<size_t>()});
  return p;
}

// Runs in its own process, which forks the ranks of one tree. Rank 0 writes each cell's point to `out` as a line.
[[noreturn]] void run_tree(const std::vector<AccuracyCell>& cells, int timed_again, FILE* out) {
  Job job(options_of(cells[0]).job);
  job.run(true, [&](int, const Team& team) {
    Progress progress(job.leads());
    for (const AccuracyCell& cell : cells) {
      const AccuracyPoint point = measure(cell, timed_again, team, job.leads() ? &progress : nullptr);
      if (!job.leads()) continue;
      std::fprintf(out, "%s\n", to_json(point).dump().c_str());
      std::fflush(out);
    }
  });
  std::fflush(nullptr);
  _exit(0);
}

void print(size_t number, const AccuracyPoint& p, bool list) {
  const PlanTimes &chosen = p.plan("auto"), &best = p.best();
  std::printf("%3zu  %-46s %2d ranks  chose %-7s %9.1f us  best %-7s %9.1f us  regret %.3f  /flat %.3f  flat/flat %.3f",
              number, p.cell.name().c_str(), p.cell.ranks, chosen.ran.c_str(), median(chosen.us), best.asked.c_str(),
              median(best.us), p.regret(), p.over_flat(), p.flat_over_flat());
  if (chosen.n_ran < chosen.us.size()) std::printf("  in %zu of %zu rounds", chosen.n_ran, chosen.us.size());
  if (p.times_again > 0) std::printf("  timed %d times again", p.times_again);
  if (p.n_wrong > 0) std::printf("  %llu WRONG", static_cast<unsigned long long>(p.n_wrong));
  const bool loses = p.loses_to_flat() || p.wrong_choice() || p.choice_regret() > kDoubtful * p.noise();
  std::printf("\n");
  if (loses) std::printf("#    %s\n", p.cell.command("flat," + best.asked + ",auto").c_str());
  for (const PlanTimes& t : p.plans)
    if (list)
      std::printf("#    %-10s %9.1f us (%.1f to %.1f, %zu rounds)  predicted %9.1f\n", t.asked.c_str(), median(t.us),
                  *std::min_element(t.us.begin(), t.us.end()), *std::max_element(t.us.begin(), t.us.end()), t.us.size(),
                  t.predicted_us);
  std::fflush(stdout);
}

// Runs each group of cells that share a tree.
bool run(const std::vector<AccuracyCell>& cells, const Options& o, std::vector<AccuracyPoint>& points) {
  for (size_t first = 0; first < cells.size();) {
    size_t end = first;
    while (end < cells.size() && cells[end].topology == cells[first].topology) end++;
    int pipes[2];
    if (pipe(pipes) != 0) fail("no pipe");
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child < 0) fail("fork failed");
    if (child == 0) {
      close(pipes[0]);
      run_tree({cells.begin() + static_cast<long>(first), cells.begin() + static_cast<long>(end)}, o.timed_again,
               fdopen(pipes[1], "w"));
    }
    close(pipes[1]);
    FILE* in = fdopen(pipes[0], "r");
    char* line = nullptr;
    size_t room = 0;
    for (size_t at = first; at < end && getline(&line, &room, in) > 0; at++) {
      points.push_back(from_json(Json::parse(line), cells[at]));
      print(points.size(), points.back(), o.list);
    }
    std::free(line);
    std::fclose(in);
    int status = 0;
    if (waitpid(child, &status, 0) != child || status != 0 || points.size() != end) {
      std::fprintf(stderr, "# error: the ranks failed on %s\n", cells[first].topology.c_str());
      return false;
    }
    first = end;
  }
  return true;
}

void print(const AccuracySummary& s) {
  std::printf("# auto beside the best forced plan: geomean %.3f, worst %.3f (%s)\n", s.regret_mean, s.regret_worst,
              s.regret_worst_at.c_str());
  std::printf("# the chosen plan, forced, beside the best: geomean %.3f, worst %.3f (%s)\n", s.choice_mean,
              s.choice_worst, s.choice_worst_at.c_str());
  std::printf("# auto / flat: geomean %.3f, worst %.3f (%s); above %.2f at %d of %zu points, beyond noise at %d\n",
              s.over_flat_mean, s.over_flat_worst, s.over_flat_worst_at.c_str(), kOverFlat, s.n_over_flat, s.n,
              s.n_loses);
  std::printf("# flat / flat: geomean %.3f, worst %.3f; above %.2f at %d of %zu points\n", s.flat_over_flat_mean,
              s.flat_over_flat_worst, kOverFlat, s.n_flat_over_flat, s.n);
  for (const std::string& sentence : s.broken) std::printf("# FAILED: %s\n", sentence.c_str());
  std::printf("regret geomean=%.4f worst=%.3f over_flat=%d flat_over_flat=%d error_median=%.4f points=%zu %s\n",
              s.regret_mean, s.regret_worst, s.n_loses, s.n_flat_over_flat, s.error_median, s.n,
              s.broken.empty() ? "ok" : "failed");
}

int moe_accuracy_main(int argc, char** argv) {
  const Options o = parse(argc, argv);
  const bool links = !o.links.empty();
  const AccuracyLimits& limits = links ? kLinksLimits : kGridLimits;
  std::printf(
      "# moe_accuracy: EMULATED: links are paced to the trees' figures, ranks are processes of this machine\n"
      "# us: dispatch + combine, median of the slowest rank over at least %d alternating rounds; points where auto\n"
      "# loses are measured again, at most %d times, and all their rounds count\n",
      kRounds, o.timed_again);
  const auto start = Clock::now();
  std::vector<AccuracyPoint> points;
  const bool complete = run(links ? table_iv(o) : grid(o), o, points);
  const AccuracySummary summary = summarize(points, limits);
  std::printf("# %.0f s\n", since_us(start) / 1e6);
  print(summary);
  const std::string title = links ? "MoE plans on the links of " + o.links : "Choice of MoE plans";
  write_or_fail({{o.json_file, accuracy_json(command_line(argc, argv), points, summary, limits)},
                 {o.plot_file, accuracy_plot(title, points, summary)}},
                2);
  if (!complete) return 2;
  return summary.broken.empty() || (o.report_only && summary.n_wrong == 0) ? 0 : 1;
}

}  // namespace
}  // namespace perf

int main(int argc, char** argv) { return perf::moe_accuracy_main(argc, argv); }
