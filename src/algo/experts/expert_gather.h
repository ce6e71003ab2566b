// SPDX-License-Identifier: Apache-2.0
// AllGather of experts inside their domains (HybridEP, Section IV-A), level after level, as one plan. Outer levels come
// first, and inner ones pass on what came: each link of Algorithm 1 carries one message per chunk, with everything that
// its sender holds.
//
// Input is [own experts][count], Output [held experts][count]; both are ordered by ascending expert number, so that
// Output is what a MoE layer of the same domains calls its local experts.
#pragma once

#include "src/algo/experts/expert_exchange.h"

namespace moeccl::algo {

class ExpertGather : public ExpertExchangePlan {
 public:
  // Both references must outlive this object. Fails if the staging is too small.
  static Result<ExpertGather> make(const Domains& domains, const Placement& homes, const ExpertExchange& settings);

  Program build(uint32_t rank) const;
  plan::Plan build_all() const;

 private:
  ExpertGather(const Domains& domains, const Placement& homes, const ExpertExchange& settings);
  Program build_staged(uint32_t rank) const;
};

}  // namespace moeccl::algo
