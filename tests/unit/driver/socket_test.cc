// SPDX-License-Identifier: Apache-2.0
#include "src/driver/socket.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "src/driver/poller.h"
#include "src/driver/port.h"
#include "src/driver/process.h"
#include "src/driver/thread.h"
#include "tests/support/sockets.h"
#include "tests/support/timing.h"

namespace {
std::function<void()> after_bind;  // called once, after the next call of bind()
}

extern "C" int bind(int fd, const sockaddr* address, socklen_t length) noexcept {
  static const auto real = reinterpret_cast<int (*)(int, const sockaddr*, socklen_t)>(dlsym(RTLD_NEXT, "bind"));
  const int result = real(fd, address, length);
  if (after_bind) std::exchange(after_bind, nullptr)();
  return result;
}

namespace moeccl::driver {
namespace {

Deadline soon() { return Deadline::after_ms(tests::patient_ms(5000)); }

TEST(SocketAddress, ParsesAndPrints) {
  const std::pair<const char*, const char*> good[] = {
      {"127.0.0.1", "127.0.0.1:0"}, {"10.1.2.3:65535", "10.1.2.3:65535"}, {"::1", "[::1]:0"},
      {"[::1]", "[::1]:0"},         {"[fd00::2]:80", "[fd00::2]:80"},
  };
  for (const auto& [text, printed] : good) {
    Result<SocketAddress> a = parse_ip_address(text);
    ASSERT_TRUE(a.ok()) << a.status().message();
    EXPECT_EQ(a->str(), printed);
  }
  for (const char* bad : {"", "host", "1.2.3", "1.2.3.4:", "1.2.3.4:x", "1.2.3.4:65536", "1.2.3.4:-1", "[::1",
                          "[::1]:", "[::1]80", "::1:99999", "1.2.3.4:80:90", "[1.2.3.4", " 1.2.3.4"}) {
    EXPECT_FALSE(parse_ip_address(bad).ok()) << bad;
  }
  EXPECT_EQ(unix_address("name").str(), "unix:@name");
  EXPECT_LE(unix_address(std::string(500, 'x')).str().size(), 110u);
}

TEST(SocketAddress, KnowsLoopbackAnyAndOwn) {
  const auto parse = [](const char* text) { return parse_ip_address(text).value(); };
  EXPECT_TRUE(parse("127.3.2.1").is_loopback() && parse("::1").is_loopback());
  EXPECT_FALSE(parse("10.0.0.1").is_loopback() || unix_address("x").is_loopback());
  EXPECT_TRUE(parse("0.0.0.0").is_any() && parse("::").is_any() && parse("::ffff:0.0.0.0").is_any());
  EXPECT_FALSE(parse("10.0.0.1").is_any() || unix_address("x").is_any());
  EXPECT_TRUE(is_local_address(parse("127.0.0.1")));
  EXPECT_FALSE(is_local_address(parse("198.51.100.9")));
  EXPECT_TRUE(resolve_all("localhost", 5, soon()).value()[0].is_loopback());
  EXPECT_EQ(resolve_all("[fd10::1]", 5, soon()).value()[0].str(), "[fd10::1]:5");
  EXPECT_EQ(resolve_all("10.0.0.1", 5, soon()).value().size(), 1u);
  EXPECT_FALSE(resolve_all("[fd10::1", 5, soon()).ok());
  EXPECT_TRUE(source_address_towards(parse("127.0.0.1")).value().is_loopback());
}

TEST(Socket, ListensConnectsAndSeesTheEnd) {
  for (const SocketAddress& at :
       {unix_address("moeccl-test-" + std::to_string(::getpid())), parse_ip_address("127.0.0.1").value()}) {
    Result<Fd> listener = listen_at(at);
    ASSERT_TRUE(listener.ok()) << listener.status().message();
    const SocketAddress address = local_address(listener->get()).value();
    EXPECT_EQ(listen_at(address).status().code(), moecclInvalidUsage);
    EXPECT_FALSE(accept_now(listener->get()).value());
    Result<Fd> client = connect_to(address, soon());
    ASSERT_TRUE(client.ok()) << client.status().message();
    Result<Fd> server = tests::accept_until(listener->get(), soon());
    ASSERT_TRUE(server.ok());
    if (at.is_unix()) {
      EXPECT_EQ(peer_credentials(server->get())->pid, ::getpid());
      EXPECT_EQ(peer_credentials(client->get())->uid, ::geteuid());
    }
    // More than any buffer holds, so both sides move at once.
    std::vector<std::byte> sent(4 << 20, std::byte{7});
    std::vector<std::byte> got(sent.size());
    std::thread sender([&] { EXPECT_TRUE(send_all(client->get(), sent, soon()).ok()); });
    EXPECT_TRUE(recv_exact(server->get(), got, soon()).ok());
    sender.join();
    EXPECT_EQ(got, sent);
    client->reset();
    EXPECT_EQ(recv_exact(server->get(), std::span(got).first(1), soon()).code(), moecclRemoteError);
    listener->reset();
    EXPECT_EQ(connect_to(address, soon()).status().code(), moecclRemoteError);
  }
}

TEST(Socket, CongestionControlIsTheKernelsOrAnError) {
  Result<Fd> listener = listen_at(*parse_ip_address("127.0.0.1"));
  ASSERT_TRUE(listener.ok());
  Result<Fd> client = connect_to(*local_address(listener->get()), soon());
  ASSERT_TRUE(client.ok());
  EXPECT_TRUE(set_congestion_control(client->get(), "reno").ok());  // every kernel has this one
  const Status none = set_congestion_control(client->get(), "pigeons");
  EXPECT_EQ(none.code(), moecclUnsupported);
  EXPECT_NE(none.message().find("pigeons"), std::string::npos);
  EXPECT_EQ(congestion_control(client->get()).value(), "reno");
}

TEST(Socket, ConnectionsHaveTheListenersCongestionControlAndTheOneAskedFor) {
  Result<Fd> listener = listen_at(*parse_ip_address("127.0.0.1"));
  ASSERT_TRUE(listener.ok());
  ASSERT_TRUE(set_congestion_control(listener->get(), "reno").ok());
  const SocketAddress at = *local_address(listener->get());
  Result<Fd> client = connect_to(at, soon(), {.congestion = "reno"});
  ASSERT_TRUE(client.ok()) << client.status().message();
  Result<Fd> server = tests::accept_until(listener->get(), soon());
  ASSERT_TRUE(server.ok());
  EXPECT_EQ(congestion_control(client->get()).value(), "reno");
  EXPECT_EQ(congestion_control(server->get()).value(), "reno");
  EXPECT_EQ(connect_to(at, soon(), {.congestion = "pigeons"}).status().code(), moecclUnsupported);
  // On loopback there is a value, and it is less than a second.
  EXPECT_GE(least_round_trip_us(client->get()), 0);
  EXPECT_LT(least_round_trip_us(client->get()), 1'000'000);
}

// However long operations may take, the end of an idle connection to a lost host takes minutes at most.
TEST(Socket, LostHostsAreNoticedWhateverTheTimeout) {
  const Result<Fd> listener = listen_at(*parse_ip_address("127.0.0.1"));
  const Result<Fd> client = connect_to(*local_address(listener->get()), soon());
  const auto option = [&](int name) {
    int value = -1;
    socklen_t size = sizeof(value);
    EXPECT_EQ(::getsockopt(client->get(), IPPROTO_TCP, name, &value, &size), 0);
    return value;
  };
  for (const int64_t timeout_ms : {int64_t{2000}, int64_t{600'000}, int64_t{INT32_MAX}}) {
    ASSERT_TRUE(set_lost_after(client->get(), timeout_ms).ok());
    const int idle_s = option(TCP_KEEPIDLE) + option(TCP_KEEPINTVL) * option(TCP_KEEPCNT);
    EXPECT_LE(idle_s, 700) << timeout_ms;
    EXPECT_LE(option(TCP_USER_TIMEOUT), 600'000) << timeout_ms;
    if (timeout_ms <= 600'000) {
      EXPECT_EQ(option(TCP_USER_TIMEOUT), timeout_ms);
    }
  }
}

TEST(Socket, WaitsEndAtTheDeadline) {
  Result<std::pair<Fd, Fd>> pair = tests::socket_pair();
  ASSERT_TRUE(pair.ok());
  const tests::Stopwatch watch;
  std::byte byte;
  EXPECT_EQ(recv_exact(pair->first.get(), std::span(&byte, 1), Deadline::after_ms(30)).code(), moecclTimeout);
  const std::vector<std::byte> large(8 << 20);
  EXPECT_EQ(send_all(pair->first.get(), large, Deadline::after_ms(30)).code(), moecclTimeout);
  MOECCL_EXPECT_WITHIN(watch, 2000);
}

TEST(Socket, AFullUnixQueueIsWaitedForUntilTheDeadline) {
  const SocketAddress address = unix_address("moeccl-test-full-" + std::to_string(::getpid()));
  Result<Fd> listener = listen_at(address, 1);
  ASSERT_TRUE(listener.ok());
  std::vector<Fd> waiting;
  for (int i = 0; i < 2; ++i) waiting.push_back(std::move(connect_to(address, soon()).value()));
  EXPECT_EQ(connect_to(address, Deadline::after_ms(30)).status().code(), moecclTimeout);
}

TEST(Socket, AConnectionThatTakesTooLongIsNamed) {
  Result<Fd> listener = listen_at(*parse_ip_address("127.0.0.1"), 0);
  ASSERT_TRUE(listener.ok());
  const SocketAddress address = *local_address(listener->get());
  std::vector<Fd> waiting;
  Result<Fd> client = Fd();
  // The kernel drops the packets that would begin a connection when the queue is full.
  for (int i = 0; i < 5 && client.ok(); ++i) {
    client = connect_to(address, Deadline::after_ms(300));
    if (client.ok()) waiting.push_back(std::move(*client));
  }
  EXPECT_EQ(client.status().code(), moecclTimeout);
  EXPECT_NE(client.status().message().find(address.str()), std::string::npos) << client.status().message();
}

TEST(Socket, DescriptorsTravelAndCloseOnExec) {
  Result<std::pair<Fd, Fd>> pair = tests::socket_pair();
  ASSERT_TRUE(pair.ok());
  int pipe_fds[2];
  ASSERT_EQ(::pipe(pipe_fds), 0);
  Fd read_end(pipe_fds[0]);
  Fd write_end(pipe_fds[1]);
  const std::byte data[3] = {std::byte{1}, std::byte{2}, std::byte{3}};
  const int sent[] = {write_end.get()};
  ASSERT_TRUE(send_fds(pair->first.get(), data, sent, soon()).ok());
  std::byte got[3];
  std::vector<Fd> fds;
  ASSERT_TRUE(recv_fds(pair->second.get(), got, &fds, soon()).ok());
  ASSERT_EQ(fds.size(), 1u);
  write_end.reset();
  ASSERT_EQ(::write(fds[0].get(), "x", 1), 1);
  char c = 0;
  EXPECT_EQ(::read(read_end.get(), &c, 1), 1);
  EXPECT_EQ(c, 'x');
  const std::vector<int> many(kMaxFdsPerMessage + 1, STDERR_FILENO);
  EXPECT_EQ(send_fds_now(pair->first.get(), data, many).status().code(), moecclInvalidArgument);
}

TEST(Socket, TheWatchedProcessEndsTheWaitAfterWhatItSent) {
  Result<std::pair<Fd, Fd>> pair = tests::socket_pair();
  ASSERT_TRUE(pair.ok());
  const pid_t child = ::fork();
  if (child == 0) {
    static_cast<void>(send_now(pair->second.get(), std::as_bytes(std::span("ab", 2))));
    ::_exit(0);
  }
  Result<Fd> pidfd = open_pidfd(child);
  ASSERT_TRUE(pidfd.ok()) << pidfd.status().message();
  ASSERT_TRUE(wait_fd(pidfd->get(), POLLIN, soon()).ok());
  std::byte two[2];
  // pair->second is open here too, as in a forked child, so there will be no end of file.
  EXPECT_TRUE(recv_exact(pair->first.get(), two, soon(), pidfd->get()).ok());
  EXPECT_EQ(recv_exact(pair->first.get(), std::span(two).first(1), soon(), pidfd->get()).code(), moecclRemoteError);
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(open_pidfd(child).status().code(), moecclRemoteError);
}

TEST(Process, IdentitiesAreStableAndDifferAfterFork) {
  const ProcessIdentity mine = this_process();
  EXPECT_EQ(mine, this_process());
  EXPECT_EQ(mine.pid, ::getpid());
  EXPECT_GT(mine.start_time, 0u);
  const HostIdentity host = host_identity();
  EXPECT_EQ(host, host_identity());
  EXPECT_NE(host.hash(), 0u);
  EXPECT_FALSE(host.hostname.empty());
  ForkGuard guard;
  EXPECT_FALSE(guard.forked());
  const pid_t child = ::fork();
  if (child == 0) {
    const ProcessIdentity other = this_process();
    const bool good = other.pid == ::getpid() && other.random != mine.random && other == this_process() &&
                      guard.forked() && guard.owner() == mine.pid;
    ::_exit(good ? 0 : 1);
  }
  int state = -1;
  ASSERT_EQ(::waitpid(child, &state, 0), child);
  EXPECT_EQ(state, 0);
}

// Two sockets may be bound to one port, so the second one may notice only when it listens.
TEST(Socket, APortThatIsInUseIsSaid) {
  SocketAddress address = *parse_ip_address("127.0.0.1");
  const Result<Fd> reserved = reserve_port(&address);
  ASSERT_TRUE(reserved.ok());
  allow_reuse(*reserved);
  for (const bool before : {true, false}) {
    Fd other(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1;
    ::setsockopt(other.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    ASSERT_EQ(::bind(other.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.length), 0);
    const auto listens = [&other] { EXPECT_EQ(::listen(other.get(), 1), 0); };
    if (before) listens();
    if (!before) after_bind = listens;
    EXPECT_EQ(listen_at(address).status().code(), moecclInvalidUsage) << before;
    EXPECT_FALSE(after_bind) << "the library binds by another call";
  }
}

// Returns the first of `n` ports that are free now.
uint16_t free_ports(uint16_t n) {
  for (uint16_t first = 20'000; first < 30'000; first = static_cast<uint16_t>(first + n)) {
    std::vector<Fd> fds;
    SocketAddress address = *parse_ip_address("127.0.0.1");
    for (uint16_t port = first; port < first + n; ++port) {
      address.set_port(port);
      if (Result<Fd> fd = listen_at(address); fd.ok()) fds.push_back(std::move(*fd));
    }
    if (fds.size() == n) return first;
  }
  return 0;
}

TEST(Socket, PortsOfARangeAreTakenOnce) {
  const uint16_t first = free_ports(4);
  ASSERT_NE(first, 0);
  const PortRange range = {first, static_cast<uint16_t>(first + 3)};
  const SocketAddress host = *parse_ip_address("127.0.0.1");
  std::set<uint16_t> ports;
  std::vector<Fd> fds;
  SocketAddress reserved = host;
  for (int i = 0; i < 4; ++i) {
    SocketAddress address = host;
    Result<Fd> fd = i % 2 == 0 ? reserve_port(&address, range) : listen_in(&address, range);
    ASSERT_TRUE(fd.ok()) << fd.status().message();
    EXPECT_GE(address.port(), range.first);
    EXPECT_LE(address.port(), range.last);
    EXPECT_TRUE(ports.insert(address.port()).second) << address.str() << " was taken twice";
    if (i == 0) reserved = address;
    fds.push_back(std::move(*fd));
  }
  for (int i = 0; i < 2; ++i) {  // all are taken, though two have no listener
    SocketAddress address = host;
    const Result<Fd> fd = i == 0 ? reserve_port(&address, range) : listen_in(&address, range);
    EXPECT_EQ(fd.status().code(), moecclSystemError) << address.str();
  }
  EXPECT_FALSE(listen_at(reserved).ok()) << "nobody else can use it";
  allow_reuse(fds[0]);
  const Result<Fd> used = listen_at(reserved);
  ASSERT_TRUE(used.ok()) << used.status().message();
  fds.erase(fds.begin() + 2);  // the other reserved port
  for (int i = 0; i < 2; ++i) {
    SocketAddress address = host;
    Result<Fd> fd = listen_in(&address, range);
    if (i == 0) {
      ASSERT_TRUE(fd.ok()) << fd.status().message();
      fds.push_back(std::move(*fd));
      continue;
    }
    EXPECT_EQ(fd.status().code(), moecclSystemError);
    EXPECT_NE(fd.status().message().find("MOECCL_PORT_RANGE"), std::string::npos) << fd.status().message();
    EXPECT_NE(fd.status().message().find("127.0.0.1"), std::string::npos) << fd.status().message();
  }
}

// As for a job that was restarted: the ends of its connections still have the ports for a minute.
TEST(Socket, PortsOfARangeSurviveARestart) {
  const uint16_t first = free_ports(1);
  ASSERT_NE(first, 0);
  SocketAddress address = *parse_ip_address("127.0.0.1");
  {
    const Result<Fd> listener = listen_in(&address, {first, first});
    ASSERT_TRUE(listener.ok()) << listener.status().message();
    Result<Fd> out = connect_to(address, soon());
    ASSERT_TRUE(out.ok());
    Result<Fd> in = accept_now(listener->get());
    ASSERT_TRUE(in.ok() && *in);
    in->reset();  // closes first, and so keeps the port
  }
  address.set_port(0);
  const Result<Fd> again = listen_in(&address, {first, first});
  EXPECT_TRUE(again.ok()) << again.status().message();
}

// A container may have its own host name and processes, and yet the network of its host.
TEST(Process, ANetworkMayBelongToSeveralHosts) {
  const HostIdentity host = host_identity();
  if (host.boot_id.empty()) GTEST_SKIP() << "no /proc/sys/kernel/random/boot_id here";
  HostIdentity other = host;
  ++other.uts_namespace, ++other.pid_namespace, other.hostname = "container", other.given = "b";
  EXPECT_NE(other.hash(), host.hash());
  EXPECT_NE(host.network(), 0u);
  EXPECT_EQ(other.network(), host.network());
  ++other.net_namespace;
  EXPECT_NE(other.network(), host.network());
  other = host;
  other.boot_id = "of another machine";
  EXPECT_NE(other.network(), host.network());
  other.boot_id.clear();
  EXPECT_EQ(other.network(), 0u) << "namespaces of two machines may have the same number";
}

TEST(Thread, TakesNoSignals) {
  sigset_t blocked;
  sigemptyset(&blocked);
  Result<std::thread> thread =
      start_thread("a name that is too long", [&] { pthread_sigmask(SIG_BLOCK, nullptr, &blocked); });
  ASSERT_TRUE(thread.ok());
  thread->join();
  EXPECT_EQ(sigismember(&blocked, SIGUSR1), 1);
  sigset_t own;
  pthread_sigmask(SIG_BLOCK, nullptr, &own);
  EXPECT_EQ(sigismember(&own, SIGUSR1), 0);
}

TEST(Poller, ReportsWhatIsReadyAndWakesUp) {
  Result<Poller> poller = Poller::create();
  Result<WakeUp> wake = WakeUp::create();
  ASSERT_TRUE(poller.ok() && wake.ok());
  ASSERT_TRUE(poller->add(wake->fd(), EPOLLIN, 42).ok());
  EXPECT_TRUE(poller->wait(Deadline::after_ms(10))->empty());
  std::thread other([&] { wake->signal(); });
  const std::span<const epoll_event> events = poller->wait(soon()).value();
  other.join();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].data.u64, 42u);
  wake->clear();
  EXPECT_TRUE(poller->wait(Deadline::after_ms(10))->empty());
}

}  // namespace
}  // namespace moeccl::driver
