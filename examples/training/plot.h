// Loss curves as JSON and as a small SVG chart.
#pragma once

#include <algorithm>
#include <fstream>
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

// Each point is the mean of 10 steps. Curves that coincide lie on one another; dashes let those below show.
inline bool write_svg(const std::string& path, const std::vector<Curve>& curves) {
  constexpr double kWidth = 760, kHeight = 420, kLeft = 60, kTop = 20, kLegend = 240;
  constexpr size_t kBin = 10;
  const char* const colors[] = {"#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd",
                                "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"};
  std::vector<std::vector<double>> points;
  double low = 1e30, high = 0;
  for (const Curve& c : curves) {
    std::vector<double>& p = points.emplace_back();
    for (size_t s = 0; s < c.loss.size(); s += kBin) {
      const Curve bin{"",
                      {c.loss.begin() + static_cast<long>(s),
                       c.loss.begin() + static_cast<long>(std::min(c.loss.size(), s + kBin))}};
      p.push_back(bin.mean_of_last(kBin));
      low = std::min(low, p.back());
      high = std::max(high, p.back());
    }
  }
  const auto y_of = [&](double v) { return kTop + (kHeight - 60) * (1 - (v - low) / std::max(high - low, 1e-9)); };
  std::ofstream out(path);
  out << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << kWidth + kLegend << "\" height=\"" << kHeight
      << "\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
  for (int i = 0; i <= 4; i++) {
    const double v = low + (high - low) * i / 4;
    out << "<line x1=\"" << kLeft << "\" x2=\"" << kWidth << "\" y1=\"" << y_of(v) << "\" y2=\"" << y_of(v)
        << "\" stroke=\"#ddd\"/><text x=\"" << kLeft - 6 << "\" y=\"" << y_of(v) + 4 << "\" text-anchor=\"end\">"
        << static_cast<double>(static_cast<long>(v * 1000)) / 1000 << "</text>\n";
  }
  for (size_t i = 0; i < points.size(); i++) {
    const char* color = colors[i % std::size(colors)];
    out << "<polyline fill=\"none\" stroke=\"" << color << "\" stroke-width=\"2\" stroke-dasharray=\"" << 4 + 3 * i
        << " " << 3 * i << "\" points=\"";
    for (size_t p = 0; p < points[i].size(); p++)
      out << kLeft + (kWidth - kLeft) * static_cast<double>(p) /
                         static_cast<double>(std::max<size_t>(1, points[i].size() - 1))
          << "," << y_of(points[i][p]) << " ";
    const double y = kTop + 20 + 18 * static_cast<double>(i);
    out << "\"/><line x1=\"" << kWidth + 12 << "\" x2=\"" << kWidth + 36 << "\" y1=\"" << y << "\" y2=\"" << y
        << "\" stroke=\"" << color << "\" stroke-width=\"2\"/><text x=\"" << kWidth + 42 << "\" y=\"" << y + 4 << "\">"
        << curves[i].name << "</text>\n";
  }
  const size_t steps = curves.empty() ? 0 : curves[0].loss.size();
  out << "<text x=\"" << kLeft << "\" y=\"" << kHeight - 12 << "\">step 0</text><text x=\"" << kWidth << "\" y=\""
      << kHeight - 12 << "\" text-anchor=\"end\">step " << steps << "</text><text x=\"" << kWidth / 2 << "\" y=\""
      << kHeight - 12 << "\" text-anchor=\"middle\">loss, mean of " << kBin << " steps</text>\n</svg>\n";
  return out.good();
}

}  // namespace training
