// SPDX-License-Identifier: Apache-2.0
// How ranks of one host find rank 0, and never another user in its place.
#include "src/bootstrap/handout.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <ctime>
#include <optional>
#include <thread>

#include "src/bootstrap/unique_id.h"
#include "src/driver/socket.h"
#include "tests/support/sockets.h"
#include "tests/unit/bootstrap/group.h"

namespace moeccl::bootstrap {
namespace {

Deadline soon() { return Deadline::after_ms(patient_ms(3000)); }
std::string name_of(const char* test) { return format("moeccl-env-{}-{}", test, ::getpid()); }

// A folder of this user only, which replaces XDG_RUNTIME_DIR while it lives.
struct Folder {
  explicit Folder(mode_t mode = 0700) {
    EXPECT_NE(::mkdtemp(path), nullptr);
    EXPECT_EQ(::chmod(path, mode), 0);
    ::setenv("XDG_RUNTIME_DIR", path, 1);
  }
  ~Folder() {
    ::unsetenv("XDG_RUNTIME_DIR");
    ::rmdir(path);
  }
  char path[32] = "/tmp/moeccl-test-XXXXXX";
};

// Acts as a root does.
void give(const HandoutListener& listener, const moecclUniqueId& id) {
  const Result<Fd> fd = tests::accept_until(listener.fd(), soon());
  ASSERT_TRUE(fd.ok()) << fd.status().message();
  ASSERT_TRUE(driver::send_all(fd.value().get(), std::as_bytes(std::span(id.internal)), soon()).ok());
}

moecclUniqueId some_id() {
  moecclUniqueId id = {};
  id.internal[5] = 42;
  return id;
}

TEST(Handout, IsAtAFileOfThisUserAndEndsWithIt) {
  const Folder folder;
  EXPECT_EQ(private_folder(), folder.path);
  const std::string name = name_of("file"), path = std::string(folder.path) + "/" + name;
  {
    auto listeners = listen_for_handouts(name);
    ASSERT_TRUE(listeners.ok()) << listeners.status().message();
    ASSERT_EQ(listeners->size(), 2u);
    EXPECT_EQ(::access(path.c_str(), F_OK), 0);
    std::thread root([&] { give((*listeners)[0], some_id()); });
    const auto id = ask_for_handout(name, soon());
    root.join();
    ASSERT_TRUE(id.ok()) << id.status().message();
    EXPECT_EQ(id.value().internal[5], 42);
    EXPECT_EQ(listen_for_handouts(name).status().code(), moecclInvalidUsage) << "the communicator before";
  }
  EXPECT_NE(::access(path.c_str(), F_OK), 0);
}

TEST(Handout, AFileOfAKilledProcessIsTakenAway) {
  const Folder folder;
  const std::string name = name_of("stale"), path = std::string(folder.path) + "/" + name;
  ASSERT_TRUE(driver::listen_at(driver::unix_file_address(path)).ok());  // closed at once, and the file stays
  ASSERT_EQ(::access(path.c_str(), F_OK), 0);
  const auto listeners = listen_for_handouts(name);
  EXPECT_TRUE(listeners.ok()) << listeners.status().message();
}

// As pthread_atfork() does not see a bare clone(), such a child keeps the sockets of a rank 0 that was killed.
TEST(Handout, AChildOfARank0ThatHasEndedHoldsNobodyUp) {
  const Folder folder;
  const std::string name = name_of("clone");
  auto told = std::move(*tests::socket_pair());
  Children rank_0;
  rank_0.start([&] {
    const auto listeners = listen_for_handouts(name);
    if (!listeners.ok() || listeners->size() != 2) return 1;
    const auto child = static_cast<pid_t>(::syscall(SYS_clone, SIGCHLD, nullptr, nullptr, nullptr, nullptr));
    if (child == 0) {
      ::alarm(static_cast<unsigned>(patient_ms(60)));
      for (;;) ::pause();
    }
    if (!driver::send_all(told.first.get(), std::as_bytes(std::span(&child, 1)), soon()).ok()) return 2;
    ::kill(::getpid(), SIGKILL);
    return 3;
  });
  pid_t child = 0;
  ASSERT_TRUE(driver::recv_exact(told.second.get(), std::as_writable_bytes(std::span(&child, 1)), soon()).ok());
  EXPECT_EQ(rank_0.wait(0), -1);
  const Stopwatch watch;
  const auto refused = ask_for_handout(name, soon());
  MOECCL_EXPECT_WITHIN(watch, 500);
  EXPECT_EQ(refused.status().code(), moecclRemoteError) << refused.status().message();
  EXPECT_NE(refused.status().message().find("a child of rank 0's process"), std::string::npos)
      << refused.status().message();
  const auto listeners = listen_for_handouts(name);
  EXPECT_TRUE(listeners.ok()) << listeners.status().message();
  if (listeners.ok()) {
    std::thread root([&] { give((*listeners)[0], some_id()); });
    const auto id = ask_for_handout(name, soon());
    root.join();
    EXPECT_TRUE(id.ok()) << id.status().message();
  }
  ::kill(child, SIGKILL);
}

TEST(Handout, OldFilesOfProcessesThatHaveEndedAreTakenAway) {
  const Folder folder;
  const auto path_of = [&](const char* name) { return std::string(folder.path) + "/" + name; };
  const std::string dead = path_of("moeccl-dead"), young = path_of("moeccl-young"), live = path_of("moeccl-live"),
                    foreign = path_of("foreign");
  for (const std::string& path : {dead, young, foreign})
    ASSERT_TRUE(driver::listen_at(driver::unix_file_address(path)).ok());
  const auto listens = driver::listen_at(driver::unix_file_address(live));
  ASSERT_TRUE(listens.ok());
  const timespec old[] = {{::time(nullptr) - 100'000, 0}, {::time(nullptr) - 100'000, 0}};
  for (const std::string& path : {dead, live, foreign})
    ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), old, AT_SYMLINK_NOFOLLOW), 0);
  EXPECT_TRUE(listen_for_handouts(name_of("next")).ok());
  EXPECT_NE(::access(dead.c_str(), F_OK), 0);
  for (const std::string& path : {young, live, foreign}) {
    EXPECT_EQ(::access(path.c_str(), F_OK), 0) << path;
    ::unlink(path.c_str());
  }
}

TEST(Handout, FoldersThatOthersMayWriteAreNotUsed) {
  const Folder folder(0777);
  EXPECT_NE(private_folder(), folder.path);
}

// As in containers that share the network.
TEST(Handout, WithoutACommonFolderTheAbstractNameServes) {
  const std::string name = name_of("abstract");
  std::optional<Folder> theirs(std::in_place);
  auto listeners = listen_for_handouts(name);
  ASSERT_TRUE(listeners.ok()) << listeners.status().message();
  std::thread root([&] { give(listeners->back(), some_id()); });
  const Folder mine;
  const auto id = ask_for_handout(name, soon());
  root.join();
  EXPECT_TRUE(id.ok()) << id.status().message();
  listeners = error(moecclInternalError, "ended");
  ::setenv("XDG_RUNTIME_DIR", theirs->path, 1);
}

// Where a process's number names the job, it names another one in another container.
TEST(Handout, OfAProcessNumberIsNotForOtherPidNamespaces) {
  const Folder folder;
  for (const bool to_these : {false, true}) {
    RootOptions options;
    options.timeout_ms = patient_ms(20'000);
    options.handout_name = name_of("pids");
    options.handout_to_these_pids = to_these;
    auto told = std::move(*tests::socket_pair());
    Children containers;
    containers.start([&] {
      if (::unshare(CLONE_NEWPID) != 0) return 77;
      Children first;
      first.start([&] {
        const auto root = Root::start(options);
        std::byte one{};
        if (!root.ok() || !driver::send_all(told.first.get(), {&one, 1}, soon()).ok()) return 1;
        return driver::recv_exact(told.first.get(), {&one, 1}, Deadline::after_ms(patient_ms(20'000))).ok() ? 0 : 2;
      });
      return first.wait(0);
    });
    std::byte one{};
    if (!driver::recv_exact(told.second.get(), {&one, 1}, soon()).ok()) {
      if (containers.wait(0) == 77) GTEST_SKIP() << "this user may not make pid namespaces";
      FAIL() << "no root";
    }
    containers.start([&] {
      if (::unshare(CLONE_NEWPID) != 0) return 77;
      Children first;
      first.start([&] { return ask_for_handout(options.handout_name, soon()).ok() ? 0 : 3; });
      return first.wait(0);
    });
    EXPECT_EQ(containers.wait(1), to_these ? 3 : 0) << "the root sees no number of the asker";
    containers.start([&] {
      if (::unshare(CLONE_NEWPID) != 0) return 77;
      Children first;
      first.start([&] { return ask_for_handout(options.handout_name, soon(), true).ok() ? 0 : 3; });
      return first.wait(0);
    });
    EXPECT_EQ(containers.wait(2), 3) << "the asker sees no number of the root";
    ASSERT_TRUE(driver::send_all(told.second.get(), {&one, 1}, soon()).ok());
    EXPECT_EQ(containers.wait(0), 0);
  }
}

TEST(Handout, AnotherUserAtTheNameHoldsNobodyUp) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs a second user";
  const Folder folder;
  const std::string name = name_of("squatted");
  auto there = std::move(*tests::socket_pair());
  Children squatter;
  squatter.start([&] {
    if (::setresuid(65534, 65534, 65534) != 0) return 1;
    const auto fd = driver::listen_at(driver::unix_address(name));
    const std::byte one{};
    if (!fd.ok() || !driver::send_all(there.second.get(), {&one, 1}, soon()).ok()) return 2;
    ::pause();
    return 0;
  });
  std::byte one{};
  ASSERT_TRUE(driver::recv_exact(there.first.get(), {&one, 1}, soon()).ok());
  auto listeners = listen_for_handouts(name);
  ASSERT_TRUE(listeners.ok()) << listeners.status().message();
  EXPECT_EQ(listeners->size(), 1u);
  std::thread root([&] { give((*listeners)[0], some_id()); });
  const Stopwatch watch;
  const auto id = ask_for_handout(name, soon());
  root.join();
  EXPECT_TRUE(id.ok()) << id.status().message();
  MOECCL_EXPECT_WITHIN(watch, 1000);
  ::kill(squatter.pid(0), SIGKILL);
}

}  // namespace
}  // namespace moeccl::bootstrap
