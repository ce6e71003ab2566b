// SPDX-License-Identifier: Apache-2.0
// The compressed return of gradients on CUDA memory gives the bits of host memory, on a CUDA stream, on the calling
// thread, on a stream of the library and in a graph.
#include <limits>
#include <random>
#include <utility>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

struct World {
  int n;
  RankMode mode;
  const char* topology;
  std::vector<int32_t> domain;
  std::vector<int32_t> owner;  // of each expert
  bool ipc = true;
};
std::ostream& operator<<(std::ostream& out, const World& w) {
  return out << w.n << mode_name(w.mode) << (w.ipc ? "" : "_staged_in_host_memory");
}

struct Gradients {
  moecclDataType_t type;
  double ratio;
  size_t count;
};

// Two gradient returns of one communicator, one on host memory and one on CUDA memory.
class Both {
 public:
  Both(const World& w, moecclComm_t comm, CudaDevice& device, const Gradients& kind, int n_layers)
      : comm_(comm), device_(device), kind_(kind) {
    create(w, n_layers);
  }
  void create(const World& w, int n_layers) {
    moecclHybridConfig_t domains = MOECCL_HYBRID_CONFIG_INIT;
    domains.n_experts = static_cast<int32_t>(w.owner.size());
    domains.expert_rank = w.owner.data();
    domains.n_levels = static_cast<int32_t>(w.domain.size());
    domains.domain = w.domain.data();
    moecclHybrid_t hybrid = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm_, &domains), comm_);
    info_.size = sizeof(info_);
    MOECCL_ASSERT_OK(moecclHybridGetInfo(hybrid, &info_));
    moecclGradientReturnConfig_t config = MOECCL_GRADIENT_RETURN_CONFIG_INIT;
    config.count = kind_.count;
    config.type = kind_.type;
    config.ratio = kind_.ratio;
    config.n_layers = n_layers;
    MOECCL_ASSERT_COMM_OK(moecclGradientReturnCreate(&host, hybrid, nullptr, &config), comm_);
    config.device_memory = 1;
    MOECCL_ASSERT_COMM_OK(moecclGradientReturnCreate(&on_device, hybrid, nullptr, &config), comm_);
    n_held = static_cast<size_t>(info_.n_held), n_own = static_cast<size_t>(info_.n_own);
    MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
  }
  ~Both() {
    MOECCL_EXPECT_OK(moecclGradientReturnDestroy(host));
    MOECCL_EXPECT_OK(moecclGradientReturnDestroy(on_device));
  }
  size_t whole() const { return kind_.count * moecclTypeSize(kind_.type); }
  // Gradients near 1, with ties, zeros and, in some steps, infinities.
  std::vector<char> held(std::mt19937_64& random, bool infinite) const {
    std::vector<char> bytes(n_held * whole() + 1);
    for (size_t i = 0; i < n_held * kind_.count; ++i) {
      float f = static_cast<float>(static_cast<int64_t>(random() % 512) - 256) / 64.0f;
      if (infinite && random() % 997 == 0) f = std::numeric_limits<float>::infinity();
      const size_t size = moecclTypeSize(kind_.type);
      std::memcpy(&bytes[i * size], reinterpret_cast<const char*>(&f) + sizeof(f) - size, size);
    }
    return bytes;
  }
  std::vector<char> remainders(moecclGradientReturn_t of, int layer, void* stream) const {
    moecclGradientReturnInfo_t facts{};
    facts.size = sizeof(facts);
    EXPECT_EQ(moecclGradientReturnGetInfo(of, layer, &facts), moecclSuccess);
    std::vector<char> bytes(static_cast<size_t>(facts.n_remainders) * kind_.count * sizeof(float));
    if (of == on_device) {
      device_.download(bytes.data(), facts.remainders, bytes.size(), stream);
    } else if (!bytes.empty()) {
      std::memcpy(bytes.data(), facts.remainders, bytes.size());
    }
    return bytes;
  }

  moecclGradientReturn_t host = nullptr, on_device = nullptr;
  size_t n_held = 0, n_own = 0;

 private:
  moecclComm_t comm_;
  CudaDevice& device_;
  Gradients kind_;
  moecclHybridInfo_t info_{};
};

template <class Body>
void on_devices(const World& w, Body&& body) {
  RankOptions options = device_options(w.mode);
  options.config.topology = w.topology;
  const Setting ipc("MOECCL_CUDA_IPC", w.ipc ? "1" : "0");
  run_on_devices(w.n, options, body);
}

class CudaGradientReturn : public ::testing::TestWithParam<World> {};

TEST_P(CudaGradientReturn, OwnersAndHoldersGetTheHostsBits) {
  const World& w = GetParam();
  on_devices(w, [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    std::mt19937_64 random(test_seed() * 29 + static_cast<uint64_t>(rank));
    moecclStream_t hosts = nullptr;
    MOECCL_ASSERT_OK(moecclStreamCreate(&hosts));
    for (const Gradients kind :
         {Gradients{moecclFloat32, 50, 65'603}, Gradients{moecclBfloat16, 4, 1001},
          Gradients{moecclBfloat16, 50, 70'000}, Gradients{moecclFloat32, 50, 5}, Gradients{moecclFloat32, 50, 0}}) {
      Both both(w, comm, device, kind, 2);
      if (::testing::Test::HasFailure()) return;
      for (int step = 0; step < 6; ++step) {
        set_note("ratio " + std::to_string(kind.ratio) + ", step " + std::to_string(step));
        const int layer = step % 2;
        const std::vector<char> held = both.held(random, step == 3);
        std::vector<char> want(both.n_own * both.whole() + 1, 0x5a);
        DeviceBuffer d_held(device, held.size()), d_own(device, want.size());
        d_held.put(held);
        d_own.put(want);
        MOECCL_ASSERT_COMM_OK(moecclGradientReturnReduce(both.host, layer, held.data(), want.data(), nullptr), comm);
        moecclStream_t on = step < 3 ? as_stream(stream) : step < 5 ? nullptr : hosts;
        MOECCL_ASSERT_COMM_OK(moecclGradientReturnReduce(both.on_device, layer, d_held.data(), d_own.data(), on), comm);
        MOECCL_ASSERT_OK(moecclStreamSynchronize(hosts));
        EXPECT_EQ(d_own.get(stream), want);
        EXPECT_EQ(both.remainders(both.on_device, layer, stream), both.remainders(both.host, layer, stream));
      }
      MOECCL_EXPECT_COMM_OK(moecclGradientReturnReset(both.on_device, 0), comm);
      const std::vector<char> left = both.remainders(both.on_device, 0, stream);
      EXPECT_EQ(left, std::vector<char>(left.size()));
      if (both.n_held > 0 && kind.count > 0) {
        std::vector<char> held(both.n_held * both.whole()), own(both.n_own * both.whole() + 1);
        EXPECT_EQ(moecclGradientReturnReduce(both.on_device, 0, held.data(), own.data(), nullptr),
                  moecclInvalidArgument);
        EXPECT_NE(std::string(moecclGetLastError(comm)).find("held is host memory, but config.device_memory was 1"),
                  std::string::npos)
            << moecclGetLastError(comm);
      }
      all_have_ended(comm);
    }
    MOECCL_EXPECT_OK(moecclStreamDestroy(hosts));
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, CudaGradientReturn,
                         ::testing::Values(World{1, RankMode::kThreads, nullptr, {1}, {0, 0}},
                                           World{4, RankMode::kThreads, "dc:2 gpu:2", {2, 2}, {3, 0, 1, 1, 2, 2}},
                                           World{4, RankMode::kProcesses, "dc:2 gpu:2", {1, 2}, {0, 1, 2, 3}},
                                           World{5, RankMode::kMixed, "dc:2 gpu:2+3", {2, 2}, {4, 4, 0}},
                                           World{3, RankMode::kProcesses, nullptr, {3}, {0, 1, 2, 1, 0}, false}));

// A stream of the library orders its calls on CUDA memory among those on CUDA streams, whatever each rank waits for.
TEST(CudaGradientReturnOrder, OnAStreamOfTheLibraryACallKeepsItsPlace) {
  const Setting mps("MOECCL_TEST_CUDA_MPS", "1");  // so that kernels of both processes may wait for one another
  const World w{2, RankMode::kProcesses, nullptr, {2}, {0, 1, 1}};
  on_devices(w, [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    const Gradients kind{moecclFloat32, 50, 3000};
    Both both(w, comm, device, kind, 1);
    std::mt19937_64 random(test_seed() * 37 + static_cast<uint64_t>(rank));
    DeviceBuffer d_held(device, both.n_held * both.whole() + 1), d_own(device, both.n_own * both.whole() + 1);
    DeviceBuffer one(device, 4), two(device, 4);
    one.put(floats(1, 1));
    moecclStream_t hosts = nullptr;
    MOECCL_ASSERT_OK(moecclStreamCreate(&hosts));
    uint64_t* const word = device.make_word();
    for (int round = 1; round <= 4; ++round) {
      const std::vector<char> held = both.held(random, false);
      std::vector<char> want(both.n_own * both.whole() + 1);
      d_held.put(held);
      d_own.put(want);
      const bool waits = rank == round % 2;
      if (waits) device.hold(nullptr, word, static_cast<uint64_t>(round));
      MOECCL_ASSERT_COMM_OK(moecclGradientReturnReduce(both.on_device, 0, d_held.data(), d_own.data(), hosts), comm);
      if (!waits) usleep(50'000);  // its call is on the device now
      MOECCL_ASSERT_COMM_OK(
          moecclAllReduce(one.data(), two.data(), 1, moecclFloat32, moecclSum, comm, as_stream(stream)), comm);
      if (waits) {
        usleep(50'000);
        __atomic_store_n(word, static_cast<uint64_t>(round), __ATOMIC_RELEASE);
      }
      MOECCL_ASSERT_COMM_OK(moecclStreamSynchronize(hosts), comm);
      EXPECT_EQ(two.get(stream), floats(1, 2));
      MOECCL_ASSERT_COMM_OK(moecclGradientReturnReduce(both.host, 0, held.data(), want.data(), nullptr), comm);
      EXPECT_EQ(d_own.get(stream), want);
    }
    MOECCL_EXPECT_OK(moecclStreamDestroy(hosts));
    all_have_ended(comm);
    device.end_word(word);
  });
}

// A later operation on the default stream waits for the call's turn, so the call must not wait for that stream's end.
TEST(CudaGradientReturnOrder, OnlyEarlierWorkOfTheDefaultStreamComesFirst) {
  const World w{2, RankMode::kProcesses, nullptr, {2}, {0, 1, 1}};
  on_devices(w, [&](int, moecclComm_t comm, CudaDevice& device, void* stream) {
    const Gradients kind{moecclFloat32, 50, 300'000};
    Both both(w, comm, device, kind, 1);
    void* const legacy = reinterpret_cast<void*>(1);
    DeviceBuffer d_held(device, both.n_held * both.whole() + 1), d_own(device, both.n_own * both.whole() + 1);
    DeviceBuffer from(device, 4), to(device, 4);
    from.put(floats(1, 7));
    moecclStream_t hosts = nullptr;
    MOECCL_ASSERT_OK(moecclStreamCreate(&hosts));
    for (int round = 0; round < 6; ++round) {
      MOECCL_ASSERT_COMM_OK(moecclGradientReturnReduce(both.on_device, 0, d_held.data(), d_own.data(), hosts), comm);
      int rank = 0;
      MOECCL_ASSERT_OK(moecclCommUserRank(comm, &rank));
      MOECCL_ASSERT_OK(moecclGroupStart());
      MOECCL_ASSERT_COMM_OK(moecclSend(from.data(), 1, moecclFloat32, 1 - rank, comm, as_stream(legacy)), comm);
      MOECCL_ASSERT_COMM_OK(moecclRecv(to.data(), 1, moecclFloat32, 1 - rank, comm, as_stream(legacy)), comm);
      MOECCL_ASSERT_OK(moecclGroupEnd());
      MOECCL_ASSERT_COMM_OK(moecclStreamSynchronize(hosts), comm);
      device.synchronize(nullptr);
      EXPECT_EQ(to.get(stream), floats(1, 7));
    }
    MOECCL_EXPECT_OK(moecclStreamDestroy(hosts));
    all_have_ended(comm);
  });
}

// Both layers of a step in one graph, whose replays carry the remainders on.
TEST(CudaGradientReturnGraph, ReplaysCarryTheRemaindersOn) {
  const World w{2, RankMode::kThreads, nullptr, {2}, {0, 1, 1}};
  on_devices(w, [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    const Gradients kind{moecclFloat32, 50, 3000};
    Both both(w, comm, device, kind, 2);
    std::mt19937_64 random(test_seed() * 31 + static_cast<uint64_t>(rank));
    DeviceBuffer d_held(device, both.n_held * both.whole() + 1), d_own(device, both.n_own * both.whole() + 1);
    DeviceBuffer d_own2(device, both.n_own * both.whole() + 1), word(device, 4);
    const auto meet = [&] {
      MOECCL_EXPECT_OK(moecclAllReduce(word.data(), word.data(), 1, moecclFloat32, moecclMax, comm, nullptr));
    };
    meet();
    device.begin_capture(stream, 0);
    MOECCL_EXPECT_OK(moecclGradientReturnReduce(both.on_device, 0, d_held.data(), d_own.data(), as_stream(stream)));
    MOECCL_EXPECT_OK(moecclGradientReturnReduce(both.on_device, 1, d_held.data(), d_own2.data(), as_stream(stream)));
    void* graph = device.end_capture(stream);
    meet();
    ASSERT_NE(graph, nullptr);
    void* instance = device.instantiate(graph);
    meet();
    for (int replay = 0; replay < 3; ++replay) {
      const std::vector<char> held = both.held(random, false);
      std::vector<char> want(both.n_own * both.whole() + 1);
      d_held.put(held);
      d_own.put(want);
      device.launch_graph(instance, stream);
      std::vector<char> came = d_own.get(stream);
      for (int layer = 0; layer < 2; ++layer) {
        MOECCL_ASSERT_COMM_OK(moecclGradientReturnReduce(both.host, layer, held.data(), want.data(), nullptr), comm);
        EXPECT_EQ(both.remainders(both.on_device, layer, stream), both.remainders(both.host, layer, stream));
      }
      EXPECT_EQ(came, want);
    }
    MOECCL_EXPECT_OK(moecclStreamSynchronize(as_stream(stream)));
    device.end_graph(graph, instance);
    all_have_ended(comm);
  });
}

// In their one stream, the call of the aborted communicator stands behind a launch of another, which waits for rank 1.
TEST(CudaGradientReturnEnd, AfterAnAbortDestroyDoesNotWaitForAnotherCommunicatorsLaunch) {
  const World w{2, RankMode::kThreads, nullptr, {2}, {0, 1, 1}};
  Meeting destroyed;
  on_devices(w, [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    moecclComm_t aborted = nullptr;
    MOECCL_ASSERT_OK(moecclCommSplit(comm, 0, rank, &aborted, nullptr));
    Both both(w, aborted, device, {moecclFloat32, 50, 3000}, 1);
    DeviceBuffer d_held(device, both.n_held * both.whole() + 1), d_own(device, both.n_own * both.whole() + 1);
    DeviceBuffer x(device, 4);
    const auto sum = [&] {
      MOECCL_EXPECT_OK(moecclAllReduce(x.data(), x.data(), 1, moecclFloat32, moecclSum, comm, as_stream(stream)));
    };
    if (rank == 0) {
      sum();
      MOECCL_EXPECT_OK(moecclGradientReturnReduce(both.on_device, 0, d_held.data(), d_own.data(), as_stream(stream)));
      usleep(100'000);
    } else {
      EXPECT_TRUE(destroyed.wait_for(1));
    }
    const Stopwatch watch;
    MOECCL_EXPECT_OK(moecclCommAbort(aborted));
    MOECCL_EXPECT_OK(moecclGradientReturnDestroy(std::exchange(both.on_device, nullptr)));
    MOECCL_EXPECT_WITHIN(watch, 2000);
    (void)moecclCommDestroy(aborted);  // may return the abort
    MOECCL_EXPECT_WITHIN(watch, 4000);
    if (rank == 0) {
      destroyed.arrive();
    } else {
      sum();
    }
    device.synchronize(stream);
    moecclResult_t state = moecclInternalError;
    MOECCL_EXPECT_OK(moecclCommGetAsyncError(comm, &state));
    MOECCL_EXPECT_OK(state);
  });
}

}  // namespace
}  // namespace moeccl::testing
