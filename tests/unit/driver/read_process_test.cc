// SPDX-License-Identifier: Apache-2.0
// A process number does not identify the owner of memory; the stamp does.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

#include "src/driver/memory.h"

namespace moeccl::driver {
namespace {

std::vector<int> numbers(3000, 7);

TEST(ReadProcess, TakesTheBytesOfTheProgramWithTheStamp) {
  const Result<ProcessStamp> stamp = process_stamp();
  ASSERT_TRUE(stamp.ok());
  std::vector<int> copy(numbers.size());
  const size_t bytes = numbers.size() * sizeof(int);
  const auto address = reinterpret_cast<uint64_t>(numbers.data());
  ASSERT_TRUE(read_process(getpid(), *stamp, address, copy.data(), bytes).ok());
  EXPECT_EQ(copy, numbers);
  const ProcessStamp wrong{stamp->address, stamp->value + 1};
  EXPECT_EQ(read_process(getpid(), wrong, address, copy.data(), bytes).code(), moecclRemoteError);
  EXPECT_FALSE(read_process(getpid(), *stamp, 8, copy.data(), bytes).ok());
}

TEST(ReadProcess, RefusesAProcessThatHasBecomeAnotherProgram) {
  const Result<ProcessStamp> stamp = process_stamp();
  ASSERT_TRUE(stamp.ok());
  int ready[2], go[2];
  ASSERT_EQ(pipe2(ready, O_CLOEXEC) | pipe2(go, O_CLOEXEC), 0);
  const pid_t child = fork();
  if (child == 0) {
    char c = 0;
    if (write(ready[1], &c, 1) != 1 || read(go[0], &c, 1) != 1) _exit(1);
    execl("/bin/sleep", "sleep", "30", static_cast<char*>(nullptr));
    _exit(1);
  }
  close(ready[1]);
  char c = 0;
  ASSERT_EQ(read(ready[0], &c, 1), 1);
  std::vector<int> copy(numbers.size());
  const auto take = [&] {
    return read_process(child, *stamp, reinterpret_cast<uint64_t>(numbers.data()), copy.data(),
                        numbers.size() * sizeof(int));
  };
  EXPECT_TRUE(take().ok()) << "a forked child has its parent's memory, and its stamp";
  EXPECT_EQ(copy, numbers);
  ASSERT_EQ(write(go[1], &c, 1), 1);
  EXPECT_EQ(read(ready[0], &c, 1), 0);  // closed by the exec
  EXPECT_FALSE(take().ok());
  kill(child, SIGKILL);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
}

TEST(ReadProcess, SaysThatAProcessHasEnded) {
  const Result<ProcessStamp> stamp = process_stamp();
  ASSERT_TRUE(stamp.ok());
  const pid_t child = fork();
  if (child == 0) _exit(0);
  siginfo_t ended;
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT), 0);
  std::vector<int> copy(numbers.size());
  const auto take = [&] {
    return read_process(child, *stamp, reinterpret_cast<uint64_t>(numbers.data()), copy.data(), sizeof(int));
  };
  EXPECT_EQ(take().code(), moecclRemoteError) << "nobody has asked for its exit code yet";
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_EQ(take().code(), moecclRemoteError) << "the kernel may give its number away";
}

}  // namespace
}  // namespace moeccl::driver
