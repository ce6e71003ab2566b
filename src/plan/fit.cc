// SPDX-License-Identifier: Apache-2.0
#include "src/plan/fit.h"

#include <algorithm>
#include <cmath>

namespace moeccl::plan {

namespace {

struct Line {
  double alpha = 0, beta = 0;
  double at(double bytes) const { return alpha + beta * bytes; }
};

Line weighted_line(std::span<const Curve::Point> points, const std::vector<double>& weights) {
  double sw = 0, sx = 0, sy = 0;
  for (size_t i = 0; i < points.size(); ++i) {
    sw += weights[i];
    sx += weights[i] * points[i].bytes;
    sy += weights[i] * points[i].ns;
  }
  const double mx = sx / sw, my = sy / sw;
  double sxx = 0, sxy = 0;
  for (size_t i = 0; i < points.size(); ++i) {
    sxx += weights[i] * (points[i].bytes - mx) * (points[i].bytes - mx);
    sxy += weights[i] * (points[i].bytes - mx) * (points[i].ns - my);
  }
  Line line;
  line.beta = sxx > 0 ? std::max(0.0, sxy / sxx) : 0;
  line.alpha = my - line.beta * mx;
  if (line.alpha >= 0) return line;
  // Use a line through the origin instead of one below it.
  double xx = 0, xy = 0;
  for (size_t i = 0; i < points.size(); ++i) {
    xx += weights[i] * points[i].bytes * points[i].bytes;
    xy += weights[i] * points[i].bytes * points[i].ns;
  }
  return {0, xx > 0 ? std::max(0.0, xy / xx) : 0};
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

Curve fit_line(std::span<const Curve::Point> points) {
  Curve curve;
  curve.points.assign(points.begin(), points.end());
  if (points.empty()) return curve;
  std::vector<double> base, weights;
  for (const Curve::Point& p : points) base.push_back(1 / std::max(p.ns, 1e-3));
  weights = base;
  Line line = weighted_line(points, weights);
  for (int round = 0; round < 10 && points.size() > 2; ++round) {
    // Deviations are relative, like the base weights; 1.4826 turns the median into the deviation of a normal
    // distribution.
    std::vector<double> off;
    for (const Curve::Point& p : points) off.push_back(std::abs(p.ns - line.at(p.bytes)) / p.ns);
    const double scale = std::max(1.4826 * median(off), 1e-6);
    for (size_t i = 0; i < points.size(); ++i)
      weights[i] = base[i] * std::min(1.0, 1.345 * scale / std::max(off[i], 1e-12));
    line = weighted_line(points, weights);
  }
  double mean = 0, residual = 0, total = 0;
  for (const Curve::Point& p : points) mean += p.ns / static_cast<double>(points.size());
  for (const Curve::Point& p : points) {
    residual += (p.ns - line.at(p.bytes)) * (p.ns - line.at(p.bytes));
    total += (p.ns - mean) * (p.ns - mean);
  }
  curve.line = {line.alpha, line.beta > 0 ? 1 / line.beta : 0};
  curve.r2 = total > 0 ? std::clamp(1 - residual / total, 0.0, 1.0) : 0;
  return curve;
}

double curve_r2(std::span<const Curve::Point> points) {
  if (points.size() < 3) return 0;
  double mean = 0, residual = 0, total = 0;
  for (const Curve::Point& p : points) mean += p.ns / static_cast<double>(points.size());
  for (size_t i = 1; i < points.size(); ++i) {
    Curve others;
    others.points.assign(points.begin(), points.end());
    others.points.erase(others.points.begin() + static_cast<ptrdiff_t>(i));
    const double off = points[i].ns - others.at(points[i].bytes);
    residual += off * off;
    total += (points[i].ns - mean) * (points[i].ns - mean);
  }
  return total > 0 ? std::clamp(1 - residual / total, 0.0, 1.0) : 0;
}

std::vector<Curve::Point> summarize_rounds(const std::vector<std::vector<double>>& rounds) {
  const size_t n_things = rounds.empty() ? 0 : rounds[0].size();
  std::vector<Curve::Point> out(n_things);
  const auto always = [&](size_t thing) {
    return std::all_of(rounds.begin(), rounds.end(), [&](const auto& r) { return r[thing] > 0; });
  };
  std::vector<double> pace(rounds.size(), 0);  // logarithms
  size_t n_paced = 0;
  for (size_t thing = 0; thing < n_things; ++thing) {
    if (!always(thing)) continue;
    ++n_paced;
    for (size_t r = 0; r < rounds.size(); ++r) pace[r] += std::log(rounds[r][thing]);
  }
  for (double& p : pace) p /= static_cast<double>(std::max<size_t>(1, n_paced));
  const double typical = rounds.empty() ? 0 : median(pace);
  for (size_t thing = 0; thing < n_things; ++thing) {
    std::vector<double> ns;
    for (size_t r = 0; r < rounds.size(); ++r)
      if (rounds[r][thing] > 0) ns.push_back(rounds[r][thing] / std::exp(pace[r] - typical));
    if (ns.empty()) continue;
    std::sort(ns.begin(), ns.end());
    out[thing].ns = ns[ns.size() / 2];
    out[thing].high_ns = ns[3 * ns.size() / 4];
  }
  return out;
}

}  // namespace moeccl::plan
