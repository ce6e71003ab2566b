// SPDX-License-Identifier: Apache-2.0
// The kernel's statistics on a connection. This is separate from socket.cc because linux/tcp.h, which has more
// fields, and netinet/tcp.h cannot be included together.
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "src/driver/socket.h"

namespace moeccl::driver {
namespace {

bool read_info(int fd, tcp_info* info, socklen_t* length) {
  *info = {};
  *length = sizeof(*info);
  return ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, length) == 0;
}

// An old kernel returns fewer fields.
bool has_min_rtt(socklen_t length) {
  return length >= offsetof(tcp_info, tcpi_min_rtt) + sizeof(tcp_info::tcpi_min_rtt);
}

}  // namespace

int64_t queue_delay_us(int fd) {
  tcp_info info;
  socklen_t length = 0;
  if (!read_info(fd, &info, &length) || !has_min_rtt(length) || info.tcpi_rtt < info.tcpi_min_rtt) return 0;
  return info.tcpi_rtt - info.tcpi_min_rtt;
}

int64_t least_round_trip_us(int fd) {
  tcp_info info;
  socklen_t length = 0;
  // ~0 means that nothing has been acknowledged yet.
  if (!read_info(fd, &info, &length) || !has_min_rtt(length) || info.tcpi_min_rtt == ~0u) return 0;
  return info.tcpi_min_rtt;
}

int64_t unacknowledged_ms(int fd) {
  tcp_info info;
  socklen_t length = 0;
  if (!read_info(fd, &info, &length) || (info.tcpi_unacked == 0 && info.tcpi_probes == 0)) return 0;
  // Other packets may come while what was sent is lost each time. The time-out doubles with each try.
  const int64_t rto_ms = info.tcpi_rto / 1000;
  const int64_t lost_ms = info.tcpi_retransmits == 0 ? 0 : rto_ms - (rto_ms >> std::min<int>(info.tcpi_backoff, 30));
  return std::max<int64_t>(lost_ms, std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv));
}

void pace(int fd) {
  // Any limit turns on pacing at the rate of the congestion control. No line reaches this one, nor its lower half,
  // which is all that older kernels read (0 would stop the connection there, and ~0 is no limit).
  const uint64_t bytes_per_s = uint64_t{1} << 50 | (UINT32_MAX - 1);
  (void)::setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &bytes_per_s, sizeof(bytes_per_s));
}

void end_of_stream(int fd) { (void)::shutdown(fd, SHUT_WR); }

int64_t unacknowledged_bytes(int fd) {
  int bytes = 0;
  return ::ioctl(fd, SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

}  // namespace moeccl::driver
