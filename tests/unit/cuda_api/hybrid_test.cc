// SPDX-License-Identifier: Apache-2.0
// Gathered experts, the dispatch and combine of their layer, and the re-placing combine on CUDA memory give the bits of
// host memory.
#include <random>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

struct World {
  int n;
  RankMode mode;
  const char* topology;
  std::vector<int32_t> domain;
  int n_experts;
  bool ipc = true;
};
std::ostream& operator<<(std::ostream& out, const World& w) {
  return out << w.n << mode_name(w.mode) << (w.ipc ? "" : "_staged_in_host_memory");
}

template <class Body>
void on_devices(const World& w, Body&& body) {
  RankOptions options = device_options(w.mode);
  options.config.topology = w.topology;
  options.config.deterministic = 1;  // all plans give the same bits
  const Setting ipc("MOECCL_CUDA_IPC", w.ipc ? "1" : "0");
  run_on_devices(w.n, options, body);
}

std::vector<char> bfloats(std::mt19937_64& random, size_t n) {
  std::vector<char> bytes(n * 2);
  for (size_t i = 0; i < n; ++i) {
    const auto h = static_cast<uint16_t>(0x3f00 + random() % 0x180 + (random() % 2) * 0x8000);  // near 1
    std::memcpy(&bytes[i * 2], &h, 2);
  }
  return bytes;
}

struct Choices {
  Choices(std::mt19937_64& random, size_t tokens, size_t top_k, int n_experts)
      : index(tokens * top_k + 1), weight(tokens * top_k + 1) {
    for (size_t t = 0; t < tokens; ++t)
      for (size_t k = 0; k < top_k; ++k) {
        const bool none = random() % 9 == 0;
        index[t * top_k + k] = none ? -1 : static_cast<int32_t>((t * 3 + k) % static_cast<size_t>(n_experts));
        weight[t * top_k + k] = static_cast<float>(random() % 100) / 64.0f;
      }
  }
  std::vector<int32_t> index;
  std::vector<float> weight;
};

class CudaHybrid : public ::testing::TestWithParam<World> {};

TEST_P(CudaHybrid, ExpertsAreGatheredAndTokensComputedWhereTheyWentTo) {
  const World& w = GetParam();
  on_devices(w, [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
    config.n_experts = w.n_experts;
    config.n_levels = static_cast<int32_t>(w.domain.size());
    config.domain = w.domain.data();
    moecclHybrid_t hybrid = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
    moecclHybridInfo_t info{};
    info.size = sizeof(info);
    MOECCL_ASSERT_OK(moecclHybridGetInfo(hybrid, &info));
    std::mt19937_64 random(test_seed() * 13 + static_cast<uint64_t>(rank));
    auto* s = reinterpret_cast<moecclStream_t>(stream);
    for (const size_t bytes : {size_t{0}, size_t{1}, size_t{100'003}}) {
      set_note("experts of " + std::to_string(bytes) + " bytes");
      std::vector<char> own(static_cast<size_t>(info.n_own) * bytes + 1);  // never empty: it tells the kind of memory
      for (char& b : own) b = static_cast<char>(random());
      std::vector<char> want(static_cast<size_t>(info.n_held) * bytes + 1, 0x5a);
      DeviceBuffer d_own(device, own.size()), d_held(device, want.size());
      d_own.put(own);
      d_held.put(want);
      MOECCL_ASSERT_COMM_OK(moecclHybridGather(hybrid, own.data(), want.data(), bytes, nullptr), comm);
      MOECCL_ASSERT_COMM_OK(moecclHybridGather(hybrid, d_own.data(), d_held.data(), bytes, s), comm);
      EXPECT_EQ(d_held.get(stream), want);
    }
    for (const size_t count : {size_t{0}, size_t{1}, size_t{20'001}}) {
      set_note("gradients of " + std::to_string(count) + " elements");
      const std::vector<char> held = bfloats(random, static_cast<size_t>(info.n_held) * count + 1);
      std::vector<char> want(static_cast<size_t>(info.n_own) * count * 2 + 1, 0x5a);
      DeviceBuffer d_held(device, held.size()), d_own(device, want.size());
      d_held.put(held);
      d_own.put(want);
      MOECCL_ASSERT_COMM_OK(moecclHybridReduce(hybrid, held.data(), want.data(), count, moecclBfloat16, nullptr), comm);
      MOECCL_ASSERT_COMM_OK(moecclHybridReduce(hybrid, d_held.data(), d_own.data(), count, moecclBfloat16, s), comm);
      EXPECT_EQ(d_own.get(stream), want);
    }
    constexpr size_t kTopK = 2, kWidth = 24;
    moecclMoeConfig_t layer = MOECCL_MOE_CONFIG_INIT;
    layer.hidden_bytes = kWidth * 2;
    layer.type = moecclBfloat16;
    layer.top_k = kTopK;
    layer.max_tokens = 40;
    moecclMoe_t moe = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclHybridMoeCreate(&moe, hybrid, comm, &layer), comm);
    for (const size_t tokens : {size_t{0}, static_cast<size_t>(7 * rank), size_t{40}}) {
      const Choices c(random, tokens, kTopK, w.n_experts);
      moecclRouting_t routing = nullptr;
      MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, c.index.data(), c.weight.data(), tokens), comm);
      moecclRoutingInfo_t r{};
      r.size = sizeof(r);
      MOECCL_ASSERT_OK(moecclRoutingGetInfo(routing, &r));
      const std::vector<char> in = bfloats(random, tokens * kWidth + 1), y = bfloats(random, r.n_rows * kWidth + 1);
      std::vector<char> want_rows(y.size()), want_out(in.size());
      DeviceBuffer d_in(device, in.size()), d_rows(device, y.size()), d_y(device, y.size()), d_out(device, in.size());
      d_in.put(in);
      d_y.put(y);
      d_rows.put(want_rows);
      d_out.put(want_out);
      MOECCL_ASSERT_COMM_OK(moecclDispatch(routing, in.data(), want_rows.data(), nullptr), comm);
      MOECCL_ASSERT_COMM_OK(moecclCombine(routing, y.data(), want_out.data(), nullptr), comm);
      MOECCL_ASSERT_COMM_OK(moecclDispatch(routing, d_in.data(), d_rows.data(), s), comm);
      MOECCL_ASSERT_COMM_OK(moecclCombine(routing, d_y.data(), d_out.data(), s), comm);
      EXPECT_EQ(d_rows.get(stream), want_rows);
      EXPECT_EQ(d_out.get(stream), want_out);
      MOECCL_ASSERT_OK(moecclRoutingDestroy(routing));
    }
    MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
    MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, CudaHybrid,
                         ::testing::Values(World{1, RankMode::kThreads, nullptr, {1}, 3},
                                           World{4, RankMode::kThreads, "dc:2 gpu:2", {2, 1}, 8},
                                           World{4, RankMode::kProcesses, "dc:2 gpu:2", {2, 2}, 6},
                                           World{5, RankMode::kMixed, "dc:2 gpu:2+3", {1, 2}, 4},
                                           World{3, RankMode::kProcesses, nullptr, {3}, 5, false}));

class CudaMigration : public ::testing::TestWithParam<World> {};

// Two migrations of one communicator, one on host memory and one on CUDA memory, get the same data.
TEST_P(CudaMigration, WhatArrivesIsWhatTheHostsCodecMakes) {
  const World& w = GetParam();
  on_devices(w, [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
    config.n_experts = w.n_experts;
    config.n_levels = static_cast<int32_t>(w.domain.size());
    config.domain = w.domain.data();
    moecclHybrid_t hybrid = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
    moecclHybridInfo_t info{};
    info.size = sizeof(info);
    MOECCL_ASSERT_OK(moecclHybridGetInfo(hybrid, &info));
    std::mt19937_64 common(test_seed() * 19), own_random(test_seed() * 23 + static_cast<uint64_t>(rank));
    struct Kind {
      moecclDataType_t type;
      double ratio;
      size_t count;
    };
    for (const Kind k : {Kind{moecclFloat32, 50, 65'603}, Kind{moecclBfloat16, 4, 1001}, Kind{moecclFloat32, 50, 5},
                         Kind{moecclBfloat16, 1, 77}, Kind{moecclFloat32, 1, 0}}) {
      const size_t size = moecclTypeSize(k.type), whole = k.count * size;
      moecclMigrationConfig_t migrate = MOECCL_MIGRATION_CONFIG_INIT;
      migrate.count = k.count;
      migrate.type = k.type;
      migrate.ratio = k.ratio;
      moecclMigration_t on_host = nullptr, on_device = nullptr;
      MOECCL_ASSERT_COMM_OK(moecclMigrationCreate(&on_host, hybrid, nullptr, &migrate), comm);
      MOECCL_ASSERT_COMM_OK(moecclMigrationCreate(&on_device, hybrid, nullptr, &migrate), comm);
      const auto numbers = [&](std::mt19937_64& random, size_t n) {
        if (k.type == moecclBfloat16) return bfloats(random, n);
        std::vector<char> bytes(n * 4);
        for (size_t i = 0; i < n; ++i) {
          const float f = static_cast<float>(static_cast<int64_t>(random() % 4000) - 2000) / 128.0f;
          std::memcpy(&bytes[i * 4], &f, 4);
        }
        return bytes;
      };
      for (int step = 0; step < 2; ++step) {
        set_note("ratio " + std::to_string(k.ratio) + ", step " + std::to_string(step));
        std::vector<char> shared = numbers(common, k.count + 1);
        const std::vector<char> own = numbers(own_random, static_cast<size_t>(info.n_own) * k.count + 1);
        std::vector<char> want(static_cast<size_t>(info.n_held) * whole + 1, 0x5a);
        DeviceBuffer d_shared(device, shared.size()), d_own(device, own.size()), d_held(device, want.size());
        d_shared.put(shared);
        d_own.put(own);
        d_held.put(want);
        const auto n_own = static_cast<size_t>(info.n_own);
        std::vector<moecclCodecError_t> lost(n_own + 1), d_lost(n_own + 1);
        MOECCL_ASSERT_COMM_OK(moecclMigrationSend(on_host, 0, own.data(), shared.data(), lost.data()), comm);
        MOECCL_ASSERT_COMM_OK(moecclMigrationSend(on_device, 0, d_own.data(), d_shared.data(), d_lost.data()), comm);
        for (size_t e = 0; e < n_own; ++e) {
          EXPECT_EQ(d_lost[e].max_dropped, lost[e].max_dropped);
          EXPECT_NEAR(d_lost[e].relative, lost[e].relative, 1e-5);
        }
        MOECCL_ASSERT_COMM_OK(moecclMigrationBegin(on_host, 0), comm);
        MOECCL_ASSERT_COMM_OK(moecclMigrationBegin(on_device, 0), comm);
        uint64_t epoch = 0;
        MOECCL_ASSERT_COMM_OK(moecclMigrationWait(on_host, 0, shared.data(), want.data(), nullptr), comm);
        if (info.n_held > 0 && whole > 0) {
          std::vector<char> host(want.size());
          EXPECT_EQ(moecclMigrationWait(on_device, 0, d_shared.data(), host.data(), &epoch), moecclInvalidArgument);
        }
        MOECCL_ASSERT_COMM_OK(moecclMigrationWait(on_device, 0, d_shared.data(), d_held.data(), &epoch), comm);
        EXPECT_EQ(epoch, static_cast<uint64_t>(step + 1));
        EXPECT_EQ(d_held.get(stream), want);
      }
      // The last rank has another shared expert, so no rank switches, and held experts stay.
      if (k.ratio > 1 && w.n > 1) {
        std::vector<char> shared = numbers(common, k.count + 1);
        const std::vector<char> own = numbers(own_random, static_cast<size_t>(info.n_own) * k.count + 1);
        if (rank == w.n - 1) shared[0] ^= 1;
        const std::vector<char> before(static_cast<size_t>(info.n_held) * whole + 1, 0x77);
        DeviceBuffer d_shared(device, shared.size()), d_own(device, own.size()), d_held(device, before.size());
        d_shared.put(shared);
        d_own.put(own);
        d_held.put(before);
        MOECCL_ASSERT_COMM_OK(moecclMigrationSend(on_device, 0, d_own.data(), d_shared.data(), nullptr), comm);
        MOECCL_ASSERT_COMM_OK(moecclMigrationBegin(on_device, 0), comm);
        EXPECT_EQ(moecclMigrationWait(on_device, 0, d_shared.data(), d_held.data(), nullptr), moecclMismatch);
        EXPECT_EQ(d_held.get(), before);
      }
      MOECCL_EXPECT_OK(moecclMigrationDestroy(on_host));
      MOECCL_EXPECT_OK(moecclMigrationDestroy(on_device));
    }
    MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, CudaMigration,
                         ::testing::Values(World{1, RankMode::kThreads, nullptr, {1}, 2},
                                           World{4, RankMode::kThreads, "dc:2 gpu:2", {2, 1}, 6},
                                           World{4, RankMode::kProcesses, "dc:2 gpu:2", {2, 2}, 3},
                                           World{3, RankMode::kMixed, nullptr, {2}, 5}));

// The rank without experts has nothing to decode, so its device's next zeros are those of the shared expert's checksum.
TEST(CudaMigrationFailure, NoRankSwitchesIfOneCannotReadItsSharedExpert) {
  on_devices({2, RankMode::kProcesses, nullptr, {1}, 1}, [&](int rank, moecclComm_t comm, CudaDevice& device, void*) {
    if (!device.emulated()) return;
    moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
    const int32_t alone = 1;
    config.n_experts = 1;
    config.n_levels = 1;
    config.domain = &alone;
    moecclHybrid_t hybrid = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
    moecclMigrationConfig_t migrate = MOECCL_MIGRATION_CONFIG_INIT;
    migrate.count = 1000;
    moecclComm_t own = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, 0, rank, &own, nullptr), comm);
    moecclMigration_t migration = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclMigrationCreate(&migration, hybrid, own, &migrate), own);
    DeviceBuffer shared(device, 4000), expert(device, 4000), held(device, 4000);
    for (DeviceBuffer* buffer : {&shared, &expert, &held}) buffer->put(std::vector<char>(4000));
    for (const bool fails : {false, true}) {
      MOECCL_ASSERT_COMM_OK(moecclMigrationSend(migration, 0, expert.data(), shared.data(), nullptr), own);
      if (fails && rank == 1) device.refuse("cuMemsetD8Async", 1);
      MOECCL_ASSERT_COMM_OK(moecclMigrationBeginInto(migration, 0, shared.data(), held.data()), own);
      const moecclResult_t waited = moecclMigrationWait(migration, 0, nullptr, nullptr, nullptr);
      if (!fails) {
        MOECCL_ASSERT_COMM_OK(waited, own);
      }
      if (fails && rank == 0) {
        EXPECT_EQ(waited, moecclRemoteError);
        EXPECT_NE(std::string(moecclGetLastError(own)).find("rank 1 could not read"), std::string::npos)
            << moecclGetLastError(own);
      }
      if (fails && rank == 1) {
        EXPECT_NE(waited, moecclSuccess);
      }
    }
    moecclMigrationInfo_t info{};
    info.size = sizeof(info);
    MOECCL_ASSERT_OK(moecclMigrationGetInfo(migration, 0, &info));
    EXPECT_EQ(info.epoch, 1u);
    MOECCL_EXPECT_OK(moecclCommDestroy(own));
    MOECCL_EXPECT_OK(moecclMigrationDestroy(migration));  // allowed after its communicator
    MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
  });
}

// The library decodes behind the gather's turn, with the kernels of the communicator's device. Without the wait the
// communicator's own frees would mostly wait for the device; migration_conformance_test shows it on host memory.
TEST(CudaMigrationInto, CommDestroyWaitsUntilTheExpertsAreThere) {
  constexpr int kExperts = 64;
  on_devices({2, RankMode::kThreads, nullptr, {2}, kExperts}, [&](int rank, moecclComm_t comm, CudaDevice& device,
                                                                  void* stream) {
    moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
    const int32_t both = 2;
    config.n_experts = kExperts;
    config.n_levels = 1;
    config.domain = &both;
    moecclHybrid_t hybrid = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
    moecclMigrationConfig_t migrate = MOECCL_MIGRATION_CONFIG_INIT;
    migrate.count = 5000;
    const size_t bytes = migrate.count * 4;
    moecclComm_t own = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, 0, rank, &own, nullptr), comm);
    moecclMigration_t migration = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclMigrationCreate(&migration, hybrid, own, &migrate), own);
    DeviceBuffer shared(device, bytes), experts(device, kExperts / 2 * bytes), held(device, kExperts * bytes);
    shared.put(floats(migrate.count, 1));
    experts.put(floats(kExperts / 2 * migrate.count, 1));
    held.put(floats(kExperts * migrate.count, -77));
    MOECCL_ASSERT_COMM_OK(moecclMigrationSend(migration, 0, experts.data(), shared.data(), nullptr), own);
    MOECCL_ASSERT_COMM_OK(moecclMigrationBeginInto(migration, 0, shared.data(), held.data()), own);
    MOECCL_EXPECT_OK(moecclCommDestroy(own));
    EXPECT_EQ(held.get(stream), floats(kExperts * migrate.count, 1));
    MOECCL_EXPECT_OK(moecclMigrationDestroy(migration));
    MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
  });
}

struct ReplaceWorld {
  int n;
  RankMode mode;
  const char* topology;
  moecclMoeLayout_t layout;
  std::vector<size_t> samples;  // of each rank
  bool routed_on_device;
};
std::ostream& operator<<(std::ostream& out, const ReplaceWorld& w) { return out << w.n << mode_name(w.mode); }

class CudaReplace : public ::testing::TestWithParam<ReplaceWorld> {};

TEST_P(CudaReplace, TokensAndGradientsAtNewHomesHaveTheBitsOfHostMemory) {
  const ReplaceWorld& w = GetParam();
  on_devices({w.n, w.mode, w.topology, {}, 0}, [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    constexpr size_t kTopK = 2, kWidth = 20, kSample = 3;
    constexpr int kExperts = 8;
    const bool major = w.layout == moecclLayoutExpertMajor;
    const size_t tokens = w.samples[static_cast<size_t>(rank)] * kSample;
    moecclMoeConfig_t layer = MOECCL_MOE_CONFIG_INIT;
    layer.hidden_bytes = kWidth * 2;
    layer.type = moecclBfloat16;
    layer.top_k = kTopK;
    layer.n_experts = kExperts;
    layer.max_tokens = 64;
    layer.layout = w.layout;
    moecclMoe_t moe = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &layer), comm);
    moecclReplaceConfig_t config = MOECCL_REPLACE_CONFIG_INIT;
    config.sample_tokens = kSample;
    config.residual = 1;
    moecclReplacement_t replacement = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclReplaceCreate(&replacement, moe, &config), comm);
    std::mt19937_64 random(test_seed() * 17 + static_cast<uint64_t>(rank));
    auto* s = reinterpret_cast<moecclStream_t>(stream);
    for (int step = 0; step < 3; ++step) {
      set_note("step " + std::to_string(step));
      Choices c(random, tokens, kTopK, kExperts);
      // Samples prefer experts far from home, so that some move.
      for (size_t i = 0; i < tokens * kTopK; ++i)
        if (c.index[i] >= 0)
          c.index[i] = static_cast<int32_t>((i / kTopK / kSample + static_cast<size_t>(rank + step) + (i % kTopK) * 2) %
                                            kExperts);
      DeviceBuffer d_index(device, c.index.size() * 4), d_weight(device, c.weight.size() * 4);
      device.upload(d_index.data(), c.index.data(), c.index.size() * 4);
      device.upload(d_weight.data(), c.weight.data(), c.weight.size() * 4);
      moecclRouting_t routing = nullptr;
      MOECCL_ASSERT_COMM_OK(
          moecclRoutingCreate(
              &routing, moe, w.routed_on_device ? static_cast<const int32_t*>(d_index.data()) : c.index.data(),
              w.routed_on_device ? static_cast<const float*>(d_weight.data()) : c.weight.data(), tokens),
          comm);
      MOECCL_ASSERT_COMM_OK(moecclReplaceBegin(replacement, routing, nullptr, nullptr), comm);
      moecclRoutingInfo_t r{};
      r.size = sizeof(r);
      MOECCL_ASSERT_OK(moecclRoutingGetInfo(routing, &r));
      size_t n_rows = 0;
      MOECCL_ASSERT_COMM_OK(moecclReplaceRows(replacement, &n_rows), comm);
      const std::vector<char> x = bfloats(random, tokens * kWidth + 1), grad = bfloats(random, tokens * kWidth + 1);
      std::vector<char> rows(r.n_rows * kWidth * 2 + 1), y = bfloats(random, n_rows * kWidth + 1), out(x.size());
      std::vector<char> grad_y(y.size()), grad_rows = bfloats(random, r.n_rows * kWidth + 1),
                                          grad_x = bfloats(random, tokens * kWidth + 1);
      DeviceBuffer d_x(device, x.size()), d_rows(device, rows.size()), d_y(device, y.size()), d_out(device, out.size()),
          d_grad(device, grad.size()), d_grad_y(device, grad_y.size()), d_grad_rows(device, grad_rows.size()),
          d_grad_x(device, grad_x.size()), d_gates(device, (tokens * kTopK + 1) * 4);
      d_x.put(x);
      d_out.put(out);
      d_rows.put(rows);
      d_y.put(y);
      d_grad.put(grad);
      d_grad_y.put(grad_y);
      d_grad_rows.put(grad_rows);
      d_grad_x.put(grad_x);
      MOECCL_ASSERT_COMM_OK(moecclDispatch(routing, x.data(), rows.data(), nullptr), comm);
      MOECCL_ASSERT_COMM_OK(moecclReplaceResidual(replacement, x.data(), rows.data(), y.data()), comm);
      MOECCL_ASSERT_COMM_OK(moecclReplaceCombine(replacement, y.data(), out.data(), nullptr), comm);
      MOECCL_ASSERT_COMM_OK(moecclDispatch(routing, d_x.data(), d_rows.data(), nullptr), comm);
      MOECCL_ASSERT_COMM_OK(moecclReplaceResidual(replacement, d_x.data(), d_rows.data(), d_y.data()), comm);
      MOECCL_ASSERT_COMM_OK(moecclReplaceCombine(replacement, d_y.data(), d_out.data(), s), comm);
      EXPECT_EQ(d_y.get(stream), y) << "combine's input with the residual's rows";
      EXPECT_EQ(d_out.get(stream), out) << "tokens at their new homes";
      std::vector<float> gates(tokens * kTopK + 1), got_gates(gates.size());
      MOECCL_ASSERT_COMM_OK(
          moecclReplaceCombineBackward(replacement, grad.data(), grad_y.data(), major ? y.data() : nullptr,
                                       major ? gates.data() : nullptr, nullptr),
          comm);
      MOECCL_ASSERT_COMM_OK(moecclReplaceResidualBackward(replacement, grad_y.data(), grad_rows.data(), grad_x.data()),
                            comm);
      MOECCL_ASSERT_COMM_OK(
          moecclReplaceCombineBackward(replacement, d_grad.data(), d_grad_y.data(), major ? d_y.data() : nullptr,
                                       major ? static_cast<float*>(d_gates.data()) : nullptr, s),
          comm);
      device.synchronize(stream);
      MOECCL_ASSERT_COMM_OK(
          moecclReplaceResidualBackward(replacement, d_grad_y.data(), d_grad_rows.data(), d_grad_x.data()), comm);
      EXPECT_EQ(d_grad_y.get(stream), grad_y) << "gradient of combine's input";
      EXPECT_EQ(d_grad_rows.get(), grad_rows) << "with the residual's gradient";
      EXPECT_EQ(d_grad_x.get(), grad_x);
      if (major) {
        device.download(got_gates.data(), d_gates.data(), tokens * kTopK * 4);
        EXPECT_EQ(got_gates, gates) << "gradient of the gates";
      }
      MOECCL_ASSERT_OK(moecclRoutingDestroy(routing));
    }
    MOECCL_EXPECT_OK(moecclReplaceDestroy(replacement));
    MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, CudaReplace,
    ::testing::Values(ReplaceWorld{4, RankMode::kThreads, "node:2 gpu:2", moecclLayoutExpertMajor, {4, 4, 4, 4}, false},
                      ReplaceWorld{4, RankMode::kProcesses, "node:2 gpu:2", moecclLayoutRows, {3, 0, 5, 2}, true},
                      ReplaceWorld{3, RankMode::kMixed, nullptr, moecclLayoutExpertMajor, {0, 0, 4}, true}));

// Experts of a communicator with CUDA are on the device, whose codec is an H200's until something else is given.
TEST(CudaHybridChoice, TheCodecIsTheDevices) {
  on_devices({2, RankMode::kThreads, "", {}, 2}, [](int, moecclComm_t comm, CudaDevice&, void*) {
    moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
    const int32_t domain[] = {2};
    config.n_experts = 2, config.domain = domain, config.n_levels = 1;
    config.data_bytes = 1e6, config.expert_bytes = 26e6, config.top_k = 1, config.compression = 50;
    moecclHybrid_t hybrid = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
    moecclHybridInfo_t info{};
    info.size = sizeof(info);
    MOECCL_EXPECT_OK(moecclHybridGetInfo(hybrid, &info));
    EXPECT_NEAR(info.codec_us, 26e6 / 26e3 + 2 * 26e6 / 264e3, 1);
    MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
  });
}

}  // namespace
}  // namespace moeccl::testing
