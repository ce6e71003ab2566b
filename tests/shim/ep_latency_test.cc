// SPDX-License-Identifier: Apache-2.0
// A program of NCCL EP in low-latency mode: every result against a dense reference.
#include "tests/shim/ep_ranks.h"

namespace moeccl::testing {
namespace {

// Many steps with one handle; each dispatch reads the choices that are there then.
void expert_major_steps(Board& board, int rank, int n, unsigned send_only) {
  EpStep s = step_of(n);
  EpRank r(board, s, rank, EpRank::config(s, NCCL_EP_ALGO_LOW_LATENCY));
  const size_t room = static_cast<size_t>(n) * s.most, n_local = static_cast<size_t>(s.n_local());
  LatencyTensors t(r, s, {n_local, room}, n_local);
  ncclEpHandle_t handle = nullptr;
  ASSERT_NCCL(
      ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_EXPERT_MAJOR, t.topk.get(), nullptr, nullptr, r.stream()));
  for (int round = 0; round < 9; round += 3) {  // the ranks bring the same numbers of tokens
    s.seed = round;
    t.bring(s, rank);
    ASSERT_NCCL(dispatch(r, handle, t, false, send_only));
    ASSERT_NCCL(ncclEpComplete(handle, nullptr, r.stream()));
    std::vector<float> rows = t.out.values();
    std::vector<int32_t> counts(n_local);
    for (const EpStep::Choice& c : s.by_expert(rank)) {
      const auto local = static_cast<size_t>(c.local);
      const size_t row = local * room + static_cast<size_t>(counts[local]++);
      for (size_t h = 0; h < s.hidden; ++h) {
        float& x = rows[row * s.hidden + h];
        ASSERT_EQ(x, s.value(c.source, c.token, h)) << "round " << round << ", row " << row;
        x = EpStep::at_expert(c.local + rank * s.n_local(), x);
      }
    }
    EXPECT_EQ(t.counts.values(), counts);
    t.out.put(rows);
    ASSERT_NCCL(combine(r, handle, t, false, send_only));
    if (send_only != 0) {
      EXPECT_EQ(dispatch(r, handle, t, false, 0), ncclInvalidUsage) << "before ncclEpComplete";
    }
    ASSERT_NCCL(ncclEpComplete(handle, nullptr, r.stream()));
    EXPECT_EQ(t.sums.values(), s.sums(rank, true)) << "round " << round;
  }
  EXPECT_NCCL(ncclEpHandleDestroy(handle));
}

TEST(EpLatency, ExpertMajorSteps) {
  for (const int n : {2, 3}) both_ways(n, [n](Board& board, int rank) { expert_major_steps(board, rank, n, 0); });
}
TEST(EpLatency, StagedSteps) {
  both_ways(2, [](Board& board, int rank) { expert_major_steps(board, rank, 2, 1); });
}

TEST(EpLatency, RankMajorSteps) {
  for (const ncclEpExpertIdKind_t kind : {NCCL_EP_EXPERT_ID_AUTO, NCCL_EP_EXPERT_ID_GLOBAL}) {
    both_ways(3, [kind](Board& board, int rank) {
      EpStep s = step_of(3);
      EpRank r(board, s, rank, EpRank::config(s, NCCL_EP_ALGO_LOW_LATENCY));
      LatencyTensors t(r, s, {3, s.most}, 3);
      ncclEpHandle_t handle = nullptr;
      ASSERT_NCCL(ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_RANK_MAJOR, t.topk.get(), nullptr, nullptr,
                                     r.stream()));
      for (int round = 0; round < 6; round += 3) {
        s.seed = round;
        t.bring(s, rank);
        ASSERT_NCCL(dispatch(r, handle, t, true, 0, kind));
        std::vector<float> rows = t.out.values();
        std::vector<int32_t> counts(3), choices(t.out_idx.size(), -1);
        const int64_t base = kind == NCCL_EP_EXPERT_ID_GLOBAL ? rank * s.n_local() : 0;
        const std::vector<float> got = t.out_weights.values();
        for (const auto& of : s.rows(rank)) {
          const auto source = static_cast<size_t>(of[0].source);
          const size_t row = source * s.most + static_cast<size_t>(counts[source]++);
          for (const EpStep::Choice& c : of) {
            const size_t at = row * t.k + static_cast<size_t>(c.choice);
            choices[at] = static_cast<int32_t>(c.local + base);
            ASSERT_EQ(got[at], s.weight(c.source, c.token, c.choice)) << "row " << row;
          }
          for (size_t h = 0; h < s.hidden; ++h) {
            const float x = s.value(of[0].source, of[0].token, h);
            ASSERT_EQ(rows[row * s.hidden + h], x) << "row " << row;
            float y = 0;
            for (const EpStep::Choice& c : of)
              y += s.weight(c.source, c.token, c.choice) * EpStep::at_expert(c.local + rank * s.n_local(), x);
            rows[row * s.hidden + h] = y;
          }
        }
        EXPECT_EQ(t.counts.values(), counts);
        EXPECT_EQ(t.out_idx.values(), choices) << "places without a row hold -1";
        t.out.put(rows);
        ASSERT_NCCL(combine(r, handle, t, true, 0));
        EXPECT_EQ(t.sums.values(), s.sums(rank, true));
      }
      EXPECT_NCCL(ncclEpHandleDestroy(handle));
    });
  }
}

// A token may name an expert twice; it goes there once, with the sum of both weights.
TEST(EpLatency, AnExpertNamedTwiceCountsWithBothWeights) {
  both_ways(2, [](Board& board, int rank) {
    const EpStep s = step_of(2);
    EpRank r(board, s, rank, EpRank::config(s, NCCL_EP_ALGO_LOW_LATENCY));
    LatencyTensors t(r, s, {4, 2 * s.most}, 4);
    t.topk.put(std::vector<int32_t>(t.topk.size(), 5));
    ncclEpHandle_t handle = nullptr;
    ASSERT_NCCL(ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_EXPERT_MAJOR, t.topk.get(), nullptr, nullptr,
                                   r.stream()));
    ASSERT_NCCL(dispatch(r, handle, t, false, 0));
    const auto all = static_cast<int32_t>(s.tokens(0) + s.tokens(1));
    EXPECT_EQ(t.counts.values(), rank == 1 ? (std::vector<int32_t>{0, all, 0, 0}) : std::vector<int32_t>(4));
    ASSERT_NCCL(combine(r, handle, t, false, 0));
    const std::vector<float> sums = t.sums.values();
    for (size_t i = 0; i < sums.size(); ++i) {
      const size_t token = i / s.hidden;
      const float weight = s.weight(rank, token, 0) + s.weight(rank, token, 1) + s.weight(rank, token, 2);
      ASSERT_EQ(sums[i], weight * s.value(rank, token, i % s.hidden));
    }
    EXPECT_NCCL(ncclEpHandleDestroy(handle));
  });
}

// Ranks 0 and 1 mask rank 2 and it masks them: no rows pass between them.
TEST(EpLatency, MaskedRanksGetAndGiveNothing) {
  both_ways(3, [](Board& board, int rank) {
    const EpStep s = step_of(3);
    auto config = EpRank::config(s, NCCL_EP_ALGO_LOW_LATENCY);
    config.enable_mask = 1;
    EpRank r(board, s, rank, config);
    LatencyTensors t(r, s, {4, 3 * s.most}, 4);
    EpTensor<int> status(r.memory(), ncclInt32, {3}, -7);
    ASSERT_NCCL(ncclEpMaskQuery(r.group(), static_cast<int*>(status.data()), r.stream()));
    EXPECT_EQ(status.values(), (std::vector<int>{1, 1, 1}));
    // Rank 0 alone masks rank 1: that neither gets its rows nor gives it some.
    std::vector<int> mask = {1, rank != 0, 1};
    ASSERT_NCCL(ncclEpMaskUpdate(r.group(), mask.data(), r.stream()));
    ASSERT_NCCL(ncclEpMaskQuery(r.group(), static_cast<int*>(status.data()), r.stream()));
    EXPECT_EQ(status.values(), mask);
    ncclEpHandle_t handle = nullptr;
    ASSERT_NCCL(ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_EXPERT_MAJOR, t.topk.get(), nullptr, nullptr,
                                   r.stream()));
    ASSERT_NCCL(dispatch(r, handle, t, false, 0));
    std::vector<int32_t> counts(4);
    const auto passes = [](int from, int to) { return from + to != 1; };  // not between ranks 0 and 1
    for (const EpStep::Choice& c : s.by_expert(rank))
      if (passes(c.source, rank)) ++counts[static_cast<size_t>(c.local)];
    EXPECT_EQ(t.counts.values(), counts);
    ASSERT_NCCL(combine(r, handle, t, false, 0));
    std::vector<float> wanted(t.sums.size());
    for (size_t token = 0; token < t.n; ++token)
      for (int c = 0; c < s.top_k; ++c) {
        const int64_t e = s.expert(rank, token, c);
        if (e < 0 || !passes(rank, static_cast<int>(e) / s.n_local())) continue;
        for (size_t h = 0; h < s.hidden; ++h)
          wanted[token * s.hidden + h] += s.weight(rank, token, c) * s.value(rank, token, h);
      }
    EXPECT_EQ(t.sums.values(), wanted);
    ASSERT_NCCL(ncclEpMaskClean(r.group(), r.stream()));
    ASSERT_NCCL(ncclEpMaskQuery(r.group(), static_cast<int*>(status.data()), r.stream()));
    EXPECT_EQ(status.values(), (std::vector<int>{1, 1, 1}));
    int error = -1;
    EXPECT_NCCL(ncclEpGetAsyncError(r.group(), &error));
    EXPECT_EQ(error, 0);
    EXPECT_NCCL(ncclEpErrorClear(r.group()));
    EXPECT_NCCL(ncclEpHandleDestroy(handle));
  });
}

// Expects a failure that the group tells until it is told to forget it.
void expect_told_once(ncclEpGroup_t group) {
  int error = -1;
  EXPECT_NCCL(ncclEpGetAsyncError(group, &error));
  EXPECT_EQ(error, 1);
  EXPECT_NCCL(ncclEpErrorClear(group));
  EXPECT_NCCL(ncclEpGetAsyncError(group, &error));
  EXPECT_EQ(error, 0) << "the same failure is not told again";
}

// A rank that has ended fails the operation, and a group that watches for that says so until it is told to forget it.
TEST(EpLatency, ARankThatEndedIsAnAsyncError) {
  Board* board = new_board();
  in_processes(2,
               [&](int rank) {
                 const EpStep s = step_of(2);
                 auto config = EpRank::config(s, NCCL_EP_ALGO_LOW_LATENCY);
                 config.enable_mask = 1;
                 EpRank r(*board, s, rank, config);
                 if (rank == 1) _exit(0);
                 LatencyTensors t(r, s, {4, 2 * s.most}, 4);
                 ncclEpHandle_t handle = nullptr;
                 ASSERT_NCCL(ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_EXPERT_MAJOR, t.topk.get(), nullptr,
                                                nullptr, r.stream()));
                 EXPECT_EQ(dispatch(r, handle, t, false, 0), ncclRemoteError) << ncclGetLastError(nullptr);
                 expect_told_once(r.group());
                 EXPECT_NCCL(ncclEpHandleDestroy(handle));
               },
               {1});
}

// On a device the failure comes after the call, which could not know of it.
TEST(EpLatency, ARankThatEndsLaterIsAnAsyncError) {
  Board* board = new_board();
  in_processes(2,
               [&](int rank) {
                 const EpStep s = step_of(2);
                 auto config = EpRank::config(s, NCCL_EP_ALGO_LOW_LATENCY);
                 config.enable_mask = 1;
                 EpRank r(*board, s, rank, config);
                 LatencyTensors t(r, s, {2, s.most}, 2);
                 ncclEpHandle_t handle = nullptr;
                 ASSERT_NCCL(ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_RANK_MAJOR, t.topk.get(), nullptr,
                                                nullptr, r.stream()));
                 ASSERT_NCCL(dispatch(r, handle, t, true, 0));
                 // A first combine exchanges the choices for its rows; after that none has to.
                 ASSERT_NCCL(combine(r, handle, t, true, 0));
                 (void)t.sums.values();
                 int error = -1;
                 EXPECT_NCCL(ncclEpGetAsyncError(r.group(), &error));
                 EXPECT_EQ(error, 0);
                 ++board->counters[0];
                 while (board->counters[0].load() < 2) usleep(1000);
                 if (rank == 1) _exit(0);
                 const ncclResult_t summed = combine(r, handle, t, true, 0);
                 EXPECT_TRUE(summed == ncclRemoteError || (r.memory().device().ok() && summed == ncclSuccess));
                 if (r.memory().device().ok()) r.memory().device().synchronize(r.stream());
                 expect_told_once(r.group());
                 EXPECT_NCCL(ncclEpHandleDestroy(handle));
               },
               {1});
}

// A wrong argument of another rank loses no rank.
TEST(EpLatency, AWrongChoiceIsNoAsyncError) {
  both_ways(2, [](Board& board, int rank) {
    const EpStep s = step_of(2);
    auto config = EpRank::config(s, NCCL_EP_ALGO_LOW_LATENCY);
    config.enable_mask = 1;
    EpRank r(board, s, rank, config);
    LatencyTensors t(r, s, {4, 2 * s.most}, 4);
    if (rank == 1) t.topk.put(std::vector<int32_t>(t.topk.size(), 99));
    ncclEpHandle_t handle = nullptr;
    ASSERT_NCCL(ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_EXPERT_MAJOR, t.topk.get(), nullptr, nullptr,
                                   r.stream()));
    EXPECT_EQ(dispatch(r, handle, t, false, 0), rank == 1 ? ncclInvalidArgument : ncclRemoteError);
    int error = -1;
    EXPECT_NCCL(ncclEpGetAsyncError(r.group(), &error));
    EXPECT_EQ(error, 0);
    EXPECT_NCCL(ncclEpHandleDestroy(handle));
  });
}

// Another thread destroys the communicator while a call, here in its allocator, works on it.
TEST(EpLatency, TheCommunicatorStaysDuringACall) {
  struct Ends {
    CudaDevice* device;
    std::atomic<bool> inside{false}, over{false};
  };
  both_ways(1, [](Board& board, int rank) {
    const EpStep s = step_of(1);
    EpMemory memory;
    if (!memory.device().ok()) return;
    Ends ends{&memory.device()};
    auto config = EpRank::config(s, NCCL_EP_ALGO_LOW_LATENCY);
    config.alloc.context = &ends;
    config.alloc.alloc_fn = [](void** p, size_t bytes, void* context) {
      auto* e = static_cast<Ends*>(context);
      e->inside = true;
      usleep(200'000);
      *p = e->device->allocate_from_pool(bytes, nullptr);
      e->over = true;
      return 0;
    };
    config.alloc.free_fn = [](void* p, void* context) {
      static_cast<Ends*>(context)->device->release_to_pool(p, nullptr);
      return 0;
    };
    EpRank r(board, s, rank, config);
    LatencyTensors t(r, s, {4, s.most}, 4);
    ncclEpHandle_t handle = nullptr;
    ASSERT_NCCL(ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_EXPERT_MAJOR, t.topk.get(), nullptr, nullptr,
                                   r.stream()));
    std::thread other([&] {
      while (!ends.inside) usleep(1000);
      EXPECT_NCCL(ncclCommDestroy(r.take_comm()));
      EXPECT_TRUE(ends.over) << "the call was not";
    });
    EXPECT_NCCL(dispatch(r, handle, t, false, 0));
    other.join();
    EXPECT_EQ(t.out.values()[0], s.value(0, s.by_expert(0)[0].token, 0));
    EXPECT_NCCL(ncclEpHandleDestroy(handle));
  });
}

}  // namespace
}  // namespace moeccl::testing
