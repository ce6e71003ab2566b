// SPDX-License-Identifier: Apache-2.0
// Plans whose predictions are close together are tried in the program's own operations. The first operations of a class
// (operation, root or not, size class) run them in turns. Then every rank tells in one word what each took, all ranks
// read all words at the same place in the order of operations, and all go on with the fastest. A prediction cannot know
// where the host has put the cores, what else the machine does or which pages a buffer has; the operations do.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "src/exec/fabric.h"
#include "src/exec/operation.h"

namespace moeccl::comm {

class Trials {
 public:
  // Number of plans in a trial; the first is the one that predictions chose.
  static constexpr size_t kMost = 5;
  // Each round runs every plan for a block of operations, of which the first are not counted. Rounds alternate in
  // direction.
  struct Blocks {
    uint64_t rounds, operations, uncounted;
  };
  // Operations with a root overlap one another, so they have the longest blocks. The slowest rank's time of an exchange
  // scatters more than the fastest rank's of operations in which all meet, so exchanges have more rounds.
  static constexpr Blocks kBlocks{5, 6, 2}, kRootBlocks{7, 8, 2}, kLargeBlocks{3, 3, 1};
  static constexpr Blocks kLargeExchanges{5, 3, 1}, kHugeExchanges{5, 2, 1};
  static constexpr uint64_t kLargeBytes = 1 << 20, kHugeBytes = 4 << 20;  // of a rank's larger buffer
  static constexpr uint64_t kMostPrivateBytes = 4 << 20;
  // A plan must be this much faster than the one that ran so far, and than flat. After kAgain operations it must show
  // this again, because hosts move their cores.
  static constexpr double kGain = 0.97;
  static constexpr uint64_t kAgain = 1 << 13;
  // If there are more, all are forgotten.
  static constexpr size_t kMostClasses = 256;

  struct Plan {
    const char* name;
    // It is tried once the running plan takes longer than this, as its prediction is then close; 0: from the beginning.
    double from_ns = 0;
  };
  struct Class {
    uint64_t hash;                // of what all ranks know alike, including the profile
    std::span<const Plan> plans;  // by `from_ns`
    uint64_t bytes;               // of a rank's larger buffer
    uint64_t n_ranks;
    bool meets_all;      // each rank's time includes its wait for the last: the least counts; otherwise the most
    bool private_sizes;  // AllToAllv: assumed to have the size of the one before
    // TensorAllToAll and operations of experts: every rank gives and takes, so that a rank does not run ahead and each
    // operation's time counts, but no rank waits for all.
    bool exchanges = false;
  };
  struct Pick {
    std::string_view plan;                // one of the class's plans, or one of those that the class began with
    exec::Operation::Ran* ran = nullptr;  // where the operation reports how it went; null: not wanted
  };

  // Returns the plan of the operation that comes next, number `sequence`; may make it the one that carries this rank's
  // vote. Calls come in the order of operations, which is the same on all ranks.
  Pick next(const Class& c, uint64_t sequence, exec::Ballot& ballot);
  // Does the same as next() for an operation of the class `hash`, except AllToAllv, at a fraction of its price. Returns
  // the plan if the class is the last one that next() was asked for, has decided and need not try again yet. Otherwise
  // returns null, and next() must be called.
  const char* settled(uint64_t hash);
  // The operation that asked last cannot run what it got, on any rank: its turn passes without a time.
  void pass() { last_ = {}; }
  // For consecutive AllToAllvs that fit the first word: they run what predictions chose, and only their sizes are asked
  // for. Null: next() must be called.
  exec::Operation::Ran* still_small();
  // Takes all ranks' votes of the class that voted last, [n_ranks].
  void decide(std::span<const uint64_t> votes);

  // For readers, on any thread.
  struct Report {
    bool decided = false;                                 // false: predictions choose what runs
    std::string plan;                                     // the one that runs now
    std::string next;                                     // of the operation after those that have begun
    std::vector<std::pair<std::string, double>> took_ns;  // as the decision saw them; 0: not known
    std::string text() const;                             // "tried: flat 12.3 us nodes not timed"
  };
  Report report(const Class& c) const;

  // Packs up to kMost times into one word, each to 0.6 %; 0: not known.
  static uint64_t pack(std::span<const double> ns);
  static double unpack(uint64_t word, size_t plan);

 private:
  struct State {
    std::vector<Plan> plans;
    size_t n = 0;  // of `plans`, the first ones, that are tried
    bool meets_all = true, one_by_one = true;
    const Blocks* blocks = &kBlocks;
    std::atomic<uint64_t> begun{0};  // written by the thread that runs operations; readers take it for a hint
    bool voted = false, decided = false;
    size_t runs = 0;  // once decided: the plan that runs when nothing is tried; before that, predictions choose
    // The times that count, one for each operation that is timed by itself. Operations with a root overlap, so a single
    // one says little: there is one time for each block.
    std::vector<double> ns[kMost];
    double took_ns[kMost] = {};
    uint64_t trial_operations() const { return blocks->rounds * blocks->operations * n; }
    // Returns which plan the operation number `at` of a trial runs.
    size_t turn_of(uint64_t at) const;
    void count(uint64_t operations) {
      begun.store(begun.load(std::memory_order_relaxed) + operations, std::memory_order_relaxed);
    }
    // Returns how many of `plans` are worth trying, as far as is known.
    size_t n_worth_trying() const;
    void begin();  // a trial
  };
  static uint64_t vote_of(State& s);
  uint64_t hash_of(const Class& c) const;
  State& state_of(uint64_t hash);
  void note_last();

  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, State> classes_;
  std::pair<uint64_t, State*> recent_{0, nullptr};  // of classes_
  uint64_t voting_ = 0;                             // hash of the class
  // The operation that began last, as far as its outcome is wanted.
  struct {
    State* state = nullptr;                 // of the trial that it is part of
    std::vector<double>* counts = nullptr;  // receives its time; null: the time does not count
    bool goes_on = false;                   // adds to the last time there
    bool private_size = false;
    exec::Operation::Ran ran;
  } last_;
  uint64_t last_size_ = 0;  // AllToAllv: bit width of the largest block's bytes; 0: all fitted the first word
};

}  // namespace moeccl::comm
