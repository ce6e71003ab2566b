// SPDX-License-Identifier: Apache-2.0
// Compares AllReduce over replicated experts with what a program does without this library: it adds up the replicas of
// a rank, calls MPI_Allreduce on a communicator of each expert's ranks, one after another, and copies the results back.
// Creating those communicators is timed separately.
//   mpirun -n 16 --oversubscribe perf/compare_mpi_experts -b 16K -e 4M
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <moeccl/moeccl.h>
#include <mpi.h>

#include <cstdio>
#include <string>
#include <vector>

#include "perf/common/fail.h"
#include "perf/common/shared_options.h"
#include "perf/common/stats.h"
#include "perf/common/timer.h"
#include "perf/moe/placements.h"

namespace perf {
namespace {

void mpi(int result, const char* call) {
  if (result != MPI_SUCCESS) fail(std::string(call) + ": MPI error " + std::to_string(result));
}

struct Options {
  int n_experts = 16, slots = 4, iters = 15, warmup = 2;
  size_t min_bytes = 16 << 10, max_bytes = 4 << 20;
  uint64_t seed = 1;
  bool private_memory = false;
};

class Comparison {
 public:
  explicit Comparison(const Options& o) : o_(o) {
    mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
    mpi(MPI_Comm_size(MPI_COMM_WORLD, &n_), "MPI_Comm_size");
    experts_ = make_placement("random", n_, o.slots, o.n_experts, o.seed);
    moecclUniqueId id = {};
    if (rank_ == 0) check(moecclGetUniqueId(&id), "moecclGetUniqueId", 0);
    mpi(MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD), "MPI_Bcast");
    check(moecclCommInitRank(&comm_, n_, id, rank_), "moecclCommInitRank", rank_);
    placement_.n_experts = o.n_experts;
    placement_.slots_per_rank = o.slots;
    placement_.slot_expert = experts_.data();
  }
  ~Comparison() {
    for (MPI_Comm& c : mpi_comms_)
      if (c != MPI_COMM_NULL) (void)MPI_Comm_free(&c);
    (void)moecclCommDestroy(comm_);
  }

  double create_communicators() {
    const auto start = Clock::now();
    for (int e = 0; e < o_.n_experts; e++) {
      MPI_Comm c = MPI_COMM_NULL;
      mpi(MPI_Comm_split(MPI_COMM_WORLD, mine(e).empty() ? MPI_UNDEFINED : 0, rank_, &c), "MPI_Comm_split");
      mpi_comms_.push_back(c);
    }
    return most(since_us(start));
  }

  // Returns how many sums were wrong, on all ranks.
  uint64_t run(size_t bytes) {
    count_ = bytes / sizeof(float);
    slots_ = ExpertSlots(o_.slots, rank_, count_, o_.private_memory ? Memory::kMalloc : Memory::kHeap);
    uint64_t wrong = 0;
    slots_.fill();
    batched();
    wrong += slots_.count_wrong(experts_);
    slots_.fill();
    loop();
    wrong += slots_.count_wrong(experts_);
    slots_.set(0);
    std::vector<double> batched_us, loop_us;
    for (int i = -o_.warmup; i < o_.iters; i++) {
      const double b = timed([&] { batched(); }), l = timed([&] { loop(); });
      if (i < 0) continue;
      batched_us.push_back(b);
      loop_us.push_back(l);
    }
    uint64_t all = 0;
    mpi(MPI_Allreduce(&wrong, &all, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD), "MPI_Allreduce");
    const double b = median(batched_us), l = median(loop_us);
    if (rank_ == 0)
      std::printf("  %12zu %14.1f %14.1f %8.2f %8llu\n", bytes, b, l, l / b, static_cast<unsigned long long>(all));
    std::fflush(stdout);
    return all;
  }
  int rank() const { return rank_; }
  int n_ranks() const { return n_; }

 private:
  std::vector<int> mine(int expert) const { return slots_of(experts_, o_.slots, rank_, expert); }
  void batched() {
    check(moecclExpertAllReduce(slots_.data(), slots_.data(), count_, moecclFloat32, moecclSum, &placement_, comm_,
                                nullptr),
          "moecclExpertAllReduce", rank_, comm_);
  }
  void loop() {
    for (int e = 0; e < o_.n_experts; e++) {
      const std::vector<int> slots = mine(e);
      if (slots.empty()) continue;
      slots_.reduce(slots, [&](float* first) {
        mpi(MPI_Allreduce(MPI_IN_PLACE, first, static_cast<int>(count_), MPI_FLOAT, MPI_SUM,
                          mpi_comms_[static_cast<size_t>(e)]),
            "MPI_Allreduce");
      });
    }
  }
  double most(double value) const {
    double all = 0;
    mpi(MPI_Allreduce(&value, &all, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD), "MPI_Allreduce");
    return all;
  }
  // Returns the time of the slowest rank.
  template <class Body>
  double timed(Body&& body) const {
    mpi(MPI_Barrier(MPI_COMM_WORLD), "MPI_Barrier");
    const auto start = Clock::now();
    body();
    return most(since_us(start));
  }

  const Options& o_;
  int rank_ = 0, n_ = 1;
  std::vector<int32_t> experts_;
  moecclPlacement_t placement_ = MOECCL_PLACEMENT_INIT;
  moecclComm_t comm_ = nullptr;
  std::vector<MPI_Comm> mpi_comms_;  // [n_experts]
  size_t count_ = 0;
  ExpertSlots slots_;
};

int comparison_main(int argc, char** argv) {
  Options o;
  App app("AllReduce over replicated experts beside a loop of MPI_Allreduce", "compare_mpi_experts");
  app.add_option("--experts", o.n_experts, "experts")->check(positive())->capture_default_str();
  app.add_option("--slots", o.slots, "expert slots of a rank")->check(positive())->capture_default_str();
  app.add_option("--iters", o.iters, "timed iterations")->check(positive())->capture_default_str();
  app.add_option("--seed", o.seed, "of the random placement")->check(not_negative())->capture_default_str();
  app.add_flag("--private", o.private_memory, "ordinary memory, not that of moecclMemAlloc");
  add_size(app, "-b,--min", o.min_bytes, "smallest expert (bytes of float)");
  add_size(app, "-e,--max", o.max_bytes, "largest expert; sizes grow by 4");
  parse_or_exit(app, argc, argv);
  if (o.min_bytes < sizeof(float)) fail("-b: an expert has 4 bytes at least");
  check_sizes(o.min_bytes, o.max_bytes);
  mpi(MPI_Init(&argc, &argv), "MPI_Init");
  uint64_t wrong = 0;
  {
    Comparison comparison(o);
    const double us = comparison.create_communicators();
    if (comparison.rank() == 0) {
      std::printf("# compare_mpi_experts: %d ranks, %d experts in %d slots, %s memory\n", comparison.n_ranks(),
                  o.n_experts, comparison.n_ranks() * o.slots, o.private_memory ? "ordinary" : "symmetric");
      std::printf("# creating a communicator for each expert took MPI %.1f ms\n# %12s %14s %14s %8s %8s\n", us / 1e3,
                  "expert(B)", "batched(us)", "MPI loop(us)", "ratio", "#wrong");
    }
    for (size_t bytes = o.min_bytes; bytes <= o.max_bytes; bytes *= 4) wrong += comparison.run(bytes);
  }
  mpi(MPI_Finalize(), "MPI_Finalize");
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace perf

int main(int argc, char** argv) { return perf::comparison_main(argc, argv); }
