// SPDX-License-Identifier: Apache-2.0
// When an engine's own thread tells the peers what changed on this rank's board.
#include "transport/common/untold_board.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "src/base/clock.h"
#include "tests/support/fake_verbs.h"
#include "tests/support/network_fabrics.h"

namespace moeccl::tests {
namespace {

TEST(UntoldBoard, IsDueUnlessManyOperationsHaveEndedSinceTheLastLook) {
  auto board = std::make_unique<transport::Board>();
  transport::UntoldBoard untold;
  const auto due = [&](uint64_t completed) {
    board->progress.completed.store(completed);
    untold.set();
    return untold.due(*board);
  };
  EXPECT_FALSE(untold.due(*board)) << "nothing is new";
  EXPECT_TRUE(due(3));
  EXPECT_FALSE(due(7));
  EXPECT_FALSE(due(11));
  EXPECT_TRUE(due(11)) << "the operations have stopped";
  untold.take();
  board->progress.completed.store(50);
  EXPECT_FALSE(untold.due(*board)) << "those operations were told";
  EXPECT_TRUE(due(51));
  board->health.state.store(static_cast<uint32_t>(transport::RankState::kFailed));
  EXPECT_TRUE(due(100)) << "a failure is told whatever the pace";
}

// link_contract_test.cc prepares the environment of this program for the networks.
class EngineOfManyShortOperations : public ::testing::TestWithParam<const transport::Network*> {};

// Words for all peers would take the lock from operations that are over before any of them is read.
TEST_P(EngineOfManyShortOperations, TellsTheBoardWhenTheyStop) {
  if (const transport::Probe probe = GetParam()->probe(); !probe.usable) GTEST_SKIP() << probe.why_not;
  NetworkFabrics fabrics(*GetParam(), 2);
  ASSERT_TRUE(fabrics.status.ok()) << fabrics.status.message();
  exec::Fabric& f = fabrics[0];
  const transport::Board& copy = fabrics[1].link(0).board();
  const auto told = [&] {
    fabrics[1].engine->progress();
    return copy.progress.completed.load(std::memory_order_acquire);
  };
  const auto until = [&](const std::function<bool()>& done) {
    for (const Deadline d = Deadline::after_ms(patient_ms(20'000)); !done() && !d.passed();) std::this_thread::yield();
    return done();
  };
  uint64_t completed = 0;
  int least = 100;
  f.engine->begin();
  // A busy machine may stop this thread, and the board is then told.
  for (int round = 0; round < 100 && least > 2; ++round) {
    int times = 0;
    uint64_t seen = told();
    for (int i = 0; i < 100; ++i) {
      f.own->board().progress.completed.store(completed += 100, std::memory_order_release);
      f.engine->board_changed(false);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      times += std::exchange(seen, told()) != seen ? 1 : 0;
    }
    least = std::min(least, times);
  }
  EXPECT_LE(least, 2) << "the thread looks every 2 ms, and this takes more than 10";
  EXPECT_TRUE(until([&] { return told() == completed; }));
  f.own->board().progress.completed.store(completed + 100, std::memory_order_release);
  f.fail(error(moecclTimeout, "the test says so"));
  EXPECT_TRUE(until([&] { return told() == completed + 100 && copy.health.state.load() != 0; }));
  f.engine->end();
}

// An operation begins while the engine's thread sleeps, and then waits for a peer.
TEST_P(EngineOfManyShortOperations, TellsTheBoardOfAnOperationThatWaits) {
  if (const transport::Probe probe = GetParam()->probe(); !probe.usable) GTEST_SKIP() << probe.why_not;
  NetworkFabrics fabrics(*GetParam(), 2);
  ASSERT_TRUE(fabrics.status.ok()) << fabrics.status.message();
  exec::Fabric& f = fabrics[0];
  const auto& copy = fabrics[1].link(0).board().progress.completed;
  int64_t least_ms = 1000;
  for (uint64_t round = 1; round <= 5 && least_ms > 100; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    f.engine->begin();
    f.own->board().progress.completed.store(round, std::memory_order_release);
    const int64_t began = now_ns();
    f.engine->board_changed(false);
    for (const Deadline d = Deadline::after_ms(patient_ms(20'000)); copy.load() != round && !d.passed();) {
      fabrics[1].engine->progress();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    least_ms = std::min(least_ms, (now_ns() - began) / 1'000'000);
    f.engine->end();
  }
  EXPECT_LE(least_ms, 100);
}

INSTANTIATE_TEST_SUITE_P(Networks, EngineOfManyShortOperations,
                         ::testing::Values(transport::find_network("tcp"), transport::find_network("plugin"),
                                           &fake_verbs::kNetworks[0]),
                         [](const auto& info) { return info.param->name; });

}  // namespace
}  // namespace moeccl::tests
