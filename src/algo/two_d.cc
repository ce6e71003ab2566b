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

// Slots: first those of the relay, then one for the block from each rank.
Layout layout(const Shape& shape, const LevelTree& tree) {
  return {Nodes(tree).relay_slots() + shape.n_ranks, tuning::kOverlap};
}

// blocks: the first of the slots for the blocks.
void send_remote(ProgramBuilder& b, const Nodes& nodes, uint32_t rank, uint32_t blocks) {
  const std::vector<uint32_t> relayed = nodes.relayed_by(rank);
  const auto& members = nodes.members(nodes.node_of(rank));
  for (uint32_t k = 0; k < relayed.size(); ++k) {
    for (uint32_t i = 0; i < members.size(); ++i)
      b.put(slot(relayed[k], blocks + members[i]),
            members[i] == rank ? in(rank, relayed[k]) : slot(rank, relay_slot(nodes, rank, k, i)));
    b.signal(relayed[k], kRemote);
  }
}

// Works in place: outputs are written once all inputs have been sent. A peer's kLocal of chunk c + 1 says that it has
// finished chunk c; a relay's kRemote says so for its whole node.
void all_to_all(ProgramBuilder& b, const Shape&, const LevelTree& tree, uint32_t rank) {
  const Nodes nodes(tree);
  const uint32_t node = nodes.node_of(rank), blocks = nodes.relay_slots();
  const std::vector<uint32_t> peers = nodes.local_peers(rank);
  send_local(b, nodes, rank, blocks + rank, kLocal);
  for (const uint32_t p : peers) b.wait(p, kLocal);
  send_remote(b, nodes, rank, blocks);
  b.copy(out(rank, rank), in(rank, rank));
  for (const uint32_t p : peers) b.copy(out(rank, p), slot(rank, blocks + p));
  for (uint32_t i = 1; i < nodes.n_nodes(); ++i) {
    const uint32_t other = (node + nodes.n_nodes() - i) % nodes.n_nodes();
    b.wait(nodes.relay(other, rank), kRemote);
    for (const uint32_t p : nodes.members(other)) b.copy(out(rank, p), slot(rank, blocks + p));
  }
}

constexpr Algorithm kAlgorithms[] = {
    {moecclOpAllToAll, "2dh", "collect each node's blocks at a relay, then exchange between nodes", kNodes, layout,
     tuning::kFlatBlocks, all_to_all},
};

}  // namespace

std::span<const Algorithm> two_d_algorithms() { return kAlgorithms; }

}  // namespace moeccl::algo
