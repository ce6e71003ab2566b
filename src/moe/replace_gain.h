// SPDX-License-Identifier: Apache-2.0
// Decides whether a re-placing combine pays off by the clock. Eq. 5 prices links, but a step also spends the time of
// its Begin, and the saving on real links is not what Eq. 5 says. The first steps run both ways in turns. From then on,
// the predicted gain is corrected by the measurements. Where re-placing does not pay off, samples stay and Begin
// exchanges nothing for a while.
//
// All ranks pass the same figures to note() and decide() in the same order, and so reach the same answers.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace moeccl::comm {

class ReplaceGain {
 public:
  // Steps of each kind that a trial counts, after the first one, whose tables and buffers are cold.
  static constexpr uint32_t kCounted = 3;
  // Steps without an exchange after one that did not pay off. The pause doubles each time, so that asking costs little.
  static constexpr uint32_t kFirstPause = 4, kMostPause = 64;
  // While re-placing pays off, one step in this many stays, to measure the other side of the comparison.
  static constexpr uint32_t kCompareEvery = 64;

  // What a rank measured in the previous step; 0: it did not run.
  struct Times {
    double begin_us = 0, combine_us = 0, dispatch_us = 0;
  };
  struct Prediction {
    double gain = 0;    // Eq. 5
    double gather = 0;  // of the first term of Eq. 5 alone: what this combine saves
  };
  struct Answer {
    double gain = 0;  // what remains of the prediction
    bool keep = false;
  };

  // With min_gain below 0, predictions are not corrected and nothing is skipped.
  ReplaceGain(double min_gain, bool uses_next);

  // Returns true if the step that begins keeps all samples without asking, which it does only if it `can`. Call it once
  // for each step.
  bool skips(bool can = true);
  bool pauses() const { return skip_ > 0; }  // the next step that can be skipped is
  // Takes the times of all ranks in the previous step, unless the step that begins is skipped.
  void note(std::span<const Times> all);
  Answer decide(const Prediction& predicted);
  double gain() const { return last_gain_; }  // of the last decision

 private:
  class Samples {
   public:
    void add(double us);
    double typical() const;  // 0: unknown
    uint32_t n() const { return n_; }

   private:
    std::array<double, 5> last_{};
    uint32_t n_ = 0;
  };
  enum class Kind { kNone, kMoved, kStayed };
  double net(const Prediction& predicted) const;

  double min_gain_;
  bool uses_next_;
  Samples begin_, moved_, stayed_, dispatch_, predicted_;
  Kind ran_ = Kind::kNone;
  double ran_gather_ = 0, last_gain_ = 0;
  uint32_t moves_ = 0, skip_ = 0, pause_ = kFirstPause;
  bool after_pause_ = false;
};

}  // namespace moeccl::comm
