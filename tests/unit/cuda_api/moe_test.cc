// SPDX-License-Identifier: Apache-2.0
// Dispatch, combine and both backward passes on CUDA memory give the bits of host memory.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <random>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

struct MoeWorld {
  int n;
  RankMode mode;
  const char* topology;
  moecclMoeLayout_t layout;
  bool deterministic;
  size_t staging = 0;                // 0: the default
  const char* kernel_staging = "0";  // 0: the default
  const char* algorithm = nullptr;
};

std::vector<char> rows_of(std::mt19937_64& random, size_t n) {
  std::vector<char> bytes(n * 2);
  for (size_t i = 0; i < n; ++i) {
    const auto h = static_cast<uint16_t>(0x3f00 + random() % 0x180 + (random() % 2) * 0x8000);  // bf16 near 1
    std::memcpy(&bytes[i * 2], &h, 2);
  }
  return bytes;
}

std::string page_of(moecclRouting_t routing) {
  std::vector<char> page(1 << 16);
  EXPECT_EQ(moecclMoeExplain(routing, page.data(), page.size(), nullptr), moecclSuccess);
  return page.data();
}

// The kernel's slots have another size than the host's, so the routing says two numbers of chunks.
void expect_other_chunks(moecclRouting_t routing) {
  const std::string text = page_of(routing);
  constexpr std::string_view kHost = "; ", kKernel = "on CUDA memory ";
  const size_t chunks = text.find(" chunks in "), kernel = text.find(kKernel);
  ASSERT_NE(chunks, std::string::npos) << text;
  ASSERT_NE(kernel, std::string::npos) << text;
  const int host = std::stoi(text.substr(text.rfind(kHost, chunks) + kHost.size()));
  EXPECT_NE(host, std::stoi(text.substr(kernel + kKernel.size()))) << text;
}

class CudaMoe : public ::testing::TestWithParam<MoeWorld> {};

TEST_P(CudaMoe, EveryDirectionGivesTheBitsOfHostMemory) {
  const MoeWorld w = GetParam();
  // Where the kernel has other staging, host memory and CUDA memory cut the rows into different chunks.
  const Setting staging("MOECCL_CUDA_STAGING_BYTES", w.kernel_staging);
  RankOptions options{.mode = w.mode, .deadline_ms = 120'000, .init = false};
  options.config.topology = w.topology;
  options.config.staging_bytes = w.staging;
  options.config.deterministic = w.deterministic ? 1 : 0;
  options.config.timeout_ms = capped_ms(60'000);
  options.config.init_timeout_ms = capped_ms(60'000);
  run_ranks(
      w.n,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        moecclComm_t comm = join(rank, w.n, device, options);
        ASSERT_NE(comm, nullptr);
        std::mt19937_64 random(test_seed() * 31 + static_cast<uint64_t>(rank));
        constexpr size_t kHidden = 72, kTopK = 3, kExperts = 10;
        moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
        config.hidden_bytes = kHidden * 2;
        config.type = moecclBfloat16;
        config.top_k = kTopK;
        config.n_experts = kExperts;
        config.max_tokens = 64;
        config.scaled_row_bytes = kHidden;  // fp8 rows of a bf16 layer
        config.scale_bytes = 20;
        config.layout = w.layout;
        config.algorithm = w.algorithm;
        config.align_rows = w.layout == moecclLayoutExpertMajor ? 4 : 0;
        moecclMoe_t moe = nullptr;
        MOECCL_ASSERT_OK(moecclMoeCreate(&moe, comm, &config));
        void* stream = device.make_stream();
        for (int step = 0; step < std::max(4, scaled(6)); ++step) {
          const size_t tokens = step == 2 && rank == 0 ? 0 : 1 + random() % 64;
          std::vector<int32_t> topk(tokens * kTopK);
          std::vector<float> weight(tokens * kTopK);
          for (size_t t = 0; t < tokens; ++t)
            for (size_t k = 0; k < kTopK; ++k) {
              topk[t * kTopK + k] = static_cast<int32_t>((random() % 3 + k * 3) % kExperts);
              weight[t * kTopK + k] = static_cast<float>(random() % 100) / 64.0f;
            }
          moecclRouting_t routing = nullptr;
          // In every second step, indices and weights are in CUDA memory.
          DeviceBuffer d_topk(device, topk.size() * 4), d_weight(device, weight.size() * 4);
          device.upload(d_topk.data(), topk.data(), topk.size() * 4);
          device.upload(d_weight.data(), weight.data(), weight.size() * 4);
          const bool on_device = step % 2 == 1;
          MOECCL_ASSERT_OK(
              moecclRoutingCreate(&routing, moe, on_device ? static_cast<const int32_t*>(d_topk.data()) : topk.data(),
                                  on_device ? static_cast<const float*>(d_weight.data()) : weight.data(), tokens));
          if (w.staging > 0 && tokens > 30) expect_other_chunks(routing);
          moecclRoutingInfo_t info{};
          info.size = sizeof(info);
          MOECCL_ASSERT_OK(moecclRoutingGetInfo(routing, &info));
          const size_t rows = info.n_rows;
          const std::vector<char> in = rows_of(random, tokens * kHidden), expert_rows = rows_of(random, rows * kHidden);
          std::vector<char> want_rows(rows * kHidden * 2), want_tokens(tokens * kHidden * 2);
          DeviceBuffer d_in(device, in.size()), d_rows(device, want_rows.size()), d_experts(device, expert_rows.size()),
              d_tokens(device, want_tokens.size());
          d_in.put(in);
          d_experts.put(expert_rows);
          auto* s = reinterpret_cast<moecclStream_t>(step % 3 == 0 ? nullptr : stream);
          void* cs = step % 3 == 0 ? nullptr : stream;
          MOECCL_ASSERT_OK(moecclDispatch(routing, in.data(), want_rows.data(), nullptr));
          MOECCL_ASSERT_OK(moecclDispatch(routing, d_in.data(), d_rows.data(), s));
          EXPECT_EQ(d_rows.get(cs), want_rows) << "dispatch, step " << step;
          std::vector<char> scales(tokens * 20), want_scales(rows * 20), want_scaled(rows * kHidden);
          for (char& b : scales) b = static_cast<char>(random());
          DeviceBuffer d_scales(device, scales.size()), d_want_scales(device, want_scales.size()),
              d_want_scaled(device, want_scaled.size());
          d_scales.put(scales);
          MOECCL_ASSERT_OK(
              moecclDispatchScaled(routing, in.data(), scales.data(), want_scaled.data(), want_scales.data(), nullptr));
          MOECCL_ASSERT_OK(moecclDispatchScaled(routing, d_in.data(), d_scales.data(), d_want_scaled.data(),
                                                d_want_scales.data(), s));
          EXPECT_EQ(d_want_scaled.get(cs), want_scaled) << "rows of a scaled dispatch, step " << step;
          EXPECT_EQ(d_want_scales.get(cs), want_scales) << "scales, step " << step;
          MOECCL_ASSERT_OK(moecclCombine(routing, expert_rows.data(), want_tokens.data(), nullptr));
          MOECCL_ASSERT_OK(moecclCombine(routing, d_experts.data(), d_tokens.data(), s));
          EXPECT_EQ(d_tokens.get(cs), want_tokens) << "combine, step " << step;
          MOECCL_ASSERT_OK(moecclDispatchBackward(routing, expert_rows.data(), want_tokens.data(), nullptr));
          MOECCL_ASSERT_OK(moecclDispatchBackward(routing, d_experts.data(), d_tokens.data(), s));
          EXPECT_EQ(d_tokens.get(cs), want_tokens) << "dispatch backward, step " << step;
          MOECCL_ASSERT_OK(moecclCombineBackward(routing, in.data(), want_rows.data(), nullptr, nullptr, nullptr));
          MOECCL_ASSERT_OK(moecclCombineBackward(routing, d_in.data(), d_rows.data(), nullptr, nullptr, s));
          EXPECT_EQ(d_rows.get(cs), want_rows) << "combine backward, step " << step;
          if (w.layout == moecclLayoutExpertMajor) {
            std::vector<float> want_grad(tokens * kTopK + 1), got_grad(want_grad.size());
            DeviceBuffer d_grad(device, got_grad.size() * 4);
            MOECCL_ASSERT_OK(moecclCombineBackward(routing, in.data(), want_rows.data(), expert_rows.data(),
                                                   want_grad.data(), nullptr));
            MOECCL_ASSERT_OK(moecclCombineBackward(routing, d_in.data(), d_rows.data(), d_experts.data(),
                                                   static_cast<float*>(d_grad.data()), s));
            EXPECT_EQ(d_rows.get(cs), want_rows) << "combine backward with weights, step " << step;
            device.download(got_grad.data(), d_grad.data(), tokens * kTopK * 4);
            got_grad.back() = want_grad.back() = 0;
            EXPECT_EQ(got_grad, want_grad) << "gradient of weights, step " << step;
          }
          MOECCL_ASSERT_OK(moecclRoutingDestroy(routing));
        }
        MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        device.end_stream(stream);
      },
      options);
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, CudaMoe,
    ::testing::Values(MoeWorld{1, RankMode::kThreads, nullptr, moecclLayoutExpertMajor, false},
                      MoeWorld{4, RankMode::kThreads, "node:2 gpu:2", moecclLayoutExpertMajor, false},
                      MoeWorld{4, RankMode::kProcesses, "node:2 gpu:2", moecclLayoutRows, false},
                      MoeWorld{4, RankMode::kMixed, "node:2 gpu:2", moecclLayoutExpertMajor, true},
                      MoeWorld{2, RankMode::kProcesses, nullptr, moecclLayoutExpertMajor, true},
                      MoeWorld{4, RankMode::kThreads, "node:2 gpu:2", moecclLayoutRows, false, 64 << 10, "1M"},
                      MoeWorld{8, RankMode::kThreads, nullptr, moecclLayoutExpertMajor, false, 1 << 20, "64K"},
                      MoeWorld{4, RankMode::kThreads, nullptr, moecclLayoutRows, false, 0, "0", "flat:ordered"},
                      MoeWorld{3, RankMode::kProcesses, nullptr, moecclLayoutExpertMajor, true, 0, "0",
                               "flat:ordered"}),
    [](const ::testing::TestParamInfo<MoeWorld>& info) {
      return std::to_string(info.index) + "_" + std::to_string(info.param.n) + mode_name(info.param.mode);
    });

// One rank, so that no peer waits for a call that is refused.
RankOptions alone() {
  RankOptions options = device_options(RankMode::kThreads);
  options.config.topology = nullptr;
  return options;
}

constexpr size_t kAloneTokens = 8, kAloneWidth = 16, kAloneTopK = 2;

// A layer of one rank with a routing and buffers of rows and of tokens in either kind of memory.
struct Alone {
  Alone(moecclComm_t c, CudaDevice& device)
      : comm(c),
        d_tokens(device, kAloneTokens * kAloneWidth * 4),
        d_rows(device, kAloneTokens * kAloneTopK * kAloneWidth * 4),
        d_more_rows(device, kAloneTokens * (kAloneTopK + 1) * kAloneWidth * 4) {
    moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
    config.hidden_bytes = kAloneWidth * 4;
    config.type = moecclFloat32;
    config.top_k = kAloneTopK;
    config.n_experts = 4;
    config.max_tokens = kAloneTokens;
    config.layout = moecclLayoutExpertMajor;
    EXPECT_EQ(moecclMoeCreate(&moe, comm, &config), moecclSuccess) << moecclGetLastError(comm);
    std::vector<int32_t> index;
    for (size_t i = 0; i < kAloneTokens * kAloneTopK; ++i) index.push_back(static_cast<int32_t>(i % 4));
    weight.assign(index.size(), 0.5f);
    EXPECT_EQ(moecclRoutingCreate(&routing, moe, index.data(), weight.data(), kAloneTokens), moecclSuccess)
        << moecclGetLastError(comm);
    d_tokens.put(std::vector<char>(tokens.size() * 4));
    d_rows.put(std::vector<char>(rows.size() * 4));
    d_more_rows.put(std::vector<char>(more_rows.size() * 4));
  }
  ~Alone() {
    EXPECT_EQ(moecclRoutingDestroy(routing), moecclSuccess);
    EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
  }
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;
  // The call is refused, and the error names both arguments.
  void refused(moecclResult_t result, const char* one, const char* other) const {
    EXPECT_EQ(result, moecclInvalidArgument) << one << " and " << other;
    const std::string said = moecclGetLastError(comm);
    EXPECT_NE(said.find(std::string(one) + " is CUDA memory and " + other + " is ordinary host memory"),
              std::string::npos)
        << said;
  }
  moecclComm_t comm;
  DeviceBuffer d_tokens, d_rows, d_more_rows;
  std::vector<float> tokens = std::vector<float>(kAloneTokens * kAloneWidth),
                     rows = std::vector<float>(kAloneTokens * kAloneTopK * kAloneWidth),
                     more_rows = std::vector<float>(kAloneTokens * (kAloneTopK + 1) * kAloneWidth), weight;
  moecclMoe_t moe = nullptr;
  moecclRouting_t routing = nullptr;
};

TEST(CudaMoeKinds, TheInputOfGradientsOfWeightsIsOfTheKindOfTheGradients) {
  run_on_devices(1, alone(), [&](int, moecclComm_t comm, CudaDevice& device, void*) {
    Alone a(comm, device);
    std::vector<float> grad(a.weight.size() + 1);
    DeviceBuffer d_grad(device, grad.size() * 4);
    const auto backward = [&](const void* grad_out, void* grad_in, const void* in, void* weights) {
      return moecclCombineBackward(a.routing, grad_out, grad_in, in, static_cast<float*>(weights), nullptr);
    };
    a.refused(backward(a.d_tokens.data(), a.d_rows.data(), a.rows.data(), grad.data()), "grad_in", "in");
    a.refused(backward(a.tokens.data(), a.rows.data(), a.d_rows.data(), grad.data()), "in", "grad_in");
    // The gradient of the weights passes through the host, so it may be in either.
    for (void* weights : {static_cast<void*>(grad.data()), static_cast<void*>(d_grad.data())}) {
      MOECCL_EXPECT_COMM_OK(backward(a.d_tokens.data(), a.d_rows.data(), a.d_more_rows.data(), weights), comm);
      MOECCL_EXPECT_COMM_OK(backward(a.tokens.data(), a.rows.data(), a.more_rows.data(), weights), comm);
    }
    // Page-locked memory goes with both.
    void* locked = device.lock(a.rows.size() * 4);
    std::memset(locked, 0, a.rows.size() * 4);
    MOECCL_EXPECT_COMM_OK(backward(a.d_tokens.data(), locked, a.d_rows.data(), grad.data()), comm);
    MOECCL_EXPECT_COMM_OK(backward(a.d_tokens.data(), a.d_rows.data(), locked, grad.data()), comm);
    MOECCL_EXPECT_COMM_OK(backward(a.tokens.data(), locked, a.rows.data(), grad.data()), comm);
    all_have_ended(comm);
    device.end_lock(locked);
  });
}

TEST(CudaMoeKinds, ResidualsAndTheirBackwardTakeBuffersOfOneKind) {
  run_on_devices(1, alone(), [&](int, moecclComm_t comm, CudaDevice& device, void*) {
    Alone a(comm, device);
    for (const int residual : {1, 2}) {
      moecclReplaceConfig_t config = MOECCL_REPLACE_CONFIG_INIT;
      config.residual = residual;
      config.mode = moecclReplaceKeep;
      moecclReplacement_t replacement = nullptr;
      MOECCL_ASSERT_COMM_OK(moecclReplaceCreate(&replacement, a.moe, &config), comm);
      MOECCL_ASSERT_COMM_OK(moecclReplaceBegin(replacement, a.routing, nullptr, nullptr), comm);
      size_t n_rows = 0;
      MOECCL_ASSERT_COMM_OK(moecclReplaceRows(replacement, &n_rows), comm);
      ASSERT_LE(n_rows, kAloneTokens * (kAloneTopK + 1));
      void *x = a.tokens.data(), *d_x = a.d_tokens.data(), *rows = a.rows.data(), *d_rows = a.d_rows.data(),
           *in = a.more_rows.data(), *d_in = a.d_more_rows.data();
      // Residual 1 reads what was dispatched, and residual 2 the caller's rows.
      const char* const read = residual == 1 ? "dispatched" : "x";
      const auto fill = [&](void* tokens, void* dispatched, void* to) {
        return moecclReplaceResidual(replacement, tokens, dispatched, to);
      };
      MOECCL_EXPECT_COMM_OK(fill(x, rows, in), comm);
      MOECCL_EXPECT_COMM_OK(fill(d_x, d_rows, d_in), comm);
      a.refused(fill(d_x, d_rows, in), read, "in");
      a.refused(fill(x, rows, d_in), "in", read);
      const char* const added = residual == 1 ? "grad_dispatched" : "grad_x";
      const auto back = [&](const void* grad, void* dispatched, void* tokens) {
        return moecclReplaceResidualBackward(replacement, grad, dispatched, tokens);
      };
      MOECCL_EXPECT_COMM_OK(back(in, rows, x), comm);
      MOECCL_EXPECT_COMM_OK(back(d_in, d_rows, d_x), comm);
      a.refused(back(in, d_rows, d_x), added, "grad_in");
      a.refused(back(d_in, rows, x), "grad_in", added);
      MOECCL_ASSERT_COMM_OK(moecclReplaceCombine(replacement, d_in, d_x, nullptr), comm);
      std::vector<float> grad(a.weight.size());
      a.refused(moecclReplaceCombineBackward(replacement, d_x, d_in, in, grad.data(), nullptr), "grad_in", "in");
      MOECCL_EXPECT_OK(moecclReplaceDestroy(replacement));
    }
  });
}

// Rank 2 has no tokens and no experts, so it has no buffers either. Its stream says that it takes part on the device.
TEST(CudaMoeEmpty, ARankWithoutTokensAndRowsNeedsNoBuffers) {
  const Setting any_address("MOECCL_TEST_CUDA_ARGUMENTS", "0");  // kernels get the buffers that they do not use
  run_on_devices(3, device_options(RankMode::kThreads),
                 [](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
                   const std::vector<int32_t> owner = {0, 1};
                   moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
                   config.hidden_bytes = sizeof(float), config.type = moecclFloat32;
                   config.top_k = 1, config.n_experts = 2, config.max_tokens = 4;
                   config.expert_rank = owner.data();
                   config.layout = moecclLayoutExpertMajor;
                   moecclMoe_t moe = nullptr;
                   moecclRouting_t routing = nullptr;
                   MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
                   const size_t tokens = rank < 2 ? 3 : 0;
                   const std::vector<int32_t> index(tokens, 1 - rank);
                   DeviceBuffer in(device, 16), rows(device, 64), out(device, 16);
                   in.put(floats(4, 5));
                   int step = 0, on_host[4] = {};  // which nothing reads, whatever the memory of the others' buffers
                   const auto at = [&](const DeviceBuffer& b) -> void* {
                     return rank < 2 ? b.data() : step == 1 ? on_host : nullptr;
                   };
                   for (; step < 3; ++step) {
                     if (step == 0) {
                       MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, index.data(), nullptr, tokens), comm);
                     } else {
                       MOECCL_ASSERT_COMM_OK(moecclRoutingUpdate(routing, index.data(), nullptr, tokens), comm);
                     }
                     MOECCL_ASSERT_COMM_OK(moecclDispatch(routing, at(in), at(rows), as_stream(stream)), comm);
                     MOECCL_ASSERT_COMM_OK(moecclCombine(routing, at(rows), at(out), as_stream(stream)), comm);
                     MOECCL_ASSERT_COMM_OK(
                         moecclCombineBackward(routing, at(out), at(rows), nullptr, nullptr, as_stream(stream)), comm);
                     MOECCL_ASSERT_COMM_OK(moecclDispatchBackward(routing, at(rows), at(out), as_stream(stream)), comm);
                     if (rank < 2) {
                       std::vector<char> got = out.get(stream);
                       got.resize(12);
                       EXPECT_EQ(got, floats(3, 5));
                     }
                   }
                   const size_t bytes = rank < 2 ? 4 : 0;
                   const std::vector<size_t> to = {rank == 1 ? bytes : 0, rank == 0 ? bytes : 0, 0}, displs(3, 0);
                   step = 1;
                   MOECCL_ASSERT_COMM_OK(moecclAllToAllv(at(in), to.data(), displs.data(), at(out), to.data(),
                                                         displs.data(), moecclUint8, comm, as_stream(stream)),
                                         comm);
                   // Without a stream, pointers say it, although nothing is read there.
                   all_have_ended(comm);
                   MOECCL_ASSERT_COMM_OK(moecclAllToAllv(in.data(), to.data(), displs.data(), out.data(), to.data(),
                                                         displs.data(), moecclUint8, comm, nullptr),
                                         comm);
                   MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
                   MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
                   all_have_ended(comm);
                 });
}

// What a layer learns of its plans, and what the caller reads, is the time of the rows and not that of the experts that
// work on the same stream.
TEST(CudaMoeTimes, LeaveOutTheCallersKernels) {
  RankOptions options = device_options(RankMode::kThreads);
  options.config.topology = nullptr;
  run_on_devices(2, options, [&](int, moecclComm_t comm, CudaDevice& device, void* stream) {
    Alone a(comm, device);
    for (int step = 0; step < 2; ++step) {
      MOECCL_ASSERT_COMM_OK(moecclDispatch(a.routing, a.d_tokens.data(), a.d_rows.data(), as_stream(stream)), comm);
      device.keep_busy(stream);
      MOECCL_ASSERT_COMM_OK(moecclCombine(a.routing, a.d_rows.data(), a.d_tokens.data(), as_stream(stream)), comm);
      device.synchronize(stream);
    }
    all_have_ended(comm);
    moecclRoutingInfo_t info{};
    info.size = sizeof(info);
    MOECCL_ASSERT_COMM_OK(moecclRoutingGetInfo(a.routing, &info), comm);
    EXPECT_GT(info.measured_combine_us, 0);
    EXPECT_LT(info.measured_combine_us, 200'000);
  });
}

// Returns the part of a routing's page that has the prices of the candidates.
std::string prices_of(moecclRouting_t routing) {
  const std::string page = page_of(routing);
  const size_t from = page.find("candidates, priced");
  return page.substr(from, page.find("chosen:") - from);
}

TEST(CudaMoeProfile, HasTheConstantsOfTheEngineThatMovesTheRows) {
  for (const auto& [persistent, engine] : {std::pair("1", "persistent kernel"), {"0", "a launch for each step"}}) {
    const Setting kernel("MOECCL_CUDA_PERSISTENT", persistent);
    run_on_devices(2, device_options(RankMode::kThreads), [&](int, moecclComm_t comm, CudaDevice& device, void*) {
      const Alone a(comm, device);
      const std::string page = prices_of(a.routing);
      EXPECT_NE(page.find(std::string("from the constants of a GPU of the H100 class (") + engine + ")"),
                std::string::npos)
          << page;
      all_have_ended(comm);
    });
  }
}

TEST(CudaMoeProfile, IsFollowedByLayersThatWereMadeBefore) {
  const std::string path = ::testing::TempDir() + "moeccl_cuda_profile_" + std::to_string(getpid()) + ".json";
  std::ofstream(path) << R"({"moeccl_profile": 1, "levels": [
      {"name": "node", "alpha_ns": 900000, "bytes_per_ns": 0.01}, {"name": "gpu", "alpha_ns": 9000, "bytes_per_ns": 0.1}]})";
  RankOptions options = device_options(RankMode::kThreads);
  options.config.topology = "node:2(bw=9GB/s,lat=9us) gpu:1(bw=99GB/s,lat=1us)";
  run_on_devices(2, options, [&](int, moecclComm_t comm, CudaDevice& device, void*) {
    Alone before(comm, device);
    const std::string first = prices_of(before.routing);
    MOECCL_ASSERT_COMM_OK(moecclProfileLoad(comm, path.c_str()), comm);
    std::vector<int32_t> index;
    for (size_t i = 0; i < kAloneTokens * kAloneTopK; ++i) index.push_back(static_cast<int32_t>(i % 4));
    MOECCL_ASSERT_COMM_OK(moecclRoutingUpdate(before.routing, index.data(), before.weight.data(), kAloneTokens), comm);
    const Alone after(comm, device);
    EXPECT_NE(prices_of(before.routing), first);
    EXPECT_NE(prices_of(before.routing).find("links from the profile"), std::string::npos) << prices_of(before.routing);
    EXPECT_EQ(prices_of(before.routing), prices_of(after.routing));
    all_have_ended(comm);
  });
  std::remove(path.c_str());
}

// Tokens choose experts of all ranks in turn. A row sum names ranks by number, and a launch sums all rows of a chunk,
// however many ranks they come from. There is no persistent kernel for more than 64.
TEST(CudaMoeRanks, MoreThan64TakeOneLaunchForTheSums) {
  constexpr int kRanks = 66;
  constexpr size_t kTopK = 8, kTokens = 66, kHidden = 8;
  run_on_devices(
      kRanks, device_options(RankMode::kThreads), [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
        moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
        config.hidden_bytes = kHidden * sizeof(float), config.type = moecclFloat32;
        config.top_k = kTopK, config.n_experts = kRanks, config.max_tokens = kTokens;
        config.layout = moecclLayoutExpertMajor;
        config.algorithm = "flat";
        moecclMoe_t moe = nullptr;
        moecclRouting_t routing = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
        std::vector<int32_t> index;
        for (size_t i = 0; i < kTokens * kTopK; ++i)
          index.push_back(static_cast<int32_t>((i + static_cast<size_t>(rank)) % kRanks));
        MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, index.data(), nullptr, kTokens), comm);
        moecclRoutingInfo_t info{};
        info.size = sizeof(info);
        MOECCL_ASSERT_COMM_OK(moecclRoutingGetInfo(routing, &info), comm);
        DeviceBuffer in(device, kTokens * config.hidden_bytes), rows(device, info.n_rows * config.hidden_bytes);
        in.put(floats(kTokens * kHidden, static_cast<float>(rank + 1)));
        MOECCL_ASSERT_COMM_OK(moecclDispatch(routing, in.data(), rows.data(), as_stream(stream)), comm);
        device.synchronize(stream);
        all_have_ended(comm);
        const int before = device.emulated() ? device.launches() : 0;
        all_have_ended(comm);
        MOECCL_ASSERT_COMM_OK(moecclCombine(routing, rows.data(), in.data(), as_stream(stream)), comm);
        EXPECT_EQ(in.get(stream), floats(kTokens * kHidden, static_cast<float>(kTopK) * static_cast<float>(rank + 1)));
        all_have_ended(comm);
        if (rank == 0 && device.emulated()) {
          EXPECT_LE(device.launches() - before, kRanks * (kRanks - 1 + 1)) << "a copy to each other rank, and the sums";
        }
        MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
        MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
        all_have_ended(comm);
      });
}

}  // namespace
}  // namespace moeccl::testing
