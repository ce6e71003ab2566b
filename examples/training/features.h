// SPDX-License-Identifier: Apache-2.0
// The variants of the MoE layer. All compute the same function, out = x + sum of weight * expert(x), and its gradient.
#pragma once

#include <memory>
#include <string>

#include "model.h"

namespace training {

inline constexpr const char* kTopology = "node:2 gpu:2";

struct Feature {
  enum Kind {
    kTokens,      // tokens travel to experts: dispatch and combine with `algorithm`
    kReplicated,  // tokens travel to replicas of experts, which are placed by popularity every `every` steps
    kSwapped,     // as kTokens, and two experts trade places when that makes a step's tokens travel less
    kReplaced,    // combine delivers samples to the home that the solver chooses
    kHybrid,      // experts travel inside domains and tokens between them (HybridEP); gradients return to the owners
    kGathered     // experts travel to tokens, compressed by a factor of `ratio`
  };
  std::string name;
  Kind kind = kTokens;
  std::string algorithm = "flat";
  int slots = 3;        // kReplicated: slots per rank
  int every = 1;        // kReplicated: steps between placements; 0: fixed, with equally many replicas of each expert
  double capacity = 0;  // kReplicated: capacity factor of a slot; 0: no limit, so no token is dropped
  bool solve = true;    // kReplaced: let the solver choose; false: every sample stays
  int32_t domain[2] = {1, 1};  // kHybrid: how many nodes, and ranks of a node, share experts
  double ratio = 0;            // kGathered, kHybrid: compression ratio; 0: experts travel without the codec
  bool back = false;           // kHybrid: gradients return compressed by the ratio too, with error feedback
  bool shared = true;          // kGathered: encode differences from a shared expert; false: from zero
};

// This rank's position and communicator, and the shape of the layer.
struct Place {
  int rank, n_ranks;
  moecclComm_t comm;
  Shape shape = {};
  int n_experts() const { return static_cast<int>(shape.n_experts); }
  int top_k() const { return static_cast<int>(shape.top_k); }
};

class MoeLayer {
 public:
  virtual ~MoeLayer() = default;
  // Computes out[tokens][hidden] from x with the gate's choices.
  virtual void forward(const Gate& gate, const Floats& x, Floats& out) = 0;
  // Computes dx[tokens][hidden] and dweight[tokens][top_k] of the input tokens, and updates the experts.
  virtual void backward(const Floats& dout, Floats& dx, Floats& dweight) = 0;
  // Returns the numbers of the samples that out's tokens belong to, in order.
  virtual std::vector<int32_t> samples() const {
    std::vector<int32_t> s;
    for (int i = 0; i < kSamplesPerRank; i++) s.push_back(place_.rank * kSamplesPerRank + i);
    return s;
  }
  // Returns the bytes between nodes that re-placing has saved so far, and how many there would be without it.
  virtual std::pair<uint64_t, uint64_t> saved() const { return {0, 0}; }
  // Returns the choices that capacity has dropped so far, and how many there were, over all ranks.
  virtual std::pair<int64_t, int64_t> dropped() const { return {0, 0}; }
  // Returns how many pairs of experts have traded places.
  virtual int n_swaps() const { return 0; }

 protected:
  explicit MoeLayer(const Place& place) : place_(place) {}
  Place place_;
};

std::unique_ptr<MoeLayer> make_layer(const Feature& feature, const Place& place);
std::unique_ptr<MoeLayer> make_gathered_layer(const Feature& feature, const Place& place);  // kGathered

}  // namespace training
