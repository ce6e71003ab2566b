// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/kernel_task.h"

#include <gtest/gtest.h>

#include <memory>

namespace moeccl::exec {
namespace {

// Operation 8 k + n stores its time where operation n's is, and reports its end afterwards.
TEST(KernelTask, ATimeThatALaterOperationMayHaveOverwrittenIsNotRead) {
  const auto board = std::make_unique<transport::Board>();
  constexpr uint64_t kNumber = 21;
  board->walks.ns[kNumber % transport::kWalkTimes] = 5000;
  for (uint64_t walked = kNumber; walked < kNumber + 2 * transport::kWalkTimes; ++walked) {
    board->progress.walked = walked;
    EXPECT_EQ(walk_ns(*board, kNumber), walked + 1 < kNumber + transport::kWalkTimes ? 5000u : 0u) << walked;
  }
  board->progress.walked = kNumber;
  board->walks.ns[kNumber % transport::kWalkTimes] = 0;
  EXPECT_EQ(walk_ns(*board, kNumber), 1u) << "0 would say that there is no time";
}

}  // namespace
}  // namespace moeccl::exec
