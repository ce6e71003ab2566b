// SPDX-License-Identifier: Apache-2.0
// Random calls of solve.h, on small problems whose figures are sometimes absurd.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/conformance/api_fuzzer.h"

namespace moeccl::testing {

// Array sizes are small or 0 or negative, because the memory has to exist. Other figures may be anything.
int32_t Fuzzer::extent(int most) {
  constexpr std::array<int32_t, 4> kNone = {0, -1, INT32_MIN, -65536};
  return below(20) == 0 ? kNone[below(kNone.size())] : 1 + static_cast<int32_t>(below(static_cast<uint64_t>(most)));
}

double Fuzzer::real() {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr std::array<double, 8> kOdd = {0, -1, -kInfinity, kInfinity, 1e308, 1e-308, 5e-324, 4e18};
  if (below(30) == 0) return std::nan("");
  return rarely() ? kOdd[below(kOdd.size())] : static_cast<double>(below(1000)) / 10 + 0.1;
}

// Returns an array of solve.h, of numbers from 0 to n - 1 except for a few; sometimes NULL.
const int32_t* Fuzzer::ints(size_t which, int32_t n) {
  std::vector<int32_t>& array = ints_[which];
  array.resize(kArray);
  const uint64_t odd = below(4) == 0 ? 1 + below(8) : 0;
  for (int32_t& value : array) value = static_cast<int32_t>(below(static_cast<uint64_t>(std::max(n, 1))));
  for (uint64_t i = 0; i < odd; ++i) array[below(64)] = number();
  return maybe(array.data());
}

const double* Fuzzer::reals(size_t which) {
  std::vector<double>& array = reals_[which];
  array.resize(kArray);
  const bool odd = below(4) == 0;
  for (double& value : array) value = odd ? real() : static_cast<double>(below(100)) + 1;
  return maybe(array.data());
}

void Fuzzer::add_solvers() {
  add_sample_solvers();
  add_swap_solvers();
  add_replica_solvers();
  add_domain_solvers();
  add_chunk_solvers();
}

void Fuzzer::add_sample_solvers() {
  add("SolveSamples", [this] {
    moecclSampleProblem_t p = MOECCL_SAMPLE_PROBLEM_INIT;
    p.n_samples = extent(8), p.n_experts = extent(8), p.n_devices = extent(4), p.n_nodes = extent(3);
    p.num_gather = ints(0, 9);
    if (below(2) == 0) p.num_scatter = ints(1, 9);
    if (below(3) == 0) p.expert_device = ints(2, p.n_devices);
    if (below(3) == 0) p.device_node = ints(3, p.n_nodes);
    if (below(3) == 0) p.current = ints(4, p.n_devices);
    if (below(2) == 0) p.alpha_intra_us = real(), p.alpha_inter_us = real();
    if (below(2) == 0) p.beta_intra_us = real(), p.beta_inter_us = real();
    if (rarely()) p.min_gain = real();
    if (rarely()) p.refine_pairs = number();
    if (below(3) == 0) {
      p.n_inner = std::max(extent(7), 1) - 1;
      p.inner_group = ints(5, p.n_devices), p.inner_alpha_us = reals(0), p.inner_beta_us = reals(1);
    }
    maybe_resize(p);
    moecclSampleAnswer_t answer{};
    answer.size = sizeof(answer);
    maybe_resize(answer);
    std::array<int32_t, 64> placement{};
    for (int32_t& d : placement) d = rarely() ? number() : static_cast<int32_t>(below(4));
    size_t bytes = 0;
    note(moecclSolveSamplesWorkspace(maybe(&p), maybe(&bytes)));
    std::vector<char> workspace(std::min<size_t>(bytes, 1 << 20));
    note(moecclEvaluateSamples(maybe(&p), maybe(placement.data()), maybe(&answer)));
    const bool own = below(2) == 0;
    note(moecclSolveSamples(maybe(&p), maybe(placement.data()), maybe(&answer), own ? workspace.data() : nullptr,
                            own ? workspace.size() - (rarely() && !workspace.empty() ? 1 : 0) : 0));
  });
  add("SolveAssignment", [this] {
    const int32_t items = extent(8), bins = extent(4);
    std::array<int32_t, 64> bin{};
    int32_t capacity[4] = {};
    for (int32_t i = 0; i < std::max(items, 0); ++i) ++capacity[static_cast<int32_t>(below(4)) % std::max(bins, 1)];
    if (rarely()) capacity[0] = number();
    int64_t total = 0;
    size_t bytes = 0;
    note(moecclSolveAssignmentWorkspace(items, bins, maybe(&bytes)));
    std::vector<char> workspace(std::min<size_t>(bytes, 1 << 20));
    const bool own = below(2) == 0;
    note(moecclSolveAssignment(ints(0, 100), maybe(capacity), items, bins, maybe(bin.data()), maybe(&total),
                               own ? workspace.data() : nullptr, own ? workspace.size() : 0));
  });
  add("Predictor", [this] {
    const int32_t now = extent(8), next = extent(8);
    std::vector<double> joint(64);
    for (double& j : joint) j = rarely() ? real() : static_cast<double>(below(10));
    std::array<int32_t, 64> predicted{};
    note(moecclPredictorUpdate(maybe(joint.data()), now, next, rarely() ? real() : 0.9, ints(0, now), ints(1, next),
                               rarely() ? -static_cast<int64_t>(below(9)) : static_cast<int64_t>(below(16)),
                               extent(4)));
    note(moecclPredictorApply(maybe(joint.data()), now, next, ints(2, 20), extent(8), maybe(predicted.data())));
  });
}

void Fuzzer::add_swap_solvers() {
  add("SolveSwap", [this] {
    moecclSwapProblem_t p = MOECCL_SWAP_PROBLEM_INIT;
    p.n_experts = extent(8), p.top_k = extent(3), p.n_levels = extent(3);
    p.n_groups = ints(0, 8);
    for (size_t l = 0; below(8) != 0 && l < 3; ++l) ints_[0][l] = int32_t{1} << (l + 1);
    if (rarely()) p.group_of_slot = ints(1, 2);
    if (below(3) == 0) {
      p.placement = ints(2, p.n_experts);
      for (int32_t e = 0; below(8) != 0 && e < 8; ++e) ints_[2][static_cast<size_t>(e)] = 7 - e;
    }
    if (rarely()) p.row_bytes = real();
    if (below(3) == 0) {
      p.inter_alpha_us = reals(0), p.inter_beta_us = reals(1);
      p.intra_alpha_us = reals(2), p.intra_beta_us = reals(3);
    }
    if (rarely()) p.dimension = number();
    if (rarely()) p.max_function = static_cast<moecclMaxFunction_t>(number());
    if (rarely()) p.gamma = real();
    if (rarely()) p.count_duplicates = number();
    if (rarely()) p.migrate_us = real();
    if (rarely()) p.horizon = real();
    if (rarely()) p.min_gain = real();
    maybe_resize(p);
    size_t n = 0, bytes = 0, count_bytes = 0;
    note(moecclSwapCountsLength(maybe(&p), maybe(&n)));
    note(moecclSwapCountWorkspace(maybe(&p), maybe(&count_bytes)));
    note(moecclSolveSwapWorkspace(maybe(&p), maybe(&bytes)));
    // The first call may not have returned the length, so ask the library separately.
    size_t length = 0;
    if (moecclSwapCountsLength(&p, &length) != moecclSuccess) length = 0;
    ASSERT_LE(length, size_t{1} << 20);
    std::vector<int32_t> counts(length + 1), z(8 * 8 * 8);
    const auto n_tokens = rarely() ? -static_cast<int64_t>(below(9)) : static_cast<int64_t>(below(16));
    const int32_t* topk = ints(3, p.n_experts);
    std::vector<char> workspace(std::min<size_t>(std::max(bytes, count_bytes), 1 << 20));
    const bool own = below(2) == 0;
    note(moecclSwapCount(maybe(&p), topk, n_tokens, maybe(counts.data()), own ? workspace.data() : nullptr,
                         own ? workspace.size() : 0));
    if (rarely() && length > 0) counts[below(length)] = number();
    note(moecclSwapTable(maybe(&p), maybe(counts.data()), rarely() ? number() : 0, maybe(z.data())));
    int32_t pairs[2 * 4] = {};
    std::array<int32_t, 8> placement{};
    moecclSwapAnswer_t answer{};
    answer.size = sizeof(answer);
    maybe_resize(answer);
    note(moecclSolveSwap(maybe(&p), maybe(counts.data()), maybe(pairs), maybe(&answer),
                         own ? workspace.data() : nullptr, own ? workspace.size() : 0));
    note(moecclSolveSwapSequence(maybe(&p), topk, n_tokens, rarely() ? -(number() % 5) : static_cast<int32_t>(below(5)),
                                 maybe(pairs), maybe(placement.data()), maybe(&answer)));
  });
}

void Fuzzer::add_replica_solvers() {
  add("ReplicaCounts", [this] {
    const int32_t experts = extent(8), slots = extent(16);
    std::array<int32_t, 8> counts{};
    double dropped = 0;
    note(moecclReplicaCounts(reals(0), experts, slots, maybe(counts.data())));
    note(moecclReplicaCountsFewestDrops(reals(1), experts, slots, real(), maybe(counts.data())));
    if (rarely()) counts[below(8)] = number();
    note(moecclReplicaDrops(reals(2), maybe(counts.data()), experts, slots, real(), maybe(&dropped)));
  });
  add("SolveReplicas", [this] {
    moecclReplicaProblem_t p = MOECCL_REPLICA_PROBLEM_INIT;
    p.n_experts = extent(8), p.n_ranks = extent(4), p.slots_per_rank = extent(4), p.n_nodes = extent(2);
    p.demand = ints(0, 100);
    if (below(3) == 0) p.counts = ints(1, 4);
    if (below(3) == 0) p.rank_node = ints(2, p.n_nodes);
    if (rarely()) p.beta_inter_us = real();
    if (rarely()) p.compute_us = real();
    if (rarely()) p.min_gain = real();
    maybe_resize(p);
    moecclReplicaAnswer_t answer{};
    answer.size = sizeof(answer);
    maybe_resize(answer);
    std::array<int32_t, 16> slots{};
    std::array<int32_t, 64> split{};
    std::array<int32_t, 32> source{};
    std::array<int64_t, 4> sends{};
    note(moecclSolveReplicas(maybe(&p), maybe(slots.data()), maybe(&answer)));
    if (rarely()) slots[below(slots.size())] = number();
    note(moecclReplicaSplit(maybe(&p), maybe(slots.data()), maybe(split.data())));
    note(moecclGradSources(maybe(slots.data()), p.n_experts, p.n_ranks, p.slots_per_rank, maybe(source.data()),
                           maybe(sends.data())));
  });
  add("SolveBalance", [this] {
    moecclBalanceProblem_t p = MOECCL_BALANCE_PROBLEM_INIT;
    p.n_layers = extent(2), p.n_experts = extent(8), p.n_slots = extent(16), p.n_gpus = extent(4);
    if (p.n_gpus > 0) p.n_slots -= p.n_slots % p.n_gpus;
    p.n_groups = extent(4), p.n_nodes = extent(2);
    p.load = reals(0);
    if (below(3) == 0) p.current = ints(0, p.n_experts);
    if (rarely()) p.move_cost = real();
    if (rarely()) p.tolerance = real();
    p.max_work = rarely() ? number() % 10000 : 1000;
    maybe_resize(p);
    moecclBalanceAnswer_t answer{};
    answer.size = sizeof(answer);
    maybe_resize(answer);
    std::array<int32_t, 64> slots{};
    note(moecclSolveBalance(maybe(&p), maybe(slots.data()), maybe(&answer)));
  });
  add("ReplicaCommTime", [this] {
    moecclReplicaCost_t c = MOECCL_REPLICA_COST_INIT;
    c.n_ranks = rarely() ? number() : 4, c.n_experts = rarely() ? number() : 8, c.slots_per_rank = extent(4);
    c.grad_bytes = real(), c.weight_bytes = real(), c.pci_bandwidth = real(), c.net_bandwidth = real();
    maybe_resize(c);
    double fixed = 0, adaptive = 0;
    note(moecclReplicaCommTime(maybe(&c), maybe(&fixed), maybe(&adaptive)));
  });
}

void Fuzzer::add_domain_solvers() {
  add("SolveDomains", [this] {
    moecclDomainProblem_t p = MOECCL_DOMAIN_PROBLEM_INIT;
    p.n_levels = below(12) == 0 ? number() : extent(3);
    p.scale = ints(0, 4);
    for (size_t l = 0; below(8) != 0 && l < 3; ++l) ints_[0][l] = 2;
    if (rarely()) p.sizes = ints(1, 4);
    p.bandwidth = reals(0);
    p.data_bytes = real(), p.expert_bytes = real(), p.pre_expert_s = real();
    if (rarely()) p.compression = real();
    if (rarely()) p.min_gain = real();
    if (below(2) == 0) {
      p.top_k = rarely() ? number() : 2, p.n_experts = rarely() ? number() : 8;
      if (below(2) == 0) p.latency_s = reals(1);
      p.expert_s = real(), p.backward_s = real(), p.gradient_bytes = real();
      p.encode_bandwidth = real(), p.decode_bandwidth = real(), p.gradient_ratio = real();
      p.forward_only = rarely() ? number() : 0;
    }
    maybe_resize(p);
    moecclDomainAnswer_t answer{};
    answer.size = sizeof(answer);
    maybe_resize(answer);
    std::array<int32_t, 8> domain{}, location{};
    double seconds = 0;
    moecclDomainLink_t link{};
    note(moecclSolveDomains(maybe(&p), maybe(domain.data()), maybe(&answer)));
    if (below(4) == 0) domain[below(3)] = rarely() ? number() : 1 + static_cast<int32_t>(below(2));
    note(moecclDomainLatency(maybe(&p), maybe(domain.data()), maybe(&seconds)));
    const auto gpu = [this] { return rarely() ? static_cast<int64_t>(random_()) : static_cast<int64_t>(below(9)); };
    note(moecclDomainLocate(maybe(&p), gpu(), maybe(location.data())));
    note(moecclDomainLink(maybe(&p), maybe(domain.data()), rarely() ? number() : 0, gpu(), gpu(), maybe(&link)));
  });
  add("DomainProportion", [this] {
    double share = 0, latency = 0;
    note(moecclDomainProportion(rarely() ? number() : 8, real(), real(), real(), real(), maybe(&share),
                                maybe(&latency)));
  });
  add("ComputeLatency", [this] {
    moecclComputeShape_t s = MOECCL_COMPUTE_SHAPE_INIT;
    const auto size = [this] {
      return rarely() ? static_cast<int64_t>(random_()) : 1 + static_cast<int64_t>(below(99));
    };
    s.throughput = real();
    s.tokens = size(), s.sequence = size(), s.hidden = size(), s.ffn = size(), s.expert_ffn = size();
    s.n_dense = rarely() ? number() : 1, s.matrices = rarely() ? number() : 2, s.top_k = rarely() ? number() : 2;
    maybe_resize(s);
    double before = 0, experts = 0;
    note(moecclComputeLatency(maybe(&s), maybe(&before), maybe(&experts)));
  });
}

void Fuzzer::add_chunk_solvers() {
  add("SolveChunks", [this] {
    moecclChunkProblem_t p = MOECCL_CHUNK_PROBLEM_INIT;
    const auto curve = [this](size_t which) {
      moecclCurve_t c{};
      if (below(2) != 0) return c;
      c.n_points = extent(4);
      c.bytes = reals(which), c.efficiency = reals(which + 1);
      for (size_t i = 0; below(8) != 0 && i < 4; ++i)
        reals_[which][i] = static_cast<double>(i + 1), reals_[which + 1][i] = 0.5;
      return c;
    };
    p.bytes = real() * 1e4;
    p.tensor = rarely() ? number() : 2, p.expert = rarely() ? number() : 4;
    p.inter_bandwidth = real(), p.intra_bandwidth = real(), p.copy_bandwidth = real();
    p.inter = curve(0), p.intra = curve(2), p.copy = curve(4), p.o3.copy = curve(6);
    if (rarely()) p.min_bytes = real();
    if (rarely()) p.max_chunks = number() % 100'000;
    if (rarely()) p.start_us = real(), p.o2.chunk_us = real();
    if (rarely()) p.min_gain = real();
    maybe_resize(p);
    moecclChunkAnswer_t answer{};
    answer.size = sizeof(answer);
    maybe_resize(answer);
    double us = 0;
    note(moecclSolveChunks(maybe(&p), maybe(&answer)));
    note(moecclChunkTime(maybe(&p),
                         static_cast<moecclChunkStrategy_t>(rarely() ? number() : static_cast<int>(below(4))),
                         rarely() ? number() : 1 + static_cast<int32_t>(below(3)), maybe(&us)));
  });
  add("SolveLayout", [this] {
    if (below(8) != 0) return;  // a millisecond each
    moecclLayoutProblem_t p = MOECCL_LAYOUT_PROBLEM_INIT;
    const auto small = [this](int32_t usual) { return rarely() ? number() : usual; };
    p.n_gpus = small(16), p.gpus_per_node = small(8), p.gpu_bytes = rarely() ? real() : 80e9;
    p.intra_bandwidth = rarely() ? real() : 4e11, p.inter_bandwidth = rarely() ? real() : 5e10;
    p.n_layers = small(4), p.n_heads = small(8), p.n_experts = small(8), p.top_k = small(2);
    p.hidden = rarely() ? static_cast<int64_t>(random_()) : 1024;
    p.sequence = rarely() ? static_cast<int64_t>(random_()) : 2048;
    p.micro_batch = small(1), p.global_batch = small(16);
    p.dense_parameters = rarely() ? real() : 1e8, p.moe_parameters = rarely() ? real() : 1e9;
    p.zero_stage = small(1), p.sequence_parallel = small(1);
    p.recompute = static_cast<moecclRecompute_t>(small(0));
    p.gpu_flops = rarely() ? real() : 1e15, p.compute_efficiency = rarely() ? real() : 0;
    p.switch_ranks = small(0), p.max_bubble = rarely() ? real() : 0;
    maybe_resize(p);
    moecclLayout_t layouts[4] = {};
    int32_t n = 0;
    note(moecclSolveLayout(maybe(&p), maybe(layouts), rarely() ? -number() % 5 : static_cast<int32_t>(below(5)),
                           maybe(&n)));
    moecclLayout_t one = layouts[0];
    if (rarely()) one.tensor = number();
    if (rarely()) one.pipeline = number();
    moecclLayoutCost_t cost{};
    cost.size = sizeof(cost);
    maybe_resize(cost);
    note(moecclPriceLayout(maybe(&p), maybe(&one), maybe(&cost)));
  });
}

}  // namespace moeccl::testing
