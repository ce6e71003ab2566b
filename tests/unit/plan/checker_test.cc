// SPDX-License-Identifier: Apache-2.0
#include "src/plan/checker.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "tests/support/timing.h"
#include "tests/unit/plan/hand_plans.h"

namespace moeccl::plan {
namespace {

using namespace testing;

// Expects that the checker refuses the plan with a sentence that contains `words`.
void expect_refused(const Plan& plan, const std::string& words) {
  const Status status = check(plan);
  ASSERT_FALSE(status.ok()) << "accepted, wanted: " << words;
  EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
}

Plan broken(Plan plan, const std::function<void(Plan&)>& change) {
  change(plan);
  for (Program& program : plan.programs) program.finalize();
  return plan;
}
std::vector<Step>& steps(Plan& plan, uint32_t rank) { return plan.programs[rank].lanes[0].steps; }

TEST(Checker, AcceptsRightPlans) {
  EXPECT_TRUE(check(broadcast_with_credits()).ok()) << check(broadcast_with_credits()).message();
  for (uint32_t n = 1; n <= 9; ++n) {
    Plan plan = direct_all_reduce(n, 2 * n + 1, 3);
    EXPECT_TRUE(check(plan).ok()) << check(plan).message();
    plan.shape.in_place = plan.shape.deterministic = true;
    EXPECT_TRUE(check(plan).ok()) << check(plan).message();
    const Plan blocks = flat_all_to_all(n, 3, 4);
    EXPECT_TRUE(check(blocks).ok()) << check(blocks).message();
  }
}

TEST(Checker, AcceptsEmptyBlocks) {
  Plan plan = broadcast_with_credits();
  plan.shape.count = 0;
  EXPECT_TRUE(check(plan).ok()) << check(plan).message();
}

// In the interleaving that is run, the slot is refilled before it is emptied; in others the reader gets torn data.
TEST(Checker, FindsAMissingCredit) {
  expect_refused(broken(broadcast_with_credits(), [](Plan& p) { steps(p, 0)[0].lag = 3; }),
                 "rank 0, main lane 0, step 1 (put) at chunk 2: overwrites element 0 of slot 0 of rank 1 before anyone "
                 "read what rank 0, main lane 0, step 1 (put) at chunk 0 wrote");
}

TEST(Checker, FindsADataRace) {
  expect_refused(broken(broadcast_with_credits(), [](Plan& p) { std::swap(steps(p, 0)[1], steps(p, 0)[2]); }),
                 "unordered with");
}

TEST(Checker, FindsADeadlockAndNamesWhoWaitsForWhat) {
  expect_refused(
      broken(broadcast_with_credits(), [](Plan& p) { steps(p, 0)[0].lag = 0; }),
      "rank 0, main lane 0, step 0 (wait for rank 1, sig 1) at chunk 0: waits for ever: signal 0 of chunk 0");
}

TEST(Checker, FindsUnequalSignalsAndWaits) {
  expect_refused(broken(broadcast_with_credits(), [](Plan& p) { steps(p, 0).erase(steps(p, 0).begin()); }),
                 "rank 1 signals rank 0 1 times on sig 1, which waits 0 times");
  expect_refused(broken(broadcast_with_credits(), [](Plan& p) { steps(p, 1).push_back(steps(p, 1).back()); }),
                 "2 times");
}

TEST(Checker, FindsASigInTwoLanesOrAtOtherChunks) {
  expect_refused(broken(broadcast_with_credits(),
                        [](Plan& p) {
                          p.programs[0].lanes.push_back({LaneKind::kCopy, {steps(p, 0)[2]}});
                        }),
                 "one lane of a rank must hold them all");
  expect_refused(broken(broadcast_with_credits(), [](Plan& p) { steps(p, 0)[2].when = When::kFirst; }),
                 "its waits run at other chunks");
}

TEST(Checker, FindsStaleNumbering) {
  Plan plan = broadcast_with_credits();
  plan.programs[0].lanes[0].steps[2].ordinal = 1;
  expect_refused(plan, "finalize() comes last");
}

TEST(Checker, FindsReadsOfNothing) {
  expect_refused(broken(broadcast_with_credits(), [](Plan& p) { steps(p, 0).erase(steps(p, 0).begin() + 1); }),
                 "reads element 0 of slot 0 of rank 1, which nobody has written");
}

TEST(Checker, FindsWorkThatIsNotUsed) {
  expect_refused(broken(broadcast_with_credits(), [](Plan& p) { steps(p, 1).erase(steps(p, 1).begin() + 1); }),
                 "before anyone read what");
  expect_refused(broken(broadcast_with_credits(4, 1), [](Plan& p) { steps(p, 1).erase(steps(p, 1).begin() + 1); }),
                 "which nobody reads");
  expect_refused(broken(broadcast_with_credits(), [](Plan& p) { steps(p, 0).push_back(steps(p, 0)[3]); }),
                 "overwrites element 0 of output block 0 of rank 0 before anyone read");
}

TEST(Checker, FindsWrongValues) {
  expect_refused(broken(flat_all_to_all(3, 2, 2), [](Plan& p) { p.programs[1].srcs[1].index = 1; }),
                 "ends with in[4] of rank 1 in element 0 of output block 1: it must be in[8] of rank 1");
  expect_refused(broken(broadcast_with_credits(), [](Plan& p) { steps(p, 0).pop_back(); }), "rank 0 ends with nothing");
}

TEST(Checker, FindsMemoryThatIsNotThere) {
  expect_refused(broken(broadcast_with_credits(), [](Plan& p) { steps(p, 1)[1].dst.index = 1; }), "there are 1 blocks");
  expect_refused(broken(broadcast_with_credits(), [](Plan& p) { steps(p, 0)[1].dst.index = 1; }), "there are 1 slots");
  // The Input of a rank that is not the root may be NULL.
  expect_refused(broken(broadcast_with_credits(), [](Plan& p) { p.programs[1].srcs[0] = in(1); }), "beyond its memory");
}

TEST(Checker, FindsMemoryOutOfReach) {
  expect_refused(broken(broadcast_with_credits(), [](Plan& p) { p.programs[1].srcs[0] = in(0); }), "out of reach");
  expect_refused(broken(direct_all_reduce(3, 6, 1), [](Plan& p) { p.shape.reach.views = false; }), "out of reach");
  expect_refused(broken(direct_all_reduce(3, 6, 1), [](Plan& p) { p.shape.scaled = true; }),
                 "a scaled Input is read by its own");
  expect_refused(broken(flat_all_to_all(3, 2, 1), [](Plan& p) { steps(p, 0)[0].dst.buffer = Buffer::kInput; }),
                 "an Input is never written");
}

TEST(Checker, FindsTouchingAPeerBeforeItsStartOrAfterItsEnd) {
  const auto without = [](uint8_t sig) {
    return broken(direct_all_reduce(3, 7, 2), [&](Plan& p) {
      for (uint32_t r = 0; r < 3; ++r)
        std::erase_if(steps(p, r), [&](const Step& s) {
          return (s.kind == StepKind::kSignal || s.kind == StepKind::kWait) && s.sig == sig;
        });
    });
  };
  expect_refused(without(0), "is touched before a signal of that rank came");
  expect_refused(without(1), "which may have ended its program before");
}

TEST(Checker, FindsReductionsThatMissOrRepeatARank) {
  expect_refused(broken(direct_all_reduce(3, 7, 1), [](Plan& p) { p.programs[1].srcs[2] = p.programs[1].srcs[1]; }),
                 "it must be the sum over all ranks of");
  expect_refused(broken(direct_all_reduce(3, 7, 1), [](Plan& p) { --steps(p, 0)[4].n_srcs; }), "it must be the sum");
}

TEST(Checker, FindsAnAverageThatIsNotDividedOnce) {
  expect_refused(broken(direct_all_reduce(3, 7, 1), [](Plan& p) { steps(p, 0)[4].final_reduce = false; }),
                 "was not finished by a final_reduce");
  Plan twice = plan_for(moecclOpReduce, 2, 4, 1);
  twice.programs = {
      Writer(0, 2).wait(1, 0).reduce(slot(0, 1), {in(0), slot(0, 0)}).reduce(out(0), {slot(0, 1)}).done(),
      Writer(1, 2).put(slot(0, 0), in(1)).signal(0, 0).done(),
  };
  expect_refused(twice, "is final and is reduced again");
}

TEST(Checker, HoldsDeterministicPlansToOneSumInRankOrder) {
  Plan plan = direct_all_reduce(3, 7, 1);
  plan.shape.deterministic = true;
  EXPECT_TRUE(check(plan).ok());
  expect_refused(broken(plan, [](Plan& p) { std::swap(p.programs[2].srcs[0], p.programs[2].srcs[1]); }),
                 "not one sum over ranks in ascending order");
}

TEST(Checker, FindsInputsThatAreOverwrittenInPlace) {
  Plan plan = flat_all_to_all(2, 2, 1);
  EXPECT_TRUE(check(plan).ok());
  plan.shape.in_place = true;
  EXPECT_TRUE(check(plan).ok()) << check(plan).message();  // each rank has sent its block before it gets the other
  plan = broken(plan, [](Plan& p) { std::rotate(steps(p, 0).begin(), steps(p, 0).begin() + 3, steps(p, 0).end()); });
  plan.shape.in_place = false;
  EXPECT_TRUE(check(plan).ok()) << check(plan).message();
  plan.shape.in_place = true;
  expect_refused(plan, "overwrote it in place");
  const std::vector<Binding> bindings = uniform_bindings(plan);
  const std::vector<bool> only_rank_1 = {false, true};
  EXPECT_TRUE(check(CheckInput{plan, bindings, nullptr, &only_rank_1}).ok());
}

TEST(Checker, FindsStagingBeyondItsCap) {
  expect_refused(broken(broadcast_with_credits(), [](Plan& p) { p.shape.staging_bytes = 511; }), "the cap is 511");
}

TEST(Checker, OrdersLanesOfARankBySignalsToItself) {
  Plan plan = plan_for(moecclOpBroadcast, 1, 4, 3);
  plan.programs = {Writer(0, 1)
                       .wait(0, 1, 1)
                       .copy(slot(0, 0), in(0))
                       .signal(0, 0)
                       .lane(LaneKind::kCopy)
                       .wait(0, 0)
                       .copy(out(0), slot(0, 0))
                       .signal(0, 1)
                       .done()};
  EXPECT_TRUE(check(plan).ok()) << check(plan).message();
  plan.programs = {Writer(0, 1).copy(slot(0, 0), in(0)).lane(LaneKind::kCopy).copy(out(0), slot(0, 0)).done()};
  EXPECT_FALSE(check(plan).ok());
}

// Rank r sends r + p elements to rank p.
struct VArrays {
  std::vector<std::vector<uint64_t>> in_offset, in_length, out_offset, out_length;
  std::vector<Binding> bindings;

  VArrays(const Plan& plan, uint32_t n) : bindings(uniform_bindings(plan)) {
    for (auto* all : {&in_offset, &in_length, &out_offset, &out_length}) all->assign(n, std::vector<uint64_t>(n));
    for (uint32_t r = 0; r < n; ++r) {
      uint64_t in_next = r, out_next = 0;  // displacements differ between ranks, and blocks need not be adjacent
      for (uint32_t p = 0; p < n; ++p) {
        in_length[r][p] = out_length[r][p] = r + p;
        in_offset[r][p] = in_next;
        out_offset[r][p] = out_next;
        in_next += r + p + 1;
        out_next += r + p;
      }
      Binding& b = bindings[r];
      b.in_offset = in_offset[r].data(), b.in_length = in_length[r].data();
      b.out_offset = out_offset[r].data(), b.out_length = out_length[r].data();
    }
  }
};

TEST(Checker, ProvesUnequalBlocks) {
  const uint32_t n = 4;
  const Plan plan = flat_all_to_all(n, 3, 2, moecclOpAllToAllv);
  VArrays v(plan, n);
  const Status right = check(CheckInput{plan, v.bindings});
  EXPECT_TRUE(right.ok()) << right.message();
  v.out_length[1][2] = 9;
  const Status wrong = check(CheckInput{plan, v.bindings});
  EXPECT_EQ(wrong.message(), "rank 2 sends 3 elements to rank 1, which expects 9");
}

// Two ranks: rank 0 packs rows 2 and 0 for rank 1, which spreads them and returns weighted sums.
struct RowPlan {
  Plan plan;
  std::vector<Binding> bindings;
  RowExpectation expected;
  uint32_t picked[2] = {2, 0}, spread[2] = {1, 0};
  float scale[2] = {0.5f, 2.0f};
  RowBlock blocks[2];

  RowPlan() {
    plan = plan_for(moecclOpDispatch, 2, 3, 1);
    plan.shape.reach = {false, false, false};
    plan.programs = {
        Writer(0, 1).move(StepKind::kGatherRows, slot(1, 0), {in(0)}, false, 0).signal(1, 0).done(),
        Writer(1, 1).wait(0, 0).move(StepKind::kScatterRows, out(1), {slot(1, 0)}, false, 0).done(),
    };
    bindings = uniform_bindings(plan);
    blocks[0].src_index = picked, blocks[0].count = 2, blocks[0].dst_first = 1;
    blocks[1].src_first = 1, blocks[1].dst_index = spread, blocks[1].count = 2, blocks[1].weights = scale;
    bindings[0].rows = {&blocks[0], 1};
    bindings[1].rows = {&blocks[1], 1};
    expected.input_rows = {3, 0};
    expected.output = {{}, {{{{0, 0, 2.0f}}}, {{{0, 2, 0.5f}}}, {{}, true}}};
  }
  Status verdict() const { return check(CheckInput{plan, bindings, &expected}); }
};

TEST(Checker, ProvesRowsAndTheirWeights) {
  EXPECT_TRUE(RowPlan().verdict().ok()) << RowPlan().verdict().message();
  RowPlan wrong_row;
  wrong_row.picked[0] = 1;
  EXPECT_NE(wrong_row.verdict().message().find("rank 1 ends with 0.5 * in[1] of rank 0 in row 1 of Output"),
            std::string::npos)
      << wrong_row.verdict().message();
  RowPlan unweighted;
  unweighted.blocks[1].weights = nullptr;
  EXPECT_FALSE(unweighted.verdict().ok());
  RowPlan beyond;
  beyond.blocks[0].dst_first = 2;
  EXPECT_NE(beyond.verdict().message().find("element 3 is beyond slot 0 of rank 1"), std::string::npos)
      << beyond.verdict().message();
  RowPlan twice;
  twice.spread[1] = 1;
  EXPECT_FALSE(twice.verdict().ok());
  RowPlan lost;
  lost.expected.output[1][2] = {{{0, 1, 1.0f}}, false};
  EXPECT_NE(lost.verdict().message().find("rank 1 ends with nothing in row 2"), std::string::npos)
      << lost.verdict().message();
}

TEST(Checker, ProvesSumsOfRows) {
  Plan plan = plan_for(moecclOpCombine, 2, 2, 1);
  plan.programs = {
      Writer(0, 1).wait(1, 0).move(StepKind::kReduceRows, out(0), {in(0), slot(0, 0)}, false, 0).done(),
      Writer(1, 1).move(StepKind::kGatherRows, slot(0, 0), {in(1)}, false, 0).signal(0, 0).done(),
  };
  std::vector<Binding> bindings = uniform_bindings(plan);
  const uint64_t offsets[] = {0, 2, 2, 3};
  const RowTermRef terms[] = {{1, 0, 0}, {0, 1, 0}, {1, 1, 0}};
  const float weights[] = {0.25f, 4.0f, 1.0f};
  SumBlock sums;
  sums.offsets = offsets, sums.terms = terms, sums.weights = weights, sums.count = 3;
  RowBlock rows;
  rows.count = 2;
  bindings[0].sums = {&sums, 1};
  bindings[1].rows = {&rows, 1};
  RowExpectation expected;
  expected.input_rows = {2, 2};
  expected.output = {{{{{1, 0, 4.0f}, {0, 1, 0.25f}}}, {}, {{{1, 1, 1.0f}}}}, {}};  // no terms: zeros
  const Status status = check(CheckInput{plan, bindings, &expected});
  EXPECT_TRUE(status.ok()) << status.message();
  expected.output[0][1].terms = {{0, 0, 1.0f}};
  EXPECT_NE(check(CheckInput{plan, bindings, &expected}).message().find("ends with zeros"), std::string::npos);
}

// Unused work may be allowed (MoE's flat and 2DH in the Rows layout, see moe_plan_test), but a result that lacks needed
// work may not.
TEST(Checker, AllowedWasteHidesNothingElse) {
  const Plan plan = broken(broadcast_with_credits(), [](Plan& p) { steps(p, 1).erase(steps(p, 1).begin() + 1); });
  const std::vector<Binding> bindings = uniform_bindings(plan);
  CheckInput input{plan, bindings};
  EXPECT_NE(check(input).message().find("before anyone read what"), std::string::npos);
  input.allow_waste = true;
  EXPECT_NE(check(input).message().find("rank 1 ends with"), std::string::npos) << check(input).message();
}

TEST(Checker, ProvesThirtyThreeRanksQuickly) {
  const tests::Stopwatch watch;
  EXPECT_TRUE(check(direct_all_reduce(33, 67, 3)).ok());
  EXPECT_TRUE(check(flat_all_to_all(33, 2, 3)).ok());
  MOECCL_EXPECT_WITHIN(watch, 4000);  // 0.1 s on a quiet machine
}

}  // namespace
}  // namespace moeccl::plan
