// SPDX-License-Identifier: Apache-2.0
#include "tests/plugins/nccl_selection.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace moeccl::testing {
namespace {

enum { kTree, kRing, kDirect, kChain, kNvls, kNvlsTree, kPat };
enum { kLL, kLL128, kSimple };
enum { kBroadcast, kReduce, kAllGather, kReduceScatter, kAllReduce };

constexpr double kBase[7][3] = {{6.8, 14, 8.4}, {6.6, 14, 8.4}, {}, {}, {}, {}, {8, 8, 8}};
constexpr double kNvlinkHop[7][3] = {{0.6, 1.25, 4.0}, {0.6, 1.9, 3.4}, {0, 0, 3.7}, {0, 0, 2.8},
                                     {0, 0, 25},       {0, 0, 25},      {0, 0, 4}};
constexpr double kPciHop[7][3] = {{1.0, 1.9, 4.0}, {1.0, 2.5, 5.7}, {0, 0, 3.7}, {0, 0, 2.8}, {}, {}, {0, 0, 4}};
constexpr double kNetHop[7][3] = {{5.0, 8.5, 14}, {2.7, 4.0, 14}, {0, 0, 31}, {0, 0, 30},
                                  {0, 0, 18},     {0, 0, 20.9},   {0, 0, 14}};
// Limits of a channel, or for LL of all channels, by number of nodes (1, 2, more).
struct Limits {
  double ll[3], ring128[3], tree128[3], tree[3], nvls_tree[3];
};
constexpr Limits kAmpere = {{87.7, 22.5, 19}, {20, 20, 20}, {20, 20, 20}, {24, 23.6, 17.8}, {24, 23.6, 17.8}};
constexpr Limits kHopper = {{141, 22.5, 19}, {36.7, 36.7, 36.7}, {36.7, 36.7, 29}, {38.7, 41.4, 36}, {0, 57.7, 45.5}};

// Indexed by powers of two, from 64 B on.
constexpr double kTreeCorrection[3][23] = {
    {1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1},
    {1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1},
    {.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9}};

int log2i(size_t n) {
  int log = 0;
  while (n > 1) {
    n /= 2;
    ++log;
  }
  return log;
}

struct Case {
  const Machine& m;
  size_t n_nodes;
  int function;
  double ranks() const { return static_cast<double>(m.ranks_per_node * n_nodes); }
  double nodes() const { return static_cast<double>(n_nodes); }
  double steps() const {
    if (function == kAllReduce) return 2 * (ranks() - 1);
    return function == kAllGather || function == kReduceScatter ? ranks() - 1 : ranks();
  }
  bool gathers() const { return function == kAllGather || function == kReduceScatter; }
  double inside(int a, int p) const { return (m.nvlink ? kNvlinkHop : kPciHop)[a][p]; }
  double between(int a, int p) const { return kNetHop[m.ranks_per_node == 1 ? int{kTree} : a][p]; }
};

bool exists(const Case& c, int a, int p) {
  if (!c.m.nvlink && p == kLL128) return false;
  switch (a) {
    case kRing:
      return true;
    case kTree:
      return c.function == kAllReduce;
    case kNvls:
      return c.m.nvls_gbs > 0 && p == kSimple && c.n_nodes == 1 && c.function >= kAllGather;
    case kNvlsTree:
      return c.m.nvls_gbs > 0 && p == kSimple && c.n_nodes > 1 && c.function == kAllReduce;
    case kPat:
      return c.gathers() && p == kSimple && c.m.ranks_per_node == 1 && c.n_nodes > 1;
    default:
      return false;  // CollNet needs a network that computes
  }
}

double bandwidth(const Case& c, int a, int p) {
  const Limits& limits = c.m.hopper ? kHopper : kAmpere;
  const size_t scale = c.n_nodes <= 2 ? c.n_nodes - 1 : 2;
  const double channels = c.m.n_channels;
  double bus = channels * (c.n_nodes <= 2 ? c.m.intra_gbs : c.m.inter_gbs);
  if (c.n_nodes == 2) bus = std::min(bus, channels * c.m.inter_gbs * (a == kTree ? 2 : 1));
  if (a == kRing && p == kLL) bus = std::min(limits.ll[scale], bus * .5);
  if (a == kRing && p == kLL128) bus = std::min(bus * 0.92, channels * limits.ring128[scale]);
  if (a == kTree) {
    bus = std::min(bus * .92, channels * limits.tree[scale]);
    if (p == kLL) bus = std::min(bus / 3.8, limits.ll[scale]);
    if (p == kLL128) bus = std::min(bus * (c.n_nodes == 1 ? 7.0 / 9 : 120.0 / 128), channels * limits.tree128[scale]);
  }
  if (a == kPat) bus *= .75;
  if (a == kNvls || a == kNvlsTree) {
    double intra = c.m.nvls_gbs * .85 * 15 / 16;
    intra *= c.function == kAllReduce ? 2 : (c.ranks() - 1) / c.ranks();
    const double inter = channels * c.m.inter_gbs * (c.n_nodes == 2 ? 2 : 1);
    bus = a == kNvls ? intra : std::min({intra, inter, 16 * limits.nvls_tree[scale]});
  }
  if (a != kRing && c.gathers()) return bus;
  return bus * (a == kRing || a == kNvls || a == kNvlsTree ? c.ranks() / c.steps() : .5);
}

double latency(const Case& c, int a, int p) {
  const double base = kBase[a][p];
  const double post = c.n_nodes > 1 ? (p == kSimple ? 3.0 : 1.0) : 0;
  const double per_node = static_cast<double>(c.m.ranks_per_node);
  switch (a) {
    case kRing: {
      if (c.function == kBroadcast || c.function == kReduce) {
        const int as = p == kSimple ? kTree : kRing;
        return base + c.steps() * (c.n_nodes > 1 ? kNetHop[as][p] : c.inside(as, p));
      }
      const double net = c.n_nodes == 1 ? 0 : (c.function == kAllReduce ? 2 : 1) * (c.nodes() - 1);
      return base + (c.steps() - net) * std::max(c.inside(a, p), post) + net * c.between(a, p);
    }
    case kTree:
      return base + 2 * ((per_node - 1) * c.inside(a, p) + log2i(c.n_nodes) * c.between(a, p));
    case kNvls:
      return c.inside(a, p);
    case kNvlsTree:
      return base + c.inside(a, p) + 2 * log2i(c.n_nodes) * c.between(a, p);
    default:
      return base + log2i(c.n_nodes) * (c.between(a, p) / 3.5) + c.ranks() * 2.8;
  }
}

}  // namespace

CostTable nccl_costs(const Machine& m, size_t n_nodes, int function, size_t bytes) {
  CostTable table;
  for (auto& row : table) row.fill(-1);
  const Case c{m, n_nodes, function};
  if (m.ranks_per_node * n_nodes < 2) {
    table[kRing][kSimple] = 0;
    return table;
  }
  for (int a = 0; a < 7; ++a) {
    for (int p = 0; p < 3; ++p) {
      if (!exists(c, a, p)) continue;
      double rate = bandwidth(c, a, p), wait = latency(c, a, p);
      const int size = bytes < 64 ? -1 : log2i(bytes >> 6);
      if (a == kTree && size >= 0 && size < 23) rate *= kTreeCorrection[p][size];
      if (a == kRing && p == kSimple && n_nodes > 1 && function == kAllReduce &&
          static_cast<double>(bytes) / (m.n_channels * c.ranks()) >= 64) {
        wait *= 1.4;
      }
      table[static_cast<size_t>(a)][static_cast<size_t>(p)] =
          static_cast<float>(wait + static_cast<double>(bytes) / (1000 * rate));
    }
  }
  return table;
}

int nccl_choice(const CostTable& costs) {
  int best = -1;
  float least = std::numeric_limits<float>::max();
  for (int i = 0; i < 21; ++i) {
    const float cost = costs[static_cast<size_t>(i) / 3][static_cast<size_t>(i) % 3];
    if (cost < 0 || cost >= least) continue;
    least = cost;
    best = i;
  }
  return best;
}

std::string entry_name(int entry) {
  static const char* const kAlgorithms[] = {"Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT"};
  static const char* const kProtocols[] = {"LL", "LL128", "Simple"};
  if (entry < 0) return "none";
  return std::string(kAlgorithms[entry / 3]) + "/" + kProtocols[entry % 3];
}

}  // namespace moeccl::testing
