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

// One handle's tensors in high-throughput mode, for `rows` received rows, and its calls.
class Flat {
 public:
  Flat(EpRank& rank, const EpStep& step, size_t rows)
      : r(rank),
        n(step.tokens(rank.rank())),
        k(static_cast<size_t>(step.top_k)),
        m(rank.memory()),
        topk(m, ncclInt64, {n, k}),
        in(m, ncclFloat32, {n, step.hidden}),
        weights(m, ncclFloat32, {n, k}),
        out(m, ncclFloat32, {rows, step.hidden}),
        out_weights(m, ncclFloat32, {rows, k}, -7),
        out_idx(m, ncclInt64, {rows, k}, -7),
        sums(m, ncclFloat32, {n, step.hidden}),
        grads(m, ncclFloat32, {n, k}) {
    bring(step);
  }
  void bring(const EpStep& step) {
    topk.put(step.experts(r.rank()));
    in.put(step.values(r.rank()));
    weights.put(step.weights(r.rank()));
  }
  virtual ~Flat() = default;
  // What comes with the rows.
  virtual ncclEpTensor_t* row_weights() { return out_weights.get(); }
  virtual ncclEpTensor_t* row_choices() { return out_idx.get(); }
  ncclResult_t dispatch(ncclEpHandle_t handle, ncclEpPassDir_t pass, ncclEpExpertIdKind_t kind = {}) {
    auto inputs = ep_init<ncclEpDispatchInputs_t>();
    auto outputs = ep_init<ncclEpDispatchOutputs_t>();
    auto info = ep_init<ncclEpLayoutInfo_t>();
    auto config = ep_init<ncclEpDispatchConfig_t>();
    inputs.tokens = in.get();
    outputs.tokens = out.get();
    info.recv_topk_idx_kind = kind;
    config.pass_direction = pass;
    if (pass == NCCL_EP_FWD_PASS) {
      inputs.topk_weights = weights.get();
      outputs.topk_weights = row_weights();
      outputs.topk_idx = row_choices();
    }
    return ncclEpDispatch(handle, no_inputs ? nullptr : &inputs, no_outputs ? nullptr : &outputs, &info, &config,
                          r.stream());
  }
  ncclResult_t combine(ncclEpHandle_t handle, ncclEpPassDir_t pass) {
    auto inputs = ep_init<ncclEpCombineInputs_t>();
    auto outputs = ep_init<ncclEpCombineOutputs_t>();
    auto config = ep_init<ncclEpCombineConfig_t>();
    inputs.tokens = out.get();
    outputs.tokens = sums.get();
    config.pass_direction = pass;
    if (pass == NCCL_EP_BWD_PASS) {
      inputs.topk_weights = row_weights();
      outputs.topk_weights = grads.get();
    }
    return ncclEpCombine(handle, no_inputs ? nullptr : &inputs, no_outputs ? nullptr : &outputs, &config, r.stream());
  }
  void expect_rows(const EpStep& step, size_t kept, int64_t base) {
    const auto rows = step.rows(r.rank());
    const std::vector<float> v = out.values(), w = out_weights.values();
    const std::vector<int64_t> idx = out_idx.values();
    for (size_t row = 0; row < std::min(kept, rows.size()); ++row) {
      const EpStep::Choice& of = rows[row][0];
      for (size_t h = 0; h < step.hidden; ++h)
        ASSERT_EQ(v[row * step.hidden + h], step.value(of.source, of.token, h)) << "row " << row;
      for (size_t c = 0; c < k; ++c) {
        const bool is = c < rows[row].size();
        ASSERT_EQ(idx[row * k + c], is ? rows[row][c].local + base : -1) << "row " << row;
        ASSERT_EQ(w[row * k + c], is ? step.weight(of.source, of.token, rows[row][c].choice) : 0) << "row " << row;
      }
    }
    for (size_t i = rows.size() * k; i < idx.size(); ++i)
      ASSERT_TRUE(idx[i] == -1 && w[i] == 0) << "no row, slot " << i;
  }
  // Applies the experts and their weights to the rows.
  void compute(const EpStep& step, bool weighted) {
    const auto rows = step.rows(r.rank());
    std::vector<float> v = out.values();
    for (size_t row = 0; row < std::min(rows.size(), v.size() / step.hidden); ++row)
      for (size_t h = 0; h < step.hidden; ++h) {
        const float x = v[row * step.hidden + h];
        float y = 0;
        for (const EpStep::Choice& c : rows[row])
          y += (weighted ? step.weight(c.source, c.token, c.choice) : 1) *
               EpStep::at_expert(c.local + r.rank() * step.n_local(), x);
        v[row * step.hidden + h] = y;
      }
    out.put(v);
  }

  void expect_forward_pass(const EpStep& step, ncclEpHandle_t handle) {
    ASSERT_NCCL(dispatch(handle, NCCL_EP_FWD_PASS));
    expect_rows(step, SIZE_MAX, 0);
    compute(step, true);
    ASSERT_NCCL(combine(handle, NCCL_EP_FWD_PASS));
    EXPECT_EQ(sums.values(), step.sums(r.rank(), true));
  }
  // All tokens of the ranks chose one expert of rank 0, which had room for only the first `most` of them.
  void expect_sums_of_the_first(const EpStep& step) {
    const std::vector<float> got = sums.values();
    const size_t before = r.rank() == 0 ? 0 : step.tokens(0);
    for (size_t i = 0; i < got.size(); ++i) {
      const size_t token = i / step.hidden;
      const bool kept = before + token < step.most;
      ASSERT_EQ(got[i], kept ? step.value(r.rank(), token, i % step.hidden) : 0) << "token " << token;
    }
  }

  EpRank& r;
  size_t n, k;
  EpMemory& m;
  EpTensor<int64_t> topk;
  EpTensor<float> in, weights, out, out_weights;
  EpTensor<int64_t> out_idx;
  EpTensor<float> sums, grads;
  bool no_inputs = false, no_outputs = false;  // what the calls leave out
};

inline ncclEpGroupConfig_t config_of(const EpStep& step, unsigned most_received) {
  ncclEpGroupConfig_t c = EpRank::config(step, NCCL_EP_ALGO_HIGH_THROUGHPUT);
  c.max_recv_tokens_per_rank = most_received;
  c.num_topk = static_cast<unsigned>(step.top_k);
  return c;
}
inline unsigned everything(const EpStep& step) {
  return static_cast<unsigned>(step.n_ranks * static_cast<int>(step.most));
}

// One handle's tensors in low-latency mode, and its calls.
struct LatencyTensors {
  LatencyTensors(EpRank& r, const EpStep& s, std::vector<size_t> places, size_t counters)
      : n(s.tokens(r.rank())),
        k(static_cast<size_t>(s.top_k)),
        topk(r.memory(), ncclInt32, {n, k}),
        in(r.memory(), ncclFloat32, {n, s.hidden}),
        weights(r.memory(), ncclFloat32, {n, k}),
        out(r.memory(), ncclFloat32, with(places, s.hidden), -99),
        sums(r.memory(), ncclFloat32, {n, s.hidden}),
        out_weights(r.memory(), ncclFloat32, with(places, k)),
        out_idx(r.memory(), ncclInt32, with(places, k), -7),
        counts(r.memory(), ncclInt32, {counters}, -7) {
    bring(s, r.rank());
  }
  void bring(const EpStep& s, int rank) {
    const std::vector<int64_t> experts = s.experts(rank);
    topk.put({experts.begin(), experts.end()});
    in.put(s.values(rank));
    weights.put(s.weights(rank));
  }
  static std::vector<size_t> with(std::vector<size_t> sizes, size_t last) {
    sizes.push_back(last);
    return sizes;
  }
  size_t n, k;
  EpTensor<int32_t> topk;
  EpTensor<float> in, weights, out, sums, out_weights;
  EpTensor<int32_t> out_idx, counts;
};

inline ncclResult_t dispatch(EpRank& r, ncclEpHandle_t handle, LatencyTensors& t, bool by_rank, unsigned send_only,
                             ncclEpExpertIdKind_t kind = {}) {
  auto inputs = ep_init<ncclEpDispatchInputs_t>();
  auto outputs = ep_init<ncclEpDispatchOutputs_t>();
  auto info = ep_init<ncclEpLayoutInfo_t>();
  auto config = ep_init<ncclEpDispatchConfig_t>();
  inputs.tokens = t.in.get();
  outputs.tokens = t.out.get();
  (by_rank ? info.src_rank_counters : info.expert_counters) = t.counts.get();
  info.recv_topk_idx_kind = kind;
  config.send_only = send_only;
  if (by_rank) {
    inputs.topk_weights = t.weights.get();
    outputs.topk_weights = t.out_weights.get();
    outputs.topk_idx = t.out_idx.get();
  }
  return ncclEpDispatch(handle, &inputs, &outputs, &info, &config, r.stream());
}

inline ncclResult_t combine(EpRank& r, ncclEpHandle_t handle, LatencyTensors& t, bool by_rank, unsigned send_only) {
  auto inputs = ep_init<ncclEpCombineInputs_t>();
  auto outputs = ep_init<ncclEpCombineOutputs_t>();
  auto config = ep_init<ncclEpCombineConfig_t>();
  inputs.tokens = t.out.get();
  outputs.tokens = t.sums.get();
  if (!by_rank) outputs.topk_weights = t.weights.get();
  config.send_only = send_only;
  return ncclEpCombine(handle, &inputs, &outputs, &config, r.stream());
}

inline EpStep step_of(int n) {
  EpStep s;
  s.n_ranks = n, s.n_experts = 4 * n;
  return s;
}

// Runs the ranks as processes, and then as threads of one process.
inline void both_ways(int n, const std::function<void(Board& board, int rank)>& work) {
  Board* apart = new_board();
  in_processes(n, [&](int rank) { work(*apart, rank); });
  Board* together = new_board();
  in_threads(n, [&](int rank) { work(*together, rank); });
}

// What a failed call said. Threads of a process share it.
inline std::string said() { return ncclGetLastError(nullptr); }

}  // namespace moeccl::testing

#define EXPECT_REFUSED(code, call, words)                                       \
  do {                                                                          \
    EXPECT_EQ(call, code) << said();                                            \
    EXPECT_NE(said().find(words), std::string::npos) << "the text: " << said(); \
  } while (false)
