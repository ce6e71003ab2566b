// SPDX-License-Identifier: Apache-2.0
// Calls on rows refuse buffers that overlap, because rows arrive while others are still to be sent.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/conformance/two_experts.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr size_t kTokens = 4, kWidth = 2, kScales = 4;

struct Layer {
  Layer(moecclComm_t comm, moecclMoeLayout_t layout) {
    moecclMoeConfig_t config = two_experts(kTokens, kWidth, layout);
    config.scale_bytes = kScales;
    MOECCL_EXPECT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
    const std::vector<int32_t> index{0, 1, 0, 1};  // each rank gets two rows of each rank
    MOECCL_EXPECT_COMM_OK(moecclRoutingCreate(&routing, moe, index.data(), nullptr, kTokens), comm);
  }
  ~Layer() {
    MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
    MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
  }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;
  moecclMoe_t moe = nullptr;
  moecclRouting_t routing = nullptr;
};

void refused(moecclResult_t got, const std::string& names) {
  EXPECT_EQ(got, moecclInvalidArgument) << names;
  EXPECT_NE(std::string(moecclGetLastError(nullptr)).find(names + " overlap"), std::string::npos)
      << moecclGetLastError(nullptr);
}

void refuses(moecclComm_t comm, moecclMoeLayout_t layout) {
  const Layer layer(comm, layout);
  moecclRouting_t const r = layer.routing;
  std::vector<float> a(kTokens * kWidth, 1), b(kTokens * kWidth, -1), c(kTokens * kWidth, 2);
  std::vector<char> scales(kTokens * kScales), arrived(kTokens * kScales);
  const float* const last = a.data() + a.size() - 1;
  float* const inside = a.data() + 1;
  refused(moecclDispatch(r, a.data(), a.data(), nullptr), "in and out");
  refused(moecclDispatch(r, a.data(), const_cast<float*>(last), nullptr), "in and out");
  refused(moecclCombine(r, a.data(), inside, nullptr), "in and out");
  refused(moecclDispatchBackward(r, a.data(), a.data(), nullptr), "grad_out and grad_in");
  refused(moecclCombineBackward(r, a.data(), inside, nullptr, nullptr, nullptr), "grad_out and grad_in");
  refused(moecclDispatchScaled(r, a.data(), scales.data(), a.data(), arrived.data(), nullptr), "in and out");
  refused(moecclDispatchScaled(r, a.data(), scales.data(), b.data(), scales.data(), nullptr),
          "in_scales and out_scales");
  refused(moecclDispatchScaled(r, a.data(), scales.data(), b.data(), b.data(), nullptr), "out and out_scales");
  refused(moecclDispatchScaled(r, a.data(), a.data(), b.data(), a.data() + 1, nullptr), "in and out_scales");
  if (layout == moecclLayoutExpertMajor) {
    refused(moecclCombineBackward(r, a.data(), b.data(), b.data(), c.data(), nullptr), "grad_in and in");
    refused(moecclCombineBackward(r, a.data(), b.data(), c.data(), b.data() + 1, nullptr), "grad_in and grad_weight");
  }
  // Neighbours do not overlap, and the communicator goes on.
  std::vector<float> both(2 * kTokens * kWidth, 3);
  MOECCL_EXPECT_COMM_OK(moecclDispatch(r, both.data(), both.data() + kTokens * kWidth, nullptr), comm);
  MOECCL_EXPECT_COMM_OK(moecclCombine(r, both.data() + kTokens * kWidth, both.data(), nullptr), comm);
  EXPECT_EQ(both, std::vector<float>(2 * kTokens * kWidth, 3));
}

TEST(MoeOverlap, IsRefusedByEveryCallOnRows) {
  for (const moecclMoeLayout_t layout : {moecclLayoutRows, moecclLayoutExpertMajor})
    run_ranks(2, [layout](int, moecclComm_t comm) { refuses(comm, layout); });
}

TEST(MoeOverlap, IsRefusedByTheRePlacingCombine) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    const Layer layer(comm, moecclLayoutExpertMajor);
    moecclReplaceConfig_t config = MOECCL_REPLACE_CONFIG_INIT;
    config.sample_tokens = 2;
    config.mode = moecclReplaceGiven;
    moecclReplacement_t replacement = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclReplaceCreate(&replacement, layer.moe, &config), comm);
    const int32_t placement[] = {1, 0, 0, 1};
    MOECCL_ASSERT_COMM_OK(moecclReplaceBegin(replacement, layer.routing, nullptr, placement), comm);
    std::vector<float> rows(kTokens * kWidth, static_cast<float>(rank)), out(kTokens * kWidth);
    refused(moecclReplaceCombine(replacement, rows.data(), rows.data() + 1, nullptr), "in and out");
    refused(moecclReplaceCombineBackward(replacement, rows.data(), rows.data(), nullptr, nullptr, nullptr),
            "grad_out and grad_in");
    MOECCL_EXPECT_COMM_OK(moecclReplaceCombine(replacement, rows.data(), out.data(), nullptr), comm);
    MOECCL_EXPECT_OK(moecclReplaceDestroy(replacement));
  });
}

}  // namespace
}  // namespace moeccl::testing
