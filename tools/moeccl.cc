// SPDX-License-Identifier: Apache-2.0
// The command `moeccl`: what a person asks of the library without writing a program. It uses only the public headers.
#include <moeccl/moeccl.h>

#include <cstdio>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "perf/common/cli.h"
#include "perf/common/output.h"
#include "tools/moeccl_calibrate.h"
#include "tools/moeccl_simulate.h"
#include "tools/moeccl_status.h"
#include "tools/moeccl_topo.h"
#include "tools/option_names.h"
#include "tools/solve.h"
#include "tools/waiting.h"

namespace {

const tools::OptionNames kNames = {{"hidden_bytes", "--hidden-bytes"},   {"top_k", "--topk"},
                                   {"n_experts", "--experts"},           {"max_tokens", "--tokens"},
                                   {"memory_cap_bytes", "--memory-cap"}, {"n_ranks", "--ranks"},
                                   {"algorithm", "--algorithm"},         {"topology", "--topology"}};

int fail(const char* what, moecclComm_t comm = nullptr) {
  std::fprintf(stderr, "%s: %s\n", what, tools::in_options(moecclGetLastError(comm), kNames).c_str());
  return 1;
}

const char* or_null(const std::string& text) { return text.empty() ? nullptr : text.c_str(); }

// Sets *ranks to those that the topology gives, where the command line gives no number of ranks.
bool ranks_of(const perf::App& command, const std::string& topology, int* ranks) {
  if (topology.empty() || topology == "auto" || command.count("--ranks") > 0) return true;
  moecclSimulateConfig_t config = MOECCL_SIMULATE_CONFIG_INIT;
  config.topology = topology.c_str();
  config.op = moecclOpBroadcast;
  config.algorithm = "flat";
  config.json = 1;
  std::string page(1 << 20, '\0');  // large enough for any page
  if (moecclSimulate(&config, page.data(), page.size(), nullptr) != moecclSuccess) return false;
  *ranks = nlohmann::json::parse(page.c_str()).at("ranks");
  return true;
}

constexpr int kMostRanks = 1024;  // threads of this process

struct PlanOptions {
  moecclOp_t op = moecclOpAllReduce;
  moecclDataType_t type = moecclFloat32;
  size_t count = 1 << 20;
  int ranks = 4;
  std::string topology, force;
  bool prove = false;
};

// Thread ranks of this process stand in for the communicator, and rank 0 explains.
int explain_plan(PlanOptions& o, const perf::App& command) {
  if (!ranks_of(command, o.topology, &o.ranks)) return fail("topology");
  if (o.ranks > kMostRanks) {
    std::fprintf(stderr, "the topology has %d ranks: plans of at most %d are explained\n", o.ranks, kMostRanks);
    return 1;
  }
  std::vector<moecclComm_t> comms(static_cast<size_t>(o.ranks));
  moecclConfig_t config = MOECCL_CONFIG_INIT;
  config.topology = or_null(o.topology);
  const auto make = [&] { return moecclCommInitAll(comms.data(), o.ranks, &config); };
  if (tools::watched("plan", make) != moecclSuccess) return fail("cannot make the ranks");
  const auto explain = [&](char* text, size_t bytes, size_t* needed) {
    return tools::watched("plan",
                          [&] { return moecclPlanExplain(comms[0], o.op, o.count, o.type, text, bytes, needed); });
  };
  int bad = 0;
  if (!o.force.empty() && moecclPlanForce(comms[0], o.op, o.force.c_str()) != moecclSuccess)
    bad = fail("plan", comms[0]);
  size_t needed = 0;
  if (!bad && explain(nullptr, 0, &needed) != moecclSuccess) bad = fail("plan", comms[0]);
  if (!bad) {
    std::string text(needed, '\0');
    if (explain(text.data(), text.size(), nullptr) == moecclSuccess)
      std::fputs(text.c_str(), stdout);
    else
      bad = fail("plan", comms[0]);
  }
  if (!bad && o.prove) {
    const auto prove = [&] { return moecclPlanProve(comms[0], o.op, o.count, o.type); };
    if (tools::watched("plan --prove", prove) != moecclSuccess)
      bad = fail("proof", comms[0]);
    else
      std::printf("\nProved: every rank ends with the right bytes, in every order that the signals allow.\n");
  }
  for (const moecclComm_t c : comms) {
    if (moecclCommDestroy(c) != moecclSuccess) bad = fail("cannot destroy a communicator");
  }
  return bad;
}

struct LayerOptions {
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  int ranks = 8;
  std::string topology, algorithm;
};

// Needs no communicator: this is what a user asks before starting a job.
int check_layer(LayerOptions& o, const perf::App& command) {
  if (!ranks_of(command, o.topology, &o.ranks)) return fail("topology");
  o.config.algorithm = or_null(o.algorithm);
  char message[512] = {};
  if (moecclMoeCheck(&o.config, o.ranks, or_null(o.topology), message, sizeof(message)) != moecclSuccess) {
    std::fprintf(stderr, "this layer cannot run: %s\n", tools::in_options(message, kNames).c_str());
    return 1;
  }
  size_t bytes = 0;
  if (moecclMoeQuerySize(&o.config, o.ranks, or_null(o.topology), &bytes) != moecclSuccess) return fail("size");
  std::printf("this layer can run on %d rank%s; it holds at most %.1f MiB on each\n", o.ranks, o.ranks == 1 ? "" : "s",
              static_cast<double>(bytes) / (1 << 20));
  return 0;
}

// Operations whose plan follows from the call alone.
perf::Named<moecclOp_t> operations() {
  perf::Named<moecclOp_t> named;
  for (int i = 0; i < MOECCL_NUM_OPS; ++i) {
    const auto op = static_cast<moecclOp_t>(i);
    const bool of_call = i < moecclOpSendRecv || op == moecclOpTensorAllToAll;
    if (of_call) named.emplace_back(moecclOpName(op), op);
  }
  return named;
}
perf::Named<moecclDataType_t> types() {
  perf::Named<moecclDataType_t> named;
  for (int i = 0; i < MOECCL_NUM_DATA_TYPES; ++i) {
    const auto type = static_cast<moecclDataType_t>(i);
    named.emplace_back(moecclTypeName(type), type);
  }
  return named;
}

std::string version_text() {
  int number = 0;
  if (moecclGetVersion(&number) != moecclSuccess) return moecclGetLastError(nullptr);
  return "MoECCL " + std::to_string(number / 10000) + "." + std::to_string(number / 100 % 100) + "." +
         std::to_string(number % 100);
}

constexpr int kBadUsage = 2;

}  // namespace

int main(int argc, char** argv) {
  perf::check_output_at_exit();
  perf::App app("MoECCL: collective communication for Mixture-of-Experts training");
  app.require_subcommand();
  app.always_capture_default();
  app.set_version_flag("--version", version_text);
  perf::App* version = app.add_subcommand("version", "the library's version");

  PlanOptions plan;
  perf::App* explain = app.add_subcommand("plan", "which algorithm would run an operation, why, and its steps");
  perf::add_one_of(explain, "op", plan.op, operations(), "the operation")->required();
  explain
      ->add_option("--count", plan.count,
                   "elements, as in the operation's call; not for alltoallv, which is planned without its counts")
      ->check(perf::not_negative());
  perf::add_one_of(explain, "--type", plan.type, types(), "element type (float32)");
  explain->add_option("--ranks", plan.ranks, "number of ranks (default: the topology's, or 4)")
      ->check(perf::range(1, kMostRanks))
      ->default_str("");
  explain->add_option("--topology", plan.topology, "such as 'node:2(bw=1GB/s,lat=20us) gpu:4'");
  explain->add_option("--algorithm,--algo,--force", plan.force, "explain this algorithm instead of the cheapest");
  explain->add_flag("--prove", plan.prove,
                    "and prove that the plan is right in every order of events (moecclPlanProve)");
  explain->callback([&plan, explain] {
    if (plan.op == moecclOpAllToAllv && explain->count("--count") > 0)
      perf::refuse_option("--count", "has no meaning for alltoallv");
  });

  LayerOptions layer;
  layer.config.hidden_bytes = 2 * 7168;
  layer.config.top_k = 8;
  layer.config.n_experts = 256;
  layer.config.max_tokens = 4096;
  perf::App* check = app.add_subcommand("check", "whether a MoE layer can run, and the memory that it holds");
  check->add_option("--hidden-bytes", layer.config.hidden_bytes, "bytes of a row")->check(perf::positive());
  check->add_option("--topk", layer.config.top_k, "experts per token");
  check->add_option("--experts", layer.config.n_experts, "number of experts");
  check->add_option("--tokens", layer.config.max_tokens, "most tokens of a rank")->check(perf::not_negative());
  check->add_option("--memory-cap", layer.config.memory_cap_bytes, "cap in bytes, such as 256M; 0 for none")
      ->transform(perf::size_value());
  check->add_option("--ranks", layer.ranks, "number of ranks (default: the topology's, or 8)")->default_str("");
  check->add_option("--topology", layer.topology, "such as 'node:2 gpu:4'");
  check->add_option("--algorithm,--algo", layer.algorithm, "auto, flat, 2dh, hier:D");

  const perf::App* topo = add_topo(app);
  const perf::App* doctor = add_doctor(app);
  std::function<void()> solve;
  tools::add_solve(app, solve);
  const perf::App* simulate = add_simulate(app);
  const perf::App* calibrate = add_calibrate(app);
  const perf::App* status = add_status(app);
  const perf::App* postmortem = add_postmortem(app);

  perf::App* at = &app;
  std::string path = "moeccl";
  for (int i = 1; i < argc && argv[i][0] != '-' && at->has_subcommands(); ++i) {
    at = at->find_subcommand(argv[i]);
    if (at == nullptr) {
      std::fprintf(stderr, "%s: there is no command \"%s\": %s --help lists them\n", path.c_str(), argv[i],
                   path.c_str());
      return kBadUsage;
    }
    path += std::string(" ") + argv[i];
  }
  app.parse(argc, argv, kBadUsage);
  if (topo->parsed()) return run_topo();
  if (doctor->parsed()) return run_doctor();
  if (solve) {
    try {
      solve();
    } catch (const std::bad_alloc&) {
      std::fprintf(stderr, "solve: there is not enough memory for a problem of this size\n");
      return 1;
    }
    return 0;
  }
  if (simulate->parsed()) return run_simulate();
  if (calibrate->parsed()) return run_calibrate();
  if (status->parsed()) return run_status();
  if (postmortem->parsed()) return run_postmortem();
  if (version->parsed()) {
    std::puts(version_text().c_str());
    return 0;
  }
  return explain->parsed() ? explain_plan(plan, *explain) : check_layer(layer, *check);
}
