// SPDX-License-Identifier: Apache-2.0
#include "src/select/selection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>

#include "src/base/hash.h"

namespace moeccl::comm {
namespace {

constexpr uint32_t kRanks = 4;
constexpr uint8_t kReach = 5;  // staging and reads
constexpr uint64_t kElement = 4;

plan::Profile measured(const std::vector<plan::PlanFit>& plans) {
  plan::Profile p;
  p.n_ranks = kRanks;
  p.tree_hash = plan::LevelTree::flat(kRanks).hash();
  p.plans = plans;
  return p;
}

// ns = alpha + bytes / rate.
plan::PlanFit line(moecclOp_t op, const char* algorithm, double alpha_ns, double bytes_per_ns) {
  plan::PlanFit f;
  f.op = op;
  f.algorithm = algorithm;
  f.reach = kReach;
  for (double bytes = 64; bytes <= (4 << 20); bytes *= 4)
    f.curve.points.push_back({bytes, alpha_ns + bytes / bytes_per_ns});
  f.curve.line = {alpha_ns, bytes_per_ns};
  return f;
}

std::unique_ptr<Selector> selector(const plan::Profile& profile) {
  plan::Reach reach;
  reach.staging = reach.reads = true;
  reach.views = false;
  auto s = std::make_unique<Selector>(
      Selector::Setting{0, plan::LevelTree::flat(kRanks), reach, false, true, false, 1 << 20});
  s->set_profile(profile);
  return s;
}

using Names = std::vector<std::string>;

PlanKey key(moecclOp_t op, uint64_t bytes) { return {op, 0, bytes / kElement, kElement, false}; }

std::string chosen(Selector& s, moecclOp_t op, uint64_t bytes) {
  auto plan = s.get(key(op, bytes));
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  return plan.ok() ? (*plan)->choice.algorithm : "";
}

TEST(Selection, FollowsTheMeasuredCurvesOverSizes) {
  const auto s_owner =
      selector(measured({line(moecclOpAllReduce, "flat", 90'000, 0.5), line(moecclOpAllReduce, "ring", 9000, 4),
                         line(moecclOpAllReduce, "rd", 1000, 1), line(moecclOpAllReduce, "staged", 90'000, 0.5),
                         line(moecclOpAllReduce, "oneshot", 90'000, 0.5), line(moecclOpAllReduce, "tree", 90'000, 0.5),
                         line(moecclOpAllReduce, "direct", 90'000, 0.5)}));
  Selector& s = *s_owner;
  EXPECT_EQ(chosen(s, moecclOpAllReduce, 9000), "rd");
  EXPECT_EQ(chosen(s, moecclOpAllReduce, 1 << 20), "ring");
}

TEST(Selection, StaysWithFlatUnlessAnotherIsClearlyFaster) {
  const auto others = [](double staged) {
    std::vector<plan::PlanFit> all;
    for (const algo::Algorithm& a : algo::algorithms()) {
      if (a.op != moecclOpAllGather) continue;
      const std::string name = a.name;
      all.push_back(line(a.op, a.name, name == "flat" ? 10'000 : name == "staged" ? staged : 50'000, 1e6));
    }
    return all;
  };
  const auto close_owner = selector(measured(others(9800)));
  Selector& close = *close_owner;
  EXPECT_EQ(chosen(close, moecclOpAllGather, 65536), "flat");
  const auto clear_owner = selector(measured(others(9000)));
  Selector& clear = *clear_owner;
  EXPECT_EQ(chosen(clear, moecclOpAllGather, 65536), "staged");
  // The gain is the same, but within the uncertainty of its measurements.
  std::vector<plan::PlanFit> scattered = others(9000);
  for (plan::PlanFit& f : scattered)
    for (plan::Curve::Point& p : f.curve.points)
      if (f.algorithm == "staged") p.high_ns = 1.5 * p.ns;
  const auto open_owner = selector(measured(scattered));
  EXPECT_EQ(chosen(*open_owner, moecclOpAllGather, 65536), "flat");
}

// A budget may end before each algorithm, including flat, was measured. The prices of unmeasured plans are then scaled
// to the measured ones.
TEST(Selection, ComparesWhatWasNotMeasuredToo) {
  const auto priced_owner = selector({});
  Selector& priced = *priced_owner;
  const uint64_t bytes = 256 << 10;
  std::vector<Candidate> prices = priced.candidates(priced.shape_of(key(moecclOpAllReduce, bytes), false));
  double flat = 0, ring = 0;
  for (const Candidate& c : prices) {
    if (std::string_view("flat") == c.algorithm->name) flat = c.predicted_ns;
    if (std::string_view("ring") == c.algorithm->name) ring = c.predicted_ns;
  }
  ASSERT_GT(flat, 0);
  ASSERT_GT(ring, 0);
  plan::PlanFit ten_times = line(moecclOpAllReduce, "ring", 10 * ring, 1e9);
  const auto s_owner = selector(measured({ten_times}));
  Selector& s = *s_owner;
  for (const Candidate& c : s.candidates(s.shape_of(key(moecclOpAllReduce, bytes), false))) {
    if (std::string_view("flat") != c.algorithm->name) continue;
    EXPECT_FALSE(c.measured);
    EXPECT_NEAR(c.predicted_ns / flat, 10, 0.01);
  }
  EXPECT_EQ(chosen(s, moecclOpAllReduce, bytes), chosen(priced, moecclOpAllReduce, bytes));
}

TEST(Selection, SmallOperationsAreEagerHoweverTheyWereChosen) {
  const auto s_owner = selector({});
  Selector& s = *s_owner;
  for (const uint64_t bytes : {64u, 4096u, 8184u, 8188u, 65536u}) {
    const PlanKey k = key(moecclOpAllReduce, bytes);
    const auto built = s.build_named(k, *algo::find(moecclOpAllReduce, "oneshot"), false);
    EXPECT_EQ(built->eager, bytes <= transport::kEagerBytes) << bytes;
    EXPECT_FALSE(s.build_named(k, *algo::find(moecclOpAllReduce, "rd"), false)->eager);
  }
  ASSERT_TRUE(s.force(moecclOpAllReduce, "oneshot").ok());
  EXPECT_TRUE((*s.get(key(moecclOpAllReduce, 64)))->eager);
}

TEST(Selection, TheEagerFormHasACurveOfItsOwn) {
  const auto s_owner =
      selector(measured({line(moecclOpAllReduce, plan::kEagerName, 100, 1e9),
                         line(moecclOpAllReduce, "oneshot", 7000, 1e9), line(moecclOpAllReduce, "flat", 5000, 1e9)}));
  Selector& s = *s_owner;
  const algo::Algorithm& a = *algo::find(moecclOpAllReduce, "oneshot");
  EXPECT_NEAR(s.measured_ns(a, s.shape_of(key(moecclOpAllReduce, 4096), false)), 100, 1);
  EXPECT_NEAR(s.measured_ns(a, s.shape_of(key(moecclOpAllReduce, 65536), false)), 7000, 1);
}

TEST(Selection, AllToAllvsGoOnDirectlyWhereThatWasMeasuredToBeFaster) {
  const auto rest_after = [](double direct_rate) {
    std::vector<plan::PlanFit> plans;
    for (const algo::Algorithm& a : algo::algorithms())
      if (a.op == moecclOpAllToAllv)
        plans.push_back(line(a.op, a.name, std::string_view(a.name) == "staged" ? 100 : 900, 2));
    for (plan::PlanFit& p : plans)
      if (p.algorithm == "direct") p = line(p.op, "direct", 90'000, direct_rate);
    const auto s_owner = selector(measured(plans));
    Selector& s = *s_owner;
    return (*s.get({moecclOpAllToAllv, 0, 0, 1, false}))->has_rest;
  };
  EXPECT_TRUE(rest_after(9));
  EXPECT_FALSE(rest_after(1));
}

std::vector<std::string> tried(Selector& s, moecclOp_t op, uint64_t bytes) {
  std::vector<std::string> names;
  for (const Trials::Plan& plan : (*s.get(key(op, bytes)))->tried) names.emplace_back(plan.name);
  return names;
}

bool has(const std::vector<std::string>& names, const char* name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// One copy is expensive for the block size that an AllToAllv is assumed to have, but close for larger blocks.
TEST(Selection, AllToAllvsTryWhatMayBeTheBestForLargerBlocks) {
  const auto s = selector({});
  EXPECT_TRUE(has(tried(*s, moecclOpAllToAllv, 0), "direct"));
  EXPECT_FALSE(has(tried(*s, moecclOpAllToAll, kRanks * (4 << 10)), "direct"));
}

TEST(Selection, SumsAreTriedInRankOrderAlone) {
  const auto s = selector({});
  bool any = false;
  for (uint64_t bytes = 16 << 10; bytes <= 1 << 20; bytes *= 2) {
    for (const std::string& name : tried(*s, moecclOpAllReduce, bytes)) {
      EXPECT_EQ(algo::find(moecclOpAllReduce, name)->needs & algo::kAnyOrder, 0u) << name << " at " << bytes;
      any = true;
    }
  }
  EXPECT_TRUE(any);
}

// Where all buffers are in the heap, an AllToAllv copies once at any size.
TEST(Selection, AllToAllvsAskWhetherTheirBuffersCanBeReached) {
  plan::Reach reach;
  reach.staging = reach.reads = true;
  Selector s({0, plan::LevelTree::flat(kRanks), reach, true, true, false, 1 << 20});
  s.set_profile({});
  const auto slot = *s.get({moecclOpAllToAllv, 0, 0, 1, false});
  ASSERT_TRUE(slot->asks_reach);
  EXPECT_STREQ(slot->choice_if_reachable.algorithm, "direct");
  EXPECT_STRNE(slot->choice.algorithm, "direct");
}

// A call that waits in a stream keeps what was forced when it was made, although plans for it are built later.
TEST(Selection, ACallKeepsWhatWasForcedWhenItWasMade) {
  plan::Reach reach;
  reach.staging = reach.reads = true;
  std::map<std::string, uint64_t> signatures[2];  // of the plans that are tried, by name
  for (const bool forces : {false, true}) {
    Selector s({0, plan::LevelTree::flat(kRanks), reach, true, true, false, 1 << 20});
    s.set_profile({});
    const auto made = *s.get(key(moecclOpAllGather, 1 << 20));
    ASSERT_TRUE(made->asks_reach);
    if (forces) {
      ASSERT_TRUE(s.force(moecclOpAllGather, "ring").ok());
      EXPECT_STREQ((*s.get(key(moecclOpAllGather, 1 << 20)))->choice.algorithm, "ring");
    }
    exec::Ballot ballot;
    for (uint64_t sequence = 1; sequence < 100; ++sequence) {
      const auto next = s.next(*made, sequence, ballot);
      ASSERT_TRUE(next.ok()) << next.status().message();
      if (next->ran != nullptr) next->ran->took_ns = 1000;
      if (next->slot != nullptr) signatures[forces][next->slot->choice.algorithm] = next->slot->signature;
    }
  }
  EXPECT_FALSE(signatures[0].empty());
  EXPECT_EQ(signatures[0], signatures[1]);
}

// Where nothing has a price, as without rows, no offer is cheaper than the first.
TEST(Selection, AnOfferThatCostsNothingStands) {
  const auto s = selector({});
  const auto costs = [](double ns) { return [ns](const plan::Profile&) { return ns; }; };
  const double nowhere = std::numeric_limits<double>::infinity();
  const std::vector<Selector::Offer> same = {{"first", costs(0)}, {"second", costs(0)}, {"third", costs(5)}};
  EXPECT_STREQ(s->compare(1, same, true).cheapest, "first");
  const std::vector<Selector::Offer> one_runs = {{"first", costs(nowhere)}, {"second", costs(7)}};
  EXPECT_STREQ(s->compare(2, one_runs, true).cheapest, "second");
  const std::vector<Selector::Offer> close = {{"first", costs(100)}, {"second", costs(95)}, {"third", costs(90)}};
  EXPECT_STREQ(s->compare(3, close, true).cheapest, "third");
}

Names names_of(const std::vector<Trials::Plan>& plans) {
  Names names;
  for (const Trials::Plan& p : plans) names.emplace_back(p.name);
  return names;
}

TEST(Selection, OffersWithClosePricesAreTried) {
  const auto costs = [](double ns) { return [ns](const plan::Profile&) { return ns; }; };
  const double nowhere = std::numeric_limits<double>::infinity();
  const std::vector<Selector::Offer> moves = {
      {"first", costs(100)}, {"far", costs(170)}, {"close", costs(150)}, {"never", costs(nowhere)}};
  const std::vector<Selector::Offer> sums = {
      {"first", costs(100), 0}, {"other", costs(110), 1}, {"alike", costs(120), 0}};
  const auto unmeasured = selector({});
  EXPECT_EQ(names_of(unmeasured->compare(1, moves, true).tried), Names({"first", "close"}));
  EXPECT_EQ(names_of(unmeasured->compare(2, sums, true).tried), Names({"first", "alike"}));
  EXPECT_TRUE(unmeasured->compare(3, std::span(moves).first(2), true).tried.empty());
  EXPECT_NE(unmeasured->compare(1, moves, true).trial_class, unmeasured->compare(2, sums, true).trial_class);
  // A profile holds no times of offers, so that distant ones stay out of question.
  const auto profiled = selector(measured({line(moecclOpAllReduce, "ring", 9000, 4)}));
  EXPECT_EQ(names_of(profiled->compare(1, moves, true).tried), Names({"first", "close"}));
  EXPECT_EQ(names_of(profiled->compare(2, sums, true).tried), Names({"first", "other", "alike"}));
}

// A call of the class that the best plan does not fit runs another one, and its times count for none.
TEST(Selection, ATrialOfOffersFindsTheFastest) {
  const auto s = selector({});
  const PlanKey k = key(moecclOpPlaceWeights, 1 << 20);
  const auto slot_of = [&](const char* name) { return Selector::slot_of(k, {{}, {}, name, hash_string(name)}); };
  std::map<std::string, double> took = {{"a", 3000}, {"b", 2000}, {"c", 1000}};
  exec::Ballot ballot;
  uint64_t sequence = 0;
  const auto run = [&](const PlanSlot& slot) {
    const auto next = s->next(slot, ++sequence, ballot);
    const PlanSlot& runs = next->slot != nullptr ? *next->slot : slot;
    EXPECT_TRUE(next->slot == nullptr || next->slot->signature == hash_string(runs.choice.algorithm));
    if (next->ran != nullptr) next->ran->took_ns = took.at(runs.choice.algorithm);
    if (ballot.at != 0 && sequence == ballot.at + exec::Ballot::kHeardAfter) s->trials().decide({&ballot.word, 1});
    return std::string(runs.choice.algorithm);
  };
  const auto make = [&](const char* begins_with, bool fits_c) {
    auto slot = slot_of(begins_with);
    slot->tried = {{"a"}, {"b"}, {"c"}};
    slot->trial_class = 77;
    slot->most_bytes = 1 << 20;
    slot->remake = [=](const PlanSlot&, std::string_view name) -> Result<std::shared_ptr<PlanSlot>> {
      return slot_of(name == "b" ? "b" : name == "c" && fits_c ? "c" : "a");
    };
    return slot;
  };
  const auto fits = make("a", true), too_large = make("a", false);
  for (int i = 0; i < 200; ++i) run(i % 3 == 0 ? *too_large : *fits);
  EXPECT_TRUE(s->report(77).decided);
  EXPECT_EQ(run(*fits), "c");
  EXPECT_EQ(run(*too_large), "a");
  EXPECT_EQ(run(*make("c", true)), "c");  // made as it runs now
  for (const auto& [name, ns] : s->report(77).took_ns) EXPECT_NEAR(ns, took.at(name), 0.02 * took.at(name)) << name;
}

// A placement that changes at every step has a new slot for each call. Its plan is the one that the call's turn of the
// trial runs, so that no rank makes another one while the others wait for it.
TEST(Selection, ACallIsPreparedWithThePlanOfItsTurn) {
  const auto s = selector({});
  const PlanKey k = key(moecclOpPlaceWeights, 1 << 20);
  const auto slot_of = [&](std::string_view name) {
    const char* const known = name == "b" ? "b" : "a";
    return Selector::slot_of(k, {{}, {}, known, hash_string(known)});
  };
  exec::Ballot ballot;
  int n_made_late = 0;
  std::map<std::string, int> ran;
  for (uint64_t sequence = 1; sequence <= 200; ++sequence) {
    const auto slot = slot_of(s->report(78).next);
    slot->tried = {{"a"}, {"b"}};
    slot->trial_class = 78;
    slot->most_bytes = 1 << 20;
    slot->remake = [&](const PlanSlot&, std::string_view name) -> Result<std::shared_ptr<PlanSlot>> {
      ++n_made_late;
      return slot_of(name);
    };
    const auto next = s->next(*slot, sequence, ballot);
    const PlanSlot& runs = next->slot != nullptr ? *next->slot : *slot;
    ++ran[runs.choice.algorithm];
    if (next->ran != nullptr) next->ran->took_ns = std::string_view(runs.choice.algorithm) == "b" ? 1000 : 2000;
    if (ballot.at != 0 && sequence == ballot.at + exec::Ballot::kHeardAfter) s->trials().decide({&ballot.word, 1});
  }
  EXPECT_EQ(s->report(78).plan, "b");
  EXPECT_GT(ran["a"], 10);
  EXPECT_EQ(n_made_late, 0);
}

TEST(Selection, GivesWhatIsPinnedForItsKeyAlone) {
  const auto s_owner = selector({});
  Selector& s = *s_owner;
  const PlanKey k = key(moecclOpAllReduce, 1 << 20);
  const auto ring = s.build_named(k, *algo::find(moecclOpAllReduce, "ring"), false);
  s.pin(k, ring);
  EXPECT_EQ(*s.get(k), ring);
  EXPECT_NE(*s.get(key(moecclOpAllReduce, 2 << 20)), ring);
  s.unpin();
  EXPECT_NE(*s.get(k), ring);
}

// Runs operations of a slot, each of which takes as long as `took_ns` says; returns the plan that runs at the end.
std::string settle(Selector& s, moecclOp_t op, uint64_t bytes, const std::map<std::string, double>& took_ns) {
  const auto slot = *s.get(key(op, bytes));
  exec::Ballot ballot;
  for (uint64_t sequence = 1; sequence < 600 && !slot->tried.empty(); ++sequence) {
    const auto next = s.next(*slot, sequence, ballot);
    const std::string plan = (next->slot != nullptr ? next->slot : slot.get())->choice.algorithm;
    if (next->ran != nullptr) next->ran->took_ns = took_ns.at(plan);
    if (ballot.at != 0 && sequence == ballot.at + exec::Ballot::kHeardAfter) s.trials().decide({&ballot.word, 1});
  }
  Trials::Report report;
  return (*s.runs_now(key(op, bytes), &report))->choice.algorithm;
}

// Times are injected here; tests/conformance/profile_test.cc shows that ranks tell each other real ones.
TEST(Selection, APlanThatTakesLongerThanItWasMeasuredIsLeft) {
  std::vector<plan::PlanFit> plans;
  std::map<std::string, double> took;
  for (const algo::Algorithm& a : algo::algorithms()) {
    const std::string name = a.name;
    if (a.op != moecclOpAllReduce) continue;
    took[name] = name == "ring" ? 10'000 : name == "rd" ? 20'000 : 900'000;  // twice as long: not close
    plans.push_back(line(a.op, a.name, took[name], 1e9));
  }
  const uint64_t bytes = 256 << 10;
  for (const double ring : {1.0, 1.2, 5.0}) {
    const auto s = selector(measured(plans));
    ASSERT_EQ(chosen(*s, moecclOpAllReduce, bytes), "ring");
    took["ring"] = 10'000 * ring;
    EXPECT_EQ(settle(*s, moecclOpAllReduce, bytes, took), ring > 2 ? "rd" : "ring") << ring;
    EXPECT_EQ(chosen(*s, moecclOpAllReduce, 16 << 10), "ring");  // distant sizes keep their plans
  }
}

TEST(Selection, AProfileThatDoesNotSayWhereHostsAreLeavesThemToTheCommunicator) {
  plan::Profile own;
  own.host_level = 0;
  const auto s_owner = selector(own);
  s_owner->set_profile(measured({}));
  EXPECT_EQ(s_owner->profile()->host_level, 0);
}

TEST(Selection, AProfileThatWasHandedOutStaysAsItIs) {
  const auto s = selector(measured({line(moecclOpAllReduce, "ring", 9000, 4)}));
  const std::shared_ptr<const plan::Profile> before = s->profile();
  const uint64_t hash = before->hash();
  s->set_profile(measured({line(moecclOpAllReduce, "ring", 10'000, 4)}));
  EXPECT_EQ(before->hash(), hash);
  EXPECT_NE(s->profile()->hash(), hash);
}

TEST(Selection, ForgetsAProfileOfAnotherTopology) {
  plan::Profile foreign = measured({line(moecclOpAllReduce, "flat", 1, 1e9)});
  foreign.tree_hash ^= 1;
  const auto s_owner = selector(foreign);
  Selector& s = *s_owner;
  EXPECT_EQ(s.measured_ns(*algo::find(moecclOpAllReduce, "flat"), s.shape_of(key(moecclOpAllReduce, 64), false)), 0);
}

// A program may ask one rank alone what a call would run (moecclPlanQuery). Sizes of one class share a choice, which
// must not depend on the size that came first.
TEST(Selection, AQueryOfOneRankAloneChangesNoChoice) {
  for (const moecclOp_t op : {moecclOpAllReduce, moecclOpReduce, moecclOpBroadcast, moecclOpAllGather,
                              moecclOpReduceScatter, moecclOpAllToAll}) {
    for (uint64_t power = 64; power <= (64u << 20); power *= 2) {
      for (const uint64_t from : {power, power + power / 2}) {
        const uint64_t least = from, most = from + power / 2 - kElement;
        const auto queried_owner = selector({}), other_owner = selector({});
        (void)chosen(*queried_owner, op, most);
        EXPECT_EQ(chosen(*queried_owner, op, least), chosen(*other_owner, op, least))
            << exec::op_name(op) << " " << least;
      }
    }
  }
}

}  // namespace
}  // namespace moeccl::comm
