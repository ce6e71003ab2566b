// SPDX-License-Identifier: Apache-2.0
#include "src/plan/printer.h"

#include <algorithm>

#include "src/plan/long_line.h"

namespace moeccl::plan {

std::string time_text(double ns) {
  if (ns < 1e3) return format("{:.0f} ns", ns);
  if (ns < 1e6) return format("{:.1f} us", ns / 1e3);
  if (ns < 1e9) return format("{:.2f} ms", ns / 1e6);
  return format("{:.3f} s", ns / 1e9);
}

std::string bytes_text(uint64_t bytes) {
  const auto b = static_cast<double>(bytes);
  if (bytes < 1u << 10) return format("{} B", bytes);
  if (bytes < 1u << 20) return format("{:.1f} KiB", b / (1 << 10));
  if (bytes < 1u << 30) return format("{:.2f} MiB", b / (1 << 20));
  return format("{:.2f} GiB", b / (1 << 30));
}

std::string list_text(std::span<const uint32_t> numbers) {
  constexpr int kMostRuns = 6;
  std::string text;
  int n_runs = 0;
  for (size_t i = 0; i < numbers.size();) {
    size_t j = i + 1;
    while (j < numbers.size() && numbers[j] == numbers[j - 1] + 1) ++j;
    if (n_runs++ == kMostRuns) return text + format(", ... ({} in all)", numbers.size());
    if (!text.empty()) text += ", ";
    text += format("{}", numbers[i]);
    if (j - i > 1) text += format("{}{}", j - i == 2 ? ", " : "..", numbers[j - 1]);
    i = j;
  }
  return text;
}

namespace {

// A step as text with holes for the numbers that may differ between repetitions: "put {} ...". Steps with equal texts
// are repetitions.
struct Line {
  std::string text;  // each hole is a '\1'
  std::vector<std::vector<uint32_t>> holes;

  void hole(std::vector<uint32_t> numbers) {
    text += '\1';
    holes.push_back(std::move(numbers));
  }
  std::string filled() const {
    std::string out;
    size_t next = 0;
    for (const char c : text) {
      if (c != '\1') {
        out += c;
        continue;
      }
      std::vector<uint32_t> numbers = holes[next++];
      const bool same = std::all_of(numbers.begin(), numbers.end(), [&](uint32_t n) { return n == numbers[0]; });
      if (same) numbers.resize(1);
      out += list_text(numbers);
    }
    return out;
  }
};

// Appends Refs that belong together: the sources of a reduction, or a single one.
void add_refs(Line& line, const Program& program, std::span<const Ref> refs) {
  const Ref& first = refs[0];
  std::vector<uint32_t> parts, indices, ranks;
  bool all_own = true;
  for (const Ref& ref : refs) {
    parts.push_back(ref.part);
    indices.push_back(ref.index);
    ranks.push_back(ref.rank);
    all_own = all_own && ref.rank == program.rank;
  }
  const bool alike = std::all_of(refs.begin(), refs.end(),
                                 [&](const Ref& r) { return r.buffer == first.buffer && r.parts == first.parts; });
  if (!alike) {
    for (size_t i = 0; i < refs.size(); ++i) {
      if (i > 0) line.text += " + ";
      add_refs(line, program, refs.subspan(i, 1));
    }
    return;
  }
  line.text += first.buffer == Buffer::kInput ? "input " : first.buffer == Buffer::kOutput ? "output " : "slot ";
  line.hole(indices);
  if (first.parts > 1) {
    line.text += " part ";
    line.hole(parts);
    line.text += format("/{}", first.parts);
  }
  if (!all_own) {
    line.text += " of rank ";
    line.hole(ranks);
  }
}

Line line_of(const Program& program, const Step& step) {
  Line line{step_kind_name(step.kind), {}};
  if (step.when == When::kFirst) line.text = "first chunk: " + line.text;
  if (step.when == When::kLast) line.text = "last chunk: " + line.text;
  line.text += ' ';
  if (step.kind == StepKind::kSignal || step.kind == StepKind::kWait) {
    line.hole({step.peer});
    line.text += format(", sig {}", step.sig);
    if (step.lag > 0) line.text += format(", {} chunk{} back", step.lag, step.lag == 1 ? "" : "s");
    return line;
  }
  add_refs(line, program, {program.srcs.data() + step.first_src, step.n_srcs});
  line.text += " -> ";
  add_refs(line, program, {&step.dst, 1});
  if (step.rows != kNoRows) {
    line.text += ", rows of list ";
    line.hole({step.rows});
  }
  if (step.final_reduce) line.text += ", final";
  return line;
}

// Returns how often the `period` lines from `first` on repeat.
size_t repetitions(const std::vector<Line>& lines, size_t first, size_t period) {
  size_t n = 1;
  while (first + (n + 1) * period <= lines.size()) {
    for (size_t j = 0; j < period; ++j)
      if (lines[first + j].text != lines[first + n * period + j].text) return n;
    ++n;
  }
  return n;
}

std::string lane_text(const Program& program, const Lane& lane) {
  constexpr size_t kLongestPeriod = 8;
  std::vector<Line> lines;
  for (const Step& step : lane.steps) lines.push_back(line_of(program, step));
  std::string text;
  for (size_t first = 0; first < lines.size();) {
    size_t period = 1, times = 1;
    for (size_t p = 1; p <= kLongestPeriod && first + p <= lines.size(); ++p) {
      const size_t n = repetitions(lines, first, p);
      if (n > 1 && n * p > period * times) period = p, times = n;
    }
    for (size_t j = 0; j < period; ++j) {
      Line line = lines[first + j];
      for (size_t t = 1; t < times; ++t) {
        const Line& other = lines[first + t * period + j];
        for (size_t h = 0; h < line.holes.size(); ++h)
          line.holes[h].insert(line.holes[h].end(), other.holes[h].begin(), other.holes[h].end());
      }
      const std::string mark = times == 1 ? "" : format("{}x ", times);
      text += format("  {:>4}  {:>5}{}{}\n", first + j, mark, period > 1 && j > 0 ? "| " : "", line.filled());
    }
    first += period * times;
  }
  return text;
}

std::string candidates_text(const Explanation& e) {
  std::string text = "candidates";
  if (facts(e.plan.shape.op).private_sizes)
    text += format(", priced for blocks of {}", bytes_text(e.priced_block_bytes));
  text += "\n";
  for (const PlanCandidate& c : e.candidates) {
    const char* mark = c.name == e.plan.algorithm ? "*" : " ";
    text += c.refusal.empty() ? format("  {} {:<12} {}\n", mark, c.name, time_text(c.predicted_ns))
                              : format("  {} {:<12} no: {}\n", mark, c.name, c.refusal);
  }
  return text;
}

std::string traffic_text(const Explanation& e) {
  std::string text = "bytes between groups, all ranks\n";
  for (uint32_t l = 0; l < e.tree.depth() && l < e.cost.level_bytes.size(); ++l) {
    const Level& level = e.tree.levels[l];
    text += format("  {:<12} {:>12}", level.name, bytes_text(e.cost.level_bytes[l]));
    if (level.link.bytes_per_ns > 0) text += format(", {:.4g} GB/s", level.link.bytes_per_ns);
    if (level.link.alpha_ns > 0) text += format(", {} latency", time_text(level.link.alpha_ns));
    text += "\n";
  }
  return text;
}

std::string time_lines(const Explanation& e) {
  const char* label = e.emulated ? " EMULATED" : "";
  if (facts(e.plan.shape.op).private_sizes)
    return e.measured_ns > 0 ? format("measured  {}{}\n", time_text(e.measured_ns), label) : "measured  not yet\n";
  std::string text = format("predicted {}{}: {}\n", time_text(e.cost.total_ns), label, e.cost.path.summary());
  if (e.cost.priced_chunks < e.plan.chunking.n_chunks)
    text +=
        format("  ({} of {} chunks priced, the rest at their pace)\n", e.cost.priced_chunks, e.plan.chunking.n_chunks);
  if (e.measured_ns <= 0) return text + "measured  not yet\n";
  return text + format("measured  {}{}, {:.2f} times the prediction\n", time_text(e.measured_ns), label,
                       e.measured_ns / e.cost.total_ns);
}

// Says how well the plan fills a long line, and whether its staging is what limits it: chunks twice as long would not
// fit.
std::string long_line_text(const Explanation& e) {
  const Shape& s = e.plan.shape;
  const uint32_t l = s.long_line.level;
  if (s.long_line.bytes == 0 || facts(s.op).private_sizes || l >= e.cost.busiest_ns.size()) return "";
  const double busy = 100 * e.cost.busiest_ns[l] / e.cost.total_ns;
  double used = 0;
  for (const Program& p : e.plan.programs) {
    const double slots = p.n_slots + static_cast<double>(p.n_part_slots) / p.slot_parts;
    used = static_cast<double>(e.plan.chunking.chunk * s.element_bytes) * slots * p.depth;
  }
  const bool staging_limits = e.plan.chunking.n_chunks >= 2 && 2 * used > static_cast<double>(s.staging_bytes) &&
                              2 * s.staging_bytes < staging_of_line(s.long_line);
  return long_line_text(e.tree, s.long_line, staging_limits, busy,
                        format("this plan keeps it busy for {:.0f}% of the time", busy));
}

std::string reach_text(const Shape& shape) {
  std::string text = shape.reach.staging ? "staging" : "puts only";
  if (shape.reach.reads && !shape.reach.views) text += ", buffers to read";
  if (shape.reach.views) text += ", buffers";
  return text;
}

}  // namespace

std::string steps_text(const Program& program) {
  std::string text;
  for (size_t l = 0; l < program.lanes.size(); ++l) {
    const Lane& lane = program.lanes[l];
    text += format("  {} lane {}\n", lane_kind_name(lane.kind), l);
    text += lane_text(program, lane);
  }
  return text;
}

std::string explain(const Explanation& e) {
  const Shape& s = e.plan.shape;
  const Chunking& k = e.plan.chunking;
  std::string text = format("{} with {}{}{}\n", op_title(s.op), e.plan.algorithm, e.why.empty() ? "" : ", ", e.why);
  if (e.emulated) text += "EMULATED: links are paced, times are not those of this machine\n";
  const bool private_sizes = facts(s.op).private_sizes;
  text += private_sizes
              ? format("ranks {}, blocks of each rank's own counts, elements of {} B\n", s.n_ranks, s.element_bytes)
              : format("ranks {}, blocks of {} elements of {} B ({}){}{}\n", s.n_ranks, s.count, s.element_bytes,
                       bytes_text(s.count * s.element_bytes), s.deterministic ? ", deterministic" : "",
                       s.scaled ? ", scaled" : "");
  text += format("reach of peers: {}\n", reach_text(s));
  text += private_sizes
              ? format("plan {:016x}\n", e.plan.hash)
              : format("chunks {} of {} elements, plan {:016x}\n", k.n_chunks, std::min(k.chunk, s.count), e.plan.hash);
  if (!e.candidates.empty()) text += candidates_text(e);
  if (!private_sizes) text += traffic_text(e);
  text += time_lines(e) + long_line_text(e);
  if (!private_sizes && e.rank < e.cost.sent_bytes.size())
    text += format("rank {} sends {}\n", e.rank, bytes_text(e.cost.sent_bytes[e.rank]));
  for (const Program& program : e.plan.programs) {
    if (program.rank != e.rank) continue;
    const std::string parts =
        program.n_part_slots == 0 ? "" : format(" and {} of 1/{} of a slot", program.n_part_slots, program.slot_parts);
    text += format("steps of rank {} ({} per chunk, staging of {} slots{} in {} rotation{})\n", e.rank,
                   program.n_steps(), program.n_slots, parts, program.depth, program.depth == 1 ? "" : "s");
    text += steps_text(program);
  }
  return text;
}

}  // namespace moeccl::plan
