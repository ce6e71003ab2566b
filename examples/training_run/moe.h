// SPDX-License-Identifier: Apache-2.0
// The MoE half of a layer in its variants: out = h + shared(norm(h)) + sum of weight * expert(norm(h)).
//
// What dispatch sends is h and not norm(h): the rank of the expert applies the norm again, which costs little, and then
// h is there as the residual. So a combine that re-places samples takes the residual along without a row of its own.
#pragma once

#include <memory>
#include <utility>

#include "corpus.h"
#include "dense.h"

namespace training {

struct MoeSetup {
  const Shape& shape;
  const Ranks& ranks;
  const Corpus& corpus;
  size_t layer;
  const LayerFeature& feature;
  const char* algorithm;
  DensePart& part;
};

// top_k experts of each token and the softmax of their logits.
class Gate {
 public:
  Gate(const MoeSetup& s);
  // z[tokens][hidden]
  void forward(const Floats& z);
  // From the gradients of the weights: the matrix's gradient, and dz += its share.
  void backward(const Floats& z, const Floats& dweight, Floats& dz) const;
  std::vector<int32_t> expert;  // [tokens][top_k]
  Floats weight;

 private:
  Shape shape_;
  Weight matrix_;
};

// The experts that this rank computes with, slot after slot, as one row of weights each: up[hidden][inner],
// down[inner][hidden].
class Experts {
 public:
  Experts(const Shape& shape, size_t n_slots);
  Mlp slot(size_t s);
  size_t n_slots() const { return value.size() / shape_.expert_size(); }
  Floats value, grad;

 private:
  Shape shape_;
};
// Of expert e, the same wherever it is computed.
Floats initial_expert(const Shape& shape, size_t layer, int e);

// Weights that one rank alone learns.
class Learner {
 public:
  explicit Learner(size_t n) : first(n), second(n) {}
  void step(const Adam& a, Floats& value, Floats& grad) {
    adam(a, value.size(), value.data(), grad.data(), first.data(), second.data());
  }
  Floats first, second;
};

// Tokens travel to experts, each of which is on one rank.
class MoeBlock {
 public:
  static size_t n_weights(const Shape& shape);
  explicit MoeBlock(const MoeSetup& s);
  virtual ~MoeBlock();
  MoeBlock(const MoeBlock&) = delete;
  MoeBlock& operator=(const MoeBlock&) = delete;

  virtual void forward(const Floats& h, Floats& out);
  // dh[tokens][hidden] is written, for the tokens that came in.
  virtual void backward(const Floats& dout, Floats& dh);
  virtual void learn(const Adam& a);
  // sample_at[samples of all ranks]: which sample is at each place, the first rank's first. The block changes it when
  // its output is in another order than its input.
  virtual void move(std::vector<int32_t>&) const {}
  // For expert swap.
  virtual void attach(moecclExpertSwap_t swap);
  // Of the last step, as the solver counts: combine's bytes between nodes with every sample at its old home, and as
  // they were.
  virtual std::pair<uint64_t, uint64_t> node_bytes() const { return {0, 0}; }
  // Choices that had no room in the last step, over all ranks.
  virtual int64_t n_dropped() const { return 0; }
  float* expert_values() { return experts_.value.data(); }
  const Floats& expert_grads() const { return experts_.grad; }

 protected:
  struct Bare {};  // without a layer of the library: the variant makes its own
  MoeBlock(const MoeSetup& s, size_t n_slots, Bare);
  static moecclMoeConfig_t config_of(const Shape& shape, const char* algorithm);

  // What variants change.
  virtual const std::vector<int32_t>& choose() { return gate_.expert; }
  virtual void routed() {}
  virtual void combine(const Floats& h, Floats& out);
  virtual void combine_backward(const Floats& dout, Floats& dweight);
  virtual void dispatch_backward(const Floats& dout, Floats& dh);

  void route();
  template <class Body>
  void for_each_slot(Body&& body);

  Shape shape_;
  const Ranks& ranks_;
  Norm norm_;
  Gate gate_;
  Mlp shared_;
  Experts experts_;
  Learner learner_;
  moecclMoe_t moe_ = nullptr;
  moecclRouting_t routing_ = nullptr;
  moecclRoutingInfo_t info_{};
  Floats h_, normed_, shared_inner_;                    // of this rank's tokens
  Floats rows_, rows_normed_, inner_, y_, dy_, drows_;  // of what dispatch brought
};

std::unique_ptr<MoeBlock> make_moe(const MoeSetup& s);

}  // namespace training
