// SPDX-License-Identifier: Apache-2.0
// Fits lines to measured times, as HierMoE does for alpha and beta of every level (Fig. 9).
#pragma once

#include <span>
#include <vector>

#include "src/plan/profile.h"

namespace moeccl::plan {

// Robust least squares: points are weighted in proportion to 1/ns, so that latencies count as well as transfers, and
// points far from the line lose weight (Huber, k = 1.345 deviations). alpha and 1/beta are not negative. r2 is that of
// the line over all points, unweighted. Without two points of different bytes, the result is a constant with r2 0.
Curve fit_line(std::span<const Curve::Point> points);

// Returns how well the points themselves predict: each one is predicted from the others, as Curve::at() does. The first
// point is left out, because there is nothing below it. With fewer than three points, returns 0.
double curve_r2(std::span<const Curve::Point> points);

// Summarises the times of several things that were timed in turns, [round][thing]; a value that is not positive was not
// timed. A slowdown of a whole round says nothing about a thing, so each time is divided by its round's pace: that of
// the things that were timed in all rounds. `bytes` stays 0, and so does ns where a thing was never timed.
std::vector<Curve::Point> summarize_rounds(const std::vector<std::vector<double>>& rounds);

}  // namespace moeccl::plan
