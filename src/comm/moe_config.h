// A MoE layer's configuration, checked, and the bounds on memory that follow from it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "moeccl/moe.h"
#include "src/algo/domains.h"
#include "src/algo/moe_plan.h"

namespace moeccl::comm {

struct MoeConfig {
  algo::MoeShape shape;
  moecclDataType_t type = moecclBfloat16;
  algo::Placement placement;                       // where experts are at home
  std::shared_ptr<const algo::Domains> domains;    // who else holds them; null: nobody
  std::vector<algo::MoeAlgorithm> algorithms;      // the forced one, or all that the tree offers
  uint64_t memory_cap = 0;                         // 0: none
  uint64_t scale_bytes = 0, scaled_row_bytes = 0;  // of moecclDispatchScaled; 0: there is none

  // moecclInvalidArgument names the field, its value and what is accepted.
  static Result<MoeConfig> from(const moecclMoeConfig_t* config, const plan::LevelTree& tree, bool deterministic,
                                std::shared_ptr<const algo::Domains> domains = nullptr);
  // Experts that a rank computes.
  uint64_t n_held(uint32_t rank) const;
  // Equal on ranks that gave the same.
  uint64_t hash() const;
  // Staging that one operation of this layer may use when the communicator grants `granted`.
  uint64_t staging_budget(uint64_t granted) const;
};

// A candidate's constant parts on all ranks.
struct MoeSlots {
  algo::MoePlanShape plan;
  uint64_t slot_rows = 0;
  uint64_t needed_bytes = 0;  // staging at which every routing runs, one token of each origin a chunk
  MoeSlots(const MoeConfig& config, const algo::Paths& paths, uint64_t staging_budget);
  bool enough() const { return slot_rows > 0 && slot_rows >= least_rows; }
  uint64_t least_rows = 1;
};

// The algorithms that fit `staging_budget`, or moecclOutOfMemory with the least budget at which one does.
Result<std::vector<algo::MoeAlgorithm>> fitting(const MoeConfig& config, const plan::LevelTree& tree, uint64_t budget);

// The most bytes that a layer holds on one rank, for any routing: moecclMoeQuerySize.
Result<uint64_t> query_size(const MoeConfig& config, const plan::LevelTree& tree, uint64_t granted_staging);

}  // namespace moeccl::comm
