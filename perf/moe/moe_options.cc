// SPDX-License-Identifier: Apache-2.0
#include "perf/moe/moe_options.h"

#include <algorithm>
#include <cstdlib>

#include "perf/common/fail.h"
#include "perf/common/pattern.h"
#include "perf/common/routing.h"
#include "perf/common/shared_options.h"
#include "perf/common/text.h"
#include "perf/moe/oracle.h"

namespace perf {
namespace {

constexpr size_t kDefaultTokens = 512;

// Hidden size, experts per token and routed experts, from the models' published configurations.
struct Model {
  const char* name;
  size_t hidden;
  int top_k, n_experts;
};
constexpr Model kModels[] = {
    {"deepseek-v3", 7168, 8, 256},  {"deepseek-v2", 5120, 6, 160},     {"deepseek-v2-lite", 2048, 6, 64},
    {"kimi-k2", 7168, 8, 384},      {"qwen3-235b-a22b", 4096, 8, 128}, {"qwen3-30b-a3b", 2048, 8, 128},
    {"mixtral-8x7b", 4096, 2, 8},   {"mixtral-8x22b", 6144, 2, 8},     {"olmoe-1b-7b", 2048, 8, 64},
    {"gpt-oss-120b", 2880, 4, 128}, {"gpt-oss-20b", 2880, 4, 32},      {"dbrx", 6144, 4, 16},
};

std::string model_names() {
  std::string names;
  for (const Model& m : kModels) names += std::string(names.empty() ? "" : ", ") + m.name;
  return names;
}

const Model* find_model(const std::string& name) {
  for (const Model& m : kModels)
    if (name == m.name) return &m;
  return nullptr;
}

void add_shape(App& app, MoeOptions& o) {
  app.add_option("--model", o.model, "shape of " + model_names())->check([](const std::string& name) {
    return find_model(name) == nullptr ? "unknown model " + name + "; known: " + model_names() : "";
  });
  app.add_option("--tokens", o.tokens, "tokens per rank (512; with a trace: at most)")->check(whole_number(0));
  app.add_option("--hidden", o.hidden, "elements of a row")->check(whole_number(1))->capture_default_str();
  app.add_option("--topk", o.top_k, "experts per token")->check(range(1, 64))->capture_default_str();
  app.add_option("--experts", o.n_experts, "routed experts")->check(range(1, 65535))->capture_default_str();
  app.add_option_function<std::string>(
         "--dtype", [&o](const std::string& name) { o.type = parse_data_types(name)[0]; }, "element type (bf16)")
      ->check([](const std::string& name) {
        const auto types = parse_data_types(name);
        return types.size() != 1 || !data_type(types[0]).is_float
                   ? "\"" + name + "\" is not one of float64, float32, float16, bfloat16, float8e4m3, float8e5m2"
                   : "";
      });
  add_one_of<moecclMoeLayout_t>(&app, "--layout", o.layout,
                                {{"expert", moecclLayoutExpertMajor}, {"rows", moecclLayoutRows}},
                                "rows grouped by expert (default), or each token once per rank");
  app.add_option("--align", o.align_rows, "expert layout: groups begin at a multiple of this")->check(whole_number(1));
  app.add_option("--capacity", o.capacity, "most tokens from one rank to one expert; 0: no limit");
}

void add_run(App& app, MoeOptions& o) {
  app.add_option("--routing", o.routing, "uniform, zipf[:exponent] or trace:PATH (perf/TRACE.md)")
      ->capture_default_str();
  app.add_option("--trace-layer", o.trace_layer, "layer of the trace");
  app.add_option("--trace-step", o.trace_step, "step of the trace");
  app.add_option("--seed", o.seed, "of the routing and the data")->check(not_negative())->capture_default_str();
  app.add_option(
         "--algo", o.algorithms,
         "comma list of auto, flat, 2dh, hier:D (default: flat, auto and, where the topology has two levels, 2dh)")
      ->delimiter(',');
  app.add_option("--iters", o.iters, "timed iterations")->check(positive())->capture_default_str();
  app.add_option("--warmup", o.warmup, "iterations before timing, after auto has tried its plans")
      ->check(not_negative())
      ->capture_default_str();
  app.add_flag("--update", o.update,
               "begin each iteration with moecclRoutingUpdate, as a training step does; not timed");
  app.add_flag("--backward", o.backward, "also check and time the backward operations");
  app.add_flag("--sequential", o.sequential,
               "one algorithm after another (default: in turns, which needs memory for all)");
  app.add_flag("-G,--cudagraph", o.cuda_graph,
               "on CUDA memory: capture each operation once, check and time replays (without the gradient of weights)");
  app.add_flag("--explain", o.explain, "print the plan of each algorithm");
  add_output(app, "-J,--output_file", o.output_file, "write results as JSON");
  add_output(app, "--plot", o.plot_file, "draw time per algorithm and bytes per level (SVG)");
}

double zipf_exponent(const std::string& routing) {
  if (routing == "zipf") return 1;
  char* end = nullptr;
  const double exponent = std::strtod(routing.c_str() + 5, &end);
  if (end == routing.c_str() + 5 || *end != '\0' || !(exponent >= 0 && exponent <= 20))
    fail("--routing " + routing + ": not an exponent of 0 to 20");
  return exponent;
}

// Adds weights that keep every sum exact: see oracle.h.
void add_weights(std::vector<RankRouting>& ranks, const MoeOptions& o) {
  const bool halves = has_half_weights(data_type(o.type), o.top_k);
  for (size_t rank = 0; rank < ranks.size(); rank++) {
    ranks[rank].weight.resize(ranks[rank].index.size());
    for (size_t i = 0; i < ranks[rank].weight.size(); i++)
      ranks[rank].weight[i] = halves && mix(o.seed, rank + 1, i) % 2 == 0 ? 0.5f : 1.0f;
  }
}

bool has_trace(const MoeOptions& o) { return o.routing.starts_with("trace:") || o.routing.starts_with("file:"); }

// Fails where no layer has this shape, before its tokens take memory.
void check_layer(const MoeOptions& o, int n_ranks) {
  const std::vector<int32_t> owners = contiguous_owners(o.n_experts, n_ranks);
  const std::string algorithm = "auto";
  moecclMoeConfig_t config = layer_config(o, owners, o.tokens, algorithm);
  config.deterministic = o.job.deterministic;
  const char* const topology = o.job.topology.empty() ? nullptr : o.job.topology.c_str();
  char message[512] = {};
  if (moecclMoeCheck(&config, n_ranks, topology, message, sizeof message) != moecclSuccess)
    fail(std::string("this layer cannot run: ") + message);
}

void from_trace(MoeOptions& o, std::vector<RankRouting>& ranks) {
  Trace trace;
  const std::string wrong = read_trace(o.routing.substr(o.routing.find(':') + 1), trace);
  if (!wrong.empty()) fail(wrong);
  if (o.trace_layer < 0 || o.trace_layer >= trace.n_layers || o.trace_step < 0 || o.trace_step >= trace.n_steps)
    fail("--trace-layer " + std::to_string(o.trace_layer) + ", --trace-step " + std::to_string(o.trace_step) +
         ": the trace has " + std::to_string(trace.n_layers) + " layers and " + std::to_string(trace.n_steps) +
         " steps");
  const auto refuse = [](const char* option, int given, int of_trace) {
    fail(std::string(option) + " is " + std::to_string(given) + ", and the trace has " + std::to_string(of_trace) +
         ": leave " + option + " out");
  };
  if (o.top_k_given && o.top_k != trace.k) refuse("--topk", o.top_k, trace.k);
  if (o.n_experts_given && o.n_experts != trace.n_experts) refuse("--experts", o.n_experts, trace.n_experts);
  o.top_k = trace.k;
  o.n_experts = trace.n_experts;
  const int32_t* step = trace.step(o.trace_layer, o.trace_step);
  const size_t n = ranks.size(), all = static_cast<size_t>(trace.n_tokens), k = static_cast<size_t>(trace.k);
  for (size_t r = 0; r < n; r++) {
    const size_t first = r * all / n, share = (r + 1) * all / n - first;
    ranks[r].n_tokens = o.tokens > 0 ? std::min(o.tokens, share) : share;
    ranks[r].index.assign(step + first * k, step + (first + ranks[r].n_tokens) * k);
  }
}

}  // namespace

MoeOptions parse_moe_options(int argc, char** argv) {
  MoeOptions o;
  App app("Times MoE dispatch and combine, after checking every row and every combined value", "dispatch_combine_perf");
  add_shape(app, o);
  add_run(app, o);
  add_job_options(app, o.job, Memories::kAll);
  parse_or_exit(app, argc, argv);
  o.top_k_given = app.count("--topk") > 0;
  o.n_experts_given = app.count("--experts") > 0;
  if (const Model* model = find_model(o.model)) {
    if (app.count("--hidden") == 0) o.hidden = model->hidden;
    if (!o.top_k_given) o.top_k = model->top_k;
    if (!o.n_experts_given) o.n_experts = model->n_experts;
  }
  if (o.cuda_graph && !o.job.on_cuda()) fail("--cudagraph: only with --mem cuda");
  if (!has_trace(o) && (o.trace_layer != 0 || o.trace_step != 0))
    fail("--trace-layer and --trace-step: only with --routing trace:PATH");
  if (!has_trace(o) && o.top_k > o.n_experts)
    fail("--topk " + std::to_string(o.top_k) + ": more than the " + std::to_string(o.n_experts) + " of --experts");
  return o;
}

std::vector<int32_t> contiguous_owners(int n_experts, int n_ranks) {
  std::vector<int32_t> owner;
  for (int64_t e = 0; e < n_experts; e++) owner.push_back(static_cast<int32_t>(e * n_ranks / n_experts));
  return owner;
}

moecclMoeConfig_t layer_config(const MoeOptions& options, const std::vector<int32_t>& expert_rank, size_t max_tokens,
                               const std::string& algorithm) {
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  config.hidden_bytes = options.hidden * data_type(options.type).bytes;
  config.type = options.type;
  config.top_k = options.top_k;
  config.n_experts = options.n_experts;
  config.expert_rank = expert_rank.data();
  config.max_tokens = max_tokens;
  config.layout = options.layout;
  config.align_rows = options.align_rows;
  config.capacity = options.capacity;
  config.algorithm = algorithm.c_str();
  return config;
}

std::vector<RankRouting> make_routing(MoeOptions& o, int n_ranks) {
  std::vector<RankRouting> ranks(static_cast<size_t>(n_ranks));
  if (has_trace(o)) {
    from_trace(o, ranks);
  } else {
    if (o.tokens == 0) o.tokens = kDefaultTokens;
    const TopkShape shape = {.n_tokens = o.tokens, .k = o.top_k, .n_experts = o.n_experts};
    const bool zipf = o.routing == "zipf" || o.routing.starts_with("zipf:");
    if (!zipf && o.routing != "uniform")
      fail("--routing " + o.routing + ": use uniform, zipf[:exponent] or trace:PATH");
    check_layer(o, n_ranks);
    for (size_t r = 0; r < ranks.size(); r++) {
      ranks[r].n_tokens = o.tokens;
      const uint64_t seed = mix(o.seed, r);
      ranks[r].index = zipf ? zipf_topk(shape, {zipf_exponent(o.routing), o.seed}, seed) : uniform_topk(shape, seed);
    }
  }
  if (!is_exact(data_type(o.type), o.top_k))
    fail(std::string("--dtype ") + data_type(o.type).name() + ": sums of top-" + std::to_string(o.top_k) +
         " cannot be checked; at most top-" + std::to_string(data_type(o.type).exact) + " can");
  add_weights(ranks, o);
  return ranks;
}

size_t most_tokens(const std::vector<RankRouting>& routing) {
  size_t most = 0;
  for (const RankRouting& r : routing) most = std::max(most, r.n_tokens);
  return most;
}

std::string describe(const MoeOptions& o, const std::vector<RankRouting>& routing) {
  return counted(routing.size(), "rank") + " of " + counted(most_tokens(routing), "token") + ", hidden " +
         std::to_string(o.hidden) + " " + data_type(o.type).name() + ", top-" + std::to_string(o.top_k) + " of " +
         std::to_string(o.n_experts) + " experts, " + o.routing + " routing, " +
         (o.layout == moecclLayoutRows ? "rows" : "expert") + " layout";
}

}  // namespace perf
