// SPDX-License-Identifier: Apache-2.0
// Measures what expert swap at run time costs and gains (HierMoE, Section V-E: "swapping two experts takes just 1 % of
// the total end-to-end time"). Steps alternate with and without swaps, and a layer's computation is waiting, as for a
// device.
#include <moeccl/moeccl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "perf/common/buffer.h"
#include "perf/common/fail.h"
#include "perf/common/job.h"
#include "perf/common/pattern.h"
#include "perf/common/routing.h"
#include "perf/common/shared_options.h"
#include "perf/common/team.h"
#include "perf/common/text.h"

namespace perf {
namespace {

using Json = nlohmann::ordered_json;

struct SwapOptions {
  JobOptions job;
  size_t tokens = 512, hidden = 512, expert_bytes = 1 << 20;
  int top_k = 4, n_experts = 0, layers = 4, steps = 80, interval = 0;
  double step_ms = 100, zipf = 0.8, horizon = 0;
  std::string output_file;
};

SwapOptions parse(int argc, char** argv) {
  SwapOptions o;
  App app("Times training steps with expert swap beside the same steps without", "swap_perf");
  app.add_option("--tokens", o.tokens, "of a rank in a step")->check(positive())->capture_default_str();
  app.add_option("--hidden", o.hidden, "elements of a row (float)")->check(positive())->capture_default_str();
  app.add_option("--expert-bytes", o.expert_bytes, "weights of an expert; two moments and gradients are as large")
      ->capture_default_str();
  app.add_option("--topk", o.top_k, "experts per token")->check(range(1, 64))->capture_default_str();
  app.add_option("--experts", o.n_experts, "experts of a layer (8 a rank)")->check(range(1, 8192));
  app.add_option("--layers", o.layers, "MoE layers of a step")->check(range(1, 100))->capture_default_str();
  app.add_option("--steps", o.steps, "of each kind")->check(range(8, 100000))->capture_default_str();
  app.add_option("--step-ms", o.step_ms, "what the layers compute in a step")->capture_default_str();
  app.add_option("--interval", o.interval, "of moecclExpertSwapConfig_t")->capture_default_str();
  app.add_option("--horizon", o.horizon, "of moecclExpertSwapConfig_t")->capture_default_str();
  app.add_option("--zipf", o.zipf, "exponent of the experts' popularity, which changes ten times")
      ->check(within(0, 10))
      ->capture_default_str();
  add_output(app, "-J,--output_file", o.output_file, "write results as JSON");
  add_job_options(app, o.job, Memories::kAll);
  parse_or_exit(app, argc, argv);
  return o;
}

struct Line {
  double off_ms = 0, on_ms = 0, exposed_ms = 0;  // per step, of the slowest rank
  double swap_us = 0;
  uint64_t swaps = 0, unpaid = 0, counts = 0;
};

// A layer and the tensors of its experts.
struct Layer {
  Layer(const SwapOptions& o, int n_experts, moecclComm_t comm, int rank) {
    moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
    config.hidden_bytes = o.hidden * sizeof(float);
    config.type = moecclFloat32;
    config.top_k = o.top_k;
    config.n_experts = n_experts;
    config.max_tokens = o.tokens;
    config.layout = moecclLayoutExpertMajor;
    config.trials = -1;
    check(moecclMoeCreate(&moe, comm, &config), "moecclMoeCreate", rank, comm);
  }
  ~Layer() {
    if (routing != nullptr) (void)moecclRoutingDestroy(routing);
    (void)moecclMoeDestroy(moe);
  }
  moecclMoe_t moe = nullptr;
  moecclRouting_t routing = nullptr;
  Buffer tensors[4];  // of a layer that swaps: weights, two moments, gradients
};

class Bench {
 public:
  Bench(const SwapOptions& o, int n_experts, const Team& team)
      : o_(o), n_experts_(n_experts), team_(team), comm_(team.comm(0)), rank_(team.rank(0)) {
    moecclExpertSwapConfig_t config = MOECCL_EXPERT_SWAP_CONFIG_INIT;
    config.interval = o.interval;
    config.horizon = o.horizon;
    demand(moecclExpertSwapCreate(&swap_, comm_, &config), "moecclExpertSwapCreate");
    for (int l = 0; l < 2 * o.layers; l++) layers_.push_back(std::make_unique<Layer>(o, n_experts, comm_, rank_));
    const size_t slots = static_cast<size_t>(n_experts / team.n_ranks());
    for (int l = 0; l < o.layers; l++) {
      Layer& layer = *layers_[static_cast<size_t>(l)];
      moecclSwapTensor_t tensors[4];
      for (int t = 0; t < 4; t++) {
        layer.tensors[t] = Buffer(slots * o.expert_bytes, o.job.memory);
        tensors[t] = {layer.tensors[t].data(), o.expert_bytes, t == 3 ? 1 : 0, 0};
      }
      demand(moecclExpertSwapAttach(swap_, layer.moe, tensors, 4, nullptr, nullptr), "moecclExpertSwapAttach");
    }
    in_ = Buffer(o.tokens * o.hidden * sizeof(float), o.job.memory);
    out_ = Buffer(in_.bytes(), o.job.memory);
  }
  ~Bench() {
    (void)moecclExpertSwapDestroy(swap_);
    layers_.clear();
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  Line run() {
    std::vector<double> off, on, exposed;
    for (int s = 0; s < o_.steps; s++) {
      // They alternate, and so does the first.
      for (const bool swaps : {s % 2 == 0, s % 2 != 0}) {
        double shown = 0;
        const double ms = step(s, swaps, shown);
        if (s < 4) continue;
        (swaps ? on : off).push_back(ms);
        if (swaps) exposed.push_back(shown);
      }
    }
    Line line;
    line.off_ms = team_.slowest(off);
    line.on_ms = team_.slowest(on);
    for (const double ms : team_.combine(exposed, moecclMax))
      line.exposed_ms += ms / static_cast<double>(exposed.size());
    for (int32_t l = 0; l < o_.layers; l++) {
      moecclExpertSwapInfo_t info{};
      info.size = sizeof info;
      demand(moecclExpertSwapGetInfo(swap_, l, &info), "moecclExpertSwapGetInfo");
      line.swaps += info.n_swaps;
      line.unpaid += info.n_unpaid;
      line.counts += info.n_counts;
      line.swap_us = std::max(line.swap_us, info.swap_us);
    }
    return line;
  }

 private:
  void demand(moecclResult_t result, const char* call) const { check(result, call, rank_, comm_); }

  double step(int s, bool swaps, double& exposed) {
    std::vector<std::vector<int32_t>> topk;
    const TopkShape shape{o_.tokens, o_.top_k, n_experts_};
    for (int l = 0; l < o_.layers; l++) {
      const auto popularity = static_cast<uint64_t>(l * 100 + 10 * s / o_.steps);
      topk.push_back(zipf_topk(shape, {o_.zipf, popularity},
                               mix(static_cast<uint64_t>(s), static_cast<uint64_t>(l), static_cast<uint64_t>(rank_))));
    }
    team_.barrier();
    const auto start = Clock::now();
    if (swaps) demand(moecclExpertSwapBegin(swap_), "moecclExpertSwapBegin");
    exposed += since_ms(start);
    for (int l = 0; l < o_.layers; l++)
      layer(*layers_[static_cast<size_t>(swaps ? l : o_.layers + l)], topk[static_cast<size_t>(l)]);
    const auto before = Clock::now();
    if (swaps) demand(moecclExpertSwapFinish(swap_, nullptr), "moecclExpertSwapFinish");
    exposed += since_ms(before);
    return since_ms(start);
  }

  void layer(Layer& l, const std::vector<int32_t>& topk) {
    const std::chrono::duration<double, std::milli> half(o_.step_ms / o_.layers / 2);
    std::this_thread::sleep_for(half);
    if (l.routing == nullptr)
      demand(moecclRoutingCreate(&l.routing, l.moe, topk.data(), nullptr, o_.tokens), "moecclRoutingCreate");
    else
      demand(moecclRoutingUpdate(l.routing, topk.data(), nullptr, o_.tokens), "moecclRoutingUpdate");
    moecclRoutingInfo_t info{};
    info.size = sizeof info;
    demand(moecclRoutingGetInfo(l.routing, &info), "moecclRoutingGetInfo");
    const size_t bytes = std::max<size_t>(1, info.n_rows) * o_.hidden * sizeof(float);
    if (rows_.bytes() < bytes) rows_ = Buffer(2 * bytes, o_.job.memory);
    demand(moecclDispatch(l.routing, in_.data(), rows_.data(), nullptr), "moecclDispatch");
    std::this_thread::sleep_for(half);
    demand(moecclCombine(l.routing, rows_.data(), out_.data(), nullptr), "moecclCombine");
  }

  const SwapOptions& o_;
  int n_experts_;
  const Team& team_;
  moecclComm_t comm_;
  int rank_;
  moecclExpertSwap_t swap_ = nullptr;
  std::vector<std::unique_ptr<Layer>> layers_;  // the swapping layers, then the others
  Buffer in_, out_, rows_;
};

int swap_main(int argc, char** argv) {
  const SwapOptions o = parse(argc, argv);
  Job job(o.job);
  const int n_experts = o.n_experts > 0 ? o.n_experts : 8 * job.n_ranks();
  if (n_experts % job.n_ranks() != 0 || o.top_k > n_experts)
    fail(std::to_string(n_experts) + " experts: give a multiple of the ranks, and at least --topk");
  const auto line = job.run<Line>(true, [&](int, const Team& team) { return Bench(o, n_experts, team).run(); });
  if (!job.leads()) return 0;
  std::printf(
      "# swap_perf: %d ranks, %d layers of %d experts of 4 x %zu bytes, %zu tokens, top-%d, zipf %.2f%s\n"
      "# step (ms, median of the slowest rank): %.2f without, %.2f with swaps (%+.2f %%); Begin and Finish took %.3f "
      "of "
      "it (%.2f %%)\n# %llu counts, %llu swaps of at most %.0f us, %llu that did not pay\n",
      job.n_ranks(), o.layers, n_experts, o.expert_bytes, o.tokens, o.top_k, o.zipf,
      o.job.pace ? ", links paced: EMULATED" : "", line.off_ms, line.on_ms, 100 * (line.on_ms / line.off_ms - 1),
      line.exposed_ms, 100 * line.exposed_ms / line.off_ms, static_cast<unsigned long long>(line.counts),
      static_cast<unsigned long long>(line.swaps), line.swap_us, static_cast<unsigned long long>(line.unpaid));
  const Json j = {{"ranks", job.n_ranks()},     {"emulated", o.job.pace},        {"step_ms_without", line.off_ms},
                  {"step_ms_with", line.on_ms}, {"exposed_ms", line.exposed_ms}, {"swaps", line.swaps},
                  {"swap_us", line.swap_us},    {"counts", line.counts},         {"unpaid", line.unpaid}};
  write_or_fail({{o.output_file, j.dump(2) + "\n"}});
  return 0;
}

}  // namespace
}  // namespace perf

int main(int argc, char** argv) { return perf::swap_main(argc, argv); }
