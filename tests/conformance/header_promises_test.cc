// SPDX-License-Identifier: Apache-2.0
// Promises of the public headers about the order, the end and the refusal of calls, each of which was once broken.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// experts.h: counts are in the stream's order, like every other buffer.
TEST(HeaderPromises, PopularityLeavesItsCountsToEarlierWorkOfTheStream) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    const std::vector<int32_t> first{0, 0, 0, 0}, second{1, 1, 1, 1};
    std::vector<int64_t> counts(4), gathered(8);
    moecclStream_t stream = nullptr;
    MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
    if (rank == 1) sleep_ms(200);  // so that rank 0's work waits on its stream
    MOECCL_EXPECT_COMM_OK(moecclExpertPopularity(first.data(), 4, 4, counts.data(), comm, stream), comm);
    MOECCL_EXPECT_COMM_OK(moecclAllGather(counts.data(), gathered.data(), 4, moecclInt64, comm, stream), comm);
    MOECCL_EXPECT_COMM_OK(moecclExpertPopularity(second.data(), 4, 4, counts.data(), comm, stream), comm);
    MOECCL_EXPECT_OK(moecclStreamSynchronize(stream));
    EXPECT_EQ(gathered, (std::vector<int64_t>{8, 0, 0, 0, 8, 0, 0, 0}));
    EXPECT_EQ(counts, (std::vector<int64_t>{0, 8, 0, 0}));
    MOECCL_EXPECT_OK(moecclStreamDestroy(stream));
  });
}

// codec.h: so is the shared expert, which a group that is cancelled does not touch.
TEST(HeaderPromises, SharedExpertIsWrittenByItsOperation) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    const std::vector<float> experts(1000, static_cast<float>(2 * rank + 2));
    std::vector<float> shared(1000, 7), sum(1000);
    const auto mean = [&](moecclStream_t stream) {
      return moecclSharedExpert(experts.data(), 1, 2, shared.data(), 1000, moecclFloat32, comm, stream);
    };
    MOECCL_ASSERT_OK(moecclGroupStart());
    MOECCL_EXPECT_COMM_OK(mean(nullptr), comm);
    MOECCL_ASSERT_OK(moecclGroupCancel());
    EXPECT_EQ(shared, std::vector<float>(1000, 7));
    moecclStream_t stream = nullptr;
    MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
    if (rank == 1) sleep_ms(200);  // so that rank 0's work waits on its stream
    MOECCL_EXPECT_COMM_OK(moecclAllReduce(shared.data(), sum.data(), 1000, moecclFloat32, moecclSum, comm, stream),
                          comm);
    MOECCL_EXPECT_COMM_OK(mean(stream), comm);
    MOECCL_EXPECT_OK(moecclStreamSynchronize(stream));
    EXPECT_EQ(sum, std::vector<float>(1000, 14));
    EXPECT_EQ(shared, std::vector<float>(1000, 3));
    MOECCL_EXPECT_OK(moecclStreamDestroy(stream));
  });
}

// types.h: Destroy waits for running operations.
TEST(HeaderPromises, HybridDestroyWaitsForAGatherOnAStream) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    constexpr size_t kBytes = 1 << 20;
    int32_t domain = 2;
    moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
    config.n_experts = 2;
    config.n_levels = 1;
    config.domain = &domain;
    moecclHybrid_t hybrid = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
    moecclStream_t stream = nullptr;
    MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
    const std::vector<char> own(kBytes, static_cast<char>(1 + rank));
    std::vector<char> held(2 * kBytes, 9);
    if (rank == 1) sleep_ms(200);
    MOECCL_EXPECT_COMM_OK(moecclHybridGather(hybrid, own.data(), held.data(), kBytes, stream), comm);
    MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
    EXPECT_EQ(held[rank == 0 ? 2 * kBytes - 1 : 0], 2 - rank) << "the peer's expert";
    MOECCL_EXPECT_OK(moecclStreamDestroy(stream));
  });
}

// types.h: a handle may be destroyed after its communicator, also while a background thread solves for it. A use of the
// communicator's memory after its end is visible under the address sanitizer.
void solve_beyond_the_communicator(bool deterministic, int32_t residual) {
  RankOptions options;
  options.config.deterministic = deterministic ? 1 : 0;
  options.config.topology = "node:2 gpu:2";
  options.destroy = false;
  run_ranks(
      4,
      [=](int rank, moecclComm_t comm) {
        constexpr int32_t kTokens = 2048, kTopK = 8, kExperts = 256;
        moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
        config.hidden_bytes = 4;
        config.type = moecclFloat32;
        config.top_k = kTopK;
        config.n_experts = kExperts;
        config.max_tokens = kTokens;
        config.layout = moecclLayoutExpertMajor;
        moecclMoe_t layer = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&layer, comm, &config), comm);
        std::vector<int32_t> index(size_t{kTokens} * kTopK);
        uint32_t random = static_cast<uint32_t>(rank) + 1;
        for (size_t i = 0; i < index.size(); ++i) {
          random = random * 1664525u + 1013904223u;
          index[i] = static_cast<int32_t>((random >> 8) % (kExperts / kTopK)) * kTopK + static_cast<int32_t>(i % kTopK);
        }
        moecclRouting_t routing = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, layer, index.data(), nullptr, kTokens), comm);
        moecclReplaceConfig_t place = MOECCL_REPLACE_CONFIG_INIT;
        place.sample_tokens = 1;
        place.min_gain = -1;
        place.residual = residual;
        moecclReplacement_t replacement = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclReplaceCreate(&replacement, layer, &place), comm);
        MOECCL_EXPECT_COMM_OK(moecclReplaceBegin(replacement, routing, nullptr, nullptr), comm);
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        MOECCL_EXPECT_OK(moecclReplaceDestroy(replacement));
        MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
        MOECCL_EXPECT_OK(moecclMoeDestroy(layer));
      },
      options);
}

TEST(HeaderPromises, AReplacementThatSolvesOutlivesItsCommunicator) { solve_beyond_the_communicator(false, 0); }

// The sums of a deterministic communicator follow its tree, also when a residual comes to them.
TEST(HeaderPromises, AReplacementThatGroupsItsSumsOutlivesItsCommunicator) { solve_beyond_the_communicator(true, 2); }

// plan.h: a forced algorithm that can never run here is refused, and calls run as if nothing were forced. On one flat
// level there are no nodes.
void calls_run(moecclComm_t comm) {
  const std::vector<int32_t> slots{0, 0};
  moecclPlacement_t placement = MOECCL_PLACEMENT_INIT;
  placement.n_experts = 1;
  placement.slots_per_rank = 1;
  placement.slot_expert = slots.data();
  const std::vector<float> in(8, 1);
  std::vector<float> out(8);
  MOECCL_EXPECT_COMM_OK(
      moecclExpertAllReduce(in.data(), out.data(), 8, moecclFloat32, moecclSum, &placement, comm, nullptr), comm);
  EXPECT_EQ(out, std::vector<float>(8, 2));
  MOECCL_EXPECT_COMM_OK(
      moecclReduceGradients(in.data(), out.data(), 8, moecclFloat32, moecclSum, &placement, comm, nullptr), comm);
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  config.hidden_bytes = 64;
  config.top_k = 1;
  config.n_experts = 2;
  config.max_tokens = 4;
  moecclMoe_t layer = nullptr;
  MOECCL_EXPECT_COMM_OK(moecclMoeCreate(&layer, comm, &config), comm);
  MOECCL_EXPECT_OK(moecclMoeDestroy(layer));
}

TEST(HeaderPromises, ForcedAlgorithmsThatNeverFitGiveWay) {
  run_ranks(2, [](int, moecclComm_t comm) {
    EXPECT_EQ(moecclPlanForce(comm, moecclOpExpertAllReduce, "nodes"), moecclUnsupported);
    EXPECT_EQ(moecclPlanForce(comm, moecclOpReduceGradients, "nodes"), moecclUnsupported);
    EXPECT_EQ(moecclPlanForce(comm, moecclOpDispatch, "hier:2"), moecclUnsupported);
    MOECCL_EXPECT_OK(moecclPlanForce(comm, moecclOpDispatch, "hier:1"));
    calls_run(comm);
  });
  setenv("MOECCL_PLAN", "dispatch:hier:2,expert_allreduce:nodes,reduce_gradients:nodes", 1);
  run_ranks(2, [](int, moecclComm_t comm) { calls_run(comm); });
  unsetenv("MOECCL_PLAN");
}

// comm.h: config.init_timeout_ms, also where it is longer than the environment's.
TEST(HeaderPromises, TheConfigMayGiveInitMoreTime) {
  RankOptions options;
  options.init = options.destroy = false;
  setenv("MOECCL_INIT_TIMEOUT_MS", "500", 1);
  run_ranks(
      2,
      [](int rank, moecclComm_t) {
        moecclConfig_t config = MOECCL_CONFIG_INIT;
        config.init_timeout_ms = static_cast<int32_t>(patient_ms(20'000));
        const moecclUniqueId id = unique_id();
        if (rank == 1) sleep_ms(1500);
        moecclComm_t comm = nullptr;
        MOECCL_ASSERT_OK(moecclCommInitRankConfig(&comm, 2, id, rank, &config));
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      options);
  unsetenv("MOECCL_INIT_TIMEOUT_MS");
}

// comm.h: other calls that wait for ranks are refused in a group, and a refused member ends the group.
TEST(HeaderPromises, GroupsRefuseWhatWouldWaitAndHearOfRefusals) {
  run_ranks(2, [](int, moecclComm_t comm) {
    const std::vector<int32_t> slots{0, 1}, topk{0, 1};
    std::vector<int32_t> chosen(2);
    moecclPlacement_t placement = MOECCL_PLACEMENT_INIT;
    placement.n_experts = 2;
    placement.slots_per_rank = 1;
    placement.slot_expert = slots.data();
    moecclReplicaDispatch_t dispatch = MOECCL_REPLICA_DISPATCH_INIT;
    dispatch.placement = &placement;
    dispatch.top_k = 1;
    MOECCL_EXPECT_OK(moecclGroupStart());
    EXPECT_EQ(moecclChooseReplicas(&dispatch, topk.data(), 2, chosen.data(), nullptr, nullptr, comm),
              moecclInvalidUsage);
    EXPECT_EQ(moecclGroupEnd(), moecclInvalidUsage);

    const std::vector<float> experts(4, 1);
    std::vector<float> mean(4);
    int32_t sum = 1;
    MOECCL_EXPECT_OK(moecclGroupStart());
    MOECCL_EXPECT_OK(moecclAllReduce(&sum, &sum, 1, moecclInt32, moecclSum, comm, nullptr));
    EXPECT_EQ(moecclSharedExpert(experts.data(), 1, 2, nullptr, 4, moecclFloat32, comm, nullptr),
              moecclInvalidArgument);
    EXPECT_EQ(moecclGroupEnd(), moecclInvalidArgument);
    EXPECT_EQ(sum, 1) << "the group issued nothing";
    MOECCL_EXPECT_COMM_OK(moecclSharedExpert(experts.data(), 1, 2, mean.data(), 4, moecclFloat32, comm, nullptr), comm);
    EXPECT_EQ(mean, std::vector<float>(4, 1));
  });
}

TEST(HeaderPromises, GroupsHearOfADispatchThatTheyRefuse) {
  run_ranks(2, [](int, moecclComm_t comm) {
    moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
    config.hidden_bytes = 4, config.type = moecclFloat32, config.top_k = 1, config.n_experts = 2, config.max_tokens = 1;
    moecclMoe_t moe = nullptr;
    moecclRouting_t routing = nullptr;
    const int32_t none = -1;
    MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
    MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, &none, nullptr, 1), comm);
    float row = 0;
    int32_t sum = 1;
    MOECCL_EXPECT_OK(moecclGroupStart());
    MOECCL_EXPECT_OK(moecclAllReduce(&sum, &sum, 1, moecclInt32, moecclSum, comm, nullptr));
    EXPECT_EQ(moecclDispatch(routing, &row, &row, nullptr), moecclInvalidUsage);
    EXPECT_EQ(moecclGroupEnd(), moecclInvalidUsage);
    EXPECT_EQ(sum, 1) << "the group issued nothing";
    MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
    MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
  });
}

// status.h: the communicators of a process, not those that its parent had when it was forked.
TEST(HeaderPromises, StatusOfAChildShowsTheChildsCommunicators) {
  run_ranks(1, [](int, moecclComm_t) {
    int ready[2], go[2];
    ASSERT_EQ(pipe(ready), 0);
    ASSERT_EQ(pipe(go), 0);
    const pid_t child = fork();
    if (child == 0) {
      char byte = 0;
      const bool told = write(ready[1], &byte, 1) == 1 && read(go[0], &byte, 1) == 1;
      moecclConfig_t config = MOECCL_CONFIG_INIT;
      config.name = "of the child";
      moecclComm_t own = nullptr;
      const bool made = moecclCommInitAll(&own, 1, &config) == moecclSuccess;
      _exit(told && made && write(ready[1], &byte, 1) == 1 && read(go[0], &byte, 1) == 1 ? 0 : 1);
    }
    char byte = 0;
    ASSERT_EQ(read(ready[0], &byte, 1), 1);
    std::string text(1 << 16, 0);
    EXPECT_EQ(moecclStatus(child, text.data(), text.size(), nullptr), moecclRemoteError) << text.c_str();
    ASSERT_EQ(write(go[1], &byte, 1), 1);
    ASSERT_EQ(read(ready[0], &byte, 1), 1);
    MOECCL_EXPECT_OK(moecclStatus(child, text.data(), text.size(), nullptr));
    const std::string seen = text.c_str();
    EXPECT_NE(seen.find("of the child"), std::string::npos) << seen;
    EXPECT_EQ(seen.find("\"group\""), seen.rfind("\"group\"")) << "one communicator: " << seen;
    ASSERT_EQ(write(go[1], &byte, 1), 1);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  });
}

TEST(HeaderPromises, StatusWithoutACommunicatorSaysSo) {
  RankOptions options;
  options.init = options.destroy = false;
  run_ranks(
      1, [](int, moecclComm_t) { EXPECT_EQ(moecclStatus(0, nullptr, 0, nullptr), moecclRemoteError); }, options);
}

// types.h: after a failure, further calls on the communicator return the same code.
TEST(HeaderPromises, ARoutingThatAFailureLeftEmptyReportsTheFailure) {
  RankOptions options;
  options.destroy = false;
  run_ranks(
      2,
      [](int rank, moecclComm_t comm) {
        moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
        config.hidden_bytes = 16;
        config.type = moecclFloat32;
        config.top_k = 1;
        config.n_experts = 2;
        config.max_tokens = 4;
        moecclMoe_t layer = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&layer, comm, &config), comm);
        const std::vector<int32_t> index{0, 1, 0, 1};
        moecclRouting_t routing = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, layer, index.data(), nullptr, 4), comm);
        if (rank == 1) {
          MOECCL_EXPECT_OK(moecclCommAbort(comm));
        } else {
          const moecclResult_t failed = moecclRoutingUpdate(routing, index.data(), nullptr, 4);
          EXPECT_NE(failed, moecclSuccess);
          std::vector<float> x(64), rows(64);
          EXPECT_EQ(moecclDispatch(routing, x.data(), rows.data(), nullptr), failed) << moecclGetLastError(comm);
        }
        MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
        MOECCL_EXPECT_OK(moecclMoeDestroy(layer));
        (void)moecclCommDestroy(comm);
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
