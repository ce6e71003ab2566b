// SPDX-License-Identifier: Apache-2.0
// Times MoNTA's strategies for the AllToAll of tensor-parallel data (moecclTensorAllToAll), after checking every byte.
// Compares the times with the paper's equations at the efficiencies that these links reach, and shows when each lane
// was busy.
//
// By default it emulates e = 2 nodes of t = 8 ranks with paced links: the node's uplink is as fast as one rank's link
// inside the node, so that a rank's shares are B1 : B2 = 1 : 8. The numbers of tokens are the paper's; a token's row is
// scaled down to --hidden bytes so that two cores can carry 16 ranks. --real uses the machine's own links instead: each
// host of a launcher's ranks is a node (perf/compare_net --rate 1gbit --run build/perf/alltoall_allgather_perf --real
// ...).
#include <moeccl/moeccl.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "perf/common/buffer.h"
#include "perf/common/fail.h"
#include "perf/common/shared_options.h"
#include "perf/common/team.h"
#include "perf/common/text.h"
#include "perf/tensor/timeline.h"

namespace perf {
namespace {

using Json = nlohmann::ordered_json;

struct TensorOptions {
  JobOptions job;
  int nodes = 2, tensor = 8, iters = 5, warmup = 1, check = 1;
  double intra_mbs = 12.5, ratio = 8;  // B2; B2 : B1
  size_t min_tokens = 4 << 10, max_tokens = 256 << 10, step_factor = 4, hidden = 32, staging = 40 << 20;
  std::string algorithms = "baseline,o1,o2,o3,lean,auto", json, plot;
  bool explain = false, real = false;
  TensorOptions() { job.memory = Memory::kMalloc; }
};

TensorOptions parse(int argc, char** argv) {
  TensorOptions o;
  App app("Times the AllToAll of tensor-parallel data between nodes by MoNTA's strategies, after checking it",
          "alltoall_allgather_perf");
  app.add_option("--nodes", o.nodes, "e: nodes")->check(range(1, 64))->capture_default_str();
  app.add_option("--tensor", o.tensor, "t: ranks of a node")->check(range(1, 64))->capture_default_str();
  app.add_option("--intra", o.intra_mbs, "B2: MB/s of a rank's link inside its node")->capture_default_str();
  app.add_option("--ratio", o.ratio, "B2 over a rank's share of its node's uplink, B1")->capture_default_str();
  add_size(app, "-b,--min", o.min_tokens, "fewest tokens (4K)");
  add_size(app, "-e,--max", o.max_tokens, "most tokens (256K)");
  add_size(app, "-f,--factor", o.step_factor, "factor between sizes (4)");
  add_size(app, "--hidden", o.hidden, "bytes of a token (32)");
  add_size(app, "--staging", o.staging, "staging bytes of a rank (40M)");
  app.add_option("--algo", o.algorithms, "algorithms, separated by commas")->capture_default_str();
  app.add_option("-n,--iters", o.iters, "timed iterations")->check(positive())->capture_default_str();
  app.add_option("-w,--warmup", o.warmup, "iterations before timing")->check(not_negative());
  app.add_option("-c,--check", o.check, "check results (1) or not (0)")->check(range(0, 1));
  add_output(app, "-J,--json", o.json, "write results to this file");
  add_output(app, "--plot", o.plot, "draw the largest size's lanes into this SVG file");
  app.add_flag("--real", o.real, "nodes are the hosts of a launcher's ranks, or --topology's; nothing is paced");
  app.add_flag("--explain", o.explain, "print the plan that is chosen by default");
  add_job_options(app, o.job, Memories::kOfHost);
  parse_or_exit(app, argc, argv);
  if (o.min_tokens == 0) fail("-b is 0: give 1 token or more");
  check_sizes(o.min_tokens, o.max_tokens);
  if (o.step_factor < 2) fail("-f is below 2: give a factor between sizes");
  if (!(o.intra_mbs > 0) || !(o.ratio > 0)) fail("--intra and --ratio must be above 0");
  if (!o.real && o.job.threads == 1 && o.job.procs == 0) o.job.threads = o.nodes * o.tensor;
  if (!o.real && o.job.topology.empty()) {
    std::ostringstream text;
    text << "node:" << o.nodes << "(bw=" << o.intra_mbs / o.ratio * o.tensor << "MB/s) gpu:" << o.tensor
         << "(bw=" << o.intra_mbs << "MB/s)";
    o.job.topology = text.str();
    o.job.pace = true;
  }
  setenv("MOECCL_STAGING_BYTES", std::to_string(o.staging).c_str(), 0);
  return o;
}

std::vector<std::string> split_names(const std::string& text) {
  std::vector<std::string> names;
  std::istringstream in(text);
  for (std::string name; std::getline(in, name, ',');)
    if (!name.empty()) names.push_back(name);
  return names;
}

// Efficiencies by volume, measured by running each communication alone (o1).
struct Curves {
  std::vector<double> inter_bytes, inter, intra_bytes, intra, copy_bytes, copy;
};

struct Result {
  std::string name, ran;
  double us = 0, predicted_us = 0;
  uint32_t chunks = 1;
  int n_trial = 0;  // operations that the trial of plans took
  uint64_t wrong = 0;
  LaneUse lanes[4];
  std::vector<RankSpan> spans;
};

class Bench {
 public:
  Bench(const TensorOptions& o, const Team& team) : o_(o), team_(team) {
    groups_.size = sizeof(groups_);
    check(moecclTensorGroups(team.comm(0), &groups_), "moecclTensorGroups");
    for (int r = 0; r < team.n_ranks(); r++) group_of_.push_back(r / o.tensor);
    const size_t most = o.max_tokens * o.hidden + 1024;
    send_ = Buffer(most, o.job.memory);
    recv_ = Buffer(most, o.job.memory);
  }

  const moecclTensorGroups_t& groups() const { return groups_; }
  const std::vector<int>& group_of() const { return group_of_; }
  // Returns I of Eq. 3 in whole blocks.
  size_t block(size_t tokens) const { return tokens * o_.hidden / static_cast<size_t>(groups_.n_groups); }
  double volume(size_t tokens) const { return static_cast<double>(block(tokens)) * groups_.n_groups; }

  // Runs all plans in turn, so that a change of the machine affects all of them.
  std::vector<Result> run(const std::vector<std::string>& names, size_t tokens, int iters, int warmup) {
    const size_t count = block(tokens);
    std::vector<Result> results;
    for (const std::string& name : names) {
      Result& r = results.emplace_back();
      r.name = name;
      force(name);
      if (o_.check == 1) r.wrong = count_wrong(count);
      // Finish the trial of plans, which runs in a program's first operations, before anything is timed.
      constexpr int kMostTrial = 250;
      while (name == "auto" && query(count).trial == 1 && r.n_trial < kMostTrial) {
        team_.barrier();  // as below, so that the trial sees the measured conditions
        exchange(count);
        r.n_trial++;
      }
      for (int i = 0; i < warmup; i++) exchange(count);
    }
    std::vector<std::vector<double>> us(names.size());
    for (int i = 0; i < iters; i++) {
      for (size_t k = 0; k < names.size(); k++) {
        Result& r = results[k];
        if (names.size() > 1) force(names[k]);
        const moecclPlanInfo_t info = query(count);  // makes the plan
        if (names.size() > 1) exchange(count);       // brings its own staging into the cache
        team_.barrier();
        const auto start = Clock::now();
        exchange(count);
        us[k].push_back(since_us(start));
        team_.barrier();  // a rank that already makes the next plan would take a core from ranks that still exchange
        r.ran = info.algorithm;
        r.chunks = info.n_chunks;
        if (i + 1 == iters) r.spans = gather_timeline(team_, count, moecclUint8, info.n_chunks);
      }
    }
    for (size_t k = 0; k < names.size(); k++) {
      results[k].us = team_.slowest(us[k]);
      for (const auto lane : {moecclLaneInter, moecclLaneIntra, moecclLaneCopy})
        results[k].lanes[lane] = lane_use(results[k].spans, lane, group_of_);
    }
    return results;
  }
  Result run(const std::string& name, size_t tokens) { return run({name}, tokens, 3, 1).front(); }

  // Measures all sizes up to `max_tokens`, by the lanes of paced links or by whole exchanges over real ones.
  Curves measure_links() {
    std::vector<size_t> sizes;
    for (size_t tokens = std::min(o_.max_tokens, std::max<size_t>(o_.min_tokens / 16, 256)); tokens <= o_.max_tokens;
         tokens *= 2)
      sizes.push_back(tokens);
    Curves curves;
    if (o_.real)
      measure_real(sizes, curves);
    else
      for (const size_t tokens : sizes) measure_efficiency(tokens, curves);
    return curves;
  }

  double b1() const { return b1_; }
  double b2() const { return b2_; }
  static double b3() { return 8.7e9; }  // one core's copy beyond the cache, docs/decisions.md

  double predict(const Result& r, size_t tokens, const Curves& c) const {
    const auto curve = [](const std::vector<double>& bytes, const std::vector<double>& efficiency) {
      return moecclCurve_t{static_cast<int32_t>(bytes.size()), bytes.data(), efficiency.data()};
    };
    moecclChunkProblem_t p = MOECCL_CHUNK_PROBLEM_INIT;
    p.bytes = volume(tokens);
    p.tensor = o_.tensor;
    p.expert = groups_.n_groups;
    p.inter_bandwidth = b1();
    p.intra_bandwidth = b2();
    p.copy_bandwidth = b3();
    p.inter = curve(c.inter_bytes, c.inter);
    p.intra = curve(c.intra_bytes, c.intra);
    p.copy = curve(c.copy_bytes, c.copy);
    auto strategy = moecclChunkO3;
    if (r.ran == "baseline") strategy = moecclChunkBaseline;
    if (r.ran == "o1") strategy = moecclChunkO1;
    if (r.ran == "o2") strategy = moecclChunkO2;
    if (r.ran == "lean") p.intra_bandwidth *= static_cast<double>(p.expert) / (p.expert - 1);  // Eq. 9 with (e-1)/e
    double us = 0;
    const auto chunks =
        strategy == moecclChunkBaseline || strategy == moecclChunkO1 ? 1 : static_cast<int32_t>(r.chunks);
    check(moecclChunkTime(&p, strategy, chunks, &us), "moecclChunkTime");
    return us;
  }

  std::string explain(size_t tokens) const {
    return explained([&](char* text, size_t bytes, size_t* needed) {
      check(moecclPlanExplain(team_.comm(0), moecclOpTensorAllToAll, block(tokens), moecclUint8, text, bytes, needed),
            "moecclPlanExplain");
    });
  }

 private:
  static char byte_of(int group, int block, size_t i) {
    return static_cast<char>((static_cast<size_t>(group) * 89 + static_cast<size_t>(block) * 37 + i * 7 + i / 251) %
                             251);
  }
  // Computes r1, r2 and r3 at the volumes of o1 with these tokens from its lanes, by solving Eq. 8 to 10 for them.
  void measure_efficiency(size_t tokens, Curves& curves) {
    const Result r = run("o1", tokens);
    const double t = o_.tensor, e = groups_.n_groups, i = volume(tokens);
    const auto add = [](std::vector<double>& bytes, std::vector<double>& efficiency, double volume, double value) {
      bytes.push_back(volume);
      efficiency.push_back(std::clamp(value, 1e-6, 1.0));
    };
    // Ranks take turns on the node's uplink, so the time runs from the first to the last. Inside the node each rank has
    // its own link.
    const LaneUse& across = r.lanes[moecclLaneInter];
    add(curves.inter_bytes, curves.inter, i / t,
        i / t * (e - 1) / e / b1() / ((across.last_us - across.first_us) * 1e-6));
    add(curves.intra_bytes, curves.intra, i, i * (t - 1) / t / b2() / (r.lanes[moecclLaneIntra].window_us * 1e-6));
    add(curves.copy_bytes, curves.copy, i, i / b3() / (r.lanes[moecclLaneCopy].window_us * 1e-6));
  }

  // The time of the baseline is that of its bytes between nodes (Eq. 8). The time that o1 takes beyond its bytes
  // between nodes is that of its AllGather, copies included. The best rate seen is the link's, and the others are
  // efficiencies.
  void measure_real(const std::vector<size_t>& sizes, Curves& c) {
    const double t = o_.tensor, e = groups_.n_groups;
    for (const size_t tokens : sizes) {
      c.inter_bytes.push_back(volume(tokens));
      c.inter.push_back(volume(tokens) * (e - 1) / e / (sustained_us("baseline", tokens) * 1e-6));
    }
    const auto rate_between = [&](double bytes) {
      size_t k = 1;
      while (k + 1 < c.inter_bytes.size() && c.inter_bytes[k] < bytes) k++;
      if (c.inter_bytes.size() == 1 || bytes <= c.inter_bytes[0]) return c.inter[0];
      const double at = (bytes - c.inter_bytes[k - 1]) / (c.inter_bytes[k] - c.inter_bytes[k - 1]);
      return c.inter[k - 1] + (c.inter[k] - c.inter[k - 1]) * std::min(at, 1.0);
    };
    for (const size_t tokens : sizes) {
      const double i = volume(tokens), s = sustained_us("o1", tokens) * 1e-6;
      const double inside = std::max(s - i / t * (e - 1) / e / rate_between(i / t), s / 100);
      c.intra_bytes.push_back(i);
      c.intra.push_back(i * (t - 1) / t / inside);
      c.copy_bytes.push_back(i);
      c.copy.push_back(1);
    }
    b1_ = *std::max_element(c.inter.begin(), c.inter.end());
    b2_ = *std::max_element(c.intra.begin(), c.intra.end());
    for (double& rate : c.inter) rate /= b1_;
    for (double& rate : c.intra) rate /= b2_;
  }

  // Returns the time of one exchange among several that follow each other directly, as a plan's chunks do: a link that
  // has rested takes the first bytes faster than it carries them (a shaper's burst, empty queues).
  double sustained_us(const std::string& name, size_t tokens) {
    constexpr int kTurns = 3, kExchanges = 6;
    const size_t count = block(tokens);
    force(name);
    exchange(count);
    std::vector<double> us;
    for (int i = 0; i < kTurns; i++) {
      team_.barrier();
      exchange(count);
      const auto start = Clock::now();
      for (int k = 0; k < kExchanges; k++) exchange(count);
      us.push_back(since_us(start) / kExchanges);
    }
    return team_.slowest(us);
  }

  void force(const std::string& name) const {
    check(moecclPlanForce(team_.comm(0), moecclOpTensorAllToAll, name == "auto" ? nullptr : name.c_str()),
          "moecclPlanForce", team_.rank(0), team_.comm(0));
  }
  moecclPlanInfo_t query(size_t count) const {
    moecclPlanInfo_t info{};
    info.size = sizeof(info);
    check(moecclPlanQuery(team_.comm(0), moecclOpTensorAllToAll, count, moecclUint8, &info), "moecclPlanQuery");
    return info;
  }
  void exchange(size_t count) {
    check(moecclTensorAllToAll(send_.data(), recv_.data(), count, moecclUint8, team_.comm(0), nullptr),
          "moecclTensorAllToAll", team_.rank(0), team_.comm(0));
  }
  uint64_t count_wrong(size_t count) {
    const int e = groups_.n_groups;
    for (int d = 0; d < e; d++)
      for (size_t i = 0; i < count; i++)
        send_.data()[static_cast<size_t>(d) * count + i] = byte_of(groups_.group, d, i);
    std::memset(recv_.data(), 0xff, count * static_cast<size_t>(e));
    exchange(count);
    uint64_t wrong = 0;
    for (int s = 0; s < e; s++)
      for (size_t i = 0; i < count; i++)
        wrong += recv_.data()[static_cast<size_t>(s) * count + i] != byte_of(s, groups_.group, i);
    return team_.sum({wrong});
  }

  const TensorOptions& o_;
  const Team& team_;
  moecclTensorGroups_t groups_{};
  double b1_ = o_.intra_mbs * 1e6 / o_.ratio, b2_ = o_.intra_mbs * 1e6;  // bytes/s of a rank
  std::vector<int> group_of_;
  Buffer send_, recv_;
};

void print_header(const TensorOptions& o, const Bench& bench) {
  std::printf("# alltoall_allgather_perf: e = %d nodes of t = %d ranks, %zu B a token, topology %s%s\n", o.nodes,
              o.tensor, o.hidden, o.real ? "real" : o.job.topology.c_str(),
              o.job.pace ? ", links paced: EMULATED" : "");
  std::printf(
      "# B1 %.2f MB/s, B2 %.2f MB/s a rank; I = tokens x row; predicted: Eq. 11, Algorithms 1 and 2 with r1, r2, "
      "r3 measured by %s at the volumes of a chunk\n",
      bench.b1() / 1e6, bench.b2() / 1e6, o.real ? "baseline and o1" : "o1");
  std::printf("# %8s %9s %-9s %6s %11s %9s %9s %7s %24s %6s\n", "tokens", "I(B)", "plan", "chunks", "time(us)", "/base",
              "predicted", "diff", "busy inter/intra/copy %", "#wrong");
}

Json to_json(const Result& r, size_t tokens, double volume, double base_us, double base_predicted_us) {
  Json j{{"tokens", tokens},
         {"bytes", volume},
         {"plan", r.name},
         {"ran", r.ran},
         {"chunks", r.chunks},
         {"time_us", r.us},
         {"predicted_us", r.predicted_us},
         {"over_baseline", r.us / base_us},
         {"predicted_over_baseline", r.predicted_us / base_predicted_us},
         {"trial_operations", r.n_trial},
         {"n_wrong", r.wrong}};
  for (const auto lane : {moecclLaneInter, moecclLaneIntra, moecclLaneCopy})
    j["lanes"][lane_name(lane)] = {
        {"first_us", r.lanes[lane].first_us}, {"last_us", r.lanes[lane].last_us}, {"busy_us", r.lanes[lane].busy_us}};
  for (const RankSpan& s : r.spans)
    if (s.rank == 0) j["rank0_spans"].push_back({lane_name(s.span.lane), s.span.chunk, s.span.start_us, s.span.end_us});
  return j;
}

uint64_t run_rank(const TensorOptions& o, const Team& team, bool leads) {
  Bench bench(o, team);
  if (bench.groups().n_groups != o.nodes || bench.groups().n_ranks != o.tensor)
    fail("--nodes and --tensor do not describe the topology");
  const std::vector<std::string> names = split_names(o.algorithms);
  const Curves curves = bench.measure_links();
  if (leads) print_header(o, bench);
  if (leads) {
    for (size_t i = 0; i < curves.inter.size(); i++)
      std::printf("# efficiency at %8.0f B: r1(I/t = %8.0f) %.3f  r2 %.3f  r3 %.3f\n", curves.intra_bytes[i],
                  curves.inter_bytes[i], curves.inter[i], curves.intra[i], curves.copy[i]);
  }
  Json results = Json::array();
  std::vector<TimelineRow> rows;
  uint64_t wrong = 0;
  for (size_t tokens = o.min_tokens; tokens <= o.max_tokens; tokens *= o.step_factor) {
    double base_us = 0, base_predicted_us = 0, best_us = 0;
    std::map<std::string, double> by_name;
    rows.clear();
    for (Result& r : bench.run(names, tokens, o.iters, o.warmup)) {
      const std::string& name = r.name;
      r.predicted_us = bench.predict(r, tokens, curves);
      wrong += r.wrong;
      if (base_us == 0) base_us = r.us, base_predicted_us = r.predicted_us;
      if (name != "auto") best_us = best_us == 0 ? r.us : std::min(best_us, r.us);
      by_name[name] = r.us;
      const double chosen_us = by_name.contains(r.ran) ? by_name[r.ran] : r.us;
      rows.push_back({name == "auto" ? "auto: " + r.ran : name, r.us, r.spans});
      if (!leads) continue;
      const double ratio = r.us / base_us, predicted = r.predicted_us / base_predicted_us;
      std::printf("  %8zu %9.0f %-9s %6u %11.1f %9.4f %9.4f %+6.1f%% %8.0f %7.0f %7.0f %6llu%s\n", tokens,
                  bench.volume(tokens), name.c_str(), r.chunks, r.us, ratio, predicted, 100 * (ratio / predicted - 1),
                  100 * r.lanes[moecclLaneInter].busy_us / r.us, 100 * r.lanes[moecclLaneIntra].busy_us / r.us,
                  100 * r.lanes[moecclLaneCopy].busy_us / r.us, static_cast<unsigned long long>(r.wrong),
                  name == "auto" ? ("  ran " + r.ran + ", " + number_text(chosen_us / best_us) + " of the best" +
                                    (r.n_trial > 0 ? ", tried in " + std::to_string(r.n_trial) : ""))
                                       .c_str()
                                 : "");
      std::fflush(stdout);
      results.push_back(to_json(r, tokens, bench.volume(tokens), base_us, base_predicted_us));
    }
  }
  if (leads && o.explain) std::printf("%s", bench.explain(o.max_tokens).c_str());
  if (leads) {
    const Json all{{"program", "alltoall_allgather_perf"},
                   {"emulated", o.job.pace},
                   {"topology", o.job.topology},
                   {"hidden_bytes", o.hidden},
                   {"results", results}};
    const std::string note = o.job.topology + (o.job.pace ? ", EMULATED" : "") + "; ranks of one node, one bar a chunk";
    const std::string title = "Lanes of MoNTA's strategies, " + size_text(static_cast<double>(o.max_tokens)) +
                              " tokens of " + std::to_string(o.hidden) + " B";
    write_or_fail({{o.json, all.dump(2) + "\n"}, {o.plot, timeline_svg(title, note, rows, bench.group_of())}});
  }
  return wrong;
}

int tensor_main(int argc, char** argv) {
  const TensorOptions o = parse(argc, argv);
  Job job(o.job);
  const auto wrong = job.run<uint64_t>(
      true, [&](int thread, const Team& team) { return run_rank(o, team, job.leads() && thread == 0); });
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace perf

int main(int argc, char** argv) { return perf::tensor_main(argc, argv); }
