// SPDX-License-Identifier: Apache-2.0
// What a blocked task makes of peers that end, and of its own deadline while it spins.
#include <gtest/gtest.h>

#include <functional>
#include <memory>

#include "src/exec/task.h"
#include "tests/support/fabrics.h"

namespace moeccl::exec {
namespace {

using tests::Fabrics;

// Needs rank 1 until `needs_peer` is false, and is done some polls after that.
class Waiting final : public Task {
 public:
  explicit Waiting(Fabric& fabric) : Task(fabric) {}
  Progress poll() override {
    if (needs_peer) return Progress::kBlocked;
    return --n_left_ > 0 ? Progress::kBlocked : Progress::kDone;
  }
  Status diagnose() override { return {}; }
  std::string describe() const override { return "waiting"; }
  bool needs(uint32_t) const override { return needs_peer; }

  bool needs_peer = true;

 private:
  int n_left_ = 3;
};

// The peer ends between a rank's look at what it has done and the look at its process. `last` is what it does before,
// and `ended` returns whether it does so at this look already.
class Ending final : public transport::Link {
 public:
  Ending(
      std::unique_ptr<transport::Link> inner, std::function<void()> last,
      std::function<bool()> ended = [] { return true; })
      : inner_(std::move(inner)), last_(std::move(last)), ended_(std::move(ended)) {
    peer_words_ = {&inner_->board(), {&inner_->block(0), &inner_->block(1)}};
  }
  const char* name() const override { return "ending"; }
  Result<transport::PutState> put(uint64_t offset, const void* src, size_t bytes) override {
    return inner_->put(offset, src, bytes);
  }
  Status signal(uint32_t sig, uint32_t number, uint32_t tag) override { return inner_->signal(sig, number, tag); }
  Status check_peer() override {
    if (!ended_()) return {};
    last_();
    return error(moecclRemoteError, "rank 1 died");
  }

 private:
  std::unique_ptr<transport::Link> inner_;
  std::function<void()> last_;
  std::function<bool()> ended_;
};

TEST(Health, APeerThatDidItsPartBeforeItEndedIsNotMissed) {
  Fabrics fabrics(2);
  Waiting task(fabrics[0]);
  fabrics[0].links[1] = std::make_unique<Ending>(std::move(fabrics[0].links[1]), [&] { task.needs_peer = false; });
  const Status s = drive(task);
  EXPECT_TRUE(s.ok()) << s.message();
}

TEST(Health, APeerThatEndedBeforeItsPartIsNamed) {
  Fabrics fabrics(2);
  Waiting task(fabrics[0]);
  fabrics[0].links[1] = std::make_unique<Ending>(std::move(fabrics[0].links[1]), [] {});
  const Status s = drive(task);
  EXPECT_EQ(s.code(), moecclRemoteError);
  EXPECT_EQ(s.message(), "rank 1 died");
}

// Rank 2 hears elsewhere that rank 1 has died, and leaves. The death shows here a moment later, and is the reason.
TEST(Health, ADeathIsNamedRatherThanARankThatLeftBecauseOfIt) {
  Fabrics fabrics(3);
  Waiting task(fabrics[0]);
  const tests::Stopwatch watch;
  fabrics[0].links[1] = std::make_unique<Ending>(
      std::move(fabrics[0].links[1]), [] {}, [&] { return watch.ms() > 50; });
  fabrics[2].publish_state(transport::RankState::kLeft, moecclSuccess, "");
  const Status s = drive(task);
  EXPECT_EQ(s.code(), moecclRemoteError);
  EXPECT_EQ(s.message(), "rank 1 died");
}

TEST(Health, ARankThatLeavesIsNamedWhereNobodyDies) {
  Fabrics fabrics(3);
  Waiting task(fabrics[0]);
  fabrics[2].publish_state(transport::RankState::kLeft, moecclSuccess, "");
  const Status s = drive(task);
  EXPECT_EQ(s.code(), moecclRemoteError);
  EXPECT_TRUE(s.message().starts_with("rank 2 has destroyed its communicator")) << s.message();
}

TEST(Health, ARankThatSpinsLooksAtItsDeadlineAndItsPeers) {
  Fabrics fabrics(2);
  fabrics[0].spin_ns = 60'000'000'000;
  fabrics[0].timeout_ms = 100;
  Waiting task(fabrics[0]);
  const tests::Stopwatch watch;
  const Status s = drive(task);
  EXPECT_EQ(s.code(), moecclTimeout) << s.message();
  EXPECT_LT(watch.fair_ms(), tests::patient_ms(5'000));
}

// A rank of another host that has acknowledged nothing for a while.
class Silent final : public transport::Link {
 public:
  Silent(const transport::Board& board, const transport::BlockWord& block, int64_t ms, std::string why = {})
      : ms_(ms), why_(std::move(why)) {
    peer_words_ = {&board, {&block, &block}};
  }
  const char* name() const override { return "silent"; }
  Result<transport::PutState> put(uint64_t, const void*, size_t) override { return transport::PutState::kDone; }
  Status signal(uint32_t, uint32_t, uint32_t) override { return {}; }
  Status check_peer() override { return {}; }
  int64_t unacknowledged_ms() override { return ms_; }
  std::string why_silent() override { return why_; }

 private:
  int64_t ms_;
  std::string why_;
};

TEST(Health, HostsThatDoNotAnswerAreNamedInFewWords) {
  constexpr uint32_t kRanks = 1001;
  const auto board = std::make_unique<transport::Board>();
  const transport::BlockWord block = {};
  Fabric fabric(0, kRanks, 4096);
  for (uint32_t p = 1; p < kRanks; ++p) fabric.links[p] = std::make_unique<Silent>(*board, block, 1000);
  Waiting task(fabric);
  const auto late = [&] { return check_health(task, 0, now_ns(), false); };
  const Status all = late();
  EXPECT_EQ(all.code(), moecclTimeout);
  EXPECT_LT(all.message().size(), 4096u);
  EXPECT_NE(all.message().find("rank 1 (silent, its host has acknowledged nothing for 1000 ms), rank 2 "),
            std::string::npos)
      << all.message();
  EXPECT_NE(all.message().find(" others do not answer either; no other host answers: look at this host's network"),
            std::string::npos)
      << all.message();
  for (uint32_t p = 2; p < kRanks; ++p) fabric.links[p] = std::make_unique<Silent>(*board, block, 0);
  const std::string one = late().message();
  EXPECT_TRUE(one.ends_with("unresponsive: rank 1 (silent, its host has acknowledged nothing for 1000 ms)")) << one;
  for (uint32_t p = 1; p < kRanks; ++p)
    fabric.links[p] = std::make_unique<Silent>(*board, block, 1000, p == 1 ? "it is there, though" : "not asked");
  const std::string known = late().message();
  EXPECT_TRUE(known.ends_with("others do not answer either; it is there, though")) << known;
}

}  // namespace
}  // namespace moeccl::exec
