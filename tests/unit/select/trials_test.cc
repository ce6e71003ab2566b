// SPDX-License-Identifier: Apache-2.0
// Trials with ranks that are objects of one thread: the same operations in the same order, and each rank has separate
// times.
#include "src/select/trials.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>

namespace moeccl::comm {
namespace {

const Trials::Plan kPlans[] = {{"staged"}, {"flat"}, {"direct"}};

// Ranks that run one operation after another. Votes arrive two operations after they were sent.
class Ranks {
 public:
  using Time = std::function<double(size_t rank, std::string_view plan)>;

  explicit Ranks(size_t n) : ranks_(n) {
    for (Rank& r : ranks_) r.ballot.heard = [&r](std::span<const uint64_t> words) { r.trials.decide(words); };
  }

  // Returns the plan that all ranks ran.
  std::string run(const Trials::Class& c, const Time& time, uint64_t largest_block = 0) {
    ++sequence_;
    std::vector<Trials::Pick> picks;
    for (Rank& r : ranks_) {
      // The first rank takes the short way where there is one. It must choose the same plans at the same operations.
      picks.push_back(&r == ranks_.data() ? next_shortly(r, c) : r.trials.next(c, sequence_, r.ballot));
      EXPECT_EQ(picks[0].plan, picks.back().plan) << "at operation " << sequence_;
      if (r.ballot.at == sequence_) votes_[sequence_].push_back(r.ballot.word);
    }
    hear();
    for (size_t i = 0; i < ranks_.size(); ++i) {
      if (picks[i].ran == nullptr) continue;
      picks[i].ran->took_ns = time(i, picks[i].plan);
      picks[i].ran->largest_block_bytes = largest_block;
    }
    return std::string(picks[0].plan);
  }
  // Runs an operation that no trial observes.
  void run_other() {
    ++sequence_;
    hear();
  }
  Trials::Report report(const Trials::Class& c) const { return ranks_[0].trials.report(c); }
  size_t n_settled() const { return n_settled_; }

 private:
  struct Rank {
    Trials trials;
    exec::Ballot ballot;
  };

  Trials::Pick next_shortly(Rank& r, const Trials::Class& c) {
    if (c.private_sizes) {
      if (exec::Operation::Ran* ran = r.trials.still_small()) return {c.plans[0].name, ran};
    } else if (const char* plan = r.trials.settled(c.hash)) {
      ++n_settled_;
      return {plan};
    }
    return r.trials.next(c, sequence_, r.ballot);
  }
  void hear() {
    const auto it = votes_.find(sequence_ - exec::Ballot::kHeardAfter);
    if (it == votes_.end()) return;
    for (Rank& r : ranks_) r.ballot.heard(it->second);
  }

  std::vector<Rank> ranks_;
  size_t n_settled_ = 0;
  std::map<uint64_t, std::vector<uint64_t>> votes_;
  uint64_t sequence_ = 0;
};

Trials::Class of(uint64_t hash, bool meets_all = true, uint64_t bytes = 64 << 10) {
  return {hash, kPlans, bytes, 4, meets_all, false};
}

Trials::Class of_private_sizes(uint64_t hash) { return {hash, kPlans, 0, 4, true, true}; }

double by_plan(std::string_view plan, double staged, double flat, double direct) {
  return plan == "staged" ? staged : plan == "flat" ? flat : direct;
}

TEST(Trials, TimesSurviveTheWord) {
  const double ns[] = {180, 1, 3.7e9, 0, 51'234};
  const uint64_t word = Trials::pack(ns);
  for (size_t i = 0; i < std::size(ns); ++i) EXPECT_NEAR(Trials::unpack(word, i), ns[i], 0.006 * ns[i]) << i;
}

TEST(Trials, AllRanksGoOnWithTheFastest) {
  Ranks ranks(4);
  // A rank that comes first waits for the others, so its times say less.
  const auto time = [](size_t rank, std::string_view plan) {
    return by_plan(plan, 100e3, 90e3, 80e3) + 50e3 * static_cast<double>(rank);
  };
  std::map<std::string, int> ran;
  for (int i = 0; i < 5 * 3 * 6; ++i) ++ran[ranks.run(of(1), time)];
  for (const Trials::Plan& plan : kPlans) EXPECT_EQ(ran[plan.name], 5 * 6) << plan.name;
  EXPECT_FALSE(ranks.report(of(1)).decided);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(ranks.run(of(1), time), i < 3 ? "staged" : "direct") << i;
  const Trials::Report report = ranks.report(of(1));
  EXPECT_TRUE(report.decided);
  EXPECT_EQ(report.plan, "direct");
  ASSERT_EQ(report.took_ns.size(), 3u);
  EXPECT_NEAR(report.took_ns[2].second, 80e3, 600);
}

TEST(Trials, OfOperationsWithARootTheSlowestRankCounts) {
  Ranks ranks(3);
  // Rank 0 is the root, which does the work. The others finish sooner with `direct`.
  const auto time = [](size_t rank, std::string_view plan) {
    return rank == 0 ? by_plan(plan, 100e3, 70e3, 120e3) : by_plan(plan, 100e3, 100e3, 10e3) / 2;
  };
  for (int i = 0; i < 180; ++i) ranks.run(of(1, false), time);
  EXPECT_EQ(ranks.report(of(1, false)).plan, "flat");
}

TEST(Trials, OfOperationsWithARootAPlanThatIsFastAtTimesIsNotPreferred) {
  Ranks ranks(2);
  int block = 0, n = 0;
  const auto time = [&](size_t, std::string_view plan) {
    if (plan != "direct") return by_plan(plan, 100e3, 80e3, 0);
    block = n++ / (2 * 8);       // two ranks, blocks of eight
    if (block == 3) return 5e9;  // another process had the core
    return block % 2 == 0 ? 60e3 : 120e3;
  };
  for (int i = 0; i < 180; ++i) ranks.run(of(1, false), time);
  EXPECT_TRUE(ranks.report(of(1, false)).decided);
  EXPECT_EQ(ranks.report(of(1, false)).plan, "flat");
}

TEST(Trials, ASmallGainChangesNothing) {
  Ranks ranks(2);
  for (int i = 0; i < 110; ++i)
    ranks.run(of(1), [](size_t, std::string_view plan) { return by_plan(plan, 100e3, 110e3, 99e3); });
  EXPECT_TRUE(ranks.report(of(1)).decided);
  EXPECT_EQ(ranks.report(of(1)).plan, "staged");
}

TEST(Trials, WhatGainsLittleOverFlatIsNotPreferredToIt) {
  Ranks ranks(2);
  for (int i = 0; i < 110; ++i)
    ranks.run(of(1), [](size_t, std::string_view plan) { return by_plan(plan, 110e3, 102e3, 100e3); });
  EXPECT_EQ(ranks.report(of(1)).plan, "flat");
}

TEST(Trials, AnInterruptedBlockIsNoVerdict) {
  Ranks ranks(2);
  int n = 0;
  for (int i = 0; i < 110; ++i)
    ranks.run(of(1), [&](size_t, std::string_view plan) {
      if (plan == "direct" && ++n == 7) return 5e9;  // another process had the core
      return by_plan(plan, 100e3, 90e3, 80e3);
    });
  EXPECT_EQ(ranks.report(of(1)).plan, "direct");
}

TEST(Trials, ClassesVoteOneAfterAnotherAndOthersRunBetween) {
  Ranks ranks(4);
  const auto fast = [](const char* best) {
    return [best](size_t, std::string_view plan) { return plan == best ? 50e3 : 100e3; };
  };
  for (int i = 0; i < 100; ++i) {
    ranks.run(of(1), fast("flat"));
    ranks.run(of(2), fast("direct"));
    if (i % 3 == 0) ranks.run_other();
    ranks.run(of(3), fast("staged"));
  }
  EXPECT_EQ(ranks.report(of(1)).plan, "flat");
  EXPECT_EQ(ranks.report(of(2)).plan, "direct");
  EXPECT_EQ(ranks.report(of(3)).plan, "staged");
  EXPECT_TRUE(ranks.report(of(3)).decided);
  EXPECT_FALSE(ranks.report(of(4)).decided);
}

TEST(Trials, LargeOperationsAreTriedLess) {
  Ranks ranks(2);
  const Trials::Class large = of(1, true, 2 << 20);
  int n = 0;
  while (!ranks.report(large).decided && ++n < 200)
    ranks.run(large, [](size_t, std::string_view plan) { return by_plan(plan, 3e6, 2e6, 1e6); });
  EXPECT_LE(n, 3 * 3 * 3 + 5);
  EXPECT_EQ(ranks.report(large).plan, "direct");
}

// TensorAllToAll: the first rank's part of a link's bytes comes before the others'.
TEST(Trials, OfExchangesTheSlowestRankCountsAndFewAreTried) {
  Ranks ranks(4);
  Trials::Class c = of(1, false, 8 << 20);
  c.exchanges = true;
  const auto time = [](size_t rank, std::string_view plan) {
    return rank == 0 ? by_plan(plan, 100e6, 90e6, 20e6) : by_plan(plan, 100e6, 90e6, 120e6);
  };
  int n = 0;
  while (!ranks.report(c).decided && ++n < 200) ranks.run(c, time);
  EXPECT_LE(n, 5 * 2 * 3 + 5);
  EXPECT_EQ(ranks.report(c).plan, "flat");
  EXPECT_NEAR(ranks.report(c).took_ns[0].second, 100e6, 1e6);
}

// The plan in use may cease to be the best, because the host has moved a core.
TEST(Trials, TheyAreRepeated) {
  Ranks ranks(2);
  const auto before = [](size_t, std::string_view plan) { return by_plan(plan, 100e3, 90e3, 80e3); };
  const auto after = [](size_t, std::string_view plan) { return by_plan(plan, 100e3, 90e3, 180e3); };
  for (int i = 0; i < 110; ++i) ranks.run(of(1), before);
  EXPECT_EQ(ranks.report(of(1)).plan, "direct");
  for (uint64_t i = 0; i < Trials::kAgain + 110; ++i) ranks.run(of(1), after);
  EXPECT_EQ(ranks.report(of(1)).plan, "flat");
  EXPECT_GT(ranks.n_settled(), Trials::kAgain - 200);  // all except those of the two trials
}

// A measured profile has promised that `staged` takes 60 us and `flat` 160: far apart, so that only `staged` is timed.
TEST(Trials, APlanThatIsSlowerThanPredictedIsTriedAgainstWhatSeemedTooSlow) {
  const Trials::Plan plans[] = {{"staged"}, {"flat", 100e3}, {"direct", 400e3}};
  Trials::Class c = of(1);
  c.plans = plans;
  for (const bool slow : {false, true}) {
    Ranks ranks(3);
    std::map<std::string, int> ran;
    const auto time = [&](size_t, std::string_view plan) { return by_plan(plan, slow ? 300e3 : 60e3, 160e3, 640e3); };
    for (int i = 0; i < 200; ++i) ++ran[ranks.run(c, time)];
    EXPECT_TRUE(ranks.report(c).decided);
    EXPECT_EQ(ranks.report(c).plan, slow ? "flat" : "staged");
    EXPECT_EQ(ran["flat"] > 0, slow);
    EXPECT_EQ(ran["direct"], 0) << "its prediction is still far from what runs";
  }
}

// Once a plan runs whose time keeps others away, the next trial leaves them out.
TEST(Trials, WhatIsFarAgainIsNoLongerTried) {
  const Trials::Plan plans[] = {{"staged"}, {"flat", 100e3}, {"direct", 200e3}};
  Trials::Class c = of(1);
  c.plans = plans;
  Ranks ranks(2);
  std::map<std::string, int> ran;
  const auto time = [&](size_t, std::string_view plan) { return by_plan(plan, 300e3, 160e3, 320e3); };
  for (int i = 0; i < 300; ++i) ++ran[ranks.run(c, time)];
  EXPECT_EQ(ranks.report(c).plan, "flat");
  EXPECT_EQ(ran["direct"], 5 * 6);
  for (uint64_t i = 0; i < Trials::kAgain + 110; ++i) ++ran[ranks.run(c, time)];
  EXPECT_EQ(ran["direct"], 5 * 6);
}

// Another plan ran than the one to be tried, for example because of heap buffers.
TEST(Trials, WhatRanOtherwiseCountsNothing) {
  Ranks ranks(2);
  for (int i = 0; i < 200; ++i) EXPECT_EQ(ranks.run(of(1), [](size_t, std::string_view) { return 0.0; }), "staged");
  EXPECT_FALSE(ranks.report(of(1)).decided);
}

TEST(Trials, PrivateSizesAreTakenFromTheOperationBefore) {
  Ranks ranks(4);
  const Trials::Class c = of_private_sizes(1);
  const auto small = [](size_t, std::string_view plan) { return by_plan(plan, 10e3, 8e3, 20e3); };
  const auto larger = [](size_t, std::string_view plan) { return by_plan(plan, 100e3, 90e3, 50e3); };
  // Sizes that fit the first word are not tried.
  for (int i = 0; i < 50; ++i) EXPECT_EQ(ranks.run(c, small, 0), "staged");
  for (int i = 0; i < 110; ++i) ranks.run(c, small, 16 << 10);
  EXPECT_EQ(ranks.report(c).plan, "flat");
  for (int i = 0; i < 110; ++i) ranks.run(c, larger, 128 << 10);
  EXPECT_EQ(ranks.report(c).plan, "direct");
  // An operation of another size runs as if it had the previous size, and both sizes keep their plans.
  EXPECT_EQ(ranks.run(c, small, 16 << 10), "direct");
  EXPECT_EQ(ranks.run(c, small, 16 << 10), "flat");
  EXPECT_EQ(ranks.run(c, larger, 128 << 10), "flat");
  EXPECT_EQ(ranks.run(c, larger, 128 << 10), "direct");
  // This size is so large that a trial would be noticeable.
  ranks.run(c, larger, 64 << 20);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(ranks.run(c, larger, 64 << 20), "staged");
}

TEST(Trials, ManyClassesAreForgottenAlike) {
  Ranks ranks(3);
  const auto time = [](size_t, std::string_view plan) { return by_plan(plan, 100e3, 90e3, 80e3); };
  for (int i = 0; i < 5; ++i)
    for (uint64_t hash = 1; hash < 2 * Trials::kMostClasses; ++hash) ranks.run(of(hash), time);
}

}  // namespace
}  // namespace moeccl::comm
