// SPDX-License-Identifier: Apache-2.0
#include "tools/moeccl_simulate.h"

#include <moeccl/moeccl.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "tools/option_names.h"
#include "tools/waiting.h"

namespace {

struct Options {
  moecclSimulateConfig_t config = MOECCL_SIMULATE_CONFIG_INIT;
  std::string topology, profile, algorithm, routing = "uniform";
  std::vector<int32_t> domain;
  bool json = false, one_host = false;
};
Options options;

perf::Named<moecclOp_t> operations() {
  perf::Named<moecclOp_t> named;
  for (const moecclOp_t op : {moecclOpDispatch, moecclOpAllReduce, moecclOpReduce, moecclOpBroadcast, moecclOpAllGather,
                              moecclOpReduceScatter, moecclOpAllToAll, moecclOpGather, moecclOpScatter,
                              moecclOpExpertGather, moecclOpExpertReduce, moecclOpTensorAllToAll})
    named.emplace_back(moecclOpName(op), op);
  return named;
}

// The options that an operation may have beside those of all: a layer's, those of experts that move, a collective's.
enum Kind : unsigned { kLayer = 1, kExperts = 2, kCollective = 4 };
Kind kind_of(moecclOp_t op) {
  if (op == moecclOpDispatch) return kLayer;
  return op == moecclOpExpertGather || op == moecclOpExpertReduce ? kExperts : kCollective;
}
constexpr std::pair<const char*, unsigned> kOptions[] = {
    {"--count", kExperts | kCollective},
    {"--one-host", kExperts | kCollective},
    {"--domain", kLayer | kExperts},
    {"--experts", kLayer | kExperts},
    {"--hidden-bytes", kLayer},
    {"--tokens", kLayer},
    {"--topk", kLayer},
    {"--layout", kLayer},
    {"--routing", kLayer},
    {"--seed", kLayer},
};
const tools::OptionNames kNames = {{"n_levels", "the number of --domain sizes"},
                                   {"domain", "--domain"},
                                   {"count", "--count"},
                                   {"hidden_bytes", "--hidden-bytes"},
                                   {"tokens_per_rank", "--tokens"},
                                   {"top_k", "--topk"},
                                   {"n_experts", "--experts"}};

void check_options(const perf::App& sub) {
  const moecclOp_t op = options.config.op;
  for (const auto& [name, kinds] : kOptions)
    if (sub.count(name) > 0 && (kinds & kind_of(op)) == 0)
      perf::refuse_option(name, std::string("has no meaning for ") + moecclOpName(op));
  if (kind_of(op) == kExperts && sub.count("--domain") == 0)
    perf::refuse_option("--domain", std::string("is needed for ") + moecclOpName(op) +
                                        ": give the size of an expert domain on each level, such as 2,4");
}

}  // namespace

perf::App* add_simulate(perf::App& app) {
  Options& o = options;
  o.config.op = moecclOpDispatch;
  o.config.type = moecclFloat32;
  o.config.count = 1 << 20;
  o.config.seed = 1;
  perf::App* sub = app.add_subcommand(
      "simulate", "what an operation would take on a topology: time, bytes, critical path, gain over flat");
  perf::add_one_of(sub, "op", o.config.op, operations(), "the operation (default: dispatch, which includes combine)");
  sub->add_option("--topology", o.topology,
                  "such as 'node:256(bw=50GB/s,lat=5us) gpu:8(bw=150GB/s)', or a file: such a text, MoECCL's JSON or "
                  "hwloc's XML")
      ->required();
  sub->add_option("--profile", o.profile, "profile file, see docs/calibration.md");
  sub->add_option("--algorithm,--algo", o.algorithm, "only this algorithm, and flat for comparison");
  sub->add_flag("--json", o.json, "print JSON, for programs");
  sub->add_option("--count", o.config.count, "elements of a collective's call, or of one expert")
      ->check(perf::not_negative());
  sub->add_option("--domain", o.domain, "sizes of expert domains, outermost level first, such as 2,4")
      ->delimiter(',')
      ->default_str("");
  sub->add_flag("--one-host", o.one_host, "collectives: ranks map each other's memory");
  sub->add_option("--hidden-bytes,--row-bytes", o.config.hidden_bytes, "bytes of a row (0: 14336)")
      ->check(perf::not_negative());
  sub->add_option("--tokens", o.config.tokens_per_rank, "tokens of a rank (0: 512, or the trace's)")
      ->check(perf::not_negative());
  sub->add_option("--topk", o.config.top_k, "experts per token (0: 8, or the trace's)");
  sub->add_option("--experts", o.config.n_experts, "number of experts (0: 256, or the trace's)");
  sub->add_option("--routing", o.routing, "uniform, zipf:EXPONENT, trace:PATH[:LAYER:STEP]");
  sub->add_option("--seed", o.config.seed, "seed of a generated routing")->check(perf::not_negative());
  perf::add_one_of<moecclMoeLayout_t>(sub, "--layout", o.config.layout,
                                      {{"rows", moecclLayoutRows}, {"expert", moecclLayoutExpertMajor}},
                                      "layout of the layer's rows (rows)");
  sub->callback([sub] { check_options(*sub); });
  return sub;
}

int run_simulate() {
  Options& o = options;
  o.config.topology = o.topology.c_str();
  o.config.profile = o.profile.empty() ? nullptr : o.profile.c_str();
  o.config.algorithm = o.algorithm.empty() ? nullptr : o.algorithm.c_str();
  o.config.routing = o.routing.c_str();
  o.config.n_levels = static_cast<int32_t>(o.domain.size());
  o.config.domain = o.domain.empty() ? nullptr : o.domain.data();
  o.config.json = o.json ? 1 : 0;
  o.config.one_host = o.one_host ? 1 : 0;
  // Each call makes the page anew, so the buffer is large enough for any page.
  std::string text(1 << 20, '\0');
  size_t needed = 0;
  const auto simulate = [&] { return moecclSimulate(&o.config, text.data(), text.size(), &needed); };
  if (tools::watched("simulate", simulate) != moecclSuccess) {
    std::fprintf(stderr, "simulate: %s\n", tools::in_options(moecclGetLastError(nullptr), kNames).c_str());
    return 1;
  }
  std::fputs(text.c_str(), stdout);
  return 0;
}
