// SPDX-License-Identifier: Apache-2.0
// Loss curves as JSON and as a small SVG chart.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace training {

struct Curve {
  std::string name;
  std::vector<float> loss;
  double mean_of_last(size_t n) const {
    double sum = 0;
    n = std::min(n, loss.size());
    for (size_t i = loss.size() - n; i < loss.size(); i++) sum += static_cast<double>(loss[i]);
    return n == 0 ? 0 : sum / static_cast<double>(n);
  }
};
struct Claim {
  std::string text;
  bool holds;
};

inline bool write_json(const std::string& path, const std::vector<Curve>& curves, const std::vector<Claim>& claims) {
  std::ofstream out(path);
  out.precision(9);
  out << "{\n  \"claims\": [";
  for (size_t i = 0; i < claims.size(); i++)
    out << (i ? "," : "") << "\n    {\"text\": \"" << claims[i].text
        << "\", \"holds\": " << (claims[i].holds ? "true" : "false") << "}";
  out << "\n  ],\n  \"curves\": [";
  for (size_t i = 0; i < curves.size(); i++) {
    out << (i ? "," : "") << "\n    {\"name\": \"" << curves[i].name << "\", \"loss\": [";
    for (size_t s = 0; s < curves[i].loss.size(); s++) out << (s ? ", " : "") << curves[i].loss[s];
    out << "]}";
  }
  out << "\n  ]\n}\n";
  return out.good();
}

// Curves that coincide share one line with several names.
struct Line {
  std::vector<std::string> names;
  std::vector<double> y;
};

constexpr size_t kBin = 10;

// Each point is the mean of 10 steps.
inline std::vector<Line> distinct_lines(const std::vector<Curve>& curves) {
  std::vector<Line> lines;
  for (const Curve& c : curves) {
    std::vector<double> y;
    for (size_t s = 0; s < c.loss.size(); s += kBin) {
      const size_t end = std::min(c.loss.size(), s + kBin);
      y.push_back(
          Curve{"", {c.loss.begin() + static_cast<long>(s), c.loss.begin() + static_cast<long>(end)}}.mean_of_last(
              kBin));
    }
    const auto same = std::find_if(lines.begin(), lines.end(), [&](const Line& line) { return line.y == y; });
    if (same != lines.end())
      same->names.push_back(c.name);
    else
      lines.push_back({{c.name}, y});
  }
  return lines;
}

inline bool write_svg(const std::string& path, const std::vector<Curve>& curves) {
  constexpr double kLeft = 56, kTop = 40, kPlotWidth = 520, kPlotHeight = 320, kWidth = 800,
                   kLegend = kLeft + kPlotWidth + 16;
  // Okabe and Ito's palette, which colour-blind readers can tell apart.
  const char* const colors[] = {"#0072B2", "#E69F00", "#000000", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"};
  const std::vector<Line> lines = distinct_lines(curves);
  double low = 1e30, high = 0;
  size_t n_points = 2, n_names = 0;
  for (const Line& line : lines) {
    n_points = std::max(n_points, line.y.size());
    n_names += line.names.size();
    for (const double y : line.y) low = std::min(low, y), high = std::max(high, y);
  }
  constexpr double kTick = 0.2;
  low = std::floor(low / kTick) * kTick;
  high = std::max(low + kTick, std::ceil(high / kTick) * kTick);
  const double height = std::max(kTop + kPlotHeight + 50,
                                 kTop + 18 * static_cast<double>(n_names) + 10 * static_cast<double>(lines.size()));
  const auto y_of = [&](double v) { return kTop + kPlotHeight * (1 - (v - low) / (high - low)); };
  const auto x_of = [&](double p) { return kLeft + kPlotWidth * p / static_cast<double>(n_points - 1); };
  std::ofstream out(path);
  out << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << kWidth << ' ' << height << "\" width=\""
      << kWidth << "\" height=\"" << height
      << "\" font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
      << "<text x=\"" << kLeft << "\" y=\"22\" font-size=\"15\" font-weight=\"bold\">Loss, mean of " << kBin
      << " steps</text>\n";
  const int n_ticks = static_cast<int>(std::lround((high - low) / kTick));
  for (int i = 0; i <= n_ticks; i++) {
    const double v = low + kTick * i;
    char label[16];
    std::snprintf(label, sizeof label, "%.1f", v);
    out << "<line x1=\"" << kLeft << "\" x2=\"" << kLeft + kPlotWidth << "\" y1=\"" << y_of(v) << "\" y2=\"" << y_of(v)
        << "\" stroke=\"#ddd\"/><text x=\"" << kLeft - 6 << "\" y=\"" << y_of(v) + 4 << "\" text-anchor=\"end\">"
        << label << "</text>\n";
  }
  double legend = kTop + 12;
  for (size_t i = 0; i < lines.size(); i++) {
    // Later lines are thinner, so that those below still show where they nearly coincide.
    out << "<polyline fill=\"none\" stroke=\"" << colors[i % std::size(colors)] << "\" stroke-width=\""
        << (i == 0 ? 4 : 1.8) << "\" points=\"";
    for (size_t p = 0; p < lines[i].y.size(); p++)
      out << x_of(static_cast<double>(p)) << ',' << y_of(lines[i].y[p]) << ' ';
    out << "\"/><line x1=\"" << kLegend << "\" x2=\"" << kLegend + 22 << "\" y1=\"" << legend - 4 << "\" y2=\""
        << legend - 4 << "\" stroke=\"" << colors[i % std::size(colors)] << "\" stroke-width=\"" << (i == 0 ? 4 : 2)
        << "\"/>\n";
    for (const std::string& name : lines[i].names) {
      out << "<text x=\"" << kLegend + 28 << "\" y=\"" << legend << "\">" << name << "</text>\n";
      legend += 18;
    }
    legend += 8;
  }
  const size_t steps = curves.empty() ? 0 : curves[0].loss.size();
  for (size_t quarter = 0; quarter <= 4; quarter++)
    out << "<text x=\"" << x_of(static_cast<double>(n_points - 1) * static_cast<double>(quarter) / 4) << "\" y=\""
        << kTop + kPlotHeight + 18 << "\" text-anchor=\"middle\">" << steps * quarter / 4 << "</text>\n";
  out << "<text x=\"" << kLeft + kPlotWidth / 2 << "\" y=\"" << kTop + kPlotHeight + 38
      << "\" text-anchor=\"middle\">step</text>\n</svg>\n";
  return out.good();
}

}  // namespace training
