// SPDX-License-Identifier: Apache-2.0
// `moeccl solve ...`: the placement solvers on a recorded routing (perf/TRACE.md), with traffic, balance and predicted
// time before and after.
#pragma once

#include <moeccl/moeccl.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "perf/common/cli.h"
#include "perf/common/routing.h"
#include "tools/option_names.h"

namespace tools {

// Which step of which file to use; without a file, a trace is generated from a seed.
struct TraceOptions {
  std::string path;
  int layer = 0, step = 0;
  int tokens = 8192, k = 8, experts = 256;  // of a generated trace
  double zipf = 0.8;
};
// Which of the choices a command reads: none but the number of tokens, how many rows and experts there are, which
// experts, or how often each expert is chosen in all steps of each layer.
enum class Reads { kTokens, kRows, kExperts, kLoads };
void add_trace_options(perf::App& app, TraceOptions& options, Reads reads = Reads::kExperts);
// Exits with a message when the file is not a trace or lacks the step.
perf::Trace load_trace(const TraceOptions& options);
// Returns one step's choices, [n_tokens][k].
inline std::vector<int32_t> step_of(const perf::Trace& t, int layer, int step) {
  const int32_t* at = t.step(layer, step);
  return {at, at + static_cast<size_t>(t.n_tokens) * static_cast<size_t>(t.k)};
}

[[noreturn]] void fail(const std::string& sentence);
// Fails with the library's message, in which `names` takes the place of C fields.
void check(moecclResult_t result, const OptionNames& names);
// Returns the change from `before` to `after` in percent, where one that is printed as 0.0 has no sign.
inline double change(double before, double after) {
  const double percent = before > 0 ? 100 * (after / before - 1) : 0;
  return percent > -0.05 && percent < 0.05 ? 0 : percent;
}

// Each adds its commands, and sets `run` to the one that the command line names.
void add_samples(perf::App& solve, std::function<void()>& run);
void add_swap(perf::App& solve, std::function<void()>& run);
void add_replicas(perf::App& solve, std::function<void()>& run);
void add_balance(perf::App& solve, std::function<void()>& run);
void add_domains(perf::App& solve, std::function<void()>& run);
void add_chunks(perf::App& solve, std::function<void()>& run);
void add_layout(perf::App& solve, std::function<void()>& run);

inline void add_solve(perf::App& app, std::function<void()>& run) {
  perf::App* solve = app.add_subcommand("solve", "placement solvers: what would be gained, before anything is moved");
  solve->require_subcommand();
  add_samples(*solve, run);
  add_swap(*solve, run);
  add_replicas(*solve, run);
  add_balance(*solve, run);
  add_domains(*solve, run);
  add_chunks(*solve, run);
  add_layout(*solve, run);
}

}  // namespace tools
