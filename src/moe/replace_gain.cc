// SPDX-License-Identifier: Apache-2.0
#include "src/moe/replace_gain.h"

#include <algorithm>
#include <vector>

namespace moeccl::comm {
namespace {

constexpr double kDefaultGain = 0.05;  // the default of the sample solver too
// A prediction is trusted to err by this factor at most, because a disturbance may have affected one trial's times.
constexpr double kMostRealized = 1.5;

}  // namespace

void ReplaceGain::Samples::add(double us) { last_[n_++ % last_.size()] = us; }

double ReplaceGain::Samples::typical() const {
  // The first time is cold.
  const auto n = static_cast<uint32_t>(std::min<size_t>(n_ > 1 && n_ <= last_.size() ? n_ - 1 : n_, last_.size()));
  if (n == 0) return 0;
  std::array<double, 5> sorted{};
  for (uint32_t i = 0; i < n; ++i) sorted[i] = last_[(n_ - 1 - i) % last_.size()];
  std::sort(sorted.begin(), sorted.begin() + n);
  return sorted[n / 2];
}

ReplaceGain::ReplaceGain(double min_gain, bool uses_next)
    : min_gain_(min_gain == 0 ? kDefaultGain : min_gain), uses_next_(uses_next) {}

bool ReplaceGain::skips(bool can) {
  if (skip_ == 0) return false;
  after_pause_ = --skip_ == 0;
  if (can) ran_ = Kind::kStayed;
  return can;
}

// A late rank makes the others wait, and a rank with few rows finishes early, so the median rank counts.
void ReplaceGain::note(std::span<const Times> all) {
  const auto middle = [&](double Times::*field) {
    std::vector<double> us;
    for (const Times& t : all) us.push_back(t.*field);
    std::nth_element(us.begin(), us.begin() + static_cast<std::ptrdiff_t>(us.size() / 2), us.end());
    return us.empty() ? 0.0 : us[us.size() / 2];
  };
  const double combine = middle(&Times::combine_us), dispatch = middle(&Times::dispatch_us);
  if (ran_ == Kind::kNone || !(combine > 0)) return;
  if (dispatch > 0) dispatch_.add(dispatch);
  if (ran_ == Kind::kStayed) {
    stayed_.add(combine);
  } else {
    begin_.add(middle(&Times::begin_us));
    moved_.add(combine);
    predicted_.add(ran_gather_);
  }
  ran_ = Kind::kNone;
}

double ReplaceGain::net(const Prediction& predicted) const {
  const double stayed = stayed_.typical(), moved = moved_.typical(), expected = predicted_.typical();
  if (stayed <= 0 || moved <= 0) return predicted.gain;
  // The time that a predicted share of this combine really saved by the clock, for both terms of Eq. 5.
  double realized = 1;
  if (expected > 0) realized = std::clamp((1 - moved / stayed) / expected, 0.0, kMostRealized);
  const double whole = stayed + (uses_next_ ? dispatch_.typical() : 0);
  return realized * predicted.gain - begin_.typical() / whole;
}

ReplaceGain::Answer ReplaceGain::decide(const Prediction& predicted) {
  Answer answer{predicted.gain, !(predicted.gain > 0) || predicted.gain < min_gain_};
  if (min_gain_ >= 0) {
    answer.gain = std::min(predicted.gain, net(predicted));
    const bool offers = !answer.keep, tried = moved_.n() > kCounted && stayed_.n() > kCounted;
    const bool pays = offers && answer.gain >= min_gain_;
    if (offers && !tried) {
      answer.keep = stayed_.n() < moved_.n();
    } else if (offers && after_pause_) {
      answer.keep = false;  // once more, to measure it; the next step knows the time
    } else {
      answer.keep = !pays || ++moves_ % kCompareEvery == 0;
      if (pays) pause_ = kFirstPause;
      if (!pays) skip_ = pause_, pause_ = std::min(2 * pause_, kMostPause);
    }
    after_pause_ = false;
  }
  last_gain_ = answer.gain;
  ran_ = answer.keep ? Kind::kStayed : Kind::kMoved;
  ran_gather_ = predicted.gather;
  return answer;
}

}  // namespace moeccl::comm
