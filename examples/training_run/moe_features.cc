// SPDX-License-Identifier: Apache-2.0
// The variants of the MoE block. They differ in where tokens go, what combine does, and how experts learn.
#include <algorithm>

#include "moe.h"

namespace training {

namespace {

// Combine delivers each sample to the rank for which the fewest rows cross slow links, and the next layer continues
// there. The residual and the shared expert's output are added at the token's first expert, because h is there.
class ReplacedBlock : public MoeBlock {
 public:
  explicit ReplacedBlock(const MoeSetup& s) : MoeBlock(s) {
    moecclReplaceConfig_t config = MOECCL_REPLACE_CONFIG_INIT;
    config.sample_tokens = shape_.sample_tokens;
    config.residual = 1;
    check(moecclReplaceCreate(&replacement_, moe_, &config), "moecclReplaceCreate", ranks_.tokens);
  }
  ~ReplacedBlock() override { (void)moecclReplaceDestroy(replacement_); }

  void move(std::vector<int32_t>& sample_at) const override {
    std::vector<int32_t> moved;
    for (int rank = 0; rank < ranks_.n; rank++)
      for (size_t i = 0; i < sample_at.size(); i++)
        if (placement_[i] == rank) moved.push_back(sample_at[i]);
    sample_at = moved;
  }
  std::pair<uint64_t, uint64_t> node_bytes() const override { return node_bytes_; }

 protected:
  // Starts the solver, which works while tokens travel and experts compute.
  void routed() override {
    ranks_.timed(Times::kRouting, "moecclReplaceBegin",
                 [&] { return moecclReplaceBegin(replacement_, routing_, nullptr, nullptr); });
  }

  void combine(const Floats& h, Floats& out) override {
    size_t n_rows = 0;
    check(moecclReplaceRows(replacement_, &n_rows), "moecclReplaceRows", ranks_.tokens);
    y_.resize(n_rows * shape_.hidden);
    check(moecclReplaceResidual(replacement_, h.data(), rows_.data(), y_.data()), "moecclReplaceResidual",
          ranks_.tokens);
    // The rows after those of dispatch are h of the tokens whose first expert is here.
    residual_.assign(y_.begin() + static_cast<ptrdiff_t>(rows_.size()), y_.end());
    residual_normed_.resize(residual_.size());
    shared_inner_.resize(n_residual() * shape_.shared_inner);
    Floats shared(residual_.size());
    norm(n_residual(), norm_, residual_.data(), residual_normed_.data());
    mlp(n_residual(), shared_, residual_normed_.data(), shared_inner_.data(), shared.data());
    add(shared.size(), shared.data(), y_.data() + rows_.size());
    ranks_.timed(Times::kCombine, "moecclReplaceCombine",
                 [&] { return moecclReplaceCombine(replacement_, y_.data(), out.data(), nullptr); });
    moecclReplaceInfo_t facts{};
    facts.size = sizeof facts;
    check(moecclReplaceGetInfo(replacement_, &facts), "moecclReplaceGetInfo", ranks_.tokens);
    node_bytes_ = {facts.node_bytes_before, facts.node_bytes_after};
    placement_.assign(facts.placement, facts.placement + facts.n_samples);
  }

  void combine_backward(const Floats& dout, Floats& dweight) override {
    dy_.resize(y_.size());
    ranks_.timed(Times::kBackward, "moecclReplaceCombineBackward", [&] {
      return moecclReplaceCombineBackward(replacement_, dout.data(), dy_.data(), y_.data(), dweight.data(), nullptr);
    });
  }

  void dispatch_backward(const Floats&, Floats& dh) override {
    float* const dresidual = dy_.data() + rows_.size();
    Floats dnormed(residual_.size(), 0.0f);
    mlp_backward(n_residual(), shared_, residual_normed_.data(), shared_inner_.data(), dresidual, dnormed.data());
    norm_backward(n_residual(), norm_, residual_.data(), dnormed.data(), dresidual);
    check(moecclReplaceResidualBackward(replacement_, dy_.data(), drows_.data(), nullptr),
          "moecclReplaceResidualBackward", ranks_.tokens);
    ranks_.timed(Times::kBackward, "moecclDispatchBackward",
                 [&] { return moecclDispatchBackward(routing_, drows_.data(), dh.data(), nullptr); });
    check(moecclReplaceResidualBackward(replacement_, dy_.data(), nullptr, dh.data()), "moecclReplaceResidualBackward",
          ranks_.tokens);
  }

 private:
  size_t n_residual() const { return residual_.size() / shape_.hidden; }

  moecclReplacement_t replacement_ = nullptr;
  std::vector<int32_t> placement_;
  std::pair<uint64_t, uint64_t> node_bytes_{0, 0};
  Floats residual_, residual_normed_;
};

// Has 1.5 times as many slots as experts. A slot takes tokens up to its capacity, and popular experts get more slots.
// Each rank's optimizer keeps a shard of every expert.
class ReplicaBlock : public MoeBlock {
 public:
  explicit ReplicaBlock(const MoeSetup& s)
      : MoeBlock(s, static_cast<size_t>(3 * s.shape.experts / s.ranks.n / 2), Bare{}),
        feature_(s.feature),
        slots_per_rank_(static_cast<int>(experts_.n_slots())),
        shard_(moecclExpertShard(shape_.expert_size(), ranks_.n)),
        shards_(static_cast<size_t>(shape_.experts) * shard_),
        shard_grads_(shards_.size()),
        shard_learner_(shards_.size()),
        popularity_(static_cast<size_t>(shape_.experts), 1),
        dropped_(popularity_.size()) {
    for (int e = 0; e < shape_.experts; e++) {
      const Floats w = initial_expert(shape_, s.layer, e);
      const size_t begin = std::min(w.size(), static_cast<size_t>(ranks_.rank) * shard_);
      std::copy(w.begin() + static_cast<ptrdiff_t>(begin),
                w.begin() + static_cast<ptrdiff_t>(std::min(w.size(), begin + shard_)),
                shards_.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(e) * shard_));
    }
    moecclMoeConfig_t config = config_of(shape_, s.algorithm);
    config.n_experts = slots_per_rank_ * ranks_.n;
    check(moecclMoeCreate(&moe_, ranks_.tokens, &config), "moecclMoeCreate", ranks_.tokens);
    place();
  }
  int64_t n_dropped() const override {
    int64_t n = 0;
    for (const int64_t d : dropped_) n += d;
    return n;
  }

  void learn(const Adam& a) override {
    const size_t size = shape_.expert_size();
    ranks_.timed(Times::kOther, "moecclExpertAllReduce", [&] {
      return moecclExpertAllReduce(experts_.grad.data(), experts_.grad.data(), size, moecclFloat32, moecclSum,
                                   &placement_, ranks_.tokens, nullptr);
    });
    ranks_.timed(Times::kOther, "moecclCollectGradients", [&] {
      return moecclCollectGradients(experts_.grad.data(), shard_grads_.data(), size, moecclFloat32, &placement_,
                                    ranks_.tokens, nullptr);
    });
    std::fill(experts_.grad.begin(), experts_.grad.end(), 0.0f);
    shard_learner_.step(a, shards_, shard_grads_);
    place();
  }

 protected:
  const std::vector<int32_t>& choose() override {
    moecclReplicaDispatch_t dispatch = MOECCL_REPLICA_DISPATCH_INIT;
    dispatch.placement = &placement_;
    dispatch.top_k = shape_.top_k;
    const double choices = static_cast<double>(gate_.expert.size()) * ranks_.n;
    dispatch.slot_capacity = static_cast<int32_t>(feature_.capacity * choices / (slots_per_rank_ * ranks_.n));
    slots_.resize(gate_.expert.size());
    ranks_.timed(Times::kRouting, "moecclChooseReplicas", [&] {
      return moecclChooseReplicas(&dispatch, gate_.expert.data(), shape_.tokens(), slots_.data(), popularity_.data(),
                                  dropped_.data(), ranks_.tokens);
    });
    return slots_;
  }

 private:
  void place() {
    if (slot_expert_.empty() || feature_.places) {
      const std::vector<double> popularity(popularity_.begin(), popularity_.end());
      std::vector<int32_t> counts(popularity.size());
      check(moecclReplicaCounts(popularity.data(), shape_.experts, slots_per_rank_ * ranks_.n, counts.data()),
            "moecclReplicaCounts");
      slot_expert_.clear();
      for (int32_t e = 0; e < shape_.experts; e++)
        slot_expert_.insert(slot_expert_.end(), static_cast<size_t>(counts[static_cast<size_t>(e)]), e);
    }
    placement_.n_experts = shape_.experts;
    placement_.slots_per_rank = slots_per_rank_;
    placement_.slot_expert = slot_expert_.data();
    ranks_.timed(Times::kOther, "moecclPlaceWeights", [&] {
      return moecclPlaceWeights(shards_.data(), experts_.value.data(), shape_.expert_size(), moecclFloat32, &placement_,
                                ranks_.tokens, nullptr);
    });
  }

  LayerFeature feature_;
  int slots_per_rank_;
  size_t shard_;
  Floats shards_, shard_grads_;  // [experts][shard]
  Learner shard_learner_;
  std::vector<int64_t> popularity_, dropped_;
  std::vector<int32_t> slot_expert_, slots_;
  moecclPlacement_t placement_ = MOECCL_PLACEMENT_INIT;
};

// Two nodes share experts: ranks at the same position in both nodes hold the experts of either. Experts travel encoded,
// as differences from their mean, while the rest of the step runs. Gradients return to the owner, which is the only
// rank to update the expert.
class DomainBlock : public MoeBlock {
 public:
  explicit DomainBlock(const MoeSetup& s) : MoeBlock(s, 0, Bare{}) {
    const int32_t domain[] = {2, 1};  // nodes, ranks of a node
    moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
    config.n_experts = shape_.experts;
    config.n_levels = 2;
    config.domain = domain;
    check(moecclHybridCreate(&hybrid_, ranks_.tokens, &config), "moecclHybridCreate", ranks_.tokens);
    moecclHybridInfo_t info{};
    info.size = sizeof info;
    check(moecclHybridGetInfo(hybrid_, &info), "moecclHybridGetInfo", ranks_.tokens);
    n_own_ = static_cast<size_t>(info.n_own);
    for (size_t i = 0; i < n_own_; i++) {
      const Floats w = initial_expert(shape_, s.layer, info.own_experts[i]);
      own_.insert(own_.end(), w.begin(), w.end());
    }
    own_grads_.resize(own_.size());
    own_learner_ = Learner(own_.size());
    experts_ = Experts(shape_, static_cast<size_t>(info.n_held));
    const moecclMoeConfig_t layer = config_of(shape_, s.algorithm);
    check(moecclHybridMoeCreate(&moe_, hybrid_, ranks_.tokens, &layer), "moecclHybridMoeCreate", ranks_.tokens);
    beside_ = ranks_.beside(moecclPriorityDP);
    moecclMigrationConfig_t migrate = MOECCL_MIGRATION_CONFIG_INIT;
    migrate.count = shape_.expert_size();
    migrate.ratio = s.feature.ratio;
    check(moecclMigrationCreate(&migration_, hybrid_, beside_, &migrate), "moecclMigrationCreate", beside_);
    mean_.resize(shape_.expert_size());
    begin_gather();
  }
  ~DomainBlock() override {
    (void)moecclMigrationDestroy(migration_);
    (void)moecclCommDestroy(beside_);
    (void)moecclHybridDestroy(hybrid_);
  }

  void forward(const Floats& h, Floats& out) override {
    if (gathering_)
      check(moecclMigrationWait(migration_, 0, nullptr, nullptr, nullptr), "moecclMigrationWait", beside_);
    gathering_ = false;
    MoeBlock::forward(h, out);
  }

  void learn(const Adam& a) override {
    ranks_.timed(Times::kOther, "moecclHybridReduce", [&] {
      return moecclHybridReduce(hybrid_, experts_.grad.data(), own_grads_.data(), shape_.expert_size(), moecclFloat32,
                                nullptr);
    });
    std::fill(experts_.grad.begin(), experts_.grad.end(), 0.0f);
    own_learner_.step(a, own_, own_grads_);
    begin_gather();
  }

 private:
  void begin_gather() {
    check(moecclSharedExpert(own_.data(), n_own_, static_cast<size_t>(shape_.experts), mean_.data(), mean_.size(),
                             moecclFloat32, beside_, nullptr),
          "moecclSharedExpert", beside_);
    check(moecclMigrationSend(migration_, 0, own_.data(), mean_.data(), nullptr), "moecclMigrationSend", beside_);
    check(moecclMigrationBeginInto(migration_, 0, mean_.data(), experts_.value.data()), "moecclMigrationBeginInto",
          beside_);
    gathering_ = true;
  }

  moecclHybrid_t hybrid_ = nullptr;
  moecclComm_t beside_ = nullptr;
  moecclMigration_t migration_ = nullptr;
  bool gathering_ = false;
  size_t n_own_ = 0;
  Floats own_, own_grads_, mean_;
  Learner own_learner_{0};
};

}  // namespace

std::unique_ptr<MoeBlock> make_moe(const MoeSetup& s) {
  switch (s.feature.way) {
    case LayerFeature::kReplaced:
      return std::make_unique<ReplacedBlock>(s);
    case LayerFeature::kReplicas:
      return std::make_unique<ReplicaBlock>(s);
    case LayerFeature::kDomains:
      return std::make_unique<DomainBlock>(s);
    case LayerFeature::kTokens:
      break;
  }
  return std::make_unique<MoeBlock>(s);
}

}  // namespace training
