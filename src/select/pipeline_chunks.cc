// SPDX-License-Identifier: Apache-2.0
#include "src/select/pipeline_chunks.h"

#include <algorithm>

#include "src/solve/chunks.h"

namespace moeccl::comm {
namespace {

// Every chunk costs each lane some passes of its rank through the executor. Where ranks share cores, each pass lasts
// until every rank has had its turn.
constexpr double kPassesOfAChunk = 2;
// Below this, a transfer is all overhead on any link that we know of.
constexpr double kLeastBytes = 4096;
// More chunks gain less than a percent and cost steps.
constexpr int32_t kMostChunks = 64;

}  // namespace

// Ranks of an outermost group share its uplink; a rank's own bytes also pass through its share of the cores.
ChunkProblem::ChunkProblem(const plan::LevelTree& tree, const plan::Profile& profile, uint64_t block_bytes) {
  const uint32_t e = tree.n_tensor_groups(), inner = tree.depth() - 1;
  const double t = static_cast<double>(tree.n_ranks) / e;
  const double on_host = plan::ranks_per_host(tree, profile);
  const double ranks_per_core = std::max(1.0, on_host / std::max(1u, profile.cores));
  const double copy = profile.copy_bytes_per_ns / ranks_per_core, put = profile.stream_bytes_per_ns / ranks_per_core;
  const auto share = [&](uint32_t level, double sharers) {
    const plan::LinkCost link = plan::link_of(tree, profile, level);
    return link.bytes_per_ns > 0 ? std::min(put, link.bytes_per_ns / sharers) : put;
  };
  const double sharers = static_cast<double>(tree.n_ranks) / tree.levels.front().n_groups;
  const double inter = share(0, sharers), intra = share(inner, 1);
  problem_.bytes = std::max(1.0, static_cast<double>(block_bytes) * e);
  problem_.tensor = std::max(1, static_cast<int32_t>(t));
  problem_.expert = static_cast<int32_t>(e);
  problem_.inter_bandwidth = inter * 1e9;
  problem_.intra_bandwidth = intra * 1e9;
  problem_.copy_bandwidth = copy * 1e9;
  const double pass_ns =
      profile.step_ns + (ranks_per_core > 1 ? ranks_per_core * profile.switch_ns : profile.signal_ns);
  problem_.start_us = kPassesOfAChunk * pass_ns / 1e3;
  if (profile.levels.size() == tree.depth() && profile.tree_hash == tree.hash()) {
    problem_.inter = curve(profile, 0, plan::link_of(tree, profile, 0).bytes_per_ns, inter_);
    problem_.intra = curve(profile, inner, intra, intra_);
  } else {
    problem_.start_us +=
        std::max(plan::link_of(tree, profile, 0).alpha_ns, plan::link_of(tree, profile, inner).alpha_ns) / 1e3;
  }
  problem_.min_bytes = std::max(kLeastBytes, problem_.start_us * problem_.inter_bandwidth / 1e6);
  problem_.max_chunks = kMostChunks;
}

moecclCurve_t ChunkProblem::curve(const plan::Profile& profile, uint32_t level, double bytes_per_ns, Points& points) {
  for (const plan::Curve::Point& p : profile.levels[level].curve.points) {
    if (p.bytes <= 0 || p.ns <= 0 || (!points.bytes.empty() && p.bytes <= points.bytes.back())) continue;
    points.bytes.push_back(p.bytes);
    points.efficiency.push_back(bytes_per_ns > 0 ? std::clamp(p.bytes / p.ns / bytes_per_ns, 1e-6, 1.0) : 1);
  }
  return {static_cast<int32_t>(points.bytes.size()), points.bytes.data(), points.efficiency.data()};
}

plan::PipelineChunks pipeline_chunks(const plan::LevelTree& tree, const plan::Profile& profile, uint64_t block_bytes) {
  if (tree.n_tensor_groups() < 2) return {1, 1, 1};
  const ChunkProblem made(tree, profile, block_bytes);
  moecclChunkProblem_t p = made.problem();
  moecclChunkAnswer_t answer{};
  solve::solve_chunks(p, &answer);
  plan::PipelineChunks chunks;
  chunks.o2 = static_cast<uint32_t>(answer.chunks[moecclChunkO2]);
  chunks.o3 = static_cast<uint32_t>(answer.chunks[moecclChunkO3]);
  // "lean" gathers e - 1 of e blocks (Eq. 9 with that factor).
  p.intra_bandwidth *= static_cast<double>(p.expert) / (p.expert - 1);
  solve::solve_chunks(p, &answer);
  chunks.lean = static_cast<uint32_t>(answer.chunks[moecclChunkO3]);
  return chunks;
}

}  // namespace moeccl::comm
