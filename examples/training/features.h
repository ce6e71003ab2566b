// SPDX-License-Identifier: Apache-2.0
// The MoE layer in its variants. Each does the same to the model: out = x + sum of weight * expert(x), and back.
#pragma once

#include <memory>
#include <string>

#include "model.h"

namespace training {

inline constexpr const char* kTopology = "node:2 gpu:2";

struct Feature {
  enum Kind {
    kTokens,      // tokens travel to experts: dispatch and combine of `algorithm`
    kReplicated,  // the same to replicas of experts, placed anew at every step by what is popular
    kSwapped,     // the same, and experts change places when that makes a step's tokens travel less
    kReplaced,    // combine takes samples to the home that the solver chooses
    kHybrid,      // experts travel inside domains, tokens between them (HybridEP), and gradients back to the owners
    kGathered     // experts travel to tokens, compressed `ratio` times
  };
  std::string name;
  Kind kind = kTokens;
  std::string algorithm = "flat";
  int slots = 3;               // kReplicated: of each rank
  int every = 1;               // kReplicated: steps between placements; 0: replicas stay, as many of each expert
  double capacity = 0;         // kReplicated: factor; 0: no token is dropped
  bool solve = true;           // kReplaced: else every sample stays
  int32_t domain[2] = {1, 1};  // kHybrid: nodes and ranks of a node that share experts
  double ratio = 0;            // kGathered, kHybrid: 0: as they are, without the codec
  bool shared = true;          // kGathered: residuals to a shared expert; else to zero
};

// The samples whose tokens are on this rank, before and after the layer.
struct Place {
  int rank, n_ranks;
  moecclComm_t comm;
};

class MoeLayer {
 public:
  virtual ~MoeLayer() = default;
  // out[tokens][hidden] of x with the gate's choices.
  virtual void forward(const Gate& gate, const Floats& x, Floats& out) = 0;
  // dx[tokens][hidden] and dweight[tokens][top_k] of the tokens that came in; experts learn.
  virtual void backward(const Floats& dout, Floats& dx, Floats& dweight) = 0;
  // Numbers of the samples that out's tokens belong to, in order.
  virtual std::vector<int32_t> samples() const {
    std::vector<int32_t> s;
    for (int i = 0; i < kSamplesPerRank; i++) s.push_back(place_.rank * kSamplesPerRank + i);
    return s;
  }
  // Bytes between nodes that re-placing saved so far, of how many.
  virtual std::pair<uint64_t, uint64_t> saved() const { return {0, 0}; }
  // Choices that capacity dropped so far, of how many, over all ranks.
  virtual std::pair<int64_t, int64_t> dropped() const { return {0, 0}; }
  // Pairs of experts that have changed places.
  virtual int n_swaps() const { return 0; }

 protected:
  explicit MoeLayer(const Place& place) : place_(place) {}
  Place place_;
};

std::unique_ptr<MoeLayer> make_layer(const Feature& feature, const Place& place);

}  // namespace training
