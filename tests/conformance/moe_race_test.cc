// SPDX-License-Identifier: Apache-2.0
// A layer that is updated step after step tries plans with similar prices: on all ranks together, and with right
// results.
#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "moeccl/moe.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr int kRanks = 4, kExperts = 8, kTopK = 2, kTokens = 16, kHidden = 64, kSteps = 24;

// Runs the steps and returns the plans that ran. `page` becomes that of the last routing.
std::vector<std::string> run_steps(int rank, moecclComm_t comm, int32_t trials, std::string* page) {
  std::vector<std::string> plans;
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  config.hidden_bytes = kHidden * sizeof(float);
  config.type = moecclFloat32;
  config.top_k = kTopK;
  config.n_experts = kExperts;
  config.max_tokens = kTokens;
  config.layout = moecclLayoutExpertMajor;
  config.trials = trials;
  moecclMoe_t moe = nullptr;
  EXPECT_EQ(moecclMoeCreate(&moe, comm, &config), moecclSuccess) << moecclGetLastError(comm);
  if (moe == nullptr) return plans;
  std::vector<int32_t> index(kTokens * kTopK);
  for (int i = 0; i < kTokens; ++i)
    for (int k = 0; k < kTopK; ++k) index[static_cast<size_t>(i * kTopK + k)] = (i + rank + k * 3) % kExperts;
  const std::vector<float> weight(index.size(), 0.5F);
  std::vector<float> in(kTokens * kHidden), out(in.size());
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(rank + 1) + static_cast<float>(i % 7);
  moecclRouting_t routing = nullptr;
  for (int step = 0; step < kSteps; ++step) {
    const moecclResult_t made = step == 0 ? moecclRoutingCreate(&routing, moe, index.data(), weight.data(), kTokens)
                                          : moecclRoutingUpdate(routing, index.data(), weight.data(), kTokens);
    EXPECT_EQ(made, moecclSuccess) << moecclGetLastError(comm);
    if (made != moecclSuccess) break;
    moecclRoutingInfo_t info{};
    info.size = sizeof(info);
    MOECCL_EXPECT_OK(moecclRoutingGetInfo(routing, &info));
    plans.emplace_back(info.algorithm);
    std::vector<float> rows(info.n_rows * kHidden + 1);
    EXPECT_EQ(moecclDispatch(routing, in.data(), rows.data(), nullptr), moecclSuccess) << moecclGetLastError(comm);
    std::fill(out.begin(), out.end(), -1.0F);
    EXPECT_EQ(moecclCombine(routing, rows.data(), out.data(), nullptr), moecclSuccess) << moecclGetLastError(comm);
    EXPECT_EQ(out, in) << "step " << step << " by " << plans.back();  // experts are the identity, weights sum to 1
  }
  size_t needed = 0;
  MOECCL_EXPECT_OK(moecclMoeExplain(routing, nullptr, 0, &needed));
  page->resize(needed);
  MOECCL_EXPECT_OK(moecclMoeExplain(routing, page->data(), page->size(), &needed));
  MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
  MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
  return plans;
}

constexpr const char* kTopology = "node:2(bw=10GB/s,lat=20us) gpu:2(bw=10GB/s,lat=20us)";

void race(int32_t trials, const std::function<void(const std::vector<std::string>&, const std::string&)>& judge) {
  for (const RankMode mode : {RankMode::kThreads, RankMode::kProcesses}) {
    RankOptions options{.mode = mode};
    options.init = false;
    run_ranks(
        kRanks,
        [&](int rank, moecclComm_t) {
          moecclComm_t comm = nullptr;
          moecclConfig_t config = MOECCL_CONFIG_INIT;
          config.topology = kTopology;
          config.pace = 1;
          MOECCL_ASSERT_OK(moecclCommInitRankConfig(&comm, kRanks, unique_id(), rank, &config));
          std::string page;
          const std::vector<std::string> plans = run_steps(rank, comm, trials, &page);
          // Names fit in 16 bytes. Every rank must run what rank 0 runs.
          std::vector<char> mine(kSteps * 16), all(mine.size() * kRanks);
          for (size_t i = 0; i < plans.size(); ++i) std::strncpy(&mine[i * 16], plans[i].c_str(), 15);
          MOECCL_ASSERT_OK(moecclAllGather(mine.data(), all.data(), mine.size(), moecclInt8, comm, nullptr));
          EXPECT_EQ(std::memcmp(all.data(), mine.data(), mine.size()), 0) << "rank " << rank;
          judge(plans, page);
          MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        },
        options);
  }
}

TEST(MoeRace, ClosePlansRunInTheProgramsOwnStepsAndThePageSaysWhatTheyTook) {
  race(0, [](const std::vector<std::string>& plans, const std::string& page) {
    EXPECT_EQ(plans.size(), size_t{kSteps});
    EXPECT_GT(std::set(plans.begin(), plans.end()).size(), 1U) << "nothing was tried";
    EXPECT_NE(page.find("steps took"), std::string::npos) << page;
    EXPECT_NE(page.find("HierMoE Eq. 1-6"), std::string::npos) << page;
  });
}

TEST(MoeRace, WithoutTrialsEqualRoutingsRunByOnePlan) {
  race(-1, [](const std::vector<std::string>& plans, const std::string& page) {
    EXPECT_EQ(plans.size(), size_t{kSteps});
    EXPECT_EQ(std::set(plans.begin(), plans.end()).size(), 1U);
    EXPECT_EQ(page.find("steps took"), std::string::npos) << page;
    EXPECT_EQ(page.find("steps try another plan"), std::string::npos) << page;
  });
}

TEST(MoeRace, AnotherValueIsRefusedByName) {
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  config.hidden_bytes = 4;
  config.top_k = 1;
  config.n_experts = 2;
  config.max_tokens = 1;
  config.trials = 7;
  char why[256];
  EXPECT_EQ(moecclMoeCheck(&config, 2, nullptr, why, sizeof(why)), moecclInvalidArgument);
  EXPECT_NE(std::strstr(why, "config.trials is 7"), nullptr) << why;
}

}  // namespace
}  // namespace moeccl::testing
