// SPDX-License-Identifier: Apache-2.0
// moecclMoeCheck, moecclMoeQuerySize and moecclMoeCreate accept and refuse the same layers, and a layer runs with a cap
// of exactly the size that moecclMoeQuerySize returns.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

struct Place {
  int n;
  const char* topology;
  size_t staging_bytes;
  int deterministic;
};
void PrintTo(const Place& p, std::ostream* out) {
  *out << p.n << " ranks, " << (p.topology != nullptr ? p.topology : "flat") << ", staging " << p.staging_bytes;
}
constexpr Place kPlaces[] = {
    {1, nullptr, 1 << 16, 0},          {3, nullptr, 1 << 20, 0}, {4, "node:2 gpu:2", 1 << 18, 0},
    {4, "node:2 gpu:1+3", 1 << 17, 1}, {4, nullptr, 0, 1},       {6, "node:3 socket:1 gpu:2", 200'001, 0},
};
constexpr int kLayersOfAPlace = 180;

template <class T>
T one_of(std::mt19937_64& random, std::initializer_list<T> values) {
  return values.begin()[random() % values.size()];
}

// Returns the same layer on every rank that draws from the same numbers. Some layers cannot run anywhere.
moecclMoeConfig_t random_layer(std::mt19937_64& random, const Place& place, std::vector<int32_t>& owners) {
  moecclMoeConfig_t c = MOECCL_MOE_CONFIG_INIT;
  c.hidden_bytes = one_of<size_t>(random, {1, 7, 24, 64, 1000, 1024, 4096, 8192, 14336, 40000, 65536, 114688, 400000});
  c.n_experts = 1 + static_cast<int32_t>(random() % 70);
  c.top_k = 1 + static_cast<int32_t>(random() % 9);
  c.max_tokens = one_of<size_t>(random, {1, 2, 5, 8, 33, 64, 500});
  if (random() % 2 == 0) c.layout = moecclLayoutExpertMajor, c.align_rows = one_of<int32_t>(random, {0, 1, 16});
  c.algorithm = one_of<const char*>(random, {nullptr, nullptr, "auto", "flat", "hier:1", "hier:2", "2dh"});
  if (random() % 4 == 0) c.scale_bytes = one_of<size_t>(random, {4, 100, 4096});
  if (random() % 3 == 0) c.memory_cap_bytes = one_of<size_t>(random, {1000, 50'000, 200'000, 1 << 20, 1 << 24});
  if (random() % 4 == 0) {
    owners.clear();
    for (int32_t e = 0; e < c.n_experts; ++e)
      owners.push_back(static_cast<int32_t>(random() % static_cast<unsigned>(place.n)));
    c.expert_rank = owners.data();
  }
  c.staging_bytes = place.staging_bytes;
  c.deterministic = place.deterministic;
  return c;
}

std::string text_of(const moecclMoeConfig_t& c) {
  return "hidden_bytes " + std::to_string(c.hidden_bytes) + " top_k " + std::to_string(c.top_k) + " experts " +
         std::to_string(c.n_experts) + " tokens " + std::to_string(c.max_tokens) + " layout " +
         std::to_string(c.layout) + " cap " + std::to_string(c.memory_cap_bytes) + " algorithm " +
         (c.algorithm != nullptr ? c.algorithm : "NULL");
}

// Returns whether all three accept the layer. The test fails where they do not agree.
bool all_agree(const Place& place, moecclComm_t comm, const moecclMoeConfig_t& c, moecclMoe_t* moe, size_t* bytes) {
  char why[512] = "";
  const moecclResult_t checked = moecclMoeCheck(&c, place.n, place.topology, why, sizeof(why));
  const moecclResult_t sized = moecclMoeQuerySize(&c, place.n, place.topology, bytes);
  const moecclResult_t created = moecclMoeCreate(moe, comm, &c);
  EXPECT_EQ(checked, sized) << text_of(c) << "\n" << why;
  EXPECT_EQ(checked, created) << text_of(c) << "\n" << why << "\n" << moecclGetLastError(comm);
  if (checked != moecclSuccess) {
    EXPECT_NE(std::string(why), "");
  }
  return checked == moecclSuccess && sized == moecclSuccess && created == moecclSuccess;
}

// Every choice of every rank goes to the first experts, so few ranks get all rows.
void run_a_routing(moecclMoe_t moe, moecclComm_t comm, const moecclMoeConfig_t& c) {
  std::vector<int32_t> index;
  for (size_t t = 0; t < c.max_tokens; ++t)
    for (int32_t k = 0; k < c.top_k; ++k) index.push_back(k);
  moecclRouting_t routing = nullptr;
  MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, index.data(), nullptr, c.max_tokens), comm);
  MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
}

class MoeSize : public ::testing::TestWithParam<Place> {};

TEST_P(MoeSize, CheckQuerySizeAndCreateAgree) {
  const Place& place = GetParam();
  RankOptions options;
  options.config.topology = place.topology;
  options.config.staging_bytes = place.staging_bytes;
  options.config.deterministic = place.deterministic;
  Shared<std::atomic<int>> accepted, refused;
  const int n_layers = scaled(kLayersOfAPlace);
  run_ranks(
      place.n,
      [&](int rank, moecclComm_t comm) {
        std::mt19937_64 random(test_seed());
        std::vector<int32_t> owners;
        for (int i = 0; i < n_layers; ++i) {
          moecclMoeConfig_t c = random_layer(random, place, owners);
          moecclMoe_t moe = nullptr;
          size_t bytes = 0, again = 0;
          const bool runs = all_agree(place, comm, c, &moe, &bytes);
          if (rank == 0) (runs ? *accepted : *refused).fetch_add(1);
          if (::testing::Test::HasFailure()) return;
          if (!runs) continue;
          MOECCL_ASSERT_OK(moecclMoeDestroy(moe));
          const bool capped = c.memory_cap_bytes > 0;  // then some routings may be too large, now and before
          c.memory_cap_bytes = bytes;
          ASSERT_TRUE(all_agree(place, comm, c, &moe, &again)) << "with a cap of what QuerySize says, " << text_of(c);
          EXPECT_LE(again, bytes);
          if (!capped) run_a_routing(moe, comm, c);
          MOECCL_ASSERT_OK(moecclMoeDestroy(moe));
          if (::testing::Test::HasFailure()) return;
        }
      },
      options);
  EXPECT_GT(accepted->load(), n_layers / 4);
  EXPECT_GT(refused->load(), n_layers / 10);
}

INSTANTIATE_TEST_SUITE_P(Places, MoeSize, ::testing::ValuesIn(kPlaces));

// The sentence of a refusal names a value that suffices, and it does.
TEST(MoeSizeTest, WhatARefusalNamesIsEnough) {
  moecclMoeConfig_t c = MOECCL_MOE_CONFIG_INIT;
  c.hidden_bytes = 114688, c.top_k = 8, c.n_experts = 64, c.max_tokens = 5, c.algorithm = "flat";
  c.staging_bytes = 1 << 20;
  char why[512] = "";
  const auto number_after = [&](const char* part) -> size_t {
    const size_t at = std::string(why).find(part);
    EXPECT_NE(at, std::string::npos) << part << " in: " << why;
    return at == std::string::npos ? 0 : std::strtoull(why + at + std::strlen(part), nullptr, 10);
  };
  ASSERT_EQ(moecclMoeCheck(&c, 8, nullptr, why, sizeof(why)), moecclOutOfMemory);
  const size_t staging = number_after("(MOECCL_STAGING_BYTES) of ");
  c.staging_bytes = staging - 128;
  EXPECT_EQ(moecclMoeCheck(&c, 8, nullptr, why, sizeof(why)), moecclOutOfMemory);
  c.staging_bytes = staging;
  EXPECT_EQ(moecclMoeCheck(&c, 8, nullptr, why, sizeof(why)), moecclSuccess) << why;
  c.memory_cap_bytes = 100'000;
  ASSERT_EQ(moecclMoeCheck(&c, 8, nullptr, why, sizeof(why)), moecclOutOfMemory);
  const size_t cap = number_after("too little: give ");
  c.memory_cap_bytes = cap - 1;
  EXPECT_EQ(moecclMoeCheck(&c, 8, nullptr, why, sizeof(why)), moecclOutOfMemory);
  c.memory_cap_bytes = cap;
  EXPECT_EQ(moecclMoeCheck(&c, 8, nullptr, why, sizeof(why)), moecclSuccess) << why;
}

// 8 ranks of a node share 1 GiB of staging, 128 MiB each. 32 ranks of a data centre would have 32 MiB.
TEST(MoeSizeTest, RanksOfANodeShareTheStagingOfALongLine) {
  moecclMoeConfig_t c = MOECCL_MOE_CONFIG_INIT;
  c.hidden_bytes = 300'000, c.top_k = 1, c.n_experts = 64, c.max_tokens = 4, c.algorithm = "flat";
  const char* far = "dc:2(bw=1.25GB/s,lat=20ms) node:4(bw=50GB/s,lat=5us) gpu:8";
  EXPECT_EQ(moecclMoeCheck(&c, 64, far, nullptr, 0), moecclSuccess);
  c.staging_bytes = 32 << 20;
  EXPECT_EQ(moecclMoeCheck(&c, 64, far, nullptr, 0), moecclOutOfMemory);
}

TEST(MoeSizeTest, WhatTheConfigSaysOfTheCommunicatorHolds) {
  run_ranks(2, [](int, moecclComm_t comm) {
    moecclMoeConfig_t c = MOECCL_MOE_CONFIG_INIT;
    c.hidden_bytes = 64, c.top_k = 1, c.n_experts = 4, c.max_tokens = 8;
    c.staging_bytes = 1 << 17;
    moecclMoe_t moe = nullptr;
    EXPECT_EQ(moecclMoeCreate(&moe, comm, &c), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("staging_bytes is 131072"), std::string::npos)
        << moecclGetLastError(comm);
    c.staging_bytes = 0, c.deterministic = 1;
    EXPECT_EQ(moecclMoeCreate(&moe, comm, &c), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("deterministic is 1"), std::string::npos);
    for (const int32_t other : {2, -1}) {
      c.deterministic = other;
      EXPECT_EQ(moecclMoeCreate(&moe, comm, &c), moecclInvalidArgument);
      EXPECT_NE(std::string(moecclGetLastError(comm)).find("give 0 or 1"), std::string::npos);
      EXPECT_EQ(moecclMoeCheck(&c, 2, nullptr, nullptr, 0), moecclInvalidArgument);
    }
    // A struct of an older version ends before both fields.
    c.size = offsetof(moecclMoeConfig_t, staging_bytes);
    MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &c), comm);
    MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
  });
}

// The time is linear in the ranks, and refusals come before anything is allocated.
TEST(MoeSizeTest, ManyRanksTakeNoTime) {
  moecclMoeConfig_t c = MOECCL_MOE_CONFIG_INIT;
  c.hidden_bytes = 64, c.top_k = 2, c.n_experts = 65535, c.max_tokens = 4;
  c.staging_bytes = size_t{1} << 30;
  char why[512] = "";
  size_t bytes = 0;
  for (const char* topology : {static_cast<const char*>(nullptr), "node:4096 gpu:8", "rack:32 node:64 gpu:16"}) {
    const Stopwatch watch;
    EXPECT_EQ(moecclMoeCheck(&c, 32768, topology, why, sizeof(why)), moecclSuccess) << why;
    EXPECT_EQ(moecclMoeQuerySize(&c, 32768, topology, &bytes), moecclSuccess);
    EXPECT_LT(watch.fair_ms(), patient_ms(2000)) << topology;
  }
  for (const int n : {65536, 1'000'000'000, 2'147'483'647, 0, -1}) {
    const Stopwatch watch;
    EXPECT_EQ(moecclMoeCheck(&c, n, nullptr, why, sizeof(why)), moecclInvalidArgument);
    EXPECT_NE(std::string(why).find("between 1 and 65535"), std::string::npos) << why;
    EXPECT_EQ(moecclMoeQuerySize(&c, n, nullptr, &bytes), moecclInvalidArgument);
    EXPECT_LT(watch.fair_ms(), patient_ms(100));
  }
}

}  // namespace
}  // namespace moeccl::testing
