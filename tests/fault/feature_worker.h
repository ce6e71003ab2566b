// SPDX-License-Identifier: Apache-2.0
// One rank's random steps of a training loop: sums on a host stream, expert domains, migration, the return of
// gradients, expert swap, re-placing combine, backward passes, replicas, and exchanges of tensor-parallel groups. All
// numbers are whole and small, and experts return their rows as they are, so that every result is known exactly. Four
// ranks of the topology kTopology. As random_worker.h otherwise.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "moeccl/moeccl.h"
#include "tests/fault/random_worker.h"

namespace moeccl::testing {

#define MOECCL_STEP(expr)                                                             \
  do {                                                                                \
    if (const moecclResult_t result = (expr); result != moecclSuccess) return result; \
  } while (false)

class FeatureWorker {
 public:
  static constexpr const char* kTopology = "node:2 gpu:2";
  static constexpr int kRanks = 4;

  FeatureWorker(const Operations& operations, int rank, moecclComm_t comm)
      : operations_(operations), rank_(rank), comm_(comm) {
    for (auto* b : {&a_, &b_, &c_, &d_}) b->resize(kFloats);
    for (size_t i = 0; i < tensors_.size(); ++i)
      tensors_[i] = slot_value(2 * rank_ + static_cast<int>(i / kSlotFloats % 2), i % kSlotFloats);
    EXPECT_EQ(create(), moecclSuccess) << moecclGetLastError(comm) << "; " << moecclGetLastError(nullptr);
  }
  ~FeatureWorker() { close(); }
  FeatureWorker(const FeatureWorker&) = delete;
  FeatureWorker& operator=(const FeatureWorker&) = delete;

  moecclResult_t step(uint64_t it) {
    std::mt19937_64 random(it * 7919 + operations_.seed);
    it_ = it;
    const size_t kind = random() % std::size(kKinds);
    name_ = kKinds[kind].name;
    return (this->*kKinds[kind].step)();
  }

  // Reuses the memory, which belongs to this rank again once the call has failed and its objects are destroyed.
  void take_back() {
    close();
    for (auto* b : {&a_, &b_, &c_, &d_, &tensors_}) std::memset(b->data(), kMine, b->size() * sizeof(float));
  }
  size_t bytes_written_late() const {
    size_t late = 0;
    for (const auto* b : {&a_, &b_, &c_, &d_, &tensors_}) {
      const auto* bytes = reinterpret_cast<const unsigned char*>(b->data());
      late += static_cast<size_t>(
          std::count_if(bytes, bytes + b->size() * sizeof(float), [](unsigned char c) { return c != kMine; }));
    }
    return late;
  }
  uint64_t wrong() const { return wrong_; }
  const std::string& what() const { return what_; }
  const char* name() const { return name_; }

 private:
  static constexpr size_t kFloats = size_t{1} << 18, kCount = 4000, kTokens = 64, kHidden = 64, kSlotFloats = 1000;
  static constexpr int kExperts = 8, kTopK = 2;
  static constexpr size_t kSampleTokens = 4;

  float value(int key, size_t i) const {
    return static_cast<float>((it_ * 31 + static_cast<uint64_t>(key) * 17 + i) % 1000);
  }
  // What the codec keeps of it, at ratio 4, is everything.
  float sparse(int key, size_t i) const { return i % 16 == 0 ? value(key, i) + 1 : 0; }
  static float slot_value(int expert, size_t i) { return static_cast<float>(expert * 1000) + static_cast<float>(i); }

  template <class F>
  void fill(std::vector<float>& to, size_t n_blocks, size_t count, F value_of) {
    for (size_t b = 0; b < n_blocks; ++b)
      for (size_t i = 0; i < count; ++i) to[b * count + i] = value_of(b, i);
  }
  template <class F>
  void expect(const std::vector<float>& found, size_t n_blocks, size_t count, F value_of) {
    for (size_t b = 0; b < n_blocks; ++b)
      for (size_t i = 0; i < count; ++i) {
        if (found[b * count + i] == value_of(b, i) || wrong_++ > 0) continue;
        what_ = std::string(name_) + " #" + std::to_string(it_) + ", block " + std::to_string(b) + ", element " +
                std::to_string(i);
      }
  }

  // Before any fault: creation has a timeout of its own.
  moecclResult_t create() {
    MOECCL_STEP(moecclStreamCreate(&stream_));
    static constexpr int32_t kSizes[] = {1, 2};  // a domain is a node
    moecclHybridConfig_t domains = MOECCL_HYBRID_CONFIG_INIT;
    domains.n_experts = kExperts, domains.n_levels = 2, domains.domain = kSizes;
    MOECCL_STEP(moecclHybridCreate(&hybrid_, comm_, &domains));
    of_.size = sizeof(of_);
    MOECCL_STEP(moecclHybridGetInfo(hybrid_, &of_));
    moecclMigrationConfig_t migration = MOECCL_MIGRATION_CONFIG_INIT;
    migration.count = kCount, migration.ratio = 4;
    MOECCL_STEP(moecclMigrationCreate(&migration_, hybrid_, nullptr, &migration));
    moecclGradientReturnConfig_t gradients = MOECCL_GRADIENT_RETURN_CONFIG_INIT;
    gradients.count = kCount, gradients.ratio = 4;
    MOECCL_STEP(moecclGradientReturnCreate(&gradients_, hybrid_, nullptr, &gradients));
    moecclMoeConfig_t layer = MOECCL_MOE_CONFIG_INIT;
    layer.hidden_bytes = kHidden * sizeof(float), layer.type = moecclFloat32, layer.top_k = kTopK;
    layer.n_experts = kExperts, layer.max_tokens = kTokens, layer.layout = moecclLayoutExpertMajor;
    for (moecclMoe_t& moe : moe_) MOECCL_STEP(moecclMoeCreate(&moe, comm_, &layer));
    moecclExpertSwapConfig_t swaps = MOECCL_EXPERT_SWAP_CONFIG_INIT;
    swaps.interval = 1, swaps.min_gain = -1;
    MOECCL_STEP(moecclExpertSwapCreate(&swap_, comm_, &swaps));
    const uint64_t bytes = kSlotFloats * sizeof(float);
    const moecclSwapTensor_t tensors[] = {{tensors_.data(), bytes, 0, 0}, {&tensors_[2 * kSlotFloats], bytes, 1, 0}};
    MOECCL_STEP(moecclExpertSwapAttach(swap_, moe_[1], tensors, 2, nullptr, nullptr));
    moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
    replace.sample_tokens = kSampleTokens, replace.min_gain = -1;
    return moecclReplaceCreate(&replacement_, moe_[2], &replace);
  }

  moecclResult_t sums_on_stream() {
    fill(a_, 5, kCount, [&](size_t b, size_t i) { return value(rank_, b + i); });
    moecclResult_t called = moecclSuccess;
    for (size_t b = 0; b < 5 && called == moecclSuccess; ++b)
      called = moecclAllReduce(&a_[b * kCount], &b_[b * kCount], kCount, moecclFloat32, moecclSum, comm_, stream_);
    MOECCL_STEP(moecclStreamSynchronize(stream_));
    MOECCL_STEP(called);
    expect(b_, 5, kCount,
           [&](size_t b, size_t i) { return value(0, b + i) + value(1, b + i) + value(2, b + i) + value(3, b + i); });
    return moecclSuccess;
  }

  size_t n_own() const { return static_cast<size_t>(of_.n_own); }
  size_t n_held() const { return static_cast<size_t>(of_.n_held); }
  moecclResult_t gather_and_reduce() {
    fill(a_, n_own(), kCount, [&](size_t e, size_t i) { return value(of_.own_experts[e], i); });
    MOECCL_STEP(moecclHybridGather(hybrid_, a_.data(), b_.data(), kCount * sizeof(float), nullptr));
    expect(b_, n_held(), kCount, [&](size_t e, size_t i) { return value(of_.held_experts[e], i); });
    fill(c_, n_held(), kCount, [&](size_t e, size_t i) { return value(of_.held_experts[e] + 10 * rank_, i); });
    MOECCL_STEP(moecclHybridReduce(hybrid_, c_.data(), d_.data(), kCount, moecclFloat32, nullptr));
    expect(d_, n_own(), kCount, [&](size_t e, size_t i) {
      const int expert = of_.own_experts[e];
      return value(expert + 10 * (rank_ & ~1), i) + value(expert + 10 * (rank_ | 1), i);
    });
    return moecclSuccess;
  }
  moecclResult_t migrate() {
    const auto expert = [&](int e, size_t i) { return value(99, i) + sparse(e, i); };
    fill(a_, n_own(), kCount, [&](size_t e, size_t i) { return expert(of_.own_experts[e], i); });
    fill(c_, 1, kCount, [&](size_t, size_t i) { return value(99, i); });
    MOECCL_STEP(moecclMigrationSend(migration_, 0, a_.data(), c_.data(), nullptr));
    MOECCL_STEP(it_ % 2 == 0 ? moecclMigrationBegin(migration_, 0)
                             : moecclMigrationBeginInto(migration_, 0, c_.data(), b_.data()));
    MOECCL_STEP(moecclMigrationWait(migration_, 0, c_.data(), b_.data(), nullptr));
    expect(b_, n_held(), kCount, [&](size_t e, size_t i) { return expert(of_.held_experts[e], i); });
    return moecclSuccess;
  }
  moecclResult_t return_gradients() {
    fill(c_, n_held(), kCount, [&](size_t e, size_t i) { return sparse(of_.held_experts[e] + 10 * rank_, i); });
    MOECCL_STEP(moecclGradientReturnReduce(gradients_, 0, c_.data(), d_.data(), nullptr));
    expect(d_, n_own(), kCount, [&](size_t e, size_t i) {
      const int expert = of_.own_experts[e];
      return sparse(expert + 10 * (rank_ & ~1), i) + sparse(expert + 10 * (rank_ | 1), i);
    });
    return moecclSuccess;
  }

  // The layers' tokens: every rank knows those of all ranks.
  float token(int of_rank, size_t t, size_t h) const { return value(of_rank * 5 + 1, t * 7 + h); }
  moecclResult_t layer(size_t which) {
    std::mt19937_64 random(it_ * 977 + static_cast<uint64_t>(rank_));
    std::vector<int32_t> experts(kTokens * kTopK);
    const std::vector<float> weights(experts.size(), 0.5F);
    for (size_t t = 0; t < kTokens; ++t) {
      experts[kTopK * t] = static_cast<int32_t>(random() % kExperts);
      experts[kTopK * t + 1] = (experts[kTopK * t] + 1 + static_cast<int32_t>(random() % (kExperts - 1))) % kExperts;
    }
    moecclRouting_t& routing = routing_[which];
    MOECCL_STEP(routing == nullptr ? moecclRoutingCreate(&routing, moe_[which], experts.data(), weights.data(), kTokens)
                                   : moecclRoutingUpdate(routing, experts.data(), weights.data(), kTokens));
    fill(a_, kTokens, kHidden, [&](size_t t, size_t h) { return token(rank_, t, h); });
    return moecclSuccess;
  }
  void expect_tokens(const std::vector<float>& found) {
    expect(found, kTokens, kHidden, [&](size_t t, size_t h) { return token(rank_, t, h); });
  }
  moecclResult_t backward() {
    MOECCL_STEP(layer(0));
    MOECCL_STEP(moecclDispatch(routing_[0], a_.data(), b_.data(), nullptr));
    MOECCL_STEP(moecclCombine(routing_[0], b_.data(), c_.data(), nullptr));
    expect_tokens(c_);
    MOECCL_STEP(moecclCombineBackward(routing_[0], c_.data(), d_.data(), nullptr, nullptr, nullptr));
    MOECCL_STEP(moecclDispatchBackward(routing_[0], d_.data(), c_.data(), nullptr));
    expect_tokens(c_);
    return moecclSuccess;
  }
  moecclResult_t layer_on_stream() {
    MOECCL_STEP(layer(0));
    moecclResult_t called = moecclDispatch(routing_[0], a_.data(), b_.data(), stream_);
    if (called == moecclSuccess) called = moecclCombine(routing_[0], b_.data(), c_.data(), stream_);
    MOECCL_STEP(moecclStreamSynchronize(stream_));
    MOECCL_STEP(called);
    expect_tokens(c_);
    return moecclSuccess;
  }
  moecclResult_t swap_experts() {
    MOECCL_STEP(layer(1));
    MOECCL_STEP(moecclDispatch(routing_[1], a_.data(), b_.data(), nullptr));
    MOECCL_STEP(moecclExpertSwapBegin(swap_));
    MOECCL_STEP(moecclCombine(routing_[1], b_.data(), c_.data(), nullptr));
    expect_tokens(c_);
    MOECCL_STEP(moecclExpertSwapFinish(swap_, nullptr));
    moecclExpertSwapInfo_t info{};
    info.size = sizeof(info);
    MOECCL_STEP(moecclExpertSwapGetInfo(swap_, 0, &info));
    expect(tensors_, 4, kSlotFloats, [&](size_t slot, size_t i) {
      return slot_value(info.expert_in[2 * rank_ + static_cast<int>(slot % 2)], i);
    });
    return moecclSuccess;
  }
  moecclResult_t replace() {
    MOECCL_STEP(layer(2));
    MOECCL_STEP(moecclDispatch(routing_[2], a_.data(), b_.data(), nullptr));
    MOECCL_STEP(moecclReplaceBegin(replacement_, routing_[2], nullptr, nullptr));
    MOECCL_STEP(moecclReplaceCombine(replacement_, b_.data(), c_.data(), nullptr));
    moecclReplaceInfo_t info{};
    info.size = sizeof(info);
    MOECCL_STEP(moecclReplaceGetInfo(replacement_, &info));
    constexpr size_t kSamples = kTokens / kSampleTokens;  // of a rank
    expect(c_, kTokens, kHidden, [&](size_t t, size_t h) {
      const auto sample = static_cast<size_t>(info.local_samples[t / kSampleTokens]);
      return token(static_cast<int>(sample / kSamples), sample % kSamples * kSampleTokens + t % kSampleTokens, h);
    });
    MOECCL_STEP(moecclReplaceCombineBackward(replacement_, c_.data(), d_.data(), nullptr, nullptr, nullptr));
    MOECCL_STEP(moecclDispatchBackward(routing_[2], d_.data(), c_.data(), nullptr));
    expect_tokens(c_);
    return moecclSuccess;
  }

  moecclResult_t replicas() {
    static constexpr std::array<int32_t, 2 * kRanks> kSlots = {0, 1, 0, 1, 2, 0, 1, 2};
    moecclPlacement_t placement = MOECCL_PLACEMENT_INIT;
    placement.n_experts = 3, placement.slots_per_rank = 2, placement.slot_expert = kSlots.data();
    const auto sum = [&](int expert, size_t i) {
      float all = 0;
      for (size_t s = 0; s < kSlots.size(); ++s)
        if (kSlots[s] == expert) all += value(static_cast<int>(s), i);
      return all;
    };
    const auto mine = [&](size_t slot, size_t i) { return sum(kSlots[2 * static_cast<size_t>(rank_) + slot], i); };
    const size_t shard = moecclExpertShard(kCount, kRanks);
    const auto shards = [&](size_t e, size_t i) {
      return sum(static_cast<int>(e), static_cast<size_t>(rank_) * shard + i);
    };
    fill(a_, 2, kCount, [&](size_t slot, size_t i) { return value(2 * rank_ + static_cast<int>(slot), i); });
    MOECCL_STEP(
        moecclExpertAllReduce(a_.data(), b_.data(), kCount, moecclFloat32, moecclSum, &placement, comm_, nullptr));
    expect(b_, 2, kCount, mine);
    MOECCL_STEP(moecclCollectGradients(b_.data(), c_.data(), kCount, moecclFloat32, &placement, comm_, nullptr));
    expect(c_, 3, shard, shards);
    MOECCL_STEP(
        moecclReduceGradients(a_.data(), c_.data(), kCount, moecclFloat32, moecclSum, &placement, comm_, nullptr));
    expect(c_, 3, shard, shards);
    MOECCL_STEP(moecclPlaceWeights(c_.data(), d_.data(), kCount, moecclFloat32, &placement, comm_, nullptr));
    expect(d_, 2, kCount, mine);
    return moecclSuccess;
  }
  moecclResult_t tensor_all_to_all() {
    moecclTensorGroups_t groups{};
    groups.size = sizeof(groups);
    MOECCL_STEP(moecclTensorGroups(comm_, &groups));
    const auto n = static_cast<size_t>(groups.n_groups);
    fill(a_, n, kCount, [&](size_t to, size_t i) { return value(groups.group * 8 + static_cast<int>(to), i); });
    MOECCL_STEP(moecclTensorAllToAll(a_.data(), b_.data(), kCount, moecclFloat32, comm_, nullptr));
    expect(b_, n, kCount, [&](size_t from, size_t i) { return value(static_cast<int>(from) * 8 + groups.group, i); });
    return moecclSuccess;
  }

  template <class T>
  static void destroy(T& object, moecclResult_t (*call)(T)) {
    if (object == nullptr) return;
    EXPECT_EQ(call(object), moecclSuccess) << moecclGetLastError(nullptr);
    object = nullptr;
  }
  void close() {
    destroy(replacement_, moecclReplaceDestroy);
    destroy(swap_, moecclExpertSwapDestroy);
    destroy(migration_, moecclMigrationDestroy);
    destroy(gradients_, moecclGradientReturnDestroy);
    for (moecclRouting_t& r : routing_) destroy(r, moecclRoutingDestroy);
    for (moecclMoe_t& m : moe_) destroy(m, moecclMoeDestroy);
    destroy(hybrid_, moecclHybridDestroy);
    if (stream_ != nullptr) (void)moecclStreamDestroy(std::exchange(stream_, nullptr));  // returns its failure
  }

  struct Kind {
    const char* name;
    moecclResult_t (FeatureWorker::*step)();
  };
  static const Kind kKinds[10];

  const Operations operations_;
  const int rank_;
  moecclComm_t comm_;
  std::vector<float> a_, b_, c_, d_;
  std::vector<float> tensors_ = std::vector<float>(4 * kSlotFloats);  // two of two slots
  moecclStream_t stream_ = nullptr;
  moecclHybrid_t hybrid_ = nullptr;
  moecclHybridInfo_t of_ = {};
  moecclMigration_t migration_ = nullptr;
  moecclGradientReturn_t gradients_ = nullptr;
  std::array<moecclMoe_t, 3> moe_ = {};  // one that stays, one of swaps, one of replacements
  std::array<moecclRouting_t, 3> routing_ = {};
  moecclExpertSwap_t swap_ = nullptr;
  moecclReplacement_t replacement_ = nullptr;
  uint64_t it_ = 0, wrong_ = 0;
  const char* name_ = "";
  std::string what_;
};

inline constexpr FeatureWorker::Kind FeatureWorker::kKinds[] = {
    {"sums on a stream", &FeatureWorker::sums_on_stream},
    {"gather and reduce", &FeatureWorker::gather_and_reduce},
    {"migration", &FeatureWorker::migrate},
    {"return of gradients", &FeatureWorker::return_gradients},
    {"backward passes", &FeatureWorker::backward},
    {"layer on a stream", &FeatureWorker::layer_on_stream},
    {"expert swap", &FeatureWorker::swap_experts},
    {"re-placing combine", &FeatureWorker::replace},
    {"replicas", &FeatureWorker::replicas},
    {"tensor alltoall", &FeatureWorker::tensor_all_to_all},
};

}  // namespace moeccl::testing
