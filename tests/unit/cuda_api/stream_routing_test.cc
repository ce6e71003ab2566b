// SPDX-License-Identifier: Apache-2.0
// Routings that are updated in a stream's order: tables made on the device give the same results as those made on the
// host, also in a captured graph, and the host never waits.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

struct StreamWorld {
  int n;
  const char* topology;
  const char* algorithm;
  moecclMoeLayout_t layout;
  int32_t capacity;
  bool weighted, deterministic;
  int n_experts;
};

moecclStream_t handle(void* stream) { return reinterpret_cast<moecclStream_t>(stream); }

RankOptions options_of(const char* topology) {
  RankOptions options{.mode = RankMode::kThreads, .deadline_ms = 120'000, .init = false};
  options.config.topology = topology;
  options.config.timeout_ms = capped_ms(60'000);
  options.config.init_timeout_ms = capped_ms(60'000);
  return options;
}

constexpr size_t kHidden = 12, kMostTokens = 48;

moecclMoeConfig_t config_of(const StreamWorld& w) {
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  config.hidden_bytes = kHidden * sizeof(float);
  config.type = moecclFloat32;
  config.top_k = std::min(4, w.n_experts);
  config.n_experts = w.n_experts;
  config.max_tokens = kMostTokens;
  config.layout = w.layout;
  config.align_rows = w.layout == moecclLayoutExpertMajor ? 3 : 0;
  config.capacity = w.capacity;
  config.algorithm = w.algorithm;
  return config;
}

struct Choices {
  std::vector<int32_t> index;
  std::vector<float> weight;
  uint64_t tokens = 0;
};
// Arrays have kMostTokens rows, and the unused rows hold garbage.
Choices draw(std::mt19937_64& random, uint64_t tokens, const moecclMoeConfig_t& config) {
  Choices c;
  c.tokens = tokens;
  std::vector<int32_t> all(static_cast<size_t>(config.n_experts));
  for (size_t t = 0; t < kMostTokens; ++t) {
    std::iota(all.begin(), all.end(), 0);
    for (size_t k = 0; k < static_cast<size_t>(config.top_k); ++k) {
      std::swap(all[k], all[k + random() % (all.size() - k)]);
      c.index.push_back(t >= tokens ? 99'999 : random() % 8 == 0 ? -1 : all[k]);
      c.weight.push_back(static_cast<float>(1 + random() % 64) / 64.0f);
    }
  }
  return c;
}

std::vector<char> floats(std::mt19937_64& random, size_t n) {
  std::vector<char> bytes(n * sizeof(float));
  for (size_t i = 0; i < n; ++i) {
    const float f = static_cast<float>(static_cast<int>(random() % 65) - 32) / 8.0f;
    std::memcpy(&bytes[i * sizeof(f)], &f, sizeof(f));
  }
  return bytes;
}

// A rank with one layer, a routing that is updated on a stream, and the host's routing for comparison.
class StreamRank {
 public:
  StreamRank(int rank, const StreamWorld& w, const RankOptions& options)
      : world_(w),
        comm(join(rank, w.n, device, options)),
        config(config_of(w)),
        random(test_seed() * 77 + static_cast<uint64_t>(rank)) {
    EXPECT_EQ(moecclMoeCreate(&moe, comm, &config), moecclSuccess) << moecclGetLastError(comm);
    stream = device.make_stream();
    const Choices typical = draw(random, 20, config);
    EXPECT_EQ(moecclRoutingCreate(&routing, moe, typical.index.data(), weights(typical), 20), moecclSuccess)
        << moecclGetLastError(comm);
    there.size = sizeof(there);
    EXPECT_EQ(moecclRoutingGetDeviceInfo(routing, &there), moecclSuccess) << moecclGetLastError(comm);
    const size_t index_bytes = kMostTokens * size_t(config.top_k) * 4;
    index_ = device.allocate(index_bytes);
    weight_ = device.allocate(index_bytes);
    count_ = device.allocate(8);
    in_bytes = std::max<size_t>(kMostTokens, there.most_rows) * config.hidden_bytes;
    for (void*& b : buffers_) b = device.allocate(in_bytes);
  }
  ~StreamRank() {
    if (host_routing != nullptr) (void)moecclRoutingDestroy(host_routing);
    EXPECT_EQ(moecclRoutingDestroy(routing), moecclSuccess);
    EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
    (void)moecclCommDestroy(comm);
    device.end_stream(stream);
    for (void* b : {index_, weight_, count_}) device.release(b);
    for (void* b : buffers_) device.release(b);
  }
  const float* weights(const Choices& c) const { return world_.weighted ? c.weight.data() : nullptr; }

  // Uploads new choices to the same addresses, in the stream's order.
  void bring(const Choices& c) {
    device.upload(index_, c.index.data(), c.index.size() * 4, stream);
    device.upload(weight_, c.weight.data(), c.weight.size() * 4, stream);
    device.upload(count_, &c.tokens, 8, stream);
    device.synchronize(stream);  // the test's arrays may then be freed
  }
  moecclResult_t update() { return update(routing); }
  moecclResult_t update(moecclRouting_t which) {
    return moecclRoutingUpdateOnStream(which, static_cast<int32_t*>(index_),
                                       world_.weighted ? static_cast<float*>(weight_) : nullptr, kMostTokens,
                                       static_cast<uint64_t*>(count_), handle(stream));
  }
  // Runs an update, then each operation into a separate buffer.
  moecclResult_t step() {
    const auto on = handle(stream);
    moecclResult_t result = update();
    if (result == moecclSuccess) result = moecclDispatch(routing, buffers_[0], buffers_[1], on);
    if (result == moecclSuccess) result = moecclCombine(routing, buffers_[2], buffers_[3], on);
    if (result == moecclSuccess)
      result = moecclCombineBackward(routing, buffers_[0], buffers_[4], nullptr, nullptr, on);
    if (result == moecclSuccess) result = moecclDispatchBackward(routing, buffers_[2], buffers_[5], on);
    return result;
  }
  void fill() {
    tokens_in = floats(random, kMostTokens * kHidden);
    rows_in = floats(random, in_bytes / sizeof(float));
    device.upload(buffers_[0], tokens_in.data(), tokens_in.size(), stream);
    device.upload(buffers_[2], rows_in.data(), rows_in.size(), stream);
    const std::vector<char> nothing(in_bytes, 0x5a);
    for (const size_t b : {1u, 3u, 4u, 5u}) device.upload(buffers_[b], nothing.data(), in_bytes, stream);
    device.synchronize(stream);
  }
  // Compares with host memory, using a routing that the host made.
  void check(const Choices& c, const char* what) {
    const auto updated = host_routing == nullptr
                             ? moecclRoutingCreate(&host_routing, moe, c.index.data(), weights(c), c.tokens)
                             : moecclRoutingUpdate(host_routing, c.index.data(), weights(c), c.tokens);
    MOECCL_ASSERT_OK(updated);
    moecclRoutingInfo_t info{};
    info.size = sizeof(info);
    MOECCL_ASSERT_OK(moecclRoutingGetInfo(host_routing, &info));
    const size_t row = config.hidden_bytes, tokens = c.tokens * row, rows = info.n_rows * row;
    std::array<std::vector<char>, 6> want;
    for (const size_t b : {1u, 4u}) want[b].resize(rows + 1);
    for (const size_t b : {3u, 5u}) want[b].resize(tokens + 1);
    MOECCL_ASSERT_OK(moecclDispatch(host_routing, tokens_in.data(), want[1].data(), nullptr));
    MOECCL_ASSERT_OK(moecclCombine(host_routing, rows_in.data(), want[3].data(), nullptr));
    MOECCL_ASSERT_OK(moecclCombineBackward(host_routing, tokens_in.data(), want[4].data(), nullptr, nullptr, nullptr));
    MOECCL_ASSERT_OK(moecclDispatchBackward(host_routing, rows_in.data(), want[5].data(), nullptr));
    for (const size_t b : {1u, 3u, 4u, 5u}) {
      std::vector<char> got(in_bytes);
      device.download(got.data(), buffers_[b], in_bytes, stream);
      want[b].resize(want[b].size() - 1);
      got.resize(want[b].size());
      EXPECT_EQ(got, want[b]) << what << ", buffer " << b;
    }
    uint64_t counts[3] = {};
    device.download(&counts[0], there.n_tokens, 8);
    device.download(&counts[1], there.n_rows, 8);
    device.download(&counts[2], there.n_unique, 8);
    EXPECT_EQ(counts[0], info.n_tokens) << what;
    EXPECT_EQ(counts[1], info.n_rows) << what;
    EXPECT_EQ(counts[2], info.n_unique) << what;
    const auto n_local = static_cast<size_t>(info.n_local_experts);
    std::vector<int32_t> expert_counts(n_local);
    device.download(expert_counts.data(), there.expert_counts, n_local * 4);
    EXPECT_TRUE(std::equal(expert_counts.begin(), expert_counts.end(), info.expert_counts)) << what;
    if (world_.layout != moecclLayoutExpertMajor) return;
    std::vector<int64_t> offsets(n_local + 1);
    device.download(offsets.data(), there.expert_offsets, offsets.size() * 8);
    EXPECT_TRUE(std::equal(offsets.begin(), offsets.end(), info.expert_offsets)) << what;
  }
  moecclResult_t state() {
    moecclResult_t state = moecclSuccess;
    for (int i = 0; i < 30'000 && (state == moecclSuccess || state == moecclInProgress); ++i) {
      if (moecclCommGetAsyncError(comm, &state) != moecclSuccess) return moecclInternalError;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return state;
  }

 private:
  const StreamWorld& world_;

 public:
  CudaDevice device;
  moecclComm_t comm;
  moecclMoeConfig_t config;
  std::mt19937_64 random;
  moecclMoe_t moe = nullptr;
  moecclRouting_t routing = nullptr, host_routing = nullptr;
  moecclRoutingDeviceInfo_t there{};
  void* stream = nullptr;
  size_t in_bytes = 0;
  std::vector<char> tokens_in, rows_in;

 private:
  void *index_ = nullptr, *weight_ = nullptr, *count_ = nullptr;
  void* buffers_[6] = {};  // tokens, rows out, rows, tokens out, gradients of rows and of tokens
};

class CudaStreamRouting : public ::testing::TestWithParam<StreamWorld> {};

TEST_P(CudaStreamRouting, UpdatesGiveTheHostsResultsWithoutItInGraphsToo) {
  const StreamWorld w = GetParam();
  RankOptions options = options_of(w.topology);
  options.config.deterministic = w.deterministic ? 1 : 0;
  run_ranks(
      w.n,
      [&](int number, moecclComm_t) {
        StreamRank rank(number, w, options);
        ASSERT_NE(rank.routing, nullptr);
        const auto next = [&](int step) {
          const uint64_t tokens = step == 1 && number == 0 ? 0 : rank.random() % (kMostTokens + 1);
          return draw(rank.random, tokens, rank.config);
        };
        Choices c = next(0);
        rank.bring(c);
        const int at_first = rank.device.emulated() ? rank.device.host_waits() : 0;
        MOECCL_ASSERT_OK(rank.update());  // makes room
        if (rank.device.emulated()) {
          EXPECT_GT(rank.device.host_waits(), at_first) << "what is counted";
        }
        for (int step = 0; step < std::max(3, scaled(3)); ++step) {
          c = next(step);
          rank.bring(c);
          rank.fill();
          const int before = rank.device.emulated() ? rank.device.host_waits() : 0;
          MOECCL_ASSERT_OK(rank.step());
          if (rank.device.emulated()) {
            EXPECT_EQ(rank.device.host_waits(), before) << "the host waited for the device";
          }
          rank.check(c, "call");
          if (::testing::Test::HasFatalFailure()) return;
        }
        rank.device.begin_capture(rank.stream);
        MOECCL_ASSERT_OK(rank.step());
        void* graph = rank.device.end_capture(rank.stream);
        ASSERT_NE(graph, nullptr);
        void* instance = rank.device.instantiate(graph);
        all_have_ended(rank.comm);
        for (int step = 0; step < std::max(3, scaled(3)); ++step) {
          c = next(step);
          rank.bring(c);
          rank.fill();
          rank.device.launch_graph(instance, rank.stream);
          rank.check(c, "replay");
          if (::testing::Test::HasFatalFailure()) return;
        }
        rank.device.synchronize(rank.stream);
        // Uses the host again, with the plan that the graph holds, and then the graph.
        MOECCL_ASSERT_OK(moecclRoutingUpdate(rank.routing, c.index.data(), rank.weights(c), c.tokens));
        moecclRoutingInfo_t info{};
        info.size = sizeof(info);
        MOECCL_EXPECT_OK(moecclRoutingGetInfo(rank.routing, &info));
        c = next(2);
        rank.bring(c);
        rank.fill();
        rank.device.launch_graph(instance, rank.stream);
        rank.check(c, "replay after an update by the host");
        rank.device.end_graph(graph, instance);
      },
      options);
}

constexpr auto kMajor = moecclLayoutExpertMajor;
constexpr auto kRows = moecclLayoutRows;
INSTANTIATE_TEST_SUITE_P(Worlds, CudaStreamRouting,
                         ::testing::Values(StreamWorld{1, nullptr, "auto", kMajor, 0, true, false, 5},
                                           StreamWorld{3, "node:2 gpu:1+2", "auto", kMajor, 3, true, true, 11},
                                           StreamWorld{4, "node:2 gpu:2", "2dh", kRows, 0, false, false,
                                                       3},  // a rank without experts
                                           StreamWorld{5, nullptr, "flat", kMajor, 0, true, false, 9},
                                           StreamWorld{8, "node:3 gpu:1+4+3", "hier:2", kRows, 0, true, false, 19}),
                         [](const ::testing::TestParamInfo<StreamWorld>& info) {
                           return std::to_string(info.index) + "_" + std::to_string(info.param.n) + "ranks";
                         });

constexpr StreamWorld kTwo{2, nullptr, "flat", kMajor, 0, true, false, 6};

TEST(CudaStreamRouting, WhatCannotBeIsRefusedWithItsReason) {
  const RankOptions options = options_of(nullptr);
  run_ranks(
      2,
      [&](int number, moecclComm_t) {
        StreamRank rank(number, kTwo, options);
        const auto says = [&](moecclResult_t result, moecclResult_t wanted, const char* text) {
          EXPECT_EQ(result, wanted);
          EXPECT_NE(std::string(moecclGetLastError(nullptr)).find(text), std::string::npos)
              << moecclGetLastError(nullptr);
        };
        const Choices c = draw(rank.random, 10, rank.config);
        says(moecclRoutingUpdateOnStream(rank.routing, c.index.data(), nullptr, 10, nullptr, handle(rank.stream)),
             moecclInvalidArgument, "topk_index is not CUDA memory");
        rank.bring(c);
        rank.device.begin_capture(rank.stream);
        says(rank.update(), moecclInvalidUsage, "call it once before the capture");
        void* graph = rank.device.end_capture(rank.stream);
        rank.device.end_graph(graph, rank.device.instantiate(graph));
        // The host asks for an array that only the device has.
        MOECCL_EXPECT_OK(rank.update());
        moecclRoutingInfo_t info{};
        info.size = sizeof(info);
        says(moecclRoutingGetInfo(rank.routing, &info), moecclInvalidUsage, "on the device alone");
        std::vector<char> rows(rank.in_bytes), arrived(rank.in_bytes);
        says(moecclDispatch(rank.routing, rows.data(), arrived.data(), nullptr), moecclInvalidUsage,
             "only CUDA memory can follow");
        rank.device.synchronize(rank.stream);
      },
      options);
}

TEST(CudaStreamRouting, SumsByChoiceAreRefused) {
  StreamWorld ordered = kTwo;
  ordered.algorithm = "flat:ordered";
  const RankOptions options = options_of(nullptr);
  run_ranks(
      2,
      [&](int number, moecclComm_t) {
        StreamRank rank(number, ordered, options);
        rank.bring(draw(rank.random, 10, rank.config));
        EXPECT_EQ(rank.update(), moecclUnsupported);
        EXPECT_NE(std::string(moecclGetLastError(nullptr)).find("flat:ordered"), std::string::npos)
            << moecclGetLastError(nullptr);
      },
      options);
}

// Its peers meet a rank in the AllGather of the choices, which comes after its first kernel.
TEST(CudaStreamRouting, ARankWhoseKernelIsRefusedIsNotWaitedFor) {
  RankOptions options = options_of(nullptr);
  options.config.timeout_ms = capped_ms(60'000);
  std::atomic<int> n_ended{0};
  std::atomic<bool> launched{false};
  run_ranks(
      2,
      [&](int number, moecclComm_t) {
        StreamRank rank(number, kTwo, options);
        rank.bring(draw(rank.random, 10, rank.config));
        MOECCL_EXPECT_OK(rank.update());
        rank.device.synchronize(rank.stream);
        if (number == 1) {
          while (!launched) usleep(1000);  // the refusal is for the next launch of any thread
          rank.device.refuse("cuLaunchKernel", 999);
          EXPECT_EQ(rank.update(), moecclSystemError);
        } else {
          (void)rank.update();
          launched = true;
        }
        const auto begun = std::chrono::steady_clock::now();
        moecclResult_t state = moecclSuccess;
        while (moecclCommGetAsyncError(rank.comm, &state) == moecclSuccess &&
               (state == moecclSuccess || state == moecclInProgress) &&
               std::chrono::steady_clock::now() - begun < std::chrono::seconds(20))
          usleep(1000);
        EXPECT_EQ(state, number == 1 ? moecclSystemError : moecclRemoteError);
        // A rank that frees memory now would wait for the other's kernel, and hold up the thread that looks after it.
        for (++n_ended; n_ended < 2;) usleep(1000);
      },
      options);
}

// The size that moecclMoeQuerySize returns suffices for everything. With smaller and smaller caps, there comes one with
// room for tables on the host but not for those on the device.
TEST(CudaStreamRouting, CountsInTheMemoryCap) {
  const RankOptions options = options_of(nullptr);
  run_ranks(
      2,
      [&](int number, moecclComm_t) {
        StreamRank rank(number, kTwo, options);
        const Choices c = draw(rank.random, 40, rank.config);
        rank.bring(c);
        size_t bytes = 0;
        moecclMoeConfig_t config = rank.config;
        config.max_tokens = 4000;  // the device has room for this many, host tables for the existing ones
        MOECCL_ASSERT_OK(moecclMoeQuerySize(&config, 2, nullptr, &bytes));
        bool refused = false;
        for (size_t cap = bytes; !refused && cap > 1000; cap -= cap / 5) {
          config.memory_cap_bytes = cap;
          moecclMoe_t moe = nullptr;
          moecclRouting_t routing = nullptr;
          moecclResult_t result = moecclMoeCreate(&moe, rank.comm, &config);
          if (result == moecclSuccess)
            result = moecclRoutingCreate(&routing, moe, c.index.data(), c.weight.data(), c.tokens);
          const bool on_host = result == moecclSuccess;
          if (on_host) result = rank.update(routing);
          if (cap == bytes) {
            MOECCL_EXPECT_OK(result);
          }
          if (on_host && result != moecclSuccess) {
            refused = true;
            EXPECT_EQ(result, moecclOutOfMemory);
            EXPECT_NE(std::string(moecclGetLastError(nullptr)).find("memory_cap_bytes"), std::string::npos)
                << moecclGetLastError(nullptr);
          }
          rank.device.synchronize(rank.stream);
          if (routing != nullptr) (void)moecclRoutingDestroy(routing);
          if (moe != nullptr) (void)moecclMoeDestroy(moe);
          if (!on_host) break;
        }
        EXPECT_TRUE(refused);
      },
      options);
}

TEST(CudaStreamRouting, AWrongChoiceFailsAllRanksWithItsToken) {
  const RankOptions options = options_of(nullptr);
  run_ranks(
      2,
      [&](int number, moecclComm_t) {
        StreamRank rank(number, kTwo, options);
        Choices c = draw(rank.random, 10, rank.config);
        rank.bring(c);
        rank.fill();
        MOECCL_ASSERT_OK(rank.update());
        if (number == 1) c.index[7 * 4 + 2] = 77;
        rank.bring(c);
        (void)rank.step();
        rank.device.synchronize(rank.stream);  // it ends, because the kernels leave
        // Rank 1's abort may reach the other rank before its own kernel has found the choice.
        const moecclResult_t state = rank.state();
        EXPECT_TRUE(state == moecclInvalidArgument || (number == 0 && state == moecclRemoteError)) << state;
        const std::string said = moecclGetLastError(rank.comm);
        EXPECT_NE(said.find("topk_index[7] of rank 1"), std::string::npos) << said;
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
