// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstdint>

#include "src/driver/socket.h"

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

}  // namespace
}  // namespace moeccl::driver
