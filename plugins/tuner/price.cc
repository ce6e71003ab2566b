// SPDX-License-Identifier: Apache-2.0
#include "plugins/tuner/price.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace moeccl::tuner {
namespace {

// NCCL's latencies of a network hop contain a wire like this: ib_write_lat of ConnectX-6/7 through a switch takes about
// as long. The measured latency takes its place.
constexpr double kWireInNcclUs = 1.0;
// The host's share of a network step, while a ring has others to wait for: NCCL's figure for Intel; three times for
// Simple.
constexpr double kPostUs = 1.0;
// The part of a link's rate that a protocol leaves for data: LL sends 4 bytes of flags with 4 of data, LL128 8 of 128.
constexpr double kRingShare[kProtocols] = {0.5, 120.0 / 128, 1.0};
// The most that LL's 8-byte stores reach on any network, in bytes per microsecond: NCCL's figures for two hosts and for
// more.
constexpr double kMostLL[2] = {22.5e3, 19e3};
// Trees, with NCCL's figures.
constexpr double kTreeShare[kProtocols] = {0.92 / 3.8, 0.92 * 120 / 128, 0.92};
constexpr double kPatShare = 0.75;
constexpr double kPatRankUs = 2.8;   // that each rank adds to PAT's latency
constexpr double kPatOverlap = 3.5;  // how far PAT's network hops overlap
// A ring's steps stall one another once its slices are whole: NCCL's factor for Ampere and later.
constexpr double kRingPlateau = 1.4, kPlateauBytes = 64, kChannels = 16;
constexpr double kTreeOps = 9;  // operations of a group that share a tree's latency (one batch of device work)

int log2_floor(double n) { return n < 2 ? 0 : static_cast<int>(std::bit_width(static_cast<uint64_t>(n))) - 1; }
int log2_ceil(double n) {
  return n <= 1 ? 0 : static_cast<int>(std::bit_width(static_cast<uint64_t>(std::ceil(n)) - 1));
}

// NCCL's trees are slower than their line at medium sizes: NCCL's efficiencies for each power of two from 64 B on.
double tree_efficiency(int protocol, double bytes) {
  constexpr uint8_t kTenths[kProtocols][23] = {
      {10, 10, 10, 10, 9, 8, 7, 7, 7, 7, 6, 5, 4, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10},
      {10, 10, 10, 10, 10, 9, 8, 8, 8, 7, 6, 6, 6, 6, 6, 6, 8, 9, 9, 9, 9, 10, 10},
      {9, 9, 9, 9, 9, 9, 9, 8, 7, 6, 6, 5, 5, 5, 5, 6, 7, 8, 7, 7, 8, 9, 9}};
  if (bytes < 64) return 1;
  const int at = log2_floor(bytes / 64);
  return at < 23 ? kTenths[protocol][at] / 10.0 : 1;
}

double slowest(std::span<const Crossing> crossings) {
  double rate = crossings[0].bytes_per_us;
  for (const Crossing& c : crossings) rate = std::min(rate, c.bytes_per_us);
  return rate;
}

double hop_us(double nccl, const Crossing& c) { return std::max(0.0, nccl - kWireInNcclUs) + c.alpha_us; }

// Returns the part of the links' rate that reaches the data.
double data_rate(const double (&share)[kProtocols], int protocol, const Shape& shape,
                 std::span<const Crossing> crossings) {
  const double rate = share[protocol] * slowest(crossings);
  return protocol == kLL ? std::min(rate, kMostLL[shape.n_nodes == 2 ? 0 : 1]) : rate;
}

// Returns the time of all hops of a walk over the hosts that enters each level's groups once and leaves each for the
// next.
double ring_hops_us(double nccl, std::span<const Crossing> crossings, double n_hops) {
  double sum = 0, counted = 0;
  const double hosts = crossings.back().groups;
  for (const Crossing& c : crossings) {
    const double here = (c.groups - counted) / hosts * n_hops;
    sum += here * hop_us(nccl, c);
    counted = c.groups;
  }
  return sum;
}

// Returns the time of a path from the root of a tree to a leaf. The tree is NCCL's: the long hops lie at the top.
double tree_hops_us(double nccl, std::span<const Crossing> crossings) {
  double sum = 0;
  int counted = 0;
  for (const Crossing& c : crossings) {
    const int depth = log2_ceil(c.groups);
    sum += (depth - counted) * hop_us(nccl, c);
    counted = depth;
  }
  return sum;
}

struct Inputs {
  const Constants& nccl;
  const Shape& shape;
  std::span<const Crossing> crossings;
  const Ask& ask;
  int protocol;
  double ranks() const { return static_cast<double>(shape.n_ranks); }
  double nodes() const { return static_cast<double>(shape.n_nodes); }
  double inside(int algorithm) const { return nccl.hop[shape.nvlink ? kNvlink : kPci][algorithm][protocol]; }
  // With one rank on each host, nothing hides the network; NCCL then takes its tree's figures.
  double between(int algorithm) const {
    return nccl.hop[kNet][shape.n_ranks == shape.n_nodes ? int{kTree} : algorithm][protocol];
  }
};

double ring_us(const Inputs& in) {
  const double n = in.ranks(), nodes = in.nodes();
  const bool all_reduce = in.ask.function == kAllReduce;
  const bool rooted = in.ask.function == kBroadcast || in.ask.function == kReduce;
  const double rounds = all_reduce ? 2 : 1;
  const double steps = rounds * (n - 1), net_steps = rounds * (nodes - 1);
  const double post = rooted ? 0 : in.protocol == kSimple ? 3 * kPostUs : kPostUs;
  double latency = in.nccl.base[kRing][in.protocol] + (steps - net_steps) * std::max(in.inside(kRing), post) +
                   ring_hops_us(in.between(kRing), in.crossings, net_steps);
  if (all_reduce && in.protocol == kSimple && in.ask.bytes / (kChannels * n) >= kPlateauBytes) latency *= kRingPlateau;
  const double sent = rooted ? in.ask.bytes : rounds * (n - 1) / n * in.ask.bytes;
  return latency * in.ask.n_ops + sent / data_rate(kRingShare, in.protocol, in.shape, in.crossings);
}

double tree_us(const Inputs& in) {
  const double ops = std::ceil(in.ask.n_ops / kTreeOps);
  const double latency =
      in.nccl.base[kTree][in.protocol] + 2 * ((in.ranks() / in.nodes() - 1) * in.inside(kTree) +
                                              tree_hops_us(in.nccl.hop[kNet][kTree][in.protocol], in.crossings));
  // A host is inside one of the two trees and a leaf of the other, so it sends 2 times what it has, up and down. Two
  // hosts are each other's root and leaf.
  const double sent = (in.shape.n_nodes == 2 ? 1 : 2) * in.ask.bytes;
  const double rate =
      tree_efficiency(in.protocol, in.ask.bytes) * data_rate(kTreeShare, in.protocol, in.shape, in.crossings);
  return latency * ops + sent / rate;
}

double pat_us(const Inputs& in) {
  const double latency = in.nccl.base[kPat][in.protocol] +
                         tree_hops_us(in.nccl.hop[kNet][kPat][in.protocol], in.crossings) / kPatOverlap +
                         in.ranks() * kPatRankUs;
  const double sent = (in.nodes() - 1) / in.nodes() * in.ask.bytes;
  return latency * std::ceil(in.ask.n_ops / kTreeOps) + sent / (kPatShare * slowest(in.crossings));
}

}  // namespace

const Constants& default_constants() {
  // The constants of NCCL 2.30: LL, LL128, Simple of each algorithm.
  static constexpr Constants kDefaults = {
      .base = {{6.8, 14.0, 8.4}, {6.6, 14.0, 8.4}, {}, {}, {}, {}, {8.0, 8.0, 8.0}},
      .hop = {{{0.6, 1.25, 4.0}, {0.6, 1.9, 3.4}, {0, 0, 3.7}, {0, 0, 2.8}, {0, 0, 25}, {0, 0, 25}, {0, 0, 4.0}},
              {{1.0, 1.9, 4.0}, {1.0, 2.5, 5.7}, {0, 0, 3.7}, {0, 0, 2.8}, {}, {}, {0, 0, 4.0}},
              {{5.0, 8.5, 14}, {2.7, 4.0, 14.0}, {0, 0, 31}, {0, 0, 30}, {0, 0, 18}, {0, 0, 20.9}, {0, 0, 14}}}};
  return kDefaults;
}

double price_us(const Constants& nccl, const Shape& shape, std::span<const Crossing> crossings, const Ask& ask,
                int algorithm, int protocol) {
  const Inputs in{nccl, shape, crossings, ask, protocol};
  if (algorithm == kRing) return ring_us(in);
  if (algorithm == kTree && ask.function == kAllReduce) return tree_us(in);
  const bool gathers = ask.function == kAllGather || ask.function == kReduceScatter;
  if (algorithm == kPat && gathers && protocol == kSimple) return pat_us(in);
  return -1;
}

double floor_us(const Shape& shape, std::span<const Crossing> crossings, const Ask& ask, int algorithm) {
  double alpha = 0;
  for (const Crossing& c : crossings) alpha = std::max(alpha, c.alpha_us);
  const double rate = slowest(crossings);
  const auto nodes = static_cast<double>(shape.n_nodes);
  // Data goes into the network and back; a tree without the network's help goes up and down its depth.
  if (algorithm == kNvlsTree) {
    return 2 * log2_ceil(nodes) * alpha + (shape.n_nodes == 2 ? 1 : 2) * ask.bytes / rate;
  }
  const bool gathers = ask.function == kAllGather || ask.function == kReduceScatter;
  return 2 * alpha + (gathers ? (nodes - 1) / nodes : 1) * ask.bytes / rate;
}

}  // namespace moeccl::tuner
