// SPDX-License-Identifier: Apache-2.0
// moecclTensorAllToAll: every algorithm gives the reference's bits, on even and uneven nodes, with threads and
// processes, odd sizes and none. There and back is the identity. Invalid calls are refused with a sentence.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr const char* kAlgorithms[] = {"baseline", "o1", "o2", "o3", "lean", nullptr};
constexpr unsigned char kCanary = 0xa5;

unsigned char byte_of(int group, int block, size_t i) {
  uint64_t x = (static_cast<uint64_t>(group) << 40 ^ static_cast<uint64_t>(block) << 32 ^ i) * 0x9e3779b97f4a7c15ull;
  return static_cast<unsigned char>((x ^ x >> 31) >> 7);
}

moecclTensorGroups_t groups_of(moecclComm_t comm) {
  moecclTensorGroups_t g{};
  g.size = sizeof(g);
  EXPECT_EQ(moecclTensorGroups(comm, &g), moecclSuccess) << moecclGetLastError(comm);
  return g;
}

std::vector<unsigned char> input_of(const moecclTensorGroups_t& g, size_t block_bytes) {
  std::vector<unsigned char> in(static_cast<size_t>(g.n_groups) * block_bytes);
  for (int d = 0; d < g.n_groups; ++d)
    for (size_t i = 0; i < block_bytes; ++i) in[static_cast<size_t>(d) * block_bytes + i] = byte_of(g.group, d, i);
  return in;
}

struct World {
  int n;
  RankMode mode;
  const char* topology;
  size_t staging_bytes;
  int pace;
};

std::ostream& operator<<(std::ostream& out, const World& w) {
  return out << w.n << " " << mode_name(w.mode) << ", \"" << w.topology << "\"";
}

class TensorAllToAll : public ::testing::TestWithParam<World> {
 protected:
  RankOptions options() const {
    RankOptions o{.mode = GetParam().mode};
    o.config.topology = GetParam().topology;
    o.config.staging_bytes = GetParam().staging_bytes;
    o.config.pace = GetParam().pace;
    return o;
  }
};

TEST_P(TensorAllToAll, EveryAlgorithmGivesTheReferencesBitsThereAndBack) {
  run_ranks(
      GetParam().n,
      [&](int, moecclComm_t comm) {
        const moecclTensorGroups_t g = groups_of(comm);
        for (const moecclDataType_t type : {moecclUint8, moecclBfloat16, moecclFloat64}) {
          for (const size_t count : {size_t{0}, size_t{1}, size_t{7}, size_t{1000}, size_t{70001}}) {
            const size_t block = count * moecclTypeSize(type);
            const std::vector<unsigned char> in = input_of(g, block);
            std::vector<unsigned char> out(in.size() + 64), back(in.size() + 64);
            for (const char* name : kAlgorithms) {
              set_note(std::string(name == nullptr ? "auto" : name) + ", count " + std::to_string(count));
              MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpTensorAllToAll, name), comm);
              std::fill(out.begin(), out.end(), kCanary);
              std::fill(back.begin(), back.end(), kCanary);
              MOECCL_ASSERT_COMM_OK(moecclTensorAllToAll(in.data(), out.data(), count, type, comm, nullptr), comm);
              size_t wrong = 0;
              for (int s = 0; s < g.n_groups; ++s)
                for (size_t i = 0; i < block; ++i)
                  wrong += out[static_cast<size_t>(s) * block + i] != byte_of(s, g.group, i);
              ASSERT_EQ(wrong, 0u) << (name == nullptr ? "auto" : name) << ", " << count << " elements of "
                                   << moecclTypeSize(type) << " bytes";
              MOECCL_ASSERT_COMM_OK(moecclTensorAllToAll(out.data(), back.data(), count, type, comm, nullptr), comm);
              ASSERT_TRUE(in.empty() || memcmp(back.data(), in.data(), in.size()) == 0)
                  << (name == nullptr ? "auto" : name);
              for (size_t i = in.size(); i < out.size(); ++i) {
                ASSERT_EQ(out[i], kCanary);
                ASSERT_EQ(back[i], kCanary);
              }
            }
          }
        }
      },
      options());
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, TensorAllToAll,
    ::testing::Values(World{1, RankMode::kThreads, "", 0, 0}, World{3, RankMode::kThreads, "", 0, 0},
                      World{2, RankMode::kProcesses, "node:2 gpu:1", 0, 0},
                      World{8, RankMode::kThreads, "node:2 gpu:4", 0, 0},
                      World{8, RankMode::kProcesses, "node:2 gpu:4", 128 << 10, 0},
                      World{8, RankMode::kMixed, "node:3 gpu:1+4+3", 256 << 10, 0},
                      World{8, RankMode::kThreads, "dc:2 node:2 gpu:2", 0, 0},
                      World{15, RankMode::kThreads, "node:2 gpu:7+8", 1 << 20, 0},
                      World{16, RankMode::kProcesses, "node:2 gpu:8", 0, 0},
                      World{4, RankMode::kProcesses, "node:2(bw=0.5GB/s,lat=20us) gpu:2(bw=4GB/s)", 0, 1}));

// Plans with similar predictions are tried in the first operations. The bits are the same all the time, all ranks end
// with the same plan, and report and timeline describe the plan that runs.
TEST_P(TensorAllToAll, TrialsEndWithOnePlanOnAllRanks) {
  if (GetParam().n > 8) GTEST_SKIP() << "fewer ranks show it";
  constexpr size_t kBlock = 600 << 10;  // two blocks or more, so that the trial takes few operations
  constexpr int kEnough = 90;
  struct Ends {
    moecclPlanInfo_t info[8];
  };
  Shared<Ends> ends;
  run_ranks(
      GetParam().n,
      [&](int rank, moecclComm_t comm) {
        const moecclTensorGroups_t g = groups_of(comm);
        const std::vector<unsigned char> in = input_of(g, kBlock);
        std::vector<unsigned char> out(in.size()), first;
        moecclPlanInfo_t info{};
        info.size = sizeof(info);
        const auto exchange = [&] {
          std::fill(out.begin(), out.end(), kCanary);
          MOECCL_ASSERT_COMM_OK(moecclTensorAllToAll(in.data(), out.data(), kBlock, moecclUint8, comm, nullptr), comm);
          if (first.empty()) first = out;
          ASSERT_TRUE(out == first);
          MOECCL_ASSERT_COMM_OK(moecclPlanQuery(comm, moecclOpTensorAllToAll, kBlock, moecclUint8, &info), comm);
        };
        for (int i = 0; i < kEnough && (i == 0 || info.trial == 1); ++i) exchange();
        for (int s = 0; s < g.n_groups; ++s) ASSERT_EQ(first[s * kBlock + 5], byte_of(s, g.group, 5));
        EXPECT_NE(info.trial, 1) << "not decided after " << kEnough;
        exchange();
        ends->info[rank] = info;
        size_t n_spans = 0;
        MOECCL_ASSERT_COMM_OK(
            moecclPlanTimeline(comm, moecclOpTensorAllToAll, kBlock, moecclUint8, nullptr, 0, &n_spans), comm);
        EXPECT_GT(n_spans, 0u) << "of " << info.algorithm;
      },
      options());
  for (int r = 1; r < GetParam().n; ++r) {
    EXPECT_STREQ(ends->info[r].algorithm, ends->info[0].algorithm);
    EXPECT_EQ(ends->info[r].hash, ends->info[0].hash);
  }
}

TEST_P(TensorAllToAll, BlocksOfAnySizeGoThereAndBack) {
  run_ranks(
      GetParam().n,
      [&](int, moecclComm_t comm) {
        const moecclTensorGroups_t g = groups_of(comm);
        const auto e = static_cast<size_t>(g.n_groups), mine = static_cast<size_t>(g.group);
        uint32_t drawn = 1;
        for (const size_t most : {size_t{0}, size_t{1}, size_t{50}, size_t{5000}, size_t{200'000}}) {
          std::vector<size_t> counts(e * e), back_counts(e * e);
          for (size_t s = 0; s < e; ++s)
            for (size_t d = 0; d < e; ++d) {
              drawn = drawn * 1664525 + 1013904223;
              counts[s * e + d] = back_counts[d * e + s] = (drawn >> 8) % 4 == 0 ? 0 : (drawn >> 10) % (most + 1);
            }
          set_note("blocks of " + std::to_string(most) + " at most");
          std::vector<unsigned char> in, want;
          for (size_t d = 0; d < e; ++d)
            for (size_t i = 0; i < 2 * counts[mine * e + d]; ++i)
              in.push_back(byte_of(g.group, static_cast<int>(d), i));
          for (size_t s = 0; s < e; ++s)
            for (size_t i = 0; i < 2 * counts[s * e + mine]; ++i)
              want.push_back(byte_of(static_cast<int>(s), g.group, i));
          std::vector<unsigned char> out(want.size() + 64, kCanary), back(in.size() + 64, kCanary);
          MOECCL_ASSERT_COMM_OK(
              moecclTensorAllToAllv(in.data(), out.data(), counts.data(), moecclBfloat16, comm, nullptr), comm);
          want.resize(out.size(), kCanary);
          ASSERT_TRUE(out == want) << "blocks of " << most << " at most";
          MOECCL_ASSERT_COMM_OK(
              moecclTensorAllToAllv(out.data(), back.data(), back_counts.data(), moecclBfloat16, comm, nullptr), comm);
          in.resize(back.size(), kCanary);
          ASSERT_TRUE(back == in) << "blocks of " << most << " at most";
        }
      },
      options());
}

// A layer of a tensor-parallel group: its ranks hold the same tokens, each group has two experts, and expert x
// multiplies by x + 1. Dispatch sends a token once to each group that it chose, combine sends the group's weighted sum
// back, and the backward pass does the same with gradients. All sums of these small whole numbers are exact.
TEST_P(TensorAllToAll, ALayerOfATensorParallelGroupSendsEachTokenOnce) {
  constexpr size_t kTokens = 37, kHidden = 21, kTopK = 2;
  run_ranks(
      GetParam().n,
      [&](int, moecclComm_t comm) {
        const moecclTensorGroups_t g = groups_of(comm);
        const auto e = static_cast<size_t>(g.n_groups), mine = static_cast<size_t>(g.group);
        const auto expert = [&](size_t group, size_t token, size_t k) {
          const size_t first = byte_of(static_cast<int>(group), 1000, token) % (2 * e);
          return k == 0 ? first : (first + 1 + byte_of(static_cast<int>(group), 2000, token) % (2 * e - 1)) % (2 * e);
        };
        const auto weight = [](size_t token, size_t k) { return static_cast<float>(1 + (token + k) % 3); };
        const auto value = [](size_t group, size_t token, size_t i, int what) {
          return static_cast<float>(static_cast<int>(group * 5 + token * 3 + i * 7 + static_cast<size_t>(what)) % 11 -
                                    5);
        };
        // Returns the tokens of group s that chose an expert of group d, in order.
        const auto chose = [&](size_t s, size_t d) {
          std::vector<size_t> tokens;
          for (size_t token = 0; token < kTokens; ++token)
            if (expert(s, token, 0) / 2 == d || expert(s, token, 1) / 2 == d) tokens.push_back(token);
          return tokens;
        };
        std::vector<size_t> counts(e * e), back_counts(e * e);
        uint64_t crossing = 0;
        for (size_t s = 0; s < e; ++s)
          for (size_t d = 0; d < e; ++d) {
            counts[s * e + d] = back_counts[d * e + s] = chose(s, d).size() * kHidden;
            if (s != d) crossing += counts[s * e + d] * sizeof(float);
          }
        std::vector<int32_t> group_of(static_cast<size_t>(GetParam().n));
        MOECCL_ASSERT_COMM_OK(moecclAllGather(&g.group, group_of.data(), 1, moecclInt32, comm, nullptr), comm);
        const auto sent_outside = [&] {
          std::vector<moecclTraffic_t> to(group_of.size());
          EXPECT_EQ(moecclCommTraffic(comm, to.data(), GetParam().n), moecclSuccess);
          uint64_t bytes = 0;
          for (size_t r = 0; r < to.size(); ++r) bytes += group_of[r] == g.group ? 0 : to[r].bytes;
          return bytes;
        };
        // what: 0 is the forward pass, 1 the gradient of the output on its way back.
        for (const int what : {0, 1}) {
          std::vector<float> send, rows, sums, back;
          for (size_t d = 0; d < e; ++d)
            for (const size_t token : chose(mine, d))
              for (size_t i = 0; i < kHidden; ++i) send.push_back(value(mine, token, i, what));
          for (size_t s = 0; s < e; ++s) rows.resize(rows.size() + counts[s * e + mine]);
          sums.resize(rows.size());
          back.resize(send.size());
          const uint64_t before = sent_outside();
          MOECCL_ASSERT_COMM_OK(
              moecclTensorAllToAllv(send.data(), rows.data(), counts.data(), moecclFloat32, comm, nullptr), comm);
          const uint64_t dispatched = sent_outside();
          size_t at = 0;
          for (size_t s = 0; s < e; ++s)
            for (const size_t token : chose(s, mine))
              for (size_t i = 0; i < kHidden; ++i, ++at) {
                ASSERT_EQ(rows[at], value(s, token, i, what)) << "token " << token << " of group " << s;
                for (size_t k = 0; k < kTopK; ++k)
                  if (expert(s, token, k) / 2 == mine)
                    sums[at] += weight(token, k) * static_cast<float>(expert(s, token, k) + 1) * rows[at];
              }
          MOECCL_ASSERT_COMM_OK(
              moecclTensorAllToAllv(sums.data(), back.data(), back_counts.data(), moecclFloat32, comm, nullptr), comm);
          uint64_t all[2] = {dispatched - before, sent_outside() - dispatched};
          std::vector<float> result(kTokens * kHidden);
          at = 0;
          for (size_t d = 0; d < e; ++d)
            for (const size_t token : chose(mine, d))
              for (size_t i = 0; i < kHidden; ++i) result[token * kHidden + i] += back[at++];
          for (size_t token = 0; token < kTokens; ++token)
            for (size_t i = 0; i < kHidden; ++i) {
              float wanted = 0;
              for (size_t k = 0; k < kTopK; ++k)
                wanted +=
                    weight(token, k) * static_cast<float>(expert(mine, token, k) + 1) * value(mine, token, i, what);
              ASSERT_EQ(result[token * kHidden + i], wanted) << "token " << token << (what ? ", backward" : "");
            }
          MOECCL_ASSERT_COMM_OK(moecclAllReduce(all, all, 2, moecclUint64, moecclSum, comm, nullptr), comm);
          EXPECT_EQ(all[0], crossing) << "dispatch";
          EXPECT_EQ(all[1], crossing) << "combine";
        }
      },
      options());
}

TEST(TensorAllToAllv, WhatCannotBeIsNamed) {
  RankOptions options{.mode = RankMode::kThreads};
  options.config.topology = "node:2 gpu:1";
  run_ranks(
      2,
      [](int rank, moecclComm_t comm) {
        char in[16] = {}, out[16] = {};
        size_t counts[4] = {1, 2, 3, 4};
        const auto fails = [&](const void* send, void* recv, const size_t* given, moecclDataType_t type,
                               const char* word) {
          EXPECT_EQ(moecclTensorAllToAllv(send, recv, given, type, comm, nullptr), moecclInvalidArgument);
          EXPECT_NE(std::string(moecclGetLastError(comm)).find(word), std::string::npos) << moecclGetLastError(comm);
        };
        fails(in, out, nullptr, moecclInt8, "counts is NULL");
        fails(nullptr, out, counts, moecclInt8, "send is NULL");
        fails(in, nullptr, counts, moecclInt8, "recv is NULL");
        fails(in, in + 1, counts, moecclInt8, "overlap");
        fails(in, out, counts, static_cast<moecclDataType_t>(99), "type is 99");
        counts[2] = ~size_t{0} / 2;
        fails(in, out, counts, moecclFloat32, "counts[2]");
        // Ranks that pass different counts learn of it.
        counts[2] = static_cast<size_t>(3 + rank);
        EXPECT_EQ(moecclTensorAllToAllv(in, out, counts, moecclInt8, comm, nullptr), moecclMismatch);
        EXPECT_NE(std::string(moecclGetLastError(comm)).find("counts"), std::string::npos) << moecclGetLastError(comm);
      },
      options);
}

TEST(TensorAllToAllReport, TimelineAndPageShowTheLanesOfTheLastRun) {
  RankOptions options{.mode = RankMode::kThreads};
  options.config.topology = "node:2(bw=0.5GB/s) gpu:2(bw=1GB/s)";
  options.config.pace = 1;
  run_ranks(
      4,
      [](int, moecclComm_t comm) {
        constexpr size_t kCount = 400'000;
        const moecclTensorGroups_t g = groups_of(comm);
        EXPECT_EQ(g.n_groups, 2);
        EXPECT_EQ(g.n_ranks, 2);
        const std::vector<unsigned char> in = input_of(g, kCount);
        std::vector<unsigned char> out(in.size());
        MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpTensorAllToAll, "o3"), comm);
        size_t n = 7;
        MOECCL_ASSERT_COMM_OK(moecclPlanTimeline(comm, moecclOpTensorAllToAll, kCount, moecclUint8, nullptr, 0, &n),
                              comm);
        EXPECT_EQ(n, 0u);
        MOECCL_ASSERT_COMM_OK(moecclTensorAllToAll(in.data(), out.data(), kCount, moecclUint8, comm, nullptr), comm);
        moecclPlanInfo_t info{};
        info.size = sizeof(info);
        MOECCL_ASSERT_COMM_OK(moecclPlanQuery(comm, moecclOpTensorAllToAll, kCount, moecclUint8, &info), comm);
        EXPECT_STREQ(info.algorithm, "o3");
        EXPECT_GT(info.measured_us, 0);
        std::vector<moecclLaneSpan_t> spans(3 * info.n_chunks);
        MOECCL_ASSERT_COMM_OK(
            moecclPlanTimeline(comm, moecclOpTensorAllToAll, kCount, moecclUint8, spans.data(), spans.size(), &n),
            comm);
        ASSERT_EQ(n, spans.size());
        // A rank's quarter of the crossing data takes 0.4 ms of the wire, and its half of a node's data 0.4 ms.
        double busy[4] = {};
        for (const moecclLaneSpan_t& s : spans) {
          EXPECT_GE(s.end_us, s.start_us);
          busy[s.lane] += s.end_us - s.start_us;
        }
        EXPECT_GE(busy[moecclLaneInter], 399);
        EXPECT_GE(busy[moecclLaneIntra], 399);
        EXPECT_GT(busy[moecclLaneCopy], 0);
        size_t needed = 0;
        MOECCL_ASSERT_COMM_OK(moecclPlanExplain(comm, moecclOpTensorAllToAll, kCount, moecclUint8, nullptr, 0, &needed),
                              comm);
        std::string page(needed, '\0');
        MOECCL_ASSERT_COMM_OK(
            moecclPlanExplain(comm, moecclOpTensorAllToAll, kCount, moecclUint8, page.data(), page.size(), nullptr),
            comm);
        for (const char* part : {"TensorAllToAll with o3", "baseline", "lean", "lanes of this rank", "inter", "intra"})
          EXPECT_NE(page.find(part), std::string::npos) << part << " is not in\n" << page;
      },
      options);
}

TEST(TensorAllToAllArguments, AreRefusedWithTheirNames) {
  RankOptions options{.mode = RankMode::kThreads};
  options.config.topology = "node:2 gpu:1";
  run_ranks(
      2,
      [](int, moecclComm_t comm) {
        std::vector<float> in(64), out(64);
        const auto refused = [&](const void* send, void* recv, moecclDataType_t type, const char* word) {
          EXPECT_EQ(moecclTensorAllToAll(send, recv, 8, type, comm, nullptr), moecclInvalidArgument);
          EXPECT_NE(std::string(moecclGetLastError(comm)).find(word), std::string::npos) << moecclGetLastError(comm);
        };
        refused(nullptr, out.data(), moecclFloat32, "send is NULL");
        refused(in.data(), nullptr, moecclFloat32, "recv is NULL");
        refused(in.data(), in.data(), moecclFloat32, "overlap");
        refused(in.data(), out.data(), static_cast<moecclDataType_t>(MOECCL_NUM_DATA_TYPES), "type is 12");
        EXPECT_EQ(moecclPlanForce(comm, moecclOpTensorAllToAll, "o7"), moecclInvalidArgument);
        EXPECT_NE(std::string(moecclGetLastError(comm)).find("lean"), std::string::npos) << moecclGetLastError(comm);
        size_t n = 0;
        EXPECT_EQ(moecclPlanTimeline(comm, moecclOpAllReduce, 8, moecclFloat32, nullptr, 0, &n), moecclInvalidArgument);
        EXPECT_EQ(moecclTensorGroups(comm, nullptr), moecclInvalidArgument);
      },
      options);
}

TEST(Priorities, CommunicatorsOnOneLaneBothFinishWithTheRightResults) {
  RankOptions options{.mode = RankMode::kProcesses};
  options.config.topology = "node:2(bw=0.2GB/s) gpu:2(bw=1GB/s)";
  options.config.pace = 1;
  run_ranks(
      4,
      [](int rank, moecclComm_t comm) {
        moecclConfig_t config = MOECCL_CONFIG_INIT;
        config.pace = 1;
        config.priority = moecclPriorityDP;
        moecclComm_t other = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, 0, rank, &other, &config), comm);
        moecclTensorGroups_t g = groups_of(other);
        EXPECT_EQ(g.n_groups, 2) << "the part keeps its places in the topology";
        moecclStream_t stream = nullptr;
        MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
        constexpr size_t kReduce = 1 << 20, kBlock = 100'000;
        std::vector<int32_t> sum(kReduce, rank + 1);
        g = groups_of(comm);
        const std::vector<unsigned char> in = input_of(g, kBlock);
        for (const int priority : {int{moecclPriorityAuto}, int{moecclPriorityDP}, 8}) {
          MOECCL_ASSERT_COMM_OK(moecclCommSetPriority(comm, priority), comm);
          std::fill(sum.begin(), sum.end(), rank + 1);
          MOECCL_ASSERT_COMM_OK(moecclAllReduce(sum.data(), sum.data(), kReduce, moecclInt32, moecclSum, other, stream),
                                other);
          for (int i = 0; i < 3; ++i) {
            std::vector<unsigned char> out(in.size());
            MOECCL_ASSERT_COMM_OK(moecclTensorAllToAll(in.data(), out.data(), kBlock, moecclUint8, comm, nullptr),
                                  comm);
            for (int s = 0; s < g.n_groups; ++s)
              for (size_t b = 0; b < kBlock; b += 97)
                ASSERT_EQ(out[static_cast<size_t>(s) * kBlock + b], byte_of(s, g.group, b));
          }
          // Messages take turns like all other operations.
          std::vector<int32_t> sent(200'000, rank), got(sent.size(), -1);
          MOECCL_ASSERT_OK(moecclGroupStart());
          MOECCL_ASSERT_COMM_OK(moecclSend(sent.data(), sent.size(), moecclInt32, rank ^ 2, comm, nullptr), comm);
          MOECCL_ASSERT_COMM_OK(moecclRecv(got.data(), got.size(), moecclInt32, rank ^ 2, comm, nullptr), comm);
          MOECCL_ASSERT_OK(moecclGroupEnd());
          EXPECT_EQ(got, std::vector<int32_t>(sent.size(), rank ^ 2));
          MOECCL_ASSERT_OK(moecclStreamSynchronize(stream));
          EXPECT_EQ(sum, std::vector<int32_t>(kReduce, 10));
        }
        MOECCL_ASSERT_OK(moecclStreamDestroy(stream));
        MOECCL_ASSERT_OK(moecclCommDestroy(other));
      },
      options);
}

TEST(Priorities, WhatCannotBeIsRefused) {
  run_ranks(2,
            [](int rank, moecclComm_t comm) {
              EXPECT_EQ(moecclCommSetPriority(comm, 9), moecclInvalidArgument);
              EXPECT_NE(std::string(moecclGetLastError(comm)).find("priority is 9"), std::string::npos);
              moecclConfig_t config = MOECCL_CONFIG_INIT;
              config.pace = 1;
              moecclComm_t part = nullptr;
              EXPECT_EQ(moecclCommSplit(comm, 0, rank, &part, &config), moecclInvalidArgument);
              EXPECT_NE(std::string(moecclGetLastError(comm)).find("not paced"), std::string::npos)
                  << moecclGetLastError(comm);
              config = MOECCL_CONFIG_INIT;
              config.priority = -1;
              EXPECT_EQ(moecclCommSplit(comm, 0, rank, &part, &config), moecclInvalidArgument);
            },
            {.mode = RankMode::kThreads});
}

}  // namespace
}  // namespace moeccl::testing
