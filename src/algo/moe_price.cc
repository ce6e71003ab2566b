// SPDX-License-Identifier: Apache-2.0
#include "src/algo/moe_price.h"

#include <span>

namespace moeccl::algo {

namespace {

RankRows rank_rows(const Traffic& t, uint32_t rank) {
  RankEdges edges;
  const std::span<const TrafficEdge> all(t.edges);
  for (const uint32_t i : t.in_of(rank)) {
    const uint32_t first = t.out_first[all[i].from];
    const uint32_t place = place_in_hop(all.subspan(first, i + 1 - first), &TrafficEdge::hop);
    edges.in.push_back({all[i].from, all[i].hop, place, {}});
  }
  for (const TrafficEdge& e : all.subspan(t.out_first[rank], t.out_first[rank + 1] - t.out_first[rank])) {
    const uint32_t place = place_in_hop(t.in_of(e.to).first(e.in_place + 1), [&](uint32_t i) { return all[i].hop; });
    edges.out.push_back({e.to, e.hop, place, {}});
  }
  return {rank, t.owns[rank], std::move(edges)};
}

// Combine's lists: 0 sums own tokens, 1 + i what goes back by in edge i, from Input and from out edges of later hops.
void append_sums(const Traffic& t, const RankRows& rank, std::vector<plan::RowCounts::Sum>& sums) {
  const std::vector<uint32_t>& counts = t.returned.empty() ? t.rows : t.returned;
  const uint32_t* of_rank = counts.data() + t.first_list[rank.rank];
  for (uint32_t source = 0; source <= rank.lists.n_in; ++source) {
    plan::RowCounts::Sum& sum = sums.emplace_back();
    sum.terms = of_rank[rank.lists.scatter(source)];
    for (uint32_t j = rank.lists.first_out[source]; j < rank.edges.out.size(); ++j)
      sum.terms += of_rank[rank.lists.gather(j, source)];
    if (source == 0) {
      sum.rows = t.tokens[rank.rank];
      continue;
    }
    const TrafficEdge& e = t.edges[t.in_of(rank.rank)[source - 1]];
    const bool last = t.in_of(rank.rank)[source - 1] + 1 == t.out_first[e.from + 1];
    const uint64_t end = last ? t.scatter_list(e.from) : (&e + 1)->first_list;
    for (uint64_t list = e.first_list; list < end; ++list) sum.rows += counts[list];
  }
}

// Growing vectors keep room for up to twice what they hold.
void trim(plan::Program& program) {
  for (plan::Lane& lane : program.lanes) lane.steps.shrink_to_fit();
  program.srcs.shrink_to_fit();
  program.totals.shrink_to_fit();
}

}  // namespace

uint64_t moe_steps(const Traffic& traffic) { return 6 * traffic.edges.size() + traffic.rows.size(); }

MoeCost moe_price(moecclOp_t op, const Paths& paths, const Traffic& traffic, const plan::LevelTree& tree,
                  const plan::Profile& profile, uint64_t row_bytes, uint32_t n_chunks) {
  const uint32_t n = traffic.n_ranks;
  const uint64_t largest = traffic.largest_edge();
  MoeCost price;
  price.n_chunks = n_chunks > 0 ? n_chunks : moe_pipeline_chunks(largest * row_bytes);
  // Counts have no padding, which is all that an ExpertMajor plan adds.
  const MoePlanShape shape = moe_plan_shape(paths, false, UINT64_MAX);
  plan::Plan plan;
  plan.algorithm = paths.algorithm().name();
  plan.shape.op = op;
  plan.shape.n_ranks = n;
  plan.chunking = {(largest + price.n_chunks - 1) / price.n_chunks, price.n_chunks};
  price.staging_bytes = uint64_t{shape.n_slots} * shape.depth * plan.chunking.chunk * row_bytes;
  std::vector<plan::RowCounts::Sum> sums;
  std::vector<size_t> first_sum{0};
  for (uint32_t r = 0; r < n; ++r) {
    const RankRows rank = rank_rows(traffic, r);
    plan.programs.push_back(op == moecclOpDispatch ? build_dispatch(paths, rank, shape)
                                                   : build_combine(paths, rank, shape));
    trim(plan.programs.back());
    append_sums(traffic, rank, sums);
    first_sum.push_back(sums.size());
  }
  std::vector<plan::RowCounts> counts;
  for (uint32_t r = 0; r < n; ++r) {
    const uint64_t first = traffic.first_list[r];
    counts.push_back({std::span(traffic.rows).subspan(first, traffic.first_list[r + 1] - first),
                      std::span(sums).subspan(first_sum[r], first_sum[r + 1] - first_sum[r])});
  }
  std::vector<plan::Binding> bindings(n);
  for (uint32_t r = 0; r < n; ++r) {
    bindings[r].chunking = plan.chunking;
    bindings[r].element_bytes = static_cast<uint32_t>(row_bytes);
    bindings[r].slot_elements = plan.chunking.chunk;
    bindings[r].counts = &counts[r];
  }
  price.cost = plan::price(plan, bindings, tree, profile);
  return price;
}

}  // namespace moeccl::algo
