// Lines through measured times: HierMoE fits alpha and beta of every level so (Fig. 9).
#pragma once

#include <span>

#include "src/plan/profile.h"

namespace moeccl::plan {

// Robust least squares: points weigh in proportion to 1/ns, so that latencies count beside transfers, and those far
// from the line lose weight (Huber, k = 1.345 deviations). alpha and 1/beta are not negative. r2 is that of the line
// over all points, unweighted. At least two points with different bytes, else a constant with r2 0.
Curve fit_line(std::span<const Curve::Point> points);

}  // namespace moeccl::plan
