// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>

#include "src/bootstrap/place.h"
#include "tests/unit/bootstrap/group.h"

namespace moeccl::bootstrap {
namespace {

Deadline soon() { return Deadline::after_ms(patient_ms(20'000)); }

int open_descriptors() {
  int n = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    static_cast<void>(entry);
    ++n;
  }
  return n;
}

// Joins, runs two gathers of different sizes and a barrier, and ends.
Status whole_life(const moecclUniqueId& id, int rank, int n_ranks, size_t n_bytes) {
  MOECCL_ASSIGN_OR_RETURN(std::unique_ptr<Session> session, Session::join(id, rank, n_ranks, soon()));
  for (const size_t round : {size_t{0}, size_t{1}}) {
    const std::vector<std::byte> mine = blob_of(rank, n_bytes + round * static_cast<size_t>(rank));
    MOECCL_ASSIGN_OR_RETURN(const std::vector<std::vector<std::byte>> all, session->all_gather(mine, soon()));
    for (int r = 0; r < n_ranks; ++r) {
      if (all[static_cast<size_t>(r)] != blob_of(r, n_bytes + round * static_cast<size_t>(r))) {
        return error(moecclInternalError, "rank {} got a wrong blob of rank {}", rank, r);
      }
    }
  }
  MOECCL_TRY(session->barrier(soon()));
  session->close();
  return {};
}

// Returns whether this process has a meeting point's thread.
bool root_runs() {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(task.path() / "comm") >> name;
    if (name == "moeccl-root") return true;
  }
  return false;
}

class ThreadRanks : public testing::TestWithParam<int> {};

TEST_P(ThreadRanks, JoinGatherAndLeave) {
  const int n_ranks = GetParam();
  const int descriptors = open_descriptors();
  {
    std::unique_ptr<Root> root = start_root();
    const Stopwatch watch;
    for (const Status& s : run_threads(n_ranks, [&](int rank) { return whole_life(root->id(), rank, n_ranks, 300); })) {
      EXPECT_TRUE(s.ok()) << s.message();
    }
    const int64_t ms = watch.ms();
    MOECCL_EXPECT_WITHIN(watch, 5000);
    std::printf("join, 2 gathers, barrier, leave with %d thread ranks: %ld ms\n", n_ranks, static_cast<long>(ms));
    RecordProperty("milliseconds", static_cast<int>(ms));
    EXPECT_TRUE(eventually([] { return !root_runs(); })) << "the root does not end by itself";
  }
  EXPECT_EQ(open_descriptors(), descriptors);
}
INSTANTIATE_TEST_SUITE_P(Sizes, ThreadRanks, testing::Values(1, 2, 7, 256));

TEST(Rendezvous, LargeBlobsArriveAndLargerOnesAreRefused) {
  std::unique_ptr<Root> root = start_root();
  for (const Status& s : run_threads(4, [&](int rank) { return whole_life(root->id(), rank, 4, kMaxBlobBytes - 8); })) {
    EXPECT_TRUE(s.ok()) << s.message();
  }
  std::unique_ptr<Root> other = start_root();
  Result<std::unique_ptr<Session>> session = Session::join(other->id(), 0, 1, soon());
  ASSERT_TRUE(session.ok());
  EXPECT_EQ((*session)->all_gather(blob_of(0, kMaxBlobBytes + 1), soon()).status().code(), moecclInvalidArgument);
}

std::vector<std::byte> row_of(int from, int to, size_t n_bytes) {
  return blob_of(from * 64 + to, n_bytes + static_cast<size_t>(to));
}

// Each rank gets its own rows only, so all of them together may be more than a gather may return.
TEST(Rendezvous, RowsReachTheirRanksAlone) {
  constexpr int kRanks = 5;
  for (const size_t n_bytes : {size_t{0}, size_t{1000}, size_t{3} << 20}) {
    std::unique_ptr<Root> root = start_root(patient_ms(20'000), "127.0.0.1");
    const auto body = [&](int rank) -> Status {
      MOECCL_ASSIGN_OR_RETURN(std::unique_ptr<Session> session, Session::join(root->id(), rank, kRanks, soon()));
      std::vector<std::vector<std::byte>> rows;
      for (int to = 0; to < kRanks; ++to) rows.push_back(row_of(rank, to, n_bytes));
      MOECCL_ASSIGN_OR_RETURN(const auto from, session->all_to_all(rows, soon()));
      for (int r = 0; r < kRanks; ++r) {
        if (from[static_cast<size_t>(r)] != row_of(r, rank, n_bytes))
          return error(moecclInternalError, "rank {} got a wrong row of rank {}", rank, r);
      }
      MOECCL_ASSIGN_OR_RETURN(const auto after, session->all_gather(rows[0], soon()));
      session->close();
      return after[4] == row_of(4, 0, n_bytes) ? Status() : error(moecclInternalError, "a wrong blob after the rows");
    };
    const bool gathers = n_bytes < kMaxBlobBytes;
    for (const Status& s : run_threads(kRanks, body))
      EXPECT_TRUE(s.ok() || (!gathers && contains(s.message(), "a blob of 3145728 bytes"))) << s.message();
  }
}

TEST(Rendezvous, RowsMustBeOneForEachRankAndNotTooLarge) {
  std::unique_ptr<Root> root = start_root();
  Result<std::unique_ptr<Session>> session = Session::join(root->id(), 0, 1, soon());
  ASSERT_TRUE(session.ok());
  for (const auto& rows : {std::vector<std::vector<std::byte>>(2), {blob_of(0, kMaxRowsBytes)}})
    EXPECT_EQ((*session)->all_to_all(rows, soon()).status().code(), moecclInvalidArgument);
  EXPECT_TRUE((*session)->all_to_all(std::vector<std::vector<std::byte>>{blob_of(0, 10)}, soon()).ok());
}

TEST(Rendezvous, WorksOverTcpOnLoopback) {
  for (const char* ip : {"127.0.0.1", "::1"}) {
    std::unique_ptr<Root> root = start_root(20'000, ip);
    ASSERT_NE(root, nullptr);
    for (const Status& s : run_threads(5, [&](int rank) { return whole_life(root->id(), rank, 5, 1000); })) {
      EXPECT_TRUE(s.ok()) << s.message();
    }
  }
}

TEST(Rendezvous, NeverListensOnEveryInterface) {
  for (const char* ip : {"0.0.0.0", "::", "[::]:1234", "0.0.0.0:80", "198.51.100.7", "host.example"}) {
    RootOptions options;
    options.socket_addr = ip;
    EXPECT_FALSE(Root::start(options).ok()) << ip;
  }
}

TEST(Rendezvous, ForkedRanksSeeThePidsThatTheKernelSaw) {
  std::unique_ptr<Root> root = start_root();
  Children children;
  for (int rank = 0; rank < 8; ++rank) {
    children.start([&, rank] {
      Result<std::unique_ptr<Session>> session = Session::join(root->id(), rank, 8, soon());
      if (!session.ok()) return 1;
      const pid_t pid = ::getpid();
      Result<std::vector<std::vector<std::byte>>> pids =
          (*session)->all_gather(std::as_bytes(std::span(&pid, 1)), soon());
      if (!pids.ok()) return 2;
      for (size_t r = 0; r < 8; ++r) {
        pid_t said = 0;
        std::memcpy(&said, (*pids)[r].data(), sizeof(said));
        const Peer& peer = (*session)->peers()[r];
        if (said != peer.pid || peer.uid != ::geteuid() || !peer.over_unix) return 3;
      }
      (*session)->close();
      return 0;
    });
  }
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(children.wait(i), 0) << "rank " << i;
}

// Returns a sealed page whose content names its owner.
Fd page_of(int rank, int index) {
  Fd fd(::memfd_create("page", MFD_CLOEXEC));
  const int content[2] = {rank, index};
  EXPECT_EQ(::write(fd.get(), content, sizeof(content)), static_cast<ssize_t>(sizeof(content)));
  return fd;
}
bool is_page_of(const Fd& fd, int rank, int index) {
  int content[2] = {};
  return ::pread(fd.get(), content, sizeof(content), 0) == static_cast<ssize_t>(sizeof(content)) &&
         content[0] == rank && content[1] == index;
}

int exchange_pages(const moecclUniqueId& id, int rank, int n_ranks) {
  const int before = open_descriptors();
  {
    Result<std::unique_ptr<Session>> session = Session::join(id, rank, n_ranks, soon());
    if (!session.ok()) return 1;
    for (int round = 0; round < 2; ++round) {
      std::vector<Fd> pages;
      std::vector<int> numbers;
      for (int i = 0; i < rank % 5; ++i) {  // 0 to 4 of them
        pages.push_back(page_of(rank, i));
        numbers.push_back(pages.back().get());
      }
      // In the second round, only ranks of the same parity want the pages.
      RankSet wanted_by(static_cast<size_t>(n_ranks));
      for (int r = 0; r < n_ranks; ++r) wanted_by[static_cast<size_t>(r)] = round == 0 || r % 2 == rank % 2;
      Result<std::vector<std::vector<Fd>>> all = (*session)->all_gather_fds(numbers, wanted_by, soon());
      if (!all.ok()) {
        std::printf("%s\n", all.status().message().c_str());
        return 2;
      }
      for (int r = 0; r < n_ranks; ++r) {
        const std::vector<Fd>& of = (*all)[static_cast<size_t>(r)];
        const int expected = r == rank || (round == 1 && r % 2 != rank % 2) ? 0 : r % 5;
        if (static_cast<int>(of.size()) != expected) return 3;
        for (int i = 0; i < expected; ++i) {
          if (!is_page_of(of[static_cast<size_t>(i)], r, i)) return 4;
          if ((::fcntl(of[static_cast<size_t>(i)].get(), F_GETFD) & FD_CLOEXEC) == 0) return 5;
        }
      }
    }
    if (!(*session)->barrier(soon()).ok()) return 6;
    (*session)->close();
  }
  return open_descriptors() == before ? 0 : 7;
}

TEST(Rendezvous, SixteenProcessesExchangeDescriptors) {
  const int before = open_descriptors();
  {
    std::unique_ptr<Root> root = start_root();
    Children children;
    for (int rank = 0; rank < 16; ++rank) {
      children.start([&, rank] { return exchange_pages(root->id(), rank, 16); });
    }
    for (size_t i = 0; i < 16; ++i) EXPECT_EQ(children.wait(i), 0) << "rank " << i;
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(Rendezvous, ThreadRanksThatWantNoDescriptorsGetNone) {
  std::unique_ptr<Root> root = start_root();
  std::atomic<int> most = 0;
  const int before = open_descriptors();
  const auto body = [&](int rank) -> Status {
    MOECCL_ASSIGN_OR_RETURN(std::unique_ptr<Session> session, Session::join(root->id(), rank, 256, soon()));
    const int mine[] = {STDERR_FILENO, STDERR_FILENO, STDERR_FILENO, STDERR_FILENO};
    MOECCL_ASSIGN_OR_RETURN(const std::vector<std::vector<Fd>> all, session->all_gather_fds(mine, {}, soon()));
    if (rank == 0) most = open_descriptors();
    MOECCL_TRY(session->barrier(soon()));
    session->close();
    for (const std::vector<Fd>& of : all) {
      if (!of.empty()) return error(moecclInternalError, "descriptors came unasked");
    }
    return {};
  };
  for (const Status& s : run_threads(256, body)) EXPECT_TRUE(s.ok()) << s.message();
  EXPECT_LT(most - before, 2 * 256 + 32);  // two ends of each connection, and a few more
}

TEST(Rendezvous, DescriptorsOverTcpAreAnErrorThatSaysSo) {
  std::unique_ptr<Root> root = start_root(20'000, "127.0.0.1");
  const auto body = [&](int rank) -> Status {
    MOECCL_ASSIGN_OR_RETURN(std::unique_ptr<Session> session, Session::join(root->id(), rank, 2, soon()));
    const int mine[] = {STDERR_FILENO};
    const Status refused = session->all_gather_fds(mine, {true, true}, soon()).status();
    EXPECT_EQ(refused.code(), moecclUnsupported);
    EXPECT_TRUE(contains(refused.message(), "UNIX"));
    MOECCL_TRY(session->barrier(soon()));
    session->close();
    return {};
  };
  for (const Status& s : run_threads(2, body)) EXPECT_TRUE(s.ok()) << s.message();
}

TEST(Rendezvous, TwoGroupsDoNotMeet) {
  std::unique_ptr<Root> a = start_root();
  std::unique_ptr<Root> b = start_root();
  for (const Status& s : run_threads(8, [&](int i) { return whole_life(i < 4 ? a->id() : b->id(), i % 4, 4, 10); })) {
    EXPECT_TRUE(s.ok()) << s.message();
  }
}

TEST(Rendezvous, ADetachedRootServesItsGroupAndEnds) {
  const int descriptors = open_descriptors();
  std::unique_ptr<Root> root = start_root();
  const moecclUniqueId id = root->id();
  Root::detach(std::move(root));
  for (const Status& s : run_threads(3, [&](int rank) { return whole_life(id, rank, 3, 10); })) {
    EXPECT_TRUE(s.ok()) << s.message();
  }
  EXPECT_TRUE(eventually([&] { return open_descriptors() == descriptors; }));
  const Status late = Session::join(id, 0, 3, soon()).status();
  EXPECT_EQ(late.code(), moecclRemoteError);
  EXPECT_TRUE(contains(late.message(), "has ended")) << late.message();
}

// A job without a time limit whose rank 0 never comes, or has ended, must end too.
TEST(Rendezvous, WhereNoRootAnswersForLongARankGivesUp) {
  const std::unique_ptr<Root> other = start_root(patient_ms(20'000), "127.0.0.1");  // with another key
  UniqueId with_other = decode_unique_id(other->id()).value(), nobody, handout;
  with_other.key = random_key().value();
  nobody.address = driver::parse_ip_address("127.0.0.1:" + std::to_string(tests::free_port())).value();
  handout.address = driver::unix_address(format("moeccl-nobody-{}", ::getpid()));
  JoinOptions options;
  options.wait_for_root = true;
  options.lost_after_ms = patient_ms(300);
  for (const UniqueId& id : {with_other, nobody, handout}) {
    const Stopwatch watch;
    const Status s = id.address.is_unix()
                         ? meet_at_place(id, 2, Deadline::never(), {}, options.lost_after_ms).status()
                         : Session::join(encode_unique_id(id).value(), 2, 3, Deadline::never(), options).status();
    EXPECT_EQ(s.code(), moecclTimeout) << s.message();
    for (const std::string& part : {id.address.str(), std::string("rank 2 "), std::string("rank 0")})
      EXPECT_TRUE(contains(s.message(), part)) << s.message();
    MOECCL_EXPECT_WITHIN(watch, 1300);
  }
}

// Most systems allow 1024 descriptors and many more to those that ask. Rank 0 and the others need them.
TEST(Rendezvous, TheLimitOfDescriptorsIsRaised) {
  Children child;
  child.start([] {
    const rlimit few = {64, 4096};
    const auto raised = [] {
      rlimit now = {};
      return ::getrlimit(RLIMIT_NOFILE, &now) == 0 && now.rlim_cur == 4096;
    };
    if (::setrlimit(RLIMIT_NOFILE, &few) != 0) return 1;
    const std::unique_ptr<Root> root = start_root();
    if (!raised()) return 2;
    if (::setrlimit(RLIMIT_NOFILE, &few) != 0 || !whole_life(root->id(), 0, 1, 1).ok()) return 3;
    return raised() ? 0 : 4;
  });
  EXPECT_EQ(child.wait(0), 0);
}

TEST(Rendezvous, ChurnLeavesNothingBehind) {
  start_root().reset();
  const int descriptors = open_descriptors();
  for (int i = 0; i < 300; ++i) {
    std::unique_ptr<Root> root = start_root();
    if (i % 3 == 0) continue;  // ended before any rank came
    ASSERT_TRUE(whole_life(root->id(), 0, 1, 1).ok());
  }
  EXPECT_EQ(open_descriptors(), descriptors);
}

}  // namespace
}  // namespace moeccl::bootstrap
