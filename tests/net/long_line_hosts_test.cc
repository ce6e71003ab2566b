// SPDX-License-Identifier: Apache-2.0
// Staging of communicators whose hosts are far apart, by the figures of a topology or a profile: which lines count, and
// that communicators which come from others keep them.
#include <gtest/gtest.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <string>

#include "tests/support/ranks_on_hosts.h"
#include "tests/support/variables.h"

namespace moeccl::testing {
namespace {

constexpr size_t kAtLeast =
    size_t{64} << 20;  // what a communicator holds on kFar; with the usual staging, half as much
constexpr const char* kFar = "dc:2(bw=1.25GB/s,lat=4ms) gpu:2";

size_t memory_of(moecclComm_t comm) {
  size_t bytes = 0;
  EXPECT_EQ(moecclCommMemoryUsage(comm, &bytes), moecclSuccess);
  return bytes;
}

// Runs 4 ranks on two hosts by name, which need no rights.
void on_two_hosts(const char* topology, const std::function<void(int rank, moecclComm_t comm)>& body) {
  MAKE_HOSTS(hosts, .weights = {2, 2}, .named = true);
  RankOptions options = on(*hosts);
  options.config.topology = topology;
  run_ranks(4, body, options);
}

TEST(LongLineBetweenHosts, PartsAndShrunkCommunicatorsKeepIt) {
  on_two_hosts(kFar, [](int rank, moecclComm_t comm) {
    EXPECT_GT(memory_of(comm), kAtLeast);
    struct Part {
      int color;
      bool far;
    };
    for (const Part& p : {Part{0, true}, Part{rank % 2, true}, Part{rank / 2, false}}) {
      moecclComm_t part = nullptr, again = nullptr;
      MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, p.color, rank, &part, nullptr), comm);
      MOECCL_ASSERT_COMM_OK(moecclCommSplit(part, 0, rank, &again, nullptr), part);
      for (moecclComm_t one : {part, again}) {
        EXPECT_EQ(memory_of(one) > kAtLeast, p.far) << memory_of(one);
        EXPECT_EQ(explain(one).find("dc") != std::string::npos, p.far) << explain(one);
      }
      MOECCL_EXPECT_OK(moecclCommDestroy(again));
      MOECCL_EXPECT_OK(moecclCommDestroy(part));
    }
    const int lost = 3;
    if (rank == lost) return;
    moecclComm_t rest = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclCommShrink(comm, &lost, 1, &rest, nullptr, MOECCL_SHRINK_DEFAULT), comm);
    EXPECT_GT(memory_of(rest), kAtLeast);
    EXPECT_NE(explain(rest).find("dc"), std::string::npos) << explain(rest);
    MOECCL_EXPECT_OK(moecclCommDestroy(rest));
  });
}

TEST(LongLineBetweenHosts, APartMayHaveATopologyOfItsOwn) {
  on_two_hosts(kFar, [](int rank, moecclComm_t comm) {
    moecclConfig_t config = MOECCL_CONFIG_INIT;
    config.topology = "node:2(bw=50GB/s,lat=5us) gpu:2";
    moecclComm_t part = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, 0, rank, &part, &config), comm);
    EXPECT_LT(memory_of(part), kAtLeast);
    EXPECT_EQ(explain(part).find("dc"), std::string::npos) << explain(part);
    MOECCL_EXPECT_OK(moecclCommDestroy(part));
  });
}

TEST(LongLineBetweenHosts, LinksWithinAHostDoNotCount) {
  const std::string path = ::testing::TempDir() + "moeccl_line_" + std::to_string(getpid()) + ".json";
  std::ofstream(path) << R"({"moeccl_profile": 1, "levels": [{"name": "node", "alpha_ns": 5000, "bytes_per_ns": 1},
                            {"name": "gpu", "alpha_ns": 204000, "bytes_per_ns": 30.5}]})";
  const auto is_usual = [](int, moecclComm_t comm) { EXPECT_LT(memory_of(comm), kAtLeast); };
  on_two_hosts("node:2(bw=50GB/s,lat=5us) gpu:2(bw=450GB/s,lat=4us)", is_usual);
  const Variables profile{{"MOECCL_PROFILE", path}};
  on_two_hosts("node:2 gpu:2", is_usual);
  RankOptions paced;
  paced.config.topology = "node:2(bw=1GB/s,lat=5us) gpu:2";
  paced.config.pace = 1;
  run_ranks(4, is_usual, paced);
}

TEST(LongLineBetweenHosts, ThatAProfileMeasuredCounts) {
  const std::string path = ::testing::TempDir() + "moeccl_line_" + std::to_string(getpid()) + ".json";
  std::ofstream(path) << R"({"moeccl_profile": 1, "levels": [{"name": "node", "alpha_ns": 4e6, "bytes_per_ns": 1.25},
                            {"name": "gpu"}]})";
  const Variables profile{{"MOECCL_PROFILE", path}};
  on_two_hosts("node:2 gpu:2", [](int rank, moecclComm_t comm) {
    EXPECT_GT(memory_of(comm), kAtLeast);
    moecclComm_t part = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, rank % 2, rank, &part, nullptr), comm);
    EXPECT_GT(memory_of(part), kAtLeast) << "the parent's profile holds for its parts";
    MOECCL_EXPECT_OK(moecclCommDestroy(part));
  });
}

// A file that changes between two readings would give the line of one profile and the plans of another.
TEST(LongLineBetweenHosts, EachRankReadsTheProfileOnce) {
  const std::string path = ::testing::TempDir() + "moeccl_line_" + std::to_string(getpid()) + ".json";
  std::ofstream(path)
      << R"({"moeccl_profile": 1, "levels": [{"name": "node", "alpha_ns": 4e6, "bytes_per_ns": 1.25}]})";
  const Variables profile{{"MOECCL_PROFILE", path}};
  const int watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
  ASSERT_GE(watch, 0);
  // Ends of readings are told apart by the readings between them.
  ASSERT_GE(inotify_add_watch(watch, path.c_str(), IN_ACCESS | IN_CLOSE_NOWRITE), 0);
  MAKE_HOSTS(hosts, .weights = {1, 1}, .named = true);
  RankOptions options = on(*hosts);
  options.config.topology = "node:2";
  run_ranks(
      2, [](int, moecclComm_t comm) { EXPECT_GT(memory_of(comm), size_t{1} << 20); }, options);
  alignas(inotify_event) char events[4096];
  const ssize_t bytes = read(watch, events, sizeof(events));
  ASSERT_GT(bytes, 0);
  int readings = 0;
  for (ssize_t at = 0; at < bytes;) {
    const auto* event = reinterpret_cast<const inotify_event*>(events + at);
    readings += (event->mask & IN_CLOSE_NOWRITE) != 0 ? 1 : 0;
    at += static_cast<ssize_t>(sizeof(inotify_event) + event->len);
  }
  EXPECT_GE(readings, 1);
  EXPECT_LE(readings, 2);
  close(watch);
}

}  // namespace
}  // namespace moeccl::testing
