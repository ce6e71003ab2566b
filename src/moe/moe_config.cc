// SPDX-License-Identifier: Apache-2.0
#include "src/moe/moe_config.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "src/base/adopt.h"
#include "src/base/env.h"
#include "src/base/hash.h"
#include "src/exec/cuda/cuda_routing.h"
#include "src/exec/cuda/tables/row_tables.h"
#include "src/exec/cuda/tables/table_plan.h"
#include "src/world/kernel_side.h"

namespace moeccl::comm {

namespace {

constexpr int32_t kMaxTopK = 64;

Status check_numbers(const moecclMoeConfig_t& c) {
  if (c.hidden_bytes < 1 || c.hidden_bytes > UINT32_MAX)
    return error(moecclInvalidArgument, "config.hidden_bytes is {}: a row has between 1 and {} bytes", c.hidden_bytes,
                 UINT32_MAX);
  if (c.type < 0 || c.type >= MOECCL_NUM_DATA_TYPES)
    return error(moecclInvalidArgument, "config.type is {}: not a moecclDataType_t", static_cast<int>(c.type));
  if (c.n_experts < 1 || c.n_experts > 65535)
    return error(moecclInvalidArgument, "config.n_experts is {}: between 1 and 65535 are possible", c.n_experts);
  if (c.top_k < 1 || c.top_k > std::min(kMaxTopK, c.n_experts))
    return error(moecclInvalidArgument, "config.top_k is {}: between 1 and {} are possible with {} experts", c.top_k,
                 std::min(kMaxTopK, c.n_experts), c.n_experts);
  if (c.max_tokens < 1 || c.max_tokens > (uint64_t{1} << 31) / static_cast<uint64_t>(c.top_k))
    return error(moecclInvalidArgument,
                 "config.max_tokens is {}: give the most tokens that a rank brings, 1 to {} with top_k {}",
                 c.max_tokens, (uint64_t{1} << 31) / static_cast<uint64_t>(c.top_k), c.top_k);
  if (c.layout != moecclLayoutRows && c.layout != moecclLayoutExpertMajor)
    return error(moecclInvalidArgument, "config.layout is {}: moecclLayoutRows or moecclLayoutExpertMajor",
                 static_cast<int>(c.layout));
  if (c.align_rows < 0 || c.align_rows > (1 << 20))
    return error(moecclInvalidArgument, "config.align_rows is {}: between 0 (no alignment) and {} are possible",
                 c.align_rows, 1 << 20);
  if (c.align_rows > 1 && c.layout == moecclLayoutRows)
    return error(moecclInvalidArgument, "config.align_rows is {}: only moecclLayoutExpertMajor has groups to align",
                 c.align_rows);
  if (c.scale_bytes > UINT32_MAX / 2 || c.scaled_row_bytes > UINT32_MAX / 2)
    return error(moecclInvalidArgument, "config.scale_bytes is {} and config.scaled_row_bytes {}: at most {} each",
                 c.scale_bytes, c.scaled_row_bytes, UINT32_MAX / 2);
  if (c.scale_bytes > 0 && c.scaled_row_bytes == 0 && c.hidden_bytes > UINT32_MAX - c.scale_bytes)
    return error(moecclInvalidArgument, "config.hidden_bytes is {} and config.scale_bytes {}: at most {} together",
                 c.hidden_bytes, c.scale_bytes, UINT32_MAX);
  if (c.scale_bytes == 0 && c.scaled_row_bytes > 0)
    return error(moecclInvalidArgument,
                 "config.scaled_row_bytes is {} without scales: give scale_bytes, or 0 for rows of hidden_bytes",
                 c.scaled_row_bytes);
  if (c.deterministic != 0 && c.deterministic != 1)
    return error(moecclInvalidArgument, "config.deterministic is {}: give 0 or 1", c.deterministic);
  if (c.trials != 0 && c.trials != -1)
    return error(moecclInvalidArgument, "config.trials is {}: give 0 for trials of plans, or -1 for none", c.trials);
  if (c.capacity < 0)
    return error(moecclInvalidArgument, "config.capacity is {}: give 0 for no limit, or the limit", c.capacity);
  return {};
}

// Checks that 32 bits can number the rows of the rank that receives the most.
Status check_rows(const MoeConfig& config) {
  const uint64_t n = config.placement.n_ranks;
  uint64_t most = 0;
  for (uint32_t r = 0; r < n; ++r) {
    const uint64_t local = config.n_held(r), copies = std::min<uint64_t>(config.shape.top_k, local);
    most = std::max(most, n * config.shape.max_tokens * copies + local * config.shape.align_rows);
  }
  if (most <= INT32_MAX) return {};
  return error(
      moecclInvalidArgument,
      "config.max_tokens is {}: one rank could receive {} rows, at most {} are possible; use fewer tokens a step",
      config.shape.max_tokens, most, INT32_MAX);
}

}  // namespace

uint64_t MoeConfig::n_held(uint32_t rank) const {
  if (!domains) return placement.n_local(rank);
  uint64_t n = 0;
  for (const uint32_t home : domains->held(rank, domains->tree().depth())) n += placement.n_local(home);
  return n;
}

Result<MoeConfig> MoeConfig::from(const moecclMoeConfig_t* given, const plan::LevelTree& tree, bool deterministic,
                                  std::shared_ptr<const algo::Domains> domains) {
  MOECCL_ASSIGN_OR_RETURN(const moecclMoeConfig_t c, adopt(given, "config"));
  MOECCL_TRY(check_numbers(c));
  if (domains != nullptr && domains->n_ranks() != tree.n_ranks)
    return error(moecclInvalidArgument,
                 "the expert domains are of {} ranks, the communicator has {}: give a communicator of the same ranks",
                 domains->n_ranks(), tree.n_ranks);
  MoeConfig config;
  MOECCL_ASSIGN_OR_RETURN(config.placement, algo::Placement::make(c.n_experts, tree.n_ranks, c.expert_rank));
  config.domains = std::move(domains);
  config.type = c.type;
  config.shape = {static_cast<uint32_t>(c.top_k),
                  c.hidden_bytes,
                  c.max_tokens,
                  static_cast<uint32_t>(c.capacity),
                  c.layout == moecclLayoutExpertMajor,
                  static_cast<uint32_t>(std::max(1, c.align_rows)),
                  deterministic,
                  0};
  config.trials = c.trials == 0 && env().trials;
  config.scale_bytes = c.scale_bytes;
  if (c.scale_bytes > 0) {
    config.scaled_row_bytes = c.scaled_row_bytes > 0 ? c.scaled_row_bytes : c.hidden_bytes;
    config.shape.scaled_bytes = config.scaled_row_bytes + c.scale_bytes;
  }
  if (deterministic) MOECCL_TRY(algo::check_groups(tree));
  MOECCL_TRY(check_rows(config));
  config.algorithms = algo::moe_candidates(tree);
  if (config.domains)
    std::erase_if(config.algorithms, [](const algo::MoeAlgorithm& a) { return a.kind == algo::PathKind::k2dh; });
  if (!leaves_algorithm_open(c)) MOECCL_TRY(config.narrow_to(c.algorithm, tree));
  config.memory_cap = c.memory_cap_bytes ? c.memory_cap_bytes : static_cast<uint64_t>(env().moe_memory_cap);
  return config;
}

Status MoeConfig::narrow_to(std::string_view algorithm, const plan::LevelTree& tree) {
  shape.by_choice = algorithm == kOrderedName;
  if (shape.by_choice) shape.grouped = false;  // one order in every plan, without groups
  const auto parsed = algo::parse_moe_algorithm(shape.by_choice ? "flat" : algorithm, tree);
  if (!parsed.ok()) return error(parsed.status().code(), "{}, or {}", parsed.status().message(), kOrderedName);
  const algo::MoeAlgorithm only = *parsed;
  if (domains && only.kind == algo::PathKind::k2dh)
    return error(moecclInvalidArgument, "algorithm \"2dh\" does not know expert domains: give auto, flat or hier:N");
  algorithms = {only};
  return {};
}

bool leaves_algorithm_open(const moecclMoeConfig_t& config) {
  return config.algorithm == nullptr || *config.algorithm == '\0' || std::strcmp(config.algorithm, "auto") == 0;
}

uint64_t MoeConfig::hash() const {
  uint64_t h = 0;
  const auto add = [&](uint64_t word) { h = hash_combine(h, word); };
  add(shape.top_k), add(shape.row_bytes), add(shape.max_tokens), add(shape.capacity), add(shape.expert_major);
  add(shape.align_rows), add(shape.grouped), add(shape.by_choice), add(static_cast<uint64_t>(type)), add(memory_cap);
  add(scale_bytes), add(scaled_row_bytes), add(trials);
  for (const uint32_t owner : placement.owner) add(owner);
  for (const algo::MoeAlgorithm& a : algorithms) add(static_cast<uint64_t>(a.kind)), add(a.dims);
  if (domains) add(domains->hash());
  return h;
}

namespace {

constexpr uint64_t kFewChunks = 64;

// Returns the bytes of the tables on the host, without the records that they are built from.
uint64_t list_bytes(const MoeConfig& config, const algo::Paths& paths) {
  const algo::MoeShape& shape = config.shape;
  const uint64_t n = paths.n_ranks(), all_tokens = n * shape.max_tokens;
  uint64_t local = 0;
  for (uint32_t r = 0; r < n; ++r) local = std::max(local, config.n_held(r));
  algo::RoutingLoad load;
  load.tokens = shape.max_tokens;
  load.records = all_tokens;
  load.choices = all_tokens * shape.top_k;
  load.rows = all_tokens * std::min<uint64_t>(shape.top_k, local) + local * shape.align_rows;
  // An out edge has a list of the rank's own tokens and one of each arrival of an earlier hop.
  load.lists = 2 * (1 + uint64_t{paths.max_in()});
  uint64_t earlier = 0;
  for (uint32_t h = 0; h < paths.n_hops(); ++h) {
    load.lists += paths.max_edges(h) * (1 + earlier);
    earlier += paths.max_edges(h);
  }
  const uint32_t chunks = std::bit_ceil(static_cast<uint32_t>(shape.max_tokens));
  return algo::RoutingTables::bytes_bound(load, std::max(chunks, 8u));
}

// Returns the bytes of the records in the form of RecordView, both sent and received.
uint64_t record_bytes(const MoeConfig& config, uint64_t n_ranks) {
  const uint64_t records = n_ranks * config.shape.max_tokens;
  return 2 * (records * 5 + records * config.shape.top_k * 6 + n_ranks * 32);
}

}  // namespace

MoeSlots::MoeSlots(const MoeConfig& config, const algo::Paths& paths, uint64_t granted)
    : table_bytes(list_bytes(config, paths) + record_bytes(config, paths.n_ranks())), budget(granted) {
  needed_bytes = algo::moe_least_staging(config.shape, paths);
  needed_cap = std::min(2 * needed_bytes, table_bytes + needed_bytes);
  const auto rows_of = [&](uint64_t bytes) { return algo::moe_slot_rows(config.shape, paths, bytes); };
  if (config.memory_cap > 0) {
    // Staging gets half of the cap and leaves the rest to the tables. If that is too little, it gets everything that no
    // routing's tables can need.
    budget = std::min(granted, config.memory_cap / 2);
    if (rows_of(budget) == 0 && config.memory_cap > table_bytes)
      budget = std::max(budget, std::min(granted, config.memory_cap - table_bytes));
  }
  slot_rows = rows_of(budget);
  plan = algo::moe_plan_shape(paths, config.shape.expert_major, slot_rows);
}

uint64_t kernel_slot_rows(const MoeConfig& config, const algo::Paths& paths, uint64_t granted) {
  if (granted == 0) return 0;
  const MoeSlots slots(config, paths, granted);
  return slots.enough() ? slots.slot_rows : 0;
}

Result<Fitting> fitting(const MoeConfig& config, const plan::LevelTree& tree, uint64_t granted) {
  // Operations get half of a communicator's staging.
  const auto of_communicator = [](uint64_t bytes) { return (2 * bytes + 127) / 128 * 128; };
  Fitting fit;
  uint64_t least = UINT64_MAX, useful = UINT64_MAX, least_cap = UINT64_MAX;
  for (const algo::MoeAlgorithm& a : config.algorithms) {
    const algo::Paths paths(a, tree, config.placement, config.domains.get());
    const MoeSlots slots(config, paths, granted);
    if (slots.enough()) {
      fit.algorithms.push_back(a);
      continue;
    }
    least = std::min(least, slots.needed_bytes);
    if (slots.needed_bytes <= granted) {
      least_cap = std::min(least_cap, slots.needed_cap);
      continue;
    }
    const uint64_t for_few_chunks = algo::moe_staging_for(config.shape, paths, kFewChunks);
    useful = std::min(useful, for_few_chunks);
    if (!a.dedup()) continue;
    fit.left_out += format("{}{} needs staging_bytes (MOECCL_STAGING_BYTES) of {}", fit.left_out.empty() ? "" : "; ",
                           a.name(), of_communicator(slots.needed_bytes));
    if (of_communicator(for_few_chunks) > of_communicator(slots.needed_bytes))
      fit.left_out += format(", or of {} for few chunks", of_communicator(for_few_chunks));
  }
  if (!fit.algorithms.empty()) return fit;
  if (least > granted)
    return error(moecclOutOfMemory,
                 "rows of {} bytes on {} ranks need {} bytes of staging, an operation gets {}, half of staging_bytes: "
                 "give the communicator staging_bytes (MOECCL_STAGING_BYTES) of {} or more; with {}, max_tokens "
                 "tokens cross in at most about {} chunks",
                 config.shape.widest_row(), tree.n_ranks, least, granted, of_communicator(least),
                 of_communicator(useful), kFewChunks);
  return error(moecclOutOfMemory,
               "rows of {} bytes on {} ranks need {} bytes of staging, memory_cap_bytes of {} leaves too little: give "
               "{} or more",
               config.shape.widest_row(), tree.n_ranks, least, config.memory_cap, least_cap);
}

namespace {

// Returns the memory that choices and tables take on the device (and page-locked, for the device), on the rank that
// needs the most. list_bytes: the tables on the host. Returns 0 without a CUDA driver.
uint64_t device_bytes(const MoeConfig& config, const plan::LevelTree& tree, std::span<const algo::Paths* const> paths,
                      std::span<const uint64_t> slot_rows, uint64_t list_bytes) {
  if (driver::cuda::driver() == nullptr) return 0;
  uint64_t most = 0;
  for (uint32_t r = 0; r < tree.n_ranks && r < moeccl::cuda::kMaxSources; ++r) {
    const algo::Placement seen = config.domains ? config.domains->seen_from(r, config.placement) : config.placement;
    const algo::CanonicalOrder order(tree, seen);
    uint64_t bytes = 0;
    // With more ranks there is no persistent kernel, and so no tables on the device.
    for (size_t c = 0; c < paths.size() && tree.n_ranks <= moeccl::cuda::kMaxSources; ++c) {
      const algo::RankPaths rank(*paths[c], tree, seen, r);
      const exec::TablePlan plan(
          {paths[c], &rank, &config.placement, config.domains.get(), &order, &config.shape, slot_rows[c], 0});
      bytes = std::max<uint64_t>(bytes, plan.bytes() + exec::RowTables::bytes_bound(list_bytes / 2));
    }
    bytes += exec::CudaRouting::bytes_of({&config.shape, &seen, &order, &tree, {paths.begin(), paths.end()}, r});
    most = std::max(most, bytes);
  }
  return most;
}

// Returns the most staging that one operation may get on the persistent kernel of a communicator.
uint64_t most_on_kernel(uint64_t granted) {
  if (driver::cuda::driver() == nullptr) return 0;
  const int64_t given = env().cuda_staging_bytes;
  return given > 0 ? granted_staging(static_cast<uint64_t>(given))
                   : std::max(granted, granted_staging(kStagingOverNvlink));
}

}  // namespace

Result<uint64_t> query_size(const MoeConfig& config, const plan::LevelTree& tree, uint64_t granted) {
  MOECCL_ASSIGN_OR_RETURN(const Fitting fit, fitting(config, tree, granted));
  uint64_t most = 0, most_lists = 0;
  std::vector<std::unique_ptr<algo::Paths>> all_paths;
  std::vector<const algo::Paths*> candidates;
  std::vector<uint64_t> slot_rows;
  for (const algo::MoeAlgorithm& a : fit.algorithms) {
    all_paths.push_back(std::make_unique<algo::Paths>(a, tree, config.placement, config.domains.get()));
    const algo::Paths& paths = *all_paths.back();
    MoeSlots slots(config, paths, granted);
    const uint64_t kernel_rows = kernel_slot_rows(config, paths, most_on_kernel(granted));
    const algo::MoePlanShape on_kernel = algo::moe_plan_shape(paths, config.shape.expert_major, kernel_rows);
    candidates.push_back(&paths);
    slot_rows.push_back(kernel_rows > 0 ? std::min(slots.slot_rows, kernel_rows) : slots.slot_rows);
    most_lists = std::max(most_lists, list_bytes(config, paths));
    const uint64_t staging =
        std::max(slots.staging_bytes(config), algo::moe_staging_bytes(config.shape, on_kernel, kernel_rows));
    most = std::max(most, slots.table_bytes + staging);
  }
  most += device_bytes(config, tree, candidates, slot_rows, most_lists);
  return config.memory_cap ? std::min(most, config.memory_cap) : most;
}

}  // namespace moeccl::comm
