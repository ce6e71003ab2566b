// SPDX-License-Identifier: Apache-2.0
// The rank that leads a shrink dies or stops at one of the last messages that it sends, by which it tells the others
// that all of them are connected. Ranks that have heard it go on in the new communicator, so the others must do so too:
// there is one group afterwards, and its sum is right.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "tests/support/hosts.h"
#include "tests/support/ranks.h"

namespace {

std::atomic<long> n_sends{0}, dies_at{-1};  // -1: messages are not counted
std::atomic<int64_t> silent_ms{0};          // before it dies, this process is stopped for so long

void send_one_more() {
  if (dies_at.load() < 0 || ++n_sends != dies_at.load()) return;
  if (silent_ms.load() == 0) kill(getpid(), SIGKILL);
  if (fork() == 0) {
    usleep(static_cast<useconds_t>(silent_ms.load() * 1000));
    kill(getppid(), SIGKILL);
    _exit(0);
  }
  kill(getpid(), SIGSTOP);
}

}  // namespace

// Found before libc's, by the library as well.
extern "C" __attribute__((visibility("default"))) ssize_t send(int fd, const void* from, size_t n, int flags) {
  static const auto next = reinterpret_cast<decltype(&send)>(dlsym(RTLD_NEXT, "send"));
  send_one_more();
  return next(fd, from, n, flags);
}

namespace moeccl::testing {
namespace {

constexpr int kRanks = 5, kLeader = 0, kFirstVictim = 4;
constexpr int kLeft = kRanks - 2;
constexpr long kLastMessages = 10;
constexpr int64_t kInitMs = 4000;

struct Words {
  std::atomic<long> n_sends;    // of the leader in its shrink
  std::atomic<int> n_timeouts;  // ranks whose shrink ended because the leader was silent
};

int sum(moecclComm_t comm, moecclResult_t* result) {
  int32_t in = 1, out = 0;
  *result = moecclAllReduce(&in, &out, 1, moecclInt32, moecclSum, comm, nullptr);
  return out;
}

void go_on(int rank, moecclComm_t comm, Meeting& end, bool leader_may_stop, Words& words) {
  for (int shrinks = 0;; ++shrinks) {
    moecclResult_t result = moecclSuccess;
    const int total = sum(comm, &result);
    if (result == moecclSuccess) {
      EXPECT_EQ(total, kLeft) << "rank " << rank << " goes on without some who live";
      break;
    }
    ASSERT_LT(shrinks, 4) << moecclGetLastError(comm);
    moecclComm_t left = nullptr;
    result = moecclCommShrink(comm, nullptr, 0, &left, nullptr, MOECCL_SHRINK_DEFAULT);
    if (leader_may_stop && result == moecclTimeout) {
      ++words.n_timeouts;
      MOECCL_EXPECT_OK(moecclCommAbort(comm));
      return;
    }
    ASSERT_EQ(result, moecclSuccess) << "rank " << rank << ": " << moecclGetLastError(comm);
    (void)moecclCommDestroy(comm);
    comm = left;
  }
  EXPECT_TRUE(end.meet(kLeft));
  MOECCL_EXPECT_OK(moecclCommDestroy(comm));
}

// 0: the leader dies when its shrink has succeeded. Returns how many messages it has sent until then.
long lead_until(long message, TestHosts* hosts, int64_t stopped_ms = 0) {
  const Shared<Words> words;
  Meeting end;
  RankOptions options{.mode = RankMode::kProcesses, .deadline_ms = 30'000, .destroy = false};
  options.config.init_timeout_ms = static_cast<int>(patient_ms(kInitMs));
  options.hosts = hosts;
  options.may_die = {kLeader, kFirstVictim};
  run_ranks(
      kRanks,
      [&](int rank, moecclComm_t comm) {
        if (rank == kFirstVictim) raise(SIGKILL);
        if (rank != kLeader) return go_on(rank, comm, end, stopped_ms > 0, *words);
        moecclResult_t result = moecclSuccess;
        (void)sum(comm, &result);
        ASSERT_EQ(result, moecclRemoteError);
        moecclComm_t left = nullptr;
        silent_ms = stopped_ms;
        dies_at = message;
        (void)moecclCommShrink(comm, nullptr, 0, &left, nullptr, MOECCL_SHRINK_DEFAULT);
        words->n_sends = n_sends.load();
        raise(SIGKILL);
      },
      options);
  // If the leader stops before any rank was told, none goes on.
  EXPECT_TRUE(words->n_timeouts == 0 || words->n_timeouts == kLeft) << words->n_timeouts << " ranks gave up";
  return words->n_sends;
}

void lead_until_each(TestHosts* hosts) {
  const long n = lead_until(0, hosts);
  ASSERT_GT(n, kLastMessages);
  for (long m = n - kLastMessages; m <= n && !::testing::Test::HasFailure(); ++m) {
    SCOPED_TRACE(::testing::Message() << "the leader dies at message " << m << " of " << n);
    lead_until(m, hosts);
  }
}

TEST(Leader, MayDieAtAnyOfItsLastMessagesOnOneHost) { lead_until_each(nullptr); }

TEST(Leader, MayDieAtAnyOfItsLastMessagesBetweenHosts) {
  std::string why;
  const auto hosts = TestHosts::create({.weights = {2, 3}, .named = true}, &why);
  ASSERT_NE(hosts, nullptr) << why;
  lead_until_each(hosts.get());
}

// The others wait for its word until their time for init is over.
TEST(Leader, MayFallSilentAtOneOfItsLastMessagesBetweenHosts) {
  std::string why;
  const auto hosts = TestHosts::create({.weights = {2, 3}, .named = true}, &why);
  ASSERT_NE(hosts, nullptr) << why;
  const long n = lead_until(0, hosts.get());
  for (long m = n - 6; m <= n - 4 && !::testing::Test::HasFailure(); ++m) {
    SCOPED_TRACE(::testing::Message() << "the leader stops at message " << m << " of " << n);
    lead_until(m, hosts.get(), patient_ms(kInitMs + 2000));
  }
}

}  // namespace
}  // namespace moeccl::testing
