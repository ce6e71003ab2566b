// SPDX-License-Identifier: Apache-2.0
// Calls that one rank refuses, which end on the others too.
#include "tests/shim/ep_ranks.h"

namespace moeccl::testing {
namespace {

using Clock = std::chrono::steady_clock;

// Expects that a call of a rank fails soon, itself or on its stream, because the last of n ranks has refused its own.
// That rank is still there until all have seen it: ranks hear of one that leaves, too.
void expect_end(Board& board, EpRank& r, int n, const std::function<ncclResult_t()>& call) {
  const auto begun = Clock::now();
  ncclResult_t result = call();
  if (r.rank() == n - 1) {
    EXPECT_EQ(result, ncclInvalidArgument) << said();
  }
  if (r.memory().device().ok()) {
    r.memory().device().synchronize(r.stream());
    EXPECT_NCCL(ncclCommGetAsyncError(r.comm(), &result));
  }
  EXPECT_NE(result, ncclSuccess) << "the refusing rank's communicator ends, too";
  EXPECT_LT(seconds_since(begun), patient(10));
  ++board.counters[0];
  while (board.counters[0].load() < n && seconds_since(begun) < patient(60)) usleep(1000);
}

// A rank whose own config is wrong does not let the others wait. (Threads of a process share the last error.)
TEST(EpRefusals, RanksRefuseAConfigTogether) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    const EpMemory memory;
    ncclComm_t comm = nullptr;
    ncclEpGroup_t group = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, meet(*board, rank), rank));
    auto c = EpRank::config(EpStep{}, NCCL_EP_ALGO_LOW_LATENCY);
    c.num_experts = rank == 0 ? 8 : 7;
    EXPECT_REFUSED(ncclInvalidArgument, ncclEpCreateGroup(&group, comm, &c),
                   rank == 0 ? "rank 1 refuses its config" : "num_experts is 7");
    EXPECT_REFUSED(ncclInvalidArgument, ncclEpCreateGroup(&group, comm, rank == 0 ? nullptr : &c),
                   rank == 0 ? "config is NULL" : "num_experts is 7");
    c.num_experts = 8;
    ASSERT_NCCL(ncclEpCreateGroup(&group, comm, &c));
    EXPECT_NCCL(ncclEpGroupDestroy(group));
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

// An update that one rank refuses ends on the others too, and leaves no choices behind.
TEST(EpRefusals, RanksRefuseAnUpdateTogether) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    const EpStep step;
    EpRank r(*board, step, rank, EpRank::config(step, NCCL_EP_ALGO_HIGH_THROUGHPUT));
    const size_t n = step.tokens(rank), k = static_cast<size_t>(step.top_k);
    EpTensor<int64_t> topk(r.memory(), ncclInt64, {n, k}), many(r.memory(), ncclInt64, {step.most + 1, k});
    EpTensor<float> wrong(r.memory(), ncclFloat32, {n, k}), rows(r.memory(), ncclFloat32, {2 * n, step.hidden});
    topk.put(step.experts(rank));
    ncclEpHandle_t h = nullptr;
    ASSERT_NCCL(ncclEpInitHandle(&h, r.group(), NCCL_EP_LAYOUT_FLAT, nullptr, step.top_k, nullptr));
    auto inputs = ep_init<ncclEpDispatchInputs_t>();
    auto outputs = ep_init<ncclEpDispatchOutputs_t>();
    auto how = ep_init<ncclEpDispatchConfig_t>();
    how.pass_direction = NCCL_EP_BWD_PASS;
    inputs.tokens = rows.get(), outputs.tokens = rows.get();
    const auto update = [&](ncclEpTensor_t* choices) { return ncclEpUpdateHandle(h, choices, nullptr, r.stream()); };
    for (ncclEpTensor_t* bad : {many.get(), wrong.get(), static_cast<ncclEpTensor_t*>(nullptr)}) {
      if (rank == 1)
        EXPECT_REFUSED(ncclInvalidArgument, update(bad), "topk_idx");
      else
        EXPECT_REFUSED(ncclRemoteError, update(topk.get()), "rank 1");
      EXPECT_REFUSED(ncclInvalidUsage, ncclEpDispatch(h, &inputs, &outputs, nullptr, &how, r.stream()),
                     "ncclEpUpdateHandle");
      ASSERT_NCCL(update(topk.get()));
    }
    EXPECT_NCCL(ncclEpHandleDestroy(h));
  });
}

// The last rank brings a tensor of too few dimensions.
TEST(EpRefusals, ALatencyCallEndsOnAllRanks) {
  struct Case {
    int n;
    bool by_rank, at_combine;
  };
  for (const Case& c : {Case{2, false, false}, {4, false, true}, {3, true, false}, {4, true, true}}) {
    both_ways(c.n, [&](Board& board, int rank) {
      const EpStep s = step_of(c.n);
      EpRank r(board, s, rank, EpRank::config(s, NCCL_EP_ALGO_LOW_LATENCY));
      const size_t n = static_cast<size_t>(c.n);
      LatencyTensors t = c.by_rank ? LatencyTensors(r, s, {n, s.most}, n) : LatencyTensors(r, s, {4, n * s.most}, 4);
      ncclEpHandle_t handle = nullptr;
      ASSERT_NCCL(ncclEpCreateHandle(&handle, r.group(),
                                     c.by_rank ? NCCL_EP_LAYOUT_RANK_MAJOR : NCCL_EP_LAYOUT_EXPERT_MAJOR, t.topk.get(),
                                     nullptr, nullptr, r.stream()));
      if (c.at_combine) {
        ASSERT_NCCL(dispatch(r, handle, t, c.by_rank, 0));
      }
      if (rank == c.n - 1) t.out.get()->ndim = 1;
      expect_end(board, r, c.n, [&] {
        return c.at_combine ? combine(r, handle, t, c.by_rank, 0) : dispatch(r, handle, t, c.by_rank, 0);
      });
      EXPECT_NCCL(ncclEpHandleDestroy(handle));
    });
  }
}

TEST(EpRefusals, AThroughputCallEndsOnAllRanks) {
  enum class Wrong { kTensor, kInputs, kOutputs };
  struct Case {
    int n;
    ncclEpPassDir_t pass;
    bool at_combine;
    Wrong wrong = Wrong::kTensor;
  };
  for (const Case& c : {Case{2, NCCL_EP_FWD_PASS, false},
                        {3, NCCL_EP_FWD_PASS, true},
                        {3, NCCL_EP_BWD_PASS, false},
                        {2, NCCL_EP_BWD_PASS, true},
                        {2, NCCL_EP_BWD_PASS, false, Wrong::kInputs},
                        {2, NCCL_EP_BWD_PASS, false, Wrong::kOutputs},
                        {2, NCCL_EP_BWD_PASS, true, Wrong::kInputs},
                        {2, NCCL_EP_BWD_PASS, true, Wrong::kOutputs}}) {
    both_ways(c.n, [&](Board& board, int rank) {
      EpStep step;
      step.n_ranks = c.n, step.n_experts = 4 * c.n;
      EpRank r(board, step, rank, config_of(step, everything(step)));
      Flat t(r, step, everything(step));
      ncclEpHandle_t handle = nullptr;
      ASSERT_NCCL(
          ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_FLAT, t.topk.get(), nullptr, nullptr, r.stream()));
      ASSERT_NCCL(t.dispatch(handle, NCCL_EP_FWD_PASS));
      if (rank == c.n - 1) {
        if (c.wrong == Wrong::kTensor) t.out.get()->ndim = 1;
        t.no_inputs = c.wrong == Wrong::kInputs;
        t.no_outputs = c.wrong == Wrong::kOutputs;
      }
      expect_end(board, r, c.n, [&] { return c.at_combine ? t.combine(handle, c.pass) : t.dispatch(handle, c.pass); });
      EXPECT_NCCL(ncclEpHandleDestroy(handle));
    });
  }
}

// The others learn which rank it was. (Threads of a process share the last error.)
TEST(EpRefusals, TheOthersNameTheRank) {
  Board* board = new_board();
  in_processes(3, [&](int rank) {
    const EpStep s = step_of(3);
    EpRank r(*board, s, rank, EpRank::config(s, NCCL_EP_ALGO_LOW_LATENCY));
    LatencyTensors t(r, s, {4, 3 * s.most}, 4);
    ncclEpHandle_t handle = nullptr;
    ASSERT_NCCL(ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_EXPERT_MAJOR, t.topk.get(), nullptr, nullptr,
                                   r.stream()));
    if (rank == 1) {
      t.in.get()->sizes = nullptr;
      EXPECT_REFUSED(ncclInvalidArgument, dispatch(r, handle, t, false, 0), "inputs->tokens has no sizes");
    } else {
      EXPECT_NE(dispatch(r, handle, t, false, 0), ncclSuccess);
      EXPECT_NE(said().find("rank 1 calls allreduce"), std::string::npos) << said();
      EXPECT_NE(said().find("has refused its call"), std::string::npos) << said();
    }
    EXPECT_NCCL(ncclEpHandleDestroy(handle));
  });
}

// A vote of the program that meets the refusal of a call that no other rank makes is not taken for one.
TEST(EpRefusals, AVoteOfTheProgramMeetsNoRefusal) {
  both_ways(2, [](Board& board, int rank) {
    EpStep step;
    EpRank r(board, step, rank, config_of(step, everything(step)));
    Flat t(r, step, everything(step));
    ncclEpHandle_t handle = nullptr;
    ASSERT_NCCL(
        ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_FLAT, t.topk.get(), nullptr, nullptr, r.stream()));
    ASSERT_NCCL(t.dispatch(handle, NCCL_EP_FWD_PASS));
    EpTensor<int32_t> vote(r.memory(), ncclInt32, {1}, 1 + rank);
    if (rank == 1) {
      t.no_inputs = true;
      EXPECT_EQ(t.dispatch(handle, NCCL_EP_BWD_PASS), ncclInvalidArgument) << said();
    }
    ncclResult_t voted = ncclAllReduce(vote.data(), vote.data(), 1, ncclInt32, ncclMax, r.comm(), r.stream());
    if (r.memory().device().ok()) {
      r.memory().device().synchronize(r.stream());
      EXPECT_NCCL(ncclCommGetAsyncError(r.comm(), &voted));
    }
    EXPECT_EQ(voted, ncclInvalidUsage) << said();
    ++board.counters[0];  // ranks hear of one that leaves, too
    const auto begun = Clock::now();
    while (board.counters[0].load() < 2 && seconds_since(begun) < patient(60)) usleep(1000);
    EXPECT_NCCL(ncclEpHandleDestroy(handle));
  });
}

// Ranks that all refuse a call have lost nothing.
TEST(EpRefusals, AllMayRefuse) {
  both_ways(3, [](Board& board, int rank) {
    EpStep step;
    step.n_ranks = 3, step.n_experts = 12;
    EpRank r(board, step, rank, config_of(step, everything(step)));
    Flat t(r, step, everything(step));
    ncclEpHandle_t handle = nullptr;
    ASSERT_NCCL(
        ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_FLAT, t.topk.get(), nullptr, nullptr, r.stream()));
    const auto refused_before = [&](const auto& call) {
      t.out.get()->ndim = 1;
      EXPECT_EQ(call(), ncclInvalidArgument);
      t.out.get()->ndim = 2;
      EXPECT_NCCL(call());
    };
    refused_before([&] { return t.dispatch(handle, NCCL_EP_FWD_PASS); });
    t.compute(step, true);
    refused_before([&] { return t.combine(handle, NCCL_EP_FWD_PASS); });
    EXPECT_EQ(t.sums.values(), step.sums(rank, true));
    refused_before([&] { return t.dispatch(handle, NCCL_EP_BWD_PASS); });
    (void)t.out.values();  // waits for the stream
    EXPECT_NCCL(ncclEpHandleDestroy(handle));
  });
}

// What a refused call needs is not what an operation in between its two calls has.
TEST(EpRefusals, AStagedDispatchKeepsItsRows) {
  both_ways(2, [](Board& board, int rank) {
    const EpStep s = step_of(2);
    EpRank r(board, s, rank, EpRank::config(s, NCCL_EP_ALGO_LOW_LATENCY));
    LatencyTensors t(r, s, {2, s.most}, 2);
    ncclEpHandle_t handle = nullptr;
    ASSERT_NCCL(
        ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_RANK_MAJOR, t.topk.get(), nullptr, nullptr, r.stream()));
    ASSERT_NCCL(dispatch(r, handle, t, true, 1));
    EXPECT_EQ(combine(r, handle, t, true, 0), ncclInvalidUsage) << "before ncclEpComplete";
    ASSERT_NCCL(ncclEpComplete(handle, nullptr, r.stream()));
    const std::vector<float> rows = t.out.values();
    std::vector<size_t> n(2);
    for (const auto& of : s.rows(rank)) {
      const auto source = static_cast<size_t>(of[0].source);
      const size_t row = source * s.most + n[source]++;
      for (size_t h = 0; h < s.hidden; ++h)
        ASSERT_EQ(rows[row * s.hidden + h], s.value(of[0].source, of[0].token, h)) << "row " << row;
    }
    EXPECT_NCCL(ncclEpHandleDestroy(handle));
  });
}

}  // namespace
}  // namespace moeccl::testing
