// SPDX-License-Identifier: Apache-2.0
#include "src/driver/socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>

#include "src/driver/children.h"

namespace moeccl::driver {
namespace {

const sockaddr* raw(const SocketAddress& a) { return reinterpret_cast<const sockaddr*>(&a.storage); }

bool would_block(int code) { return code == EAGAIN || code == EWOULDBLOCK; }

Status closed() { return Status(moecclRemoteError, "the peer closed the connection"); }

// Errors of a broken connection are the peer's, all others this host's. EACCES is a firewall's answer over IPv6.
Status transfer_error(const char* what, int code) {
  if (code == ECONNRESET || code == EPIPE || code == ETIMEDOUT || code == EHOSTUNREACH || code == ENETUNREACH ||
      code == ENOTCONN || code == EACCES) {
    const char* why = code == EACCES ? ": a firewall, a route or this host's security policy prohibits it" : "";
    return Status(moecclRemoteError, system_error(what, code).message() + why);
  }
  return system_error(what, code);
}

Fd new_socket(const SocketAddress& address) {
  return not_for_children(
      [&] { return ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
}

// Why bind() or listen() failed.
Status not_bound(const char* what, const SocketAddress& address, int code) {
  if (code != EADDRINUSE) return system_error(what + address.str(), code);
  if (address.port() != 0 || address.is_unix()) return error(moecclInvalidUsage, "{} is in use already", address.str());
  return error(moecclSystemError, "no port of {} is free: widen net.ipv4.ip_local_port_range or set MOECCL_PORT_RANGE",
               address.host());
}

Status timed_out(const char* what) { return error(moecclTimeout, "the time for {} is over", what); }

}  // namespace

void allow_reuse(const Fd& fd) {
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
}

Result<Fd> bind_to(const SocketAddress& address, Reuse with) {
  Fd fd = new_socket(address);
  if (!fd) return system_error("socket for " + address.str(), errno);
  if (with == Reuse::kYes) allow_reuse(fd);
  if (::bind(fd.get(), raw(address), address.length) == 0) return fd;
  return not_bound("bind to ", address, errno);
}

Result<Fd> listening(Fd fd, const SocketAddress& address, int backlog) {
  if (::listen(fd.get(), backlog) == 0) return fd;
  return not_bound("listen on ", address, errno);
}

Result<Fd> listen_at(const SocketAddress& address, int backlog) {
  if (address.is_any()) {
    return error(moecclInvalidArgument, "refusing to listen on every interface ({}): give the address of one",
                 address.str());
  }
  // With kYes, a restarted job has its port at once.
  MOECCL_ASSIGN_OR_RETURN(Fd fd, bind_to(address, address.is_unix() ? Reuse::kNo : Reuse::kYes));
  return listening(std::move(fd), address, backlog);
}

Result<Fd> connect_to(const SocketAddress& address, Deadline deadline, const ConnectOptions& options) {
  const auto failed = [&](int code) {
    if (options.nobody_listens != nullptr) *options.nobody_listens = code == ECONNREFUSED;
    if (code == ECONNREFUSED) return error(moecclRemoteError, "nobody listens at {}", address.str());
    if (code == EACCES && address.is_unix()) return system_error("connecting to " + address.str(), code);  // a file's
    return transfer_error(("connecting to " + address.str()).c_str(), code);
  };
  const auto late = [&address] { return error(moecclTimeout, "{} did not answer in time", address.str()); };
  Fd fd = new_socket(address);
  if (!fd) return system_error("socket for " + address.str(), errno);
  if (options.from != nullptr) {
    SocketAddress own = *options.from;
    own.set_port(0);
    const int on = 1;
    // The port is chosen at connect(), so that many connections from one address do not exhaust its ports.
    ::setsockopt(fd.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof(on));
    if (::bind(fd.get(), raw(own), own.length) != 0) return system_error("bind to " + own.str(), errno);
  }
  if (!options.congestion.empty()) MOECCL_TRY(set_congestion_control(fd.get(), options.congestion));
  int backoff_us = 100;
  for (;;) {
    if (::connect(fd.get(), raw(address), address.length) == 0) return fd;
    if (errno == EISCONN) return fd;
    if (errno == EINPROGRESS || errno == EALREADY || errno == EINTR) break;
    if (!would_block(errno)) return failed(errno);
    // A UNIX listener with a full queue answers EAGAIN, and no event tells when there is room.
    if (deadline.passed()) return late();
    if (options.watch.cancelled) MOECCL_TRY(options.watch.cancelled());
    ::usleep(static_cast<useconds_t>(backoff_us));
    backoff_us = std::min(backoff_us * 2, 5000);
  }
  const Result<bool> watched = wait_fd(fd.get(), POLLOUT, deadline, options.watch);
  if (watched.status().code() == moecclTimeout) return late();
  if (!watched.ok()) return watched.status();
  if (*watched) return error(moecclRemoteError, "connecting to {} was given up", address.str());
  int code = 0;
  socklen_t size = sizeof(code);
  if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &code, &size) != 0) return system_error("SO_ERROR", errno);
  if (code != 0) return failed(code);
  return fd;
}

std::vector<Answer> ask_all(std::span<const SocketAddress> addresses, Deadline deadline) {
  std::vector<Answer> answers(addresses.size(), Answer::kNobody);
  std::vector<Fd> fds(addresses.size());
  std::vector<pollfd> entries(addresses.size(), {-1, POLLOUT, 0});
  size_t n_silent = 0;
  for (size_t i = 0; i < addresses.size(); ++i) {
    fds[i] = new_socket(addresses[i]);
    if (!fds[i]) continue;
    const int result = ::connect(fds[i].get(), raw(addresses[i]), addresses[i].length);
    if (result == 0 || (addresses[i].is_unix() && would_block(errno))) {  // a UNIX listener whose queue is full
      answers[i] = Answer::kListens;
    } else if (errno == EINPROGRESS || errno == EINTR) {
      answers[i] = Answer::kSilent;
      entries[i].fd = fds[i].get();
      ++n_silent;
    }
  }
  while (n_silent > 0) {
    const int n = ::poll(entries.data(), entries.size(), deadline.remaining_ms());
    if (n < 0 && errno != EINTR) break;
    for (size_t i = 0; i < entries.size() && n > 0; ++i) {
      if (entries[i].fd < 0 || entries[i].revents == 0) continue;
      int code = 0;
      socklen_t size = sizeof(code);
      const bool known = ::getsockopt(fds[i].get(), SOL_SOCKET, SO_ERROR, &code, &size) == 0;
      answers[i] = known && code == 0 ? Answer::kListens : Answer::kNobody;
      entries[i].fd = -1;
      --n_silent;
    }
    if (deadline.passed()) break;
  }
  return answers;
}

Result<Fd> accept_now(int listener) {
  for (;;) {
    Fd fd = not_for_children([&] { return ::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
    if (fd) return fd;
    if (would_block(errno)) return Fd();
    // ECONNABORTED and, on Linux, pending network errors belong to the new connection, not to the listener: take the
    // next one.
    if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO || errno == ENETDOWN || errno == EHOSTDOWN ||
        errno == EHOSTUNREACH || errno == ENETUNREACH || errno == ENONET || errno == ENOPROTOOPT) {
      continue;
    }
    return system_error("accept", errno);
  }
}

Result<bool> wait_fd(int fd, short events, Deadline deadline, const Watch& watch) {
  constexpr int64_t kAskEveryMs = 20;
  pollfd entries[2] = {{fd, events, 0}, {watch.fd, POLLIN, 0}};
  const nfds_t n_entries = watch.fd >= 0 ? 2 : 1;
  for (;;) {
    const Deadline until = watch.cancelled ? Deadline::earlier(deadline, Deadline::after_ms(kAskEveryMs)) : deadline;
    const int n = ::poll(entries, n_entries, until.remaining_ms());
    if (n > 0) return n_entries == 2 && entries[1].revents != 0;
    if (n == 0 && deadline.passed()) return timed_out((events & POLLIN) != 0 ? "receiving" : "sending");
    if (n < 0 && errno != EINTR) return system_error("poll", errno);
    if (watch.cancelled) MOECCL_TRY(watch.cancelled());
  }
}

namespace {

// Makes the call until no signal interrupts it.
template <class Call>
Result<IoStep> step(const char* what, const Call& call) {
  for (;;) {
    const ssize_t n = call();
    if (n >= 0) return IoStep{static_cast<size_t>(n)};
    if (would_block(errno)) return IoStep{0, true};
    if (errno != EINTR) return transfer_error(what, errno);
  }
}

// Receives until all bytes are there; receive_now(rest) makes one step.
template <class Receive>
Status receive_all(int fd, std::span<std::byte> bytes, Deadline deadline, const Watch& watch,
                   const Receive& receive_now) {
  bool ended = false;
  while (!bytes.empty()) {
    MOECCL_ASSIGN_OR_RETURN(const IoStep done, receive_now(bytes));
    if (done.n == 0 && (!done.would_block || ended)) return closed();
    bytes = bytes.subspan(done.n);
    if (!done.would_block) continue;
    MOECCL_ASSIGN_OR_RETURN(ended, wait_fd(fd, POLLIN, deadline, watch));
  }
  return {};
}

// Fills an iovec with the nonempty pieces.
template <class Byte>
msghdr pieces(std::span<Byte> first, std::span<Byte> second, iovec (&data)[2]) {
  msghdr message = {};
  message.msg_iov = data;
  for (const std::span<Byte> piece : {first, second}) {
    if (piece.empty()) continue;
    data[message.msg_iovlen++] = {const_cast<std::byte*>(piece.data()), piece.size()};
  }
  return message;
}

}  // namespace

Result<IoStep> send_now(int fd, std::span<const std::byte> bytes) {
  return step("send", [&] { return ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT); });
}

Result<IoStep> recv_now(int fd, std::span<std::byte> bytes) {
  return step("receive", [&] { return ::recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT); });
}

Result<IoStep> send_two_now(int fd, std::span<const std::byte> first, std::span<const std::byte> second) {
  iovec data[2];
  const msghdr message = pieces(first, second, data);
  return step("send", [&] { return ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT); });
}

Result<IoStep> recv_two_now(int fd, std::span<std::byte> first, std::span<std::byte> second) {
  iovec data[2];
  msghdr message = pieces(first, second, data);
  return step("receive", [&] { return ::recvmsg(fd, &message, MSG_DONTWAIT); });
}

Result<IoStep> send_fds_now(int fd, std::span<const std::byte> bytes, std::span<const int> fds) {
  if (fds.empty()) return send_now(fd, bytes);
  assert(!bytes.empty());
  if (fds.size() > kMaxFdsPerMessage) {
    return error(moecclInvalidArgument, "{} descriptors in one message; at most {}", fds.size(), kMaxFdsPerMessage);
  }
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFdsPerMessage)] = {};
  iovec data = {const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
  cmsghdr* head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
  std::memcpy(CMSG_DATA(head), fds.data(), sizeof(int) * fds.size());
  // More descriptors are in flight than this user may have open. This passes when receivers take theirs.
  bool fds_in_flight = false;
  MOECCL_ASSIGN_OR_RETURN(IoStep done, step("sending file descriptors", [&]() -> ssize_t {
                            const ssize_t n = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
                            fds_in_flight = n < 0 && errno == ETOOMANYREFS;
                            if (fds_in_flight) errno = EAGAIN;
                            return n;
                          }));
  done.fds_in_flight = fds_in_flight;
  return done;
}

Result<IoStep> recv_fds_now(int fd, std::span<std::byte> bytes, std::vector<Fd>* fds) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFdsPerMessage)];
  iovec data = {bytes.data(), bytes.size()};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  MOECCL_ASSIGN_OR_RETURN(const IoStep done,
                          step("receive", [&] { return ::recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC); }));
  if (done.would_block) return done;
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    const size_t n_fds = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < n_fds; ++i) {
      int received;
      std::memcpy(&received, CMSG_DATA(head) + i * sizeof(int), sizeof(int));
      fds->emplace_back(received);
    }
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    return error(moecclSystemError,
                 "file descriptors were lost: this process may not open more of them; raise the limit (ulimit -n)");
  }
  return done;
}

Status send_all(int fd, std::span<const std::byte> bytes, Deadline deadline, const Watch& watch) {
  while (!bytes.empty()) {
    MOECCL_ASSIGN_OR_RETURN(const IoStep done, send_now(fd, bytes));
    bytes = bytes.subspan(done.n);
    if (!done.would_block) continue;
    MOECCL_ASSIGN_OR_RETURN(const bool ended, wait_fd(fd, POLLOUT, deadline, watch));
    if (ended) return closed();
  }
  return {};
}

Status recv_exact(int fd, std::span<std::byte> bytes, Deadline deadline, const Watch& watch) {
  return receive_all(fd, bytes, deadline, watch, [&](std::span<std::byte> rest) { return recv_now(fd, rest); });
}

Status send_fds(int fd, std::span<const std::byte> bytes, std::span<const int> fds, Deadline deadline,
                const Watch& watch) {
  int backoff_ms = 1;
  for (;;) {
    MOECCL_ASSIGN_OR_RETURN(const IoStep done, send_fds_now(fd, bytes, fds));
    if (!done.would_block) return send_all(fd, bytes.subspan(done.n), deadline, watch);
    if (deadline.passed()) return timed_out("sending file descriptors");
    if (watch.cancelled) MOECCL_TRY(watch.cancelled());
    // An excess of references gives no event, so sleep a little, for at most 20 ms.
    ::usleep(static_cast<useconds_t>(backoff_ms) * 1000);
    backoff_ms = std::min(backoff_ms * 2, 20);
  }
}

Status recv_fds(int fd, std::span<std::byte> bytes, std::vector<Fd>* fds, Deadline deadline, const Watch& watch) {
  return receive_all(fd, bytes, deadline, watch,
                     [&](std::span<std::byte> rest) { return recv_fds_now(fd, rest, fds); });
}

Result<PeerCredentials> peer_credentials(int fd) {
  ucred credentials = {};
  socklen_t size = sizeof(credentials);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) return system_error("SO_PEERCRED", errno);
  return PeerCredentials{credentials.pid, credentials.uid};
}

Status set_no_delay(int fd) {
  const int on = 1;
  if (::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0) return system_error("TCP_NODELAY", errno);
  return {};
}

Status set_congestion_control(int fd, const std::string& name) {
  if (::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) != 0) {
    if (errno != ENOENT && errno != EPERM) return system_error("TCP_CONGESTION", errno);
    return error(moecclUnsupported,
                 "this kernel does not offer TCP congestion control {}: see net.ipv4.tcp_allowed_congestion_control",
                 name);
  }
  return {};
}

Result<std::string> congestion_control(int fd) {
  char name[16] = {};  // TCP_CA_NAME_MAX of the kernel
  socklen_t size = sizeof(name);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size) != 0) return system_error("TCP_CONGESTION", errno);
  return std::string(name, strnlen(name, sizeof(name)));
}

Status set_lost_after(int fd, int64_t timeout_ms) {
  struct Option {
    int level, name, value;
    const char* text;
  };
  // A program that waits longer than this for an operation need not wait longer for a lost host. Data in flight is then
  // given up by the system's own limit (tcp_retries2, some 15 minutes) and not by TCP_USER_TIMEOUT, which would also
  // end a connection whose host answers while its process is stopped and its buffers are full.
  constexpr int64_t kMostMs = 600'000;
  // Probes begin after a quarter of the time and are a tenth of it apart. With TCP_USER_TIMEOUT, their number does not
  // matter (tcp(7)).
  constexpr int kProbes = 8;
  const int64_t probed_ms = std::min(timeout_ms, kMostMs);
  const int seconds = static_cast<int>(std::max<int64_t>(probed_ms / 4000, 1));
  const int between = static_cast<int>(std::max<int64_t>(probed_ms / 10'000, 1));
  const int lost_ms = timeout_ms > kMostMs ? 0 : static_cast<int>(std::max<int64_t>(timeout_ms, 1));
  for (const Option& o :
       {Option{SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE"}, Option{IPPROTO_TCP, TCP_KEEPIDLE, seconds, "TCP_KEEPIDLE"},
        Option{IPPROTO_TCP, TCP_KEEPINTVL, between, "TCP_KEEPINTVL"},
        Option{IPPROTO_TCP, TCP_KEEPCNT, kProbes, "TCP_KEEPCNT"},
        Option{IPPROTO_TCP, TCP_USER_TIMEOUT, lost_ms, "TCP_USER_TIMEOUT"}}) {
    if (::setsockopt(fd, o.level, o.name, &o.value, sizeof(o.value)) != 0) return system_error(o.text, errno);
  }
  return {};
}

}  // namespace moeccl::driver
