// SPDX-License-Identifier: Apache-2.0
// The checked configuration of a MoE layer, and the bounds on memory that follow from it.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "moeccl/moe.h"
#include "src/algo/moe_plan.h"
#include "src/routing/domains.h"

namespace moeccl::comm {

// Flat with MoeShape::by_choice. It is never chosen by price.
inline constexpr const char* kOrderedName = "flat:ordered";

struct MoeConfig {
  algo::MoeShape shape;
  moecclDataType_t type = moecclBfloat16;
  algo::Placement placement;                       // the home of each expert
  std::shared_ptr<const algo::Domains> domains;    // the ranks that hold copies of experts; null: no copies
  std::vector<algo::MoeAlgorithm> algorithms;      // the only one to run, or every algorithm that the tree offers
  uint64_t memory_cap = 0;                         // 0: no cap
  bool trials = true;                              // run trials of plans whose prices lie close together
  uint64_t scale_bytes = 0, scaled_row_bytes = 0;  // for moecclDispatchScaled; 0: without scales

  // The moecclInvalidArgument error names the field, its value and the values that are accepted.
  static Result<MoeConfig> from(const moecclMoeConfig_t* config, const plan::LevelTree& tree, bool deterministic,
                                std::shared_ptr<const algo::Domains> domains = nullptr);
  // Leaves only this algorithm. The error says why the layer cannot run it.
  Status narrow_to(std::string_view algorithm, const plan::LevelTree& tree);
  // Returns the number of experts that a rank computes.
  uint64_t n_held(uint32_t rank) const;
  // Returns the same value on ranks that gave the same configuration.
  uint64_t hash() const;
};

// Returns whether a config leaves the choice of the algorithm open.
bool leaves_algorithm_open(const moecclMoeConfig_t& config);

// Returns the bytes that a communicator with `staging_bytes` grants to one operation: half, in whole cache lines.
inline uint64_t granted_staging(uint64_t staging_bytes) { return staging_bytes / 128 * 64; }

// The staging that one operation may use: in the memory of the communicator, and in that of the persistent kernel on
// CUDA memory (0: there is none). The kernel's may be larger, and its chunks longer.
struct GrantedStaging {
  uint64_t host = 0, kernel = 0;
};

// The parts of a candidate that are the same on all ranks. Only this struct decides whether a candidate fits, for
// moecclMoeCheck, moecclMoeQuerySize and moecclMoeCreate. It leaves device memory out, because ranks may differ in that
// but must agree on this decision.
struct MoeSlots {
  algo::MoePlanShape plan;
  uint64_t table_bytes = 0;   // upper bound on host memory for tables and records of any routing
  uint64_t budget = 0;        // bytes that the granted staging and the cap leave to the layer's staging
  uint64_t slot_rows = 0;     // 0: too little staging
  uint64_t needed_bytes = 0;  // staging with which every routing runs, in chunks of one token of each origin
  uint64_t needed_cap = 0;    // the least memory_cap_bytes with which the candidate fits, if enough staging is granted
  MoeSlots(const MoeConfig& config, const algo::Paths& paths, uint64_t granted);
  bool enough() const { return slot_rows > 0; }
  uint64_t staging_bytes(const MoeConfig& config) const {
    return algo::moe_staging_bytes(config.shape, plan, slot_rows);
  }
};

// Returns the rows of a candidate's slot on the persistent kernel, or 0 if that has too little staging. All ranks get
// the same number, because they have agreed on the kernel's staging.
uint64_t kernel_slot_rows(const MoeConfig& config, const algo::Paths& paths, uint64_t granted);

// Returns the algorithms that fit, or moecclOutOfMemory with the least memory that is needed and the setting to raise.
struct Fitting {
  std::vector<algo::MoeAlgorithm> algorithms;
  std::string left_out;  // which hierarchical algorithms do not fit, and the staging_bytes that they need; or empty
};
Result<Fitting> fitting(const MoeConfig& config, const plan::LevelTree& tree, uint64_t granted);

// Returns the most bytes that a layer holds on one rank for any routing (moecclMoeQuerySize).
Result<uint64_t> query_size(const MoeConfig& config, const plan::LevelTree& tree, uint64_t granted);

}  // namespace moeccl::comm
