// SPDX-License-Identifier: Apache-2.0
#include "features.h"

#include <algorithm>
#include <cstring>

namespace training {

namespace {

// The base of all variants in which tokens travel to experts. It addresses experts as slots: a slot is expert e itself
// or a replica of one.
class TokenLayer : public MoeLayer {
 public:
  TokenLayer(const Feature& feature, const Place& place, int slots_per_rank)
      : MoeLayer(place), slots_(slots_per_rank), weights_(static_cast<size_t>(slots_) * kExpertSize) {
    if (feature.kind == Feature::kHybrid) return;  // HybridLayer creates its own layer
    std::vector<int32_t> owner;
    for (int s = 0; s < slots_ * place.n_ranks; s++) owner.push_back(s / slots_);
    moecclMoeConfig_t config = layer_config(feature);
    config.n_experts = static_cast<int32_t>(owner.size());
    config.expert_rank = owner.data();
    check(moecclMoeCreate(&moe_, place.comm, &config), "moecclMoeCreate", place.comm);
  }
  moecclMoeConfig_t layer_config(const Feature& feature) const {
    moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
    config.hidden_bytes = kHidden * sizeof(float);
    config.type = moecclFloat32;
    config.top_k = place_.top_k();
    config.max_tokens = kTokens;
    config.layout = moecclLayoutExpertMajor;
    config.algorithm = feature.algorithm.c_str();
    return config;
  }
  ~TokenLayer() override {
    if (routing_ != nullptr) (void)moecclRoutingDestroy(routing_);
    (void)moecclMoeDestroy(moe_);
  }

  void forward(const Gate& gate, const Floats& x, Floats& out) override {
    route(choose_slots(gate), gate.weight);
    rows_.resize(info_.n_rows * kHidden);
    check(moecclDispatch(routing_, x.data(), rows_.data(), nullptr), "moecclDispatch", place_.comm);
    run_experts();
    combine(x, out);
  }

  void backward(const Floats& dout, Floats& dx, Floats& dweight) override {
    combine_backward(dout, dweight);
    grad_.assign(weights_.size(), 0);
    drows_.assign(rows_.size(), 0);
    for_each_row([&](size_t slot, size_t row) {
      Expert{&weights_[slot * kExpertSize]}.backward(&rows_[row * kHidden], &inner_[row * kInner], &dy_[row * kHidden],
                                                     &grad_[slot * kExpertSize], &drows_[row * kHidden]);
    });
    dispatch_backward(dout, dx);
    learn();
  }

 protected:
  virtual std::vector<int32_t> choose_slots(const Gate& gate) { return gate.expert; }
  virtual void combine(const Floats& x, Floats& out) {
    check(moecclCombine(routing_, y_.data(), out.data(), nullptr), "moecclCombine", place_.comm);
    for (size_t i = 0; i < out.size(); i++) out[i] += x[i];
  }
  virtual void combine_backward(const Floats& dout, Floats& dweight) {
    dy_.resize(y_.size());
    check(moecclCombineBackward(routing_, dout.data(), dy_.data(), y_.data(), dweight.data(), nullptr),
          "moecclCombineBackward", place_.comm);
  }
  virtual void dispatch_backward(const Floats& dout, Floats& dx) {
    check(moecclDispatchBackward(routing_, drows_.data(), dx.data(), nullptr), "moecclDispatchBackward", place_.comm);
    for (size_t i = 0; i < dx.size(); i++) dx[i] += dout[i];
  }
  virtual void learn() = 0;
  virtual void routed() {}

  void route(const std::vector<int32_t>& index, const Floats& weight) {
    const moecclResult_t made = routing_ == nullptr
                                    ? moecclRoutingCreate(&routing_, moe_, index.data(), weight.data(), kTokens)
                                    : moecclRoutingUpdate(routing_, index.data(), weight.data(), kTokens);
    check(made, "moecclRoutingUpdate", place_.comm);
    info_.size = sizeof info_;
    check(moecclRoutingGetInfo(routing_, &info_), "moecclRoutingGetInfo", place_.comm);
    routed();
  }
  template <class Body>
  void for_each_row(Body&& body) const {
    for (size_t s = 0; s < static_cast<size_t>(info_.n_local_experts); s++)
      for (int64_t r = info_.expert_offsets[s]; r < info_.expert_offsets[s + 1]; r++) body(s, static_cast<size_t>(r));
  }
  void run_experts() {
    y_.resize(rows_.size());
    inner_.resize(info_.n_rows * kInner);
    for_each_row([&](size_t slot, size_t row) {
      Expert{&weights_[slot * kExpertSize]}.forward(&rows_[row * kHidden], &inner_[row * kInner], &y_[row * kHidden]);
    });
  }

  int slots_;
  moecclMoe_t moe_ = nullptr;
  moecclRouting_t routing_ = nullptr;
  moecclRoutingInfo_t info_{};
  Floats weights_;                        // [slots][kExpertSize]
  Fixed grad_;                            // same shape
  Floats rows_, inner_, y_, dy_, drows_;  // rows of this rank's slots
};

// Each expert lives on one rank, and only that rank updates it.
class OwnedLayer : public TokenLayer {
 public:
  OwnedLayer(const Feature& feature, const Place& place)
      : TokenLayer(feature, place, place.n_experts() / place.n_ranks), adam_(weights_.size()) {
    for (int s = 0; s < slots_; s++) {
      const Floats w = initial_expert(place.rank * slots_ + s);
      std::copy(w.begin(), w.end(), weights_.begin() + s * kExpertSize);
    }
  }

 protected:
  void learn() override { adam_.step(weights_.data(), grad_.data()); }
  Adam adam_;
};

// HierMoE's expert swap. Every kEvery steps, the counts of all ranks' choices determine which two experts should trade
// places, and the two ranks that hold them exchange weights and optimizer state.
class SwappedLayer : public OwnedLayer {
 public:
  static constexpr int kEvery = 3;
  SwappedLayer(const Feature& feature, const Place& place) : OwnedLayer(feature, place) {
    for (int32_t e = 0; e < place.n_experts(); e++) slot_.push_back(e);
  }
  int n_swaps() const override { return n_swaps_; }

 protected:
  std::vector<int32_t> choose_slots(const Gate& gate) override {
    if (n_steps_++ % kEvery == 0) swap_best(gate);
    std::vector<int32_t> chosen;
    for (const int32_t e : gate.expert) chosen.push_back(slot_[static_cast<size_t>(e)]);
    return chosen;
  }

 private:
  void swap_best(const Gate& gate) {
    const int32_t groups[] = {2, place_.n_ranks};  // nodes, ranks
    moecclSwapProblem_t problem = MOECCL_SWAP_PROBLEM_INIT;
    problem.n_experts = place_.n_experts();
    problem.top_k = place_.top_k();
    problem.n_levels = 2;
    problem.n_groups = groups;
    problem.placement = slot_.data();
    problem.row_bytes = kHidden * sizeof(float);
    size_t n = 0, count_bytes = 0, solve_bytes = 0;
    check(moecclSwapCountsLength(&problem, &n), "moecclSwapCountsLength");
    check(moecclSwapCountWorkspace(&problem, &count_bytes), "moecclSwapCountWorkspace");
    check(moecclSolveSwapWorkspace(&problem, &solve_bytes), "moecclSolveSwapWorkspace");
    std::vector<int32_t> counts(n);
    std::vector<uint64_t> work(std::max(count_bytes, solve_bytes) / sizeof(uint64_t) + 1);
    const size_t work_bytes = work.size() * sizeof(uint64_t);
    check(moecclSwapCount(&problem, gate.expert.data(), kTokens, counts.data(), work.data(), work_bytes),
          "moecclSwapCount");
    check(moecclAllReduce(counts.data(), counts.data(), n, moecclInt32, moecclSum, place_.comm, nullptr),
          "moecclAllReduce", place_.comm);
    // All ranks solve the same problem and get the same pair.
    int32_t pair[2] = {-1, -1};
    moecclSwapAnswer_t answer{};
    answer.size = sizeof answer;
    check(moecclSolveSwap(&problem, counts.data(), pair, &answer, work.data(), work_bytes), "moecclSolveSwap");
    if (pair[0] < 0) return;
    int32_t &a = slot_[static_cast<size_t>(pair[0])], &b = slot_[static_cast<size_t>(pair[1])];
    exchange(a, b);
    std::swap(a, b);
    n_swaps_++;
  }

  // Swaps the contents of two slots.
  void exchange(int32_t a, int32_t b) {
    const bool has_a = a / slots_ == place_.rank, has_b = b / slots_ == place_.rank;
    if (!has_a && !has_b) return;
    Floats* parts[] = {&weights_, &adam_.moments()[0], &adam_.moments()[1]};
    const auto at = [&](Floats& part, int32_t slot) { return part.begin() + slot % slots_ * kExpertSize; };
    if (has_a && has_b) {
      for (Floats* part : parts) std::swap_ranges(at(*part, a), at(*part, a) + kExpertSize, at(*part, b));
      return;
    }
    const int32_t mine = has_a ? a : b;
    const int peer = (has_a ? b : a) / slots_;
    Floats given, got(3 * kExpertSize);
    for (Floats* part : parts) given.insert(given.end(), at(*part, mine), at(*part, mine) + kExpertSize);
    check(moecclGroupStart(), "moecclGroupStart");
    check(moecclSend(given.data(), given.size(), moecclFloat32, peer, place_.comm, nullptr), "moecclSend", place_.comm);
    check(moecclRecv(got.data(), got.size(), moecclFloat32, peer, place_.comm, nullptr), "moecclRecv", place_.comm);
    check(moecclGroupEnd(), "moecclGroupEnd");
    auto from = got.begin();
    for (Floats* part : parts) {
      std::copy(from, from + kExpertSize, at(*part, mine));
      from += kExpertSize;
    }
  }

  std::vector<int32_t> slot_;  // the slot of each expert
  size_t n_steps_ = 0;
  int n_swaps_ = 0;
};

// Experts have replicas. Gradients are summed over the replicas of an expert, and each rank's optimizer keeps a shard
// of every expert. The weights assembled from the shards fill the slots of the next step's placement.
class ReplicatedLayer : public TokenLayer {
 public:
  ReplicatedLayer(const Feature& feature, const Place& place)
      : TokenLayer(feature, place, feature.slots),
        every_(feature.every),
        // The capacity of a slot (Section 3.4).
        slot_capacity_(static_cast<int32_t>(feature.capacity * kTokens * place.top_k() / feature.slots)),
        shard_(moecclExpertShard(kExpertSize, place.n_ranks)),
        shards_(place.shape.n_experts * shard_),
        adam_(shards_.size()),
        popularity_(place.shape.n_experts, 1) {
    for (int e = 0; e < place.n_experts(); e++) {
      const Floats w = initial_expert(e);
      const size_t begin = std::min(w.size(), static_cast<size_t>(place.rank) * shard_);
      const size_t end = std::min(w.size(), begin + shard_);
      std::copy(w.begin() + static_cast<int64_t>(begin), w.begin() + static_cast<int64_t>(end),
                shards_.begin() + static_cast<int64_t>(static_cast<size_t>(e) * shard_));
    }
    place_experts();
  }

 protected:
  // Algorithm 1: assigns replicas by popularity, lays them out one after another and sends the weights to their slots.
  void place_experts() {
    if (slot_expert_.empty() || (every_ > 0 && n_steps_ % every_ == 0)) {
      std::vector<double> popularity(popularity_.begin(), popularity_.end());
      std::vector<int32_t> counts(popularity.size());
      check(moecclReplicaCounts(popularity.data(), place_.n_experts(), slots_ * place_.n_ranks, counts.data()),
            "moecclReplicaCounts");
      slot_expert_.clear();
      for (int32_t e = 0; e < place_.n_experts(); e++)
        for (int32_t i = 0; i < counts[static_cast<size_t>(e)]; i++) slot_expert_.push_back(e);
    }
    check(moecclPlaceWeights(shards_.data(), weights_.data(), kExpertSize, moecclFloat32, placement(), place_.comm,
                             nullptr),
          "moecclPlaceWeights", place_.comm);
  }
  const moecclPlacement_t* placement() {
    given_.n_experts = place_.n_experts();
    given_.slots_per_rank = slots_;
    given_.slot_expert = slot_expert_.data();
    return &given_;
  }
  // Sends every choice to a slot of its expert or drops it. The choices also determine the next placement.
  std::vector<int32_t> choose_slots(const Gate& gate) override {
    moecclReplicaDispatch_t dispatch = MOECCL_REPLICA_DISPATCH_INIT;
    dispatch.placement = placement();
    dispatch.top_k = place_.top_k();
    dispatch.slot_capacity = slot_capacity_;
    std::vector<int32_t> slots(gate.expert.size());
    std::vector<int64_t> dropped(popularity_.size());
    check(moecclChooseReplicas(&dispatch, gate.expert.data(), kTokens, slots.data(), popularity_.data(), dropped.data(),
                               place_.comm),
          "moecclChooseReplicas", place_.comm);
    for (size_t e = 0; e < dropped.size(); e++) {
      n_dropped_ += dropped[e];
      n_choices_ += popularity_[e];
    }
    n_steps_++;
    return slots;
  }
  std::pair<int64_t, int64_t> dropped() const override { return {n_dropped_, n_choices_}; }
  void learn() override {
    Fixed shards(shards_.size());
    check(moecclReduceGradients(grad_.data(), shards.data(), kExpertSize, moecclInt64, moecclSum, placement(),
                                place_.comm, nullptr),
          "moecclReduceGradients", place_.comm);
    adam_.step(shards_.data(), shards.data());
    place_experts();
  }

  int every_, n_steps_ = 0;
  int32_t slot_capacity_;
  int64_t n_dropped_ = 0, n_choices_ = 0;
  size_t shard_;
  Floats shards_;  // [experts][shard]
  Adam adam_;
  std::vector<int64_t> popularity_;
  std::vector<int32_t> slot_expert_;
  moecclPlacement_t given_ = MOECCL_PLACEMENT_INIT;
};

// Expert domains (HybridEP). Before each step a rank gathers the experts of its domain, and tokens go to the holder
// with the same offset in other domains. After the step, the gradients that the holders computed are summed at the
// owner, which is the only rank to update the expert. With a ratio, experts migrate encoded, on a separate communicator
// that overlaps with the rest of the step. With `back`, gradients return compressed too.
class HybridLayer : public TokenLayer {
 public:
  HybridLayer(const Feature& feature, const Place& place)
      : TokenLayer(feature, place, 0),
        own_(place.shape.n_experts / static_cast<size_t>(place.n_ranks) * kExpertSize),
        adam_(own_.size()) {
    moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
    config.n_experts = place.n_experts();
    config.n_levels = 2;
    config.domain = feature.domain;
    check(moecclHybridCreate(&hybrid_, place.comm, &config), "moecclHybridCreate", place.comm);
    moecclHybridInfo_t info{};
    info.size = sizeof info;
    check(moecclHybridGetInfo(hybrid_, &info), "moecclHybridGetInfo", place.comm);
    for (int i = 0; i < info.n_own; i++) {
      const Floats w = initial_expert(info.own_experts[i]);
      std::copy(w.begin(), w.end(), own_.begin() + static_cast<int64_t>(i) * kExpertSize);
    }
    weights_.resize(static_cast<size_t>(info.n_held) * kExpertSize);
    const moecclMoeConfig_t layer = layer_config(feature);
    check(moecclHybridMoeCreate(&moe_, hybrid_, place.comm, &layer), "moecclHybridMoeCreate", place.comm);
    if (feature.ratio > 0) {
      moecclConfig_t same = MOECCL_CONFIG_INIT;
      same.topology = kTopology;
      same.deterministic = 1;
      check(moecclCommSplit(place.comm, 0, place.rank, &beside_, &same), "moecclCommSplit", place.comm);
      moecclMigrationConfig_t migrate = MOECCL_MIGRATION_CONFIG_INIT;
      migrate.count = kExpertSize;
      migrate.ratio = feature.ratio;
      check(moecclMigrationCreate(&migration_, hybrid_, beside_, &migrate), "moecclMigrationCreate", beside_);
      if (feature.back) {
        moecclGradientReturnConfig_t back = MOECCL_GRADIENT_RETURN_CONFIG_INIT;
        back.count = kExpertSize;
        back.ratio = feature.ratio;
        check(moecclGradientReturnCreate(&gradients_, hybrid_, nullptr, &back), "moecclGradientReturnCreate",
              place.comm);
      }
      shared_expert_.resize(kExpertSize);
      n_own_ = static_cast<size_t>(info.n_own);
    }
    gather();
  }
  ~HybridLayer() override {
    (void)moecclGradientReturnDestroy(gradients_);
    if (migration_ != nullptr) (void)moecclMigrationDestroy(migration_);
    if (beside_ != nullptr) (void)moecclCommDestroy(beside_);
    (void)moecclHybridDestroy(hybrid_);
  }

  void forward(const Gate& gate, const Floats& x, Floats& out) override {
    if (migration_ != nullptr)
      check(moecclMigrationWait(migration_, 0, nullptr, nullptr, nullptr), "moecclMigrationWait", beside_);
    TokenLayer::forward(gate, x, out);
  }

 protected:
  void learn() override {
    Fixed sums(own_.size());
    if (gradients_ != nullptr) {
      return_compressed(sums);
    } else {
      check(moecclHybridReduce(hybrid_, grad_.data(), sums.data(), kExpertSize, moecclInt64, nullptr),
            "moecclHybridReduce", place_.comm);
    }
    adam_.step(own_.data(), sums.data());
    gather();
  }

 private:
  void return_compressed(Fixed& sums) {
    Floats held, own(own_.size());
    for (const int64_t g : grad_) held.push_back(from_fixed(g));
    check(moecclGradientReturnReduce(gradients_, 0, held.data(), own.data(), nullptr), "moecclGradientReturnReduce",
          place_.comm);
    for (size_t i = 0; i < own.size(); i++) sums[i] = to_fixed(own[i]);
  }
  void gather() {
    if (migration_ == nullptr) {
      check(moecclHybridGather(hybrid_, own_.data(), weights_.data(), kExpertSize * sizeof(float), nullptr),
            "moecclHybridGather", place_.comm);
      return;
    }
    check(moecclSharedExpert(own_.data(), n_own_, place_.shape.n_experts, shared_expert_.data(), kExpertSize,
                             moecclFloat32, beside_, nullptr),
          "moecclSharedExpert", beside_);
    check(moecclMigrationSend(migration_, 0, own_.data(), shared_expert_.data(), nullptr), "moecclMigrationSend",
          beside_);
    check(moecclMigrationBeginInto(migration_, 0, shared_expert_.data(), weights_.data()), "moecclMigrationBeginInto",
          beside_);
  }

  moecclHybrid_t hybrid_ = nullptr;
  moecclComm_t beside_ = nullptr;
  moecclMigration_t migration_ = nullptr;
  moecclGradientReturn_t gradients_ = nullptr;
  size_t n_own_ = 0;
  Floats own_, shared_expert_;
  Adam adam_;
};

// Combine delivers each sample, with its residual, to the home that the solver chose.
class ReplacedLayer : public OwnedLayer {
 public:
  ReplacedLayer(const Feature& feature, const Place& place) : OwnedLayer(feature, place) {
    moecclReplaceConfig_t config = MOECCL_REPLACE_CONFIG_INIT;
    config.sample_tokens = kSampleTokens;
    config.mode = feature.solve ? moecclReplaceSolve : moecclReplaceKeep;
    config.residual = 1;
    config.min_gain = -1;  // accept any predicted gain: these rows are too short to gain measurable time
    check(moecclReplaceCreate(&replacement_, moe_, &config), "moecclReplaceCreate", place.comm);
  }
  ~ReplacedLayer() override { (void)moecclReplaceDestroy(replacement_); }

  std::vector<int32_t> samples() const override {
    return {facts_.local_samples, facts_.local_samples + facts_.n_local};
  }
  std::pair<uint64_t, uint64_t> saved() const override { return {before_ - after_, before_}; }

 protected:
  // Starts the solver, which works while tokens travel and experts run.
  void routed() override {
    check(moecclReplaceBegin(replacement_, routing_, nullptr, nullptr), "moecclReplaceBegin", place_.comm);
  }
  void combine(const Floats& x, Floats& out) override {
    size_t n_rows = 0;
    check(moecclReplaceRows(replacement_, &n_rows), "moecclReplaceRows", place_.comm);
    y_.resize(n_rows * kHidden);
    check(moecclReplaceResidual(replacement_, x.data(), rows_.data(), y_.data()), "moecclReplaceResidual", place_.comm);
    check(moecclReplaceCombine(replacement_, y_.data(), out.data(), nullptr), "moecclReplaceCombine", place_.comm);
    facts_.size = sizeof facts_;
    check(moecclReplaceGetInfo(replacement_, &facts_), "moecclReplaceGetInfo", place_.comm);
    before_ += facts_.node_bytes_before;
    after_ += facts_.node_bytes_after;
  }
  void combine_backward(const Floats& dout, Floats& dweight) override {
    dy_.resize(y_.size());
    check(moecclReplaceCombineBackward(replacement_, dout.data(), dy_.data(), y_.data(), dweight.data(), nullptr),
          "moecclReplaceCombineBackward", place_.comm);
  }
  void dispatch_backward(const Floats&, Floats& dx) override {
    check(moecclReplaceResidualBackward(replacement_, dy_.data(), drows_.data(), nullptr),
          "moecclReplaceResidualBackward", place_.comm);
    check(moecclDispatchBackward(routing_, drows_.data(), dx.data(), nullptr), "moecclDispatchBackward", place_.comm);
    check(moecclReplaceResidualBackward(replacement_, dy_.data(), nullptr, dx.data()), "moecclReplaceResidualBackward",
          place_.comm);
  }

  moecclReplacement_t replacement_ = nullptr;
  moecclReplaceInfo_t facts_{};
  uint64_t before_ = 0, after_ = 0;
};

}  // namespace

std::unique_ptr<MoeLayer> make_layer(const Feature& feature, const Place& place) {
  switch (feature.kind) {
    case Feature::kReplicated:
      return std::make_unique<ReplicatedLayer>(feature, place);
    case Feature::kSwapped:
      return std::make_unique<SwappedLayer>(feature, place);
    case Feature::kReplaced:
      return std::make_unique<ReplacedLayer>(feature, place);
    case Feature::kHybrid:
      return std::make_unique<HybridLayer>(feature, place);
    case Feature::kGathered:
      return make_gathered_layer(feature, place);
    case Feature::kTokens:
      break;
  }
  return std::make_unique<OwnedLayer>(feature, place);
}

}  // namespace training
