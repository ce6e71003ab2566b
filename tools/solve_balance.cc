// SPDX-License-Identifier: Apache-2.0
// `moeccl solve balance`: replicas of experts on GPUs from the load of each expert (EPLB).
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "tools/solve.h"
#include "tools/waiting.h"

namespace tools {
namespace {

const OptionNames kNames = {{"n_experts", "the experts"}, {"n_slots", "--replicas"}, {"n_groups", "--groups"},
                            {"n_nodes", "--nodes"},       {"n_gpus", "--gpus"},      {"load", "--loads"}};

struct Options {
  TraceOptions trace;
  std::string loads;
  int replicas = 288, groups = 8, nodes = 4, gpus = 32;
  double tolerance = 0.001;
  int64_t max_work = 0;
};

struct Loads {
  size_t n_experts = 0;
  std::vector<double> load;  // [layers][n_experts]
};

// Counts the choices of each layer in all steps.
Loads count(const perf::Trace& t) {
  Loads counted{static_cast<size_t>(t.n_experts), {}};
  for (int l = 0; l < t.n_layers; ++l) {
    counted.load.resize(counted.load.size() + counted.n_experts);
    double* const layer = counted.load.data() + counted.load.size() - counted.n_experts;
    for (int s = 0; s < t.n_steps; ++s)
      for (const int32_t e : step_of(t, l, s))
        if (e >= 0) ++layer[e];
  }
  return counted;
}

// Reads a line for each layer, of numbers between blanks or commas.
Loads read(const std::string& path) {
  std::ifstream file(path);
  if (!file) fail("--loads " + path + ": cannot be opened: " + std::strerror(errno));
  Loads found;
  std::string line;
  for (size_t at = 1; std::getline(file, line); ++at) {
    std::replace(line.begin(), line.end(), ',', ' ');
    const size_t before = found.load.size();
    const char* next = line.c_str();
    for (char* end = nullptr;; next = end) {
      const double load = std::strtod(next, &end);
      if (end == next) break;
      found.load.push_back(load);
    }
    const std::string place = path + ", line " + std::to_string(at) + ": ", rest(next);
    const size_t word = rest.find_first_not_of(" \t\r");
    if (word != std::string::npos)
      fail(place + "\"" + rest.substr(word) + "\" is not a number: give the loads of a layer in each line");
    const size_t n = found.load.size() - before;
    if (n > 0 && found.n_experts > 0 && n != found.n_experts)
      fail(place + "there are " + std::to_string(n) + " loads: the lines before have " +
           std::to_string(found.n_experts));
    if (n > 0) found.n_experts = n;
  }
  if (found.load.empty()) fail(path + " has no loads: give those of a layer in each line");
  return found;
}

void run(const Options& o) {
  const Loads given = o.loads.empty() ? count(load_trace(o.trace)) : read(o.loads);
  moecclBalanceProblem_t p = MOECCL_BALANCE_PROBLEM_INIT;
  p.n_layers = static_cast<int32_t>(given.load.size() / given.n_experts);
  p.n_experts = static_cast<int32_t>(given.n_experts);
  p.n_slots = o.replicas, p.n_groups = o.groups, p.n_nodes = o.nodes, p.n_gpus = o.gpus;
  p.load = given.load.data();
  p.tolerance = o.tolerance;
  p.max_work = o.max_work;
  std::vector<int32_t> slots(static_cast<size_t>(p.n_layers) * static_cast<size_t>(p.n_slots));
  moecclBalanceAnswer_t a{};
  a.size = sizeof(a);
  check(watched("solve balance", [&] { return moecclSolveBalance(&p, slots.data(), &a); }), kNames);
  std::printf("%d layers of %d experts in %d slots of %d GPUs; ", p.n_layers, p.n_experts, p.n_slots, p.n_gpus);
  if (o.groups % o.nodes == 0) {
    std::printf("%d groups, each on one of %d nodes\n", o.groups, o.nodes);
  } else {
    std::printf("on any GPU, since %d nodes do not divide %d groups\n", o.nodes, o.groups);
  }
  std::printf("balance: mean load of a GPU / load of the fullest, of all layers\n");
  std::printf("%-16s %7.4f\n%-16s %7.4f\n%-16s %7.4f\n", "EPLB's method", a.balance_greedy, "this placement", a.balance,
              "upper bound", a.balance_bound);
}

}  // namespace

void add_balance(perf::App& solve, std::function<void()>& chosen) {
  auto o = std::make_shared<Options>();
  perf::App* app = solve.add_subcommand("balance", "replicas on GPUs from the load of each expert (EPLB)");
  add_trace_options(*app, o->trace, Reads::kLoads);
  perf::Option* const loads =
      app->add_option("--loads", o->loads, "file with a line for each layer: the loads of its experts");
  for (const char* of_trace : {"--trace", "--tokens", "--topk", "--experts", "--zipf"})
    loads->excludes(app->get_option(of_trace));
  app->add_option("--replicas", o->replicas, "slots of all GPUs")->check(perf::range(1, 65536));
  app->add_option("--groups", o->groups, "groups of experts; each stays on a node if the nodes divide them")
      ->check(perf::positive());
  app->add_option("--nodes", o->nodes, "nodes")->check(perf::range(1, 1024));
  app->add_option("--gpus", o->gpus, "GPUs")->check(perf::range(1, 1024));
  app->add_option("--tolerance", o->tolerance, "ends the search so near to the bound, relative")
      ->check(perf::within(1e-9, 1));
  app->add_option(
      "--max-work", o->max_work,
      "bounds the time of each search: loads of GPUs that it computes; 0: 4096 for each slot; below 0: none");
  app->callback([o, &chosen] { chosen = [o] { run(*o); }; });
}

}  // namespace tools
