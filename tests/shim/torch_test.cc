// SPDX-License-Identifier: Apache-2.0
// PyTorch's use of NCCL, in its order of calls, on CUDA memory served by MoECCL: nonblocking communicators
// (TORCH_NCCL_USE_COMM_NONBLOCKING=1) that are polled, collectives on a separate stream between two events or on the
// current stream, which is usually the default one, averages by operators that live for one call, registered segments,
// graphs captured in the global mode while a watchdog queries events, and the watchdog's abort.
#include <chrono>
#include <functional>
#include <numeric>

#include "tests/shim/nccl_ranks.h"
#include "tests/support/cuda_device.h"

namespace moeccl::testing {
namespace {

constexpr int kGlobal = 0, kThreadLocal = 1;  // CUstreamCaptureMode

// Returns when n ranks have called it.
void all_reach(std::atomic<int>& counter, int n) {
  counter.fetch_add(1);
  while (counter.load() < n) usleep(100);
}

ncclConfig_t nonblocking(const char* name) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.commName = name;
  return config;
}

// Elements of device memory that the host can set and read.
template <class T>
class Tensor {
 public:
  Tensor(CudaDevice& device, size_t n) : device_(device), n_(n), data_(device.allocate(n * sizeof(T))) {}
  ~Tensor() { device_.release(data_); }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  T* data() const { return static_cast<T*>(data_); }
  void fill(T value, void* stream = nullptr) { put(std::vector<T>(n_, value), stream); }
  void put(const std::vector<T>& values, void* stream = nullptr) {
    device_.upload(data_, values.data(), values.size() * sizeof(T), stream);
    device_.synchronize(stream);
  }
  std::vector<T> get(void* stream = nullptr) {
    std::vector<T> out(n_);
    device_.download(out.data(), data_, n_ * sizeof(T), stream);
    return out;
  }

 private:
  CudaDevice& device_;
  size_t n_;
  void* data_;
};

// A process group: a communicator, the stream of its collectives, and their events.
class Group {
 public:
  Group(CudaDevice& device, ncclComm_t made) : comm(made), device_(device), stream_(device.make_stream()) {
    ready_ = device.make_event();
    end_ = device.make_event();
  }
  static ncclComm_t init(int n, const ncclUniqueId& id, int rank) {
    ncclComm_t comm = nullptr;
    ncclConfig_t config = nonblocking("default_pg");
    const ncclResult_t result = ncclCommInitRankConfig(&comm, n, id, rank, &config);
    EXPECT_TRUE(result == ncclInProgress || result == ncclSuccess) << ncclGetLastError(nullptr);
    EXPECT_EQ(wait_ready(comm), ncclSuccess) << ncclGetLastError(comm);
    return comm;
  }
  ~Group() {
    for (void* e : {ready_, end_}) device_.end_event(e);
    device_.end_stream(stream_);
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // async_op=True: runs on the group's stream, after the work on the current one.
  void collective(void* current, const std::function<ncclResult_t(cudaStream_t)>& call) {
    device_.record(ready_, current);
    device_.wait_event(stream_, ready_);
    EXPECT_NCCL(call(static_cast<cudaStream_t>(stream_)));
    device_.record(end_, stream_);
  }
  // Work.wait(): makes the current stream wait for the last collective.
  void wait(void* current) { device_.wait_event(current, end_); }
  int query() { return device_.query(end_); }
  // Like destroy_process_group().
  void shut_down() {
    EXPECT_NCCL(ncclCommFinalize(comm));
    EXPECT_EQ(wait_ready(comm), ncclSuccess);
    EXPECT_NCCL(ncclCommDestroy(std::exchange(comm, nullptr)));
  }
  void* stream() const { return stream_; }

  ncclComm_t comm;

 private:
  CudaDevice& device_;
  void *stream_, *ready_ = nullptr, *end_ = nullptr;
};

struct Case {
  bool threads;
  int n;
};
std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  return std::to_string(info.param.n) + (info.param.threads ? "threads" : "processes");
}

// Ranks with one device each, as PyTorch wants them.
class ShimTorch : public ::testing::TestWithParam<Case> {
 protected:
  void run(const std::function<void(int rank, int n, CudaDevice& device, const ncclUniqueId& id)>& body) {
    setenv("MOECCL_TEST_CUDA_DEVICES", "4", 1);
    const int n = GetParam().n;
    Board* board = new_board();
    const auto rank = [&](int r) {
      const ncclUniqueId id = meet(*board, r);
      CudaDevice device(r);
      ASSERT_TRUE(device.ok()) << "no CUDA device";
      body(r, n, device, id);
    };
    if (GetParam().threads) {
      in_threads(n, rank);
    } else {
      in_processes(n, rank);
    }
  }
};

TEST_P(ShimTorch, AStepOfTraining) {
  run([](int rank, int n, CudaDevice& device, const ncclUniqueId& id) {
    Group pg(device, Group::init(n, id, rank));
    constexpr size_t kCount = 1003;
    const auto ranks = static_cast<size_t>(n);
    const auto total = static_cast<float>(n * (n + 1) / 2);
    const auto mine = static_cast<float>(rank + 1);
    Tensor<float> grad(device, kCount), all(device, kCount * ranks), part(device, kCount);
    void* segment = nullptr;
    EXPECT_NCCL(ncclCommRegister(pg.comm, grad.data(), kCount * sizeof(float), &segment));

    // DDP: broadcast the parameters of rank 0, then divide gradients by the number of ranks before adding them up.
    grad.fill(mine);
    pg.collective(nullptr, [&](cudaStream_t s) {
      return ncclBroadcast(grad.data(), grad.data(), kCount, ncclFloat32, 0, pg.comm, s);
    });
    pg.wait(nullptr);
    EXPECT_EQ(grad.get(), std::vector<float>(kCount, 1));
    grad.fill(mine);
    pg.collective(nullptr, [&](cudaStream_t s) {
      float factor = 0.5f;
      ncclRedOp_t op = ncclSum;
      EXPECT_NCCL(ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat32, ncclScalarHostImmediate, pg.comm));
      const ncclResult_t result = ncclAllReduce(grad.data(), grad.data(), kCount, ncclFloat32, op, pg.comm, s);
      EXPECT_NCCL(ncclRedOpDestroy(op, pg.comm));
      factor = 100;
      return result;
    });
    pg.wait(nullptr);
    EXPECT_EQ(grad.get(), std::vector<float>(kCount, total / 2));

    // FSDP: gather the shards, then reduce the gradients to them, on the current stream, with nothing to wait for.
    part.fill(mine);
    EXPECT_NCCL(ncclAllGather(part.data(), all.data(), kCount, ncclFloat32, pg.comm, nullptr));
    std::vector<float> whole = all.get();
    for (size_t r = 0; r < ranks; ++r) EXPECT_EQ(whole[r * kCount + 7], static_cast<float>(r + 1));
    EXPECT_NCCL(ncclReduceScatter(all.data(), part.data(), kCount, ncclFloat32, ncclAvg, pg.comm, nullptr));
    EXPECT_EQ(part.get(), std::vector<float>(kCount, mine));

    // _coalescing_manager: several collectives in one group.
    Tensor<int64_t> counts(device, 3);
    counts.put({rank, 1, 7 * rank});
    pg.collective(nullptr, [&](cudaStream_t s) {
      EXPECT_NCCL(ncclGroupStart());
      for (int i = 0; i < 3; ++i) {
        EXPECT_NCCL(ncclAllReduce(counts.data() + i, counts.data() + i, 1, ncclInt64, ncclSum, pg.comm, s));
      }
      return ncclGroupEnd();
    });
    pg.wait(nullptr);
    const int64_t ids = n * (n - 1) / 2;
    EXPECT_EQ(counts.get(), (std::vector<int64_t>{ids, n, 7 * ids}));

    // barrier(): one element, and the host waits.
    Tensor<uint8_t> one(device, 1);
    one.fill(1);
    pg.collective(nullptr, [&](cudaStream_t s) {
      return ncclAllReduce(one.data(), one.data(), 1, ncclUint8, ncclSum, pg.comm, s);
    });
    device.synchronize(pg.stream());
    EXPECT_EQ(pg.query(), 0);
    EXPECT_NCCL(ncclCommDeregister(pg.comm, segment));
    pg.shut_down();
  });
}

// Rank r gives r + p + 1 elements to each rank p, including itself: grouped sends and receives, twice in a row.
TEST_P(ShimTorch, UnevenAllToAll) {
  run([](int rank, int n, CudaDevice& device, const ncclUniqueId& id) {
    Group pg(device, Group::init(n, id, rank));
    const auto size = [&](int a, int b) { return static_cast<size_t>(a + b + 1) * 100; };
    size_t length = 0;
    for (int p = 0; p < n; ++p) length += size(rank, p);
    Tensor<float> in(device, length), out(device, length);
    for (int round = 0; round < 2; ++round) {
      in.fill(static_cast<float>(10 * round + rank));
      pg.collective(nullptr, [&](cudaStream_t s) {
        EXPECT_NCCL(ncclGroupStart());
        size_t at = 0;
        for (int p = 0; p < n; at += size(rank, p++)) {
          EXPECT_NCCL(ncclSend(in.data() + at, size(rank, p), ncclFloat32, p, pg.comm, s));
          EXPECT_NCCL(ncclRecv(out.data() + at, size(p, rank), ncclFloat32, p, pg.comm, s));
        }
        return ncclGroupEnd();
      });
      pg.wait(nullptr);
      const std::vector<float> got = out.get();
      size_t at = 0;
      for (int p = 0; p < n; at += size(rank, p++)) {
        EXPECT_EQ(got[at], static_cast<float>(10 * round + p));
        EXPECT_EQ(got[at + size(rank, p) - 1], static_cast<float>(10 * round + p));
      }
    }
    pg.shut_down();
  });
}

// A new group where the default one is bound to a device: all ranks split, some join, and the parent is polled.
TEST_P(ShimTorch, GroupsAreSplit) {
  run([](int rank, int n, CudaDevice& device, const ncclUniqueId& id) {
    Group world(device, Group::init(n, id, rank));
    for (int round = 0; round < 2; ++round) {
      const bool joins = rank % 2 == round;
      ncclConfig_t config = nonblocking("expert_parallel");
      ncclComm_t part = nullptr;
      const ncclResult_t result =
          ncclCommSplit(world.comm, joins ? 17 + round : NCCL_SPLIT_NOCOLOR, rank / 2, &part, &config);
      EXPECT_TRUE(result == ncclInProgress || result == ncclSuccess) << ncclGetLastError(nullptr);
      EXPECT_EQ(wait_ready(world.comm), ncclSuccess);
      EXPECT_EQ(part != nullptr, joins);
      if (!joins) continue;
      Group pg(device, part);
      EXPECT_EQ(wait_ready(pg.comm), ncclSuccess);
      Tensor<int32_t> sum(device, 1);
      sum.fill(1 << rank);
      EXPECT_NCCL(ncclAllReduce(sum.data(), sum.data(), 1, ncclInt32, ncclSum, pg.comm, nullptr));
      EXPECT_EQ(sum.get()[0], (n == 2 ? 0b1 : 0b101) << round);
      pg.shut_down();
    }
    world.shut_down();
  });
}

// Like torch.cuda.MemPool of ncclMemAlloc, registered as windows.
TEST_P(ShimTorch, PoolsAndWindows) {
  run([](int rank, int n, CudaDevice& device, const ncclUniqueId& id) {
    Group pg(device, Group::init(n, id, rank));
    constexpr size_t kBytes = 2 << 20;
    void* pool = nullptr;
    ncclWindow_t window = nullptr;
    ASSERT_NCCL(ncclMemAlloc(&pool, kBytes));
    ASSERT_NCCL(ncclCommWindowRegister(pg.comm, pool, kBytes, &window, NCCL_WIN_COLL_SYMMETRIC));
    void* user = nullptr;
    EXPECT_NCCL(ncclWinGetUserPtr(pg.comm, window, &user));
    EXPECT_EQ(user, pool);
    const std::vector<float> values(1000, static_cast<float>(rank));
    device.upload(pool, values.data(), values.size() * sizeof(float));
    EXPECT_NCCL(ncclAllReduce(pool, pool, values.size(), ncclFloat32, ncclMax, pg.comm, nullptr));
    std::vector<float> got(values.size());
    device.download(got.data(), pool, got.size() * sizeof(float));
    EXPECT_EQ(got, std::vector<float>(values.size(), static_cast<float>(n - 1)));
    EXPECT_NCCL(ncclCommWindowDeregister(pg.comm, window));
    pg.shut_down();
    EXPECT_NCCL(ncclMemFree(pool));
  });
}

// The scalar has the value of its memory when the operation's turn comes. The call does not wait for it.
TEST_P(ShimTorch, DeviceScalarsAreReadInTheStreamsOrder) {
  run([](int rank, int n, CudaDevice& device, const ncclUniqueId& id) {
    Group pg(device, Group::init(n, id, rank));
    constexpr size_t kCount = 517;
    const auto total = static_cast<float>(n * (n + 1) / 2);
    Tensor<float> in(device, kCount), out(device, kCount), factors(device, 1);
    Tensor<float> half(device, 1), two(device, 1);
    in.fill(static_cast<float>(rank + 1));
    half.fill(0.5f);
    two.fill(2);
    ncclRedOp_t op = ncclSum;
    EXPECT_NCCL(ncclRedOpCreatePreMulSum(&op, factors.data(), ncclFloat32, ncclScalarDevice, pg.comm));
    for (const auto& [scalar, factor] : {std::pair(&half, 0.5f), std::pair(&two, 2.0f)}) {
      device.copy(factors.data(), scalar->data(), sizeof(float), pg.stream());
      const int waits = device.emulated() ? device.host_waits() : 0;
      EXPECT_NCCL(ncclAllReduce(in.data(), out.data(), kCount, ncclFloat32, op, pg.comm,
                                static_cast<cudaStream_t>(pg.stream())));
      if (device.emulated()) {
        EXPECT_EQ(device.host_waits(), waits) << "the call waits for the device";
      }
      EXPECT_EQ(out.get(pg.stream()), std::vector<float>(kCount, factor * total));
    }
    EXPECT_NCCL(ncclRedOpDestroy(op, pg.comm));
    pg.shut_down();
  });
}

// async_op=False: uses the default stream, and the host continues.
TEST_P(ShimTorch, TheDefaultStreamDoesNotBlock) {
  Board* called = new_board();
  run([&](int rank, int n, CudaDevice& device, const ncclUniqueId& id) {
    Group pg(device, Group::init(n, id, rank));
    Tensor<float> t(device, 100);
    t.fill(static_cast<float>(rank));
    while (rank == n - 1 && called->counters[0].load() < n - 1) usleep(1000);
    EXPECT_NCCL(ncclAllReduce(t.data(), t.data(), 100, ncclFloat32, ncclSum, pg.comm, nullptr));
    called->counters[0].fetch_add(1);
    EXPECT_EQ(t.get(), std::vector<float>(100, static_cast<float>(n * (n - 1) / 2)));
    pg.shut_down();
  });
}

// Threads of one device share the default stream. Calls block there, or one rank would wait behind another.
TEST(ShimDefaultStream, BlocksWhereRanksShareIt) {
  setenv("MOECCL_TEST_CUDA_DEVICES", "1", 1);
  Board* board = new_board();
  in_threads(2, [&](int rank) {
    const ncclUniqueId id = meet(*board, rank);
    CudaDevice device;
    ASSERT_TRUE(device.ok()) << "no CUDA device";
    Group world(device, Group::init(2, id, rank));
    Tensor<int32_t> t(device, 1);
    void* stream = device.make_stream();
    for (int round = 0; round < 3; ++round) {
      t.fill(rank + round, stream);
      EXPECT_NCCL(ncclAllReduce(t.data(), t.data(), 1, ncclInt32, ncclSum, world.comm, nullptr));
      EXPECT_EQ(t.get(stream)[0], 2 * round + 1);
    }
    world.shut_down();
    device.end_stream(stream);
  });
}

// Like torch.cuda.graph: a side stream is captured in the global mode, collectives are forked from it and joined by
// events, and a watchdog keeps querying.
TEST_P(ShimTorch, GraphsInTheGlobalMode) {
  // A thread that waits for a stream ends the captures in the global mode of all threads in its process, so no rank
  // of a thread waits while another one captures.
  Board* board = new_board();
  run([board](int rank, int n, CudaDevice& device, const ncclUniqueId& id) {
    Group pg(device, Group::init(n, id, rank));
    constexpr size_t kCount = 1003;
    const auto ranks = static_cast<size_t>(n);
    Tensor<float> in(device, kCount), sum(device, kCount), all(device, kCount * ranks), part(device, kCount),
        scalar(device, 1);
    void* side = device.make_stream();
    const auto step = [&] {
      pg.collective(side, [&](cudaStream_t s) {
        ncclRedOp_t op = ncclSum;
        EXPECT_NCCL(ncclRedOpCreatePreMulSum(&op, scalar.data(), ncclFloat32, ncclScalarDevice, pg.comm));
        const ncclResult_t result = ncclAllReduce(in.data(), sum.data(), kCount, ncclFloat32, op, pg.comm, s);
        EXPECT_NCCL(ncclRedOpDestroy(op, pg.comm));
        return result;
      });
      pg.collective(
          side, [&](cudaStream_t s) { return ncclAllGather(sum.data(), all.data(), kCount, ncclFloat32, pg.comm, s); });
      pg.wait(side);
      // This one runs on the captured stream itself.
      EXPECT_NCCL(ncclReduceScatter(all.data(), part.data(), kCount, ncclFloat32, ncclAvg, pg.comm,
                                    static_cast<cudaStream_t>(side)));
    };
    in.fill(1);
    scalar.fill(1);
    step();  // PyTorch's warm-up
    device.synchronize(side);

    std::atomic<bool> over{false};
    std::thread watchdog([&] {
      CudaDevice own(rank);
      void* event = own.make_event();
      while (!over) {
        const int before = own.exchange_capture_mode(kThreadLocal);
        EXPECT_EQ(own.query(event), 0);
        own.exchange_capture_mode(before);
        ncclResult_t state = ncclSuccess;
        EXPECT_NCCL(ncclCommGetAsyncError(pg.comm, &state));
        EXPECT_EQ(state, ncclSuccess);
        usleep(500);
      }
      own.end_event(event);
    });
    all_reach(board->counters[0], n);
    device.begin_capture(side, kGlobal);
    step();
    void* graph = device.end_capture(side);
    all_reach(board->counters[1], n);
    over = true;
    watchdog.join();
    EXPECT_NE(graph, nullptr) << "the capture has become invalid";
    if (graph != nullptr) {
      void* instance = device.instantiate(graph);
      for (int replay = 1; replay <= 3; ++replay) {
        in.fill(static_cast<float>(rank + replay), side);
        scalar.fill(static_cast<float>(replay), side);
        device.launch_graph(instance, side);
        const auto want = static_cast<float>(replay * (n * replay + n * (n - 1) / 2));
        EXPECT_EQ(part.get(side), std::vector<float>(kCount, want)) << "replay " << replay;
        EXPECT_EQ(all.get(side), std::vector<float>(kCount * ranks, want));
      }
      device.end_graph(graph, instance);
    }
    device.end_stream(side);
    pg.shut_down();
  });
}

// A peer never comes. The watchdog sees that the end event does not complete, and aborts. The main thread, which waits
// for its stream, continues.
TEST_P(ShimTorch, TheWatchdogAbortsWhatHangs) {
  Board *looked = new_board(), *done = new_board();
  run([&](int rank, int n, CudaDevice& device, const ncclUniqueId& id) {
    Group pg(device, Group::init(n, id, rank));
    Tensor<float> t(device, 1000);
    void* segment = nullptr;
    EXPECT_NCCL(ncclCommRegister(pg.comm, t.data(), 1000 * sizeof(float), &segment));
    t.fill(1);
    if (rank == n - 1) {
      while (done->counters[0].load() < n - 1) usleep(1000);
      EXPECT_NCCL(ncclCommDeregister(pg.comm, segment));
      EXPECT_NCCL(ncclCommAbort(std::exchange(pg.comm, nullptr)));
      return;
    }
    pg.collective(nullptr, [&](cudaStream_t s) {
      return ncclAllReduce(t.data(), t.data(), 1000, ncclFloat32, ncclSum, pg.comm, s);
    });
    pg.wait(nullptr);
    std::thread watchdog([&] {
      CudaDevice own(rank);
      for (int i = 0; i < 20; ++i) {
        EXPECT_EQ(pg.query(), 600) << "cudaErrorNotReady";
        ncclResult_t state = ncclSuccess;
        EXPECT_NCCL(ncclCommGetAsyncError(pg.comm, &state));
        usleep(5000);
      }
      // An abort also ends the others' operations, so wait until all have looked.
      looked->counters[0].fetch_add(1);
      while (looked->counters[0].load() < n - 1) usleep(1000);
      // Uses the order of NCCLComm::abort(), on a thread without a device.
      std::thread([&] {
        EXPECT_NCCL(ncclCommDeregister(pg.comm, segment));
        EXPECT_NCCL(ncclCommAbort(std::exchange(pg.comm, nullptr)));
      }).join();
    });
    const auto begin = std::chrono::steady_clock::now();
    device.synchronize(nullptr);
    watchdog.join();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
    done->counters[0].fetch_add(1);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShimTorch,
                         ::testing::Values(Case{true, 2}, Case{true, 4}, Case{false, 2}, Case{false, 4}), case_name);

}  // namespace
}  // namespace moeccl::testing
