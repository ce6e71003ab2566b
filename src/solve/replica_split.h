// SPDX-License-Identifier: Apache-2.0
// Shares an expert's tokens out among the slots of its replicas.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

namespace moeccl::solve {

// The ranks that tokens come from and that slots lie on, with the node of each.
struct NodeRanks {
  explicit NodeRanks(std::vector<int32_t> nodes) : node(std::move(nodes)), by_node(node.size()) {
    std::iota(by_node.begin(), by_node.end(), size_t{0});
    std::stable_sort(by_node.begin(), by_node.end(), [&](size_t a, size_t b) { return node[a] < node[b]; });
  }
  std::vector<int32_t> node;
  std::vector<size_t> by_node;  // ranks in the order of their nodes
};

// Cuts one expert's tokens[n_ranks], fewer than 2^31 in all, down to the `capacity` that its slots take together, and
// returns the sum of what is left. Every rank's loss is within one token of its share (Section 3.4 says how many tokens
// are dropped, but not whose).
int64_t keep_capacity(std::vector<int64_t>& tokens, int64_t capacity);

struct SlotTokens {
  size_t slot = 0;
  int64_t tokens = 0;
};

// Gives each slot as many tokens as the others, to within one: those of its own rank first, then those of its node,
// then any. Tokens that stay on the rank also stay on the node, so each step in turn serves as many as possible.
// left[n_ranks] holds the tokens of each rank and is used up here; slot_rank holds the rank of each slot. Calls
// give(slot, rank, tokens).
template <class Give>
void share_tokens(const NodeRanks& ranks, std::vector<int64_t>& left, std::span<const size_t> slot_rank, Give&& give) {
  const auto n = static_cast<int64_t>(slot_rank.size());
  const int64_t total = std::accumulate(left.begin(), left.end(), int64_t{0});
  std::vector<int64_t> room(slot_rank.size());
  for (size_t k = 0; k < slot_rank.size(); ++k) room[k] = total / n + (static_cast<int64_t>(k) < total % n ? 1 : 0);
  const auto serve = [&](size_t k, size_t r) {
    const int64_t tokens = std::min(left[r], room[k]);
    if (tokens == 0) return;
    left[r] -= tokens;
    room[k] -= tokens;
    give(k, r, tokens);
  };
  for (size_t k = 0; k < slot_rank.size(); ++k) serve(k, slot_rank[k]);
  std::vector<size_t> order(slot_rank.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto before = [&](size_t a, size_t b) { return ranks.node[slot_rank[a]] < ranks.node[slot_rank[b]]; };
  if (!std::is_sorted(order.begin(), order.end(), before)) std::stable_sort(order.begin(), order.end(), before);
  for (const bool any : {false, true}) {
    size_t k = 0, r = 0;
    while (k < order.size() && r < left.size()) {
      const size_t rank = ranks.by_node[r];
      const int32_t there = ranks.node[slot_rank[order[k]]], here = ranks.node[rank];
      if (left[rank] == 0 || (!any && here < there)) {
        ++r;
      } else if (room[order[k]] == 0 || (!any && there < here)) {
        ++k;
      } else {
        serve(order[k], rank);
      }
    }
  }
}

}  // namespace moeccl::solve
