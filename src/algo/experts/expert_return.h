// SPDX-License-Identifier: Apache-2.0
// The way back of ExpertGather: the gradients that the ranks of a domain computed for gathered experts are summed at
// each expert's owner (HybridEP's backward), as one plan.
//
// "direct": where peers' buffers can be read, the owner adds up the gradients of all holders, by ascending rank.
// "staged": the gather's links in the other direction, innermost level first. A rank that passed an expert on adds what
// comes back to its own gradients and passes the sum on, so that an expert comes back over a slow outer link once per
// group. The order is own first, then by level and rank, the same at every run; partial sums are rounded to the type.
//
// Input is [held experts][count], Output [own experts][count]; both are ordered by ascending expert number.
#pragma once

#include "src/algo/experts/expert_exchange.h"

namespace moeccl::algo {

class ExpertReturn : public ExpertExchangePlan {
 public:
  // Both references must outlive this object. Fails if the staging is too small. Deterministic: always staged.
  static Result<ExpertReturn> make(const Domains& domains, const Placement& homes, const ExpertExchange& settings);

  Program build(uint32_t rank) const;
  plan::Plan build_all() const;

 private:
  ExpertReturn(const Domains& domains, const Placement& homes, const ExpertExchange& settings);
  // Where a rank adds up what it gives back over one link, if others give the rank some of it.
  struct Sum {
    bool needed = false;
    uint32_t first_slot = 0;
  };
  uint32_t most_sources() const;
  Program build_staged(uint32_t rank) const;

  std::vector<std::vector<uint32_t>> holders_;  // [n_ranks as home] ranks that hold its experts, ascending
  std::vector<std::vector<Sum>> sums_;          // [n_ranks] parallel to sent_
};

}  // namespace moeccl::algo
