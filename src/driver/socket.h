// SPDX-License-Identifier: Apache-2.0
// Sockets: UNIX and TCP; every wait has a deadline; no SIGPIPE; EINTR is survived. All
// sockets made here are non-blocking and close-on-exec, and no child of fork() keeps those that listen or connect (see
// children.h). Codes: Timeout when the deadline passed, RemoteError when the
// peer closed or reset the connection or when nobody listens, SystemError otherwise.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/fd.h"
#include "src/base/status.h"

namespace moeccl::driver {

// Where to listen or to connect. Plain data; prints as "unix:@name", "unix:/path", "10.0.0.1:2950", "[fe80::1]:2950".
struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t length = 0;

  bool is_unix() const { return storage.ss_family == AF_UNIX; }
  bool is_any() const;       // 0.0.0.0 or ::
  bool is_loopback() const;  // 127/8 or ::1
  uint16_t port() const;     // 0 for UNIX sockets
  void set_port(uint16_t port);
  std::string str() const;
  // The abstract name, the 4 bytes of an IPv4 or the 16 of an IPv6 address: what ids and messages carry.
  std::span<const std::byte> host_bytes() const;
};
// From 4 or 16 bytes; InvalidArgument for any other number.
Result<SocketAddress> ip_address(std::span<const std::byte> bytes, uint16_t port);
// An abstract name (no file, gone with its last socket) of at most 100 bytes.
SocketAddress unix_address(std::string_view name);
// A socket's file, of at most kMaxSocketPath bytes.
inline constexpr size_t kMaxSocketPath = 107;
SocketAddress unix_file_address(std::string_view path);
// "127.0.0.1", "127.0.0.1:80", "::1", "[::1]:80". No names are looked up.
Result<SocketAddress> parse_ip_address(const std::string& text);
// Numbers as above, else the name service (may block for as long as that does).
Result<SocketAddress> resolve_host(const std::string& host, uint16_t port);
// Whether an interface of this host has this IP address.
bool is_local_address(const SocketAddress& address);
// The address of the interface from which packets to `peer` leave; sends nothing.
Result<SocketAddress> source_address_towards(const SocketAddress& peer);

// Refuses 0.0.0.0 and ::. Port 0 takes a free one; local_address() tells which. InvalidUsage: somebody else is there.
Result<Fd> listen_at(const SocketAddress& address, int backlog = 4096);
Result<SocketAddress> local_address(int fd);
Result<SocketAddress> peer_address(int fd);
// One attempt; waits for its end until the deadline. `from`: the own address to connect from, its port is not used;
// null: as the route says. `congestion`: as set_congestion_control(), before the connection is there; empty: the
// system's. `watch`: a descriptor whose readability ends the wait as RemoteError; -1: none.
Result<Fd> connect_to(const SocketAddress& address, Deadline deadline, const SocketAddress* from = nullptr,
                      const std::string& congestion = {}, int watch = -1);
// A waiting connection, or an empty Fd when there is none.
Result<Fd> accept_now(int listener);

// Blocking transfers. `watch` is a further descriptor (a pidfd of the peer) whose readability ends the wait as if the
// peer had closed, after what has already arrived was taken; -1: none.
Status send_all(int fd, std::span<const std::byte> bytes, Deadline deadline, int watch = -1);
Status recv_exact(int fd, std::span<std::byte> bytes, Deadline deadline, int watch = -1);

// Single steps for poll loops. n == 0 with would_block: nothing can move now. n == 0 without: the peer closed.
struct IoStep {
  size_t n = 0;
  bool would_block = false;
  // With would_block: too many descriptors are under way; no event tells when that ends, so try again after a moment.
  bool fds_in_flight = false;
};
Result<IoStep> send_now(int fd, std::span<const std::byte> bytes);
Result<IoStep> recv_now(int fd, std::span<std::byte> bytes);
// The same for two pieces of memory, one after the other, in one system call. Empty ones are left out.
Result<IoStep> send_two_now(int fd, std::span<const std::byte> first, std::span<const std::byte> second);
Result<IoStep> recv_two_now(int fd, std::span<std::byte> first, std::span<std::byte> second);

// File descriptors over a UNIX socket, with at least one byte of data; at most kMaxFdsPerMessage at once. They are
// received close-on-exec. recv_fds_now appends to `fds`; when the process may not open more, it fails and says so.
inline constexpr size_t kMaxFdsPerMessage = 16;
Result<IoStep> send_fds_now(int fd, std::span<const std::byte> bytes, std::span<const int> fds);
Result<IoStep> recv_fds_now(int fd, std::span<std::byte> bytes, std::vector<Fd>* fds);
Status send_fds(int fd, std::span<const std::byte> bytes, std::span<const int> fds, Deadline deadline);
// Exactly bytes.size() bytes and whatever descriptors came with them.
Status recv_fds(int fd, std::span<std::byte> bytes, std::vector<Fd>* fds, Deadline deadline, int watch = -1);

// SO_PEERCRED of a UNIX socket: who connected (at the listener) or who listens (at the connector). pid is 0 when the
// peer is in a pid namespace that this process does not see.
struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
};
Result<PeerCredentials> peer_credentials(int fd);

Status set_no_delay(int fd);
// TCP's congestion control by the kernel's name; Unsupported: the kernel has no such one, or not for this user. A
// listener's is that of the connections it accepts. A connection that began with one that paces (bbr) is paced whatever
// it is given later.
Status set_congestion_control(int fd, const std::string& name);
Result<std::string> congestion_control(int fd);
// The kernel spreads packets over the round trip instead of sending bursts: a timer for each, so only for slow lines.
void pace(int fd);
// Least microseconds that a packet of a connected TCP socket and its acknowledgement have taken; 0 where the kernel
// does not tell.
int64_t least_round_trip_us(int fd);
// A connected TCP socket gives up when the peer's host has acknowledged nothing for `timeout_ms`, whether data is under
// way (TCP_USER_TIMEOUT) or not (keep-alive probes): reads and writes then fail as RemoteError.
Status set_lost_after(int fd, int64_t timeout_ms);
// Microseconds that packets of a connected TCP socket wait in queues on their way, by the kernel's smoothed figure; 0
// where it does not tell.
int64_t queue_delay_us(int fd);
// For how long a connected TCP socket has had no acknowledgement while it waited for one, of data or of a keep-alive
// probe; 0: it waits for none, or the kernel does not tell.
int64_t unacknowledged_ms(int fd);
// Nothing more will be sent: the other side reads to an end.
void end_of_stream(int fd);
// Bytes that a connected TCP socket was given and the other side's kernel has not acknowledged.
int64_t unacknowledged_bytes(int fd);
// Waits until fd is readable (events POLLIN) or writable (POLLOUT) or in error; Timeout otherwise. True: `watch` fired
// too.
Result<bool> wait_fd(int fd, short events, Deadline deadline, int watch = -1);

}  // namespace moeccl::driver
