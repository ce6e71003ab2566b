// SPDX-License-Identifier: Apache-2.0
#include "topology/pair_path.h"

namespace moeccl::topology {

PairPath path_between(const PathFacts& facts) {
  if (!facts.same_host) return PairPath::kNetwork;
  if (facts.same_process) return PairPath::kThreads;
  return facts.reads_allowed ? PairPath::kReads : PairPath::kStaging;
}

plan::Reach reach_of_all(const PathFacts& facts) {
  const PairPath path = path_between(facts);
  const bool mapped = path != PairPath::kNetwork && !facts.paced;
  plan::Reach reach;
  reach.staging = mapped;
  reach.views = mapped && path == PairPath::kThreads;
  reach.reads = mapped && path != PairPath::kStaging;
  return reach;
}

bool heap_reaches_further(const PathFacts& facts) {
  const plan::Reach reach = reach_of_all(facts);
  return reach.staging && !reach.views;
}

}  // namespace moeccl::topology
