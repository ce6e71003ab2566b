// SPDX-License-Identifier: Apache-2.0
// A rank that cannot make the plan of an operation, which its peers have made, tells them. They would otherwise wait
// for it until the operation's timeout.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "src/algo/algorithm.h"
#include "src/comm/collective.h"
#include "src/comm/communicator.h"
#include "tests/support/timing.h"

namespace moeccl::comm {
namespace {

using tests::patient_ms;
using tests::Stopwatch;

constexpr size_t kCount = 40'000;

// Runs `body` on two ranks, which are threads.
template <class Body>
void on_two_ranks(Body&& body) {
  const auto id = bootstrap::make_unique_id();
  ASSERT_TRUE(id.ok()) << id.status().message();
  moecclConfig_t given = MOECCL_CONFIG_INIT;
  given.timeout_ms = given.init_timeout_ms = static_cast<int32_t>(patient_ms(20'000));
  const Result<Config> config = Config::from(&given);
  ASSERT_TRUE(config.ok()) << config.status().message();
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      auto comm = Communicator::init(*id, 2, r, *config);
      ASSERT_TRUE(comm.ok()) << comm.status().message();
      body(r, **comm);
    });
  }
  for (std::thread& t : threads) t.join();
}

// Expects that rank 1 fails by itself, and that rank 0 is told soon.
void expect_told(int rank, const Status& status, const Stopwatch& watch) {
  EXPECT_EQ(status.code(), rank == 1 ? moecclInternalError : moecclRemoteError) << status.message();
  EXPECT_NE(status.message().find("no such plan"), std::string::npos) << status.message();
  EXPECT_EQ(status.message().find("rank 1 failed") != std::string::npos, rank == 0) << status.message();
  MOECCL_EXPECT_WITHIN(watch, 5000);
}

TEST(LoneFailure, OfATriedPlanIsTold) {
  on_two_ranks([](int rank, Communicator& comm) {
    std::vector<float> in(kCount, 1), out(kCount);
    CollectiveCall call;
    call.op = moecclOpAllReduce;
    call.type = moecclFloat32;
    call.count = kCount;
    call.send = in.data();
    call.recv = out.data();
    exec::Operation op;
    ASSERT_TRUE(prepare_collective(comm, call, op).ok());
    if (rank == 1) {
      auto slot = std::make_shared<PlanSlot>();
      slot->key = {moecclOpAllReduce, 0, kCount, sizeof(float), false, false};
      slot->tried = {{"first"}, {"second"}};
      slot->trial_class = 1;
      slot->remake = [](const PlanSlot&, std::string_view) -> Result<std::shared_ptr<PlanSlot>> {
        return error(moecclInternalError, "no such plan");
      };
      op.keep = slot;
      op.is_tried = true;
    }
    const Stopwatch watch;
    const Status status = comm.run_in_turn(comm.take_ticket(), op);
    expect_told(rank, status, watch);
  });
}

}  // namespace
}  // namespace moeccl::comm
