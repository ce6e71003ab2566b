// SPDX-License-Identifier: Apache-2.0
// Numbers that exceed every machine are refused at once, with the limit, and before anything is allocated for them.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

template <class Call>
void refused(const char* what, const char* part, Call&& call) {
  SCOPED_TRACE(what);
  const Stopwatch watch;
  const moecclResult_t result = call();
  EXPECT_TRUE(result == moecclInvalidArgument || result == moecclUnsupported) << moecclGetErrorString(result);
  EXPECT_NE(std::string(moecclGetLastError(nullptr)).find(part), std::string::npos) << moecclGetLastError(nullptr);
  MOECCL_EXPECT_WITHIN(watch, 500);
}

constexpr const char* kBillion = "gpu:1000000000";

moecclSimulateConfig_t simulation(const char* topology, moecclOp_t op) {
  moecclSimulateConfig_t c = MOECCL_SIMULATE_CONFIG_INIT;
  c.topology = topology;
  c.op = op;
  c.count = 1000;
  return c;
}

TEST(AbsurdSizes, RanksAreRefused) {
  moecclMoeConfig_t layer = MOECCL_MOE_CONFIG_INIT;
  layer.hidden_bytes = 64, layer.top_k = 1, layer.n_experts = 4, layer.max_tokens = 8;
  size_t bytes = 0;
  refused("check, topology", "1048576", [&] { return moecclMoeCheck(&layer, 4, kBillion, nullptr, 0); });
  refused("size, topology", "1048576",
          [&] { return moecclMoeQuerySize(&layer, 65535, "node:100000 gpu:100000", &bytes); });
  moecclComm_t comm = nullptr;
  moecclUniqueId id{};
  refused("init", "65535", [&] { return moecclCommInitRank(&comm, 1'000'000'000, id, 0); });
  refused("init all", "65535", [&] { return moecclCommInitAll(&comm, 1'000'000'000, nullptr); });
  for (const moecclOp_t op : {moecclOpAllReduce, moecclOpDispatch, moecclOpTensorAllToAll}) {
    const moecclSimulateConfig_t c = simulation(kBillion, op);
    refused("simulation", "1048576", [&] { return moecclSimulate(&c, nullptr, 0, nullptr); });
  }
  const moecclSimulateConfig_t layers = simulation("node:32768 gpu:8", moecclOpDispatch);
  refused("simulated layer", "16384", [&] { return moecclSimulate(&layers, nullptr, 0, nullptr); });
}

TEST(AbsurdSizes, CountsOfSimulationsAreRefused) {
  moecclSimulateConfig_t c = simulation("node:2 gpu:4", moecclOpDispatch);
  for (const uint64_t tokens : {uint64_t{1} << 28, uint64_t{1} << 61, ~uint64_t{0}}) {
    c.tokens_per_rank = tokens;
    refused("tokens", "choices", [&] { return moecclSimulate(&c, nullptr, 0, nullptr); });
  }
  c = simulation("node:2 gpu:4", moecclOpDispatch);
  const int32_t domain[] = {1, 2};
  c.domain = domain;
  for (const int32_t levels : {0, 1, 3, 1 << 30, -1}) {
    c.n_levels = levels;
    refused("levels", "n_levels", [&] { return moecclSimulate(&c, nullptr, 0, nullptr); });
  }
}

// A plan of 10^9 steps is not built even when it is requested by name.
TEST(AbsurdSizes, PlansOfTooManyStepsAreNotSimulated) {
  moecclSimulateConfig_t c = simulation("gpu:20000", moecclOpAllToAll);
  c.algorithm = "flat";
  const Stopwatch watch;
  EXPECT_EQ(moecclSimulate(&c, nullptr, 0, nullptr), moecclUnsupported);
  const std::string text = moecclGetLastError(nullptr);
  EXPECT_NE(text.find("at most 67108864 are simulated"), std::string::npos) << text;
  MOECCL_EXPECT_WITHIN(watch, 3000);
}

}  // namespace
}  // namespace moeccl::testing
