// SPDX-License-Identifier: Apache-2.0
// Trains a small MoE layer on CPU ranks once with each of MoECCL's expert-parallel features, on the same data from the
// same start, and compares the loss curves: docs/training-example.md.
//
//   training [--steps N] [--json FILE] [--svg FILE]   runs 4 ranks as threads of this process
//   training --capacity [--steps N]                   measures what replication does to dropped tokens and prints
//                                                     a line of JSON per figure (16 ranks)
//   mpirun -n 4 training ...                          the same with a process per rank; torchrun and srun work too
#include <atomic>
#include <cstring>
#include <thread>

#include "../arguments.h"
#include "capacity.h"
#include "plot.h"
#include "trainer.h"

namespace training {
namespace {

struct Options {
  size_t steps = 500;
  bool capacity = false;
  std::string json, svg;
};

std::vector<Feature> features() {
  std::vector<Feature> all;
  const auto add = [&](const char* name, Feature::Kind kind, const char* algorithm) -> Feature& {
    Feature f;
    f.name = name;
    f.kind = kind;
    f.algorithm = algorithm;
    return all.emplace_back(f);
  };
  add("flat", Feature::kTokens, "flat");
  add("hier:2", Feature::kTokens, "hier:2");
  add("2dh", Feature::kTokens, "2dh");
  add("swapped", Feature::kSwapped, "hier:2");
  add("replicated", Feature::kReplicated, "hier:2");
  const auto hybrid = [&](const char* name, int32_t nodes, int32_t ranks, double ratio = 0) {
    Feature& f = add(name, Feature::kHybrid, "auto");
    f.domain[0] = nodes;
    f.domain[1] = ranks;
    f.ratio = ratio;
  };
  hybrid("hybrid, nodes share", 2, 1);
  hybrid("hybrid, ranks share", 1, 2);
  hybrid("hybrid, migrated exactly", 2, 1, 1);
  hybrid("hybrid, migrated 50x", 2, 1, 50);
  hybrid("hybrid, 50x both ways", 2, 1, 50);
  all.back().back = true;
  add("re-placing off", Feature::kReplaced, "hier:2").solve = false;
  add("re-placing on", Feature::kReplaced, "hier:2");
  add("gathered", Feature::kGathered, "");
  add("codec, ratio 1", Feature::kGathered, "").ratio = 1;
  add("codec 50x, shared expert", Feature::kGathered, "").ratio = 50;
  Feature& bare = add("codec 50x, none shared", Feature::kGathered, "");
  bare.ratio = 50;
  bare.shared = false;
  return all;
}

Place place_of(moecclComm_t comm) {
  Place place{0, 0, comm};
  check(moecclCommUserRank(comm, &place.rank), "moecclCommUserRank", comm);
  check(moecclCommCount(comm, &place.n_ranks), "moecclCommCount", comm);
  if (place.n_experts() % place.n_ranks != 0) {
    std::fprintf(stderr, "%d ranks: give a number that divides %d experts\n", place.n_ranks, place.n_experts());
    std::exit(2);
  }
  return place;
}

// Runs one rank's part of all features. Returns the loss curves, which are the same on all ranks.
std::vector<Curve> train_all(const Options& options, moecclComm_t comm) {
  const Place place = place_of(comm);
  std::vector<Curve> curves;
  for (const Feature& f : features()) {
    Trainer trainer(f, place);
    Curve& curve = curves.emplace_back(Curve{f.name, {}});
    for (size_t s = 0; s < options.steps; s++) curve.loss.push_back(trainer.step(s));
    if (place.rank != 0) continue;
    std::printf("%-26s loss %.4f -> %.4f", f.name.c_str(), static_cast<double>(curve.loss[0]), curve.mean_of_last(50));
    if (const auto [saved, all] = trainer.layer().saved(); all > 0)
      std::printf("   combine's bytes between nodes: %.1f %% saved",
                  100.0 * static_cast<double>(saved) / static_cast<double>(all));
    if (trainer.layer().n_swaps() > 0) std::printf("   %d swaps of experts", trainer.layer().n_swaps());
    std::printf("\n");
    std::fflush(stdout);
  }
  return curves;
}

std::vector<Claim> claims_of(const Options& options, const std::vector<Curve>& curves) {
  const auto curve = [&](const char* name) -> const Curve& {
    for (const Curve& c : curves)
      if (c.name == name) return c;
    std::abort();
  };
  const auto same = [&](const char* a, const char* b) -> Claim {
    const bool equal = curve(a).loss.size() == curve(b).loss.size() &&
                       std::memcmp(curve(a).loss.data(), curve(b).loss.data(), options.steps * sizeof(float)) == 0;
    return {std::string(a) + " = " + b + ", bit by bit", equal};
  };
  // Compares means of 50 steps, because the loss of a single step is mostly the noise of its batch.
  const auto apart = [&](const char* a, const char* b) {
    return std::abs(curve(a).mean_of_last(50) / curve(b).mean_of_last(50) - 1);
  };
  std::vector<Claim> claims{
      same("flat", "hier:2"),
      same("flat", "2dh"),
      same("flat", "swapped"),
      same("flat", "replicated"),
      same("flat", "hybrid, nodes share"),
      same("flat", "hybrid, ranks share"),
      same("flat", "hybrid, migrated exactly"),
      {"hybrid, migrated 50x within 0.1 % of codec 50x, shared expert",
       apart("hybrid, migrated 50x", "codec 50x, shared expert") < 1e-3},
      same("re-placing off", "re-placing on"),
      same("gathered", "codec, ratio 1"),
      {"re-placing within 0.1 % of flat (its sums begin with the residual)", apart("re-placing on", "flat") < 1e-3},
      {"gathered within 0.1 % of flat", apart("gathered", "flat") < 1e-3},
      {"the loss falls", curve("flat").mean_of_last(10) < 0.9 * static_cast<double>(curve("flat").loss[0])}};
  // Shorter runs end before compression could affect the loss.
  if (options.steps < 400) return claims;
  claims.push_back(
      {"codec 50x with shared expert within 1 % of exact", apart("codec 50x, shared expert", "gathered") < 0.01});
  claims.push_back({"hybrid, migrated 50x within 1 % of flat", apart("hybrid, migrated 50x", "flat") < 0.01});
  claims.push_back({"hybrid, 50x both ways within 1.5 % of flat", apart("hybrid, 50x both ways", "flat") < 0.015});
  claims.push_back({"codec 50x without it more than 2 % off", apart("codec 50x, none shared", "gathered") > 0.02});
  return claims;
}

int report(const Options& options, const std::vector<Curve>& curves) {
  const std::vector<Claim> claims = claims_of(options, curves);
  bool good = true;
  for (const Claim& c : claims) {
    std::printf("%s  %s\n", c.holds ? "yes" : "NO ", c.text.c_str());
    good = good && c.holds;
  }
  if (!options.json.empty() && !write_json(options.json, curves, claims)) good = false;
  if (!options.svg.empty() && !write_svg(options.svg, curves)) good = false;
  return good ? 0 : 1;
}

// Runs one rank's part. Rank 0 also reports, and its result is the exit status of the process.
int train(const Options& options, moecclComm_t comm) {
  if (options.capacity) return study_capacity(options.steps, comm) ? 0 : 1;
  const Place place = place_of(comm);
  const std::vector<Curve> curves = train_all(options, comm);
  return place.rank == 0 ? report(options, curves) : 0;
}

int run(const Options& options) {
  moecclConfig_t config = MOECCL_CONFIG_INIT;
  if (!options.capacity) config.topology = kTopology;
  config.deterministic = 1;  // the order of sums does not depend on the plan
  config.timeout_ms = 60000;
  if (std::getenv("WORLD_SIZE") || std::getenv("OMPI_COMM_WORLD_SIZE") || std::getenv("PMI_SIZE") ||
      std::getenv("SLURM_STEP_NUM_TASKS")) {
    moecclComm_t comm = nullptr;
    check(moecclCommInitEnv(&comm, &config), "moecclCommInitEnv");
    const int status = train(options, comm);
    check(moecclCommDestroy(comm), "moecclCommDestroy");
    return status;
  }
  std::vector<moecclComm_t> comms(options.capacity ? kCapacityRanks : 4);
  check(moecclCommInitAll(comms.data(), static_cast<int>(comms.size()), &config), "moecclCommInitAll");
  std::vector<std::thread> others;
  for (size_t r = 1; r < comms.size(); r++) others.emplace_back([&, r] { (void)train(options, comms[r]); });
  const int status = train(options, comms[0]);
  for (std::thread& t : others) t.join();
  for (moecclComm_t comm : comms) check(moecclCommDestroy(comm), "moecclCommDestroy");
  return status;
}

}  // namespace
}  // namespace training

int main(int argc, char** argv) {
  training::Options options;
  int first = 1;
  if (argc > 1 && std::strcmp(argv[1], "--capacity") == 0) options.capacity = true, first = 2;
  bool known = (argc - first) % 2 == 0;
  for (int i = first; known && i < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--steps")
      known = training::take_whole(name, argv[i + 1], 1, 1'000'000, &options.steps);
    else if (name == "--json")
      options.json = argv[i + 1];
    else if (name == "--svg")
      options.svg = argv[i + 1];
    else
      known = false;
  }
  if (!known) {
    std::fprintf(stderr, "training [--capacity] [--steps N] [--json FILE] [--svg FILE]\n");
    return 2;
  }
  if (!training::can_write(options.json) || !training::can_write(options.svg)) return 2;
  return training::run(options);
}
