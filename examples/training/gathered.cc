// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "features.h"

namespace training {
namespace {

// Experts travel to tokens (HybridEP with one domain): every rank computes its own tokens with copies of all experts.
class GatheredLayer : public MoeLayer {
 public:
  GatheredLayer(const Feature& feature, const Place& place)
      : MoeLayer(place),
        ratio_(feature.ratio),
        shared_(feature.shared),
        n_own_(place.shape.n_experts / static_cast<size_t>(place.n_ranks)),
        own_(n_own_ * kExpertSize),
        all_(place.shape.n_experts * kExpertSize),
        shared_expert_(kExpertSize, 0.0f),
        adam_(own_.size()) {
    codec_.count = kExpertSize;
    codec_.type = moecclFloat32;
    codec_.ratio = ratio_;
    for (size_t e = 0; e < n_own_; e++) {
      const Floats w = initial_expert(place.rank * static_cast<int>(n_own_) + static_cast<int>(e));
      std::copy(w.begin(), w.end(), own_.begin() + static_cast<int64_t>(e * kExpertSize));
    }
  }

  void forward(const Gate& gate, const Floats& x, Floats& out) override {
    gate_ = &gate;
    x_ = &x;
    gather();
    const size_t top_k = place_.shape.top_k;
    y_.resize(kTokens * top_k * kHidden);
    inner_.resize(kTokens * top_k * kInner);
    for (size_t i = 0; i < kTokens * top_k; i++)
      expert(i).forward(&x[i / top_k * kHidden], &inner_[i * kInner], &y_[i * kHidden]);
    for (size_t t = 0; t < kTokens; t++) {
      for (size_t j = 0; j < kHidden; j++) {
        float sum = 0;
        for (size_t i = t * top_k; i < (t + 1) * top_k; i++) sum += gate.weight[i] * y_[i * kHidden + j];
        out[t * kHidden + j] = sum + x[t * kHidden + j];
      }
    }
  }

  void backward(const Floats& dout, Floats& dx, Floats& dweight) override {
    Fixed grad(all_.size(), 0), mine(own_.size());
    float dy[kHidden], back[kHidden];
    dx = dout;
    for (size_t i = 0; i < kTokens * place_.shape.top_k; i++) {
      const size_t t = i / place_.shape.top_k;
      dweight[i] = 0;
      for (size_t j = 0; j < kHidden; j++) {
        dweight[i] += dout[t * kHidden + j] * y_[i * kHidden + j];
        dy[j] = gate_->weight[i] * dout[t * kHidden + j];
      }
      expert(i).backward(&(*x_)[t * kHidden], &inner_[i * kInner], dy,
                         &grad[static_cast<size_t>(gate_->expert[i]) * kExpertSize], back);
      for (size_t j = 0; j < kHidden; j++) dx[t * kHidden + j] += back[j];
    }
    check(moecclReduceScatter(grad.data(), mine.data(), mine.size(), moecclInt64, moecclSum, place_.comm, nullptr),
          "moecclReduceScatter", place_.comm);
    adam_.step(own_.data(), mine.data());
  }

 private:
  Expert expert(size_t i) const { return {&all_[static_cast<size_t>(gate_->expert[i]) * kExpertSize]}; }

  void gather() {
    if (ratio_ == 0) {
      check(moecclAllGather(own_.data(), all_.data(), own_.size(), moecclFloat32, place_.comm, nullptr),
            "moecclAllGather", place_.comm);
      return;
    }
    // In a large model this AllReduce runs on a stream that overlaps with the backward pass.
    if (shared_)
      check(moecclSharedExpert(own_.data(), n_own_, place_.shape.n_experts, shared_expert_.data(), kExpertSize,
                               moecclFloat32, place_.comm, nullptr),
            "moecclSharedExpert", place_.comm);
    size_t bytes = 0;
    check(moecclCodecBytes(&codec_, &bytes), "moecclCodecBytes");
    std::vector<unsigned char> mine(bytes * n_own_), all(bytes * place_.shape.n_experts);
    for (size_t e = 0; e < n_own_; e++)
      check(moecclCodecEncode(&codec_, &own_[e * kExpertSize], shared_expert_.data(), &mine[e * bytes], bytes, nullptr),
            "moecclCodecEncode");
    check(moecclAllGather(mine.data(), all.data(), mine.size(), moecclUint8, place_.comm, nullptr), "moecclAllGather",
          place_.comm);
    for (size_t e = 0; e < place_.shape.n_experts; e++)
      check(moecclCodecDecode(&codec_, &all[e * bytes], bytes, shared_expert_.data(), &all_[e * kExpertSize]),
            "moecclCodecDecode");
  }

  double ratio_;
  bool shared_;
  size_t n_own_;
  Floats own_, all_, shared_expert_;
  Adam adam_;
  moecclCodec_t codec_ = MOECCL_CODEC_INIT;
  const Gate* gate_ = nullptr;
  const Floats* x_ = nullptr;
  Floats y_, inner_;
};

}  // namespace

std::unique_ptr<MoeLayer> make_gathered_layer(const Feature& feature, const Place& place) {
  return std::make_unique<GatheredLayer>(feature, place);
}

}  // namespace training
