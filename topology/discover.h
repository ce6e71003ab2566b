// SPDX-License-Identifier: Apache-2.0
// The machine as all probes found it, or as read from a file or a text. The rest of the library uses this interface.
#pragma once

#include <string>
#include <vector>

#include "src/plan/levels.h"
#include "topology/graph.h"
#include "topology/probes.h"

namespace moeccl::topology {

struct ProbeReport {
  Probe probe;
  Status status;       // why it found nothing
  size_t n_nodes = 0;  // how many nodes it found
};
struct Discovery {
  Graph graph;  // complete and valid
  std::vector<ProbeReport> probes;
};

// Runs every probe and merges the results. A failing probe is an entry of `probes`, never an error. Takes some 10 ms.
Result<Discovery> discover(const ProbeSources& sources = {});
// Returns this host, discovered on the first call and cached for the process. Threads may call it concurrently.
const Result<Discovery>& discover_host();

// Loads a topology from a file: hwloc's XML (one host) or our JSON, distinguished by their first character. Errors name
// the file and the line.
Result<std::vector<Graph>> load_topology(const std::string& path);
// Returns true if a topology's text means a file: it begins with / ./ or ../ or ends in .xml or .json.
bool names_file(const std::string& text);
// Returns true if the meaning of a text may differ from process to process: a file, or "auto".
bool is_private_text(const std::string& text);
// Interprets MOECCL_TOPOLOGY and moecclConfig_t.topology: a synthetic text, a file, or "auto" for host_tree(). n_ranks
// 0 means as many as the text gives.
Result<plan::LevelTree> tree_from_text(const std::string& text, uint32_t n_ranks);
// Returns the levels of n_ranks ranks of this host, in the usual order (tree.h, default_seats).
Result<plan::LevelTree> host_tree(uint32_t n_ranks);

}  // namespace moeccl::topology
