// SPDX-License-Identifier: Apache-2.0
// Ranks of a program written for NCCL EP. Its memory is a CUDA device's where there is one, and the host's otherwise.
#pragma once

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "shim/nccl_ep/abi.h"
#include "tests/shim/nccl_ranks.h"
#include "tests/support/cuda_device.h"

namespace moeccl::testing {

// An empty struct of the interface, as its _INIT macro makes it.
template <class T>
T ep_init() {
  T t{};
  t.size = sizeof t;
  t.magic = NCCL_EP_MAGIC;
  return t;
}

class EpMemory {
 public:
  explicit EpMemory(bool own_stream = true) {
    if (!device_.ok() || !own_stream) return;
    stream_ = static_cast<cudaStream_t>(device_.make_stream());
  }
  ~EpMemory() {
    if (stream_ != nullptr) device_.end_stream(stream_);
  }
  EpMemory(const EpMemory&) = delete;
  EpMemory& operator=(const EpMemory&) = delete;
  CudaDevice& device() { return device_; }
  cudaStream_t stream() const { return stream_; }

 private:
  CudaDevice device_;
  cudaStream_t stream_ = nullptr;
};

// A tensor of T with its memory, at first filled with `fill`.
template <class T>
class EpTensor {
 public:
  EpTensor(EpMemory& memory, ncclDataType_t type, std::vector<size_t> sizes, T fill = {})
      : memory_(memory), sizes_(std::move(sizes)) {
    n_ = 1;
    for (const size_t s : sizes_) n_ *= s;
    if (memory_.device().ok())
      buffer_.emplace(memory_.device(), n_ * sizeof(T));
    else
      host_.resize(n_ + 1);
    tensor_ = {sizeof tensor_, NCCL_EP_TENSOR_MAGIC, static_cast<unsigned>(sizes_.size()), type, nullptr, nullptr, 0,
               sizes_.data()};
    tensor_.data = n_ == 0 ? nullptr : buffer_ ? buffer_->data() : host_.data();
    put(std::vector<T>(n_, fill));
  }
  ncclEpTensor_t* get() { return &tensor_; }
  size_t size() const { return n_; }
  void* data() const { return tensor_.data; }
  void put(const std::vector<T>& values) {
    ASSERT_EQ(values.size(), n_);
    if (buffer_)
      memory_.device().upload(buffer_->data(), values.data(), n_ * sizeof(T), memory_.stream());
    else
      std::copy(values.begin(), values.end(), host_.begin());
    if (buffer_) memory_.device().synchronize(memory_.stream());
  }
  std::vector<T> values() {
    std::vector<T> out(host_.begin(), host_.empty() ? host_.end() : host_.end() - 1);
    if (!buffer_) return out;
    out.resize(n_);
    memory_.device().download(out.data(), buffer_->data(), n_ * sizeof(T), memory_.stream());
    return out;
  }

 private:
  EpMemory& memory_;
  std::vector<size_t> sizes_;
  size_t n_ = 0;
  std::vector<T> host_;
  std::optional<DeviceBuffer> buffer_;
  ncclEpTensor_t tensor_{};
};

// A step that every rank knows as a whole. Values are small multiples of 1/4, whose sums are exact in fp32.
struct EpStep {
  int n_ranks = 2, n_experts = 8, top_k = 3;
  size_t hidden = 16, most = 12;
  int seed = 0;
  size_t tokens(int rank) const { return rank % 3 == 2 ? 0 : most - static_cast<size_t>((rank + seed) % 3); }
  int n_local() const { return n_experts / n_ranks; }
  // The expert of a token's choice: distinct ones, and none for one of five.
  int64_t expert(int rank, size_t token, int choice) const {
    const int mix = rank * 131 + static_cast<int>(token) * 17 + seed * 29;
    if ((mix + choice * 7) % 5 == 0) return -1;
    return (mix % 11 + choice * 3) % n_experts;
  }
  float weight(int rank, size_t token, int choice) const {
    return 0.25f * static_cast<float>((rank * 3 + static_cast<int>(token) + choice * 5 + seed) % 7 + 1);
  }
  float value(int rank, size_t token, size_t column) const {
    return static_cast<float>((rank * 31 + static_cast<int>(token) * 7 + static_cast<int>(column) + seed) % 32) - 8;
  }
  // What an expert makes of a value.
  static float at_expert(int64_t expert, float value) { return value * static_cast<float>(expert % 3 + 1); }

  std::vector<int64_t> experts(int rank) const {
    return each_choice<int64_t>(rank, [&](size_t t, int c) { return expert(rank, t, c); });
  }
  std::vector<float> weights(int rank) const {
    return each_choice<float>(rank, [&](size_t t, int c) { return weight(rank, t, c); });
  }
  std::vector<float> values(int rank) const {
    std::vector<float> v;
    for (size_t t = 0; t < tokens(rank); ++t)
      for (size_t h = 0; h < hidden; ++h) v.push_back(value(rank, t, h));
    return v;
  }
  // The sum over a token's choices of what their experts make, weighted if asked for.
  std::vector<float> sums(int rank, bool weighted) const {
    std::vector<float> out(tokens(rank) * hidden);
    for (size_t t = 0; t < tokens(rank); ++t)
      for (int c = 0; c < top_k; ++c)
        for (size_t h = 0; h < hidden && expert(rank, t, c) >= 0; ++h)
          out[t * hidden + h] += (weighted ? weight(rank, t, c) : 1) * at_expert(expert(rank, t, c), value(rank, t, h));
    return out;
  }

  // One choice that arrives at a rank.
  struct Choice {
    int source;
    size_t token;
    int choice;
    int64_t local;
  };
  // By (source, token, expert), as rows arrive in the flat and the rank-major layout.
  std::vector<Choice> arriving(int rank) const {
    std::vector<Choice> all;
    for (int s = 0; s < n_ranks; ++s)
      for (size_t t = 0; t < tokens(s); ++t)
        for (int64_t e = 0; e < n_local(); ++e)
          for (int c = 0; c < top_k; ++c)
            if (expert(s, t, c) == rank * n_local() + e) all.push_back({s, t, c, e});
    return all;
  }
  // By (expert, source, token).
  std::vector<Choice> by_expert(int rank) const {
    std::vector<Choice> all = arriving(rank);
    std::stable_sort(all.begin(), all.end(), [](const Choice& a, const Choice& b) { return a.local < b.local; });
    return all;
  }
  // The choices that belong to each row of the flat layout.
  std::vector<std::vector<Choice>> rows(int rank) const {
    std::vector<std::vector<Choice>> all;
    for (const Choice& c : arriving(rank)) {
      if (all.empty() || all.back()[0].source != c.source || all.back()[0].token != c.token) all.emplace_back();
      all.back().push_back(c);
    }
    return all;
  }

 private:
  template <class T, class F>
  std::vector<T> each_choice(int rank, const F& f) const {
    std::vector<T> all;
    for (size_t t = 0; t < tokens(rank); ++t)
      for (int c = 0; c < top_k; ++c) all.push_back(f(t, c));
    return all;
  }
};

// One rank's communicator and group.
class EpRank {
 public:
  EpRank(Board& board, const EpStep& step, int rank, ncclEpGroupConfig_t config, bool own_stream = true) : rank_(rank) {
    const ncclUniqueId id = meet(board, rank);
    memory_ = std::make_unique<EpMemory>(own_stream);
    EXPECT_NCCL(ncclCommInitRank(&comm_, step.n_ranks, id, rank));
    EXPECT_NCCL(ncclEpCreateGroup(&group_, comm_, &config));
  }
  ~EpRank() {
    EXPECT_NCCL(ncclEpGroupDestroy(group_));
    EXPECT_NCCL(ncclCommDestroy(comm_));
  }
  EpRank(const EpRank&) = delete;
  EpRank& operator=(const EpRank&) = delete;
  static ncclEpGroupConfig_t config(const EpStep& step, ncclEpAlgorithm_t algorithm) {
    auto c = ep_init<ncclEpGroupConfig_t>();
    c.version = NCCL_EP_API_VERSION;
    c.algorithm = algorithm;
    c.num_experts = static_cast<unsigned>(step.n_experts);
    c.max_dispatch_tokens_per_rank = static_cast<unsigned>(step.most);
    c.max_token_bytes = static_cast<unsigned>(step.hidden * sizeof(float) + 64);
    return c;
  }
  int rank() const { return rank_; }
  ncclComm_t comm() const { return comm_; }
  // For a caller that destroys it.
  ncclComm_t take_comm() { return std::exchange(comm_, nullptr); }
  ncclEpGroup_t group() const { return group_; }
  EpMemory& memory() { return *memory_; }
  cudaStream_t stream() const { return memory_->stream(); }

 private:
  int rank_;
  std::unique_ptr<EpMemory> memory_;
  ncclComm_t comm_ = nullptr;
  ncclEpGroup_t group_ = nullptr;
};

// Runs the ranks as processes, and then as threads of one process.
inline void both_ways(int n, const std::function<void(Board& board, int rank)>& work) {
  Board* apart = new_board();
  in_processes(n, [&](int rank) { work(*apart, rank); });
  Board* together = new_board();
  in_threads(n, [&](int rank) { work(*together, rank); });
}

}  // namespace moeccl::testing
