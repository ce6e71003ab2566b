// SPDX-License-Identifier: Apache-2.0
#include "src/plan/correct.h"

#include <algorithm>
#include <cmath>

namespace moeccl::plan {

namespace {

// Beyond this many sizes and plans, more windows would teach nothing. The limit keeps memory bounded.
constexpr size_t kMostWindows = 4096;

}  // namespace

bool Corrector::observe(Profile& profile, const Observation& o) {
  const auto fit = std::find_if(profile.plans.begin(), profile.plans.end(), [&](const PlanFit& f) {
    return f.op == o.op && f.reach == o.reach && f.algorithm == o.algorithm;
  });
  if (fit == profile.plans.end() || !fit->curve.known() || !(o.took_ns > 0)) return false;
  const int size_class = o.bytes < 1 ? 0 : static_cast<int>(2 * std::log2(o.bytes));
  if (windows_.size() >= kMostWindows) windows_.clear();
  std::vector<double>& window = windows_[{o.op, o.algorithm, o.reach, size_class}];
  window.push_back(o.took_ns / (fit->correction * fit->curve.at(o.bytes)));
  if (window.size() < kWindow) return false;
  std::nth_element(window.begin(), window.begin() + kWindow / 2, window.end());
  const double ratio = window[kWindow / 2];
  window.clear();
  if (ratio <= kTolerance && ratio >= 1 / kTolerance) return false;
  // The points on both sides of the size determine its prediction; at an end of the curve there is only one.
  std::vector<Curve::Point>& points = fit->curve.points;
  const auto above =
      static_cast<size_t>(std::lower_bound(points.begin(), points.end(), o.bytes,
                                           [](const Curve::Point& p, double bytes) { return p.bytes < bytes; }) -
                          points.begin());
  const double step = std::clamp(ratio, 1 / kMostAtOnce, kMostAtOnce);
  bool changed = false;
  for (size_t i = above == 0 ? 0 : above - 1; i <= above && i < points.size(); ++i) {
    double& factor = factors_.try_emplace({o.op, o.algorithm, o.reach, static_cast<int>(i)}, 1.0).first->second;
    const double next = std::clamp(factor * step, 1.0, kMostInAll);
    if (next == factor) continue;
    points[i].ns *= next / factor;
    points[i].high_ns *= next / factor;
    factor = next;
    changed = true;
  }
  return changed;
}

}  // namespace moeccl::plan
