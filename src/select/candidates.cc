// SPDX-License-Identifier: Apache-2.0
// Predicts what each algorithm of an operation takes: by a measured profile, or else by the clock of all ranks.
#include <algorithm>

#include "src/select/plan_price.h"
#include "src/select/selection.h"

namespace moeccl::comm {
namespace {

// Returns the position of a shape on its plans' curves.
double curve_bytes(const plan::Shape& s) { return static_cast<double>(s.count * s.element_bytes); }

// Returns the shape that prices are for, because the sizes of an AllToAllv are not known.
plan::Shape shape_of_prices(const plan::Shape& shape, double block_bytes) {
  plan::Shape s = shape;
  if (s.op == moecclOpAllToAllv && s.count == 0)
    s.count = std::max<uint64_t>(1, static_cast<uint64_t>(block_bytes) / s.element_bytes);
  return s;
}

}  // namespace

std::vector<Candidate> Selector::candidates(const plan::Shape& shape) const {
  const std::lock_guard lock(mutex_);
  return priced(shape);
}

std::vector<Candidate> Selector::priced(const plan::Shape& asked, double block_bytes) const {
  const plan::Shape shape = shape_of_prices(asked, block_bytes);
  const auto price_of = [&](const algo::Algorithm& a) { return plan_price_ns(a, shape, at_.tree, at_.profile); };
  std::vector<Candidate> out;
  bool mixed = false, any_measured = false;
  for (const algo::Algorithm& a : algo::algorithms()) {
    if (a.op != shape.op) continue;
    Candidate c{&a, a.applies(shape, at_.tree), 0, false};
    if (c.applies.ok()) {
      if (const plan::PlanFit* fit = fit_of(a, shape); fit != nullptr) {
        c.measured = true;
        c.predicted_ns = fit->curve.at(curve_bytes(shape));
        c.at_worst_ns = fit->curve.high_at(curve_bytes(shape));
      } else {
        c.at_worst_ns = c.predicted_ns = price_of(a);
      }
      any_measured = any_measured || c.measured;
      mixed = mixed || !c.measured;
    }
    out.push_back(std::move(c));
  }
  if (!mixed || !any_measured) return out;
  // Prices and measurements have no common scale; the algorithms that were measured provide one.
  std::vector<double> scales;
  for (const Candidate& c : out) {
    if (!c.applies.ok() || !c.measured) continue;
    const double price = price_of(*c.algorithm);
    if (price > 0) scales.push_back(c.predicted_ns / price);
  }
  if (scales.empty()) return out;
  std::nth_element(scales.begin(), scales.begin() + static_cast<ptrdiff_t>(scales.size() / 2), scales.end());
  for (Candidate& c : out) {
    if (c.applies.ok() && !c.measured) c.at_worst_ns = c.predicted_ns *= scales[scales.size() / 2];
  }
  return out;
}

double Selector::measured_ns(const algo::Algorithm& a, const plan::Shape& shape) const {
  const std::lock_guard lock(mutex_);
  const plan::PlanFit* fit = fit_of(a, shape);
  return fit != nullptr ? fit->curve.at(curve_bytes(shape_of_prices(shape, kTypicalBlockBytes))) : 0;
}

const plan::PlanFit* Selector::fit_of(const algo::Algorithm& a, const plan::Shape& shape) const {
  if (!has_plan_fits_) return nullptr;
  return at_.profile.find_plan(shape.op, is_eager(shape, a) ? plan::kEagerName : a.name,
                               plan::reach_bits(shape.reach.staging, shape.reach.views, shape.reach.reads));
}

}  // namespace moeccl::comm
