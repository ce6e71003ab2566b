// SPDX-License-Identifier: Apache-2.0
// The machine found by all probes, or read from a file or a text: what others of the house ask.
#pragma once

#include <string>
#include <vector>

#include "src/plan/levels.h"
#include "topology/graph.h"
#include "topology/probes.h"

namespace moeccl::topology {

struct ProbeReport {
  Probe probe;
  Status status;       // why it gave nothing
  size_t n_nodes = 0;  // what it gave
};
struct Discovery {
  Graph graph;  // complete and valid
  std::vector<ProbeReport> probes;
};

// Runs every probe and merges; a probe that fails is an entry of `probes`, never a failure. Takes some 10 ms.
Result<Discovery> discover(const ProbeSources& sources = {});
// This host, found at the first call and remembered for the process. Threads may call it at once.
const Result<Discovery>& discover_host();

// A topology from a file: hwloc's XML (one host) or our JSON, told apart by their first character. Errors name file and
// line.
Result<std::vector<Graph>> load_topology(const std::string& path);
// Whether a topology's text means a file: it begins with / ./ or ../ or ends in .xml or .json.
bool names_file(const std::string& text);
// Whether what a text means may differ from process to process: a file, or "auto".
bool is_private_text(const std::string& text);
// What MOECCL_TOPOLOGY and moecclConfig_t.topology mean: a synthetic text, a file, or "auto" for host_tree(). n_ranks
// 0: as many as it gives.
Result<plan::LevelTree> tree_from_text(const std::string& text, uint32_t n_ranks);
// The levels of n_ranks ranks of this host, in the usual order (tree.h, default_seats).
Result<plan::LevelTree> host_tree(uint32_t n_ranks);

}  // namespace moeccl::topology
