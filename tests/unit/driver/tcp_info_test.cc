// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "src/driver/socket.h"
#include "src/driver/thread.h"
#include "tests/support/namespaces.h"

namespace moeccl::driver {
namespace {

// Kernels before 5.3 take 4 bytes of the limit, later ones 8.
TEST(TcpPacing, HasALimitForEveryKernel) {
  const Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  pace(socket.get());
  uint64_t limit = 0;
  socklen_t bytes = sizeof(limit);
  ASSERT_EQ(::getsockopt(socket.get(), SOL_SOCKET, SO_MAX_PACING_RATE, &limit, &bytes), 0);
  if (bytes != sizeof(limit)) GTEST_SKIP() << "this kernel's limit has " << bytes << " bytes";
  const auto low = static_cast<uint32_t>(limit);
  EXPECT_GT(low, 3'000'000'000u) << "bytes per second: no line that needs pacing is as fast";
  EXPECT_NE(low, UINT32_MAX) << "no limit";
  EXPECT_GT(limit, uint64_t{1} << 40);
}

// A connection of this process to itself, over a network that loses large packets. Returns the exit code of the child
// that calls it: 2 where such a network cannot be made.
int lose_what_is_large() {
  constexpr const char* kLoses =
      "ip link set lo up && nft add table inet wall && "
      "nft 'add chain inet wall in { type filter hook input priority 0; }' && "
      "nft add rule inet wall in meta length gt 1000 drop";
  if (unshare(CLONE_NEWNET) != 0 || system(kLoses) != 0) return 2;
  const Result<Fd> listener = listen_at(*parse_ip_address("127.0.0.1"));
  if (!listener.ok()) return 3;
  const Result<Fd> a = connect_to(*local_address(listener->get()), Deadline::after_ms(1000));
  const Result<Fd> b = accept_now(listener->get());
  if (!a.ok() || !b.ok() || !set_no_delay(b->get()).ok()) return 4;
  const std::vector<std::byte> large(100'000);
  const std::array<std::byte, 8> small = {};
  if (!send_now(a->get(), large).ok()) return 5;
  for (int i = 0; i < 40; ++i) {
    if (!send_now(b->get(), small).ok()) return 6;
    sleep_ns(50'000'000);
  }
  return unacknowledged_ms(a->get()) >= 500 && unacknowledged_ms(b->get()) < 500 ? 0 : 7;
}

TEST(TcpUnacknowledged, IsWhatIsLostEachTimeThoughSmallPacketsPass) {
  if (!testing::may_unshare(CLONE_NEWNET)) GTEST_SKIP() << "this user may not make a network";
  const pid_t child = fork();
  if (child == 0) _exit(lose_what_is_large());
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 2) GTEST_SKIP() << "nft cannot drop packets here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace moeccl::driver
