// SPDX-License-Identifier: Apache-2.0
// A MoE layer's configuration, checked, and the bounds on memory that follow from it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "moeccl/moe.h"
#include "src/algo/moe_plan.h"
#include "src/routing/domains.h"

namespace moeccl::comm {

struct MoeConfig {
  algo::MoeShape shape;
  moecclDataType_t type = moecclBfloat16;
  algo::Placement placement;                       // where experts are at home
  std::shared_ptr<const algo::Domains> domains;    // who else holds them; null: nobody
  std::vector<algo::MoeAlgorithm> algorithms;      // the forced one, or all that the tree offers
  uint64_t memory_cap = 0;                         // 0: none
  bool trials = true;                              // of plans whose prices lie close
  uint64_t scale_bytes = 0, scaled_row_bytes = 0;  // of moecclDispatchScaled; 0: there is none

  // moecclInvalidArgument names the field, its value and what is accepted.
  static Result<MoeConfig> from(const moecclMoeConfig_t* config, const plan::LevelTree& tree, bool deterministic,
                                std::shared_ptr<const algo::Domains> domains = nullptr);
  // Experts that a rank computes.
  uint64_t n_held(uint32_t rank) const;
  // Equal on ranks that gave the same.
  uint64_t hash() const;
};

// What a communicator of `staging_bytes` grants to one operation: half, in whole cache lines.
inline uint64_t granted_staging(uint64_t staging_bytes) { return staging_bytes / 128 * 64; }

// A candidate's constant parts on all ranks. That it fits is decided here alone, for moecclMoeCheck, moecclMoeQuerySize
// and moecclMoeCreate. Device memory is left out: ranks may differ in it, and must not differ in this.
struct MoeSlots {
  algo::MoePlanShape plan;
  uint64_t table_bytes = 0;  // on the host, at most, for any routing: tables and records
  uint64_t budget = 0;       // what of the granted staging and of the cap this layer's staging may take
  uint64_t slot_rows = 0;
  uint64_t least_rows = 1;
  uint64_t needed_bytes = 0;  // staging at which every routing runs, one token of each origin a chunk
  uint64_t needed_cap = 0;    // the least memory_cap_bytes with which it fits, where enough is granted
  MoeSlots(const MoeConfig& config, const algo::Paths& paths, uint64_t granted);
  bool enough() const { return slot_rows > 0 && slot_rows >= least_rows; }
  uint64_t staging_bytes(const MoeConfig& config) const {
    return algo::moe_staging_bytes(config.shape, plan, slot_rows);
  }
};

// The algorithms that fit, or moecclOutOfMemory with the least that is needed and where to give it.
Result<std::vector<algo::MoeAlgorithm>> fitting(const MoeConfig& config, const plan::LevelTree& tree, uint64_t granted);

// The most bytes that a layer holds on one rank, for any routing: moecclMoeQuerySize.
Result<uint64_t> query_size(const MoeConfig& config, const plan::LevelTree& tree, uint64_t granted);

}  // namespace moeccl::comm
