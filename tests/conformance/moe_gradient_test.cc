// SPDX-License-Identifier: Apache-2.0
// combine's backward pass on ranks without tokens: only grad_weight says whether weights are wanted.
#include <gtest/gtest.h>

#include <vector>

#include "tests/conformance/two_experts.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

void backward(int rank, moecclComm_t comm, bool weighted, bool wants_weights) {
  constexpr size_t kTokens = 4, kWidth = 4;
  const moecclMoeConfig_t config = two_experts(kTokens, kWidth, moecclLayoutExpertMajor);
  moecclMoe_t layer = nullptr;
  MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&layer, comm, &config), comm);
  const std::vector<int32_t> index{0, 1, 0, 1};
  const std::vector<float> weight{1, 2, 3, 4};
  const size_t n_tokens = rank == 0 ? kTokens : 0;
  moecclRouting_t routing = nullptr;
  MOECCL_ASSERT_COMM_OK(
      moecclRoutingCreate(&routing, layer, index.data(), weighted ? weight.data() : nullptr, n_tokens), comm);
  // Every rank passes the tensor that combine got, as programs do that have saved it.
  std::vector<float> grad_out(kTokens * kWidth, 1.0f), grad_in(kTokens * kWidth, -1.0f), in(kTokens * kWidth, 3.0f);
  std::vector<float> grad_weight(kTokens, -1.0f);
  MOECCL_EXPECT_COMM_OK(moecclCombineBackward(routing, grad_out.data(), grad_in.data(), in.data(),
                                              wants_weights ? grad_weight.data() : nullptr, nullptr),
                        comm);
  // Rank r's expert r has tokens r and r + 2, in this order.
  for (size_t row = 0; row < 2; ++row)
    EXPECT_EQ(grad_in[row * kWidth], weighted ? weight[static_cast<size_t>(rank) + 2 * row] : 1.0f);
  if (rank == 0 && wants_weights) {
    EXPECT_EQ(grad_weight, std::vector<float>(kTokens, 3.0f * kWidth));
  }
  int32_t sum = 1;
  MOECCL_EXPECT_COMM_OK(moecclAllReduce(&sum, &sum, 1, moecclInt32, moecclSum, comm, nullptr), comm);
  EXPECT_EQ(sum, 2);
  MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
  MOECCL_EXPECT_OK(moecclMoeDestroy(layer));
}

TEST(MoeGradient, ARankWithoutTokensMayPassWhatItHasSaved) {
  for (const bool weighted : {false, true})
    for (const bool wants_weights : {false, true})
      run_ranks(2, [=](int rank, moecclComm_t comm) { backward(rank, comm, weighted, wants_weights); });
}

}  // namespace
}  // namespace moeccl::testing
