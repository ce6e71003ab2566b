// SPDX-License-Identifier: Apache-2.0
// Races a MoE layer's candidates against each other in the program's own steps. A price says what a step's rows cost on
// the profile's links and cores; the race says how much longer each candidate really takes, and notices when that
// changes. Rank 0's guesses travel with the exchange that every update makes anyway, so all ranks choose alike.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace moeccl::comm {

class Race {
 public:
  // A candidate is tried if it is expected to take at most this many times as long as the best one: prices err by 8 to
  // 15 % (docs/performance.md), so two of them may change places up to here. Where the measured times are a factor f
  // away from their prices, a candidate that was never measured is tried up to the square root of f further.
  static constexpr double kCloseTo = 1.3;
  // A plan other than flat must be this much faster than flat.
  static constexpr double kGain = 0.97;
  // Steps that count in a trial, after the first one, whose tables and buffers are cold. A slow one counts alone.
  static constexpr uint32_t kCounted = 2;
  // A plan's time, or its price relative to flat's, has moved if it differs by this factor; with the larger factor
  // there is no doubt.
  static constexpr double kMoved = 1.25, kMovedFar = 1.5;
  // A trial ends after one step that took this many times what the best plan takes; the smaller factor applies if the
  // step was not the cold one.
  static constexpr double kHopeless = 2, kSlow = 1.5;
  // A plan that is not certain is expected to be worse than the others, relative to its price, by at most this factor.
  static constexpr double kDoubt = 1.2;
  // Steps to the next trial when nothing moves. They double each time that the same plan wins, as the first trial may
  // have met a disturbance.
  static constexpr uint64_t kFirstAgain = 16, kMostAgain = 1024;
  // After times have changed the winner although prices stood still, the former one is retried so often, kFirstAgain
  // steps apart and for one step each, if it was faster when it won than the new one is now: the new one gives no sign
  // when whatever disturbed the former one has ended.
  static constexpr uint32_t kReturns = 8;
  // The fewest steps between two trials that a small change has caused. They double if the trial before changed
  // nothing.
  static constexpr uint64_t kLeastPause = 8, kMostPause = 64;

  // flat: its number among the candidates, or n_candidates if it is not among them.
  Race(size_t n_candidates, size_t flat) : n_(n_candidates), flat_(flat) {}

  // Returns how many times its price each candidate takes at a step of this many tokens of this rank. Below 0: this is
  // not certain, and the candidate must be tried if it could be the best. 0: nothing is known.
  std::vector<float> guesses(uint64_t n_tokens) const;
  // Returns the candidate that all ranks run, which depends only on what all ranks know.
  size_t pick(std::span<const double> prices_us, std::span<const float> guesses) const;
  // Records that a step that ran `candidate` took `took_us`. prices_us: [n_candidates] of that step.
  void note(uint64_t n_tokens, size_t candidate, std::span<const double> prices_us, double took_us);

 private:
  struct Entry {
    double guess = 0;  // took / price; 0: not known
    bool is_fresh = false;
    double relation = 0;  // price relative to flat's (or the first's) at the time of the measurement
    std::array<double, 5> samples{};
    uint32_t n_samples = 0;
    // Returns the time that a third of the last samples do not exceed, because disturbances only add time.
    double typical(uint32_t of_last) const;
    void settle(double taken, double beside_flat) { is_fresh = true, guess = taken, relation = beside_flat; }
  };
  struct Class {
    std::vector<Entry> entries;
    uint64_t steps = 0, asked_at = 0, pause = kLeastPause, again = kFirstAgain;
    size_t ran = ~size_t{0}, winner = ~size_t{0};
    uint64_t runs = 0;           // consecutive runs of `ran`
    double settled_at = 0;       // the running plan's guess when the last trials ended
    double won_at = 0;           // the winner's guess when it won
    std::vector<double> prices;  // when the winner last ran
    size_t former = ~size_t{0};  // the winner before
    double former_won_at = 0;
    uint32_t returns = 0;  // how often `former` is still to be retried
    bool is_retried = false;
    double former_guess = 0;  // before the retry
  };
  void ask_again(Class& c, std::span<const double> prices_us, bool is_certain, bool routing_moved);
  void crown(Class& c, size_t candidate, std::span<const double> prices_us);
  void retry_former(Class& c);
  void note_retry(Class& c, size_t candidate, std::span<const double> prices_us, double took_us);
  double expected_best(const Class& c, std::span<const double> prices_us) const;  // infinite if nothing is certain
  double relation(std::span<const double> prices_us, size_t candidate) const;

  size_t n_, flat_;
  std::map<uint64_t, Class> classes_;  // by the number of bits of n_tokens
};

}  // namespace moeccl::comm
