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

// A topology as people give it: the hosts of a file (hwloc's XML or our JSON), this host ("auto"), or the tree of a
// synthetic text, which may also lie in a file.
struct Source {
  std::vector<Graph> hosts;  // empty: there is a tree
  plan::LevelTree tree;
};
// n_ranks: of a synthetic text; 0 means as many as it gives. Errors name the file and the line.
Result<Source> read_source(const std::string& text, uint32_t n_ranks);
// Returns true if a topology's text means a file: it has no colon, begins with / ./ or ../, or ends in .xml or .json.
// The answer depends on the text alone, so that all ranks have the same.
bool names_file(const std::string& text);
// Interprets MOECCL_TOPOLOGY and moecclConfig_t.topology: a synthetic text, a file, or "auto" for host_tree(). n_ranks
// 0 means as many as the text gives. A file that describes fewer hosts than the ranks are on (n_hosts) is an error: it
// would place ranks of different hosts on one.
Result<plan::LevelTree> tree_from_text(const std::string& text, uint32_t n_ranks, uint32_t n_hosts = 1);
// Returns the levels of n_ranks ranks of this host, in the usual order (tree.h, default_seats).
Result<plan::LevelTree> host_tree(uint32_t n_ranks);

}  // namespace moeccl::topology
