// SPDX-License-Identifier: Apache-2.0
// Writes the page of moecclMoeExplain.
#include <algorithm>
#include <cmath>
#include <utility>

#include "src/moe/moe_layer.h"
#include "src/plan/long_line.h"
#include "src/plan/printer.h"

namespace moeccl::comm {

namespace {

std::string guess_text(float guess) {
  if (guess == 0) return "not run yet";
  return format("steps took {:.2f} of it{}", std::abs(guess), guess < 0 ? " before, to be tried again" : "");
}

// Says how much of a long line can be under way at once if an operation's slots take `slot_bytes` on each rank. A layer
// that fits one chunk needs no more, and staging that the line has already is not advised.
std::string long_line_text(const MoeHost& host, uint32_t n_chunks, uint64_t slot_bytes) {
  const plan::LevelTree& tree = host.tree();
  const plan::LongLine line = plan::long_line(tree, *host.profile());
  if (line.bytes == 0) return "";
  uint64_t most = 0;
  const plan::Groups groups(tree.levels[line.level]);
  for (uint32_t g = 0; g < tree.levels[line.level].n_groups; ++g) most = std::max<uint64_t>(most, groups.size(g));
  const double share = 100.0 * static_cast<double>(most * slot_bytes) / static_cast<double>(line.bytes);
  const bool staging_limits =
      share < 100 && n_chunks >= 2 && 4 * host.staging_bytes() < plan::staging_of_line(line);  // both halves, twice
  return plan::long_line_text(tree, line, staging_limits, share,
                              share >= 100 ? "the staging has room for that"
                                           : format("this layer has {:.0f}% of that under way at once", share));
}

}  // namespace

const char* MoeRouting::why_chosen() const {
  if (prices_.size() == 1) return layer_.config().algorithms.size() == 1 ? "forced" : "the only one that fits";
  if (captured_) return "as captured in a graph";
  if (guesses_[chosen_] <= 0)
    return algo::cheapest(prices_) == chosen_ ? "the cheapest" : "tried, as its price is close";
  const bool raced = std::any_of(guesses_.begin(), guesses_.end(), [](float g) { return g != 1; });
  return raced ? "the fastest of the last steps" : "the cheapest";
}

// Returns Eq. 1-6 next to the price, and the reason where the two choose differently.
std::string MoeRouting::hiermoe_text() const {
  const MoeHost& host = layer_.host();
  const algo::HierMoeChoice model =
      algo::hiermoe_choice(prices_, host.tree(), *host.profile(), layer_.config().shape.row_bytes);
  if (prices_.size() < 2 || model.both_us[model.best] <= 0) return "";
  std::string text = format("HierMoE Eq. 1-6 with {}:", model.measured ? "measured AlltoAlls" : "the topology's links");
  for (size_t c = 0; c < prices_.size(); ++c)
    if (model.both_us[c] > 0) text += format(" {} {:.1f} us,", layer_.candidates()[c]->name, model.both_us[c]);
  text.back() = ';';
  text += format(" d* is {}", layer_.candidates()[model.best]->name);
  if (model.best == chosen_) return text + ", which runs\n";
  const algo::MoePrice& theirs = prices_[model.best];
  const algo::MoePrice& ours = prices_[chosen_];
  const char* why = model.both_us[chosen_] <= 0 ? "the equations lack a figure for a level that it uses"
                    : guesses_[chosen_] <= 0 && algo::cheapest(prices_) != chosen_ ? "steps try another plan"
                    : theirs.both_us() < ours.both_us() ? "steps were faster by the other plan"
                    : theirs.dispatch.latency_us > ours.dispatch.latency_us
                        ? "its hops wait for one another more often"
                        : "the model leaves out what chunks overlap and cores copy";
  return text + format("; {} runs: {}\n", layer_.candidates()[chosen_]->name, why);
}

Result<std::string> MoeRouting::explain() const {
  moecclRoutingInfo_t i{};
  i.size = sizeof(i);
  MOECCL_TRY(info(&i));
  const MoeHost& host = layer_.host();
  const plan::LevelTree& tree = host.tree();
  const MoeCandidate& plan = *layer_.candidates()[chosen_];
  const double row = static_cast<double>(layer_.config().shape.row_bytes);
  const bool known = algo::links_known(tree);
  std::string text = format(
      "MoE routing on rank {} of {}: {} tokens, top-{} of {} experts, rows of {} bytes, layout {}\n", host.rank(),
      host.n_ranks(), i.n_tokens, layer_.config().shape.top_k, layer_.config().placement.n_experts(),
      layer_.config().shape.row_bytes, layer_.config().shape.expert_major ? "ExpertMajor" : "Rows");
  text += format("{} rows arrive here for {} tokens; capacity dropped {} choices of this rank\n", i.n_rows, i.n_unique,
                 i.n_dropped);
  text += format("\ncandidates, priced from this routing (all ranks); {}\n", plan::figures_text(*host.profile(), tree));
  for (size_t c = 0; c < prices_.size(); ++c) {
    const algo::MoePrice& p = prices_[c];
    text += format("  {} {:8} dispatch {:10.1f} us, combine {:10.1f} us;", c == chosen_ ? "*" : " ",
                   layer_.candidates()[c]->name, p.dispatch_us(), p.combine_us());
    for (uint32_t l = 0; l < tree.depth(); ++l)
      text += format(" {} {} rows {:.1f} us,", tree.levels[l].name, p.levels[l].rows, p.level_us[l]);
    text += format(" latency {:.1f} us, cores {:.1f} us", p.dispatch.latency_us, p.dispatch.core_us);
    if (guesses_[c] != 1) text += format("; {}", guess_text(guesses_[c]));
    text += "\n";
  }
  if (!layer_.left_out().empty()) text += format("  left out: {}\n", layer_.left_out());
  text += hiermoe_text();
  const auto cut = [&](uint32_t n_chunks, const algo::MoePlanShape& shape, uint64_t slot_rows) {
    const uint64_t bytes = algo::moe_staging_bytes(layer_.config().shape, shape, slot_rows);
    return format("{} chunks in {} slots x {} of {} rows ({:.1f} MiB of staging)", n_chunks, shape.n_slots, shape.depth,
                  slot_rows, static_cast<double>(bytes) / (1 << 20));
  };
  text += format("\nchosen: {}, {}{}; {}\n", i.algorithm, why_chosen(),
                 layer_.follows_force().ok() ? "" : "; " + layer_.follows_force().message(),
                 cut(host_chunks_, plan.slots.plan, plan.slots.slot_rows));
  text += long_line_text(host, host_chunks_,
                         algo::moe_staging_bytes(layer_.config().shape, plan.slots.plan, plan.slots.slot_rows));
  if (device_tables_ != nullptr)
    text += format("on CUDA memory {}\n", cut(kernel_chunks_, plan.on_kernel.shape, plan.kernel_rows));
  text += format("this rank would send {} bytes without dedup (T * k * row)\n", i.logical_bytes);
  for (int32_t l = 0; l < i.n_levels; ++l)
    text += format("  level {:12} {:8} rows {:12} bytes payload {:10} bytes metadata ({:.2f} %)\n", i.levels[l].name,
                   i.levels[l].rows, i.levels[l].bytes, i.levels[l].metadata_bytes,
                   i.levels[l].rows ? 100.0 * static_cast<double>(i.levels[l].metadata_bytes) /
                                          (static_cast<double>(i.levels[l].rows) * row)
                                    : 0.0);
  const char* mark = i.emulated ? " (EMULATED links)" : "";
  const auto timing = [&](const char* what, double predicted, double measured) {
    text += format("{}: predicted {}, measured {}{}\n", what, known ? format("{:.1f} us", predicted) : "unknown",
                   measured > 0 ? format("{:.1f} us", measured) : "not yet", mark);
  };
  timing("dispatch", i.predicted_dispatch_us, i.measured_dispatch_us);
  timing("combine", i.predicted_combine_us, i.measured_combine_us);
  const MoeCandidate::Programs& programs = device_tables_ != nullptr ? plan.on_kernel : plan.steps;
  for (const auto& [title, program] :
       {std::pair("dispatch", &programs.dispatch), std::pair("combine", &programs.combine)})
    text += format("\n{}: steps of this rank, for each chunk\n{}", title, plan::steps_text(*program));
  return text;
}

}  // namespace moeccl::comm
