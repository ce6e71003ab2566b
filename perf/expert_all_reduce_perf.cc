// SPDX-License-Identifier: Apache-2.0
// Times the collectives of replicated experts: AllReduce of all experts in one call against one AllReduce after another
// on a communicator for each expert's ranks, whose creation is timed separately; collecting gradients; and placing
// weights.
#include <moeccl/moeccl.h>

#include <cstdio>
#include <map>
#include <set>

#include "perf/common/buffer.h"
#include "perf/common/fail.h"
#include "perf/common/shared_options.h"
#include "perf/common/team.h"
#include "perf/common/text.h"
#include "perf/moe/placements.h"

namespace perf {
namespace {

struct ExpertOptions {
  JobOptions job;
  int n_experts = 16, slots = 4, iters = 10, warmup = 2, moving_steps = 0;
  size_t min_bytes = 64 << 10, max_bytes = 4 << 20;
  std::string placement = "random";
  uint64_t seed = 1;
  bool loop = true, moves = true, explain = false;
};

ExpertOptions parse(int argc, char** argv) {
  ExpertOptions o;
  App app("Times AllReduce over replicated experts, gradient collection and weight placement, after checking them",
          "expert_all_reduce_perf");
  app.add_option("--experts", o.n_experts, "experts")->check(positive())->capture_default_str();
  app.add_option("--slots", o.slots, "expert slots of a rank")->check(positive())->capture_default_str();
  app.add_option("--placement", o.placement, "random, contiguous or spread")->capture_default_str();
  add_size(app, "-b,--min", o.min_bytes, "smallest expert (bytes of float)");
  add_size(app, "-e,--max", o.max_bytes, "largest expert; sizes grow by 4");
  app.add_option("--iters", o.iters, "timed iterations")->check(positive())->capture_default_str();
  app.add_option("--warmup", o.warmup, "iterations before timing")->check(not_negative())->capture_default_str();
  app.add_option("--moving", o.moving_steps, "also run this many steps with a new random placement each, checked");
  app.add_option("--seed", o.seed, "of the placement")->check(not_negative())->capture_default_str();
  app.add_flag("!--no-loop", o.loop, "leave out the loop over communicators");
  app.add_flag("!--no-moves", o.moves, "leave out collecting gradients and placing weights");
  app.add_flag("--explain", o.explain, "print the plan");
  add_job_options(app, o.job, Memories::kOfHost);
  parse_or_exit(app, argc, argv);
  if (o.min_bytes < sizeof(float)) fail("-b: an expert has 4 bytes at least");
  check_sizes(o.min_bytes, o.max_bytes);
  return o;
}

struct Line {
  size_t bytes = 0;
  double batched_us = 0, loop_us = 0, collect_us = 0, place_us = 0;
  uint64_t wrong = 0;
};

class Bench {
 public:
  Bench(const ExpertOptions& options, const Team& team)
      : o_(options),
        team_(team),
        rank_(team.rank(0)),
        experts_(make_placement(o_.placement, team.n_ranks(), o_.slots, o_.n_experts, o_.seed)) {
    placement_ = given(experts_);
  }

  moecclPlacement_t given(const std::vector<int32_t>& experts) const {
    moecclPlacement_t p = MOECCL_PLACEMENT_INIT;
    p.n_experts = o_.n_experts;
    p.slots_per_rank = o_.slots;
    p.slot_expert = experts.data();
    return p;
  }

  // Creates a communicator for each expert's ranks. Returns the time that it took.
  double create_communicators() {
    moecclConfig_t config = MOECCL_CONFIG_INIT;
    config.staging_bytes = 2 << 20;  // small, because there are many
    const auto start = Clock::now();
    for (int e = 0; e < o_.n_experts; e++) {
      moecclComm_t comm = nullptr;
      check(moecclCommSplit(team_.comm(0), mine(e).empty() ? -1 : 0, rank_, &comm, &config), "moecclCommSplit", rank_,
            team_.comm(0));
      if (comm != nullptr) comms_[e] = comm;
    }
    return team_.combine({since_us(start)}, moecclMax)[0];
  }
  ~Bench() {
    for (auto& [e, comm] : comms_) (void)moecclCommDestroy(comm);
  }

  Line run(size_t bytes) {
    count_ = bytes / sizeof(float);
    const size_t shard = moecclExpertShard(count_, team_.n_ranks());
    slots_ = ExpertSlots(o_.slots, rank_, count_, o_.job.memory);
    shards_ = Buffer(std::max<size_t>(1, static_cast<size_t>(o_.n_experts) * shard * sizeof(float)), o_.job.memory);
    Line line;
    line.bytes = bytes;
    slots_.fill();
    batched();
    line.wrong = slots_.count_wrong(experts_);
    line.wrong += check_moves();
    std::vector<double> batched_us, loop_us, collect_us, place_us;
    slots_.set(0);
    for (int i = -o_.warmup; i < o_.iters; i++) {
      const double b = team_.timed_us([&] { batched(); });
      const double l = o_.loop ? team_.timed_us([&] { loop(); }) : 0;
      const double c = o_.moves ? team_.timed_us([&] { collect(); }) : 0;
      const double p = o_.moves ? team_.timed_us([&] { place(); }) : 0;
      if (i < 0) continue;
      batched_us.push_back(b);
      loop_us.push_back(l);
      collect_us.push_back(c);
      place_us.push_back(p);
    }
    line.batched_us = team_.slowest(batched_us);
    line.loop_us = team_.slowest(loop_us);
    line.collect_us = team_.slowest(collect_us);
    line.place_us = team_.slowest(place_us);
    line.wrong = team_.sum({line.wrong});
    return line;
  }

  // Runs with another placement at every step, to time a step that can reuse nothing from the one before.
  std::pair<double, uint64_t> move(int steps, size_t bytes) {
    count_ = bytes / sizeof(float);
    slots_ = ExpertSlots(o_.slots, rank_, count_, o_.job.memory);
    std::vector<double> us;
    uint64_t wrong = 0;
    for (int s = 0; s < steps; s++) {
      const std::vector<int32_t> experts =
          make_placement("random", team_.n_ranks(), o_.slots, o_.n_experts, o_.seed + static_cast<uint64_t>(s));
      const moecclPlacement_t placement = given(experts);
      slots_.fill();
      us.push_back(team_.timed_us([&] { reduce(placement); }));
      wrong += slots_.count_wrong(experts);
    }
    return {team_.slowest(us), team_.sum({wrong})};
  }

  std::string explain(moecclOp_t op) const {
    const size_t count = o_.max_bytes / sizeof(float);
    return explained([&](char* text, size_t bytes, size_t* needed) {
      check(moecclExpertExplain(team_.comm(0), op, count, moecclFloat32, &placement_, text, bytes, needed),
            "moecclExpertExplain");
    });
  }

  // Algorithm 2: returns the most shards that one replica's rank serves, relative to the mean, of the worst expert.
  double source_imbalance() const {
    double worst = 0;
    for (int e = 0; e < o_.n_experts; e++) {
      std::map<int, int> served;
      std::set<int> hosts;
      for (size_t s = 0; s < experts_.size(); s++)
        if (experts_[s] == e) hosts.insert(static_cast<int>(s) / o_.slots);
      for (int r = 0; r < team_.n_ranks(); r++) {
        int source = 0;
        check(moecclGradientSource(&placement_, team_.n_ranks(), e, r, &source), "moecclGradientSource");
        served[source]++;
      }
      int most = 0;
      for (const auto& [rank, n] : served) most = std::max(most, n);
      worst = std::max(worst, most * static_cast<double>(hosts.size()) / team_.n_ranks());
    }
    return worst;
  }

 private:
  // Returns this rank's slots of an expert.
  std::vector<int> mine(int expert) const { return slots_of(experts_, o_.slots, rank_, expert); }
  void reduce(const moecclPlacement_t& placement) {
    check(moecclExpertAllReduce(slots_.data(), slots_.data(), count_, moecclFloat32, moecclSum, &placement,
                                team_.comm(0), nullptr),
          "moecclExpertAllReduce", rank_, team_.comm(0));
  }
  void batched() { reduce(placement_); }
  void collect() {
    check(moecclCollectGradients(slots_.data(), shards_.data(), count_, moecclFloat32, &placement_, team_.comm(0),
                                 nullptr),
          "moecclCollectGradients", rank_, team_.comm(0));
  }
  void place() {
    check(moecclPlaceWeights(shards_.data(), slots_.data(), count_, moecclFloat32, &placement_, team_.comm(0), nullptr),
          "moecclPlaceWeights", rank_, team_.comm(0));
  }
  uint64_t check_moves() {
    const auto weight = [](int e, size_t i) { return static_cast<float>(e * 4096 + static_cast<int>(i % 4093)); };
    const auto expert_of = [&](int s) { return experts_[static_cast<size_t>(rank_ * o_.slots + s)]; };
    for (int s = 0; s < o_.slots; s++)
      for (size_t i = 0; i < count_; i++) slots_.slot(static_cast<size_t>(s))[i] = weight(expert_of(s), i);
    collect();
    slots_.set(-1);
    place();
    uint64_t wrong = 0;
    for (int s = 0; s < o_.slots; s++)
      for (size_t i = 0; i < count_; i++) wrong += slots_.slot(static_cast<size_t>(s))[i] != weight(expert_of(s), i);
    return wrong;
  }
  void loop() {
    for (auto& [e, comm] : comms_)
      slots_.reduce(mine(e), [&](float* first) {
        check(moecclAllReduce(first, first, count_, moecclFloat32, moecclSum, comm, nullptr), "moecclAllReduce", rank_,
              comm);
      });
  }

  const ExpertOptions& o_;
  const Team& team_;
  int rank_;
  std::vector<int32_t> experts_;
  moecclPlacement_t placement_ = MOECCL_PLACEMENT_INIT;
  std::map<int, moecclComm_t> comms_;
  size_t count_ = 0;
  ExpertSlots slots_;
  Buffer shards_;
};

uint64_t run_rank(const ExpertOptions& o, const Team& team, bool leads) {
  Bench bench(o, team);
  if (leads) {
    std::printf("# expert_all_reduce_perf: %d ranks, %d experts in %d slots, %s placement, float%s\n", team.n_ranks(),
                o.n_experts, team.n_ranks() * o.slots, o.placement.c_str(),
                o.job.pace ? ", links paced: EMULATED" : "");
    if (o.explain) std::printf("%s", bench.explain(moecclOpExpertAllReduce).c_str());
    std::printf("# gradient sources (Algorithm 2): most shards of one source over the mean, worst expert: %.2f\n",
                bench.source_imbalance());
  }
  if (o.loop) {
    const double us = bench.create_communicators();
    if (leads) std::printf("# creating a communicator for each expert took %.1f ms\n", us / 1e3);
  }
  if (leads)
    std::printf("# %12s %14s %14s %8s %14s %14s %8s\n", "expert(B)", "batched(us)", "loop(us)", "ratio", "collect(us)",
                "place(us)", "#wrong");
  uint64_t wrong = 0;
  for (size_t bytes = o.min_bytes; bytes <= o.max_bytes; bytes *= 4) {
    const Line line = bench.run(bytes);
    wrong += line.wrong;
    if (!leads) continue;
    std::printf("  %12zu %14.1f %14.1f %8.2f %14.1f %14.1f %8llu\n", line.bytes, line.batched_us, line.loop_us,
                line.loop_us / line.batched_us, line.collect_us, line.place_us,
                static_cast<unsigned long long>(line.wrong));
    std::fflush(stdout);
  }
  if (o.moving_steps > 0) {
    const auto [us, bad] = bench.move(o.moving_steps, o.min_bytes);
    wrong += bad;
    if (leads)
      std::printf("# %d steps, each with its own random placement: %.1f us per call (median), #wrong %llu\n",
                  o.moving_steps, us, static_cast<unsigned long long>(bad));
  }
  return wrong;
}

int expert_main(int argc, char** argv) {
  const ExpertOptions o = parse(argc, argv);
  Job job(o.job);
  const auto wrong = job.run<uint64_t>(
      o.job.pace, [&](int thread, const Team& team) { return run_rank(o, team, job.leads() && thread == 0); });
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace perf

int main(int argc, char** argv) { return perf::expert_main(argc, argv); }
