// SPDX-License-Identifier: Apache-2.0
// Ranks that try again after a failure meet, and those that come late are told why the others have failed.
#include "src/bootstrap/failed_meetings.h"

#include "src/bootstrap/launcher.h"
#include "src/bootstrap/place.h"
#include "src/driver/thread.h"
#include "tests/unit/bootstrap/group.h"

namespace moeccl::bootstrap {
namespace {

TEST(FailedMeetings, BelongToOneRankAndOneRoot) {
  const Key key = random_key().value(), other = random_key().value();
  EXPECT_NE(meeting_number(key, 0), meeting_number(key, 1));
  EXPECT_NE(meeting_number(key, 0), meeting_number(other, 0));
  FailedMeetings::add(meeting_number(key, 1), 3);
  EXPECT_TRUE(FailedMeetings::has(meeting_number(key, 1), 3));
  EXPECT_FALSE(FailedMeetings::has(meeting_number(key, 1), 2));
  EXPECT_FALSE(FailedMeetings::has(meeting_number(key, 2), 3));
}

TEST(FailedMeetings, AreForgotten) {
  const uint64_t meeting = meeting_number(random_key().value(), 0);
  FailedMeetings::add(meeting, 0, 20);
  EXPECT_TRUE(FailedMeetings::has(meeting, 0));
  driver::sleep_ns(25'000'000);
  EXPECT_FALSE(FailedMeetings::has(meeting, 0));
}

constexpr int kRanks = 3;
constexpr int64_t kTimeMs = 1000;

// Where the ranks find rank 0's root: a handout of a launcher's job, the handout of a place on this host, or a place
// with an address, whose key all roots share.
enum class Way { kLauncher, kHandout, kAddress };

class Retry : public testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    job_.launcher = "torchrun";
    job_.n_ranks = job_.n_local = kRanks;
    job_.job = format("retry {}", ::getpid());
    job_.master_addr = "127.0.0.1";
    job_.master_port = static_cast<uint16_t>(tests::free_port());
    const std::string address = format("127.0.0.1:{}", job_.master_port);
    if (GetParam() == Way::kHandout) place_ = decode_unique_id(unique_id_of_place(address, {}).value()).value();
    if (GetParam() != Way::kAddress) return;
    place_.address = driver::parse_ip_address(address).value();
    place_.key = random_key().value();
    place_.at_rank_0 = true;
  }

  Status try_once(int rank) {
    const Deadline deadline = Deadline::after_ms(patient_ms(kTimeMs));
    LauncherInfo info = job_;
    info.rank = rank;
    const auto find = [&] {
      return GetParam() == Way::kLauncher ? meet_from_environment(info, deadline)
                                          : meet_at_place(place_, static_cast<uint32_t>(rank), deadline, {});
    };
    MOECCL_ASSIGN_OR_RETURN(const moecclUniqueId id, find());
    JoinOptions options;  // as comm::connect() sets them
    options.wait_for_root = GetParam() == Way::kAddress;
    if (rank != 0) options.ask_again = find;
    MOECCL_ASSIGN_OR_RETURN(const auto session, Session::join(id, rank, kRanks, deadline, options));
    MOECCL_TRY(session->barrier(deadline));
    session->close();
    return {};
  }

  // Returns 0 when the rank has failed, for want of rank 2, and then joined.
  int join_at_second_try(int rank, int64_t pause_ms) {
    const Status first = try_once(rank);
    if (!contains(first.message(), "rank 2 of 3 did not join")) return said(first, 2) + 4;
    driver::sleep_ns(patient_ms(pause_ms) * 1'000'000);
    return said(try_once(rank), 3);
  }

  static int said(const Status& s, int code) {
    if (!s.ok()) std::puts(s.message().c_str());
    return s.ok() ? 0 : code;
  }

  LauncherInfo job_;
  UniqueId place_;
};

const char* name_of(const testing::TestParamInfo<Way>& info) {
  return info.param == Way::kLauncher ? "launcher" : info.param == Way::kHandout ? "handout" : "address";
}
INSTANTIATE_TEST_SUITE_P(At, Retry, testing::Values(Way::kLauncher, Way::kHandout, Way::kAddress), name_of);

TEST_P(Retry, RanksThatFailWithoutALateOneMeetItAtTheNextTry) {
  Children ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.start([&, rank] {
      if (rank != 2) return join_at_second_try(rank, 0);
      driver::sleep_ns(patient_ms(kTimeMs * 3 / 2) * 1'000'000);
      return said(try_once(rank), 1);
    });
  }
  for (size_t i = 0; i < ranks.size(); ++i) EXPECT_EQ(ranks.wait(i), 0) << "rank " << i;
}

TEST_P(Retry, ALateRankIsToldAndMeetsTheOthersAtTheNextTry) {
  Children ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.start([&, rank] {
      if (rank == 2) driver::sleep_ns(patient_ms(kTimeMs + 200) * 1'000'000);
      return join_at_second_try(rank, rank == 2 ? 0 : 700);
    });
  }
  for (size_t i = 0; i < ranks.size(); ++i) EXPECT_EQ(ranks.wait(i), 0) << "rank " << i;
}

}  // namespace
}  // namespace moeccl::bootstrap
