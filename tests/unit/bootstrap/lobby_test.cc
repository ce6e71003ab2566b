// SPDX-License-Identifier: Apache-2.0
// Which stranger makes room when a door is full. Time is an argument.
#include "src/bootstrap/lobby.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

namespace moeccl::bootstrap {
namespace {

constexpr int64_t kMs = 1'000'000;

TEST(Lobby, TheOldestSilentOneMakesRoom) {
  Lobby lobby;
  lobby.enter(7, 0);
  lobby.enter(8, 1 * kMs);
  lobby.enter(9, 2 * kMs);
  lobby.said_hello(7);
  EXPECT_EQ(lobby.expendable(10 * kMs), 0u) << "all are young";
  EXPECT_EQ(lobby.expendable(30 * kMs), 8u);
  lobby.leave(8);
  lobby.leave(9);
  EXPECT_EQ(lobby.expendable(30 * kMs), 0u) << "half the way takes longer";
  EXPECT_EQ(lobby.expendable(300 * kMs), 7u);
}

TEST(Lobby, IsFullAtAFixedNumberAndEmptiesWithTime) {
  Lobby lobby;
  EXPECT_EQ(lobby.next_overdue_ns(), INT64_MAX);
  Lobby::Id id = 1;
  for (; !lobby.full(); ++id) lobby.enter(id, static_cast<int64_t>(id) * kMs);
  EXPECT_EQ(lobby.size(), 128u);
  EXPECT_EQ(lobby.overdue(2000 * kMs), 0u);
  EXPECT_EQ(lobby.next_overdue_ns(), 2001 * kMs);
  EXPECT_EQ(lobby.overdue(2001 * kMs), 1u);
  lobby.leave(1);
  EXPECT_EQ(lobby.overdue(2001 * kMs), 0u);
  EXPECT_FALSE(lobby.full());
}

TEST(Lobby, FailuresToAcceptEndAfterASecondWithTheReason) {
  Lobby lobby;
  const Status why = system_error("accept", EMFILE);
  EXPECT_TRUE(lobby.failed_to_accept(why, 5 * kMs).ok());
  EXPECT_TRUE(lobby.failed_to_accept(why, 900 * kMs).ok());
  lobby.has_accepted();
  EXPECT_TRUE(lobby.failed_to_accept(why, 1500 * kMs).ok());
  const Status over = lobby.failed_to_accept(why, 2600 * kMs);
  EXPECT_EQ(over.code(), moecclSystemError);
  EXPECT_NE(over.message().find("ulimit -n"), std::string::npos) << over.message();
}

TEST(Lobby, KnowsTheLastDescriptorsByTheirNumbers) {
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  for (const rlim_t limit : {rlim_t{64}, rlim_t{1024}}) {
    const rlimit few = {limit, before.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    EXPECT_FALSE(Lobby::few_left(static_cast<int>(limit) / 2));
    EXPECT_TRUE(Lobby::few_left(static_cast<int>(limit) - 2));
  }
  ::setrlimit(RLIMIT_NOFILE, &before);
}

}  // namespace
}  // namespace moeccl::bootstrap
