// What the kernel tells of a connection. Apart from socket.cc, because linux/tcp.h, which knows more fields, and
// netinet/tcp.h exclude each other.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>

#include "src/driver/socket.h"

namespace moeccl::driver {
namespace {

bool read_info(int fd, tcp_info* info, socklen_t* length) {
  *info = {};
  *length = sizeof(*info);
  return ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, length) == 0;
}

}  // namespace

int64_t queue_delay_us(int fd) {
  tcp_info info;
  socklen_t length = 0;
  if (!read_info(fd, &info, &length)) return 0;
  // An old kernel gives fewer fields.
  if (length < offsetof(tcp_info, tcpi_min_rtt) + sizeof(info.tcpi_min_rtt) || info.tcpi_rtt < info.tcpi_min_rtt) {
    return 0;
  }
  return info.tcpi_rtt - info.tcpi_min_rtt;
}

int64_t unacknowledged_ms(int fd) {
  tcp_info info;
  socklen_t length = 0;
  if (!read_info(fd, &info, &length) || (info.tcpi_unacked == 0 && info.tcpi_probes == 0)) return 0;
  return std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv);
}

}  // namespace moeccl::driver
