// SPDX-License-Identifier: Apache-2.0
// Plans whose predictions lie close together are tried in the program's own operations. The first operations of a class
// (operation, root or not, size class) run them in turns; then every rank tells in one word what each took, all ranks
// read all words at the same place in the order of operations, and all go on with the fastest. A prediction cannot say
// where the host has put the cores, what else the machine does or which pages a buffer has; the operations do.
#pragma once

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
  // Plans in a trial; the first is the one that predictions chose.
  static constexpr size_t kMost = 5;
  // Each round runs every plan for a block of operations, of which the first are not counted. Rounds alternate in
  // direction.
  struct Blocks {
    uint64_t rounds, operations, uncounted;
  };
  // Operations with a root overlap one another: the longest. The slowest rank's time of an exchange scatters more than
  // the fastest one's of operations in which all meet: more rounds.
  static constexpr Blocks kBlocks{5, 6, 2}, kRootBlocks{7, 8, 2}, kLargeBlocks{3, 3, 1};
  static constexpr Blocks kLargeExchanges{5, 3, 1}, kHugeExchanges{5, 2, 1};
  static constexpr uint64_t kLargeBytes = 1 << 20, kHugeBytes = 4 << 20;  // of a rank's larger buffer
  static constexpr uint64_t kMostPrivateBytes = 4 << 20;
  // A plan must be this much faster than the one that ran so far, and than flat; and after so many operations it must
  // show it again: hosts move their cores.
  static constexpr double kGain = 0.97;
  static constexpr uint64_t kAgain = 1 << 13;
  // When there are more, all are forgotten.
  static constexpr size_t kMostClasses = 256;

  struct Class {
    uint64_t hash;  // of what all ranks know alike, the profile's state included
    std::span<const char* const> plans;
    uint64_t bytes;  // of a rank's larger buffer
    uint64_t n_ranks;
    bool meets_all;      // each rank's time includes its waiting for the last: the least counts, else the most
    bool private_sizes;  // AllToAllv: taken to be of the size of the one before
    // TensorAllToAll: every rank gives and takes, so that a rank does not run ahead and each operation's time counts,
    // but none waits for all.
    bool exchanges = false;
  };
  struct Pick {
    std::string_view plan;                // one of the class's plans, or one of those that the class began with
    exec::Operation::Ran* ran = nullptr;  // where the operation says how it went; null: nobody asks
  };

  // For the operation that comes next, number `sequence`; may make it the one that carries this rank's vote. Calls in
  // the order of operations, which is the same on all ranks.
  Pick next(const Class& c, uint64_t sequence, exec::Ballot& ballot);
  // As next() for an operation of the class `hash`, no AllToAllv, at a fraction of its price: the plan, when the class
  // was the last one that next() was asked for, has decided and need not try again yet. Else null: next() knows.
  const char* settled(uint64_t hash);
  // AllToAllvs that fit the first word, one after another: they run what predictions chose, and only their sizes are
  // asked for. Null: next() knows.
  exec::Operation::Ran* still_small();
  // All ranks' votes of the class that voted last, [n_ranks].
  void decide(std::span<const uint64_t> votes);

  // For readers, on any thread.
  struct Report {
    bool decided = false;                                 // else predictions choose what runs
    std::string plan;                                     // that runs now
    std::vector<std::pair<std::string, double>> took_ns;  // as decided on; 0: not known
  };
  Report report(const Class& c) const;

  // Up to kMost times in one word, each to 0.6 %; 0: not known.
  static uint64_t pack(std::span<const double> ns);
  static double unpack(uint64_t word, size_t plan);

 private:
  struct State {
    std::vector<const char*> plans;
    bool meets_all = true, one_by_one = true;
    const Blocks* blocks = &kBlocks;
    uint64_t begun = 0;  // for the thread that runs operations
    bool voted = false, decided = false;
    size_t runs = 0;  // once decided: the plan that runs when nothing is tried; before, predictions choose
    // Times that count: of each operation that is timed by itself. Those with a root overlap, so that one alone says
    // little: of each block.
    std::vector<double> ns[kMost];
    double took_ns[kMost] = {};
    uint64_t trial_operations() const { return blocks->rounds * blocks->operations * plans.size(); }
  };
  static uint64_t vote_of(State& s);
  uint64_t hash_of(const Class& c) const;
  State& state_of(uint64_t hash);
  void note_last();

  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, State> classes_;
  std::pair<uint64_t, State*> recent_{0, nullptr};  // of classes_
  uint64_t voting_ = 0;                             // hash of the class
  // The operation that began last, as far as anybody wants to know how it went.
  struct {
    State* state = nullptr;                 // of the trial that it is a part of
    std::vector<double>* counts = nullptr;  // where its time goes; null: nowhere
    bool goes_on = false;                   // with the time that stands there last
    bool private_size = false;
    exec::Operation::Ran ran;
  } last_;
  uint64_t last_size_ = 0;  // AllToAllv: width in bits of the largest block's bytes; 0: all fitted the first word
};

}  // namespace moeccl::comm
