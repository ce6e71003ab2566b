// SPDX-License-Identifier: Apache-2.0
// The rows in between of low-latency calls: whose memory they are in, and how long.
#include "tests/shim/ep_ranks.h"

namespace moeccl::testing {
namespace {

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
  struct Count {
    CudaDevice* device;
    std::atomic<int> given{0}, taken{0};
  };
  both_ways(2, [](Board& board, int rank) {
    const EpStep s = step_of(2);
    EpMemory memory;
    Count count{&memory.device()};
    auto config = EpRank::config(s, NCCL_EP_ALGO_LOW_LATENCY);
    config.alloc.context = &count;
    config.alloc.alloc_fn = [](void** p, size_t bytes, void* context) {
      auto* c = static_cast<Count*>(context);
      ++c->given;
      *p = c->device->allocate(bytes);
      return 0;
    };
    config.alloc.free_fn = [](void* p, void* context) {
      auto* c = static_cast<Count*>(context);
      ++c->taken;
      c->device->release(p);
      return 0;
    };
    {
      EpRank r(board, s, rank, config);
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
      EpTensor<float> wide(r.memory(), ncclFloat32, {2, s.most, 2 * s.hidden});
      EpTensor<float> sums(r.memory(), ncclFloat32, {s.tokens(rank), 2 * s.hidden});
      ncclEpHandle_t handle = nullptr;
      ASSERT_NCCL(ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_RANK_MAJOR, t.topk.get(), nullptr, nullptr,
                                     r.stream()));
      ASSERT_NCCL(dispatch(r, handle, t, true, 1));
      device.keep_busy(r.stream());
      ASSERT_NCCL(ncclEpComplete(handle, nullptr, r.stream()));
      device.record(watched.used, r.stream());
      auto inputs = ep_init<ncclEpCombineInputs_t>();
      auto outputs = ep_init<ncclEpCombineOutputs_t>();
      inputs.tokens = wide.get(), outputs.tokens = sums.get();
      ASSERT_NCCL(ncclEpCombine(handle, &inputs, &outputs, nullptr, r.stream()));
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
    EpTensor<float> wide(r.memory(), ncclFloat32, {1, s.most, 2 * s.hidden});
    EpTensor<float> sums(r.memory(), ncclFloat32, {s.tokens(0), 2 * s.hidden});
    ncclEpHandle_t handle = nullptr;
    ASSERT_NCCL(
        ncclEpCreateHandle(&handle, r.group(), NCCL_EP_LAYOUT_RANK_MAJOR, t.topk.get(), nullptr, nullptr, r.stream()));
    ASSERT_NCCL(dispatch(r, handle, t, true, 0));
    auto inputs = ep_init<ncclEpCombineInputs_t>();
    auto outputs = ep_init<ncclEpCombineOutputs_t>();
    inputs.tokens = wide.get(), outputs.tokens = sums.get();
    const auto sum = [&] { return ncclEpCombine(handle, &inputs, &outputs, nullptr, r.stream()); };
    device.begin_capture(r.stream());
    EXPECT_EQ(sum(), ncclInvalidUsage) << ncclGetLastError(nullptr);
    (void)device.end_capture(r.stream());
    ASSERT_NCCL(sum());
    device.synchronize(r.stream());
    device.begin_capture(r.stream());
    EXPECT_NCCL(sum());
    void* const graph = device.end_capture(r.stream());
    EXPECT_GT(device.graph_nodes(graph), 0u);
    EXPECT_NCCL(ncclEpHandleDestroy(handle));
  });
}

// A graph may run at any time, also after calls with larger rows.
TEST(EpMemory, AGraphKeepsItsRowsInBetween) {
  struct Count {
    CudaDevice* device;
    int taken = 0;
  };
  both_ways(1, [](Board& board, int rank) {
    const EpStep s = step_of(1);
    EpMemory memory;
    CudaDevice& device = memory.device();
    if (!device.ok()) return;
    Count count{&device};
    auto config = EpRank::config(s, NCCL_EP_ALGO_LOW_LATENCY);
    config.alloc.context = &count;
    config.alloc.alloc_fn = [](void** p, size_t bytes, void* context) {
      *p = static_cast<Count*>(context)->device->allocate(bytes);
      return 0;
    };
    config.alloc.free_fn = [](void* p, void* context) {
      auto* c = static_cast<Count*>(context);
      ++c->taken;
      c->device->release(p);
      return 0;
    };
    {
      EpRank r(board, s, rank, config);
      LatencyTensors t(r, s, {1, s.most}, 1);
      EpTensor<float> wide(r.memory(), ncclFloat32, {1, s.most, 2 * s.hidden});
      EpTensor<float> wide_sums(r.memory(), ncclFloat32, {s.tokens(rank), 2 * s.hidden});
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
      auto inputs = ep_init<ncclEpCombineInputs_t>();
      auto outputs = ep_init<ncclEpCombineOutputs_t>();
      inputs.tokens = wide.get(), outputs.tokens = wide_sums.get();
      for (int round = 0; round < 2; ++round) {
        ASSERT_NCCL(ncclEpCombine(handle, &inputs, &outputs, nullptr, r.stream()));
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
