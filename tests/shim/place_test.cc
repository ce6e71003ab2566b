// SPDX-License-Identifier: Apache-2.0
// Where ranks under the shim meet: at NCCL_COMM_ID.
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <string>

#include "tests/shim/nccl_ranks.h"

namespace moeccl::testing {
namespace {

// Every process makes the id itself. Rank 1 comes first, and all meet twice.
void meet_by_place(const std::string& place) {
  Board* board = new_board();
  in_processes(3, [&](int rank) {
    setenv("NCCL_COMM_ID", place.c_str(), 1);
    if (rank != 1) usleep(300'000);
    ncclComm_t comms[2] = {};
    for (ncclComm_t& comm : comms) {
      ncclUniqueId id;
      ASSERT_NCCL(ncclGetUniqueId(&id));
      ASSERT_NCCL(ncclCommInitRank(&comm, 3, id, rank));
      int32_t sum = 1 << rank;
      ASSERT_NCCL(ncclAllReduce(&sum, &sum, 1, ncclInt32, ncclSum, comm, nullptr));
      EXPECT_EQ(sum, 7);
    }
    ncclComm_t rest = nullptr;
    int excluded = 1;
    if (rank != 1) {
      ASSERT_NCCL(ncclCommShrink(comms[0], &excluded, 1, &rest, nullptr, NCCL_SHRINK_DEFAULT));
      EXPECT_NCCL(ncclCommDestroy(rest));
    }
    board->counters[0].fetch_add(1);
    while (board->counters[0].load() < 3) usleep(1000);
    for (ncclComm_t comm : comms) EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

// Returns an address of this host that is not loopback; empty if it has none.
std::string own_address() {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "";
  std::string found;
  for (const ifaddrs* i = all; i != nullptr && found.empty(); i = i->ifa_next) {
    char text[NI_MAXHOST];
    if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != AF_INET) continue;
    if (getnameinfo(i->ifa_addr, sizeof(sockaddr_in), text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) continue;
    if (std::strncmp(text, "127.", 4) != 0) found = text;
  }
  freeifaddrs(all);
  return found;
}

TEST(ShimPlace, RanksMeetAtNcclCommId) { meet_by_place("localhost:" + std::to_string(20000 + getpid() % 10000)); }

TEST(ShimPlace, RanksOfSeveralHostsMeetAtNcclCommIdWithASecret) {
  const std::string address = own_address();
  if (address.empty()) GTEST_SKIP() << "this host has only loopback addresses";
  const std::string place = address + ":" + std::to_string(20000 + getpid() % 10000);
  in_processes(1, [&](int) {
    setenv("NCCL_COMM_ID", place.c_str(), 1);
    ncclUniqueId id;
    EXPECT_EQ(ncclGetUniqueId(&id), ncclInvalidUsage);
    const std::string why = ncclGetLastError(nullptr);
    for (const char* part : {"NCCL_COMM_ID", place.c_str(), "MOECCL_SECRET"})
      EXPECT_NE(why.find(part), std::string::npos) << why;
  });
  setenv("MOECCL_SECRET", "sixteen characters or more", 1);
  meet_by_place(place);
  unsetenv("MOECCL_SECRET");
}

// All ranks but 0 know only the place, at which several communicators meet.
TEST(ShimPlace, RanksOfOneProcessMeetAtNcclCommId) {
  std::vector<std::string> hosts = {"localhost"};
  if (const std::string address = own_address(); !address.empty()) hosts.push_back(address);
  for (const std::string& host : hosts) {
    in_processes(1, [&](int) {
      setenv("NCCL_COMM_ID", (host + ":" + std::to_string(20000 + getpid() % 10000)).c_str(), 1);
      setenv("MOECCL_SECRET", "sixteen characters or more", 1);
      for (int round = 0; round < 2; ++round) {
        ncclUniqueId id;
        ncclComm_t comms[3] = {};
        ASSERT_NCCL(ncclGetUniqueId(&id));
        ASSERT_NCCL(ncclGroupStart());
        for (int r = 0; r < 3; ++r) ASSERT_NCCL(ncclCommInitRank(&comms[r], 3, id, r));
        ASSERT_NCCL(ncclGroupEnd());
        float values[3] = {1, 2, 4};
        ASSERT_NCCL(ncclGroupStart());
        for (int r = 0; r < 3; ++r)
          ASSERT_NCCL(ncclAllReduce(&values[r], &values[r], 1, ncclFloat32, ncclSum, comms[r], nullptr));
        ASSERT_NCCL(ncclGroupEnd());
        for (const float v : values) EXPECT_EQ(v, 7);
        for (const ncclComm_t comm : comms) EXPECT_NCCL(ncclCommDestroy(comm));
      }
    });
  }
}

TEST(ShimPlace, AnNcclCommIdThatIsNoPlaceIsNamed) {
  in_processes(1, [](int) {
    setenv("NCCL_COMM_ID", "here", 1);
    ncclUniqueId id;
    EXPECT_EQ(ncclGetUniqueId(&id), ncclInvalidArgument);
    const std::string why = ncclGetLastError(nullptr);
    EXPECT_NE(why.find("NCCL_COMM_ID"), std::string::npos) << why;
    EXPECT_NE(why.find("host:port"), std::string::npos) << why;
  });
}

}  // namespace
}  // namespace moeccl::testing
