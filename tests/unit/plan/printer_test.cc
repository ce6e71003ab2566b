// SPDX-License-Identifier: Apache-2.0
#include "src/plan/printer.h"

#include <gtest/gtest.h>

#include "tests/unit/plan/hand_plans.h"

namespace moeccl::plan {
namespace {

using namespace testing;

bool has(const std::string& text, const std::string& words) { return text.find(words) != std::string::npos; }

TEST(Printer, ListsRunsAsRanges) {
  const std::vector<uint32_t> ring = {3, 4, 5, 0, 1, 9};
  EXPECT_EQ(list_text(ring), "3..5, 0, 1, 9");
  EXPECT_EQ(list_text({}), "");
  std::vector<uint32_t> odd;
  for (uint32_t i = 0; i < 20; ++i) odd.push_back(2 * i);
  EXPECT_EQ(list_text(odd), "0, 2, 4, 6, 8, 10, ... (20 in all)");
}

TEST(Printer, UnitsFitTheFigure) {
  EXPECT_EQ(time_text(999), "999 ns");
  EXPECT_EQ(time_text(12345), "12.3 us");
  EXPECT_EQ(time_text(2.5e6), "2.50 ms");
  EXPECT_EQ(bytes_text(1023), "1023 B");
  EXPECT_EQ(bytes_text(3u << 20), "3.00 MiB");
}

TEST(Printer, RepeatedStepsStandOnce) {
  const std::string text = steps_text(flat_all_to_all(8, 4, 1).programs[2]);
  EXPECT_TRUE(has(text, "7x put input 3..7, 0, 1 -> slot 2 of rank 3..7, 0, 1")) << text;
  EXPECT_TRUE(has(text, "7x | signal 3..7, 0, 1, sig 0")) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 6) << text;
}

TEST(Printer, ExplainsAPlan) {
  Plan plan = direct_all_reduce(8, 800, 2);
  plan.hash = 0xabc;
  const LevelTree tree = *LevelTree::from_sizes({{"node", {5000, 0.25}, {4, 4}}});
  const Cost cost = price(plan, tree, Profile());
  const PlanCandidate candidates[] = {
      {"by hand", cost.total_ns, ""}, {"ring", 2 * cost.total_ns, ""}, {"tree", 0, "too wide"}};
  Explanation e{plan, tree, cost};
  e.rank = 3;
  e.why = "cheapest of 2";
  e.candidates = candidates;
  const std::string text = explain(e);
  for (const char* words :
       {"AllReduce with by hand, cheapest of 2", "plan 0000000000000abc", "* by hand", "no: too wide", "node",
        "0.25 GB/s", "5.0 us latency", "predicted", "measured  not yet", "steps of rank 3",
        "first chunk: signal 0..2, 4..7, sig 0", "reduce input 0 part 3/8 of rank 0..7 -> output 0 part 3/8, final"})
    EXPECT_TRUE(has(text, words)) << words << "\n" << text;
  EXPECT_FALSE(has(text, "EMULATED"));
  e.measured_ns = 2 * cost.total_ns;
  e.emulated = true;
  const std::string emulated = explain(e);
  EXPECT_TRUE(has(emulated, "EMULATED: links are paced")) << emulated;
  EXPECT_TRUE(has(emulated, "2.00 times the prediction")) << emulated;
}

TEST(Printer, SaysWhenTheStagingLimitsALongLine) {
  Plan plan = direct_all_reduce(8, 800, 8);
  const LevelTree tree = *LevelTree::from_sizes({{"node", {20e6, 1.25}, {4, 4}}});
  const Cost cost = price(plan, tree, Profile());
  EXPECT_FALSE(has(explain({plan, tree, cost}), "long line"));
  plan.shape.long_line = {0, 50 << 20};
  EXPECT_TRUE(
      has(explain({plan, tree, cost}), "long line: level node holds 50.00 MiB in a round trip; this plan keeps"));
  for (Program& program : plan.programs) program.n_slots = 1, program.depth = 2;
  plan.shape.staging_bytes = 3 * plan.chunking.chunk * plan.shape.element_bytes;
  const std::string text = explain({plan, tree, cost});
  EXPECT_TRUE(has(text, "the staging limits it to ")) << text;
  EXPECT_TRUE(has(text, "%: give MOECCL_STAGING_BYTES of 256.00 MiB")) << text;
}

TEST(Printer, SizesThatEachRankKeepsToItselfAreNotTakenForZero) {
  Plan plan = flat_all_to_all(8, 4, 1);
  plan.shape.op = moecclOpAllToAllv;
  plan.shape.count = 0;
  const LevelTree tree = LevelTree::flat(8);
  const Cost cost;
  const PlanCandidate candidates[] = {{"flat", 2e4, ""}};
  Explanation e{plan, tree, cost};
  e.candidates = candidates;
  e.priced_block_bytes = 16 << 10;
  const std::string text = explain(e);
  EXPECT_TRUE(has(text, "blocks of each rank's own counts")) << text;
  EXPECT_TRUE(has(text, "candidates, priced for blocks of 16.0 KiB")) << text;
  for (const char* words : {"predicted", " 0 B", "0 elements"}) EXPECT_FALSE(has(text, words)) << words << "\n" << text;
}

}  // namespace
}  // namespace moeccl::plan
