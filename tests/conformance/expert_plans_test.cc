// SPDX-License-Identifier: Apache-2.0
// The ways of operations whose plan comes from a placement: they are listed, priced, forced and proved. The environment
// is read once per process, so this file runs twice: with MOECCL_CHECK_PLANS (tests/meson.build) and without it.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "moeccl/moeccl.h"
#include "tests/support/captured.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr int kRanks = 4, kExperts = 4;
constexpr size_t kCount = 5000;
using Names = std::set<std::string>;

Names listed(moecclOp_t op) {
  char text[512];
  EXPECT_EQ(moecclPlanList(op, text, sizeof(text), nullptr), moecclSuccess);
  Names names;
  std::istringstream list(text);
  for (std::string name; std::getline(list, name, ',');) names.insert(name);
  return names;
}

// The names of the candidates of an operation, whose section of a page begins with `title`.
Names shown(const std::string& page, const std::string& title) {
  Names names;
  const size_t section = page.find(title + " with ");
  if (section == std::string::npos) return names;
  size_t at = page.find("candidates\n", section);
  for (at = page.find('\n', at) + 1; page.compare(at, 2, "  ") == 0; at = page.find('\n', at) + 1)
    names.insert(page.substr(at + 4, page.find(' ', at + 4) - at - 4));
  return names;
}

template <class Call>
std::string text_of(Call&& call) {
  size_t needed = 0;
  EXPECT_EQ(call(nullptr, 0, &needed), moecclSuccess);
  std::string text(needed, '\0');
  EXPECT_EQ(call(text.data(), needed, nullptr), moecclSuccess);
  return text;
}

// Replicas of every expert on both nodes and, of two of them, on both ranks of a node.
struct Replicas {
  std::vector<int32_t> slots = {0, 1, 0, 2, 3, 1, 2, 3, 1, 0, 2, 3};
  moecclPlacement_t placement = MOECCL_PLACEMENT_INIT;
  Replicas() {
    placement.n_experts = kExperts;
    placement.slots_per_rank = 3;
    placement.slot_expert = slots.data();
  }
};

struct Op {
  moecclOp_t op;
  const char* title;
};
constexpr Op kReplicaOps[] = {{moecclOpExpertAllReduce, "ExpertAllReduce"},
                              {moecclOpCollectGradients, "CollectGradients"},
                              {moecclOpReduceGradients, "ReduceGradients"},
                              {moecclOpPlaceWeights, "PlaceWeights"}};
constexpr Op kDomainOps[] = {{moecclOpExpertGather, "ExpertGather"}, {moecclOpExpertReduce, "ExpertReduce"}};

moecclHybrid_t hybrid_of(moecclComm_t comm) {
  static constexpr int32_t kDomain[] = {2, 2};
  moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
  config.n_experts = kExperts;
  config.n_levels = 2;
  config.domain = kDomain;
  moecclHybrid_t hybrid = nullptr;
  EXPECT_EQ(moecclHybridCreate(&hybrid, comm, &config), moecclSuccess) << moecclGetLastError(comm);
  return hybrid;
}

std::string page_of(moecclComm_t comm, moecclOp_t op, const Replicas& replicas) {
  return text_of([&](char* text, size_t bytes, size_t* needed) {
    return moecclExpertExplain(comm, op, kCount, moecclFloat32, &replicas.placement, text, bytes, needed);
  });
}
std::string page_of(moecclHybrid_t hybrid) {
  return text_of([&](char* text, size_t bytes, size_t* needed) {
    return moecclHybridExplain(hybrid, kCount * sizeof(float), text, bytes, needed);
  });
}

// Runs `op` once; small integers, so that sums are exact in any order. Returns what this rank gets.
std::vector<float> run(moecclComm_t comm, moecclHybrid_t hybrid, moecclOp_t op, int rank, const Replicas& replicas) {
  const size_t shard = (kCount + kRanks - 1) / kRanks;
  const size_t slots = 3 * kCount, shards = kExperts * shard, own = kCount, held = kExperts * kCount;
  const bool places = op == moecclOpPlaceWeights, gathers = op == moecclOpExpertGather,
             returns = op == moecclOpExpertReduce;
  std::vector<float> in(gathers ? own : returns ? held : places ? shards : slots);
  std::vector<float> out(gathers ? held : returns ? own : places || op == moecclOpExpertAllReduce ? slots : shards);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>((i * 7 + static_cast<size_t>(rank) * 5) % 13);
  const auto call = [&] {
    switch (op) {
      case moecclOpExpertAllReduce:
        return moecclExpertAllReduce(in.data(), out.data(), kCount, moecclFloat32, moecclSum, &replicas.placement, comm,
                                     nullptr);
      case moecclOpReduceGradients:
        return moecclReduceGradients(in.data(), out.data(), kCount, moecclFloat32, moecclSum, &replicas.placement, comm,
                                     nullptr);
      case moecclOpCollectGradients:
        return moecclCollectGradients(in.data(), out.data(), kCount, moecclFloat32, &replicas.placement, comm, nullptr);
      case moecclOpPlaceWeights:
        return moecclPlaceWeights(in.data(), out.data(), kCount, moecclFloat32, &replicas.placement, comm, nullptr);
      case moecclOpExpertGather:
        return moecclHybridGather(hybrid, in.data(), out.data(), kCount * sizeof(float), nullptr);
      default:
        return moecclHybridReduce(hybrid, in.data(), out.data(), kCount, moecclFloat32, nullptr);
    }
  };
  EXPECT_EQ(call(), moecclSuccess) << moecclOpName(op) << ": " << moecclGetLastError(comm);
  return out;
}

class ExpertPlans : public ::testing::TestWithParam<RankMode> {
 protected:
  static void on_four_ranks(const std::function<void(int rank, moecclComm_t comm)>& body) {
    RankOptions options{.mode = GetParam()};
    options.config.topology = "node:2 gpu:2";
    run_ranks(kRanks, body, options);
  }
};

TEST_P(ExpertPlans, TheListNamesWhatPagesShow) {
  on_four_ranks([](int, moecclComm_t comm) {
    const Replicas replicas;
    for (const Op& o : kReplicaOps) EXPECT_EQ(shown(page_of(comm, o.op, replicas), o.title), listed(o.op)) << o.title;
    moecclHybrid_t hybrid = hybrid_of(comm);
    const std::string page = page_of(hybrid);
    for (const Op& o : kDomainOps) EXPECT_EQ(shown(page, o.title), listed(o.op)) << page;
    MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
  });
}

TEST_P(ExpertPlans, ForceReachesEachOfThem) {
  on_four_ranks([](int rank, moecclComm_t comm) {
    const Replicas replicas;
    moecclHybrid_t hybrid = hybrid_of(comm);
    std::vector<Op> all(std::begin(kReplicaOps), std::end(kReplicaOps));
    all.insert(all.end(), std::begin(kDomainOps), std::end(kDomainOps));
    for (const Op& o : all) {
      const bool of_domains = o.op == moecclOpExpertGather || o.op == moecclOpExpertReduce;
      const std::vector<float> expected = run(comm, hybrid, o.op, rank, replicas);
      int reached = 0;
      for (const std::string& name : listed(o.op)) {
        // Peers' buffers cannot be read between processes.
        const moecclResult_t forced = moecclPlanForce(comm, o.op, name.c_str());
        if (forced == moecclUnsupported) continue;
        MOECCL_ASSERT_COMM_OK(forced, comm);
        ++reached;
        EXPECT_EQ(run(comm, hybrid, o.op, rank, replicas), expected) << o.title << " " << name;
        const std::string page = of_domains ? page_of(hybrid) : page_of(comm, o.op, replicas);
        // Buffers of the symmetric heap alone let "direct" sum in processes.
        const bool elsewhere = o.op == moecclOpExpertAllReduce && name == "direct" && GetParam() != RankMode::kThreads;
        EXPECT_EQ(page.find(std::string(o.title) + " with " + name + ", forced by") != std::string::npos, !elsewhere)
            << page;
      }
      EXPECT_GE(reached, o.op == moecclOpCollectGradients || (of_domains && GetParam() != RankMode::kThreads) ? 1 : 2)
          << o.title;
      MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, o.op, nullptr), comm);
    }
    MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
  });
}

INSTANTIATE_TEST_SUITE_P(, ExpertPlans, ::testing::Values(RankMode::kThreads, RankMode::kProcesses),
                         [](const auto& info) { return std::string(mode_name(info.param)); });

// What a proof refuses is shown by tests/unit/algo/prove_experts_test.cc.
TEST(ExpertPlanProofs, AreMadeWhereTheyAreAskedFor) {
  const bool asked = std::getenv("MOECCL_CHECK_PLANS") != nullptr;
  RankOptions options{.mode = RankMode::kProcesses};
  options.config.topology = "node:2 gpu:2";
  run_ranks(
      kRanks,
      [&](int rank, moecclComm_t comm) {
        const Replicas replicas;
        moecclHybrid_t hybrid = hybrid_of(comm);
        const std::string log = log_of([&] {
          for (const Op& o : kReplicaOps) run(comm, hybrid, o.op, rank, replicas);
          for (const Op& o : kDomainOps) run(comm, hybrid, o.op, rank, replicas);
          const size_t counts[] = {3, 500, 70, 0};
          std::vector<float> sent(600), received(600);
          MOECCL_EXPECT_OK(moecclTensorAllToAllv(sent.data(), received.data(), counts, moecclFloat32, comm, nullptr));
        });
        for (const Op& o : kReplicaOps)
          EXPECT_EQ(log.find(" of " + std::string(moecclOpName(o.op)) + " is proved") != std::string::npos, asked)
              << log;
        for (const Op& o : kDomainOps)
          EXPECT_EQ(log.find(" of " + std::string(moecclOpName(o.op)) + " is proved") != std::string::npos, asked)
              << log;
        EXPECT_EQ(log.find(" of tensor_alltoallv is proved") != std::string::npos, asked) << log;
        MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
