// SPDX-License-Identifier: Apache-2.0
// comm.h: a group issues nothing after a call that it does not accept, whatever else is wrong with that call: ranks
// that fail different checks would otherwise part.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

// Objects of every kind on one rank.
struct Objects {
  explicit Objects(moecclComm_t c) : comm(c) {
    layer.hidden_bytes = 16;
    layer.type = moecclFloat32;
    layer.top_k = 1;
    layer.n_experts = 1;
    layer.max_tokens = 4;
    placement.n_experts = 1;
    placement.n_levels = 1;
    placement.domain = &one;
    moved.count = back.count = 3;
    moved.ratio = 1;
    MOECCL_EXPECT_COMM_OK(moecclMoeCreate(&moe, comm, &layer), comm);
    MOECCL_EXPECT_COMM_OK(moecclRoutingCreate(&routing, moe, index, nullptr, 4), comm);
    MOECCL_EXPECT_COMM_OK(moecclReplaceCreate(&replacement, moe, &replace), comm);
    MOECCL_EXPECT_COMM_OK(moecclHybridCreate(&hybrid, comm, &placement), comm);
    MOECCL_EXPECT_COMM_OK(moecclMigrationCreate(&migration, hybrid, nullptr, &moved), comm);
    MOECCL_EXPECT_COMM_OK(moecclGradientReturnCreate(&gradients, hybrid, nullptr, &back), comm);
    MOECCL_EXPECT_COMM_OK(moecclExpertSwapCreate(&swap, comm, &swaps), comm);
  }
  ~Objects() {
    (void)moecclExpertSwapDestroy(swap);
    (void)moecclGradientReturnDestroy(gradients);
    (void)moecclMigrationDestroy(migration);
    (void)moecclHybridDestroy(hybrid);
    (void)moecclReplaceDestroy(replacement);
    (void)moecclRoutingDestroy(routing);
    (void)moecclMoeDestroy(moe);
  }
  Objects(const Objects&) = delete;
  Objects& operator=(const Objects&) = delete;

  moecclComm_t comm;
  int32_t index[4] = {}, one = 1;
  moecclMoeConfig_t layer = MOECCL_MOE_CONFIG_INIT;
  moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
  moecclHybridConfig_t placement = MOECCL_HYBRID_CONFIG_INIT;
  moecclMigrationConfig_t moved = MOECCL_MIGRATION_CONFIG_INIT;
  moecclGradientReturnConfig_t back = MOECCL_GRADIENT_RETURN_CONFIG_INIT;
  moecclExpertSwapConfig_t swaps = MOECCL_EXPERT_SWAP_CONFIG_INIT;
  moecclMoe_t moe = nullptr;
  moecclRouting_t routing = nullptr;
  moecclReplacement_t replacement = nullptr;
  moecclHybrid_t hybrid = nullptr;
  moecclMigration_t migration = nullptr;
  moecclGradientReturn_t gradients = nullptr;
  moecclExpertSwap_t swap = nullptr;
};

struct Wrong {
  const char* call;
  std::function<moecclResult_t()> make;
};
#define MOECCL_WRONG(call)      \
  {                             \
#call, [&] { return call; } \
  }

void expect_that_each_ends_its_group(moecclComm_t comm, const std::vector<Wrong>& calls) {
  for (const Wrong& wrong : calls) {
    int32_t in = 1, out = 0;
    MOECCL_ASSERT_OK(moecclGroupStart());
    MOECCL_EXPECT_COMM_OK(moecclAllReduce(&in, &out, 1, moecclInt32, moecclSum, comm, nullptr), comm);
    const moecclResult_t refused = wrong.make();
    EXPECT_NE(refused, moecclSuccess) << wrong.call;
    EXPECT_EQ(moecclGroupEnd(), refused) << wrong.call;
    EXPECT_EQ(out, 0) << wrong.call;
  }
}

TEST(ApiGroup, IssuesNothingAfterACallThatItDoesNotAccept) {
  run_ranks(1, [](int, moecclComm_t comm) {
    const Objects o(comm);
    moecclMoe_t moe = nullptr;
    moecclRouting_t routing = nullptr;
    moecclComm_t part = nullptr;
    float x[16] = {1}, y[16] = {};
    expect_that_each_ends_its_group(
        comm, {
                  MOECCL_WRONG(moecclDispatch(nullptr, x, y, nullptr)),
                  MOECCL_WRONG(moecclDispatch(o.routing, nullptr, y, nullptr)),
                  MOECCL_WRONG(moecclDispatch(o.routing, x, y, nullptr)),
                  MOECCL_WRONG(moecclDispatchScaled(o.routing, x, x, y, y, nullptr)),
                  MOECCL_WRONG(moecclCombine(o.routing, nullptr, y, nullptr)),
                  MOECCL_WRONG(moecclDispatchBackward(o.routing, nullptr, y, nullptr)),
                  MOECCL_WRONG(moecclCombineBackward(o.routing, nullptr, y, nullptr, nullptr, nullptr)),
                  MOECCL_WRONG(moecclCombineBackward(o.routing, x, y, x, x, nullptr)),
                  MOECCL_WRONG(moecclRoutingCreate(nullptr, o.moe, o.index, nullptr, 4)),
                  MOECCL_WRONG(moecclRoutingCreate(&routing, nullptr, o.index, nullptr, 4)),
                  MOECCL_WRONG(moecclRoutingUpdate(nullptr, o.index, nullptr, 4)),
                  MOECCL_WRONG(moecclRoutingUpdateOnStream(o.routing, o.index, nullptr, 4, nullptr, nullptr)),
                  MOECCL_WRONG(moecclMoeCreate(nullptr, comm, &o.layer)),
                  MOECCL_WRONG(moecclMoeCreate(&moe, nullptr, &o.layer)),
                  MOECCL_WRONG(moecclMoeCreate(&moe, comm, nullptr)),
                  MOECCL_WRONG(moecclCommSplit(comm, 0, 0, nullptr, nullptr)),
                  MOECCL_WRONG(moecclCommSplit(nullptr, 0, 0, &part, nullptr)),
                  MOECCL_WRONG(moecclCommInitEnv(nullptr, nullptr)),
                  MOECCL_WRONG(moecclReplaceCreate(nullptr, o.moe, &o.replace)),
                  MOECCL_WRONG(moecclReplaceBegin(nullptr, o.routing, nullptr, nullptr)),
                  MOECCL_WRONG(moecclReplaceBegin(o.replacement, nullptr, nullptr, nullptr)),
                  MOECCL_WRONG(moecclReplaceCombine(o.replacement, x, y, nullptr)),
                  MOECCL_WRONG(moecclReplaceCombineBackward(nullptr, x, y, nullptr, nullptr, nullptr)),
                  MOECCL_WRONG(moecclHybridCreate(nullptr, comm, &o.placement)),
                  MOECCL_WRONG(moecclHybridMoeCreate(nullptr, o.hybrid, comm, &o.layer)),
                  MOECCL_WRONG(moecclHybridMoeCreate(&moe, o.hybrid, nullptr, &o.layer)),
                  MOECCL_WRONG(moecclMigrationCreate(nullptr, o.hybrid, nullptr, &o.moved)),
                  MOECCL_WRONG(moecclMigrationWait(nullptr, 0, nullptr, y, nullptr)),
                  MOECCL_WRONG(moecclMigrationWaitExpert(nullptr, 0, 0)),
                  MOECCL_WRONG(moecclMigrationWaitEncoded(nullptr, 0, nullptr, nullptr)),
                  MOECCL_WRONG(moecclGradientReturnCreate(nullptr, o.hybrid, nullptr, &o.back)),
                  MOECCL_WRONG(moecclGradientReturnReduce(nullptr, 0, nullptr, nullptr, nullptr)),
                  MOECCL_WRONG(moecclExpertSwapCreate(nullptr, comm, &o.swaps)),
                  MOECCL_WRONG(moecclExpertSwapAttach(nullptr, o.moe, nullptr, 0, nullptr, nullptr)),
                  MOECCL_WRONG(moecclExpertSwapAttach(o.swap, nullptr, nullptr, 0, nullptr, nullptr)),
                  MOECCL_WRONG(moecclExpertSwapFinish(nullptr, nullptr)),
                  MOECCL_WRONG(moecclCalibrate(nullptr, 0, 0)),
                  MOECCL_WRONG(moecclProfileLoad(nullptr, "a file")),
                  MOECCL_WRONG(moecclProfileLoad(comm, nullptr)),
                  MOECCL_WRONG(moecclChooseReplicas(nullptr, nullptr, 0, nullptr, nullptr, nullptr, nullptr)),
              });
  });
}

// Calls of this rank alone may fail without ending the group: no other rank makes them.
TEST(ApiGroup, GoesOnAfterACallThatIsNoPartOfIt) {
  run_ranks(1, [](int, moecclComm_t comm) {
    int32_t in = 1, out = 0;
    MOECCL_ASSERT_OK(moecclGroupStart());
    MOECCL_EXPECT_COMM_OK(moecclAllReduce(&in, &out, 1, moecclInt32, moecclSum, comm, nullptr), comm);
    EXPECT_EQ(moecclCommCount(comm, nullptr), moecclInvalidArgument);
    EXPECT_EQ(moecclPlanForce(comm, moecclOpAllReduce, "no such plan"), moecclInvalidArgument);
    EXPECT_EQ(moecclProfileSave(comm, ""), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("path is empty"), std::string::npos)
        << moecclGetLastError(comm);
    MOECCL_EXPECT_OK(moecclGroupEnd());
    EXPECT_EQ(out, 1);
  });
}

}  // namespace
}  // namespace moeccl::testing
