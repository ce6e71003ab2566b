// SPDX-License-Identifier: Apache-2.0
// A program of NCCL EP in high-throughput mode: every result against a dense reference.
#include "tests/shim/ep_ranks.h"

namespace moeccl::testing {
namespace {

TEST(EpThroughput, FlatForwardPass) {
  for (const int n : {2, 3}) {
    both_ways(n, [&](Board& board, int rank) {
      EpStep step;
      step.n_ranks = n, step.n_experts = 4 * n;
      EpRank r(board, step, rank, config_of(step, everything(step)));
      Flat t(r, step, everything(step));
      ncclEpHandle_t handle = nullptr;
      ASSERT_NCCL(
          ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_FLAT, t.topk.get(), nullptr, nullptr, r.stream()));
      t.expect_forward_pass(step, handle);
      EXPECT_NCCL(ncclEpHandleDestroy(handle));
    });
  }
}

// Ranks that are threads on one device share this stream.
TEST(EpThroughput, TheDefaultStreamServes) {
  both_ways(2, [](Board& board, int rank) {
    const EpStep step;
    EpRank r(board, step, rank, config_of(step, everything(step)), false);
    Flat t(r, step, everything(step));
    ncclEpHandle_t handle = nullptr;
    ASSERT_NCCL(ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_FLAT, t.topk.get(), nullptr, nullptr, nullptr));
    for (int round = 0; round < 3; ++round) {
      t.expect_forward_pass(step, handle);
    }
    EXPECT_NCCL(ncclEpHandleDestroy(handle));
  });
}

TEST(EpThroughput, FlatCountersAndRowsSizedByThem) {
  both_ways(2, [](Board& board, int rank) {
    const EpStep step;
    EpRank r(board, step, rank, config_of(step, NCCL_EP_AUTO));
    EpTensor<int32_t> counts(r.memory(), ncclInt32, {static_cast<size_t>(step.n_local())}, -7);
    EpTensor<int32_t> total(r.memory(), ncclInt32, {1}, -7);
    auto info = ep_init<ncclEpLayoutInfo_t>();
    info.expert_counters = counts.get();
    info.recv_total_counter = total.get();
    EpTensor<int64_t> topk(r.memory(), ncclInt64, {step.tokens(rank), static_cast<size_t>(step.top_k)});
    topk.put(step.experts(rank));
    ncclEpHandle_t handle = nullptr;
    ASSERT_NCCL(ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_FLAT, topk.get(), &info, nullptr, r.stream()));
    const size_t rows = step.rows(rank).size();
    EXPECT_EQ(total.values(), std::vector<int32_t>{static_cast<int32_t>(rows)});
    std::vector<int32_t> wanted(static_cast<size_t>(step.n_local()));
    for (const EpStep::Choice& c : step.arriving(rank)) ++wanted[static_cast<size_t>(c.local)];
    EXPECT_EQ(counts.values(), wanted);
    Flat t(r, step, rows);
    ASSERT_NCCL(t.dispatch(handle, NCCL_EP_FWD_PASS, NCCL_EP_EXPERT_ID_GLOBAL));
    t.expect_rows(step, SIZE_MAX, rank * step.n_local());
    Flat small(r, step, rows - 1);
    EXPECT_EQ(small.dispatch(handle, NCCL_EP_FWD_PASS), ncclInvalidArgument) << "one row too few";
    EXPECT_NCCL(ncclEpHandleDestroy(handle));
  });
}

TEST(EpThroughput, FlatBackwardPassReusesTheHandle) {
  both_ways(3, [](Board& board, int rank) {
    EpStep step;
    step.n_ranks = 3, step.n_experts = 9;
    EpRank r(board, step, rank, config_of(step, everything(step)));
    Flat t(r, step, everything(step));
    ncclEpHandle_t handle = nullptr;
    ASSERT_NCCL(
        ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_FLAT, t.topk.get(), nullptr, nullptr, r.stream()));
    for (int round = 0; round < 3; ++round) {
      if (round != 1) {
        ASSERT_NCCL(t.dispatch(handle, NCCL_EP_FWD_PASS));
      }
      ASSERT_NCCL(t.dispatch(handle, NCCL_EP_BWD_PASS));
      t.compute(step, false);
      // The gradient of a weight: here the weight itself, halved.
      const auto rows = step.rows(rank);
      std::vector<float> grads(t.out_weights.size());
      for (size_t row = 0; row < rows.size(); ++row)
        for (size_t c = 0; c < rows[row].size(); ++c)
          grads[row * t.k + c] = step.weight(rows[row][c].source, rows[row][c].token, rows[row][c].choice) / 2;
      t.out_weights.put(grads);
      ASSERT_NCCL(t.combine(handle, NCCL_EP_BWD_PASS));
      EXPECT_EQ(t.sums.values(), step.sums(rank, false));
      std::vector<float> wanted = step.weights(rank);
      for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = step.experts(rank)[i] < 0 ? 0 : wanted[i] / 2;
      EXPECT_EQ(t.grads.values(), wanted);
    }
    EXPECT_NCCL(ncclEpHandleDestroy(handle));
  });
}

// Two ranks send all of their tokens to expert 0, whose rank keeps the first ones.
TEST(EpThroughput, RowsBeyondTheLimitAreDropped) {
  both_ways(2, [](Board& board, int rank) {
    const EpStep step;
    auto config = config_of(step, static_cast<unsigned>(step.most));
    config.overflow_policy = NCCL_EP_OVERFLOW_DROP;
    EpRank r(board, step, rank, config);
    Flat t(r, step, step.most);
    t.topk.put(std::vector<int64_t>(t.topk.size(), 0));  // each choice of a token names the same expert
    EpTensor<int64_t> total(r.memory(), ncclInt64, {1}, -7);
    auto info = ep_init<ncclEpLayoutInfo_t>();
    info.recv_total_counter = total.get();
    ncclEpHandle_t handle = nullptr;
    ASSERT_NCCL(ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_FLAT, t.topk.get(), &info, nullptr, r.stream()));
    const size_t all = step.tokens(0) + step.tokens(1);
    ASSERT_GT(all, step.most);
    EXPECT_EQ(total.values()[0], rank == 0 ? static_cast<int64_t>(all) : 0) << "before any is dropped";
    ASSERT_NCCL(t.dispatch(handle, NCCL_EP_FWD_PASS));
    ASSERT_NCCL(t.combine(handle, NCCL_EP_FWD_PASS));
    t.expect_sums_of_the_first(step);
    EXPECT_NCCL(ncclEpHandleDestroy(handle));
  });
}

TEST(EpThroughput, TooManyRowsEndTheStepOnAllRanks) {
  both_ways(2, [](Board& board, int rank) {
    const EpStep step;
    EpRank r(board, step, rank, config_of(step, static_cast<unsigned>(step.most)));
    EpTensor<int64_t> topk(r.memory(), ncclInt64, {step.tokens(rank), 1}, 0);
    ncclEpHandle_t handle = nullptr;
    EXPECT_EQ(ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_FLAT, topk.get(), nullptr, nullptr, r.stream()),
              ncclInvalidUsage);
    EXPECT_EQ(handle, nullptr);
    EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("max_recv_tokens_per_rank"), std::string::npos)
        << ncclGetLastError(nullptr);
    // A handle that is there already has no choices then.
    Flat t(r, step, step.most);
    ASSERT_NCCL(ncclEpInitHandle(&handle, r.group(), NCCL_EP_LAYOUT_FLAT, nullptr, step.top_k, nullptr));
    t.topk.put(std::vector<int64_t>(t.topk.size(), 0));
    EXPECT_EQ(ncclEpUpdateHandle(handle, t.topk.get(), nullptr, r.stream()), ncclInvalidUsage);
    EXPECT_EQ(t.dispatch(handle, NCCL_EP_FWD_PASS), ncclInvalidUsage);
    EXPECT_NCCL(ncclEpHandleDestroy(handle));
  });
}

// Expert-major tensors differ from the flat ones in the weights alone.
class ExpertMajor : public Flat {
 public:
  ExpertMajor(EpRank& rank, const EpStep& step, size_t rows, size_t align)
      : Flat(rank, step, rows), weight(m, ncclFloat32, {rows}, -7), align_(align) {}
  ncclEpTensor_t* row_weights() override { return weight.get(); }
  ncclEpTensor_t* row_choices() override { return nullptr; }
  // Calls body(row, choice) for each row that holds one.
  template <class Body>
  void each_row(const EpStep& step, const Body& body) {
    size_t row = 0;
    int64_t expert = 0;
    for (const EpStep::Choice& c : step.by_expert(r.rank())) {
      if (c.local != expert) row = (row + align_ - 1) / align_ * align_;
      expert = c.local;
      body(row++, c);
    }
  }
  size_t n_rows(const EpStep& step) {
    size_t rows = 0;
    each_row(step, [&](size_t row, const EpStep::Choice&) { rows = row + 1; });
    return (rows + align_ - 1) / align_ * align_;
  }
  EpTensor<float> weight;

 private:
  size_t align_;
};

TEST(EpThroughput, ExpertMajorPassesWithAlignment) {
  for (const size_t align : {size_t{1}, size_t{8}}) {
    both_ways(2, [&](Board& board, int rank) {
      EpStep step;
      const auto most = static_cast<unsigned>(2 * step.most * 3 + 64);
      EpRank r(board, step, rank, config_of(step, most));
      ExpertMajor t(r, step, most, align);
      auto config = ep_init<ncclEpHandleConfig_t>();
      config.dispatch_output_per_expert_alignment = align;
      EpTensor<int64_t> counts(r.memory(), ncclInt64, {static_cast<size_t>(step.n_local())}, -7);
      EpTensor<int64_t> offsets(r.memory(), ncclInt64, {static_cast<size_t>(step.n_local())}, -7);
      EpTensor<int64_t> total(r.memory(), ncclInt64, {1}, -7);
      auto info = ep_init<ncclEpLayoutInfo_t>();
      info.expert_counters = counts.get();
      info.expert_offsets = offsets.get();
      info.recv_total_counter = total.get();
      ncclEpHandle_t handle = nullptr;
      ASSERT_NCCL(ncclEpInitHandle(&handle, r.group(), NCCL_EP_LAYOUT_EXPERT_MAJOR, &config, step.top_k, nullptr));
      for (int round = 0; round < 4; ++round) {
        step.seed = round;
        t.topk.put(std::vector<int64_t>(t.topk.size(), -1));
        if (step.tokens(rank) != t.n) continue;  // the tensors are for the first round's tokens
        t.bring(step);
        ASSERT_NCCL(ncclEpUpdateHandle(handle, t.topk.get(), &info, r.stream()));
        std::vector<float> wanted(t.n_rows(step) * step.hidden), weight(t.n_rows(step)), made(wanted.size());
        std::vector<int64_t> first(static_cast<size_t>(step.n_local()), -1), n(first.size());
        t.each_row(step, [&](size_t row, const EpStep::Choice& c) {
          if (n[static_cast<size_t>(c.local)]++ == 0) first[static_cast<size_t>(c.local)] = static_cast<int64_t>(row);
          weight[row] = step.weight(c.source, c.token, c.choice);
          for (size_t h = 0; h < step.hidden; ++h) {
            wanted[row * step.hidden + h] = step.value(c.source, c.token, h);
            made[row * step.hidden + h] =
                weight[row] * EpStep::at_expert(c.local + rank * step.n_local(), wanted[row * step.hidden + h]);
          }
        });
        const auto a = static_cast<int64_t>(align);
        for (size_t e = 0; e < n.size(); ++e) {
          EXPECT_EQ(counts.values()[e], (n[e] + a - 1) / a * a) << "expert " << e;
          EXPECT_TRUE(n[e] == 0 || offsets.values()[e] == first[e]) << "expert " << e;
        }
        EXPECT_EQ(total.values()[0], static_cast<int64_t>(t.n_rows(step)));
        ASSERT_NCCL(t.dispatch(handle, NCCL_EP_FWD_PASS));
        std::vector<float> got = t.out.values(), got_weight = t.weight.values();
        got.resize(wanted.size());
        got_weight.resize(weight.size());
        EXPECT_EQ(got, wanted);
        EXPECT_EQ(got_weight, weight);
        made.resize(t.out.size());
        t.out.put(made);
        ASSERT_NCCL(t.combine(handle, NCCL_EP_FWD_PASS));
        EXPECT_EQ(t.sums.values(), step.sums(rank, true));
        ASSERT_NCCL(t.dispatch(handle, NCCL_EP_BWD_PASS));
        got = t.out.values();
        got.resize(wanted.size());
        EXPECT_EQ(got, wanted);
        // The gradients of the weights are the weights that came; those of choices that are none are 0.
        ASSERT_NCCL(t.combine(handle, NCCL_EP_BWD_PASS));
        std::vector<float> grads = step.weights(rank);
        for (size_t i = 0; i < grads.size(); ++i)
          if (step.experts(rank)[i] < 0) grads[i] = 0;
        EXPECT_EQ(t.grads.values(), grads);
      }
      EXPECT_NCCL(ncclEpHandleDestroy(handle));
    });
  }
}

// What the program learns of an expert's rows is what is left of them.
TEST(EpThroughput, ExpertMajorCountersEndAtTheLimit) {
  both_ways(2, [](Board& board, int rank) {
    const EpStep step;
    auto config = config_of(step, static_cast<unsigned>(step.most));
    config.overflow_policy = NCCL_EP_OVERFLOW_DROP;
    EpRank r(board, step, rank, config);
    ExpertMajor t(r, step, step.most, 1);
    t.topk.put(std::vector<int64_t>(t.topk.size(), 1));
    const size_t n_local = static_cast<size_t>(step.n_local());
    EpTensor<int32_t> counts(r.memory(), ncclInt32, {n_local}, -7), offsets(r.memory(), ncclInt32, {n_local}, -7);
    auto info = ep_init<ncclEpLayoutInfo_t>();
    info.expert_counters = counts.get();
    info.expert_offsets = offsets.get();
    ncclEpHandle_t handle = nullptr;
    ASSERT_NCCL(
        ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_EXPERT_MAJOR, t.topk.get(), &info, nullptr, r.stream()));
    const auto most = rank == 0 ? static_cast<int32_t>(step.most) : 0;
    EXPECT_EQ(counts.values(), (std::vector<int32_t>{0, most, 0, 0}));
    EXPECT_EQ(offsets.values(), (std::vector<int32_t>{0, 0, most, most}));
    ASSERT_NCCL(t.dispatch(handle, NCCL_EP_FWD_PASS));
    ASSERT_NCCL(t.combine(handle, NCCL_EP_FWD_PASS));
    t.expect_sums_of_the_first(step);
    EXPECT_NCCL(ncclEpHandleDestroy(handle));
  });
}

// The program's kernels may still write what a call reads.
TEST(EpThroughput, CallsComeAfterTheStreamsEarlierWork) {
  both_ways(2, [](Board& board, int rank) {
    const EpStep step;
    EpRank r(board, step, rank, config_of(step, everything(step)));
    CudaDevice& device = r.memory().device();
    if (!device.ok()) return;
    Flat from(r, step, everything(step)), t(r, step, everything(step));
    t.topk.put(std::vector<int64_t>(t.topk.size(), -1));
    t.in.put(std::vector<float>(t.in.size()));
    t.weights.put(std::vector<float>(t.weights.size()));
    device.keep_busy(r.stream());
    device.copy(t.topk.data(), from.topk.data(), t.topk.size() * sizeof(int64_t), r.stream());
    ncclEpHandle_t handle = nullptr;
    ASSERT_NCCL(
        ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_FLAT, t.topk.get(), nullptr, nullptr, r.stream()));
    device.keep_busy(r.stream());
    device.copy(t.in.data(), from.in.data(), t.in.size() * sizeof(float), r.stream());
    device.copy(t.weights.data(), from.weights.data(), t.weights.size() * sizeof(float), r.stream());
    ASSERT_NCCL(t.dispatch(handle, NCCL_EP_FWD_PASS));
    t.expect_rows(step, SIZE_MAX, 0);
    EXPECT_NCCL(ncclEpHandleDestroy(handle));
  });
}

// A handle on the same memory of the program goes on with the choices of the first.
TEST(EpThroughput, HandlesOnOneMemoryShareTheirChoices) {
  both_ways(2, [](Board& board, int rank) {
    const EpStep step;
    EpRank r(board, step, rank, config_of(step, everything(step)));
    Flat t(r, step, everything(step));
    size_t bytes = 0;
    ASSERT_NCCL(ncclEpHandleMemSize(r.group(), NCCL_EP_LAYOUT_FLAT, nullptr, &bytes, step.top_k));
    EpTensor<uint8_t> memory(r.memory(), ncclUint8, {bytes});
    ncclEpHandle_t first = nullptr, second = nullptr;
    ASSERT_NCCL(ncclEpInitHandle(&first, r.group(), NCCL_EP_LAYOUT_FLAT, nullptr, step.top_k, memory.get()));
    ASSERT_NCCL(ncclEpUpdateHandle(first, t.topk.get(), nullptr, r.stream()));
    ASSERT_NCCL(t.dispatch(first, NCCL_EP_FWD_PASS));
    EXPECT_NCCL(ncclEpHandleDestroy(first));
    t.compute(step, true);
    ASSERT_NCCL(ncclEpInitHandle(&second, r.group(), NCCL_EP_LAYOUT_FLAT, nullptr, step.top_k, memory.get()));
    ASSERT_NCCL(t.combine(second, NCCL_EP_FWD_PASS));
    EXPECT_EQ(t.sums.values(), step.sums(rank, true));
    EXPECT_NCCL(ncclEpHandleDestroy(second));
    // Both may be there before the choices are.
    EpTensor<uint8_t> other(r.memory(), ncclUint8, {bytes});
    ASSERT_NCCL(ncclEpInitHandle(&first, r.group(), NCCL_EP_LAYOUT_FLAT, nullptr, step.top_k, other.get()));
    ASSERT_NCCL(ncclEpInitHandle(&second, r.group(), NCCL_EP_LAYOUT_FLAT, nullptr, step.top_k, other.get()));
    ASSERT_NCCL(ncclEpUpdateHandle(first, t.topk.get(), nullptr, r.stream()));
    ASSERT_NCCL(t.dispatch(first, NCCL_EP_FWD_PASS));
    t.compute(step, true);
    ASSERT_NCCL(t.combine(second, NCCL_EP_FWD_PASS));
    EXPECT_EQ(t.sums.values(), step.sums(rank, true));
    EXPECT_NCCL(ncclEpHandleDestroy(first));
    EXPECT_NCCL(ncclEpHandleDestroy(second));
  });
}

// Rows of fp8 travel beside their scales, as bytes; sums are of another type.
TEST(EpThroughput, ScalesAreForwarded) {
  both_ways(2, [](Board& board, int rank) {
    const EpStep step;
    EpRank r(board, step, rank, config_of(step, everything(step)));
    Flat t(r, step, everything(step));
    ncclEpHandle_t handle = nullptr;
    ASSERT_NCCL(
        ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_FLAT, t.topk.get(), nullptr, nullptr, r.stream()));
    const size_t n = step.tokens(rank), rows = everything(step);
    EpTensor<uint8_t> in(r.memory(), ncclFloat8e4m3, {n, 32}), out(r.memory(), ncclFloat8e4m3, {rows, 32});
    EpTensor<float> scales(r.memory(), ncclFloat32, {n, 4}), got(r.memory(), ncclFloat32, {rows, 4});
    std::vector<uint8_t> bytes(in.size());
    std::vector<float> of(scales.size());
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(rank * 100 + static_cast<int>(i));
    for (size_t i = 0; i < of.size(); ++i) of[i] = static_cast<float>(rank * 1000 + static_cast<int>(i));
    in.put(bytes);
    scales.put(of);
    auto inputs = ep_init<ncclEpDispatchInputs_t>();
    auto outputs = ep_init<ncclEpDispatchOutputs_t>();
    auto config = ep_init<ncclEpDispatchConfig_t>();
    inputs.tokens = in.get(), inputs.scales = scales.get(), inputs.topk_weights = t.weights.get();
    outputs.tokens = out.get(), outputs.scales = got.get();
    outputs.topk_weights = t.out_weights.get(), outputs.topk_idx = t.out_idx.get();
    config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
    ASSERT_NCCL(ncclEpDispatch(handle, &inputs, &outputs, nullptr, &config, r.stream()));
    const auto wanted = step.rows(rank);
    const auto row_bytes = out.values();
    const auto row_scales = got.values();
    for (size_t row = 0; row < wanted.size(); ++row) {
      const EpStep::Choice& c = wanted[row][0];
      for (size_t i = 0; i < 32; ++i)
        ASSERT_EQ(row_bytes[row * 32 + i], static_cast<uint8_t>(c.source * 100 + static_cast<int>(c.token * 32 + i)));
      for (size_t i = 0; i < 4; ++i)
        ASSERT_EQ(row_scales[row * 4 + i], static_cast<float>(c.source * 1000 + static_cast<int>(c.token * 4 + i)));
    }
    EXPECT_NCCL(ncclEpHandleDestroy(handle));
  });
}

}  // namespace
}  // namespace moeccl::testing
