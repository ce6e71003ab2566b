// SPDX-License-Identifier: Apache-2.0
// Lines through measured times: HierMoE fits alpha and beta of every level so (Fig. 9).
#pragma once

#include <span>
#include <vector>

#include "src/plan/profile.h"

namespace moeccl::plan {

// Robust least squares: points weigh in proportion to 1/ns, so that latencies count beside transfers, and those far
// from the line lose weight (Huber, k = 1.345 deviations). alpha and 1/beta are not negative. r2 is that of the line
// over all points, unweighted. At least two points with different bytes, else a constant with r2 0.
Curve fit_line(std::span<const Curve::Point> points);

// How well the points themselves predict: each one from the others, as Curve::at() does it; the first, below which
// there is nothing, is left out. Less than three points: 0.
double curve_r2(std::span<const Curve::Point> points);

// What several things take that were timed in turns, [round][thing]; not positive: not timed in that round. What slows
// a whole round down says nothing about a thing, so each time is divided by its round's pace: that of the things that
// were timed in all rounds. `bytes` stays 0, and ns where a thing was never timed.
std::vector<Curve::Point> summarize_rounds(const std::vector<std::vector<double>>& rounds);

}  // namespace moeccl::plan
