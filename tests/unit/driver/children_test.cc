// SPDX-License-Identifier: Apache-2.0
// The library's sockets in a child of fork(): none is kept that others would take for a sign of life.
#include "src/driver/children.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "src/driver/process.h"
#include "src/driver/socket.h"
#include "tests/support/sockets.h"
#include "tests/support/timing.h"

namespace moeccl::driver {
namespace {

Deadline soon() { return Deadline::after_ms(tests::patient_ms(2000)); }

struct Pair {
  Fd listener, client, server;
};
Pair connected() {
  Pair p;
  p.listener = std::move(*listen_at(*parse_ip_address("127.0.0.1")));
  p.client = std::move(*connect_to(*local_address(p.listener.get()), soon()));
  p.server = std::move(*tests::accept_until(p.listener.get(), soon()));
  return p;
}

// Runs `body` in a child and returns its exit status; 0 means success.
template <class Body>
int in_child(Body body) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(body());
  int status = -1;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + status;
}

TEST(Children, DoNotKeepAConnectionOpen) {
  Pair p = connected();
  const pid_t child = ::fork();
  if (child == 0) {
    ::sleep(20);
    ::_exit(0);
  }
  p.client.reset();
  std::byte one;
  // Otherwise it would wait for the child.
  EXPECT_EQ(recv_exact(p.server.get(), {&one, 1}, soon()).code(), moecclRemoteError);
  const SocketAddress at = *local_address(p.listener.get());
  p.listener.reset();
  const Result<Fd> again = connect_to(at, soon());
  EXPECT_FALSE(again.ok()) << "the child listens";
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST(Children, HaveTheNumbersStill) {
  const Pair p = connected();
  EXPECT_EQ(in_child([&] {
              for (const Fd* fd : {&p.listener, &p.client, &p.server}) {
                if (::fcntl(fd->get(), F_GETFD) != FD_CLOEXEC) return 1;
                std::byte one{};
                if (recv_now(fd->get(), {&one, 1}).ok() || send_now(fd->get(), {&one, 1}).ok()) return 2;
              }
              const Pair own = connected();
              std::byte one{};
              return send_all(own.client.get(), {&one, 1}, soon()).ok() &&
                             recv_exact(own.server.get(), {&one, 1}, soon()).ok()
                         ? 0
                         : 3;
            }),
            0);
  std::byte one{};
  EXPECT_TRUE(send_all(p.client.get(), {&one, 1}, soon()).ok()) << "the parent's connection goes on";
  EXPECT_TRUE(recv_exact(p.server.get(), {&one, 1}, soon()).ok());
}

TEST(Children, KeepWhatHasTakenTheNumberSince) {
  Pair p = connected();
  const int number = p.client.release();
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ASSERT_EQ(::dup2(ends[1], number), number);  // the descriptor no longer belongs to the library
  EXPECT_EQ(in_child([&] { return ::write(number, "x", 1) == 1 ? 0 : 1; }), 0);
  for (const int fd : {ends[0], ends[1], number}) ::close(fd);
}

// As the kernel keeps the queue pairs of an RDMA device as long as anyone has it open.
TEST(Children, LetGoOfADevice) {
  const Fd device = not_for_children([] { return ::open("/dev/full", O_RDWR | O_CLOEXEC); });
  ASSERT_TRUE(device);
  EXPECT_EQ(in_child([&] {
              struct stat info = {};
              if (::fstat(device.get(), &info) != 0) return 1;
              return S_ISCHR(info.st_mode) ? 2 : 0;
            }),
            0);
  char zero = 1;
  EXPECT_TRUE(::read(device.get(), &zero, 1) == 1 && zero == 0) << "it stays open in the parent";
}

TEST(Children, LetGoThoughNoDescriptorIsFree) {
  const Pair p = connected();
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(in_child([&] {
              const rlimit few = {static_cast<rlim_t>(p.server.get()) + 1, before.rlim_max};
              if (::setrlimit(RLIMIT_NOFILE, &few) != 0) return 1;
              while (::dup(0) >= 0) {
              }
              return in_child([&] {
                for (const Fd* fd : {&p.client, &p.server}) {
                  sockaddr_storage address;
                  socklen_t size = sizeof(address);
                  if (::fcntl(fd->get(), F_GETFD) < 0) return 1;
                  if (::getpeername(fd->get(), reinterpret_cast<sockaddr*>(&address), &size) == 0) return 2;
                }
                return 0;
              });
            }),
            0);
}

// Threads connect while another thread forks. No child may keep a socket that is created at that moment.
TEST(Children, DoNotKeepWhatIsMadeWhileTheyAre) {
  std::atomic<bool> stop{false};
  std::thread maker([&] {
    while (!stop) {
      Pair p = connected();
      p.client.reset();
      std::byte one;
      ASSERT_EQ(recv_exact(p.server.get(), {&one, 1}, soon()).code(), moecclRemoteError);
    }
  });
  std::vector<pid_t> children;
  for (int i = 0; i < 100; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::sleep(20);
      ::_exit(0);
    }
    children.push_back(child);
  }
  stop = true;
  maker.join();
  for (const pid_t child : children) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
}

// Makes pidfd_open fail for the calling thread, as on kernels before 5.3 (ENOSYS) and in some sandboxes (EPERM).
bool deny_pidfds(int code) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(code)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter = {static_cast<unsigned short>(std::size(program)), program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

void watch_until_the_end(bool exec) {
  auto to_parent = std::move(*tests::socket_pair());
  auto to_child = std::move(*tests::socket_pair());
  const pid_t child = ::fork();
  if (child == 0) {
    const Result<int> line = life_line();
    const std::byte one{};
    if (!line.ok() || !send_fds(to_parent.second.get(), {&one, 1}, {{*line}}, soon()).ok()) ::_exit(1);
    std::byte go;
    static_cast<void>(recv_exact(to_child.second.get(), {&go, 1}, soon()));
    if (exec) ::execl("/bin/sleep", "sleep", "20", nullptr);
    ::_exit(0);
  }
  std::byte one{};
  std::vector<Fd> lines;
  ASSERT_TRUE(recv_fds(to_parent.first.get(), {&one, 1}, &lines, soon()).ok());
  ASSERT_EQ(lines.size(), 1u);
  const auto watch = ProcessWatch::open(child, std::move(lines[0]));
  ASSERT_TRUE(watch.ok()) << watch.status().message();
  EXPECT_TRUE((*watch)->check().ok());
  ASSERT_TRUE(send_all(to_child.first.get(), {&one, 1}, soon()).ok());
  const tests::Stopwatch time;
  while ((*watch)->check().ok() && time.fair_ms() < tests::patient_ms(2000)) ::usleep(1000);
  EXPECT_EQ((*watch)->check().code(), moecclRemoteError) << (exec ? "exec" : "exit");
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST(ProcessWatch, KnowsAProcessThatDumpsCore) {
  std::ifstream file("/proc/self/status");
  std::string status{std::istreambuf_iterator<char>(file), {}};
  EXPECT_FALSE(ProcessWatch::dumps_core(status));
  const size_t at = status.find("\nCoreDumping:\t0");
  if (at == std::string::npos) GTEST_SKIP() << "Linux has said it since 4.15";
  EXPECT_LT(at, 3500u) << "it must be in what is read";
  status[status.find('0', at)] = '1';
  EXPECT_TRUE(ProcessWatch::dumps_core(status));
  EXPECT_FALSE(ProcessWatch::dumps_core(""));
}

TEST(ProcessWatch, SeesTheEndAndAnotherProgram) {
  for (const bool exec : {false, true}) watch_until_the_end(exec);
}

TEST(ProcessWatch, NeedsNoPidfds) {
  for (const int code : {ENOSYS, EPERM}) {
    std::thread([code] {
      if (!deny_pidfds(code)) GTEST_SKIP() << "no seccomp here";
      EXPECT_EQ(open_pidfd(::getpid()).status().code(), code == ENOSYS ? moecclUnsupported : moecclSystemError);
      for (const bool exec : {false, true}) watch_until_the_end(exec);
      EXPECT_FALSE(ProcessWatch::open(::getpid(), Fd()).ok()) << "nothing would show its end";
    }).join();
  }
}

}  // namespace
}  // namespace moeccl::driver
