// SPDX-License-Identifier: Apache-2.0
// Dispatch, combine, both backward passes and AllToAllv on the persistent kernel: results match those of host memory
// bit for bit, also in graphs, and failures end with a sentence.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

RankOptions row_options(const char* topology) {
  RankOptions options{.mode = RankMode::kThreads, .deadline_ms = 120'000, .init = false};
  options.config.topology = topology;
  options.config.timeout_ms = capped_ms(60'000);
  options.config.init_timeout_ms = capped_ms(60'000);
  return options;
}

moecclStream_t handle(void* stream) { return reinterpret_cast<moecclStream_t>(stream); }

struct RowsWorld {
  int n;
  const char* topology;
  const char* algorithm;
  moecclMoeLayout_t layout;
  moecclDataType_t type;
  int32_t capacity;
  bool deterministic;
  size_t hidden;  // elements
  // Uses processes with one device each, where there are enough devices.
  bool devices = false;
};

// Values of few bits, so that no sum is a NaN.
std::vector<char> values(std::mt19937_64& random, moecclDataType_t type, size_t n) {
  const size_t size = moecclTypeSize(type);
  std::vector<char> bytes(n * size);
  for (size_t i = 0; i < n; ++i) {
    char* at = &bytes[i * size];
    const float f = static_cast<float>(static_cast<int>(random() % 33) - 16) / 8.0f;
    uint32_t word = 0;
    std::memcpy(&word, &f, sizeof(f));
    if (type == moecclFloat32) {
      std::memcpy(at, &f, sizeof(f));
    } else if (type == moecclBfloat16) {
      const auto half = static_cast<uint16_t>(word >> 16);
      std::memcpy(at, &half, sizeof(half));
    } else if (type == moecclFloat64) {
      const double d = f;
      std::memcpy(at, &d, sizeof(d));
    } else {
      for (size_t b = 0; b < size; ++b) at[b] = static_cast<char>(random() % 64);
    }
  }
  return bytes;
}

struct Choices {
  std::vector<int32_t> index;
  std::vector<float> weight;
  size_t tokens = 0;
};
Choices draw(std::mt19937_64& random, size_t tokens, const moecclMoeConfig_t& config) {
  const auto top_k = static_cast<size_t>(config.top_k), n_experts = static_cast<size_t>(config.n_experts);
  Choices c;
  c.tokens = tokens;
  std::vector<int32_t> all(n_experts);
  for (size_t t = 0; t < tokens; ++t) {
    std::iota(all.begin(), all.end(), 0);
    for (size_t k = 0; k < top_k; ++k) {
      std::swap(all[k], all[k + random() % (n_experts - k)]);
      c.index.push_back(random() % 10 == 0 ? -1 : all[k]);
      c.weight.push_back(static_cast<float>(random() % 100) / 64.0f);
    }
  }
  return c;
}

// One layer's buffers on host and device, and every operation on both.
class Both {
 public:
  Both(CudaDevice& device, const moecclMoeConfig_t& config, size_t most_rows, std::mt19937_64& random)
      : device_(device),
        config_(config),
        random_(random),
        most_(std::max(config.max_tokens, most_rows)),
        in_(device, most_ * config.hidden_bytes),
        out_(device, most_ * config.hidden_bytes),
        scales_in_(device, most_ * config.scale_bytes),
        scales_out_(device, most_ * config.scale_bytes) {}

  enum Op { kDispatch, kScaled, kCombine, kDispatchBackward, kCombineBackward, kOps };
  // Provides new input. Next comes run() or a replay, then check().
  void prepare(Op op, size_t tokens, size_t rows) {
    from_tokens_ = op == kDispatch || op == kScaled || op == kCombineBackward;
    const size_t n_in = from_tokens_ ? tokens : rows;
    n_out_ = from_tokens_ ? rows : tokens;
    const size_t row = row_bytes(op);
    host_in_ = values(random_, config_.type, n_in * row / moecclTypeSize(config_.type) + 1);
    host_in_.resize(n_in * row);
    host_scales_ = values(random_, moecclUint8, n_in * config_.scale_bytes);
    in_.put(host_in_);
    scales_in_.put(host_scales_);
    out_.put(std::vector<char>(most_ * config_.hidden_bytes, 0x5a));
  }
  moecclResult_t run(Op op, moecclRouting_t routing, void* stream) {
    return call(op, routing, in_.data(), scales_in_.data(), out_.data(), scales_out_.data(), handle(stream));
  }
  void check(Op op, moecclRouting_t routing, void* stream, const char* what) {
    const size_t row = row_bytes(op);
    std::vector<char> want(n_out_ * row + 1), want_scales(n_out_ * config_.scale_bytes + 1);
    // Even without tokens there must be a buffer.
    host_in_.resize(host_in_.size() + 1), host_scales_.resize(host_scales_.size() + 1);
    MOECCL_ASSERT_OK(call(op, routing, host_in_.data(), host_scales_.data(), want.data(), want_scales.data(), nullptr));
    std::vector<char> got = out_.get(stream), got_scales = scales_out_.get(stream);
    got.resize(n_out_ * row), want.resize(n_out_ * row);
    EXPECT_EQ(got, want) << what << ", operation " << op;
    if (op != kScaled) return;
    got_scales.resize(n_out_ * config_.scale_bytes), want_scales.resize(got_scales.size());
    EXPECT_EQ(got_scales, want_scales) << what << ", scales";
  }

 private:
  size_t row_bytes(Op op) const { return op == kScaled ? config_.scaled_row_bytes : config_.hidden_bytes; }
  static moecclResult_t call(Op op, moecclRouting_t routing, const void* in, const void* scales, void* out,
                             void* out_scales, moecclStream_t stream) {
    switch (op) {
      case kDispatch:
        return moecclDispatch(routing, in, out, stream);
      case kScaled:
        return moecclDispatchScaled(routing, in, scales, out, out_scales, stream);
      case kCombine:
        return moecclCombine(routing, in, out, stream);
      case kDispatchBackward:
        return moecclDispatchBackward(routing, in, out, stream);
      default:
        return moecclCombineBackward(routing, in, out, nullptr, nullptr, stream);
    }
  }
  CudaDevice& device_;
  const moecclMoeConfig_t& config_;
  std::mt19937_64& random_;
  size_t most_, n_out_ = 0;
  bool from_tokens_ = true;
  DeviceBuffer in_, out_, scales_in_, scales_out_;
  std::vector<char> host_in_, host_scales_;
};

moecclMoeConfig_t config_of(const RowsWorld& w) {
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  config.hidden_bytes = w.hidden * moecclTypeSize(w.type);
  config.type = w.type;
  config.top_k = 3;
  config.n_experts = 11;
  config.max_tokens = 40;
  config.layout = w.layout;
  config.align_rows = w.layout == moecclLayoutExpertMajor ? 3 : 0;
  config.capacity = w.capacity;
  config.algorithm = w.algorithm;
  config.scaled_row_bytes = w.hidden;
  config.scale_bytes = 12;
  return config;
}

class CudaWalkRows : public ::testing::TestWithParam<RowsWorld> {};

// The routing is created, captured and updated. The same graph nodes replay each update's tables.
TEST_P(CudaWalkRows, GraphsReplayEveryUpdateWithTheBitsOfHostMemory) {
  const RowsWorld w = GetParam();
  RankOptions options = row_options(w.topology);
  options.config.deterministic = w.deterministic ? 1 : 0;
  if (w.devices) options.mode = RankMode::kProcesses;
  const Setting devices("MOECCL_TEST_CUDA_DEVICES", std::to_string(w.devices ? w.n : 1).c_str());
  if (w.devices && std::getenv("MOECCL_CUDA_DRIVER") == nullptr)
    GTEST_SKIP() << "processes with a device each: not on one GPU, where they take turns";
  run_ranks(
      w.n,
      [&](int rank, moecclComm_t) {
        CudaDevice device(rank);
        moecclComm_t comm = join(rank, w.n, device, options);
        ASSERT_NE(comm, nullptr);
        std::mt19937_64 random(test_seed() * 131 + static_cast<uint64_t>(rank));
        const moecclMoeConfig_t config = config_of(w);
        moecclMoe_t moe = nullptr;
        MOECCL_ASSERT_OK(moecclMoeCreate(&moe, comm, &config));
        void* stream = device.make_stream();
        Choices c = draw(random, 1 + random() % 40, config);
        moecclRouting_t routing = nullptr;
        MOECCL_ASSERT_OK(moecclRoutingCreate(&routing, moe, c.index.data(), c.weight.data(), c.tokens));
        moecclRoutingDeviceInfo_t there{};
        there.size = sizeof(there);
        MOECCL_ASSERT_OK(moecclRoutingGetDeviceInfo(routing, &there));
        Both both(device, config, there.most_rows, random);
        void* instances[Both::kOps] = {};
        void* graphs[Both::kOps] = {};
        for (int step = 0; step < std::max(3, scaled(4)); ++step) {
          if (step > 0) {
            const size_t tokens = step == 2 && rank == 0 ? 0 : random() % 41;
            c = draw(random, tokens, config);
            MOECCL_ASSERT_OK(moecclRoutingUpdate(routing, c.index.data(), c.weight.data(), c.tokens));
          }
          moecclRoutingInfo_t info{};
          info.size = sizeof(info);
          MOECCL_ASSERT_OK(moecclRoutingGetInfo(routing, &info));
          ASSERT_LE(info.n_rows, there.most_rows);
          uint64_t counts[3] = {};
          device.download(&counts[0], there.n_tokens, 8);
          device.download(&counts[1], there.n_rows, 8);
          device.download(&counts[2], there.n_unique, 8);
          EXPECT_EQ(counts[0], info.n_tokens);
          EXPECT_EQ(counts[1], info.n_rows);
          EXPECT_EQ(counts[2], info.n_unique);
          const auto n_local = static_cast<size_t>(info.n_local_experts);
          ASSERT_EQ(there.n_local_experts, info.n_local_experts);
          std::vector<int32_t> expert_counts(n_local);
          device.download(expert_counts.data(), there.expert_counts, n_local * 4);
          EXPECT_TRUE(std::equal(expert_counts.begin(), expert_counts.end(), info.expert_counts));
          if (w.layout == moecclLayoutExpertMajor) {
            std::vector<int64_t> offsets(n_local + 1);
            device.download(offsets.data(), there.expert_offsets, offsets.size() * 8);
            EXPECT_TRUE(std::equal(offsets.begin(), offsets.end(), info.expert_offsets));
          }
          for (int o = 0; o < Both::kOps; ++o) {
            const auto op = static_cast<Both::Op>(o);
            if (instances[o] == nullptr) {
              device.begin_capture(stream);
              MOECCL_ASSERT_OK(both.run(op, routing, stream));
              graphs[o] = device.end_capture(stream);
              ASSERT_NE(graphs[o], nullptr);
              EXPECT_EQ(device.graph_kernels(graphs[o]), 1u);
              instances[o] = device.instantiate(graphs[o]);
              all_have_ended(comm);
            }
            both.prepare(op, info.n_tokens, info.n_rows);
            device.launch_graph(instances[o], stream);
            both.check(op, routing, stream, "replay");
            both.prepare(op, info.n_tokens, info.n_rows);
            MOECCL_ASSERT_OK(both.run(op, routing, step % 2 == 0 ? stream : nullptr));
            both.check(op, routing, stream, "call");
          }
        }
        for (int o = 0; o < Both::kOps; ++o) device.end_graph(graphs[o], instances[o]);
        MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
        MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        device.end_stream(stream);
      },
      options);
}

constexpr auto kMajor = moecclLayoutExpertMajor;
constexpr auto kRows = moecclLayoutRows;
INSTANTIATE_TEST_SUITE_P(
    Worlds, CudaWalkRows,
    ::testing::Values(RowsWorld{1, nullptr, "auto", kMajor, moecclFloat32, 0, false, 24},
                      RowsWorld{3, "node:2 gpu:1+2", "auto", kMajor, moecclBfloat16, 2, false, 72},
                      RowsWorld{3, "node:2 gpu:1+2", "hier:2", kRows, moecclInt8, 0, false, 33},
                      RowsWorld{4, "node:2 gpu:2", "hier:1", kMajor, moecclFloat64, 0, true, 9},
                      RowsWorld{5, nullptr, "flat", kRows, moecclFloat32, 3, false, 300},
                      RowsWorld{3, "node:2 gpu:2+1", "auto", kMajor, moecclBfloat16, 0, false, 40, true},
                      RowsWorld{8, "node:3 gpu:1+4+3", "auto", kMajor, moecclBfloat16, 0, false, 40}),
    [](const ::testing::TestParamInfo<RowsWorld>& info) {
      return std::to_string(info.index) + "_" + std::to_string(info.param.n) + "ranks";
    });

// A layer of two ranks with one routing, on a separate device.
struct TwoRanks {
  TwoRanks(int rank, const RankOptions& options) : comm(join(rank, 2, device, options)) {
    config = config_of({2, nullptr, "flat", moecclLayoutExpertMajor, moecclFloat32, 0, false, 16});
    std::mt19937_64 random(static_cast<uint64_t>(rank) + 5);
    choices = draw(random, 20, config);
    EXPECT_EQ(moecclMoeCreate(&moe, comm, &config), moecclSuccess);
    EXPECT_EQ(moecclRoutingCreate(&routing, moe, choices.index.data(), choices.weight.data(), 20), moecclSuccess);
    moecclRoutingDeviceInfo_t there{};
    there.size = sizeof(there);
    EXPECT_EQ(moecclRoutingGetDeviceInfo(routing, &there), moecclSuccess);
    bytes = std::max<size_t>(there.most_rows, 40) * config.hidden_bytes;
    stream = device.make_stream();
    in = device.allocate(bytes);
    out = device.allocate(bytes);
  }
  ~TwoRanks() {
    (void)moecclRoutingDestroy(routing);
    (void)moecclMoeDestroy(moe);
    (void)moecclCommDestroy(comm);
    device.end_stream(stream);
    device.release(in);
    device.release(out);
  }
  std::string last_error() const { return moecclGetLastError(comm); }
  // Waits until the communicator reports its failure.
  moecclResult_t state() {
    moecclResult_t state = moecclSuccess;
    for (int i = 0; i < 30'000 && (state == moecclSuccess || state == moecclInProgress); ++i) {
      if (moecclCommGetAsyncError(comm, &state) != moecclSuccess) return moecclInternalError;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return state;
  }
  CudaDevice device;
  moecclComm_t comm;
  moecclMoeConfig_t config;
  Choices choices;
  moecclMoe_t moe = nullptr;
  moecclRouting_t routing = nullptr;
  size_t bytes = 0;
  void *stream = nullptr, *in = nullptr, *out = nullptr;
};

TEST(CudaWalkRows, AMissingRankIsATimeoutThatNamesIt) {
  RankOptions options = row_options(nullptr);
  options.config.timeout_ms = 1500;
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        TwoRanks two(rank, options);
        if (rank == 1) {
          std::this_thread::sleep_for(std::chrono::milliseconds(4000));
          return;
        }
        MOECCL_ASSERT_OK(moecclDispatch(two.routing, two.in, two.out, handle(two.stream)));
        two.device.synchronize(two.stream);  // it ends, because the kernel leaves
        EXPECT_EQ(two.state(), moecclTimeout) << two.last_error();
        EXPECT_NE(two.last_error().find("rank 1"), std::string::npos) << two.last_error();
      },
      options);
}

TEST(CudaWalkRows, DispatchAgainstCombineIsAMismatch) {
  const RankOptions options = row_options(nullptr);
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        TwoRanks two(rank, options);
        const moecclResult_t result = rank == 0 ? moecclDispatch(two.routing, two.in, two.out, nullptr)
                                                : moecclCombine(two.routing, two.in, two.out, nullptr);
        EXPECT_EQ(result, moecclMismatch) << two.last_error();
        EXPECT_NE(two.last_error().find("combine"), std::string::npos) << two.last_error();
      },
      options);
}

TEST(CudaWalkRows, AnAbortEndsADispatch) {
  const RankOptions options = row_options(nullptr);
  std::atomic<bool> ended{false};  // the ranks are threads
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        TwoRanks two(rank, options);
        // To free its memory, rank 1 would wait for the dispatch, and in the driver rank 0 would wait for that.
        while (rank == 1 && !ended) std::this_thread::yield();
        if (rank == 1) return;
        const moecclResult_t dispatched = moecclDispatch(two.routing, two.in, two.out, handle(two.stream));
        MOECCL_EXPECT_OK(moecclCommAbort(two.comm));
        two.device.synchronize(two.stream);
        ended = true;
        MOECCL_EXPECT_OK(dispatched);
      },
      options);
}

TEST(CudaWalkRows, SplitSizesThatDifferAreNamed) {
  const RankOptions options = row_options(nullptr);
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        TwoRanks two(rank, options);
        // Rank 0 sends 5 elements, rank 1 expects 6.
        const size_t send[2] = {rank == 0 ? 1u : 2u, rank == 0 ? 5u : 2u}, at[2] = {0, 10};
        const size_t recv[2] = {rank == 0 ? 1u : 6u, 2};
        const moecclResult_t result =
            moecclAllToAllv(two.in, send, at, two.out, recv, at, moecclFloat32, two.comm, nullptr);
        EXPECT_EQ(result, moecclMismatch) << two.last_error();
        EXPECT_NE(two.last_error().find("rank 0 sends 5 elements, rank 1 expects 6"), std::string::npos)
            << two.last_error();
      },
      options);
}

TEST(CudaWalkRows, WhatAGraphHasCapturedBindsUpdatesAndAFailedOneFailsItsReplay) {
  RankOptions options = row_options(nullptr);
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        TwoRanks two(rank, options);
        two.device.begin_capture(two.stream);
        MOECCL_ASSERT_OK(moecclCombine(two.routing, two.in, two.out, handle(two.stream)));
        // The gradient of the weights passes through the host.
        std::vector<float> grad(20 * 3);
        EXPECT_EQ(moecclCombineBackward(two.routing, two.in, two.out, two.in, grad.data(), handle(two.stream)),
                  moecclUnsupported);
        void* graph = two.device.end_capture(two.stream);
        EXPECT_EQ(two.device.graph_kernels(graph), 1u);
        void* instance = two.device.instantiate(graph);
        all_have_ended(two.comm);
        // The captured combine applies weights.
        EXPECT_EQ(moecclRoutingUpdate(two.routing, two.choices.index.data(), nullptr, 20), moecclInvalidUsage);
        EXPECT_NE(two.last_error().find("graph"), std::string::npos) << two.last_error();
        two.device.launch_graph(instance, two.stream);
        two.device.synchronize(two.stream);
        EXPECT_EQ(moecclRoutingUpdate(two.routing, two.choices.index.data(), two.choices.weight.data(), 20),
                  moecclInvalidUsage);
        EXPECT_NE(two.last_error().find("routing empty"), std::string::npos) << two.last_error();
        two.device.end_graph(graph, instance);
      },
      options);
}

TEST(CudaWalkRows, ARefusedUpdateChangesNothingOfWhatAGraphHasCaptured) {
  const RankOptions options = row_options(nullptr);
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        TwoRanks two(rank, options);
        two.device.begin_capture(two.stream);
        MOECCL_ASSERT_OK(moecclCombine(two.routing, two.in, two.out, handle(two.stream)));
        void* graph = two.device.end_capture(two.stream);
        void* instance = two.device.instantiate(graph);
        all_have_ended(two.comm);
        for (int i = 0; i < 2; ++i) {
          EXPECT_EQ(moecclRoutingUpdate(two.routing, two.choices.index.data(), nullptr, 20), moecclInvalidUsage) << i;
          EXPECT_NE(two.last_error().find("captured with weights"), std::string::npos) << two.last_error();
        }
        MOECCL_EXPECT_OK(moecclRoutingUpdate(two.routing, two.choices.index.data(), two.choices.weight.data(), 20));
        two.device.launch_graph(instance, two.stream);
        two.device.synchronize(two.stream);
        moecclResult_t state = moecclInternalError;
        MOECCL_EXPECT_OK(moecclCommGetAsyncError(two.comm, &state));
        EXPECT_EQ(state, moecclSuccess) << two.last_error();
        two.device.end_graph(graph, instance);
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
