// SPDX-License-Identifier: Apache-2.0
// Random calls of every solver's entry point, with a mix of sensible and senseless arguments: no crash, no sanitizer
// report, and every refusal names something. MOECCL_TEST_SCALE multiplies the 20,000 calls; 50 gives a million.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include "tests/unit/solve/random_problems.h"

namespace moeccl::solve {
namespace {

class Fuzz {
 public:
  explicit Fuzz(uint64_t seed) : random_(seed) {}

  bool odd() { return random_.below(12) == 0; }
  // Returns usually 1 .. most, and occasionally anything.
  int32_t size(int32_t most) {
    if (!odd()) return 1 + static_cast<int32_t>(random_.below(static_cast<uint64_t>(most)));
    static constexpr int32_t kOdd[] = {0, -1, INT32_MIN, INT32_MAX, 1 << 30};
    return kOdd[random_.below(5)];
  }
  // Returns a size that determines how much memory is read, and which is never larger than what fill() makes.
  int32_t extent(int32_t most) {
    if (!odd()) return 1 + static_cast<int32_t>(random_.below(static_cast<uint64_t>(most)));
    return random_.below(2) ? 0 : -static_cast<int32_t>(random_.below(1000));
  }
  double number(double most) {
    if (!odd()) return most * random_.unit();
    static const double kOdd[] = {0, -1, std::nan(""), INFINITY, -INFINITY, 1e308, 1e-308, 5e-324};
    return kOdd[random_.below(8)];
  }
  std::vector<int32_t> integers(size_t n, int32_t least, int32_t bound) {
    std::vector<int32_t> v(n);
    const bool wild = odd();
    for (int32_t& x : v) {
      x = least + static_cast<int32_t>(random_.below(static_cast<uint64_t>(std::max(1, bound - least))));
      if (wild && random_.below(30) == 0) x = static_cast<int32_t>(random_());
    }
    return v;
  }
  std::vector<double> numbers(size_t n, double most) {
    std::vector<double> v(n);
    const bool wild = odd();
    for (double& x : v) x = wild ? number(most) : most * (random_.unit() + 1e-3);
    return v;
  }
  template <class T>
  T* or_null(std::vector<T>& v) {
    return random_.below(40) == 0 ? nullptr : v.data();
  }
  template <class T>
  T answer() {
    T a{};
    a.size = odd() ? static_cast<size_t>(random_()) : sizeof(T) - random_.below(3) * 8;
    return a;
  }
  // Returns an enum of n values, and occasionally another number, as a C caller could pass.
  template <class E>
  E choice(uint64_t n) {
    const int number = odd() ? static_cast<int>(random_()) : static_cast<int>(random_.below(n));
    E e{};
    std::memcpy(&e, &number, sizeof(e));
    return e;
  }
  void done(moecclResult_t result) {
    ++calls;
    if (result == moecclSuccess) {
      ++good;
      return;
    }
    ASSERT_TRUE(result == moecclInvalidArgument || result == moecclInvalidUsage || result == moecclOutOfMemory)
        << result;
    ASSERT_FALSE(std::string(moecclGetLastError(nullptr)).empty());
  }
  uint64_t below(uint64_t n) { return random_.below(n); }

  int64_t calls = 0, good = 0;

 private:
  SplitMix64 random_;
};

constexpr size_t kMost = 16;  // of every extent

void call_samples(Fuzz& f) {
  struct {
    moecclSampleProblem_t p = MOECCL_SAMPLE_PROBLEM_INIT;
    std::array<char, 200> newer{};  // a larger size promises that this memory is there
  } given;
  moecclSampleProblem_t& p = given.p;
  p.n_samples = f.extent(16), p.n_experts = f.extent(16), p.n_devices = f.extent(8), p.n_nodes = f.size(3);
  auto gather = f.integers(kMost * kMost, 0, 100), scatter = f.integers(kMost * kMost, 0, 100);
  auto expert = f.integers(kMost, 0, std::max(1, p.n_devices)), node = f.integers(kMost, 0, std::max(1, p.n_nodes));
  auto current = f.integers(kMost, 0, std::max(1, p.n_devices));
  p.num_gather = f.or_null(gather);
  p.num_scatter = f.below(2) ? scatter.data() : nullptr;
  p.expert_device = f.below(2) ? expert.data() : nullptr;
  p.device_node = f.below(2) ? node.data() : nullptr;
  p.current = f.below(2) ? current.data() : nullptr;
  if (f.below(2)) p.beta_inter_us = f.number(1), p.beta_intra_us = f.number(1), p.alpha_inter_us = f.number(10);
  p.min_gain = f.below(2) ? 0 : f.number(1);
  p.refine_pairs = static_cast<int64_t>(f.below(3)) * 100 - 100;
  if (f.odd()) p.size = f.below(200);
  std::vector<int32_t> placement = f.integers(kMost, 0, std::max(1, p.n_devices));
  auto a = f.answer<moecclSampleAnswer_t>();
  const uint64_t which = f.below(3);
  if (which == 0) {
    f.done(moecclSolveSamples(&p, f.or_null(placement), f.below(2) ? &a : nullptr, nullptr, 0));
  } else if (which == 1) {
    size_t bytes = 0;
    f.done(moecclSolveSamplesWorkspace(&p, &bytes));
    std::vector<char> memory(std::min<size_t>(bytes, 1 << 20));
    f.done(moecclSolveSamples(&p, placement.data(), &a, memory.data(),
                              f.odd() ? f.below(memory.size() + 1) : memory.size()));
  } else {
    f.done(moecclEvaluateSamples(&p, f.or_null(placement), &a));
  }
}

void call_assignment(Fuzz& f) {
  const int32_t items = f.extent(16), bins = f.extent(8);
  auto cost = f.integers(kMost * kMost, 0, 1000), capacity = f.integers(kMost, 0, 3);
  int64_t left = items;
  for (int32_t b = 0; b < bins && !f.odd(); ++b) {
    capacity[static_cast<size_t>(b)] = b + 1 == bins ? static_cast<int32_t>(left) : static_cast<int32_t>(left / 2);
    left -= capacity[static_cast<size_t>(b)];
  }
  std::vector<int32_t> bin(kMost);
  int64_t total = 0;
  f.done(moecclSolveAssignment(f.or_null(cost), f.or_null(capacity), items, bins, f.or_null(bin), &total, nullptr, 0));
}

void call_predictor(Fuzz& f) {
  const int32_t now = f.extent(16), next = f.extent(16), k = f.extent(4);
  auto joint = f.numbers(kMost * kMost, 10);
  auto topk = f.integers(kMost * 4, -1, std::max(1, std::min(now, next))), num = f.integers(kMost * kMost, 0, 50);
  std::vector<int32_t> out(kMost * kMost);
  f.done(
      moecclPredictorUpdate(f.or_null(joint), now, next, f.number(1), f.or_null(topk), topk.data(), f.extent(16), k));
  f.done(moecclPredictorApply(joint.data(), now, next, f.or_null(num), f.extent(16), out.data()));
}

void call_swap(Fuzz& f) {
  moecclSwapProblem_t p = MOECCL_SWAP_PROBLEM_INIT;
  p.n_experts = f.extent(16), p.top_k = f.extent(4), p.n_levels = f.extent(3);
  std::vector<int32_t> groups = {2, 4, 8};
  if (f.below(3) == 0) groups = f.integers(3, 1, 17);
  auto slot = f.integers(kMost * 3, 0, 2), placement = f.integers(kMost, 0, 16);
  for (size_t i = 0; i < kMost && !f.odd(); ++i) placement[i] = static_cast<int32_t>(i);
  p.n_groups = f.or_null(groups);
  p.group_of_slot = f.below(4) == 0 ? slot.data() : nullptr;
  p.placement = f.below(2) ? placement.data() : nullptr;
  auto costs = f.numbers(4 * 8, 10);
  if (f.below(3) == 0) {
    p.inter_alpha_us = costs.data(), p.inter_beta_us = costs.data() + 8, p.intra_alpha_us = f.or_null(costs);
    p.intra_beta_us = costs.data() + 24;
  }
  p.row_bytes = f.below(2) ? 0 : f.number(1e5);
  p.dimension = f.below(2) ? 0 : f.size(3);
  p.max_function = f.choice<moecclMaxFunction_t>(3);
  p.gamma = f.below(2) ? 0 : f.number(40);
  p.count_duplicates = static_cast<int32_t>(f.below(2));
  p.min_gain = f.below(2) ? 0 : f.number(1);
  p.migrate_us = f.below(2) ? 0 : f.number(10);
  auto topk = f.integers(kMost * 4, -1, std::max(1, p.n_experts));
  const int64_t tokens = f.extent(16);
  auto a = f.answer<moecclSwapAnswer_t>();
  int32_t pair[2];
  size_t length = 0;
  const moecclResult_t sized = moecclSwapCountsLength(&p, &length);
  f.done(sized);
  if (sized != moecclSuccess) return;
  std::vector<int32_t> counts = f.integers(length, 0, 100);  // also solved when it was never counted
  if (f.below(3) != 0) f.done(moecclSwapCount(&p, f.or_null(topk), tokens, f.or_null(counts), nullptr, 0));
  f.done(moecclSolveSwap(&p, f.or_null(counts), pair, &a, nullptr, 0));
  std::vector<int32_t> z(kMost * kMost * kMost), pairs(8), out(kMost);
  f.done(moecclSwapTable(&p, counts.data(), f.extent(3) - 1, z.data()));
  f.done(moecclSolveSwapSequence(&p, topk.data(), tokens, f.odd() ? -1 : static_cast<int32_t>(f.below(5)), pairs.data(),
                                 f.or_null(out), &a));
}

void call_replicas(Fuzz& f) {
  const int32_t experts = f.extent(16), slots = f.odd() ? f.size(1000) : 16 + static_cast<int32_t>(f.below(40));
  auto popularity = f.numbers(kMost, 1000);
  std::vector<int32_t> counts(kMost);
  double dropped = 0;
  if (slots < 1 << 20) {
    f.done(moecclReplicaCounts(f.or_null(popularity), experts, slots, f.or_null(counts)));
    f.done(moecclReplicaCountsFewestDrops(popularity.data(), experts, slots, f.number(2), counts.data()));
    f.done(moecclReplicaDrops(popularity.data(), counts.data(), experts, slots, f.number(2), &dropped));
  }
  moecclReplicaProblem_t p = MOECCL_REPLICA_PROBLEM_INIT;
  p.n_experts = f.extent(8), p.n_ranks = f.extent(4), p.slots_per_rank = f.extent(3), p.n_nodes = f.size(3);
  auto demand = f.integers(kMost * kMost, 0, 100), given = f.integers(kMost, 1, 3),
       node = f.integers(kMost, 0, std::max(1, p.n_nodes));
  p.demand = f.or_null(demand);
  p.counts = f.below(4) == 0 ? given.data() : nullptr;
  p.rank_node = f.below(2) ? node.data() : nullptr;
  p.beta_inter_us = f.below(2) ? 0 : f.number(1);
  p.compute_us = f.below(2) ? 0 : f.number(1);
  std::vector<int32_t> slot(kMost), split(kMost * kMost), source(kMost * kMost);
  std::vector<int64_t> sends(kMost);
  auto a = f.answer<moecclReplicaAnswer_t>();
  if (f.below(4) == 0) f.done(moecclSolveReplicas(&p, f.or_null(slot), &a));  // the costliest of all calls
  if (f.below(2)) slot = f.integers(kMost, 0, std::max(1, p.n_experts));
  f.done(moecclReplicaSplit(&p, slot.data(), split.data()));
  f.done(moecclGradSources(slot.data(), f.extent(8), f.extent(4), f.extent(3), source.data(), f.or_null(sends)));
  moecclReplicaCost_t c = MOECCL_REPLICA_COST_INIT;
  c.n_ranks = f.size(2048), c.n_experts = f.size(64), c.slots_per_rank = f.size(4);
  c.grad_bytes = f.number(1e9), c.weight_bytes = f.number(1e9), c.pci_bandwidth = f.number(1e11),
  c.net_bandwidth = f.number(1e11);
  double fixed = 0, adaptive = 0;
  f.done(moecclReplicaCommTime(&c, &fixed, &adaptive));
}

void call_balance(Fuzz& f) {
  moecclBalanceProblem_t p = MOECCL_BALANCE_PROBLEM_INIT;
  p.n_layers = f.extent(3), p.n_experts = f.extent(8), p.n_gpus = f.size(4), p.n_nodes = f.size(2);
  p.n_slots = p.n_gpus > 0 && p.n_gpus < 8 ? p.n_gpus * f.extent(4) : f.extent(16);
  p.n_groups = f.below(2) ? 0 : f.size(4);
  auto load = f.numbers(3 * kMost, 1000);
  auto current = f.integers(8 * kMost, -1, std::max(1, p.n_experts));
  p.load = f.or_null(load);
  p.current = f.below(2) ? current.data() : nullptr;
  p.move_cost = f.below(2) ? 0 : f.number(10);
  p.tolerance = f.below(2) ? 0 : f.number(1);
  p.max_work = static_cast<int64_t>(f.below(20000)) - 1;
  std::vector<int32_t> slot(8 * kMost);
  auto a = f.answer<moecclBalanceAnswer_t>();
  f.done(moecclSolveBalance(&p, f.or_null(slot), &a));
}

void call_domains(Fuzz& f) {
  moecclDomainProblem_t p = MOECCL_DOMAIN_PROBLEM_INIT;
  p.n_levels = f.extent(3);
  auto scale = f.integers(3, 1, 9), sizes = f.integers(1 + 8 + 64 + 600, 1, 9);
  auto bandwidth = f.numbers(3, 1e10);
  p.scale = f.or_null(scale);
  bool wild = false;
  for (const int32_t s : sizes) wild |= s < 1 || s > 8;
  p.sizes = f.below(3) == 0 && !wild ? sizes.data() : nullptr;
  p.bandwidth = f.or_null(bandwidth);
  p.data_bytes = f.number(1e8), p.expert_bytes = f.number(1e7), p.pre_expert_s = f.number(1e-2);
  p.compression = f.below(2) ? 0 : 1 + f.number(50);
  p.top_k = static_cast<int32_t>(f.below(9)) - 1, p.n_experts = static_cast<int32_t>(f.below(70));
  auto latency = f.numbers(3, 1e-2);
  p.latency_s = f.or_null(latency);
  p.expert_s = f.number(1e-2), p.backward_s = f.number(1e-2), p.gradient_bytes = f.number(1e7);
  p.encode_bandwidth = f.number(1e11), p.decode_bandwidth = f.number(1e11), p.gradient_ratio = f.number(100);
  p.forward_only = static_cast<int32_t>(f.below(2));
  auto domain = f.integers(3, 1, 9);
  int32_t location[3];
  double s = 0, proportion = 0;
  auto a = f.answer<moecclDomainAnswer_t>();
  moecclDomainLink_t link = moecclLinkNone;
  f.done(moecclDomainLatency(&p, domain.data(), &s));
  f.done(moecclDomainLocate(&p, f.size(100), location));
  f.done(moecclDomainLink(&p, domain.data(), f.extent(3) - 1, f.size(100), f.size(100), &link));
  f.done(moecclSolveDomains(&p, domain.data(), f.below(2) ? &a : nullptr));
  f.done(moecclDomainProportion(f.size(1000), f.number(1e11), f.number(1e-3), f.number(1e8), f.number(1e7), &proportion,
                                &s));
}

void call_chunks(Fuzz& f) {
  moecclChunkProblem_t p = MOECCL_CHUNK_PROBLEM_INIT;
  p.bytes = f.number(1e9), p.tensor = f.size(16), p.expert = f.size(16);
  p.inter_bandwidth = f.number(1e11), p.intra_bandwidth = f.number(1e11), p.copy_bandwidth = f.number(1e12);
  std::vector<double> volumes = {1e4, 1e6, 1e8}, efficiency = f.numbers(3, 0.9);
  if (f.odd()) volumes = f.numbers(3, 1e8);
  p.inter = {f.extent(3), f.or_null(volumes), f.or_null(efficiency)};
  if (f.below(2)) p.intra = p.inter;
  p.max_chunks = f.below(2) ? 64 : f.extent(64);
  p.min_bytes = f.number(1e6);
  p.start_us = f.number(100);
  auto a = f.answer<moecclChunkAnswer_t>();
  double us = 0;
  f.done(moecclSolveChunks(&p, &a));
  f.done(moecclChunkTime(&p, static_cast<moecclChunkStrategy_t>(f.below(4)), f.size(64), &us));
}

void call_layout(Fuzz& f) {
  moecclLayoutProblem_t p = MOECCL_LAYOUT_PROBLEM_INIT;
  p.n_gpus = f.size(64), p.gpus_per_node = f.size(8), p.gpu_bytes = f.number(1e11);
  p.intra_bandwidth = f.number(1e11), p.inter_bandwidth = f.number(1e10);
  p.n_layers = f.size(16), p.n_heads = f.size(32), p.n_experts = f.size(16), p.top_k = f.size(2);
  p.hidden = f.size(4096), p.sequence = f.size(8192);
  p.micro_batch = f.size(4), p.global_batch = f.size(64);
  p.dense_parameters = f.number(1e9), p.moe_parameters = f.number(1e10);
  p.zero_stage = f.odd() ? 4 : static_cast<int32_t>(f.below(4));
  p.sequence_parallel = static_cast<int32_t>(f.below(2));
  p.recompute = f.choice<moecclRecompute_t>(3);
  moecclLayout_t found[4];
  int32_t n = 0;
  f.done(moecclSolveLayout(&p, f.odd() ? nullptr : found, f.odd() ? -1 : 4, f.odd() ? nullptr : &n));
}

TEST(Fuzz, RandomCallsNeverCrashAndRefusalsHaveASentence) {
  const char* scale = std::getenv("MOECCL_TEST_SCALE");
  const auto wanted = static_cast<int64_t>(20000 * (scale == nullptr ? 1 : std::atof(scale)));
  Fuzz f(testing::seed());
  while (f.calls < wanted && !::testing::Test::HasFatalFailure()) {
    switch (f.below(9)) {
      case 0:
        call_samples(f);
        break;
      case 1:
        call_assignment(f);
        break;
      case 2:
        call_predictor(f);
        break;
      case 3:
        call_swap(f);
        break;
      case 4:
        call_replicas(f);
        break;
      case 5:
        call_domains(f);
        break;
      case 6:
        call_chunks(f);
        break;
      case 7:
        call_balance(f);
        break;
      default:
        call_layout(f);
        break;
    }
  }
  std::printf("%ld calls, %ld succeeded\n", static_cast<long>(f.calls), static_cast<long>(f.good));
  EXPECT_GT(f.good, f.calls / 5);
}

}  // namespace
}  // namespace moeccl::solve
