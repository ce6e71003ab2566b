// SPDX-License-Identifier: Apache-2.0
// The background thread's part of a re-placing step. It depends only on what all ranks know alike, and does not use the
// communicator, which may be destroyed before the layer's handles.
#include <algorithm>
#include <cstring>

#include "src/base/clock.h"
#include "src/base/hash.h"
#include "src/moe/moe_replace.h"
#include "src/solve/sample.h"
#include "src/solve/sample_cost.h"

namespace moeccl::comm {

Status MoeReplacement::take_next() {
  next_.clear();
  if (!config_.use_next) return {};
  const size_t columns = this->columns(*routing_);
  next_.resize(samples_.n() * columns);
  for (uint32_t r = 0; r < n_ranks_; ++r) {
    const size_t n = (samples_.first[r + 1] - samples_.first[r]) * columns;
    if (n > 0)
      std::memcpy(next_.data() + samples_.first[r] * columns, gathered_.data() + r * stride_ + sizeof(Hello),
                  n * sizeof(int32_t));
  }
  return {};  // the solver checks them like every other count
}

Status MoeReplacement::take_choices() {
  const algo::PackedChoices packed{gathered_.data() + choices_at_, stride_, tokens_of_, layer_.config().shape.top_k,
                                   residents_};
  MOECCL_ASSIGN_OR_RETURN(choices_, algo::unpack_choices(packed, moe_config_.placement, canonical_));
  MOECCL_TRY(algo::check_against(routing_->tables_, choices_, layer_.config().placement, rank_));
  rows_ = algo::ResidualRows::make(choices_, moe_config_.placement, rank_, residents_, routing_->tables_);
  return {};
}

Status MoeReplacement::solve_and_build() {
  const int64_t begun = now_ns();
  if (residents_ != algo::Residents::kOfLone) MOECCL_TRY(take_choices());
  MOECCL_TRY(take_next());
  MOECCL_TRY(solve());
  if (combines_plainly()) {
    find_local_samples();
    count_sent();
  } else {
    MOECCL_TRY(build());
  }
  solve_us_ = static_cast<double>(now_ns() - begun) / 1000;
  return {};
}

moecclSampleProblem_t MoeReplacement::problem_of(const algo::SampleCounts& counts, std::vector<int32_t>& current) {
  current.resize(samples_.n());
  for (uint32_t i = 0; i < current.size(); ++i) current[i] = static_cast<int32_t>(samples_.home(i));
  moecclSampleProblem_t problem = links_;
  problem.n_samples = static_cast<int32_t>(samples_.n());
  problem.n_experts = counts.n_columns;
  problem.n_devices = static_cast<int32_t>(n_ranks_);
  problem.n_nodes = static_cast<int32_t>(n_nodes_);
  problem.num_scatter = config_.use_next ? next_.data() : nullptr;
  problem.expert_device = counts.device.data();
  problem.device_node = node_.data();
  problem.min_gain = config_.min_gain;
  problem.refine_pairs = config_.refine_pairs;
  return problem;
}

// Uses the calibrated figures of links if there are any, else those of the topology. A level's link belongs to one
// group, and the groups of a node use theirs at the same time. Called by the caller's thread, which may load another
// profile while the solver runs.
void MoeReplacement::price_links() {
  moecclSampleProblem_t& problem = links_ = MOECCL_SAMPLE_PROBLEM_INIT;
  const plan::LevelTree& tree = layer_.host().tree();
  const std::shared_ptr<const plan::Profile> kept = layer_.host().profile();
  const plan::Profile& profile = *kept;
  const uint32_t depth = tree.depth();
  inner_alpha_us_.clear(), inner_beta_us_.clear();
  for (uint32_t l = 0; l < depth; ++l)
    if (!(plan::link_of(tree, profile, l).bytes_per_ns > 0)) return;
  constexpr double kMostUs = 1e12;  // that the solver takes
  const auto row_us = [&](uint32_t level) {
    const double in_a_node =
        level == 0 ? 1
                   : static_cast<double>(level + 1 == depth ? tree.n_ranks : tree.levels[level].n_groups) / n_nodes_;
    const double us =
        static_cast<double>(moe_config_.shape.row_bytes) / plan::link_of(tree, profile, level).bytes_per_ns / 1000;
    return std::min(us / in_a_node, kMostUs);
  };
  const auto alpha_us = [&](uint32_t level) {
    return std::min(plan::link_of(tree, profile, level).alpha_ns / 1000, kMostUs);
  };
  if (depth < 2) return;
  problem.alpha_inter_us = alpha_us(0), problem.alpha_intra_us = alpha_us(depth - 1);
  problem.beta_inter_us = row_us(0), problem.beta_intra_us = row_us(depth - 1);
  for (uint32_t l = 1; l <= static_cast<uint32_t>(n_inner_); ++l)
    inner_alpha_us_.push_back(alpha_us(l)), inner_beta_us_.push_back(row_us(l));
  problem.n_inner = n_inner_;
  problem.inner_group = inner_group_.data();
  problem.inner_alpha_us = inner_alpha_us_.data(), problem.inner_beta_us = inner_beta_us_.data();
}

Status MoeReplacement::solve() {
  algo::SampleCounts counts = algo::count_samples(count_request(), choices_, samples_);
  std::vector<int32_t> current;
  moecclSampleProblem_t problem = problem_of(counts, current);
  // Without rows there is nothing to move; the extra elements give the solver valid pointers even then.
  counts.num.push_back(0), current.push_back(0), next_.push_back(0);
  problem.num_gather = counts.num.data(), problem.current = current.data();
  if (config_.use_next) problem.num_scatter = next_.data();
  moecclSampleAnswer_t chosen{};
  MOECCL_TRY(run_solver(problem, &chosen));
  facts_.keep = chosen.keep;
  facts_.moved = chosen.moved;
  facts_.moved_nodes = chosen.moved_nodes;
  placement_hash_ = hash_bytes(placement_.data(), placement_.size() * sizeof(int32_t), samples_.n() + 1);
  return {};
}

Status MoeReplacement::run_solver(moecclSampleProblem_t given, moecclSampleAnswer_t* chosen) {
  MOECCL_ASSIGN_OR_RETURN(moecclSampleProblem_t problem, solve::checked(given));
  MOECCL_ASSIGN_OR_RETURN(auto workspace, solve::Workspace::make(nullptr, 0, solve::sample_bytes(problem), ""));
  const auto evaluate = [&](const moecclSampleProblem_t& p, moecclSampleAnswer_t* answer) {
    solve::Arena arena = workspace.arena();
    solve::evaluate_samples(p, placement_.data(), answer, arena);
  };
  const std::vector<int32_t> current(problem.current, problem.current + problem.n_samples);
  if (config_.mode == moecclReplaceKeep)
    placement_ = current;
  else if (config_.mode == moecclReplaceSolve)
    placement_.resize(samples_.n());
  placement_.push_back(0);  // so that data() is never null
  if (config_.mode == moecclReplaceSolve) {
    solve::Arena arena = workspace.arena();
    solve::solve_samples(problem, placement_.data(), chosen, arena);
  } else {
    evaluate(problem, chosen);
  }
  // For this combine alone: Eq. 3 and Eq. 5 of the gather.
  moecclSampleProblem_t alone = problem;
  alone.num_scatter = nullptr;
  moecclSampleAnswer_t gather{};
  evaluate(alone, &gather);
  facts_.predicted_gain = facts_.gain = chosen->gain;
  if (config_.mode == moecclReplaceSolve && config_.min_gain >= 0) {
    const ReplaceGain::Answer answer = gain_.decide({chosen->gain, gather.gain});
    facts_.gain = answer.gain;
    if (answer.keep && !chosen->keep) {
      std::copy(current.begin(), current.end(), placement_.begin());
      evaluate(problem, chosen);
      evaluate(alone, &gather);
    }
  }
  placement_.pop_back();
  facts_.node_bytes_before = static_cast<uint64_t>(gather.inter_before) * moe_config_.shape.row_bytes;
  facts_.node_bytes_after = static_cast<uint64_t>(gather.inter_after) * moe_config_.shape.row_bytes;
  facts_.next_bytes_before =
      static_cast<uint64_t>(chosen->inter_before - gather.inter_before) * moe_config_.shape.row_bytes;
  facts_.next_bytes_after =
      static_cast<uint64_t>(chosen->inter_after - gather.inter_after) * moe_config_.shape.row_bytes;
  return {};
}

void MoeReplacement::find_local_samples() {
  const auto rank = static_cast<int32_t>(rank_);
  local_samples_.clear();
  for (uint32_t i = 0; i < placement_.size(); ++i)
    if (placement_[i] == rank) local_samples_.push_back(static_cast<int32_t>(i));
}

void MoeReplacement::count_sent() {
  const algo::RoutingTables& tables = combines_plainly() ? routing_->tables_ : tables_;
  const algo::RankPaths& paths =
      combines_plainly() ? layer_.candidates()[routing_->chosen_]->rank : candidates_[routing_->chosen_]->rank;
  for (uint32_t i = 0; i < paths.edges.in.size(); ++i)
    if (node_[paths.edges.in[i].peer] != node_[rank_])
      facts_.node_bytes_sent += tables.rows_returned(i) * moe_config_.shape.row_bytes;
}

Status MoeReplacement::build() {
  find_local_samples();
  const MoeCandidate& plan = *candidates_[routing_->chosen_];
  const algo::Homes homes(samples_, placement_, n_ranks_);
  const algo::Cut cut = algo::find_cut(plan.paths, moe_config_.placement, choices_, homes, plan.slots.slot_rows);
  if (cut.n_chunks == 0)
    return error(moecclInternalError, "no cut of the re-placed samples into slots of {} rows", plan.slots.slot_rows);
  const algo::HomeRecords records(plan.rank, plan.paths, choices_, homes, rows_);
  MOECCL_TRY(records.fill(tables_, moe_config_.shape, routing_->weighted_, routing_->tables_));
  // Uses as many chunks as the plain combine would for these rows.
  const uint32_t useful = std::min(algo::moe_pipeline_chunks(cut.largest_edge_rows * moe_config_.shape.row_bytes),
                                   routing_->prices_[routing_->chosen_].most_chunks);
  tables_.build(std::max(cut.n_chunks, useful));
  count_sent();
  return {};
}

// Uses the routing's own records, and every token's row of the residual at home. The chunks are those that the ranks
// agreed on for the routing, because the residual adds nothing to any edge.
Status MoeReplacement::build_at_home() {
  const int64_t begun = now_ns();
  find_local_samples();
  if (residents_ != algo::Residents::kNone) {
    std::vector<algo::RecordView> views(n_ranks_);
    const uint32_t* at = routing_->received_.data();
    for (uint32_t r = 0; r < views.size(); ++r) {
      MOECCL_ASSIGN_OR_RETURN(views[r], algo::read_records(at, routing_->received_bytes_[r], routing_->weighted_));
      at += routing_->received_bytes_[r] / sizeof(uint32_t);
    }
    views[rank_] = algo::view_of(routing_->own_);
    algo::MoeShape shape = moe_config_.shape;
    shape.top_k = layer_.config().shape.top_k + 1;
    const algo::HomeRecords records(candidates_[routing_->chosen_]->rank, views, tokens_of_, routing_->tables_, rows_);
    MOECCL_TRY(records.fill(tables_, shape, routing_->weighted_, routing_->tables_));
    tables_.build(routing_->host_chunks_);
  }
  count_sent();
  solve_us_ = static_cast<double>(now_ns() - begun) / 1000;
  return {};
}

}  // namespace moeccl::comm
