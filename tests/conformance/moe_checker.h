// SPDX-License-Identifier: Apache-2.0
// Runs one routing's operations on a rank and compares every byte with MoeReference.
#pragma once

#include <gtest/gtest.h>

#include <cstring>

#include "tests/conformance/moe_reference.h"

namespace moeccl::testing {

// One rank of a MoE test.
struct MoeRank {
  const MoeShape& shape;
  moecclMoeLayout_t layout;
  int rank;
  moecclComm_t comm;
};

inline moecclMoeConfig_t config_for(const MoeShape& shape, moecclMoeLayout_t layout, const char* algorithm,
                                    const int32_t* owner) {
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  config.hidden_bytes = shape.hidden_bytes;
  config.type = shape.type;
  config.top_k = shape.top_k;
  config.n_experts = shape.n_experts;
  config.expert_rank = owner;
  config.max_tokens = shape.tokens;
  config.layout = layout;
  config.align_rows = layout == moecclLayoutExpertMajor ? shape.align : 0;
  config.capacity = shape.capacity;
  config.algorithm = algorithm;
  config.staging_bytes = shape.staging_bytes;
  return config;
}

// Returns the owner of each expert. With the default placement the ranks tell each other, and it must be contiguous and
// even.
inline std::vector<int> learn_owners(const MoeRank& me, const std::vector<int32_t>& given,
                                     const moecclRoutingInfo_t& info) {
  if (!given.empty()) return {given.begin(), given.end()};
  const int n = me.shape.n;
  std::vector<int32_t> counts(static_cast<size_t>(n));
  const int32_t mine = info.n_local_experts;
  EXPECT_EQ(moecclAllGather(&mine, counts.data(), 1, moecclInt32, me.comm, nullptr), moecclSuccess)
      << moecclGetLastError(me.comm);
  std::vector<int> owner;
  for (int r = 0; r < n; ++r) {
    const int32_t count = counts[static_cast<size_t>(r)];
    EXPECT_TRUE(count == me.shape.n_experts / n || count == (me.shape.n_experts + n - 1) / n)
        << "rank " << r << " owns " << count;
    for (int32_t e = 0; e < count; ++e) owner.push_back(r);
  }
  EXPECT_EQ(owner.size(), static_cast<size_t>(me.shape.n_experts));
  owner.resize(static_cast<size_t>(me.shape.n_experts));
  return owner;
}

class MoeChecker {
 public:
  MoeChecker(const MoeRank& me, const MoeReference& reference, moecclRouting_t routing)
      : me_(me),
        ref_(reference),
        routing_(routing),
        expert_major_(me.layout == moecclLayoutExpertMajor),
        tokens_(reference.n_tokens(me.rank)),
        row_bytes_(me.shape.hidden_bytes),
        info_() {
    info_.size = sizeof(info_);
    EXPECT_EQ(moecclRoutingGetInfo(routing, &info_), moecclSuccess) << moecclGetLastError(me.comm);
  }

  const moecclRoutingInfo_t& facts() const { return info_; }

  // Returns false when the sizes are wrong, because further checks would read beyond arrays.
  bool info() {
    const std::vector<ExpectedRow>& rows = ref_.rows(me_.rank);
    EXPECT_EQ(info_.n_tokens, tokens_);
    EXPECT_EQ(info_.n_rows, rows.size());
    EXPECT_EQ(info_.n_unique, ref_.n_unique(me_.rank));
    EXPECT_EQ(info_.logical_bytes, tokens_ * static_cast<size_t>(me_.shape.top_k) * row_bytes_);
    const std::vector<int> local = ref_.local_experts(me_.rank);
    if (info_.n_rows != rows.size() || info_.n_local_experts != static_cast<int32_t>(local.size())) {
      ADD_FAILURE() << "local experts " << info_.n_local_experts << " rather than " << local.size();
      return false;
    }
    for (size_t e = 0; e < local.size(); ++e) EXPECT_EQ(info_.local_experts[e], local[e]);
    check_drops();
    expert_major_ ? check_groups(local) : check_choices();
    return true;
  }

  void dispatch() {
    const std::vector<unsigned char> in = token_rows();
    std::vector<unsigned char> out = filled(info_.n_rows);
    ASSERT_EQ(moecclDispatch(routing_, in.data(), out.data(), nullptr), moecclSuccess) << moecclGetLastError(me_.comm);
    std::vector<unsigned char> want(row_bytes_);
    size_t wrong = 0;
    for (size_t r = 0; r < info_.n_rows; ++r) {
      const ExpectedRow& row = ref_.rows(me_.rank)[r];
      std::fill(want.begin(), want.end(), 0);  // padding is zero
      if (row.src >= 0) fill_token(row.src, static_cast<size_t>(row.token), want.data());
      wrong += memcmp(want.data(), out.data() + r * row_bytes_, row_bytes_) != 0;
    }
    EXPECT_EQ(wrong, 0u) << "of " << info_.n_rows << " dispatched rows";
    EXPECT_EQ(out.back(), 0xa5) << "written beyond the rows";
  }

  // Runs combine, or dispatch's backward, which is the same sum without weights.
  void combine(bool backward) {
    std::vector<unsigned char> in = filled(info_.n_rows);  // padding keeps its filler, which must not be read
    for (size_t r = 0; r < info_.n_rows; ++r) {
      if (ref_.rows(me_.rank)[r].src >= 0) fill_row(me_.rank, r, in.data() + r * row_bytes_);
    }
    std::vector<unsigned char> out = filled(tokens_);
    const moecclResult_t result = backward ? moecclDispatchBackward(routing_, in.data(), out.data(), nullptr)
                                           : moecclCombine(routing_, in.data(), out.data(), nullptr);
    ASSERT_EQ(result, moecclSuccess) << moecclGetLastError(me_.comm);
    size_t wrong = 0;
    for (size_t t = 0; t < tokens_; ++t) {
      const auto sources = ref_.rows_of(me_.rank, t);
      for (size_t e = 0; e < me_.shape.elements(); ++e) {
        double sum = 0;
        for (const auto& w : sources) {
          const double scale = expert_major_ && !backward ? weight(t, w.choice) : 1;
          sum += scale * value(ref_.row_value(w.rank, w.row, e));
        }
        wrong += value(load(me_.shape.type, out.data() + t * row_bytes_, e)) != sum;
      }
    }
    EXPECT_EQ(wrong, 0u) << (backward ? "elements of dispatch's backward" : "elements of combine") << " of " << tokens_
                         << " tokens";
    EXPECT_EQ(out.back(), 0xa5) << "written beyond the tokens";
  }

  void combine_backward() {
    const std::vector<unsigned char> grad_out = token_rows();
    std::vector<unsigned char> grad_in = filled(info_.n_rows), in = filled(info_.n_rows);
    for (size_t r = 0; r < info_.n_rows; ++r) {
      if (ref_.rows(me_.rank)[r].src >= 0) fill_row(me_.rank, r, in.data() + r * row_bytes_);
    }
    const size_t choices = tokens_ * static_cast<size_t>(me_.shape.top_k);
    std::vector<float> grad_weight(choices + 1, -77);
    ASSERT_EQ(moecclCombineBackward(routing_, grad_out.data(), grad_in.data(), expert_major_ ? in.data() : nullptr,
                                    expert_major_ ? grad_weight.data() : nullptr, nullptr),
              moecclSuccess)
        << moecclGetLastError(me_.comm);
    size_t wrong = 0;
    for (size_t r = 0; r < info_.n_rows; ++r) {
      const ExpectedRow& row = ref_.rows(me_.rank)[r];
      if (row.src < 0) continue;
      for (size_t e = 0; e < me_.shape.elements(); ++e) {
        const double scale = expert_major_ ? row.weight : 1;
        const double want = scale * value(ref_.token_value(row.src, static_cast<size_t>(row.token), e));
        wrong += value(load(me_.shape.type, grad_in.data() + r * row_bytes_, e)) != want;
      }
    }
    EXPECT_EQ(wrong, 0u) << "elements of combine's backward in " << info_.n_rows << " rows";
    if (expert_major_) check_grad_weight(grad_weight);
  }

 private:
  double value(Number v) const {
    if (is_float(me_.shape.type)) return v.f;
    return is_signed(me_.shape.type) ? static_cast<double>(static_cast<int64_t>(v.u)) : static_cast<double>(v.u);
  }
  double weight(size_t token, int choice) const {
    return ref_.weight(me_.rank)[token * static_cast<size_t>(me_.shape.top_k) + static_cast<size_t>(choice)];
  }
  std::vector<unsigned char> filled(size_t rows) const {
    return std::vector<unsigned char>(rows * row_bytes_ + 1, 0xa5);
  }
  void fill_token(int rank, size_t token, unsigned char* row) const {
    for (size_t e = 0; e < me_.shape.elements(); ++e) store(me_.shape.type, row, e, ref_.token_value(rank, token, e));
  }
  void fill_row(int rank, size_t r, unsigned char* row) const {
    for (size_t e = 0; e < me_.shape.elements(); ++e) store(me_.shape.type, row, e, ref_.row_value(rank, r, e));
  }
  std::vector<unsigned char> token_rows() const {
    std::vector<unsigned char> rows(tokens_ * row_bytes_ + 1);
    for (size_t t = 0; t < tokens_; ++t) fill_token(me_.rank, t, rows.data() + t * row_bytes_);
    return rows;
  }

  void check_drops() {
    uint64_t dropped = 0;
    for (int e = 0; e < me_.shape.n_experts; ++e) {
      const int32_t want = ref_.drops(me_.rank)[static_cast<size_t>(e)];
      EXPECT_EQ(info_.drop_counts[e], want) << "expert " << e;
      dropped += static_cast<uint64_t>(want);
    }
    EXPECT_EQ(info_.n_dropped, dropped);
  }

  void check_groups(const std::vector<int>& local) {
    const std::vector<ExpectedRow>& rows = ref_.rows(me_.rank);
    EXPECT_EQ(info_.choice_offsets, nullptr);
    size_t row = 0;
    for (size_t e = 0; e < local.size(); ++e) {
      EXPECT_EQ(info_.expert_offsets[e], static_cast<int64_t>(row)) << "group " << e;
      int32_t count = 0;
      for (; row < rows.size() && rows[row].expert == local[e]; ++row) ++count;
      EXPECT_EQ(info_.expert_counts[e], count) << "group " << e;
      while (row < rows.size() && rows[row].src < 0) ++row;
    }
    EXPECT_TRUE(local.empty() || info_.expert_offsets[local.size()] == static_cast<int64_t>(rows.size()));
    size_t wrong = 0;
    for (size_t r = 0; r < rows.size(); ++r) {
      wrong += info_.row_source[r] != rows[r].src || info_.row_token[r] != rows[r].token ||
               info_.choice_weight[r] != rows[r].weight;
    }
    EXPECT_EQ(wrong, 0u) << "row descriptions";
  }

  void check_choices() {
    const std::vector<ExpectedRow>& rows = ref_.rows(me_.rank);
    EXPECT_EQ(info_.expert_offsets, nullptr);
    size_t wrong = 0;
    for (size_t r = 0; r < rows.size(); ++r) {
      wrong += info_.row_source[r] != rows[r].src || info_.row_token[r] != rows[r].token;
      const auto from = static_cast<size_t>(info_.choice_offsets[r]),
                 to = static_cast<size_t>(info_.choice_offsets[r + 1]);
      if (to - from != rows[r].local.size()) {
        ++wrong;
        continue;
      }
      for (size_t c = from; c < to; ++c) {
        wrong += info_.choice_expert[c] != rows[r].local[c - from].first ||
                 info_.choice_weight[c] != rows[r].local[c - from].second;
      }
    }
    EXPECT_EQ(wrong, 0u) << "row descriptions";
  }

  void check_grad_weight(const std::vector<float>& got) {
    const auto k = static_cast<size_t>(me_.shape.top_k);
    size_t wrong = 0;
    for (size_t t = 0; t < tokens_; ++t) {
      std::vector<double> want(k, 0);
      for (const auto& w : ref_.rows_of(me_.rank, t)) {
        for (size_t e = 0; e < me_.shape.elements(); ++e) {
          want[static_cast<size_t>(w.choice)] +=
              value(ref_.token_value(me_.rank, t, e)) * value(ref_.row_value(w.rank, w.row, e));
        }
      }
      for (size_t c = 0; c < k; ++c) wrong += got[t * k + c] != static_cast<float>(want[c]);
    }
    EXPECT_EQ(wrong, 0u) << "gradients of weights";
    EXPECT_EQ(got.back(), -77) << "written beyond the weights";
  }

  const MoeRank& me_;
  const MoeReference& ref_;
  moecclRouting_t routing_;
  bool expert_major_;
  size_t tokens_, row_bytes_;
  moecclRoutingInfo_t info_;
};

}  // namespace moeccl::testing
