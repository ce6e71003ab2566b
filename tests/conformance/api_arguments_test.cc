// SPDX-License-Identifier: Apache-2.0
// Wrong arguments give an error code and a sentence, never a crash, and leave the communicator usable.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <vector>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

void expect_refused(moecclResult_t got, moecclComm_t comm, const char* mentions) {
  EXPECT_EQ(got, moecclInvalidArgument) << moecclGetErrorString(got) << ", expected a sentence about " << mentions;
  const std::string text = moecclGetLastError(comm);
  EXPECT_NE(text.find(mentions), std::string::npos) << "\"" << text << "\" does not mention " << mentions;
}

// Expects that the same communicator still works after a refused call.
void expect_usable(moecclComm_t comm, int n) {
  float value = 1;
  MOECCL_ASSERT_COMM_OK(moecclAllReduce(&value, &value, 1, moecclFloat32, moecclSum, comm, nullptr), comm);
  EXPECT_EQ(value, static_cast<float>(n));
}

TEST(ApiArguments, CollectivesRefuseBadOnes) {
  run_ranks(2, [](int, moecclComm_t comm) {
    float in[8] = {}, out[8] = {};
    const auto f32 = moecclFloat32;
    const auto bad_type = static_cast<moecclDataType_t>(13);
    expect_refused(moecclAllReduce(nullptr, out, 4, f32, moecclSum, comm, nullptr), comm, "send");
    expect_refused(moecclAllReduce(in, nullptr, 4, f32, moecclSum, comm, nullptr), comm, "recv");
    expect_refused(moecclAllReduce(in, out, 4, bad_type, moecclSum, comm, nullptr), comm, "type");
    expect_refused(moecclAllReduce(in, out, 4, f32, -1, comm, nullptr), comm, "op");
    expect_refused(moecclAllReduce(in, out, 4, f32, 4711, comm, nullptr), comm, "op");
    expect_refused(moecclAllReduce(in, out, SIZE_MAX / 2, f32, moecclSum, comm, nullptr), comm, "count");
    expect_refused(moecclBroadcast(in, out, 4, f32, 2, comm, nullptr), comm, "root");
    expect_refused(moecclBroadcast(in, out, 4, f32, -1, comm, nullptr), comm, "root");
    expect_refused(moecclReduce(in, out, 4, f32, moecclSum, 7, comm, nullptr), comm, "root");
    expect_refused(moecclGather(in, out, 4, f32, 2, comm, nullptr), comm, "root");
    expect_refused(moecclScatter(in, out, 4, f32, -3, comm, nullptr), comm, "root");
    expect_refused(moecclAllGather(in, nullptr, 4, f32, comm, nullptr), comm, "recv");
    expect_refused(moecclAllToAll(nullptr, out, 4, f32, comm, nullptr), comm, "send");
    expect_refused(moecclAllGather(in, out, SIZE_MAX / 8, f32, comm, nullptr), comm, "count");
    expect_refused(moecclSend(in, 4, f32, 2, comm, nullptr), comm, "peer");
    expect_refused(moecclRecv(out, 4, f32, -1, comm, nullptr), comm, "peer");
    expect_refused(moecclSend(nullptr, 4, f32, 0, comm, nullptr), comm, "send");
    expect_usable(comm, 2);
  });
}

// Calls of one rank that are refused leave nothing for the next ones, which may be prepared in the same memory.
TEST(ApiArguments, ARefusedCallDoesNotChangeTheNext) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    for (size_t count = 1; count <= 32; ++count) {
      std::vector<float> in(count, 1.0f), out(2 * count);
      if (rank == 0) {
        EXPECT_EQ(moecclAllReduce(nullptr, out.data(), count, moecclFloat32, moecclMax, comm, nullptr),
                  moecclInvalidArgument);
      }
      for (size_t n = 1; n <= count; ++n)
        MOECCL_ASSERT_COMM_OK(moecclAllGather(in.data(), out.data(), n, moecclFloat32, comm, nullptr), comm);
    }
  });
}

TEST(ApiArguments, TensorAllToAllvRefusesSizesThatCannotBe) {
  RankOptions options;
  options.config.topology = "node:2 gpu:1";
  const auto refuses = [](int, moecclComm_t comm) {
    const std::vector<size_t> counts{0, size_t{1} << 50, 0, 0};
    EXPECT_EQ(moecclTensorAllToAllv(nullptr, nullptr, counts.data(), moecclInt8, comm, nullptr), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("counts[1]"), std::string::npos) << moecclGetLastError(comm);
  };
  run_ranks(2, refuses, options);
}

TEST(ApiArguments, AllToAllvRefusesBadOnes) {
  run_ranks(2, [](int, moecclComm_t comm) {
    float in[8] = {}, out[8] = {};
    const size_t counts[2] = {2, 2}, displs[2] = {0, 2}, huge[2] = {SIZE_MAX / 2, SIZE_MAX / 2};
    const auto call = [&](const void* send, const size_t* sc, const size_t* sd, void* recv, const size_t* rc,
                          const size_t* rd) {
      return moecclAllToAllv(send, sc, sd, recv, rc, rd, moecclFloat32, comm, nullptr);
    };
    expect_refused(call(in, nullptr, displs, out, counts, displs), comm, "send_counts");
    expect_refused(call(in, counts, nullptr, out, counts, displs), comm, "send_displs");
    expect_refused(call(in, counts, displs, out, nullptr, displs), comm, "recv_counts");
    expect_refused(call(in, counts, displs, out, counts, nullptr), comm, "recv_displs");
    expect_refused(call(in, huge, displs, out, counts, displs), comm, "count");
    expect_refused(call(in, counts, displs, in, counts, displs), comm, "place");
    expect_usable(comm, 2);
  });
}

// Pieces may lie anywhere as long as none overlaps one of the other buffer. The second call is a prepared one.
TEST(ApiArguments, AllToAllvTakesPiecesThatInterleave) {
  constexpr int kRanks = 3;
  run_ranks(kRanks, [](int rank, moecclComm_t comm) {
    const size_t counts[kRanks] = {5, 5, 5};
    const size_t apart[kRanks] = {0, 10, 20}, first[kRanks] = {0, 5, 10};
    const size_t behind[kRanks] = {15, 20, 25}, inside[kRanks] = {5, 15, 25};
    for (const size_t* recv_at : {behind, inside}) {
      const size_t* const send_at = recv_at == behind ? first : apart;
      for (int call = 0; call < 2; ++call) {
        std::vector<int32_t> data(30, -1);
        for (int r = 0; r < kRanks; ++r)
          for (size_t i = 0; i < 5; ++i) data[send_at[r] + i] = 100 * rank + 10 * r + static_cast<int32_t>(i);
        MOECCL_ASSERT_COMM_OK(
            moecclAllToAllv(data.data(), counts, send_at, data.data(), counts, recv_at, moecclInt32, comm, nullptr),
            comm);
        for (int r = 0; r < kRanks; ++r)
          for (size_t i = 0; i < 5; ++i)
            EXPECT_EQ(data[recv_at[r] + i], 100 * r + 10 * rank + static_cast<int32_t>(i)) << r << " " << i;
      }
    }
    std::vector<int32_t> data(30);
    const size_t touching[kRanks] = {5, 15, 24};
    expect_refused(
        moecclAllToAllv(data.data(), counts, apart, data.data(), counts, touching, moecclInt32, comm, nullptr), comm,
        "overlap");
    expect_usable(comm, kRanks);
  });
}

TEST(ApiArguments, PartialOverlapIsRefused) {
  run_ranks(2, [](int, moecclComm_t comm) {
    float data[16] = {};
    expect_refused(moecclAllReduce(data, data + 1, 4, moecclFloat32, moecclSum, comm, nullptr), comm, "overlap");
    expect_refused(moecclAllGather(data + 1, data, 2, moecclFloat32, comm, nullptr), comm, "overlap");
    expect_usable(comm, 2);
  });
}

TEST(ApiArguments, WhatHasNoInPlaceFormSaysSo) {
  run_ranks(2, [](int, moecclComm_t comm) {
    float data[16] = {};
    const size_t counts[2] = {2, 2}, displs[2] = {0, 2};
    expect_refused(moecclTensorAllToAll(data, data, 4, moecclFloat32, comm, nullptr), comm, "has no in-place form");
    expect_refused(moecclAllToAllv(data, counts, displs, data, counts, displs, moecclFloat32, comm, nullptr), comm,
                   "has no in-place form");
    expect_refused(moecclAllReduce(data, data + 1, 4, moecclFloat32, moecclSum, comm, nullptr), comm,
                   "not as the in-place form does");
  });
}

TEST(ApiArguments, EncodingNeedsABufferOfItsOwn) {
  std::vector<float> expert(1000, 1), shared(1000, 2);
  moecclCodec_t codec = MOECCL_CODEC_INIT;
  codec.count = expert.size();
  size_t bytes = 0;
  const auto encode = [&](const void* from, const void* to_share, void* to) {
    return moecclCodecEncode(&codec, from, to_share, to, bytes, nullptr);
  };
  MOECCL_ASSERT_OK(moecclCodecBytes(&codec, &bytes));
  expect_refused(encode(expert.data(), shared.data(), expert.data() + 990), nullptr, "encoded overlaps expert");
  expect_refused(encode(expert.data(), shared.data(), shared.data() + 990), nullptr, "encoded overlaps shared");
  EXPECT_EQ(expert, std::vector<float>(1000, 1));
  std::vector<char> encoded(bytes - 1);
  bytes = encoded.size();
  expect_refused(encode(expert.data(), shared.data(), encoded.data()), nullptr, "this expert takes 110");
  bytes = 5000;
  codec.ratio = 1;  // exact: the shared expert is not read
  std::vector<char> whole(bytes);
  MOECCL_EXPECT_OK(encode(expert.data(), whole.data(), whole.data()));
}

// Otherwise the other ranks would wait for it until the timeout, and their communicators would fail.
TEST(ApiArguments, ACalibrationThatOneRankRefusesEndsOnAll) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    const moecclResult_t refused = moecclCalibrate(comm, rank == 1 ? -1 : 0, 0);
    EXPECT_EQ(refused, rank == 1 ? moecclInvalidArgument : moecclRemoteError) << moecclGetLastError(comm);
    const std::string said = moecclGetLastError(comm);
    EXPECT_NE(said.find(rank == 1 ? "budget_ms is -1" : "rank 1 fails in moecclCalibrate"), std::string::npos) << said;
    expect_usable(comm, 2);
    EXPECT_EQ(moecclCalibrate(comm, 2000, rank == 1 ? 2048 : 4096), moecclMismatch);
    const std::string differ = moecclGetLastError(comm);
    EXPECT_NE(differ.find("rank 0 gives budget_ms 2000 and max_bytes 4096, rank 1 gives 2000 and 2048"),
              std::string::npos)
        << differ;
    expect_usable(comm, 2);
  });
}

TEST(ApiArguments, NothingIsNeededForACountOfZero) {
  run_ranks(3, [](int, moecclComm_t comm) {
    MOECCL_EXPECT_COMM_OK(moecclAllReduce(nullptr, nullptr, 0, moecclFloat32, moecclSum, comm, nullptr), comm);
    MOECCL_EXPECT_COMM_OK(moecclBroadcast(nullptr, nullptr, 0, moecclInt8, 1, comm, nullptr), comm);
    MOECCL_EXPECT_COMM_OK(moecclAllGather(nullptr, nullptr, 0, moecclInt8, comm, nullptr), comm);
    MOECCL_EXPECT_COMM_OK(moecclAllToAll(nullptr, nullptr, 0, moecclInt8, comm, nullptr), comm);
    expect_usable(comm, 3);
  });
}

// Only the root's pointer is used, so the other ranks may pass NULL.
TEST(ApiArguments, BuffersThatARankDoesNotUseMayBeNull) {
  run_ranks(3, [](int rank, moecclComm_t comm) {
    float value = static_cast<float>(rank + 1), all[3] = {7, 8, 9}, got = 0;
    MOECCL_EXPECT_COMM_OK(
        moecclReduce(&value, rank == 1 ? &got : nullptr, 1, moecclFloat32, moecclSum, 1, comm, nullptr), comm);
    EXPECT_EQ(got, rank == 1 ? 6.0f : 0.0f);
    MOECCL_EXPECT_COMM_OK(moecclBroadcast(rank == 2 ? &value : nullptr, &got, 1, moecclFloat32, 2, comm, nullptr),
                          comm);
    EXPECT_EQ(got, 3.0f);
    MOECCL_EXPECT_COMM_OK(moecclScatter(rank == 0 ? all : nullptr, &got, 1, moecclFloat32, 0, comm, nullptr), comm);
    EXPECT_EQ(got, static_cast<float>(7 + rank));
    MOECCL_EXPECT_COMM_OK(moecclGather(&got, rank == 2 ? all : nullptr, 1, moecclFloat32, 2, comm, nullptr), comm);
  });
}

TEST(ApiArguments, HandlesAreCheckedNotFollowed) {
  const RankOptions options{.destroy = false};
  run_ranks(
      2,
      [](int, moecclComm_t comm) {
        float value = 1;
        int n = 0;
        moecclResult_t state = moecclSuccess;
        const auto junk = reinterpret_cast<moecclComm_t>(static_cast<uintptr_t>(0x1234567));
        for (moecclComm_t bad : {static_cast<moecclComm_t>(nullptr), junk}) {
          EXPECT_EQ(moecclAllReduce(&value, &value, 1, moecclFloat32, moecclSum, bad, nullptr), moecclInvalidArgument);
          EXPECT_EQ(moecclCommCount(bad, &n), moecclInvalidArgument);
          EXPECT_EQ(moecclCommUserRank(bad, &n), moecclInvalidArgument);
          EXPECT_EQ(moecclCommGetAsyncError(bad, &state), moecclInvalidArgument);
          EXPECT_EQ(moecclCommAbort(bad), moecclInvalidArgument);
          EXPECT_EQ(moecclCommFinalize(bad), moecclInvalidArgument);
          EXPECT_EQ(moecclCommDestroy(bad), bad == nullptr ? moecclSuccess : moecclInvalidArgument);
        }
        EXPECT_EQ(moecclCommCount(comm, nullptr), moecclInvalidArgument);
        EXPECT_EQ(moecclCommUserRank(comm, nullptr), moecclInvalidArgument);
        EXPECT_EQ(moecclCommGetAsyncError(comm, nullptr), moecclInvalidArgument);
        EXPECT_EQ(moecclCommMemoryUsage(comm, nullptr), moecclInvalidArgument);
        const auto bad_stream = reinterpret_cast<moecclStream_t>(static_cast<uintptr_t>(0xabcdef));
        EXPECT_EQ(moecclAllReduce(&value, &value, 1, moecclFloat32, moecclSum, comm, bad_stream),
                  moecclInvalidArgument);
        EXPECT_EQ(moecclStreamSynchronize(bad_stream), moecclInvalidArgument);
        EXPECT_EQ(moecclStreamDestroy(bad_stream), moecclInvalidArgument);
        EXPECT_EQ(moecclStreamCreate(nullptr), moecclInvalidArgument);
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        EXPECT_EQ(moecclCommDestroy(comm), moecclInvalidArgument) << "destroyed twice";
        EXPECT_EQ(moecclAllReduce(&value, &value, 1, moecclFloat32, moecclSum, comm, nullptr), moecclInvalidArgument)
            << "used after destroy";
        EXPECT_EQ(moecclCommCount(comm, &n), moecclInvalidArgument);
      },
      options);
}

// A handle of one kind is not accepted as a handle of another kind.
TEST(ApiArguments, HandlesOfOtherKindsAreRefused) {
  run_ranks(1, [](int, moecclComm_t comm) {
    moecclStream_t stream = nullptr;
    MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
    int n = 0;
    EXPECT_EQ(moecclCommCount(reinterpret_cast<moecclComm_t>(stream), &n), moecclInvalidArgument);
    EXPECT_EQ(moecclStreamDestroy(reinterpret_cast<moecclStream_t>(comm)), moecclInvalidArgument);
    EXPECT_EQ(moecclMoeDestroy(reinterpret_cast<moecclMoe_t>(comm)), moecclInvalidArgument);
    EXPECT_EQ(moecclRoutingDestroy(reinterpret_cast<moecclRouting_t>(stream)), moecclInvalidArgument);
    MOECCL_EXPECT_OK(moecclStreamDestroy(stream));
    EXPECT_EQ(moecclStreamDestroy(stream), moecclInvalidArgument) << "destroyed twice";
    EXPECT_EQ(moecclCommCount(comm, &n), moecclSuccess);
  });
}

TEST(ApiArguments, InitRefusesBadOnes) {
  const RankOptions options{.init = false};
  run_ranks(
      1,
      [](int, moecclComm_t) {
        moecclComm_t comm = nullptr;
        moecclUniqueId zero = {};
        EXPECT_EQ(moecclGetUniqueId(nullptr), moecclInvalidArgument);
        EXPECT_EQ(moecclCommInitRank(nullptr, 1, unique_id(), 0), moecclInvalidArgument);
        expect_refused(moecclCommInitRank(&comm, 0, unique_id(), 0), nullptr, "n_ranks");
        expect_refused(moecclCommInitRank(&comm, -4, unique_id(), 0), nullptr, "n_ranks");
        expect_refused(moecclCommInitRank(&comm, 2, unique_id(), 2), nullptr, "rank");
        expect_refused(moecclCommInitRank(&comm, 2, unique_id(), -1), nullptr, "rank");
        EXPECT_EQ(moecclCommInitRank(&comm, 1, zero, 0), moecclInvalidArgument) << "an id that nobody made";
        moecclConfig_t config = MOECCL_CONFIG_INIT;
        config.timeout_ms = -5;
        expect_refused(moecclCommInitRankConfig(&comm, 1, unique_id(), 0, &config), nullptr, "timeout");
        config = MOECCL_CONFIG_INIT;
        config.size = 3;
        expect_refused(moecclCommInitRankConfig(&comm, 1, unique_id(), 0, &config), nullptr, "size");
        config = MOECCL_CONFIG_INIT;
        config.topology = "node:two gpu:";
        EXPECT_EQ(moecclCommInitRankConfig(&comm, 1, unique_id(), 0, &config), moecclInvalidArgument)
            << moecclGetLastError(nullptr);
        EXPECT_EQ(moecclCommInitAll(nullptr, 2, nullptr), moecclInvalidArgument);
        EXPECT_EQ(moecclCommInitEnv(nullptr, nullptr), moecclInvalidArgument);
        EXPECT_EQ(comm, nullptr);
      },
      options);
}

// The topology has another number of ranks than the communicator.
TEST(ApiArguments, TopologyOfAnotherSizeIsRefused) {
  const RankOptions options{.init = false};
  run_ranks(
      2,
      [](int rank, moecclComm_t) {
        moecclComm_t comm = nullptr;
        moecclConfig_t config = MOECCL_CONFIG_INIT;
        config.topology = "node:2 gpu:4";
        config.init_timeout_ms = 5000;
        EXPECT_EQ(moecclCommInitRankConfig(&comm, 2, unique_id(), rank, &config), moecclInvalidArgument)
            << moecclGetLastError(nullptr);
        EXPECT_NE(std::string(moecclGetLastError(nullptr)).find("8"), std::string::npos) << moecclGetLastError(nullptr);
      },
      options);
}

TEST(ApiArguments, MemoryCallsRefuseBadOnes) {
  run_ranks(1, [](int, moecclComm_t comm) {
    void* p = nullptr;
    EXPECT_EQ(moecclMemAlloc(nullptr, 64), moecclInvalidArgument);
    EXPECT_EQ(moecclMemAlloc(&p, SIZE_MAX / 2), moecclOutOfMemory);
    MOECCL_EXPECT_OK(moecclMemFree(nullptr));
    int here = 0;
    EXPECT_EQ(moecclMemFree(&here), moecclInvalidArgument) << "not from MemAlloc";
    MOECCL_ASSERT_OK(moecclMemAlloc(&p, 100));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % 64, 0u);
    for (int i = 0; i < 100; ++i) EXPECT_EQ(static_cast<char*>(p)[i], 0);
    MOECCL_EXPECT_OK(moecclMemFree(p));
    EXPECT_EQ(moecclMemFree(p), moecclInvalidArgument) << "freed twice";
    void* handle = nullptr;
    EXPECT_EQ(moecclCommRegister(comm, nullptr, 8, &handle), moecclInvalidArgument);
    EXPECT_EQ(moecclCommRegister(comm, &here, sizeof(here), nullptr), moecclInvalidArgument);
    MOECCL_ASSERT_COMM_OK(moecclCommRegister(comm, &here, sizeof(here), &handle), comm);
    MOECCL_EXPECT_COMM_OK(moecclCommDeregister(comm, handle), comm);
    EXPECT_EQ(moecclCommDeregister(comm, nullptr), moecclInvalidArgument);
  });
}

TEST(ApiArguments, MemoryOfTheHeapIsZeroedAgainAfterFree) {
  run_ranks(1, [](int, moecclComm_t) {
    for (size_t bytes : {size_t{64}, size_t{1000}, size_t{1} << 20}) {
      for (int round = 0; round < 3; ++round) {
        void* p = nullptr;
        MOECCL_ASSERT_OK(moecclMemAlloc(&p, bytes));
        size_t dirty = 0;
        for (size_t i = 0; i < bytes; ++i) dirty += static_cast<unsigned char*>(p)[i] != 0;
        EXPECT_EQ(dirty, 0u) << bytes << " bytes, round " << round;
        memset(p, 0xff, bytes);
        MOECCL_ASSERT_OK(moecclMemFree(p));
      }
    }
  });
}

TEST(ApiArguments, OperatorsAreChecked) {
  run_ranks(2, [](int, moecclComm_t comm) {
    moecclRedOp_t op = 0;
    const float two = 2;
    EXPECT_EQ(moecclRedOpCreatePreMulSum(nullptr, &two, moecclFloat32, comm), moecclInvalidArgument);
    EXPECT_EQ(moecclRedOpCreatePreMulSum(&op, nullptr, moecclFloat32, comm), moecclInvalidArgument);
    EXPECT_EQ(moecclRedOpCreatePreMulSum(&op, &two, static_cast<moecclDataType_t>(15), comm), moecclInvalidArgument);
    EXPECT_EQ(moecclRedOpDestroy(moecclSum, comm), moecclInvalidArgument) << "built in";
    EXPECT_EQ(moecclRedOpDestroy(12345, comm), moecclInvalidArgument);
    MOECCL_ASSERT_COMM_OK(moecclRedOpCreatePreMulSum(&op, &two, moecclFloat32, comm), comm);
    double value = 1;
    expect_refused(moecclAllReduce(&value, &value, 1, moecclFloat64, op, comm, nullptr), comm, "type");
    MOECCL_EXPECT_COMM_OK(moecclRedOpDestroy(op, comm), comm);
    EXPECT_EQ(moecclRedOpDestroy(op, comm), moecclInvalidArgument) << "destroyed twice";
    float f = 1;
    EXPECT_EQ(moecclAllReduce(&f, &f, 1, moecclFloat32, op, comm, nullptr), moecclInvalidArgument)
        << "used after destroy";
    expect_usable(comm, 2);
  });
}

// Where an operation has no plan to ask for, the call that the message names tells about it.
TEST(ApiArguments, APlanThatNoShapeDeterminesIsKnownToTheCallThatIsNamed) {
  run_ranks(2, [](int, moecclComm_t comm) {
    moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
    const int32_t domain[] = {2}, experts[] = {0, 1, 1, 0};
    config.n_experts = 2, config.domain = domain, config.n_levels = 1;
    moecclHybrid_t hybrid = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
    char moved[8192];
    MOECCL_ASSERT_COMM_OK(moecclHybridExplain(hybrid, 64, moved, sizeof(moved), nullptr), comm);
    moecclPlacement_t placement = MOECCL_PLACEMENT_INIT;
    placement.n_experts = 2, placement.slots_per_rank = 2, placement.slot_expert = experts;
    int without = 0;
    for (int i = 0; i < MOECCL_NUM_OPS; ++i) {
      const auto op = static_cast<moecclOp_t>(i);
      moecclPlanInfo_t info{};
      info.size = sizeof(info);
      const moecclResult_t asked = moecclPlanQuery(comm, op, 4, moecclFloat32, &info);
      const std::string text = moecclGetLastError(comm);
      EXPECT_EQ(moecclPlanExplain(comm, op, 4, moecclFloat32, nullptr, 0, nullptr), asked) << moecclOpName(op);
      EXPECT_EQ(moecclPlanProve(comm, op, 4, moecclFloat32), asked) << moecclOpName(op);
      if (asked == moecclSuccess) continue;
      ++without;
      EXPECT_EQ(asked, moecclInvalidArgument) << moecclOpName(op);
      const auto names = [&](const char* call) { return text.find(call) != std::string::npos; };
      if (names("moecclExpertExplain")) {
        MOECCL_EXPECT_COMM_OK(moecclExpertExplain(comm, op, 4, moecclFloat32, &placement, nullptr, 0, nullptr), comm);
      } else if (names("moecclHybridExplain")) {
        const char* const title = op == moecclOpExpertGather ? "ExpertGather" : "ExpertReduce";
        EXPECT_NE(std::string(moved).find(title), std::string::npos) << text << "\n" << moved;
      } else if (names("moecclMoeExplain")) {
        EXPECT_TRUE(op == moecclOpDispatch || op == moecclOpCombine) << text;
      } else if (names("tensor_alltoall for blocks")) {
        MOECCL_EXPECT_COMM_OK(moecclPlanQuery(comm, moecclOpTensorAllToAll, 4, moecclFloat32, &info), comm);
      } else {
        EXPECT_EQ(op, moecclOpSendRecv) << text;
      }
    }
    EXPECT_EQ(without, 10);
    MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
    expect_usable(comm, 2);
  });
}

TEST(ApiArguments, EveryResultHasItsName) {
  const char* const names[] = {"moecclSuccess",         "moecclSystemError",  "moecclInternalError",
                               "moecclInvalidArgument", "moecclInvalidUsage", "moecclRemoteError",
                               "moecclInProgress",      "moecclTimeout",      "moecclAborted",
                               "moecclMismatch",        "moecclOutOfMemory",  "moecclUnsupported"};
  for (int i = 0; i < 12; ++i) EXPECT_STREQ(moecclGetErrorString(static_cast<moecclResult_t>(i)), names[i]);
  EXPECT_NE(moecclGetErrorString(static_cast<moecclResult_t>(12)), nullptr);
  EXPECT_NE(moecclGetErrorString(static_cast<moecclResult_t>(15)), nullptr);
  EXPECT_NE(moecclGetLastError(nullptr), nullptr);
  const size_t sizes[MOECCL_NUM_DATA_TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  for (int t = 0; t < MOECCL_NUM_DATA_TYPES; ++t) EXPECT_EQ(moecclTypeSize(static_cast<moecclDataType_t>(t)), sizes[t]);
  EXPECT_EQ(moecclTypeSize(static_cast<moecclDataType_t>(12)), 0u);
  EXPECT_EQ(moecclGetVersion(nullptr), moecclInvalidArgument);
  int version = 0;
  EXPECT_EQ(moecclGetVersion(&version), moecclSuccess);
  EXPECT_EQ(version, MOECCL_VERSION);
}

}  // namespace
}  // namespace moeccl::testing
