// SPDX-License-Identifier: Apache-2.0
// Which plans are tried against the one that has the best price; src/select/trials.h tries them.
#include <algorithm>
#include <cmath>

#include "src/base/env.h"
#include "src/base/hash.h"
#include "src/select/selection.h"

namespace moeccl::comm {
namespace {

constexpr size_t kMostProblems = 4096;
// Plans that are close to the best for blocks of this size are tried too: trials tell the sizes of an AllToAllv apart.
constexpr double kMiddleBlockBytes = 256 << 10;

// A plan that is predicted to take at most this many times as long as the choice is tried against it. A measured
// profile predicts what plans took then: as soon as the running plan takes longer than that, the same factor of its
// time counts, and further plans are tried.
constexpr double kCloseTo = 1.6;
// The factor if one of the two is eager: an eager operation of such a size takes three times as long with the cores far
// apart as with the cores near, and others take hardly longer.
constexpr double kCloseToEager = 3.2;

// A plan that is tried against the choice once that takes as long as `from_ns`.
struct Rival {
  double from_ns, predicted_ns;
  const char* name;
};

std::vector<Trials::Plan> in_order(std::vector<Rival> all) {
  std::stable_sort(all.begin(), all.end(), [](const Rival& x, const Rival& y) {
    return std::pair(x.from_ns, x.predicted_ns) < std::pair(y.from_ns, y.predicted_ns);
  });
  std::vector<Trials::Plan> rivals;
  for (const Rival& r : all) {
    if (rivals.size() + 1 < Trials::kMost) {
      rivals.push_back({r.name, r.from_ns});
    } else if (std::string_view(plan::kFlatName) == r.name) {
      rivals.back() = {r.name, r.from_ns};
    }
  }
  return rivals;
}

}  // namespace

std::vector<Trials::Plan> Selector::rivals_of(const Best& best, std::span<const Candidate> all,
                                              const plan::Shape& shape) const {
  std::vector<Rival> others;
  const bool eager = is_eager(shape, *best.algorithm);
  // Predictions of an AllToAllv are for one typical size, whose time says nothing about the others.
  const bool comparable = has_plan_fits_ && shape.op != moecclOpAllToAllv;
  for (const Candidate& c : all) {
    if (!c.applies.ok() || c.algorithm == best.algorithm) continue;
    const double most = eager || is_eager(shape, *c.algorithm) ? kCloseToEager : kCloseTo;
    const bool close = c.predicted_ns <= most * best.ns;
    if (close || comparable) others.push_back({close ? 0 : c.predicted_ns / most, c.predicted_ns, c.algorithm->name});
  }
  if (shape.op == moecclOpAllToAllv) {
    const std::vector<Candidate> middle = priced(typical_of_class(shape), kMiddleBlockBytes);
    double least = 0;
    for (const Candidate& c : middle)
      if (c.applies.ok() && (least == 0 || c.predicted_ns < least)) least = c.predicted_ns;
    for (const Candidate& c : middle) {
      const auto is = [&](const Rival& other) { return other.name == c.algorithm->name; };
      if (!c.applies.ok() || c.algorithm == best.algorithm || c.predicted_ns > kCloseTo * least) continue;
      if (std::none_of(others.begin(), others.end(), is)) others.push_back({0, c.predicted_ns, c.algorithm->name});
    }
  }
  return in_order(std::move(others));
}

bool Selector::tries_offers(uint64_t bytes) { return env().trials && bytes > kTryFromBytes; }

// Other bits are given only where plans were measured, as in add_trial().
Selector::Compared Selector::price_all(std::span<const Offer> offers) const {
  std::vector<double> ns;
  size_t best = 0;
  for (const Offer& o : offers) {
    ns.push_back(o.price_ns(at_.profile));
    if (ns.back() < kFlatBias * ns[best]) best = ns.size() - 1;
  }
  const bool any_bits = has_plan_fits_ && !at_.deterministic;
  std::vector<Rival> others;
  for (size_t i = 0; i < offers.size(); ++i) {
    if (i == best || !std::isfinite(ns[i]) || (!any_bits && offers[i].bits != offers[best].bits)) continue;
    // Profiles hold no times of offers, so how slow the running one proves says nothing about the others.
    if (ns[i] <= kCloseTo * ns[best]) others.push_back({0, ns[i], offers[i].name});
  }
  Compared all{offers[best].name, in_order(std::move(others))};
  if (!all.tried.empty()) all.tried.insert(all.tried.begin(), {all.cheapest});
  return all;
}

Selector::Compared Selector::compare(uint64_t problem_class, std::span<const Offer> offers, bool decides) const {
  if (offers.size() < 2 || at_.tree.n_ranks > kMostRanksOfOffers) return {offers[0].name, {}};
  const std::lock_guard lock(mutex_);
  if (const auto it = compared_.find(problem_class); it != compared_.end()) return it->second;
  Compared all = price_all(offers);
  all.trial_class = hash_combine(problem_class, profile_hash_);
  if (!decides) return all;
  if (compared_.size() >= kMostProblems) compared_.clear();
  return compared_[problem_class] = std::move(all);
}

}  // namespace moeccl::comm
