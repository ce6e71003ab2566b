// AllGather of experts inside their domains (HybridEP, Section IV-A), level after level, as one plan. Outer levels come
// first and inner ones pass on what came: over each link of Algorithm 1 goes one message a chunk, with all that its
// sender holds.
//
// Input is [own experts][count], Output [held experts][count]; both by ascending expert number, so that Output is what
// a MoE layer of the same domains calls its local experts.
#pragma once

#include "src/algo/builder.h"
#include "src/plan/checker.h"
#include "src/routing/domains.h"

namespace moeccl::algo {

class ExpertGather {
 public:
  // Both live as long as this object. Fails when the staging is too small.
  static Result<ExpertGather> make(const Domains& domains, const Placement& homes, const ExpertExchange& settings);

  // "direct": where peers' buffers can be read, each expert is copied straight from its owner's Input; else "staged".
  const char* name() const { return direct_ ? "direct" : "staged"; }
  const Shape& shape() const { return shape_; }
  Chunking chunking() const;
  Program build(uint32_t rank) const;
  uint64_t hash() const;
  plan::Plan build_all() const;
  // The experts that a rank holds afterwards, ascending.
  const std::vector<uint32_t>& held(uint32_t rank) const { return held_[rank]; }
  plan::BlockExpectation expectation() const;

 private:
  ExpertGather(const Domains& domains, const Placement& homes, const ExpertExchange& settings);
  struct Arrival {
    uint32_t from = 0, level = 0, first_slot = 0;
    std::vector<uint32_t> experts;
  };
  struct Departure {
    uint32_t to = 0, level = 0, first_slot = 0;  // of the receiver
  };
  std::vector<uint32_t> experts_of(uint32_t from, uint32_t level) const;
  uint32_t out_block(uint32_t rank, uint32_t expert) const;
  Program build_direct(uint32_t rank) const;
  Program build_staged(uint32_t rank) const;

  const Domains& domains_;
  const Placement& homes_;
  Shape shape_;
  Layout layout_;
  bool direct_ = false;
  std::vector<std::vector<uint32_t>> held_;         // [n_ranks]
  std::vector<std::vector<Arrival>> arrivals_;      // [n_ranks] by level
  std::vector<std::vector<Departure>> departures_;  // [n_ranks] by level
};

}  // namespace moeccl::algo
