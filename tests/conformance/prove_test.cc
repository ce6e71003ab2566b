// SPDX-License-Identifier: Apache-2.0
// moecclPlanProve and MOECCL_CHECK_PLANS on communicators of normal programs, and names of operations, types and plans.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <string>

#include "moeccl/moeccl.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

std::string algorithms_of(moecclOp_t op) {
  char text[512];
  size_t needed = 0;
  EXPECT_EQ(moecclPlanList(op, text, sizeof(text), &needed), moecclSuccess) << moecclGetLastError(nullptr);
  EXPECT_EQ(needed, std::string(text).size() + 1);
  return text;
}

TEST(Names, AreThoseThatMessagesAndMoecclPlanUse) {
  EXPECT_STREQ(moecclOpName(moecclOpAllReduce), "allreduce");
  EXPECT_STREQ(moecclOpName(moecclOpExpertReduce), "expert_reduce");
  EXPECT_STREQ(moecclOpName(static_cast<moecclOp_t>(MOECCL_NUM_OPS)), "unknown operation");
  EXPECT_STREQ(moecclTypeName(moecclFloat8e4m3), "float8e4m3");
  EXPECT_STREQ(moecclTypeName(static_cast<moecclDataType_t>(-1)), "unknown type");
  EXPECT_NE(algorithms_of(moecclOpAllReduce).find("ring"), std::string::npos);
  EXPECT_EQ(algorithms_of(moecclOpExpertAllReduce), "direct,flat,nodes");
  EXPECT_EQ(algorithms_of(moecclOpPlaceWeights), "direct,nodes");
  EXPECT_EQ(algorithms_of(moecclOpExpertGather), "direct,staged");
  EXPECT_EQ(algorithms_of(moecclOpSendRecv), "");
  EXPECT_EQ(moecclPlanList(static_cast<moecclOp_t>(99), nullptr, 0, nullptr), moecclInvalidArgument);
}

TEST(PlanProve, ProvesEveryPlanThatCanBeForced) {
  moecclComm_t comms[4];
  moecclConfig_t config = MOECCL_CONFIG_INIT;
  config.topology = "node:2 gpu:2";
  ASSERT_EQ(moecclCommInitAll(comms, 4, &config), moecclSuccess) << moecclGetLastError(nullptr);
  int proved = 0;
  for (int i = moecclOpAllReduce; i <= moecclOpScatter; ++i) {
    const auto op = static_cast<moecclOp_t>(i);
    const std::string names = algorithms_of(op);
    for (size_t at = 0; at < names.size();) {
      const size_t end = std::min(names.find(',', at), names.size());
      const std::string name = names.substr(at, end - at);
      at = end + 1;
      if (moecclPlanForce(comms[0], op, name.c_str()) == moecclUnsupported) continue;
      for (const size_t count : {size_t{100}, size_t{1} << 20}) {
        EXPECT_EQ(moecclPlanProve(comms[0], op, count, moecclFloat32), moecclSuccess)
            << moecclOpName(op) << " " << name << ": " << moecclGetLastError(comms[0]);
        ++proved;
      }
    }
  }
  EXPECT_GE(proved, 2 * 9 * 3);
  EXPECT_EQ(moecclPlanProve(comms[0], moecclOpDispatch, 1, moecclFloat32), moecclInvalidArgument);
  for (moecclComm_t c : comms) EXPECT_EQ(moecclCommDestroy(c), moecclSuccess);
}

}  // namespace
}  // namespace moeccl::testing
