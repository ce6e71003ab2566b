// SPDX-License-Identifier: Apache-2.0
// UNIX and TCP sockets. Every wait has a deadline, there is no SIGPIPE, and EINTR is handled. All sockets created here
// are non-blocking and close-on-exec, and no child of fork() keeps those that listen or connect (see children.h).
// Codes: Timeout when the deadline has passed, RemoteError when the peer closed or reset the connection or when there
// is no listener, SystemError otherwise.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "src/base/clock.h"
#include "src/base/fd.h"
#include "src/base/status.h"

namespace moeccl::driver {

// What ends a wait before its time. `fd` is a further descriptor, such as a pidfd of the peer, or -1 for none: when it
// becomes readable, the wait ends as if the peer had closed the connection, but only after the data that has already
// arrived was taken. `cancelled`, which may be empty, is asked every 20 ms; if it fails, so does the call.
struct Watch {
  Watch(int descriptor = -1, std::function<Status()> ask = {}) : fd(descriptor), cancelled(std::move(ask)) {}
  int fd;
  std::function<Status()> cancelled;
};

// An address to listen at or to connect to. Plain data; prints as "unix:@name", "unix:/path", "10.0.0.1:2950",
// "[fe80::1]:2950".
struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t length = 0;

  bool is_unix() const { return storage.ss_family == AF_UNIX; }
  bool is_any() const;         // 0.0.0.0 or ::
  bool is_loopback() const;    // 127/8 or ::1
  bool is_link_local() const;  // fe80::/10, which str() prints, and ids carry, without the interface that it needs
  uint16_t port() const;       // 0 for UNIX sockets
  void set_port(uint16_t port);
  std::string str() const;
  std::string host() const;  // str() without the port
  // Returns the abstract name, the 4 bytes of an IPv4 address or the 16 bytes of an IPv6 address, as ids and messages
  // carry them.
  std::span<const std::byte> host_bytes() const;
};
// Makes an address from 4 or 16 bytes. Returns InvalidArgument for any other number.
Result<SocketAddress> ip_address(std::span<const std::byte> bytes, uint16_t port);
// Makes an address from an abstract name of at most 100 bytes. It has no file and is gone with its last socket.
SocketAddress unix_address(std::string_view name);
// Makes the address of a socket file, whose path may have at most kMaxSocketPath bytes.
inline constexpr size_t kMaxSocketPath = 107;
SocketAddress unix_file_address(std::string_view path);
// Parses "127.0.0.1", "127.0.0.1:80", "::1" or "[::1]:80". Looks up no names.
Result<SocketAddress> parse_ip_address(const std::string& text);
// Accepts "127.0.0.1", "::1" and "[::1]", and otherwise asks the name service, which takes as long as it likes: a
// thread of its own asks, which stays until there is an answer. Returns all addresses, in its order of preference and
// at least one. Timeout: there was no answer until the deadline. SystemError: the answer is that there is no such host.
Result<std::vector<SocketAddress>> resolve_all(const std::string& host, uint16_t port, Deadline deadline);
// Returns true if an interface of this host has this IP address.
bool is_local_address(const SocketAddress& address);
// Returns the address of the interface through which packets to `peer` leave. Sends nothing.
Result<SocketAddress> source_address_towards(const SocketAddress& peer);

// Binds a new socket. With kYes, SO_REUSEADDR is set before: other sockets with it may have the port too, as long as
// none of them listens, and so may connections that have ended. InvalidUsage means that the address is in use.
enum class Reuse : uint8_t { kNo, kYes };
Result<Fd> bind_to(const SocketAddress& address, Reuse with);
void allow_reuse(const Fd& fd);
// Lets a bound socket listen. InvalidUsage: another one listens at the address.
Result<Fd> listening(Fd fd, const SocketAddress& address, int backlog);
// Refuses 0.0.0.0 and ::. Port 0 takes a free port, which local_address() returns. InvalidUsage means that the address
// is in use.
inline constexpr int kBacklog = 4096;
Result<Fd> listen_at(const SocketAddress& address, int backlog = kBacklog);
Result<SocketAddress> local_address(int fd);
Result<SocketAddress> peer_address(int fd);
struct ConnectOptions {
  const SocketAddress* from = nullptr;  // the own address to connect from, without its port; null: the route decides
  std::string congestion = {};          // see set_congestion_control(), before the connection exists; empty: default
  Watch watch = {};                     // its descriptor ends the wait with RemoteError
  bool* nobody_listens = nullptr;       // says whether the address's host has refused the connection
};
// Makes one attempt and waits for its result until the deadline.
Result<Fd> connect_to(const SocketAddress& address, Deadline deadline, const ConnectOptions& options = {});
// Tries all addresses together, each with a descriptor of its own, and closes the connections. [addresses.size()]
enum class Answer : uint8_t { kNobody, kListens, kSilent };  // silent: neither accepts nor refuses until the deadline
std::vector<Answer> ask_all(std::span<const SocketAddress> addresses, Deadline deadline);
// Returns a pending connection, or an empty Fd if there is none.
Result<Fd> accept_now(int listener);

// Blocking transfers.
Status send_all(int fd, std::span<const std::byte> bytes, Deadline deadline, const Watch& watch = {});
Status recv_exact(int fd, std::span<std::byte> bytes, Deadline deadline, const Watch& watch = {});

// Single steps for poll loops. n == 0 with would_block means that nothing can move now; n == 0 without it means that
// the peer has closed the connection.
struct IoStep {
  size_t n = 0;
  bool would_block = false;
  // With would_block: too many descriptors are in flight. No event tells when that ends, so try again a moment later.
  bool fds_in_flight = false;
};
Result<IoStep> send_now(int fd, std::span<const std::byte> bytes);
Result<IoStep> recv_now(int fd, std::span<std::byte> bytes);
// Do the same for two pieces of memory, one after the other, in one system call. Empty pieces are left out.
Result<IoStep> send_two_now(int fd, std::span<const std::byte> first, std::span<const std::byte> second);
Result<IoStep> recv_two_now(int fd, std::span<std::byte> first, std::span<std::byte> second);

// Transfers of file descriptors over a UNIX socket, with at least one byte of data and at most kMaxFdsPerMessage
// descriptors at once. They are received close-on-exec. recv_fds_now appends to `fds`; if the process may not open more
// descriptors, it fails with an error that says so.
inline constexpr size_t kMaxFdsPerMessage = 16;
Result<IoStep> send_fds_now(int fd, std::span<const std::byte> bytes, std::span<const int> fds);
Result<IoStep> recv_fds_now(int fd, std::span<std::byte> bytes, std::vector<Fd>* fds);
Status send_fds(int fd, std::span<const std::byte> bytes, std::span<const int> fds, Deadline deadline,
                const Watch& watch = {});
// Receives exactly bytes.size() bytes and all descriptors that come with them.
Status recv_fds(int fd, std::span<std::byte> bytes, std::vector<Fd>* fds, Deadline deadline, const Watch& watch = {});

// SO_PEERCRED of a UNIX socket: the process that connected (at the listener) or that listens (at the connector). pid is
// 0 if the peer is in a pid namespace that this process does not see.
struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
};
Result<PeerCredentials> peer_credentials(int fd);

Status set_no_delay(int fd);
// Sets TCP's congestion control by the kernel's name for it. Returns Unsupported if the kernel does not have it, or not
// for this user. Connections accepted by a listener inherit the listener's. A connection that began with one that paces
// (bbr) stays paced, whatever is set later.
Status set_congestion_control(int fd, const std::string& name);
Result<std::string> congestion_control(int fd);
// Makes the kernel spread packets over the round trip instead of sending bursts. This costs one timer per packet, so it
// is only for slow lines.
void pace(int fd);
// Returns the shortest time in microseconds between a packet of a connected TCP socket and its acknowledgement, or 0 if
// the kernel does not report it.
int64_t least_round_trip_us(int fd);
// Makes a connected TCP socket give up when the peer's host has acknowledged nothing for `timeout_ms`, or for some 10
// minutes (with data in flight 15) if that is less. Reads and writes then fail with RemoteError.
Status set_lost_after(int fd, int64_t timeout_ms);
// Returns the microseconds that packets of a connected TCP socket spend in queues on their way, by the kernel's
// smoothed estimate, or 0 if the kernel does not report it.
int64_t queue_delay_us(int fd);
// Returns how long a connected TCP socket has received no acknowledgement while it was waiting for one, for data or for
// a keep-alive probe. Returns 0 if it waits for none, or if the kernel does not report it.
int64_t unacknowledged_ms(int fd);
// Declares that nothing more will be sent, so that the other side reads the end of the stream.
void end_of_stream(int fd);
// Returns how many bytes were given to a connected TCP socket and not yet acknowledged by the other side's kernel.
int64_t unacknowledged_bytes(int fd);
// Waits until fd is readable (events POLLIN), writable (POLLOUT) or in error; otherwise returns Timeout. The result is
// true if the watched descriptor fired as well.
Result<bool> wait_fd(int fd, short events, Deadline deadline, const Watch& watch = {});

}  // namespace moeccl::driver
