// SPDX-License-Identifier: Apache-2.0
// One rank's random operations on data that every rank can predict: nine collectives, a ring of Send and Recv, and a
// MoE layer with a new routing at each step. Checks the data of each operation that returned success.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "moeccl/moeccl.h"

namespace moeccl::testing {

struct Operations {
  int n = 4;
  bool heap = false;
  uint64_t seed = 0;
  int op = -1;  // one of step()'s operations; -1: all in turn
};

inline constexpr int kOps = 11;
inline constexpr size_t kMostLog = 17;  // of a block, in elements: 512 KiB
inline constexpr unsigned char kMine = 0x5a;

inline int32_t value(uint64_t it, int from, size_t i) {
  return static_cast<int32_t>(it * 31 + static_cast<uint64_t>(from) * 1009 + i * 7);
}

// One rank's buffers and calls. `wrong` counts wrong elements of successful operations.
class Worker {
 public:
  Worker(const Operations& operations, int rank, moecclComm_t comm)
      : operations_(operations), n_(operations.n), rank_(rank), comm_(comm) {
    elements_ = (size_t{1} << kMostLog) * static_cast<size_t>(n_) + 64;
    for (int32_t** p : {&in_, &out_}) {
      void* memory = nullptr;
      if (operations.heap) {
        EXPECT_EQ(moecclMemAlloc(&memory, elements_ * 4), moecclSuccess) << moecclGetLastError(nullptr);
      } else {
        memory = malloc(elements_ * 4);
      }
      *p = static_cast<int32_t*>(memory);
    }
  }
  ~Worker() {
    EXPECT_EQ(routing_ == nullptr ? moecclSuccess : moecclRoutingDestroy(routing_), moecclSuccess);
    EXPECT_EQ(moe_ == nullptr ? moecclSuccess : moecclMoeDestroy(moe_), moecclSuccess);
    for (int32_t* p : {in_, out_}) {
      if (operations_.heap) {
        EXPECT_EQ(moecclMemFree(p), moecclSuccess) << moecclGetLastError(nullptr);
      } else {
        free(p);
      }
    }
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  moecclResult_t step(uint64_t it) {
    std::mt19937_64 random(it * 7919 + operations_.seed);
    const size_t count = (size_t{1} << (random() % kMostLog)) + random() % 3;
    const int root = static_cast<int>(random() % static_cast<uint64_t>(n_));
    const int op = operations_.op >= 0 ? operations_.op : static_cast<int>(random() % kOps);
    it_ = it;
    name_ = kNames[op];
    const auto n = static_cast<size_t>(n_);
    switch (op) {
      case 0:
        fill(count);
        if (const auto r = moecclAllReduce(in_, out_, count, moecclInt32, moecclSum, comm_, nullptr)) return r;
        return sums(0, count);
      case 1:
        fill(count);
        if (const auto r = moecclReduce(in_, out_, count, moecclInt32, moecclSum, root, comm_, nullptr)) return r;
        return rank_ == root ? sums(0, count) : moecclSuccess;
      case 2:
        fill(count);
        if (const auto r = moecclBroadcast(in_, out_, count, moecclInt32, root, comm_, nullptr)) return r;
        return block(0, count, root, 0);
      case 3:
        fill(count);
        if (const auto r = moecclAllGather(in_, out_, count, moecclInt32, comm_, nullptr)) return r;
        return blocks(count, 0);
      case 4:
        fill(count * n);
        if (const auto r = moecclReduceScatter(in_, out_, count, moecclInt32, moecclSum, comm_, nullptr)) return r;
        return sums(static_cast<size_t>(rank_) * count, count);
      case 5:
        fill(count * n);
        if (const auto r = moecclAllToAll(in_, out_, count, moecclInt32, comm_, nullptr)) return r;
        return blocks(count, static_cast<size_t>(rank_) * count);
      case 6:
        return all_to_all_v(count);
      case 7:
        fill(count);
        if (const auto r = moecclGather(in_, out_, count, moecclInt32, root, comm_, nullptr)) return r;
        return rank_ == root ? blocks(count, 0) : moecclSuccess;
      case 8:
        fill(count * n);
        if (const auto r = moecclScatter(in_, out_, count, moecclInt32, root, comm_, nullptr)) return r;
        return block(0, count, root, static_cast<size_t>(rank_) * count);
      case 9: {
        fill(count);
        const int from = (rank_ + n_ - 1) % n_;
        EXPECT_EQ(moecclGroupStart(), moecclSuccess);
        const auto a = moecclSend(in_, count, moecclInt32, (rank_ + 1) % n_, comm_, nullptr);
        const auto b = moecclRecv(out_, count, moecclInt32, from, comm_, nullptr);
        const auto c = moecclGroupEnd();
        if (a != moecclSuccess || b != moecclSuccess || c != moecclSuccess) return c != moecclSuccess ? c : a ? a : b;
        return block(0, count, from, 0);
      }
      default:
        return layer();
    }
  }

  // Reuses the memory, which belongs to this rank again after the call has failed.
  void take_back() {
    for (int32_t* p : {in_, out_}) std::memset(p, kMine, elements_ * 4);
    for (auto* v : {&tokens_, &rows_, &back_}) {
      if (!v->empty()) std::memset(v->data(), kMine, v->size() * sizeof(float));
    }
  }
  size_t bytes_written_late() const {
    size_t late = 0;
    const auto look = [&late](const void* p, size_t bytes) {
      const auto* b = static_cast<const unsigned char*>(p);
      late += static_cast<size_t>(std::count_if(b, b + bytes, [](unsigned char c) { return c != kMine; }));
    };
    for (const int32_t* p : {in_, out_}) look(p, elements_ * 4);
    for (const auto* v : {&tokens_, &rows_, &back_}) look(v->data(), v->size() * sizeof(float));
    return late;
  }
  uint64_t wrong() const { return wrong_; }
  const std::string& what() const { return what_; }
  const char* name() const { return name_; }

 private:
  static constexpr const char* kNames[kOps] = {"allreduce",     "reduce",   "broadcast", "allgather",
                                               "reducescatter", "alltoall", "alltoallv", "gather",
                                               "scatter",       "sendrecv", "layer"};

  void fill(size_t count) {
    for (size_t i = 0; i < count; ++i) in_[i] = value(it_, rank_, i);
  }
  void expect(bool right, size_t at) {
    if (right) return;
    if (wrong_++ == 0) what_ = std::string(name_) + " #" + std::to_string(it_) + ", element " + std::to_string(at);
  }
  moecclResult_t sums(size_t first, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      int32_t sum = 0;
      for (int r = 0; r < n_; ++r) sum += value(it_, r, first + i);
      expect(out_[i] == sum, i);
    }
    return moecclSuccess;
  }
  moecclResult_t block(size_t at, size_t count, int from, size_t first) {
    for (size_t i = 0; i < count; ++i) expect(out_[at + i] == value(it_, from, first + i), at + i);
    return moecclSuccess;
  }
  moecclResult_t blocks(size_t count, size_t first) {
    for (int r = 0; r < n_; ++r) block(static_cast<size_t>(r) * count, count, r, first);
    return moecclSuccess;
  }

  moecclResult_t all_to_all_v(size_t most) {
    const auto n = static_cast<size_t>(n_);
    const auto size = [&](size_t from, size_t to) { return (it_ * 5 + from * 3 + to * 11) % (most + 1); };
    std::vector<size_t> send(n), send_at(n), receive(n), receive_at(n);
    const auto me = static_cast<size_t>(rank_);
    for (size_t r = 0, s = 0, d = 0; r < n; ++r) {
      send[r] = size(me, r), send_at[r] = s, s += send[r];
      receive[r] = size(r, me), receive_at[r] = d, d += receive[r];
      for (size_t i = 0; i < send[r]; ++i) in_[send_at[r] + i] = value(it_, rank_ * 64 + static_cast<int>(r), i);
    }
    if (const auto r = moecclAllToAllv(in_, send.data(), send_at.data(), out_, receive.data(), receive_at.data(),
                                       moecclInt32, comm_, nullptr))
      return r;
    for (size_t r = 0; r < n; ++r) block(receive_at[r], receive[r], static_cast<int>(r) * 64 + rank_, 0);
    return moecclSuccess;
  }

  float token(uint64_t it, int from, size_t i) const {
    return static_cast<float>((it * 3 + static_cast<uint64_t>(from) * 17 + i) % 1000);
  }
  moecclResult_t layer() {
    constexpr size_t kTokens = 48, kHidden = 96;
    constexpr int kTopK = 2;
    const int n_experts = 2 * n_;
    std::mt19937_64 random(it_ * 977 + static_cast<uint64_t>(rank_));
    std::vector<int32_t> experts(kTokens * kTopK);
    std::vector<int> ranks_of(kTokens);
    for (size_t t = 0; t < kTokens; ++t) {
      const auto a = static_cast<int32_t>(random() % static_cast<uint64_t>(n_experts));
      const int32_t b = (a + 1 + static_cast<int32_t>(random() % static_cast<uint64_t>(n_experts - 1))) % n_experts;
      experts[t * kTopK] = a, experts[t * kTopK + 1] = b;
      ranks_of[t] = a / 2 == b / 2 ? 1 : 2;
    }
    if (moe_ == nullptr) {
      moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
      config.hidden_bytes = kHidden * sizeof(float);
      config.type = moecclFloat32;
      config.top_k = kTopK;
      config.n_experts = n_experts;
      config.max_tokens = kTokens;
      if (const auto r = moecclMoeCreate(&moe_, comm_, &config)) return r;
      if (const auto r = moecclRoutingCreate(&routing_, moe_, experts.data(), nullptr, kTokens)) return r;
    } else if (const auto r = moecclRoutingUpdate(routing_, experts.data(), nullptr, kTokens)) {
      return r;
    }
    moecclRoutingInfo_t info = {};
    info.size = sizeof(info);
    if (const auto r = moecclRoutingGetInfo(routing_, &info)) return r;
    tokens_.resize(kTokens * kHidden);
    back_.assign(kTokens * kHidden, -1);
    rows_.assign(std::max<size_t>(1, info.n_rows) * kHidden, -1);
    for (size_t i = 0; i < tokens_.size(); ++i) tokens_[i] = token(it_, rank_, i);
    if (const auto r = moecclDispatch(routing_, tokens_.data(), rows_.data(), nullptr)) return r;
    for (size_t row = 0; row < info.n_rows; ++row) {
      for (size_t h = 0; h < kHidden; h += 7) {
        const size_t at = static_cast<size_t>(info.row_token[row]) * kHidden + h;
        expect(rows_[row * kHidden + h] == token(it_, info.row_source[row], at), row);
      }
    }
    if (const auto r = moecclCombine(routing_, rows_.data(), back_.data(), nullptr)) return r;
    for (size_t t = 0; t < kTokens; ++t) {
      for (size_t h = 0; h < kHidden; h += 7)
        expect(back_[t * kHidden + h] == static_cast<float>(ranks_of[t]) * tokens_[t * kHidden + h], t);
    }
    return moecclSuccess;
  }

  const Operations operations_;
  int n_, rank_;
  moecclComm_t comm_;
  size_t elements_ = 0;
  int32_t *in_ = nullptr, *out_ = nullptr;
  moecclMoe_t moe_ = nullptr;
  moecclRouting_t routing_ = nullptr;
  std::vector<float> tokens_, rows_, back_;
  uint64_t it_ = 0, wrong_ = 0;
  const char* name_ = "";
  std::string what_;
};

}  // namespace moeccl::testing
