// SPDX-License-Identifier: Apache-2.0
#include "capacity.h"

#include "plot.h"
#include "trainer.h"

namespace training {

namespace {

constexpr size_t kRound = 64;  // steps over which losses are averaged: a round of 16 clusters

struct Run {
  const char* name;
  size_t n_experts;
  int every;  // steps between placements; 0: replicas stay
  double capacity;
  double survival = 0;  // % of choices
  Curve curve = {};
};

void train(Run& run, size_t steps, moecclComm_t comm) {
  Place place{0, 0, comm, {run.n_experts, 1}};
  check(moecclCommUserRank(comm, &place.rank), "moecclCommUserRank", comm);
  check(moecclCommCount(comm, &place.n_ranks), "moecclCommCount", comm);
  if (place.n_ranks != kCapacityRanks) {
    std::fprintf(stderr, "%d ranks: --capacity takes %d\n", place.n_ranks, kCapacityRanks);
    std::exit(2);
  }
  Feature f;
  f.kind = Feature::kReplicated;
  f.slots = 4;
  f.every = run.every;
  f.capacity = run.capacity;
  Trainer trainer(f, place, true);
  for (size_t s = 0; s < steps; s++) run.curve.loss.push_back(trainer.step(s));
  const auto [dropped, choices] = trainer.layer().dropped();
  run.survival = 100 - 100.0 * static_cast<double>(dropped) / static_cast<double>(choices);
}

// Returns after how many steps the mean loss of a round is first at most `loss`, or 0 if it never is.
size_t steps_to(const Curve& curve, double loss) {
  double sum = 0;
  for (size_t s = 0; s < curve.loss.size(); s++) {
    sum += static_cast<double>(curve.loss[s]) - (s >= kRound ? static_cast<double>(curve.loss[s - kRound]) : 0);
    if (s + 1 >= kRound && sum / kRound <= loss) return s + 1;
  }
  return 0;
}

double fewer(double ours, double others) { return others > 0 ? 100 - 100 * ours / others : 0; }

// Returns how many steps fewer `run` needs to the loss that `other` ends with, in %.
double fewer_steps(const Run& run, const Run& other) {
  const double target = other.curve.mean_of_last(kRound);
  return fewer(static_cast<double>(steps_to(run.curve, target)), static_cast<double>(steps_to(other.curve, target)));
}

void report(size_t steps, const Run (&table)[3], const Run& fixed, const Run& slow, const Run& quick) {
  // `paper` and `rule` are JSON. A goal of ours has no figure of the paper: "null".
  const auto say = [&](const std::string& item, const char* paper, double ours, const char* rule,
                       const char* why = "the data are made up; the paper trains on text", const char* how = "run") {
    std::printf("{\"paper\": \"Adaptive replication\", \"item\": \"%s\", \"paper_value\": %s, \"ours\": %.4g, ",
                item.c_str(), paper, ours);
    std::printf("\"rule\": %s, \"how\": \"%s\", \"command\": \"build/examples/training --capacity --steps %zu\", ",
                rule, how, steps);
    std::printf("\"why\": \"%s\"}\n", why);
  };
  // The exponent of Zipf's law was chosen for these three.
  const char* const survival[] = {"44.90", "65.56", "74.91"};
  for (size_t i = 0; i < 3; i++)
    say("Table 1, tokens that survive, " + std::string(table[i].name) + ", %", survival[i], table[i].survival,
        "[\"within\", 0.15]", "another exponent of Zipf's law drops other parts", "fitted");
  // 618, 527 and 478 iterations to the target loss.
  say("Table 1, fewer steps to the loss of capacity 1, capacity 2, %", "14.7", fewer_steps(table[1], table[0]),
      "[\"points\", 5]");
  say("Table 1, fewer steps to the loss of capacity 1, capacity 4, %", "22.7", fewer_steps(table[2], table[0]),
      "[\"points\", 5]");
  say("Section 5.2, fewer dropped tokens than static, %", "69", fewer(100 - quick.survival, 100 - fixed.survival),
      "[\"at least\", 58.65]");
  say("Section 5.2, fewer dropped tokens than placing every 10 steps, %", "43",
      fewer(100 - quick.survival, 100 - slow.survival), "[\"at least\", 43]");
  say("Section 5.2, fewer steps to the loss of: static, capacity 1, %", "28.5", fewer_steps(quick, fixed),
      "[\"at least\", 24.22]");
  const double than_slow = fewer_steps(quick, slow);
  say("Section 5.2, fewer steps to the loss of: every 10 steps, capacity 1, %", "0", than_slow, "[\"points\", 5]",
      "popularity moves on every 4 steps here, so replicas that are up to 10 steps old drop twice the tokens, and a "
      "dropped token costs loss; in the paper, old replicas drop more tokens but need no more iterations");
  say("fewer steps than placing every 10 steps, %", "null", than_slow, "[\"at least\", 20]");
}

}  // namespace

bool study_capacity(size_t steps, moecclComm_t comm) {
  // Table 1 has 32 experts, Section 5.1 has 16; both send a token to one.
  Run table[] = {{"static, capacity 1", 32, 0, 1}, {"static, capacity 2", 32, 0, 2}, {"static, capacity 4", 32, 0, 4}};
  Run fixed{"static, capacity 1", 16, 0, 1}, slow{"every 10 steps, capacity 1", 16, 10, 1},
      quick{"every step, capacity 1", 16, 1, 1};
  for (Run& run : table) train(run, steps, comm);
  for (Run* run : {&fixed, &slow, &quick}) train(*run, steps, comm);
  int rank = 0;
  check(moecclCommUserRank(comm, &rank), "moecclCommUserRank", comm);
  if (rank == 0) report(steps, table, fixed, slow, quick);
  return quick.survival > slow.survival && quick.survival > fixed.survival;
}

}  // namespace training
