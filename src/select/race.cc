// SPDX-License-Identifier: Apache-2.0
#include "src/select/race.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace moeccl::comm {

namespace {

double moved(double now, double then) { return then > 0 ? std::max(now / then, then / now) : 1.0; }

}  // namespace

double Race::Entry::typical(uint32_t of_last) const {
  std::array<double, 5> last{};
  const uint32_t n = std::min({n_samples, of_last, static_cast<uint32_t>(samples.size())});
  for (uint32_t i = 0; i < n; ++i) last[i] = samples[(n_samples - 1 - i) % samples.size()];
  std::sort(last.begin(), last.begin() + n);
  return n == 0 ? 0 : last[(n - 1) / 3];
}

std::vector<float> Race::guesses(uint64_t n_tokens) const {
  std::vector<float> all(n_, 0);
  const auto it = classes_.find(static_cast<uint64_t>(std::bit_width(n_tokens)));
  if (it == classes_.end()) return all;
  for (size_t i = 0; i < n_; ++i) {
    const Entry& e = it->second.entries[i];
    all[i] = static_cast<float>(e.is_fresh ? e.guess : -e.guess);
  }
  return all;
}

size_t Race::pick(std::span<const double> prices_us, std::span<const float> guesses) const {
  // Prices may be wrong by a factor that all of them share, so a candidate without measurements is expected to have it
  // too.
  const auto certain = [&](size_t i) { return std::isfinite(guesses[i]) && guesses[i] > 0; };
  std::vector<double> known;
  for (size_t i = 0; i < n_; ++i)
    if (certain(i)) known.push_back(guesses[i]);
  std::sort(known.begin(), known.end());
  const double common = known.empty() ? 1.0 : known[(known.size() - 1) / 2];
  // A plan that was slow once may have met a disturbance, so it gets the benefit of the doubt.
  std::vector<double> expected(n_);
  for (size_t i = 0; i < n_; ++i) {
    const double old = std::isfinite(guesses[i]) && guesses[i] < 0 ? -guesses[i] : kDoubt * common;
    expected[i] = prices_us[i] * (certain(i) ? guesses[i] : guesses[i] == 0 ? common : std::min(old, kDoubt * common));
  }
  const auto best = static_cast<size_t>(std::min_element(expected.begin(), expected.end()) - expected.begin());
  // Prices that are wrong by a large factor are wrong by another one for each plan, so a plan that was never measured
  // may share as little as the factor's square root.
  const double hoped = common > 1 ? 1 / std::sqrt(common) : 1.0;
  size_t tried = n_;
  for (size_t i = 0; i < n_; ++i) {
    if (certain(i) || expected[i] * (guesses[i] == 0 ? hoped : 1.0) > kCloseTo * expected[best]) continue;
    if (tried == n_ || expected[i] < expected[tried]) tried = i;
  }
  if (tried < n_) return tried;
  return flat_ < n_ && expected[best] > kGain * expected[flat_] ? flat_ : best;
}

double Race::relation(std::span<const double> prices_us, size_t candidate) const {
  return prices_us[candidate] / prices_us[flat_ < n_ ? flat_ : 0];
}

double Race::expected_best(const Class& c, std::span<const double> prices_us) const {
  double best = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < n_; ++i)
    if (c.entries[i].is_fresh) best = std::min(best, c.entries[i].guess * prices_us[i]);
  return best;
}

// From now on, every plan except the running one is uncertain.
void Race::ask_again(Class& c, std::span<const double> prices_us, bool is_certain, bool routing_moved) {
  if (c.steps < c.asked_at + (is_certain ? kLeastPause : c.pause)) return;
  const bool is_winner = c.winner == c.ran;
  c.pause = is_winner ? std::min(2 * c.pause, kMostPause) : kLeastPause;
  c.again = is_winner ? std::min(2 * c.again, kMostAgain) : kFirstAgain;
  c.winner = c.ran;
  c.prices.assign(prices_us.begin(), prices_us.end());
  c.asked_at = c.steps;
  const double before = c.settled_at;
  if (routing_moved) c.returns = 0;
  c.is_retried = false;
  for (size_t i = 0; i < n_; ++i) {
    Entry& e = c.entries[i];
    if (i == c.ran) {
      c.settled_at = e.guess = e.typical(3);
      if (!is_winner) c.won_at = e.guess;
      continue;
    }
    // Other rows mean other errors of the price. Otherwise, a plan that was never measured is no longer expected to
    // share what has just changed.
    if (routing_moved) {
      e.guess = 0;
    } else if (e.guess == 0) {
      e.guess = before;
    }
    e.is_fresh = false;
    e.n_samples = 0;
  }
}

void Race::retry_former(Class& c) {
  --c.returns;
  c.asked_at = c.steps;
  c.is_retried = true;
  Entry& former = c.entries[c.former];
  c.former_guess = former.guess;
  former.guess = c.former_won_at;
  former.is_fresh = false;
  former.n_samples = 0;
}

// A step is noted when the next one has its plan already, so the step that retries may be the next but one. Until then,
// the guess from before prevents a second one.
void Race::note_retry(Class& c, size_t candidate, std::span<const double> prices_us, double took_us) {
  Entry& former = c.entries[c.former];
  if (candidate != c.former) return former.settle(c.former_guess, former.relation);
  c.is_retried = false;
  if (took_us > kSlow * expected_best(c, prices_us))
    return former.settle(took_us / prices_us[candidate], relation(prices_us, candidate));
  former.guess = c.former_won_at;  // it is tried as any other plan
  former.is_fresh = false;
}

void Race::crown(Class& c, size_t candidate, std::span<const double> prices_us) {
  c.returns = 0;
  c.is_retried = false;
  if (c.winner < n_) {
    const double now = prices_us[candidate] / prices_us[c.winner], then = c.prices[candidate] / c.prices[c.winner];
    if (moved(now, then) <= kMoved) c.returns = kReturns;
  }
  c.former = c.winner;
  c.former_won_at = c.won_at;
  c.winner = candidate;
  c.won_at = c.entries[candidate].guess;
  c.again = kFirstAgain;
  c.asked_at = c.steps;
}

void Race::note(uint64_t n_tokens, size_t candidate, std::span<const double> prices_us, double took_us) {
  const bool usable =
      std::all_of(prices_us.begin(), prices_us.end(), [](double p) { return p > 0 && std::isfinite(p); });
  if (candidate >= n_ || prices_us.size() != n_ || !usable || !(took_us > 0)) return;
  Class& c = classes_[static_cast<uint64_t>(std::bit_width(n_tokens))];
  c.entries.resize(n_);
  ++c.steps;
  if (c.is_retried) note_retry(c, candidate, prices_us, took_us);
  Entry& e = c.entries[candidate];
  if (c.ran != candidate) {
    c.ran = candidate;
    c.runs = 0;
    c.settled_at = e.is_fresh ? e.guess : 0;
    // Cold tables do not cost that much, so one step shows that the plan is slow.
    if (!e.is_fresh && took_us > kHopeless * expected_best(c, prices_us)) {
      e.settle(took_us / prices_us[candidate], relation(prices_us, candidate));
    }
    return;
  }
  // This is longer than a trial, so another plan has won.
  if (++c.runs == kCounted + 2 && c.winner != candidate) crown(c, candidate, prices_us);
  if (c.winner == candidate) c.prices.assign(prices_us.begin(), prices_us.end());
  e.samples[e.n_samples++ % e.samples.size()] = took_us / prices_us[candidate];
  if (!e.is_fresh) {
    if (e.n_samples < kCounted && took_us < kSlow * expected_best(c, prices_us)) return;
    c.settled_at = e.typical(kCounted);
    e.settle(c.settled_at, relation(prices_us, candidate));
    return;
  }
  e.settle(e.typical(5), relation(prices_us, candidate));
  const double by = e.n_samples < 3 ? 1.0 : moved(e.typical(3), c.settled_at);
  double beside_flat = 1;
  for (size_t i = 0; i < n_; ++i)
    if (i != candidate && c.entries[i].is_fresh)
      beside_flat = std::max(beside_flat, moved(relation(prices_us, i), c.entries[i].relation));
  const double most = std::max(by, beside_flat);
  if (most <= kMoved && c.returns > 0 && c.former_won_at * prices_us[c.former] < e.guess * prices_us[candidate]) {
    if (c.steps >= c.asked_at + kFirstAgain) retry_former(c);
  } else if (most > kMoved || c.steps >= c.asked_at + c.again) {
    ask_again(c, prices_us, most > kMovedFar, beside_flat > kMoved);
  }
}

}  // namespace moeccl::comm
