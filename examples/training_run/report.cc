// SPDX-License-Identifier: Apache-2.0
#include "report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>

namespace training {

double StepReport::communication_ms() const {
  double sum = 0;
  for (const double ms : kind_ms) sum += ms;
  return sum;
}
double step_ms(const StepReport& s) { return s.facts.ms; }
double combine_ms(const StepReport& s) { return s.kind_ms[Times::kCombine]; }
double communication_ms(const StepReport& s) { return s.communication_ms(); }

std::vector<uint64_t> traffic(const Ranks& ranks) {
  std::vector<moecclTraffic_t> to(static_cast<size_t>(ranks.n));
  check(moecclCommTraffic(ranks.tokens, to.data(), ranks.n), "moecclCommTraffic", ranks.tokens);
  std::vector<uint64_t> bytes;
  for (const moecclTraffic_t& t : to) bytes.push_back(t.bytes);
  return bytes;
}

StepReport join(const Ranks& ranks, const StepFacts& facts, const std::vector<uint64_t>& before, int ranks_per_node) {
  const auto n = static_cast<size_t>(ranks.n), per_node = static_cast<size_t>(ranks_per_node);
  StepReport report;
  report.facts = facts;
  std::vector<uint64_t> sent = traffic(ranks), all(n * n);
  for (size_t r = 0; r < n; r++) sent[r] -= before[r];
  // Takes the last rank's begin and end of each operation. All ranks read the clock of the same host.
  std::vector<Times::Span> spans = std::move(ranks.times.spans);
  ranks.times.spans.clear();
  std::vector<double> last{facts.ms};
  for (const Times::Span& s : spans) last.push_back(s.begin), last.push_back(s.end);
  check(moecclAllReduce(last.data(), last.data(), last.size(), moecclFloat64, moecclMax, ranks.tokens, nullptr),
        "moecclAllReduce", ranks.tokens);
  check(moecclAllGather(sent.data(), all.data(), n, moecclUint64, ranks.tokens, nullptr), "moecclAllGather",
        ranks.tokens);
  report.facts.ms = last[0];
  for (size_t i = 0; i < spans.size(); i++) report.kind_ms[spans[i].kind] += 1e3 * (last[2 * i + 2] - last[2 * i + 1]);
  std::vector<double> in(n / per_node), out(in.size());
  for (size_t from = 0; from < n; from++) {
    for (size_t to = 0; to < n; to++) {
      const double mb = static_cast<double>(all[from * n + to]) / 1e6;
      const bool crosses = from / per_node != to / per_node;
      (crosses ? report.node_mb : report.inner_mb) += mb;
      if (crosses) out[from / per_node] += mb, in[to / per_node] += mb;
    }
  }
  report.busiest_mb = std::max(*std::max_element(in.begin(), in.end()), *std::max_element(out.begin(), out.end()));
  return report;
}

double Run::median(std::vector<double> v) {
  if (v.empty()) return 0;
  std::sort(v.begin(), v.end());
  return (v[(v.size() - 1) / 2] + v[v.size() / 2]) / 2;
}

double Run::apart(const Run& other) const {
  double most = 0;
  for (size_t s = 0; s < std::min(loss.size(), other.loss.size()); s++)
    most = std::max(most, std::abs(loss[s] / other.loss[s] - 1));
  return most;
}

void print_table(const std::vector<Run>& runs) {
  std::printf("%-26s %8s %6s %7s %8s %9s %9s %9s %7s %6s %8s %9s\n", "feature", "ms/step", "vs 1st", "comm %",
              "combine", "nodes MB", "inner MB", "busiest", "drops %", "swaps", "loss", "apart");
  for (const Run& r : runs) {
    const double ms = r.typical(step_ms);
    std::printf("%-26s %8.1f %6.2f %7.1f %8.1f %9.2f %9.2f %9.2f %7.1f %6d %8.4f %9.1e\n", r.name.c_str(), ms,
                runs[0].typical(step_ms) / ms,
                100 * r.typical([](const StepReport& s) { return s.communication_ms() / s.facts.ms; }),
                r.typical(combine_ms), r.typical([](const StepReport& s) { return s.node_mb; }),
                r.typical([](const StepReport& s) { return s.inner_mb; }),
                r.typical([](const StepReport& s) { return s.busiest_mb; }), 100 * r.typical([](const StepReport& s) {
                  return static_cast<double>(s.facts.dropped);
                }) / std::max(r.slot_choices, 1.0),
                r.swaps, r.loss.back(), r.apart(runs[0]));
  }
  for (const Run& r : runs) {
    int timed = 0;
    for (const auto& round : r.rounds)
      for (const StepReport& s : round) timed += s.facts.swaps;
    if (r.swaps > 0) std::printf("%s: %d of %d swaps in steps that were timed\n", r.name.c_str(), timed, r.swaps);
    double before = 0, after = 0;
    for (const auto& round : r.rounds)
      for (const StepReport& s : round) before += s.facts.combine_mb, after += s.facts.replaced_mb;
    if (before > 0)
      std::printf("%s: %.1f %% of combine's bytes between nodes saved by re-placing\n", r.name.c_str(),
                  100 * (1 - after / before));
  }
}

void print_rows(const std::vector<Run>& runs, const std::string& data, const std::string& options) {
  const auto run = [&](const char* name) {
    const auto found = std::find_if(runs.begin(), runs.end(), [&](const Run& r) { return r.name == name; });
    return found == runs.end() ? nullptr : &*found;
  };
  // The figure of the paper and the rule are JSON. A goal of ours has no figure of a paper: null.
  struct Row {
    const char *paper, *item, *before, *after, *paper_value, *rule;
    double (*value)(const StepReport&);
    const char* why;
  };
  // HierMoE's Qwen3-30B-A3B: HD-MoE over Megatron-LM and HierMoE over HD-MoE in the time of AlltoAll (V-D, Table IV).
  const Row rows[] = {
      {"HierMoE", "Fig. 11, training run, communication, flat over auto (HD-MoE over Megatron-LM)", "flat", "auto",
       "1.72", "[\"within\", 0.15]", communication_ms, "another model on slower links of 4 nodes of 2 ranks"},
      {"HierMoE", "Fig. 11, training run, skewed, communication, auto over swap (HierMoE over HD-MoE)", "auto", "swap",
       "1.16", "[\"points\", 0.05]", communication_ms, "another model on slower links of 4 nodes of 2 ranks"},
      {"HierMoE", "training run, ms per step, flat over auto", "flat", "auto", "null", "[\"at least\", 1.18]", step_ms,
       ""},
      {"HierMoE", "training run, skewed, ms per step, auto over swap", "auto", "swap", "null", "[\"at least\", 1.1]",
       step_ms, ""},
      {"NetMoE", "Fig. 6, training run, ms per step, flat over re-placing (up to)", "flat", "flat re-placing", "1.67",
       "[\"at least\", 1.42]", step_ms,
       "combine is a fifth of the step, and Begin, with its exchange in every step, takes part of what combine gains; "
       "the "
       "paper's figure is the best of its models"},
      {"NetMoE", "training run, time of combine, flat over re-placing", "flat", "flat re-placing", "null",
       "[\"at least\", 1.3]", combine_ms, ""},
  };
  for (const Row& row : rows) {
    const Run *before = run(row.before), *after = run(row.after);
    const bool is_swap = std::string(row.after) == "swap";
    if (before == nullptr || after == nullptr || is_swap != (data == "skewed")) continue;
    const double share = before->typical([](const StepReport& s) { return s.communication_ms() / s.facts.ms; });
    std::printf("{\"paper\": \"%s\", \"item\": \"%s\", \"paper_value\": %s, \"ours\": %.4g, ", row.paper, row.item,
                row.paper_value, before->typical(row.value) / after->typical(row.value));
    std::printf("\"rule\": %s, \"how\": \"run\", ", row.rule);
    std::printf("\"command\": \"build/examples/training_run%s\", ", options.c_str());
    std::printf("\"why\": \"%s%scommunication is %.0f %% of the slower side's step (EMULATED links)\"}\n", row.why,
                *row.why == 0 ? "" : "; ", 100 * share);
  }
}

// Draws the loss of each step above, and a bar with each feature's ms per step below.
bool write_svg(const std::string& path, const std::vector<Run>& runs, const std::string& note) {
  const char* const colors[] = {"#0072B2", "#E69F00", "#000000", "#009E73", "#D55E00",
                                "#CC79A7", "#56B4E9", "#999999", "#7E3FF2", "#8B5A2B"};
  constexpr double kLeft = 60, kWidth = 800, kPlot = 480, kTop = 60, kHigh = 260, kBar = 22;
  double low = 1e30, high = 0, most_ms = 0;
  size_t n_steps = 2;
  for (const Run& r : runs) {
    n_steps = std::max(n_steps, r.loss.size());
    most_ms = std::max(most_ms, r.typical(step_ms));
    for (const double v : r.loss) low = std::min(low, v), high = std::max(high, v);
  }
  low = std::floor(low), high = std::ceil(high);
  const double bars = kTop + kHigh + 80, height = bars + kBar * static_cast<double>(runs.size()) + 40;
  std::ofstream out(path);
  out << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << kWidth << ' ' << height << "\" width=\""
      << kWidth << "\" height=\"" << height << "\" font-family=\"sans-serif\" font-size=\"13\">\n"
      << "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"20\" y=\"24\" font-size=\"15\" "
         "font-weight=\"bold\">Loss and time of a step, by feature</text>\n<text x=\"20\" y=\"44\" fill=\"#555\">"
      << note << "</text>\n";
  const auto y_of = [&](double v) { return kTop + kHigh * (high - v) / (high - low); };
  for (double v = low; v <= high; v += 1)
    out << "<line x1=\"" << kLeft << "\" x2=\"" << kLeft + kPlot << "\" y1=\"" << y_of(v) << "\" y2=\"" << y_of(v)
        << "\" stroke=\"#ddd\"/><text x=\"" << kLeft - 6 << "\" y=\"" << y_of(v) + 4 << "\" text-anchor=\"end\">" << v
        << "</text>\n";
  const auto x_of = [&](size_t step) {
    return kLeft + kPlot * static_cast<double>(step) / static_cast<double>(n_steps - 1);
  };
  const size_t every = std::max<size_t>(1, (n_steps + 9) / 10);
  for (size_t s = 0; s < n_steps; s += every)
    out << "<text x=\"" << x_of(s) << "\" y=\"" << kTop + kHigh + 18 << "\" text-anchor=\"middle\">" << s + 1
        << "</text>\n";
  for (size_t i = 0; i < runs.size(); i++) {
    const Run& r = runs[i];
    const char* color = colors[i % std::size(colors)];
    // Earlier lines are wider, so that those that coincide all show.
    out << "<polyline fill=\"none\" stroke=\"" << color << "\" stroke-width=\""
        << (i == 0   ? 5
            : i == 1 ? 3
                     : 1.4)
        << "\" points=\"";
    for (size_t s = 0; s < r.loss.size(); s++) out << x_of(s) << ',' << y_of(r.loss[s]) << ' ';
    out << "\"/>\n<text x=\"" << kLeft + kPlot + 16 << "\" y=\"" << kTop + 12 + 19 * static_cast<double>(i)
        << "\" fill=\"" << color << "\">" << r.name << "</text>\n";
    const double y = bars + kBar * static_cast<double>(i), ms = r.typical(step_ms);
    char label[64];
    std::snprintf(label, sizeof label, "%.0f ms", ms);
    out << "<text x=\"230\" y=\"" << y + 14 << "\" text-anchor=\"end\">" << r.name << "</text><rect x=\"240\" y=\"" << y
        << "\" width=\"" << 460 * ms / most_ms << "\" height=\"" << kBar - 5 << "\" fill=\"" << color
        << "\"/><text x=\"" << 246 + 460 * ms / most_ms << "\" y=\"" << y + 14 << "\">" << label << "</text>\n";
  }
  out << "<text x=\"" << kLeft + kPlot / 2 << "\" y=\"" << kTop + kHigh + 38 << "\" text-anchor=\"middle\">step"
      << "</text>\n</svg>\n";
  return out.good();
}

}  // namespace training
