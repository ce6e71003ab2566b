// SPDX-License-Identifier: Apache-2.0
// The variants of a layer's MoE half: out = h + shared(norm(h)) + sum of weight * expert(norm(h)).
//
// Dispatch sends h rather than norm(h). The expert's rank applies the norm again, which costs little, and then has h as
// the residual. A combine that re-places samples therefore carries the residual along without an extra row.
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

// The top_k experts of each token and the softmax of their logits.
class Gate {
 public:
  Gate(const MoeSetup& s);
  // z[tokens][hidden]
  void forward(const Floats& z);
  // From the gradients of the weights, adds to the gradients of the gate's matrix and of z.
  void backward(const Floats& z, const Floats& dweight, Floats& dz) const;
  std::vector<int32_t> expert;  // [tokens][top_k]
  Floats weight;

 private:
  Shape shape_;
  Weight matrix_;
  Floats popularity_;  // of each expert: decides which experts are chosen, not how they are weighted; not learned
};

// The experts that this rank computes, slot after slot, each as one row of weights: up[hidden][inner],
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
// Returns the initial weights of expert e, the same on every rank.
Floats initial_expert(const Shape& shape, size_t layer, int e);

// The optimizer state of weights that only one rank updates.
class Learner {
 public:
  explicit Learner(size_t n) : first(n), second(n) {}
  void step(const Adam& a, Floats& value, Floats& grad) {
    adam(a, value.size(), value.data(), grad.data(), first.data(), second.data());
  }
  Floats first, second;
};

// Tokens travel to experts, and each expert is on one rank.
class MoeBlock {
 public:
  static size_t n_weights(const Shape& shape);
  explicit MoeBlock(const MoeSetup& s);
  virtual ~MoeBlock();
  MoeBlock(const MoeBlock&) = delete;
  MoeBlock& operator=(const MoeBlock&) = delete;

  virtual void forward(const Floats& h, Floats& out);
  // Writes dh[tokens][hidden] of the block's input tokens.
  virtual void backward(const Floats& dout, Floats& dh);
  virtual void learn(const Adam& a);
  // sample_at[samples of all ranks] is the sample at each place, in rank order. A block whose output order differs from
  // its input order updates it.
  virtual void move(std::vector<int32_t>&) const {}
  // Attaches the block's tensors to an expert swap.
  virtual void attach(moecclExpertSwap_t swap);
  // Returns combine's bytes between nodes in the last step, as the solver counts them: with every sample at its old
  // home, and as they were sent.
  virtual std::pair<uint64_t, uint64_t> node_bytes() const { return {0, 0}; }
  // Returns how many choices had no room in the last step, over all ranks.
  virtual int64_t n_dropped() const { return 0; }
  float* expert_values() { return experts_.value.data(); }
  const Floats& expert_grads() const { return experts_.grad; }

 protected:
  struct Bare {};  // tag: without a layer of the library, because the variant creates its own
  MoeBlock(const MoeSetup& s, size_t n_slots, Bare);
  static moecclMoeConfig_t config_of(const Shape& shape, const char* algorithm);

  // Variants override these.
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
  Floats rows_, rows_normed_, inner_, y_, dy_, drows_;  // of the rows that dispatch delivered
};

std::unique_ptr<MoeBlock> make_moe(const MoeSetup& s);

}  // namespace training
