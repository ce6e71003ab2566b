// SPDX-License-Identifier: Apache-2.0
// Measures the floor of moecclExpertAllReduce where ranks can access each other's buffers: the same sums of the same
// placement, with each slot read once and written once, by one pinned thread per core with equal shares. There are no
// ranks, plans, signals or waiting.
//   perf/bench_experts --ranks 16 --experts 16 --slots 4 -b 16K -e 4M
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "kernels/table.h"
#include "perf/common/fail.h"
#include "perf/common/shared_options.h"
#include "perf/common/stats.h"
#include "perf/moe/placements.h"
#include "src/driver/memory.h"

namespace perf {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  int n_ranks = 16, n_experts = 16, slots = 4, iters = 25, warmup = 3;
  size_t min_bytes = 16 << 10, max_bytes = 4 << 20, chunk = 64 << 10;
  uint64_t seed = 1;
};

// A barrier of all threads. Each thread has a core, so they spin.
class Meeting {
 public:
  explicit Meeting(uint32_t n) : n_(n) {}
  void meet() {
    const uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == n_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.fetch_add(1, std::memory_order_release);  // acquired by the threads that wait below
      return;
    }
    while (round_.load(std::memory_order_acquire) == round) {
    }
  }

 private:
  const uint32_t n_;
  std::atomic<uint32_t> arrived_{0}, round_{0};
};

std::vector<int> usable_cores() {
  const moeccl::driver::CoreSet set = moeccl::driver::usable_cores();
  std::vector<int> cores;
  for (int c = 0; c < static_cast<int>(set.size() * 64); c++)
    if (set[static_cast<size_t>(c) / 64] >> (c % 64) & 1) cores.push_back(c);
  return cores;
}

void pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  if (sched_setaffinity(0, sizeof(set), &set) != 0) fail("cannot pin a thread to core " + std::to_string(core));
}

class Sums {
 public:
  Sums(const Options& o, size_t bytes)
      : table_(moeccl::kernels::best()), slot_bytes_(bytes), replicas_(static_cast<size_t>(o.n_experts)) {
    if (!table_.reduces_to_many) fail("this processor's kernels do not store a sum several times: no floor");
    const std::vector<int32_t> experts = make_placement("random", o.n_ranks, o.slots, o.n_experts, o.seed);
    for (int r = 0; r < o.n_ranks; r++) {
      auto memory = moeccl::driver::private_memory(static_cast<size_t>(o.slots) * bytes);
      if (!memory.ok()) fail(memory.status().message());
      float* const base = reinterpret_cast<float*>(memory->data());
      for (size_t i = 0; i < static_cast<size_t>(o.slots) * count(); i++) base[i] = 1;
      for (int s = 0; s < o.slots; s++)
        replicas_[static_cast<size_t>(experts[static_cast<size_t>(r * o.slots + s)])].push_back(
            base + static_cast<size_t>(s) * count());
      memory_.push_back(std::move(*memory));
    }
    const size_t chunk = o.chunk / sizeof(float);
    for (size_t e = 0; e < replicas_.size(); e++)
      for (size_t first = 0; first < count(); first += chunk) pieces_.push_back({e, first});
    piece_ = chunk;
  }

  // Runs this thread's share, which is every n-th piece.
  void run(size_t thread, size_t n) const {
    std::vector<void*> all;
    for (size_t i = thread; i < pieces_.size(); i += n) {
      const auto& [expert, first] = pieces_[i];
      all.clear();
      for (float* slot : replicas_[expert]) all.push_back(slot + first);
      moeccl::kernels::ReduceArgs args;
      args.dst = all[0];
      args.srcs = all.data();
      args.n_srcs = static_cast<uint32_t>(all.size());
      args.count = std::min(piece_, count() - first);
      args.copies = all.data() + 1;
      args.n_copies = static_cast<uint32_t>(all.size()) - 1;
      table_.reduce[moecclFloat32][static_cast<size_t>(moeccl::kernels::ReduceOp::kSum)](args);
    }
  }
  // Checks one run over ones, after which each replica holds their number.
  bool right() const {
    for (const auto& slots : replicas_)
      for (const float* slot : slots)
        for (size_t i = 0; i < count(); i++)
          if (slot[i] != static_cast<float>(slots.size())) return false;
    return true;
  }
  void clear() const {
    for (const auto& slots : replicas_)
      for (float* slot : slots) std::fill_n(slot, count(), 0.0f);
  }

 private:
  size_t count() const { return slot_bytes_ / sizeof(float); }

  const moeccl::kernels::KernelTable& table_;
  size_t slot_bytes_, piece_ = 0;
  std::vector<moeccl::driver::Mapping> memory_;
  std::vector<std::vector<float*>> replicas_;  // [experts]
  std::vector<std::pair<size_t, size_t>> pieces_;
};

double measure(const Options& o, const std::vector<int>& cores, size_t bytes) {
  const Sums sums(o, bytes);
  Meeting meeting(static_cast<uint32_t>(cores.size()));
  std::vector<double> us;
  const auto body = [&](size_t thread) {
    pin(cores[thread]);
    for (int i = -o.warmup; i < o.iters; i++) {
      meeting.meet();
      const auto start = Clock::now();
      sums.run(thread, cores.size());
      meeting.meet();
      if (thread == 0 && i >= 0) us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
      if (thread == 0 && i == -o.warmup) {
        if (!sums.right()) fail("a sum is wrong");
        sums.clear();  // so that sums of sums stay finite
      }
    }
  };
  std::vector<std::thread> others;
  for (size_t t = 1; t < cores.size(); t++) others.emplace_back(body, t);
  body(0);
  for (std::thread& t : others) t.join();
  return median(us);
}

int experts_main(int argc, char** argv) {
  Options o;
  App app("The time of the bytes of an AllReduce over replicated experts, without ranks", "bench_experts");
  app.add_option("--ranks", o.n_ranks, "ranks of the placement")->check(positive())->capture_default_str();
  app.add_option("--experts", o.n_experts, "experts")->check(positive())->capture_default_str();
  app.add_option("--slots", o.slots, "slots of a rank")->check(positive())->capture_default_str();
  app.add_option("--iters", o.iters, "timed iterations")->check(positive())->capture_default_str();
  app.add_option("--seed", o.seed, "of the random placement")->check(not_negative())->capture_default_str();
  add_size(app, "-b,--min", o.min_bytes, "smallest expert (bytes of float)");
  add_size(app, "-e,--max", o.max_bytes, "largest expert; sizes grow by 4");
  add_size(app, "--chunk", o.chunk, "bytes of an expert that are summed at a time");
  parse_or_exit(app, argc, argv);
  if (o.min_bytes < sizeof(float)) fail("-b: an expert has 4 bytes at least");
  check_sizes(o.min_bytes, o.max_bytes);
  const std::vector<int> cores = usable_cores();
  std::printf("# bench_experts: %d experts in %d slots, %zu cores\n# %10s %12s %22s\n", o.n_experts,
              o.n_ranks * o.slots, cores.size(), "expert(B)", "time(us)", "read + written (GB/s)");
  for (size_t bytes = o.min_bytes; bytes <= o.max_bytes; bytes *= 4) {
    const double us = measure(o, cores, bytes);
    std::printf("  %10zu %12.1f %22.1f\n", bytes, us, 2e-3 * static_cast<double>(bytes) * o.n_ranks * o.slots / us);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace perf

int main(int argc, char** argv) { return perf::experts_main(argc, argv); }
