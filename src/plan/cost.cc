// SPDX-License-Identifier: Apache-2.0
#include "src/plan/cost.h"

#include <algorithm>

#include "src/plan/checker.h"
#include "src/plan/cost_run.h"

namespace moeccl::plan {

namespace {

// A price takes at most about this many simulated steps (0.2 s), and no more chunks than are needed to show the pace.
constexpr uint64_t kStepBudget = 1u << 20;
constexpr uint32_t kMostChunks = 64, kFewestChunks = 4;
// Beyond this many steps, a chunk takes a second or more, and is so long that a latency hardly shows in its pace. The
// fewest chunks are then one less, or two less.
constexpr uint64_t kLargePlan = 1u << 20, kHugePlan = 4u << 20;

uint32_t chunks_to_run(const Plan& plan) {
  uint64_t n_steps = 1;
  for (const Program& program : plan.programs) n_steps += program.n_steps();
  const auto affordable = static_cast<uint32_t>(std::min<uint64_t>(kStepBudget / n_steps, kMostChunks));
  const uint32_t fewest = kFewestChunks - (n_steps > kLargePlan) - (n_steps > kHugePlan);
  return std::min(plan.chunking.n_chunks, std::max(affordable, fewest));
}

// Adds the chunks that did not run. Each takes as long as one of the second half of those that did.
void extrapolate(const Plan& plan, uint32_t n_run, uint32_t n_half, double half_ns, Cost& cost) {
  const double pace = std::max(0.0, cost.total_ns - half_ns) / (n_run - n_half);
  const uint64_t count = plan.shape.count;
  double more = plan.chunking.n_chunks - n_run;
  if (count > 0 && plan.chunking.chunk > 0)  // the last chunk may be short
    more = std::min(more, static_cast<double>(count) / static_cast<double>(plan.chunking.chunk) - n_run);
  const double before = cost.total_ns;
  cost.total_ns += more * pace;
  const double times = cost.total_ns / before, repeats = (n_run + more) / n_run;
  for (double CriticalPath::*part : {&CriticalPath::copy_ns, &CriticalPath::reduce_ns, &CriticalPath::link_ns,
                                     &CriticalPath::switch_ns, &CriticalPath::step_ns})
    cost.path.*part *= times;
  for (double& busy : cost.lane_busy_ns) busy *= repeats;
  for (double& busy : cost.busiest_ns) busy *= repeats;
  for (uint64_t& bytes : cost.level_bytes) bytes = static_cast<uint64_t>(static_cast<double>(bytes) * repeats + 0.5);
  for (uint64_t& bytes : cost.sent_bytes) bytes = static_cast<uint64_t>(static_cast<double>(bytes) * repeats + 0.5);
}

}  // namespace

Cost price(const Plan& plan, std::span<const Binding> bindings, const LevelTree& tree, const Profile& profile) {
  const uint32_t n_run = chunks_to_run(plan);
  CostRun run(plan, bindings, tree, profile, n_run);
  run.run();
  Cost cost = run.cost();
  cost.priced_chunks = n_run;
  if (n_run < plan.chunking.n_chunks) {
    CostRun half(plan, bindings, tree, profile, n_run / 2);
    half.run();
    extrapolate(plan, n_run, n_run / 2, half.cost().total_ns, cost);
  }
  return cost;
}

Cost price(const Plan& plan, const LevelTree& tree, const Profile& profile) {
  return price(plan, uniform_bindings(plan), tree, profile);
}

std::string CriticalPath::summary() const {
  const double total = copy_ns + reduce_ns + link_ns + switch_ns + step_ns;
  std::string text;
  const auto add = [&](double ns, const char* name) {
    if (total > 0 && ns / total >= 0.005)
      text += format("{}{:.0f}% {}", text.empty() ? "" : ", ", 100 * ns / total, name);
  };
  add(copy_ns, "copying");
  add(reduce_ns, "reducing");
  add(link_ns, "links");
  add(switch_ns, "waiting for a core");
  add(step_ns, "steps");
  return format("{}; ends at rank {}", text.empty() ? "nothing to do" : text, last_rank);
}

}  // namespace moeccl::plan
