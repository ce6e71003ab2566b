// SPDX-License-Identifier: Apache-2.0
#include "src/plan/profile.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "src/base/format.h"
#include "src/base/hash.h"

namespace moeccl::plan {

namespace {

double between(const Curve::Point& a, const Curve::Point& b, double bytes) {
  if (a.bytes < 1) return a.ns + (b.ns - a.ns) * bytes / b.bytes;
  const double x = (std::log(bytes) - std::log(a.bytes)) / (std::log(b.bytes) - std::log(a.bytes));
  return std::exp(std::log(a.ns) + x * (std::log(b.ns) - std::log(a.ns)));
}

class Hasher {
 public:
  void add(double v) { h_ = hash_combine(h_, std::bit_cast<uint64_t>(v)); }
  void add(uint64_t v) { h_ = hash_combine(h_, v); }
  void add(const LinkCost& c) { add(c.alpha_ns), add(c.bytes_per_ns); }
  template <class Link>
  void add(const std::vector<Link>& all) {
    add(uint64_t{all.size()});
    for (const LinkCost& c : all) add(c);
  }
  void add(const Curve& c) {
    add(c.line);
    add(uint64_t{c.points.size()});
    for (const Curve::Point& p : c.points) add(p.bytes), add(p.ns), add(p.high_ns);
  }
  void add(const std::string& text) { h_ = hash_string(text, h_); }
  uint64_t value() const { return h_; }

 private:
  uint64_t h_ = 0;
};

}  // namespace

double Curve::at(double bytes) const {
  if (points.empty()) return line.alpha_ns + (line.bytes_per_ns > 0 ? bytes / line.bytes_per_ns : 0);
  if (bytes <= points.front().bytes || points.size() == 1) return points.front().ns;
  const Point& last = points.back();
  const auto above =
      std::lower_bound(points.begin(), points.end(), bytes, [](const Point& p, double b) { return p.bytes < b; });
  if (above != points.end()) {
    return between(*(above - 1), *above, bytes);
  }
  const Point& before = points[points.size() - 2];
  const double pace = (last.ns - before.ns) / (last.bytes - before.bytes);
  // The time per byte is never below half of the last point's.
  return last.ns + (bytes - last.bytes) * std::max(pace, 0.5 * last.ns / last.bytes);
}

double Curve::high_at(double bytes) const {
  // In a normal distribution the upper quartile lies 0.67 deviations above the median, and the median of n samples has
  // an error of 1.25 deviations / sqrt(n); n is about 9 (CalibrateOptions).
  constexpr double kErrors = 1.25 / 0.67 / 3;
  const auto excess = [](const Point& p) { return std::max(0.0, p.high_ns / p.ns - 1); };
  if (points.empty()) return at(bytes);
  const auto above =
      std::lower_bound(points.begin(), points.end(), bytes, [](const Point& p, double b) { return p.bytes < b; });
  const Point& right = above == points.end() ? points.back() : *above;
  const Point& left = above == points.begin() ? points.front() : *(above - 1);
  return at(bytes) * (1 + kErrors * (excess(left) + excess(right)) / 2);
}

const PlanFit* Profile::find_plan(moecclOp_t op, const std::string& algorithm, uint8_t reach) const {
  for (const PlanFit& p : plans)
    if (p.op == op && p.reach == reach && p.algorithm == algorithm) return &p;
  return nullptr;
}

void Profile::forget_links_within_hosts(const LevelTree& tree) {
  for (uint32_t l = 0; l < links.size() && l < tree.depth(); ++l)
    if (static_cast<int>(l) > host_level && tree.levels[l].link.bytes_per_ns <= 0) links[l] = {};
}

const LinkCost& link_of(const LevelTree& tree, const Profile& profile, uint32_t level) {
  const LinkCost& stated = tree.levels[level].link;
  if (level >= profile.links.size()) return stated;
  // A latency alone does not replace a bandwidth: 0 would be priced as no time.
  const LinkCost& measured = profile.links[level];
  const bool counts = measured.bytes_per_ns > 0 || (measured.alpha_ns > 0 && stated.bytes_per_ns <= 0);
  return counts ? measured : stated;
}

double ranks_per_host(const LevelTree& tree, const Profile& profile) {
  const bool one_host = profile.host_level < 0 || static_cast<uint32_t>(profile.host_level) >= tree.depth();
  return one_host ? tree.n_ranks
                  : static_cast<double>(tree.n_ranks) / tree.levels[static_cast<size_t>(profile.host_level)].n_groups;
}

std::string figures_text(const Profile& profile, const LevelTree& tree) {
  const auto has = [](const LinkCost& link) { return link.bytes_per_ns > 0; };
  const bool measured = std::any_of(profile.links.begin(), profile.links.end(), has);
  const bool stated = std::any_of(tree.levels.begin(), tree.levels.end(), [&](const Level& l) { return has(l.link); });
  const std::string from = profile.source.empty() ? "the constants of a 2-core machine" : profile.source;
  const bool left_out =
      std::any_of(profile.levels.begin(), profile.levels.end(), [](const LevelFit& l) { return l.curve.known(); });
  std::string links = "without a cost, because neither a profile nor the topology gives one";
  if (left_out) links = "without a cost, because within a host copies are priced instead of the profile's lines";
  if (measured) links = "from " + (profile.links_source.empty() ? from : profile.links_source);
  if (!measured && stated) links = "from the topology";
  double least = 1;
  for (const LevelFit& l : profile.levels)
    if (l.curve.known()) least = std::min(least, l.curve.r2);
  if (measured && !profile.levels.empty()) links += format(" (r2 of the fits at least {:.4f})", least);
  std::string text = format("links {}; copies and sums from {}", links, from);
  for (const Level& l : tree.levels)
    if (!l.network.empty()) text += format("; hosts are reached over {}", l.network);
  return text;
}

Profile profile_of_part(const Profile& profile, const LevelTree& whole, const LevelTree& part) {
  Profile p = profile;
  p.links.assign(part.depth(), {});
  p.levels.clear();
  p.plans.clear();
  p.all_to_all = {};
  p.n_ranks = 0;
  p.tree_hash = 0;
  for (uint32_t l = 0; l < part.depth(); ++l) {
    for (uint32_t w = 0; w < whole.depth(); ++w) {
      if (w < profile.links.size() && whole.levels[w].name == part.levels[l].name) p.links[l] = profile.links[w];
    }
  }
  return p;
}

uint8_t reach_bits(bool staging, bool views, bool reads) {
  return static_cast<uint8_t>((staging ? 1 : 0) | (views ? 2 : 0) | (reads ? 4 : 0));
}

uint64_t Profile::hash() const {
  Hasher h;
  h.add(links);
  h.add(all_to_all.standard), h.add(all_to_all.inter), h.add(all_to_all.intra);
  for (const double v : {copy_bytes_per_ns, stream_bytes_per_ns, cached_copy_bytes_per_ns, reduce_bytes_per_ns,
                         cached_reduce_bytes_per_ns, encode_bytes_per_ns, decode_bytes_per_ns, read_bytes_per_ns,
                         read_call_ns, host_copy_bytes_per_ns, signal_ns, step_ns, start_ns, switch_ns})
    h.add(v);
  for (const uint64_t v : {cache_bytes, stream_from_bytes, uint64_t{cores}, static_cast<uint64_t>(host_level),
                           uint64_t{n_ranks}, tree_hash})
    h.add(v);
  for (const LevelFit& l : levels) h.add(l.name), h.add(l.curve);
  for (const PlanFit& p : plans) {
    h.add(static_cast<uint64_t>(p.op)), h.add(p.algorithm), h.add(uint64_t{p.reach});
    h.add(p.curve);
  }
  return h.value();
}

}  // namespace moeccl::plan
