// SPDX-License-Identifier: Apache-2.0
// A MoE layer's candidates against each other, in the program's own steps. A price says what a step's rows cost on
// links and cores as the profile has them; the race says how much longer each candidate really takes, and notices when
// that changes. Rank 0's guesses travel with the exchange that every update makes anyway, so all ranks choose alike.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace moeccl::comm {

class Race {
 public:
  // A candidate is tried when it is expected to take at most so many times as long as the best one: prices err by 8 to
  // 15 % (docs/performance.md), so two of them may change places up to here.
  static constexpr double kCloseTo = 1.3;
  // A plan other than flat must be this much faster than flat.
  static constexpr double kGain = 0.97;
  // Steps of a trial: after the first one, whose tables and buffers are cold, so many count, or one when it is slow.
  static constexpr uint32_t kCounted = 2;
  // What a plan takes, or a price beside flat's, has moved when it differs by this factor; by the larger one there is
  // no doubt.
  static constexpr double kMoved = 1.25, kMovedFar = 1.5;
  // A trial ends after one step that took so many times what the best plan takes; the less, when it was not the cold
  // one.
  static constexpr double kHopeless = 2, kSlow = 1.5;
  // How much worse than the others, beside its price, a plan is expected to be at most when that is not certain.
  static constexpr double kDoubt = 1.2;
  // Steps to the next trial when nothing moves: twice as many each time that the same plan wins, as the first trial may
  // have met a disturbance.
  static constexpr uint64_t kFirstAgain = 16, kMostAgain = 1024;
  // The fewest steps between two trials that something small has caused: twice as many when the one before changed
  // nothing.
  static constexpr uint64_t kLeastPause = 8, kMostPause = 64;

  // flat: its number among the candidates; n_candidates: there is none.
  Race(size_t n_candidates, size_t flat) : n_(n_candidates), flat_(flat) {}

  // How many times its price each candidate takes at a step of so many tokens of this rank. Below 0: that is not
  // certain, and it must be tried when it could be the best. 0: nothing is known.
  std::vector<float> guesses(uint64_t n_tokens) const;
  // What all ranks run: a function of what all ranks know.
  size_t pick(std::span<const double> prices_us, std::span<const float> guesses) const;
  // A step that ran `candidate` took `took_us`. prices_us: [n_candidates] of that step.
  void note(uint64_t n_tokens, size_t candidate, std::span<const double> prices_us, double took_us);

 private:
  struct Entry {
    double guess = 0;  // took / price; 0: not known
    bool is_fresh = false;
    double relation = 0;  // price beside flat's (or the first's) when it was measured
    std::array<double, 5> samples{};
    uint32_t n_samples = 0;
    // Disturbances only add: a third of the last samples are faster.
    double typical(uint32_t of_last) const;
    void settle(double taken, double beside_flat) { is_fresh = true, guess = taken, relation = beside_flat; }
  };
  struct Class {
    std::vector<Entry> entries;
    uint64_t steps = 0, asked_at = 0, pause = kLeastPause, again = kFirstAgain;
    size_t ran = ~size_t{0}, winner = ~size_t{0};
    uint64_t runs = 0;      // of `ran`, one after another
    double settled_at = 0;  // the running plan's guess when the last trials ended
  };
  void ask_again(Class& c, bool is_certain, bool routing_moved);
  double expected_best(const Class& c, std::span<const double> prices_us) const;  // infinite when nothing is certain
  double relation(std::span<const double> prices_us, size_t candidate) const;

  size_t n_, flat_;
  std::map<uint64_t, Class> classes_;  // by the number of bits of n_tokens
};

}  // namespace moeccl::comm
