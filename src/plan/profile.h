// SPDX-License-Identifier: Apache-2.0
// The machine's performance figures, which cost.h uses to price a plan. The defaults are those of a 2-core EPYC virtual
// machine (docs/decisions.md); calibration replaces them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moeccl/plan.h"
#include "src/plan/levels.h"

namespace moeccl::plan {

// HierMoE's performance model (Fig. 9, Eq. 1-5): an AlltoAll with separate alpha and beta for each way in which ranks
// meet. LinkCost holds 1/beta, in bytes of one rank per nanosecond.
struct AllToAllCosts {
  struct Fit : LinkCost {
    double r2 = 0;  // 0: not known
  };
  Fit standard;                   // all ranks
  std::vector<Fit> inter, intra;  // [i]: Inter-level-(i+1), Intra-level-(i+1)
};

// Measured time over bytes, with the line that fits it best. Where a line does not fit, the points say more: they are
// MoNTA's efficiency curve r(size) in another form, r = bytes / (time * bytes_per_ns).
struct Curve {
  struct Point {
    double bytes = 0, ns = 0;
    double high_ns = 0;  // upper quartile, where ns is the median; 0: not known
  };
  LinkCost line;
  double r2 = 0;              // of the line, or of the points if those make the predictions: see curve_r2()
  std::vector<Point> points;  // bytes ascending; times positive

  bool known() const { return !points.empty(); }
  // Interpolates linearly in log-log. Returns the first point's time below it, and continues at the pace of the last
  // two points beyond the last one.
  double at(double bytes) const;
  // Returns the same plus what the measurements leave open: the standard error of a median, from the quartiles.
  double high_at(double bytes) const;
};

// A level of the topology as calibration measured it: the time until bytes put by one rank are visible at another.
struct LevelFit {
  std::string name;
  Curve curve;
};

// The name under which a profile keeps the times of `oneshot` where it runs as exec::Eager, which has another, short
// curve.
inline constexpr const char* kEagerName = "eager";
// The plain algorithm, which is always a candidate: no other may be slower.
inline constexpr const char* kFlatName = "flat";

// The time of a whole plan, as the slowest rank's median, over bytes of its block (count x element).
struct PlanFit {
  moecclOp_t op = moecclOpAllReduce;
  std::string algorithm;
  uint8_t reach = 0;  // reach_bits() of the shape
  Curve curve;
};

struct Profile {
  // Per level of the tree, outermost first; overrides the tree's own LinkCost, which applies to levels without figures
  // here.
  std::vector<LinkCost> links;
  AllToAllCosts all_to_all;  // empty: not known

  // One core, bytes copied: beyond the cache; with stores past the cache; with everything in the cache. One memcpy of
  // 64 MiB runs at 8.7 GB/s, a non-temporal one at 17.7 GB/s.
  double copy_bytes_per_ns = 8.7;
  double stream_bytes_per_ns = 17.0;
  double cached_copy_bytes_per_ns = 14.0;
  // One core, bytes read as sources of a reduction (reading alone: 31 GB/s).
  double reduce_bytes_per_ns = 14.0;
  double cached_reduce_bytes_per_ns = 20.0;
  // One core, bytes of an fp32 expert that the codec (moeccl/codec.h) encodes and decodes at 50x: 32 MiB take 6.2 and
  // 3.3 ms (docs/performance-papers.md, The codec).
  double encode_bytes_per_ns = 5.4;
  double decode_bytes_per_ns = 10.0;
  // One core, process_vm_readv from a peer whose memory can only be read: 4.3 GB/s beyond the cache with 4 KiB pages, 8
  // in it.
  double read_bytes_per_ns = 4.5;
  double read_call_ns = 1000;
  // All cores of a host, bytes copied: 19-20 GB/s.
  double host_copy_bytes_per_ns = 20.0;
  uint64_t cache_bytes = 2u << 20;  // per core: L2 and its share of L3
  uint64_t stream_from_bytes =
      8u << 20;  // Outputs that exceed this, over all ranks of a host, are written past the cache

  double signal_ns = 68;    // until a flag set on one core is seen on another
  double step_ns = 40;      // to begin one step
  double start_ns = 300;    // per operation: before its first and after its last step
  double switch_ns = 2100;  // until a blocked rank has given its core to the next one (sched_yield)
  uint32_t cores = 2;       // per host; ranks share them if there are more ranks
  // Ranks of one group of this level share a host. Below 0: all ranks do, as when one machine stands in for a cluster.
  int host_level = -1;

  // Where these figures come from, for human readers: "the profile /etc/moeccl.json"; empty: they are the constants
  // above.
  std::string source;
  std::string links_source;  // the same for the links alone; empty: `source`

  // What calibration measured, on `n_ranks` ranks of the topology `tree_hash`; `plans` does not apply elsewhere. Both
  // may be empty.
  uint32_t n_ranks = 0;
  uint64_t tree_hash = 0;
  std::vector<LevelFit> levels;
  std::vector<PlanFit> plans;

  // Returns null if it was not measured.
  const PlanFit* find_plan(moecclOp_t op, const std::string& algorithm, uint8_t reach) const;
  // Drops the lines of levels within a host where the tree has no bandwidth: cost.h then prices the copies instead.
  // Both together would count the same bytes twice.
  void forget_links_within_hosts(const LevelTree& tree);
  // Returns a number that differs when profiles differ in anything that a price depends on.
  uint64_t hash() const;
};

uint8_t reach_bits(bool staging, bool views, bool reads);

// Returns a level's link: as measured, or else the tree's. A measured latency without a bandwidth counts only where the
// tree has no bandwidth either.
const LinkCost& link_of(const LevelTree& tree, const Profile& profile, uint32_t level);

// Returns the average. A host level that the tree does not have means one host.
double ranks_per_host(const LevelTree& tree, const Profile& profile);

// Returns where the figures of a price come from: "links from the profile FILE (r2 of the fits at least 0.9980); copies
// and sums from the profile FILE".
std::string figures_text(const Profile& profile, const LevelTree& tree);

// Returns the parts of `profile`, which was made for the ranks of `whole`, that hold for some of these ranks in a
// separate tree: rates, and the links of levels that both trees have. Plans and AlltoAlls were measured with other
// ranks.
Profile profile_of_part(const Profile& profile, const LevelTree& whole, const LevelTree& part);

}  // namespace moeccl::plan
