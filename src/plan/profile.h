// SPDX-License-Identifier: Apache-2.0
// What the machine does in a nanosecond: the numbers under which cost.h prices a plan. The defaults are those of a
// 2-core EPYC virtual machine (docs/decisions.md); calibration replaces them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moeccl/plan.h"
#include "src/plan/levels.h"

namespace moeccl::plan {

// HierMoE's performance model (Fig. 9, Eq. 1-5): an AlltoAll of its own alpha and beta for each way in which ranks
// meet. LinkCost holds 1/beta, in bytes of one rank per nanosecond.
struct AllToAllCosts {
  struct Fit : LinkCost {
    double r2 = 0;  // 0: not known
  };
  Fit standard;                   // all ranks
  std::vector<Fit> inter, intra;  // [i]: Inter-level-(i+1), Intra-level-(i+1)
};

// Time over bytes as measured, with the line that fits it best. Where a line does not fit, the points say more: they
// are MoNTA's efficiency curve r(size) in another form, r = bytes / (time * bytes_per_ns).
struct Curve {
  struct Point {
    double bytes = 0, ns = 0;
    double high_ns = 0;  // upper quartile, where ns is the median; 0: not known
  };
  LinkCost line;
  double r2 = 0;              // of the line, or of the points where they are what predicts: see curve_r2()
  std::vector<Point> points;  // bytes ascending; times positive

  bool known() const { return !points.empty(); }
  // Between points straight in log-log; below the first its time, beyond the last at the pace of the last two.
  double at(double bytes) const;
  // The same and what the measurements leave open: the standard error of a median, from the quartiles.
  double high_at(double bytes) const;
};

// A level of the topology as calibration found it: bytes put by one rank to another, until they are visible there.
struct LevelFit {
  std::string name;
  Curve curve;
};

// The name under which a profile keeps what `oneshot` takes where it runs as exec::Eager: another curve, and a short
// one.
inline constexpr const char* kEagerName = "eager";
// The plain algorithm, always a candidate: no other may be slower.
inline constexpr const char* kFlatName = "flat";

// What a whole plan took, slowest rank's median, over bytes of its block (count x element).
struct PlanFit {
  moecclOp_t op = moecclOpAllReduce;
  std::string algorithm;
  uint8_t reach = 0;  // reach_bits() of the shape
  Curve curve;
  double correction = 1;  // learnt at run time, see correct.h
};

struct Profile {
  // Per level of the tree, outermost first; overrides the tree's own LinkCost. Shorter, or without figures: the tree's.
  std::vector<LinkCost> links;
  AllToAllCosts all_to_all;  // empty: not known

  // One core, bytes copied. Beyond the cache; with stores past the cache; with everything in the cache. One memcpy of
  // 64 MiB runs at 8.7 GB/s, non-temporal at 17.7 GB/s.
  double copy_bytes_per_ns = 8.7;
  double stream_bytes_per_ns = 17.0;
  double cached_copy_bytes_per_ns = 14.0;
  // One core, bytes read as sources of a reduction (reading alone: 31 GB/s).
  double reduce_bytes_per_ns = 14.0;
  double cached_reduce_bytes_per_ns = 20.0;
  // One core, process_vm_readv from a peer that is reached by reading alone: 4.3 GB/s beyond the cache with 4 KiB
  // pages, 8 in it.
  double read_bytes_per_ns = 4.5;
  double read_call_ns = 1000;
  // All cores of a host, bytes copied: 19-20 GB/s.
  double host_copy_bytes_per_ns = 20.0;
  uint64_t cache_bytes = 2u << 20;  // of a core: L2 and its share of L3
  uint64_t stream_from_bytes =
      8u << 20;  // Outputs, of all ranks of a host, larger than this are written past the cache

  double signal_ns = 68;    // until a flag set on one core is seen on another
  double step_ns = 40;      // to take up one step
  double start_ns = 300;    // of an operation: before its first and after its last step
  double switch_ns = 2100;  // until a blocked rank has given its core to the next one (sched_yield)
  uint32_t cores = 2;       // of a host; ranks share them when there are more
  // Ranks of one group of this level share a host. Below 0: all ranks do, as when one machine stands for a cluster.
  int host_level = -1;

  // Where these figures come from, for people: "the profile /etc/moeccl.json"; empty: they are the constants above.
  std::string source;

  // What calibration measured, on `n_ranks` ranks of the topology `tree_hash`; elsewhere `plans` says nothing. Both may
  // be empty.
  uint32_t n_ranks = 0;
  uint64_t tree_hash = 0;
  std::vector<LevelFit> levels;
  std::vector<PlanFit> plans;

  // Null when it was not measured.
  const PlanFit* find_plan(moecclOp_t op, const std::string& algorithm, uint8_t reach) const;
  // A number that differs when profiles differ in anything that a price depends on.
  uint64_t hash() const;
};

uint8_t reach_bits(bool staging, bool views, bool reads);

// A level's link: as measured, else as the tree has it.
const LinkCost& link_of(const LevelTree& tree, const Profile& profile, uint32_t level);

// On average; a host level that the tree does not have means one host.
double ranks_per_host(const LevelTree& tree, const Profile& profile);

// Where the figures of a price come from: "links as in the topology, rates as in the profile FILE (r2 0.9980 and
// more)".
std::string figures_text(const Profile& profile, const LevelTree& tree);

// What holds of `profile`, made for the ranks of `whole`, on some of them in a tree of their own: rates, and the links
// of levels that both trees have. Plans and AlltoAlls were measured with other ranks.
Profile profile_of_part(const Profile& profile, const LevelTree& whole, const LevelTree& part);

}  // namespace moeccl::plan
