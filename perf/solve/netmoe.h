// SPDX-License-Identifier: Apache-2.0
// NetMoE's experiment: routings with the locality that the paper's volumes show, and the figures of Table 5 for them.
#pragma once

#include <moeccl/moeccl.h>

#include <cstdint>
#include <random>
#include <vector>

namespace perf::netmoe {

// Gives the same draws everywhere, because std's distributions differ between libraries.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  uint64_t below(uint64_t bound) { return engine_() % bound; }
  double unit() { return static_cast<double>(engine_() >> 11) * 0x1.0p-53; }

 private:
  std::mt19937_64 engine_;
};

// `device` of a sample's tokens go to the experts of one device, drawn per sample, `node` of them to the experts of
// that device's node, and the rest to all experts alike. The two shares are fitted to the four changes of volume in
// Table 5, inter-node and intra-node at 2 and at 4 nodes (means of its models).
struct Locality {
  double device = 0.28, node = 0.13;
};
struct Shape {
  int32_t n_nodes, devices_per_node = 8, samples_per_device = 4, experts_per_device = 2, choices = 2048;
  int32_t n_devices() const { return n_nodes * devices_per_node; }
  int32_t n_experts() const { return n_devices() * experts_per_device; }
  int32_t n_samples() const { return n_devices() * samples_per_device; }
};

// Returns num[I][E] of Eq. 2.
inline std::vector<int32_t> routing(Dice& random, const Shape& s, const Locality& l) {
  const auto experts = static_cast<uint64_t>(s.n_experts()), devices = static_cast<uint64_t>(s.n_devices()),
             nodes = static_cast<uint64_t>(s.n_nodes);
  std::vector<int32_t> num(static_cast<size_t>(s.n_samples()) * experts);
  for (size_t i = 0; i < static_cast<size_t>(s.n_samples()); ++i) {
    const uint64_t device = random.below(devices), node = device * nodes / devices;
    for (int32_t t = 0; t < s.choices; ++t) {
      const double u = random.unit();
      const uint64_t e = u < l.device            ? (device * experts + random.below(experts)) / devices
                         : u < l.device + l.node ? (node * experts + random.below(experts)) / nodes
                                                 : random.below(experts);
      ++num[i * experts + e];
    }
  }
  return num;
}

inline moecclSampleProblem_t problem(const Shape& s) {
  moecclSampleProblem_t p = MOECCL_SAMPLE_PROBLEM_INIT;
  p.n_nodes = s.n_nodes, p.n_devices = s.n_devices(), p.n_experts = s.n_experts(), p.n_samples = s.n_samples();
  return p;
}

// The columns of Table 5: changes of the volumes and shares of the samples.
struct Columns {
  double inter = 0, intra = 0, across_nodes = 0, all = 0;
};
// Averages solved placements over `iterations`. Returns false when the solver failed.
inline bool table_5(const Shape& s, const Locality& l, int iterations, uint64_t seed, Columns* columns) {
  Dice random(seed);
  moecclSampleProblem_t p = problem(s);
  double before[2] = {}, after[2] = {}, moved[2] = {};
  for (int round = 0; round < iterations; ++round) {
    const std::vector<int32_t> num = routing(random, s, l);
    std::vector<int32_t> placement(static_cast<size_t>(p.n_samples));
    p.num_gather = num.data();
    moecclSampleAnswer_t a{};
    a.size = sizeof(a);
    if (moecclSolveSamples(&p, placement.data(), &a, nullptr, 0) != moecclSuccess) return false;
    before[0] += static_cast<double>(a.inter_before), after[0] += static_cast<double>(a.inter_after);
    before[1] += static_cast<double>(a.intra_before), after[1] += static_cast<double>(a.intra_after);
    moved[0] += a.moved_nodes, moved[1] += a.moved;
  }
  const double samples = static_cast<double>(p.n_samples) * iterations;
  *columns = {after[0] / before[0] - 1, after[1] / before[1] - 1, moved[0] / samples, moved[1] / samples};
  return true;
}

}  // namespace perf::netmoe
