// SPDX-License-Identifier: Apache-2.0
// Migration of experts through the C interface: experts arrive as they were sent (exactly, or as the codec says), an
// epoch is switched on all ranks or on none, and misuse gives a sentence.
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/conformance/migrating_experts.h"

namespace moeccl::testing {
namespace {

constexpr RankMode kT = RankMode::kThreads, kP = RankMode::kProcesses, kM = RankMode::kMixed;

using Shape = MigrationShape;

const Shape kShapes[] = {
    {"OneRank", 1, kT, "", {1}, 2, 1, 2, 100, 1},
    {"ExactTwoRanks", 2, kP, "gpu:2", {2}, 4, 2, 3, 1001, 1},
    {"ExactNoElements", 3, kT, "", {3}, 4, 1, 2, 0, 1},
    {"FiftyTimes", 4, kP, "dc:2 gpu:2", {2, 1}, 8, 3, 3, 70'001, 50},
    {"FiftyTimesSmall", 4, kP, "dc:2 gpu:2", {2, 1}, 8, 2, 3, 7001, 50},  // for tools/rdma-vm
    {"FiftyTimesUneven", 7, kM, "dc:2 gpu:4+3", {2, 2}, 9, 2, 4, 4096, 50},
    {"EightTimesPaced", 8, kT, "dc:2(bw=4GB/s,lat=20us) gpu:4", {2, 4}, 8, 2, 2, 20'000, 8, true},
    {"SixteenRanks", 16, kT, "dc:4 gpu:4", {4, 1}, 16, 1, 2, 513, 4},
};

class MigrationConformance : public ::testing::TestWithParam<Shape> {};

TEST_P(MigrationConformance, EveryRankSwitchesToWhatWasSent) {
  const Shape& shape = GetParam();
  RankOptions options{.mode = shape.mode};
  options.config.topology = *shape.topology != '\0' ? shape.topology : nullptr;
  options.config.pace = shape.pace;
  run_ranks(
      shape.n,
      [&](int, moecclComm_t comm) {
        Moving s(shape, comm);
        if (::testing::Test::HasFailure()) return;
        moecclStream_t stream = nullptr;
        MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
        for (int step = 0; step < shape.steps; ++step) {
          // The shared expert of each layer comes from an AllReduce that runs beside other work.
          std::vector<std::vector<float>> shared(static_cast<size_t>(shape.layers)), own = shared;
          for (int l = 0; l < shape.layers; ++l) {
            const auto at = static_cast<size_t>(l);
            own[at] = s.own(l, step);
            shared[at].resize(shape.count + 1);
            MOECCL_ASSERT_COMM_OK(moecclSharedExpert(own[at].data(), static_cast<size_t>(s.info.n_own),
                                                     static_cast<size_t>(shape.n_experts), shared[at].data(),
                                                     shape.count, moecclFloat32, comm, stream),
                                  comm);
          }
          MOECCL_ASSERT_OK(moecclStreamSynchronize(stream));
          for (int l = 0; l < shape.layers; ++l) {
            const auto at = static_cast<size_t>(l);
            std::vector<moecclCodecError_t> lost(static_cast<size_t>(s.info.n_own) + 1);
            // In every third step, the optimizer's step and the computation are fused in.
            if (step % 3 == 2) {
              OptimizerStep fused{std::vector<float>(own[at].size()), own[at], shape.count};
              MOECCL_ASSERT_COMM_OK(moecclMigrationSendFused(s.migration, l, fused.experts.data(), shared[at].data(),
                                                             OptimizerStep::update, &fused, lost.data()),
                                    comm);
              EXPECT_EQ(fused.experts, own[at]);
            } else {
              MOECCL_ASSERT_COMM_OK(moecclMigrationSend(s.migration, l, own[at].data(), shared[at].data(), lost.data()),
                                    comm);
            }
            for (int32_t e = 0; e < s.info.n_own; ++e)
              EXPECT_EQ(lost[static_cast<size_t>(e)].relative > 0 || shape.ratio > 1, shape.ratio > 1);
          }
          // In every other step the library decodes while the gather runs.
          const bool into = step % 2 == 1;
          std::vector<std::vector<float>> all_held(
              static_cast<size_t>(shape.layers),
              std::vector<float>(static_cast<size_t>(s.info.n_held) * shape.count + 1, -77));
          for (int l = 0; l < shape.layers; ++l) {
            const auto at = static_cast<size_t>(l);
            const moecclResult_t begun =
                into ? moecclMigrationBeginInto(s.migration, l, shared[at].data(), all_held[at].data())
                     : moecclMigrationBegin(s.migration, l);
            MOECCL_ASSERT_COMM_OK(begun, comm);
          }
          for (int l = 0; l < shape.layers; ++l) {
            std::vector<float>& held = all_held[static_cast<size_t>(l)];
            for (int32_t h = 0; into && h < s.info.n_held; ++h) {
              MOECCL_ASSERT_COMM_OK(moecclMigrationWaitExpert(s.migration, l, h), comm);
              if (shape.count == 0) continue;
              EXPECT_NE(held[static_cast<size_t>(h + 1) * shape.count - 1], -77) << "expert " << h;
            }
            uint64_t epoch = 0;
            const float* base = shared[static_cast<size_t>(l)].data();
            if (step % 3 == 2) {
              MOECCL_ASSERT_COMM_OK(moecclMigrationWaitEncoded(s.migration, l, base, &epoch), comm);
              use_all(s, l, held);
              use_all(s, l, held);  // forward and backward
            } else {
              MOECCL_ASSERT_COMM_OK(moecclMigrationWait(s.migration, l, base, into ? nullptr : held.data(), &epoch),
                                    comm);
            }
            EXPECT_EQ(epoch, static_cast<uint64_t>(step) + 1);
            EXPECT_EQ(held.back(), -77) << "written beyond the experts";
            check_arrivals(s, l, step, shared[static_cast<size_t>(l)], held);
          }
          if (::testing::Test::HasFailure()) return;
        }
        MOECCL_EXPECT_OK(moecclStreamDestroy(stream));
      },
      options);
}

INSTANTIATE_TEST_SUITE_P(Shapes, MigrationConformance, ::testing::ValuesIn(kShapes),
                         [](const auto& info) { return std::string(info.param.name); });

const Shape kFour = {"", 4, kP, "", {4}, 4, 2, 1, 30'000, 50};

// Experts are 50 times smaller on the wire, and otherwise only the ranks' agreement is sent.
TEST(MigrationWire, BytesAreAsComputed) {
  run_ranks(4,
            [](int, moecclComm_t comm) {
              Moving s(kFour, comm);
              moecclMigrationInfo_t info{};
              info.size = sizeof(info);
              MOECCL_ASSERT_COMM_OK(moecclMigrationGetInfo(s.migration, 0, &info), comm);
              EXPECT_EQ(info.sent_bytes, 3 * info.expert_bytes);
              EXPECT_LE(info.expert_bytes, kFour.count * sizeof(float) / 50 + 32);
              const std::vector<float> own = s.own(0, 0), shared(kFour.count, 1.0f);
              std::vector<float> held(static_cast<size_t>(s.info.n_held) * kFour.count);
              const uint64_t before = sent_bytes(kFour, comm);
              MOECCL_ASSERT_COMM_OK(moecclMigrationSend(s.migration, 0, own.data(), shared.data(), nullptr), comm);
              MOECCL_ASSERT_COMM_OK(moecclMigrationBegin(s.migration, 0), comm);
              MOECCL_ASSERT_COMM_OK(moecclMigrationWait(s.migration, 0, shared.data(), held.data(), nullptr), comm);
              const uint64_t sent = sent_bytes(kFour, comm) - before;
              EXPECT_GE(sent, info.sent_bytes);
              EXPECT_LE(sent, info.sent_bytes + 4096);  // the ranks' words of the agreement
            },
            {.mode = kP});
}

TEST(MigrationEpoch, NoRankSwitchesWhenOneDiffers) {
  run_ranks(4,
            [](int rank, moecclComm_t comm) {
              Moving s(kFour, comm);
              const std::vector<float> own = s.own(0, 0), right(kFour.count, 1.0f), wrong(kFour.count, 2.0f);
              std::vector<float> held(static_cast<size_t>(s.info.n_held) * kFour.count, -5);
              const std::vector<float>& shared = rank == 2 ? wrong : right;
              MOECCL_ASSERT_COMM_OK(moecclMigrationSend(s.migration, 0, own.data(), shared.data(), nullptr), comm);
              MOECCL_ASSERT_COMM_OK(moecclMigrationBegin(s.migration, 0), comm);
              uint64_t epoch = 9;
              EXPECT_EQ(moecclMigrationWait(s.migration, 0, shared.data(), held.data(), &epoch), moecclMismatch);
              EXPECT_NE(std::string(moecclGetLastError(comm)).find("rank 2"), std::string::npos)
                  << moecclGetLastError(comm);
              EXPECT_EQ(epoch, 9u);
              EXPECT_EQ(held.front(), -5);
              moecclMigrationInfo_t info{};
              info.size = sizeof(info);
              MOECCL_ASSERT_COMM_OK(moecclMigrationGetInfo(s.migration, 0, &info), comm);
              EXPECT_EQ(info.epoch, 0u);
              // One rank has the layers in another order, which all ranks notice.
              for (const int l : {0, 1})
                MOECCL_ASSERT_COMM_OK(moecclMigrationSend(s.migration, l, own.data(), right.data(), nullptr), comm);
              const int first = rank == 1 ? 1 : 0;
              MOECCL_ASSERT_COMM_OK(moecclMigrationBegin(s.migration, first), comm);
              EXPECT_EQ(moecclMigrationWait(s.migration, first, right.data(), held.data(), &epoch), moecclMismatch);
              EXPECT_NE(std::string(moecclGetLastError(comm)).find("same order"), std::string::npos)
                  << moecclGetLastError(comm);
              EXPECT_EQ(held.front(), -5);
            },
            {.mode = kP});
}

// A shared expert that changes on one rank before its experts are decoded keeps all ranks from switching.
TEST(MigrationEpoch, NoRankSwitchesWhenASharedExpertChanged) {
  run_ranks(4,
            [](int rank, moecclComm_t comm) {
              Moving s(kFour, comm);
              const std::vector<float> own = s.own(0, 0);
              std::vector<float> shared(kFour.count, 1.0f), held(static_cast<size_t>(s.info.n_held) * kFour.count, -5);
              MOECCL_ASSERT_COMM_OK(moecclMigrationSend(s.migration, 0, own.data(), shared.data(), nullptr), comm);
              if (rank == 3) shared[7] = 5;
              MOECCL_ASSERT_COMM_OK(moecclMigrationBeginInto(s.migration, 0, shared.data(), held.data()), comm);
              EXPECT_EQ(moecclMigrationWaitExpert(s.migration, 0, 0), moecclInvalidUsage);
              EXPECT_EQ(moecclMigrationWait(s.migration, 0, nullptr, nullptr, nullptr), moecclInvalidUsage);
              EXPECT_NE(std::string(moecclGetLastError(comm)).find("rank 3"), std::string::npos)
                  << moecclGetLastError(comm);
              EXPECT_EQ(held.front(), -5);
              EXPECT_EQ(held.back(), -5);
            },
            {.mode = kP});
}

// A step that fails queues nothing. Experts that are kept encoded stay until the layer switches again.
TEST(MigrationFused, NothingIsQueuedBehindAFailedStepAndExpertsStayUntilTheNextSwitch) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    const Shape two = {"", 2, kT, "", {2}, 4, 2, 1, 70'001, 50};
    Moving s(two, comm);
    const std::vector<float> shared(two.count, 1.0f);
    const auto says = [&](const char* text) {
      return std::string(moecclGetLastError(comm)).find(text) != std::string::npos;
    };
    const auto queued = [&] {
      moecclMigrationInfo_t info{};
      info.size = sizeof(info);
      EXPECT_EQ(moecclMigrationGetInfo(s.migration, 0, &info), moecclSuccess);
      return info;
    };
    const uint64_t bound = queued().memory_bytes;
    OptimizerStep step{std::vector<float>(2 * two.count), s.own(0, 0), two.count};
    const auto send = [&](moecclExpertUpdateFn_t update) {
      return moecclMigrationSendFused(s.migration, 0, step.experts.data(), shared.data(), update, &step, nullptr);
    };
    EXPECT_EQ(send(nullptr), moecclInvalidArgument);
    EXPECT_TRUE(says("update is NULL")) << moecclGetLastError(comm);
    step.stop_at = 2;  // the last block of the first expert
    EXPECT_EQ(send(OptimizerStep::update), moecclInvalidUsage);
    EXPECT_TRUE(says("update returned 5 for elements 65536 to 70000 of expert 0")) << moecclGetLastError(comm);
    EXPECT_TRUE(says("call moecclMigrationSend")) << moecclGetLastError(comm);
    EXPECT_EQ(queued().to_send, 0);
    EXPECT_EQ(step.experts[65535], step.values[65535]);
    EXPECT_EQ(step.experts[70000], 0);
    step.stop_at = SIZE_MAX;
    MOECCL_ASSERT_COMM_OK(send(OptimizerStep::update), comm);

    moecclExpertUse_t use = MOECCL_EXPERT_USE_INIT;
    std::vector<float> one(two.count), all(static_cast<size_t>(s.info.n_held) * two.count), held(all.size());
    use.use = write_down;
    use.context = one.data();
    EXPECT_EQ(moecclMigrationUseExpert(s.migration, 0, 0, &use), moecclInvalidUsage);
    EXPECT_TRUE(says("moecclMigrationWaitEncoded")) << moecclGetLastError(comm);
    EXPECT_EQ(moecclMigrationWaitEncoded(s.migration, 0, shared.data(), nullptr), moecclInvalidUsage);
    EXPECT_TRUE(says("nothing has begun")) << moecclGetLastError(comm);
    MOECCL_ASSERT_COMM_OK(moecclMigrationBegin(s.migration, 0), comm);
    EXPECT_EQ(moecclMigrationWaitEncoded(s.migration, 0, nullptr, nullptr), moecclInvalidArgument);
    EXPECT_EQ(moecclMigrationWaitEncoded(s.migration, 0, step.values.data(), nullptr), moecclInvalidUsage);
    MOECCL_ASSERT_COMM_OK(moecclMigrationWaitEncoded(s.migration, 0, shared.data(), nullptr), comm);
    EXPECT_EQ(queued().memory_bytes, bound + static_cast<uint64_t>(s.info.n_held) * queued().expert_bytes);
    use_all(s, 0, all);
    check_arrivals(s, 0, 0, shared, all);
    EXPECT_EQ(moecclMigrationUseExpert(s.migration, 0, s.info.n_held, &use), moecclInvalidArgument);
    EXPECT_TRUE(says("index is 4")) << moecclGetLastError(comm);

    // A switch that fails keeps them; one that succeeds replaces them.
    const std::vector<float> next = s.own(0, 1), wrong(two.count, rank == 1 ? 2.0f : 1.0f);
    MOECCL_ASSERT_COMM_OK(moecclMigrationSend(s.migration, 0, next.data(), wrong.data(), nullptr), comm);
    MOECCL_ASSERT_COMM_OK(moecclMigrationBegin(s.migration, 0), comm);
    EXPECT_EQ(moecclMigrationWaitEncoded(s.migration, 0, wrong.data(), nullptr), moecclMismatch);
    std::fill(all.begin(), all.end(), 0.0f);
    use_all(s, 0, all);
    check_arrivals(s, 0, 0, shared, all);
    MOECCL_ASSERT_COMM_OK(moecclMigrationSend(s.migration, 0, next.data(), shared.data(), nullptr), comm);
    MOECCL_ASSERT_COMM_OK(moecclMigrationBeginInto(s.migration, 0, shared.data(), held.data()), comm);
    EXPECT_EQ(moecclMigrationWaitEncoded(s.migration, 0, shared.data(), nullptr), moecclInvalidUsage);
    MOECCL_ASSERT_COMM_OK(moecclMigrationWait(s.migration, 0, nullptr, nullptr, nullptr), comm);
    EXPECT_EQ(moecclMigrationUseExpert(s.migration, 0, 0, &use), moecclInvalidUsage);
    EXPECT_EQ(queued().memory_bytes, bound);
  });
}

TEST(MigrationErrors, MisuseHasASentence) {
  run_ranks(1, [](int, moecclComm_t comm) {
    const Shape one = {"", 1, kT, "", {1}, 2, 1, 1, 64, 1};
    Moving s(one, comm);
    const std::vector<float> own = s.own(0, 0);
    std::vector<float> held(own.size());
    const auto says = [&](const char* text) {
      return std::string(moecclGetLastError(comm)).find(text) != std::string::npos;
    };
    EXPECT_EQ(moecclMigrationBegin(s.migration, 0), moecclInvalidUsage);
    EXPECT_TRUE(says("send queue of layer 0 is empty")) << moecclGetLastError(comm);
    EXPECT_EQ(moecclMigrationWait(s.migration, 0, nullptr, held.data(), nullptr), moecclInvalidUsage);
    EXPECT_TRUE(says("nothing has begun")) << moecclGetLastError(comm);
    EXPECT_EQ(moecclMigrationSend(s.migration, 1, own.data(), nullptr, nullptr), moecclInvalidArgument);
    EXPECT_TRUE(says("layer is 1")) << moecclGetLastError(comm);
    EXPECT_EQ(moecclMigrationSend(s.migration, 0, nullptr, nullptr, nullptr), moecclInvalidArgument);
    MOECCL_ASSERT_COMM_OK(moecclMigrationSend(s.migration, 0, own.data(), nullptr, nullptr), comm);
    MOECCL_ASSERT_COMM_OK(moecclMigrationSend(s.migration, 0, own.data(), nullptr, nullptr), comm);
    EXPECT_EQ(moecclMigrationSend(s.migration, 0, own.data(), nullptr, nullptr), moecclInvalidUsage);
    EXPECT_TRUE(says("which is its depth")) << moecclGetLastError(comm);
    MOECCL_ASSERT_COMM_OK(moecclMigrationBegin(s.migration, 0), comm);
    EXPECT_EQ(moecclMigrationWait(s.migration, 0, nullptr, nullptr, nullptr), moecclInvalidArgument);
    int done = 0;
    MOECCL_EXPECT_COMM_OK(moecclMigrationTest(s.migration, 0, &done), comm);
    MOECCL_EXPECT_COMM_OK(moecclMigrationWait(s.migration, 0, nullptr, held.data(), nullptr), comm);
    EXPECT_EQ(held, own);
    // Decoding during the gather.
    EXPECT_EQ(moecclMigrationWaitExpert(s.migration, 0, 0), moecclInvalidUsage);
    MOECCL_ASSERT_COMM_OK(moecclMigrationBegin(s.migration, 0), comm);
    EXPECT_EQ(moecclMigrationWaitExpert(s.migration, 0, 0), moecclInvalidUsage);
    EXPECT_TRUE(says("moecclMigrationBegin")) << moecclGetLastError(comm);
    MOECCL_EXPECT_COMM_OK(moecclMigrationWait(s.migration, 0, nullptr, held.data(), nullptr), comm);
    MOECCL_ASSERT_COMM_OK(moecclMigrationSend(s.migration, 0, own.data(), nullptr, nullptr), comm);
    EXPECT_EQ(moecclMigrationBeginInto(s.migration, 0, nullptr, nullptr), moecclInvalidArgument);
    MOECCL_ASSERT_COMM_OK(moecclMigrationBeginInto(s.migration, 0, nullptr, held.data()), comm);
    EXPECT_EQ(moecclMigrationWaitExpert(s.migration, 0, 2), moecclInvalidArgument);
    EXPECT_TRUE(says("index is 2")) << moecclGetLastError(comm);
    EXPECT_EQ(moecclMigrationWait(s.migration, 0, nullptr, &done, nullptr), moecclInvalidArgument);
    MOECCL_EXPECT_COMM_OK(moecclMigrationWait(s.migration, 0, nullptr, held.data(), nullptr), comm);
    EXPECT_EQ(held, own);
    MOECCL_ASSERT_COMM_OK(moecclMigrationSend(s.migration, 0, own.data(), nullptr, nullptr), comm);
    // A gather that has begun may be abandoned.
    MOECCL_ASSERT_COMM_OK(moecclMigrationBegin(s.migration, 0), comm);
    moecclMigrationConfig_t bad = MOECCL_MIGRATION_CONFIG_INIT;
    bad.count = 4;
    bad.ratio = 0.5;
    moecclMigration_t none = nullptr;
    EXPECT_EQ(moecclMigrationCreate(&none, s.hybrid, nullptr, &bad), moecclInvalidArgument);
    EXPECT_TRUE(says("config.ratio is 0.5")) << moecclGetLastError(comm);
  });
}

// The sentence belongs to the communicator that the call was given.
TEST(MigrationErrors, AnotherCommunicatorKeepsItsSentence) {
  run_ranks(1, [](int, moecclComm_t comm) {
    const Shape one = {"", 1, kT, "", {1}, 2, 1, 1, 64, 1};
    Moving s(one, comm);
    moecclComm_t other = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, 0, 0, &other, nullptr), comm);
    moecclMigrationConfig_t bad = MOECCL_MIGRATION_CONFIG_INIT;
    bad.count = 4, bad.depth = -1;
    moecclMigration_t none = nullptr;
    EXPECT_EQ(moecclMigrationCreate(&none, s.hybrid, other, &bad), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(other)).find("config.depth is -1"), std::string::npos)
        << moecclGetLastError(other);
    MOECCL_EXPECT_OK(moecclCommDestroy(other));
  });
}

TEST(MigrationErrors, AGroupRefusesWaits) {
  run_ranks(1, [](int, moecclComm_t comm) {
    const Shape one = {"", 1, kT, "", {1}, 2, 1, 1, 64, 1};
    Moving s(one, comm);
    const std::vector<float> own = s.own(0, 0);
    std::vector<float> held(own.size());
    MOECCL_ASSERT_COMM_OK(moecclMigrationSend(s.migration, 0, own.data(), nullptr, nullptr), comm);
    MOECCL_ASSERT_COMM_OK(moecclMigrationBegin(s.migration, 0), comm);
    const auto refused = [&](const char* name, auto&& call) {
      MOECCL_ASSERT_OK(moecclGroupStart());
      EXPECT_EQ(call(), moecclInvalidUsage) << name;
      EXPECT_NE(std::string(moecclGetLastError(comm)).find(std::string(name) + " waits"), std::string::npos)
          << moecclGetLastError(comm);
      EXPECT_EQ(moecclGroupEnd(), moecclInvalidUsage) << name;
    };
    refused("moecclMigrationWait", [&] { return moecclMigrationWait(s.migration, 0, nullptr, held.data(), nullptr); });
    refused("moecclMigrationWaitEncoded", [&] { return moecclMigrationWaitEncoded(s.migration, 0, nullptr, nullptr); });
    refused("moecclMigrationWaitExpert", [&] { return moecclMigrationWaitExpert(s.migration, 0, 0); });
    MOECCL_EXPECT_COMM_OK(moecclMigrationWait(s.migration, 0, nullptr, held.data(), nullptr), comm);
    EXPECT_EQ(held, own);
  });
}

// types.h: Destroy waits for running operations. The library still decodes when the gather's turn has ended.
TEST(MigrationInto, CommDestroyWaitsUntilTheExpertsAreThere) {
  RankOptions options;
  options.destroy = false;
  run_ranks(
      1,
      [](int, moecclComm_t comm) {
        const Shape one = {"", 1, kT, "", {1}, 24, 1, 1, 1'000'003, 50};
        Moving s(one, comm);
        const std::vector<float> own = s.own(0, 0), shared(one.count, 1.0f);
        std::vector<float> held(own.size(), -77);
        MOECCL_ASSERT_COMM_OK(moecclMigrationSend(s.migration, 0, own.data(), shared.data(), nullptr), comm);
        MOECCL_ASSERT_COMM_OK(moecclMigrationBeginInto(s.migration, 0, shared.data(), held.data()), comm);
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        const bool there = std::none_of(held.begin(), held.end(), [](float f) { return f == -77; });
        EXPECT_TRUE(there);
      },
      options);
}

// Sends of all layers come before their gathers, and need small rooms where the gathers need large ones.
TEST(MigrationMemory, StaysBelowItsBoundHoweverManySteps) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers have an allocator of their own";
#endif
  run_ranks(4,
            [](int, moecclComm_t comm) {
              // Every room has a mapping of its own, so that malloc counts it.
              ASSERT_EQ(mallopt(M_MMAP_THRESHOLD, 1 << 16), 1);
              const Shape shape = {"", 4, kP, "", {4}, 4, 4, 1, 100'000, 1};
              Moving s(shape, comm);
              moecclMigrationConfig_t shallow = MOECCL_MIGRATION_CONFIG_INIT;
              shallow.count = shape.count;
              shallow.ratio = 1;
              shallow.n_layers = shape.layers;
              shallow.depth = 1;
              moecclMigration_t migration = nullptr;
              MOECCL_ASSERT_COMM_OK(moecclMigrationCreate(&migration, s.hybrid, nullptr, &shallow), comm);
              moecclMigrationInfo_t info{};
              info.size = sizeof(info);
              MOECCL_ASSERT_COMM_OK(moecclMigrationGetInfo(migration, 0, &info), comm);
              const std::vector<float> own = s.own(0, 0);
              std::vector<float> held(static_cast<size_t>(s.info.n_held) * shape.count);
              const size_t before = mallinfo2().hblkhd;
              for (int step = 0; step < 6; ++step) {
                for (int l = 0; l < shape.layers; ++l)
                  MOECCL_ASSERT_COMM_OK(moecclMigrationSend(migration, l, own.data(), nullptr, nullptr), comm);
                for (int l = 0; l < shape.layers; ++l) MOECCL_ASSERT_COMM_OK(moecclMigrationBegin(migration, l), comm);
                for (int l = 0; l < shape.layers; ++l)
                  MOECCL_ASSERT_COMM_OK(moecclMigrationWait(migration, l, nullptr, held.data(), nullptr), comm);
                const size_t now = mallinfo2().hblkhd;
                EXPECT_GE(now, before + info.memory_bytes / 2) << "the rooms are counted";
                EXPECT_LE(now, before + info.memory_bytes) << "step " << step;
              }
              MOECCL_EXPECT_OK(moecclMigrationDestroy(migration));
            },
            {.mode = kP});
}

}  // namespace
}  // namespace moeccl::testing
