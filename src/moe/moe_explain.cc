// The page that moecclMoeExplain writes.
#include "src/moe/moe_layer.h"

namespace moeccl::comm {

namespace {

std::string step_text(const plan::Program& program, const plan::Step& step) {
  const auto name = [&](const plan::Ref& ref) {
    if (ref.buffer == plan::Buffer::kInput) return std::string("input");
    if (ref.buffer == plan::Buffer::kOutput) return std::string("output");
    return ref.rank == program.rank ? format("slot {}", ref.index) : format("slot {} of rank {}", ref.index, ref.rank);
  };
  const bool signals = step.kind == plan::StepKind::kSignal || step.kind == plan::StepKind::kWait;
  if (signals)
    return format("{} {} sig {}{}", plan::step_kind_name(step.kind),
                  step.peer == program.rank ? std::string("self") : format("rank {}", step.peer), int{step.sig},
                  step.lag ? format(", {} chunks ago", step.lag) : "");
  std::string text = format("{} {} <-", plan::step_kind_name(step.kind), name(step.dst));
  for (uint32_t i = 0; i < step.n_srcs; ++i) text += (i ? ", " : " ") + name(program.srcs[step.first_src + i]);
  return text;
}

void append_program(std::string& text, const char* title, const plan::Program& program) {
  text += format("\n{}: steps of this rank, for each chunk\n", title);
  for (const plan::Lane& lane : program.lanes) {
    text += format("  lane {}\n", plan::lane_kind_name(lane.kind));
    for (const plan::Step& step : lane.steps) text += "    " + step_text(program, step) + "\n";
  }
}

}  // namespace

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
  text += known ? "\ncandidates, priced by HierMoE Eq. 1-6 from this routing (all ranks)\n"
                : "\ncandidates (no bandwidth is known for any link: only copies in memory are priced)\n";
  for (size_t c = 0; c < prices_.size(); ++c) {
    const algo::MoePrice& p = prices_[c];
    text += format("  {} {:8} dispatch {:10.1f} us, combine {:10.1f} us;", c == chosen_ ? "*" : " ",
                   layer_.candidates()[c]->name, p.dispatch_us(), p.combine_us());
    for (uint32_t l = 0; l < tree.depth(); ++l)
      text += format(" {} {} rows {:.1f} us,", tree.levels[l].name, p.levels[l].rows, p.level_us[l]);
    text += format(" latency {:.1f} us, copies {:.1f} us\n", p.latency_us, p.copy_us);
  }
  text += format(
      "\nchosen: {}, {}; {} chunks in {} slots x {} of {} rows ({:.1f} MiB of staging)\n", i.algorithm,
      prices_.size() > 1 ? "the cheapest" : "the only candidate", tables_.n_chunks(), plan.slots.plan.n_slots,
      plan.slots.plan.depth, plan.slots.slot_rows,
      static_cast<double>(algo::moe_staging_bytes(layer_.config().shape, plan.slots.plan, plan.slots.slot_rows)) /
          (1 << 20));
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
  append_program(text, "dispatch", plan.dispatch);
  append_program(text, "combine", plan.combine);
  return text;
}

}  // namespace moeccl::comm
