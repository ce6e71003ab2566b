// SPDX-License-Identifier: Apache-2.0
// The ranks of one host meet, and what they find out about other hosts.
#include "src/world/hosts.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <thread>

#include "src/bootstrap/handshake.h"
#include "tests/support/namespaces.h"
#include "tests/support/timing.h"

namespace moeccl::comm {
namespace {

// Threads that have met over TCP, as ranks of several hosts do.
void meet(uint32_t n, const std::function<void(bootstrap::Session&, uint32_t rank, Deadline)>& body) {
  const Deadline deadline = Deadline::after_ms(tests::patient_ms(10'000));
  bootstrap::RootOptions options;
  options.socket_addr = "127.0.0.1";
  const auto root = std::move(*bootstrap::Root::start(options));
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < n; ++rank) {
    ranks.emplace_back([&, rank] {
      auto session = bootstrap::Session::join(root->id(), static_cast<int>(rank), static_cast<int>(n), deadline);
      ASSERT_TRUE(session.ok()) << session.status().message();
      body(**session, rank, deadline);
    });
  }
  for (std::thread& r : ranks) r.join();
}

constexpr int64_t kHourMs = 3'600'000;

// The first rank woke up late, the fourth's clock is wrong, the last one's differs by less than counts.
TEST(Hosts, KnowWhoseClockIsAhead) {
  const HostOfRank all[] = {{7, "a"}, {8, "b"}, {7, "a"}, {9, "c"}, {10, "d"}};
  constexpr int64_t kMs = 1'000'000, kNow = 1'800'000'000'000 * kMs;
  Hosts hosts(all);
  const int64_t met_ns[] = {kNow + 9000 * kMs, kNow + 400 * kMs, kNow, kNow - 5 * kHourMs * kMs, kNow + 999 * kMs};
  hosts.compare_clocks(met_ns);
  EXPECT_EQ(hosts.json(),
            "[{\"host_id\":\"0000000000000007\",\"name\":\"a\",\"ranks\":[[0,0],[2,2]]},"
            "{\"host_id\":\"0000000000000008\",\"name\":\"b\",\"ranks\":[[1,1]]},"
            "{\"host_id\":\"0000000000000009\",\"name\":\"c\",\"ranks\":[[3,3]],\"clock_ahead_ms\":-18000000},"
            "{\"host_id\":\"000000000000000a\",\"name\":\"d\",\"ranks\":[[4,4]]}]");
}

// A rank in another network namespace reaches no UNIX socket of this one, as on another machine.
TEST(Hosts, ThatAreClonesOfOneMachineAreToldApartByTheUser) {
  if (!moeccl::testing::may_unshare(CLONE_NEWNET)) GTEST_SKIP() << "this user may not make network namespaces";
  const HostOfRank all[] = {{7, "a"}, {7, "a"}};
  const tests::Stopwatch watch;
  Status status[2];
  meet(2, [&](bootstrap::Session& session, uint32_t rank, Deadline deadline) {
    ASSERT_TRUE(rank == 0 || unshare(CLONE_NEWNET) == 0) << strerror(errno);
    Hosts hosts(all);
    const auto joined = HostSession::join(session, hosts, bootstrap::Key{}, deadline);
    status[rank] = joined.status();
    if (!joined.ok()) session.abandon(joined.status());
  });
  EXPECT_LT(watch.fair_ms(), tests::patient_ms(6000));
  for (const Status& s : status) {
    EXPECT_EQ(s.code(), moecclRemoteError);
    EXPECT_NE(std::string(s.message()).find("rank 1 cannot reach rank 0, though both have the host name a"),
              std::string::npos)
        << s.message();
    EXPECT_NE(std::string(s.message()).find("MOECCL_HOST_ID"), std::string::npos) << s.message();
  }
}

}  // namespace
}  // namespace moeccl::comm
