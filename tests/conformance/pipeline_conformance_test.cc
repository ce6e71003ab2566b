// SPDX-License-Identifier: Apache-2.0
// moecclTensorAllToAll: every algorithm gives the reference's bits, on even and uneven nodes, threads and processes,
// odd sizes and none; there and back is the identity; what can be refused is refused with a sentence.
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
              ASSERT_EQ(memcmp(back.data(), in.data(), in.size()), 0) << (name == nullptr ? "auto" : name);
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

// Plans whose predictions lie close are tried in the first operations: the bits are the same all the while, all ranks
// end with one plan, and report and timeline are those of what runs.
TEST_P(TensorAllToAll, TrialsEndWithOnePlanOnAllRanks) {
  if (GetParam().n > 8) GTEST_SKIP() << "fewer ranks show it";
  constexpr size_t kBlock = 600 << 10;  // of two blocks or more: tried in few operations
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
        // A rank's quarter of what crosses takes 0.4 ms of the wire, its half of a node's data 0.4 ms.
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
          // Messages take turns like all others.
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
