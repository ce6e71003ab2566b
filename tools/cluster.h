// SPDX-License-Identifier: Apache-2.0
// The cluster for which a solver is asked, from --topology and --profile: its levels, and the rates and latencies that
// take the place of options which the command line lacks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "perf/common/cli.h"

namespace tools {

// Reads a profile's file. Exits with a message if it cannot be read; what is no JSON is returned as discarded.
nlohmann::json read_profile_file(const std::string& path);

class Cluster {
 public:
  // The default of each option that a cluster may fill is for a command line without these two.
  void add_options(perf::App& app);
  // A command line that names a cluster must not give its shape a second time.
  void excludes(perf::Option* shape);
  bool given() const { return !topology_.empty() || !profile_.empty(); }
  // Reads what was given. Exits with a message if that is no cluster.
  void read();

  // Outermost level first.
  size_t depth() const { return levels_.size(); }
  int32_t scale(size_t level) const { return levels_[level].scale; }
  int32_t groups(size_t level) const;  // on the whole cluster
  int32_t n_ranks() const { return groups(depth() - 1); }
  // Whether ranks meet across the level: it has several groups in one of the level above.
  bool crossed(size_t level) const { return scale(level) > 1; }
  // The level whose groups are nodes: the one named node or host, or else the outermost. (The library does the same in
  // plan::far_levels_by_name, and tells nobody by its interface.)
  size_t node_level() const;
  int32_t nodes() const { return groups(node_level()); }
  // GB/s of a rank between groups of the level while all ranks use it. Exits with a message if it is not known.
  double gbs(size_t level) const;
  // The same of all ranks of an outermost group together.
  double node_gbs(size_t level) const { return gbs(level) * n_ranks() / groups(0); }
  double alpha_us(size_t level) const { return levels_[level].alpha_us; }
  // The slowest level that ranks cross between nodes, or `otherwise` if there is one node; and the slowest inside a
  // node.
  double between_gbs(double otherwise) const;
  double between_alpha_us() const;
  double inside_gbs() const;
  double inside_alpha_us() const;
  // A figure of the profile's "machine", such as copy_bytes_per_ns; 0: not known.
  double machine(const std::string& name) const;
  // A line: "links of a rank: node 1.42 GB/s, 497 us; gpu 30.5 GB/s, 204 us (FILE)". Names those of the options that
  // the command line has, because they replace figures of the line.
  std::string text(const std::vector<std::pair<const char*, const perf::Option*>>& options = {}) const;

 private:
  struct Level {
    std::string name;
    int32_t scale = 1;  // groups in each group of the level above
    double gbs = 0;     // of one rank; 0: not known
    double alpha_us = 0;
  };
  void read_levels(const std::string& text);
  void read_links(const nlohmann::json& profile);
  // Exits with a message if the file is no profile or `read` finds another kind of value than it wants.
  template <class Read>
  void read_profile(const Read& read) const;

  std::string topology_, profile_;
  std::shared_ptr<const nlohmann::json> json_;  // of the profile's file
  std::vector<perf::Option*> options_;
  std::vector<Level> levels_;
};

// Sets `value` to what known() returns, unless the command line has the option.
template <class T, class Known>
void fill(const perf::Option* option, T& value, const Known& known) {
  if (option->empty()) value = known();
}

}  // namespace tools
