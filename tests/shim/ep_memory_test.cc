// SPDX-License-Identifier: Apache-2.0
// The rows in between of low-latency calls: whose memory they are in, and how long.
#include "tests/shim/ep_ranks.h"

namespace moeccl::testing {
namespace {

// The program's allocator, which counts.
struct Counted {
  ncclEpGroupConfig_t config(const EpStep& s) {
    auto config = EpRank::config(s, NCCL_EP_ALGO_LOW_LATENCY);
    config.alloc.context = this;
    config.alloc.alloc_fn = [](void** p, size_t bytes, void* context) {
      auto* c = static_cast<Counted*>(context);
      ++c->given;
      *p = c->device->allocate(bytes);
      return 0;
    };
    config.alloc.free_fn = [](void* p, void* context) {
      auto* c = static_cast<Counted*>(context);
      ++c->taken;
      c->device->release(p);
      return 0;
    };
    return config;
  }
  CudaDevice* device;
  std::atomic<int> given{0}, taken{0};
};

// A combine of rows twice as wide as the dispatch's.
struct Wide {
  Wide(EpRank& r, const EpStep& s, size_t ranks)
      : r(r),
        rows(r.memory(), ncclFloat32, {ranks, s.most, 2 * s.hidden}),
        sums(r.memory(), ncclFloat32, {s.tokens(r.rank()), 2 * s.hidden}) {}
  ncclResult_t combine(ncclEpHandle_t handle) {
    auto inputs = ep_init<ncclEpCombineInputs_t>();
    auto outputs = ep_init<ncclEpCombineOutputs_t>();
    inputs.tokens = rows.get(), outputs.tokens = sums.get();
    return ncclEpCombine(handle, &inputs, &outputs, nullptr, r.stream());
  }
  EpRank& r;
  EpTensor<float> rows, sums;
};

// A handle may end while a stream still copies its rows to their places.
TEST(EpMemory, RowsInBetweenOutliveTheirHandle) {
  both_ways(2, [](Board& board, int rank) {
    const EpStep s = step_of(2);
    EpRank r(board, s, rank, EpRank::config(s, NCCL_EP_ALGO_LOW_LATENCY));
    CudaDevice& device = r.memory().device();
    if (!device.ok()) return;
    LatencyTensors t(r, s, {4, 2 * s.most}, 4);
    ncclEpHandle_t handle = nullptr;
    ASSERT_NCCL(ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_EXPERT_MAJOR, t.topk.get(), nullptr, nullptr,
                                   r.stream()));
    ASSERT_NCCL(dispatch(r, handle, t, false, 1));
    device.keep_busy(r.stream());
    ASSERT_NCCL(ncclEpComplete(handle, nullptr, r.stream()));
    EXPECT_NCCL(ncclEpHandleDestroy(handle));
    const std::vector<float> rows = t.out.values();
    std::vector<size_t> n(4);
    for (const EpStep::Choice& c : s.by_expert(rank)) {
      const size_t row = static_cast<size_t>(c.local) * 2 * s.most + n[static_cast<size_t>(c.local)]++;
      ASSERT_EQ(rows[row * s.hidden], s.value(c.source, c.token, 0)) << "row " << row;
    }
  });
}

// Device memory for rows in between comes from the program's allocator, and goes back there.
TEST(EpMemory, RowsInBetweenAreInTheProgramsMemory) {
  both_ways(2, [](Board& board, int rank) {
    const EpStep s = step_of(2);
    EpMemory memory;
    Counted count{&memory.device()};
    {
      EpRank r(board, s, rank, count.config(s));
      LatencyTensors t(r, s, {4, 2 * s.most}, 4);
      ncclEpHandle_t handle = nullptr;
      ASSERT_NCCL(ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_EXPERT_MAJOR, t.topk.get(), nullptr, nullptr,
                                     r.stream()));
      ASSERT_NCCL(dispatch(r, handle, t, false, 0));
      (void)t.out.values();  // waits for the stream
      EXPECT_EQ(count.given > 0, memory.device().ok()) << "host memory needs no allocator";
      EXPECT_NCCL(ncclEpHandleDestroy(handle));
    }
    EXPECT_EQ(count.given, count.taken);
  });
}

// It goes back when the stream no longer uses it. Here the combine's rows are wider than the dispatch's.
TEST(EpMemory, RowsInBetweenGoBackAfterTheirUse) {
  struct Watched {
    CudaDevice* device;
    void* used;  // an event after the dispatch
    int early = 0, taken = 0;
  };
  both_ways(2, [](Board& board, int rank) {
    const EpStep s = step_of(2);
    EpMemory memory;
    CudaDevice& device = memory.device();
    if (!device.ok()) return;
    Watched watched{&device, device.make_event()};
    auto config = EpRank::config(s, NCCL_EP_ALGO_LOW_LATENCY);
    config.alloc.context = &watched;
    config.alloc.alloc_fn = [](void** p, size_t bytes, void* context) {
      *p = static_cast<Watched*>(context)->device->allocate_from_pool(bytes, nullptr);
      return 0;
    };
    config.alloc.free_fn = [](void* p, void* context) {
      auto* w = static_cast<Watched*>(context);
      w->early += w->device->query(w->used) != 0;
      ++w->taken;
      w->device->release_to_pool(p, nullptr);
      return 0;
    };
    {
      EpRank r(board, s, rank, config);
      LatencyTensors t(r, s, {2, s.most}, 2);
      Wide wide(r, s, 2);
      ncclEpHandle_t handle = nullptr;
      ASSERT_NCCL(ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_RANK_MAJOR, t.topk.get(), nullptr, nullptr,
                                     r.stream()));
      ASSERT_NCCL(dispatch(r, handle, t, true, 1));
      device.keep_busy(r.stream());
      ASSERT_NCCL(ncclEpComplete(handle, nullptr, r.stream()));
      device.record(watched.used, r.stream());
      ASSERT_NCCL(wide.combine(handle));
      EXPECT_EQ(watched.taken, 1);
      EXPECT_NCCL(ncclEpHandleDestroy(handle));
    }
    EXPECT_EQ(watched.early, 0);
    device.end_event(watched.used);
  });
}

// Memory that a call takes inside of a capture would be the graph's.
TEST(EpMemory, RowsInBetweenDoNotGrowInACapture) {
  both_ways(1, [](Board& board, int rank) {
    EpStep s = step_of(1);
    EpRank r(board, s, rank, EpRank::config(s, NCCL_EP_ALGO_LOW_LATENCY));
    CudaDevice& device = r.memory().device();
    if (!device.ok()) return;
    LatencyTensors t(r, s, {1, s.most}, 1);
    Wide wide(r, s, 1);
    ncclEpHandle_t handle = nullptr;
    ASSERT_NCCL(
        ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_RANK_MAJOR, t.topk.get(), nullptr, nullptr, r.stream()));
    ASSERT_NCCL(dispatch(r, handle, t, true, 0));
    device.begin_capture(r.stream());
    EXPECT_EQ(wide.combine(handle), ncclInvalidUsage) << ncclGetLastError(nullptr);
    (void)device.end_capture(r.stream());
    ASSERT_NCCL(wide.combine(handle));
    device.synchronize(r.stream());
    device.begin_capture(r.stream());
    EXPECT_NCCL(wide.combine(handle));
    void* const graph = device.end_capture(r.stream());
    EXPECT_GT(device.graph_nodes(graph), 0u);
    EXPECT_NCCL(ncclEpHandleDestroy(handle));
  });
}

// A graph may run at any time, also after calls with larger rows.
TEST(EpMemory, AGraphKeepsItsRowsInBetween) {
  both_ways(1, [](Board& board, int rank) {
    const EpStep s = step_of(1);
    EpMemory memory;
    CudaDevice& device = memory.device();
    if (!device.ok()) return;
    Counted count{&device};
    {
      EpRank r(board, s, rank, count.config(s));
      LatencyTensors t(r, s, {1, s.most}, 1);
      Wide wide(r, s, 1);
      ncclEpHandle_t handle = nullptr;
      ASSERT_NCCL(ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_RANK_MAJOR, t.topk.get(), nullptr, nullptr,
                                     r.stream()));
      ASSERT_NCCL(dispatch(r, handle, t, true, 0));
      ASSERT_NCCL(combine(r, handle, t, true, 0));
      const std::vector<float> sums = t.sums.values();
      device.begin_capture(r.stream());
      EXPECT_NCCL(combine(r, handle, t, true, 0));
      void* const graph = device.end_capture(r.stream());
      void* const instance = device.instantiate(graph);
      for (int round = 0; round < 2; ++round) {
        ASSERT_NCCL(wide.combine(handle));
        t.sums.put(std::vector<float>(t.sums.size(), -1));
        device.launch_graph(instance, r.stream());
        EXPECT_EQ(t.sums.values(), sums);
      }
      EXPECT_EQ(count.taken, 0);
      device.end_graph(graph, instance);
      EXPECT_NCCL(ncclEpHandleDestroy(handle));
      EXPECT_EQ(count.taken, 2);
    }
  });
}

}  // namespace
}  // namespace moeccl::testing
