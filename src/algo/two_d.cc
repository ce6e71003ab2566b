// SPDX-License-Identifier: Apache-2.0
// Two-dimensional AllToAll (Tutel, Section 3.4): blocks for another node first go to the rank in the sender's node that
// stands for their destination. That rank sends what it has collected in one message. Each pair of nodes exchanges
// n/node messages of a node's blocks instead of n of one block. Nodes may be unequal: a rank of a small node relays for
// several destinations.
#include "src/algo/families.h"
#include "src/algo/nodes.h"
#include "src/algo/tuning.h"

namespace moeccl::algo {
namespace {

constexpr uint32_t kLocal = 0;   // between ranks of a node
constexpr uint32_t kRemote = 0;  // between ranks of different nodes: other pairs, so the same number

// Slot s < n: the block from rank s. Behind these, at a relay: from member i of its node for its k-th relayed rank.
uint32_t relay_slot(const Nodes& nodes, uint32_t relay, uint32_t k, uint32_t member) {
  return nodes.n_ranks() + k * nodes.size(nodes.node_of(relay)) + member;
}

Layout layout(const Shape& shape, const LevelTree& tree) {
  return {shape.n_ranks + Nodes(tree).relay_slots(), tuning::kOverlap};
}

// Sends each local peer its own block and the blocks that it relays.
void send_local(ProgramBuilder& b, const Nodes& nodes, uint32_t rank) {
  for (const uint32_t p : nodes.local_peers(rank)) {
    const std::vector<uint32_t> relayed = nodes.relayed_by(p);
    for (uint32_t k = 0; k < relayed.size(); ++k)
      b.put(slot(p, relay_slot(nodes, p, k, nodes.index_of(rank))), in(rank, relayed[k]));
    b.put(slot(p, rank), in(rank, p));
    b.signal(p, kLocal);
  }
}

void send_remote(ProgramBuilder& b, const Nodes& nodes, uint32_t rank) {
  const std::vector<uint32_t> relayed = nodes.relayed_by(rank);
  const auto& members = nodes.members(nodes.node_of(rank));
  for (uint32_t k = 0; k < relayed.size(); ++k) {
    for (uint32_t i = 0; i < members.size(); ++i)
      b.put(slot(relayed[k], members[i]),
            members[i] == rank ? in(rank, relayed[k]) : slot(rank, relay_slot(nodes, rank, k, i)));
    b.signal(relayed[k], kRemote);
  }
}

// Works in place: outputs are written once all inputs have been sent. A peer's kLocal of chunk c + 1 says that it has
// finished chunk c; a relay's kRemote says so for its whole node.
void all_to_all(ProgramBuilder& b, const Shape&, const LevelTree& tree, uint32_t rank) {
  const Nodes nodes(tree);
  const uint32_t node = nodes.node_of(rank);
  const std::vector<uint32_t> peers = nodes.local_peers(rank);
  send_local(b, nodes, rank);
  for (const uint32_t p : peers) b.wait(p, kLocal);
  send_remote(b, nodes, rank);
  b.copy(out(rank, rank), in(rank, rank));
  for (const uint32_t p : peers) b.copy(out(rank, p), slot(rank, p));
  for (uint32_t i = 1; i < nodes.n_nodes(); ++i) {
    const uint32_t other = (node + nodes.n_nodes() - i) % nodes.n_nodes();
    b.wait(nodes.relay(other, rank), kRemote);
    for (const uint32_t p : nodes.members(other)) b.copy(out(rank, p), slot(rank, p));
  }
}

constexpr Algorithm kAlgorithms[] = {
    {moecclOpAllToAll, "2dh", "collect each node's blocks at a relay, then exchange between nodes", kNodes, layout,
     tuning::kFlatBlocks, all_to_all},
};

}  // namespace

std::span<const Algorithm> two_d_algorithms() { return kAlgorithms; }

}  // namespace moeccl::algo
