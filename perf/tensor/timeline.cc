// SPDX-License-Identifier: Apache-2.0
#include "perf/tensor/timeline.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <sstream>

#include "perf/common/fail.h"

namespace perf {
namespace {

using Spans = std::vector<std::pair<double, double>>;

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

}  // namespace

const char* lane_name(moecclLaneKind_t lane) {
  switch (lane) {
    case moecclLaneInter:
      return "inter";
    case moecclLaneIntra:
      return "intra";
    case moecclLaneCopy:
      return "copy";
    default:
      return "main";
  }
}

std::vector<RankSpan> gather_timeline(const Team& team, size_t count, moecclDataType_t type, uint32_t n_chunks) {
  const size_t most = size_t{4} * n_chunks + 1;
  std::vector<RankSpan> mine(most);
  std::vector<moecclLaneSpan_t> spans(most);
  size_t n = 0;
  check(moecclPlanTimeline(team.comm(0), moecclOpTensorAllToAll, count, type, spans.data(), most, &n),
        "moecclPlanTimeline", team.rank(0), team.comm(0));
  for (RankSpan& s : mine) s.rank = -1;
  for (size_t i = 0; i < std::min(n, most); i++) mine[i] = {team.rank(0), spans[i]};
  std::vector<char> bytes(most * sizeof(RankSpan));
  std::memcpy(bytes.data(), mine.data(), bytes.size());
  const std::vector<char> all = team.gather(bytes, bytes.size());
  std::vector<RankSpan> out(all.size() / sizeof(RankSpan));
  std::memcpy(out.data(), all.data(), all.size());
  std::erase_if(out, [](const RankSpan& s) { return s.rank < 0; });
  return out;
}

LaneUse lane_use(const std::vector<RankSpan>& spans, moecclLaneKind_t lane, const std::vector<int>& group_of) {
  LaneUse use;
  std::map<int, std::pair<double, double>> of_rank;
  std::map<int, Spans> of_group;
  for (const RankSpan& s : spans) {
    if (s.span.lane != lane) continue;
    const double from = s.span.start_us, to = s.span.end_us;
    use.first_us = use.used ? std::min(use.first_us, from) : from;
    use.last_us = std::max(use.last_us, to);
    use.used = true;
    auto [it, fresh] = of_rank.try_emplace(s.rank, from, to);
    if (!fresh) it->second = {std::min(it->second.first, from), std::max(it->second.second, to)};
    of_group[group_of[static_cast<size_t>(s.rank)]].emplace_back(from, to);
  }
  for (const auto& [rank, window] : of_rank)
    use.window_us += (window.second - window.first) / static_cast<double>(of_rank.size());
  for (auto& [group, list] : of_group)
    for (const auto& [from, to] : joined(std::move(list)))
      use.busy_us += (to - from) / static_cast<double>(of_group.size());
  return use;
}

std::string timeline_svg(const std::string& title, const std::string& note, const std::vector<TimelineRow>& rows,
                         const std::vector<int>& group_of) {
  constexpr double kWidth = 900, kLeft = 130, kRight = 90, kBar = 16, kTop = 70, kGap = 18;
  constexpr const char* kColours[] = {"#999999", "#0072B2", "#009E73", "#D55E00"};
  constexpr moecclLaneKind_t kLanes[] = {moecclLaneInter, moecclLaneIntra, moecclLaneCopy};
  double most_us = 1;
  for (const TimelineRow& row : rows) most_us = std::max(most_us, row.total_us);
  const double scale = (kWidth - kLeft - kRight) / most_us;
  std::ostringstream out;
  const double height = kTop + static_cast<double>(rows.size()) * (3 * (kBar + 2) + kGap) + 40;
  out << "<svg xmlns='http://www.w3.org/2000/svg' width='" << kWidth << "' height='" << height
      << "' font-family='sans-serif' font-size='12'>\n<rect width='100%' height='100%' fill='white'/>\n<text x='20' "
         "y='26' font-size='16' font-weight='bold'>"
      << title << "</text>\n<text x='20' y='46' fill='#444'>" << note << "</text>\n";
  double y = kTop;
  for (const TimelineRow& row : rows) {
    out << "<text x='20' y='" << y + kBar << "' font-weight='bold'>" << row.name << "</text>\n";
    for (const moecclLaneKind_t lane : kLanes) {
      out << "<text x='" << kLeft - 8 << "' y='" << y + kBar - 4 << "' text-anchor='end' font-size='11'>"
          << lane_name(lane) << "</text>\n";
      for (const RankSpan& s : row.spans) {
        if (s.span.lane != lane || group_of[static_cast<size_t>(s.rank)] != group_of[0]) continue;
        out << "<rect x='" << kLeft + s.span.start_us * scale << "' y='" << y << "' width='"
            << std::max(0.3, (s.span.end_us - s.span.start_us) * scale) << "' height='" << kBar << "' fill='"
            << kColours[lane] << "' fill-opacity='" << (s.span.chunk % 2 == 0 ? 0.9 : 0.55) << "'/>\n";
      }
      y += kBar + 2;
    }
    out << "<text x='" << kLeft + row.total_us * scale + 4 << "' y='" << y - kBar - 8 << "' font-size='11'>"
        << static_cast<int>(row.total_us) / 1000.0 << " ms</text>\n";
    y += kGap;
  }
  out << "</svg>\n";
  return out.str();
}

}  // namespace perf
