// SPDX-License-Identifier: Apache-2.0
#include "src/exec/lane_trace.h"

#include <map>

#include "src/base/format.h"

namespace moeccl::exec {
namespace {

using Spans = std::vector<std::pair<int64_t, int64_t>>;

// Returns the spans of one lane in order of time, with adjoining spans joined.
Spans joined(Spans spans) {
  std::sort(spans.begin(), spans.end());
  Spans out;
  for (const auto& s : spans) {
    if (!out.empty() && s.first <= out.back().second)
      out.back().second = std::max(out.back().second, s.second);
    else
      out.push_back(s);
  }
  return out;
}

int64_t length(const Spans& spans) {
  int64_t ns = 0;
  for (const auto& [from, to] : spans) ns += to - from;
  return ns;
}

int64_t shared(const Spans& a, const Spans& b) {
  Spans both = a;
  both.insert(both.end(), b.begin(), b.end());
  return length(a) + length(b) - length(joined(std::move(both)));
}

double ms(int64_t ns) { return static_cast<double>(ns) / 1e6; }

}  // namespace

std::string lanes_text(const std::vector<LaneSpan>& spans) {
  std::map<plan::LaneKind, Spans> lanes;
  for (const LaneSpan& s : spans) lanes[s.lane].emplace_back(s.start_ns, s.end_ns);
  std::string text = "lanes of this rank in the last run, from its start on\n";
  for (auto& [kind, list] : lanes) {
    const size_t n = list.size();
    list = joined(std::move(list));
    text += format("  {:<6} {:>4} chunks, busy {:.3f} ms between {:.3f} and {:.3f} ms", plan::lane_kind_name(kind), n,
                   ms(length(list)), ms(list.front().first), ms(list.back().second));
    for (const auto& [other, before] : lanes)
      if (other < kind)
        text += format(", {:.3f} ms of it with {}", ms(shared(list, before)), plan::lane_kind_name(other));
    text += "\n";
  }
  return text;
}

}  // namespace moeccl::exec
