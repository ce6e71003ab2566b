// SPDX-License-Identifier: Apache-2.0
// Measures the cost of an expert-parallel dispatch while a data-parallel AllReduce is in flight on the same paced
// lanes: alone, by class (EP before DP, MoNTA's communication priorities), and with both in one class. --real uses the
// machine's own links, such as TCP between two hosts (perf/compare_net --rate 1gbit --run build/perf/priority_perf
// --real).
#include <moeccl/moeccl.h>

#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "perf/common/buffer.h"
#include "perf/common/fail.h"
#include "perf/common/shared_options.h"
#include "perf/common/team.h"
#include "perf/common/text.h"

namespace perf {
namespace {

struct PriorityOptions {
  JobOptions job;
  size_t reduce_bytes = 64 << 20, row_bytes = 2048;
  int tokens = 512, top_k = 2, experts = 16, iters = 8;
  bool real = false;
  std::string json;
  PriorityOptions() { job.memory = Memory::kMalloc; }
};

PriorityOptions parse(int argc, char** argv) {
  PriorityOptions o;
  App app("Times a MoE dispatch alone and beside an AllReduce on the same paced lanes, with classes and without",
          "priority_perf");
  add_size(app, "--reduce", o.reduce_bytes, "bytes of the AllReduce (64M)");
  add_size(app, "--row", o.row_bytes, "bytes of a token (2K)");
  app.add_option("--tokens", o.tokens, "tokens of a rank")->check(positive())->capture_default_str();
  app.add_option("--topk", o.top_k, "experts of a token")->check(range(1, 8))->capture_default_str();
  app.add_option("--experts", o.experts, "experts")->check(range(8, 1024))->capture_default_str();
  app.add_option("-n,--iters", o.iters, "timed dispatches of each kind")->check(positive());
  add_output(app, "-J,--json", o.json, "write results to this file");
  app.add_flag("--real", o.real, "the links that are there, of a launcher's ranks; nothing is paced");
  add_job_options(app, o.job, Memories::kOfHost);
  app.remove_option("--pace");  // always on, but with --real
  parse_or_exit(app, argc, argv);
  if (o.real) return o;
  if (o.job.topology.empty()) o.job.topology = "node:2(bw=40MB/s) gpu:4(bw=1GB/s)";
  if (o.job.threads == 1 && o.job.procs == 0) o.job.threads = 8;
  o.job.pace = true;
  return o;
}

struct Outcome {
  double dispatch_us = 0;  // median of the slowest rank
  double reduce_us = 0;    // the AllReduce that was in flight, until its end
  int beside = 0;          // dispatches during which it was in flight
  uint64_t wrong = 0;
};

class Bench {
 public:
  Bench(const PriorityOptions& o, const Team& team) : o_(o), team_(team), rank_(team.rank(0)), ep_(team.comm(0)) {
    // A split with pace and without topology keeps the lanes.
    moecclConfig_t config = MOECCL_CONFIG_INIT;
    config.pace = o.real ? 0 : 1;
    config.priority = moecclPriorityDP;
    config.name = "data parallel";
    check(moecclCommSplit(ep_, 0, rank_, &dp_, &config), "moecclCommSplit", rank_, ep_);
    check(moecclStreamCreate(&stream_), "moecclStreamCreate");
    reduce_ = Buffer(o.reduce_bytes, o.job.memory);
    make_layer();
  }
  ~Bench() {
    (void)moecclRoutingDestroy(routing_);
    (void)moecclMoeDestroy(moe_);
    (void)moecclStreamDestroy(stream_);
    (void)moecclCommDestroy(dp_);
  }

  // Runs the dispatches one after another. With `beside`, an AllReduce is in flight, and a new one starts when it has
  // ended.
  Outcome run(bool beside, int ep_priority) {
    check(moecclCommSetPriority(ep_, ep_priority), "moecclCommSetPriority", rank_, ep_);
    Outcome out;
    std::vector<double> us, reduce_us;
    for (int i = -1; i < o_.iters; i++) {
      team_.barrier();
      const auto reduce_start = Clock::now();
      if (beside) start_reduce();
      std::this_thread::sleep_for(std::chrono::milliseconds(beside ? 100 : 0));  // until it is well under way
      team_.barrier();
      const auto start = Clock::now();
      check(moecclDispatch(routing_, rows_.data(), received_.data(), nullptr), "moecclDispatch", rank_, ep_);
      const double took = since_us(start);
      moecclResult_t state = moecclSuccess;
      check(moecclCommGetAsyncError(dp_, &state), "moecclCommGetAsyncError", rank_, dp_);
      if (beside) {
        check(moecclStreamSynchronize(stream_), "moecclStreamSynchronize", rank_, dp_);
        if (i >= 0) reduce_us.push_back(since_us(reduce_start));
        out.wrong += count_wrong_sums();
      }
      if (i < 0) continue;
      us.push_back(took);
      out.beside += state == moecclInProgress ? 1 : 0;
    }
    out.dispatch_us = team_.slowest(us);
    if (beside) out.reduce_us = team_.slowest(reduce_us);
    out.wrong = team_.sum({out.wrong});
    return out;
  }

  double reduce_alone() {
    std::vector<double> us;
    for (int i = 0; i < 3; i++)
      us.push_back(team_.timed_us([&] {
        start_reduce();
        check(moecclStreamSynchronize(stream_), "moecclStreamSynchronize", rank_, dp_);
      }));
    return team_.slowest(us);
  }

 private:
  void make_layer() {
    moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
    config.hidden_bytes = o_.row_bytes;
    config.top_k = o_.top_k;
    config.n_experts = o_.experts;
    config.max_tokens = static_cast<size_t>(o_.tokens);
    check(moecclMoeCreate(&moe_, ep_, &config), "moecclMoeCreate", rank_, ep_);
    std::mt19937 random(static_cast<unsigned>(rank_) + 1);
    std::vector<int32_t> index;
    for (int t = 0; t < o_.tokens; t++) {
      const int first = static_cast<int>(random() % static_cast<unsigned>(o_.experts));
      for (int k = 0; k < o_.top_k; k++) index.push_back((first + k * 7) % o_.experts);
    }
    check(moecclRoutingCreate(&routing_, moe_, index.data(), nullptr, static_cast<size_t>(o_.tokens)),
          "moecclRoutingCreate", rank_, ep_);
    moecclRoutingInfo_t info{};
    info.size = sizeof(info);
    check(moecclRoutingGetInfo(routing_, &info), "moecclRoutingGetInfo", rank_, ep_);
    rows_ = Buffer(static_cast<size_t>(o_.tokens) * o_.row_bytes, o_.job.memory);
    received_ = Buffer((info.n_rows + 1) * o_.row_bytes, o_.job.memory);
  }
  void start_reduce() {
    auto* values = reinterpret_cast<float*>(reduce_.data());
    std::fill_n(values, o_.reduce_bytes / sizeof(float), static_cast<float>(rank_ + 1));
    check(moecclAllReduce(values, values, o_.reduce_bytes / sizeof(float), moecclFloat32, moecclSum, dp_, stream_),
          "moecclAllReduce", rank_, dp_);
  }
  uint64_t count_wrong_sums() const {
    const auto* values = reinterpret_cast<const float*>(reduce_.data());
    const auto wanted = static_cast<float>(team_.n_ranks() * (team_.n_ranks() + 1) / 2);
    uint64_t wrong = 0;
    for (size_t i = 0; i < o_.reduce_bytes / sizeof(float); i++) wrong += values[i] != wanted;
    return wrong;
  }

  const PriorityOptions& o_;
  const Team& team_;
  int rank_;
  moecclComm_t ep_, dp_ = nullptr;
  moecclStream_t stream_ = nullptr;
  moecclMoe_t moe_ = nullptr;
  moecclRouting_t routing_ = nullptr;
  Buffer reduce_, rows_, received_;
};

int priority_main(int argc, char** argv) {
  const PriorityOptions o = parse(argc, argv);
  Job job(o.job);
  uint64_t wrong = 0;
  job.run(true, [&](int thread, const Team& team) {
    Bench bench(o, team);
    const bool prints = job.leads() && thread == 0;
    if (prints)
      std::printf(
          "# priority_perf: %d ranks on %s; dispatch of %d tokens of %zu B a rank, AllReduce of "
          "%zu B in flight\n# %-28s %14s %8s %16s %10s %7s\n",
          team.n_ranks(), o.real ? "the links that are there" : (o.job.topology + ", links paced: EMULATED").c_str(),
          o.tokens, o.row_bytes, o.reduce_bytes, "dispatch", "dispatch(us)", "/alone", "AllReduce(us)", "in flight",
          "#wrong");
    nlohmann::ordered_json results = nlohmann::ordered_json::array();
    const double reduce_alone_us = bench.reduce_alone();
    double alone_us = 0;
    const auto line = [&](const char* name, const Outcome& r) {
      if (alone_us == 0) alone_us = r.dispatch_us;
      if (thread == 0) wrong += r.wrong;
      if (!prints) return;
      std::printf("  %-28s %14.1f %8.3f %16.1f %7d/%-2d %7llu\n", name, r.dispatch_us, r.dispatch_us / alone_us,
                  r.reduce_us, r.beside, o.iters, static_cast<unsigned long long>(r.wrong));
      std::fflush(stdout);
      results.push_back({{"dispatch", name},
                         {"dispatch_us", r.dispatch_us},
                         {"over_alone", r.dispatch_us / alone_us},
                         {"allreduce_us", r.reduce_us},
                         {"n_wrong", r.wrong}});
    };
    Outcome alone = bench.run(false, moecclPriorityAuto);
    alone.reduce_us = reduce_alone_us;
    line("alone (each)", alone);
    line("beside, EP before DP", bench.run(true, moecclPriorityAuto));
    line("beside, both in class DP", bench.run(true, moecclPriorityDP));
    if (prints) write_or_fail({{o.json, results.dump(2) + "\n"}});
  });
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace perf

int main(int argc, char** argv) { return perf::priority_main(argc, argv); }
