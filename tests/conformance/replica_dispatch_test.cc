// SPDX-License-Identifier: Apache-2.0
// Dispatch to replicas through the C interface: choices go to slots within their capacity, under a placement that
// changes at every step. The results of dispatch, combine and both backward passes are computed again token by token.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <vector>

#include "moeccl/moeccl.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr size_t kHidden = 3, kMostTokens = 60;

struct Shape {
  const char* name;
  int n;
  RankMode mode;
  const char* topology;
  size_t n_experts, slots, top_k;
  double capacity_factor;  // 0: no capacity
};
std::ostream& operator<<(std::ostream& out, const Shape& s) { return out << s.name; }

const Shape kShapes[] = {
    {"TwoRanks", 2, RankMode::kThreads, nullptr, 3, 3, 2, 1.0},
    {"ThreeProcesses", 3, RankMode::kProcesses, nullptr, 4, 2, 1, 1.0},
    {"TwoNodes", 4, RankMode::kThreads, "node:2 gpu:2", 5, 3, 2, 0.6},
    {"NoCapacity", 5, RankMode::kThreads, nullptr, 7, 3, 3, 0},
    {"Roomy", 6, RankMode::kMixed, "node:2 gpu:3", 8, 2, 2, 3.0},
    {"UnevenNodes", 7, RankMode::kThreads, "node:2 gpu:3+4", 6, 4, 4, 0.8},
    {"EightRanks", 8, RankMode::kProcesses, "node:2 gpu:4", 16, 4, 2, 1.0},
    {"OneExpert", 4, RankMode::kThreads, "node:2 gpu:2", 1, 2, 1, 0.5},
};

// The choices of all ranks in a step and the placement of experts. Every rank draws the same ones.
struct Step {
  Step(const Shape& shape, int number) : shape_(shape) {
    std::mt19937 random(static_cast<uint32_t>(test_seed() * 1000 + static_cast<uint64_t>(number)));
    const size_t n_slots = shape.slots * static_cast<size_t>(shape.n);
    for (size_t s = 0; s < n_slots; ++s)  // every expert has a slot, and some slots are empty
      slot_expert.push_back(s < shape.n_experts ? static_cast<int32_t>(s)
                                                : static_cast<int32_t>(random() % (shape.n_experts + 1)) - 1);
    std::shuffle(slot_expert.begin(), slot_expert.end(), random);
    size_t choices = 0;
    for (int r = 0; r < shape.n; ++r) {
      const size_t tokens = number % 4 == 1 && r == 0 ? 0 : random() % (kMostTokens + 1);
      std::vector<int32_t>& mine = topk.emplace_back();
      std::vector<int32_t> order(shape.n_experts);
      for (size_t t = 0; t < tokens; ++t) {
        // The first experts are more popular, and therefore drop tokens.
        for (size_t e = 0; e < order.size(); ++e) order[e] = static_cast<int32_t>(e);
        for (size_t k = 0; k < shape.top_k; ++k) {
          const double u = static_cast<double>(random() % 1000) / 1000;
          const auto pick = k + static_cast<size_t>(u * u * static_cast<double>(order.size() - k));
          std::swap(order[k], order[pick]);
          mine.push_back(random() % 10 == 0 ? -1 : order[k]);
        }
      }
      choices += mine.size();
    }
    if (shape.capacity_factor > 0)
      capacity = std::max(
          1, static_cast<int32_t>(shape.capacity_factor * static_cast<double>(choices) / static_cast<double>(n_slots)));
  }
  size_t n_tokens(int rank) const { return topk[static_cast<size_t>(rank)].size() / shape_.top_k; }
  int rank_of(int32_t slot) const { return slot / static_cast<int32_t>(shape_.slots); }

  const Shape& shape_;
  std::vector<int32_t> slot_expert;
  std::vector<std::vector<int32_t>> topk;  // [n_ranks][tokens][top_k]
  int32_t capacity = 0;
};

// Small integers, so that sums are exact in any order.
float in_value(int rank, size_t token, size_t i) {
  return static_cast<float>((rank * 7 + static_cast<int>(token * 3 + i)) % 9 - 4);
}
float out_gradient(int rank, size_t token, size_t i) {
  return static_cast<float>((rank * 5 + static_cast<int>(token + i * 2)) % 7 - 3);
}
float weight_of(int rank, size_t choice) { return static_cast<float>((rank + static_cast<int>(choice)) % 4 + 1); }
float expert_factor(int32_t expert) { return static_cast<float>(expert + 2); }

int node_of(const Shape& shape, int rank) {
  if (shape.topology == nullptr) return rank;
  return rank < shape.n / 2 ? 0 : 1;  // as in the topologies above
}

// Checks the rules of moecclChooseReplicas on the choices of all ranks: all[n_ranks][tokens][top_k].
void check_choices(const Shape& shape, const Step& step, const std::vector<std::vector<int32_t>>& all,
                   const std::vector<int64_t>& popularity, const std::vector<int64_t>& dropped) {
  const size_t n_slots = step.slot_expert.size();
  std::vector<int64_t> wanted(shape.n_experts), lost(shape.n_experts), load(n_slots);
  std::vector<std::vector<int64_t>> from(n_slots, std::vector<int64_t>(static_cast<size_t>(shape.n)));
  std::map<std::pair<int, int32_t>, std::pair<int64_t, int64_t>> kept;  // of rank and expert: kept, wanted
  for (int r = 0; r < shape.n; ++r) {
    std::vector<bool> full(shape.n_experts);
    for (size_t i = 0; i < all[static_cast<size_t>(r)].size(); ++i) {
      const int32_t e = step.topk[static_cast<size_t>(r)][i], s = all[static_cast<size_t>(r)][i];
      if (e < 0) {
        ASSERT_EQ(s, -1);
        continue;
      }
      auto& count = kept[{r, e}];
      ++count.second;
      ++wanted[static_cast<size_t>(e)];
      if (s < 0) {
        ++lost[static_cast<size_t>(e)];
        full[static_cast<size_t>(e)] = true;
        continue;
      }
      ASSERT_LT(static_cast<size_t>(s), n_slots);
      ASSERT_EQ(step.slot_expert[static_cast<size_t>(s)], e) << "slot " << s << " of rank " << r;
      ASSERT_FALSE(full[static_cast<size_t>(e)]) << "rank " << r << " keeps a token after one that it dropped";
      ++count.first;
      ++load[static_cast<size_t>(s)];
      ++from[static_cast<size_t>(s)][static_cast<size_t>(r)];
    }
  }
  EXPECT_EQ(popularity, wanted);
  EXPECT_EQ(dropped, lost);
  for (size_t e = 0; e < shape.n_experts; ++e) {
    std::vector<size_t> slots;
    for (size_t s = 0; s < n_slots; ++s)
      if (step.slot_expert[s] == static_cast<int32_t>(e)) slots.push_back(s);
    const auto replicas = static_cast<int64_t>(slots.size());
    const int64_t room = step.capacity > 0 ? std::min(wanted[e], replicas * step.capacity) : wanted[e];
    ASSERT_EQ(wanted[e] - lost[e], room) << "expert " << e << ": tokens are dropped above capacity alone";
    for (const size_t s : slots) {
      EXPECT_LE(std::abs(load[s] - load[slots[0]]), 1) << "expert " << e << ", slots " << slots[0] << " and " << s;
      EXPECT_LE(load[s], step.capacity > 0 ? step.capacity : load[s]) << "slot " << s;
    }
    for (int r = 0; r < shape.n; ++r) {
      const auto& [stayed, had] = kept[{r, static_cast<int32_t>(e)}];
      if (wanted[e] > 0) {
        EXPECT_LT(
            std::abs(static_cast<double>(stayed) - static_cast<double>(had * room) / static_cast<double>(wanted[e])), 1)
            << "rank " << r << " loses another share of expert " << e;
      }
    }
    // Near slots come first: tokens leave a rank, or a node, only when its slots serve no other ranks.
    for (const auto& place : {std::function<int(int)>([](int r) { return r; }),
                              std::function<int(int)>([&](int r) { return node_of(shape, r); })}) {
      for (int here = 0; here < shape.n; ++here) {
        bool leaves = false, takes = false;
        for (const size_t s : slots) {
          for (int r = 0; r < shape.n; ++r) {
            if (from[s][static_cast<size_t>(r)] == 0) continue;
            const int slot_at = place(step.rank_of(static_cast<int32_t>(s))), token_at = place(r);
            leaves = leaves || (token_at == place(here) && slot_at != token_at);
            takes = takes || (slot_at == place(here) && slot_at != token_at);
          }
        }
        EXPECT_FALSE(leaves && takes) << "expert " << e << ", around rank " << here;
      }
    }
  }
}

// Checks the results of operations on the routing, which are computed from the choices alone.
void check_operations(const Shape& shape, const Step& step, int rank, const std::vector<int32_t>& slots,
                      moecclRouting_t routing, moecclComm_t comm) {
  const size_t tokens = step.n_tokens(rank), first_slot = static_cast<size_t>(rank) * shape.slots;
  moecclRoutingInfo_t info{};
  info.size = sizeof info;
  MOECCL_ASSERT_COMM_OK(moecclRoutingGetInfo(routing, &info), comm);
  std::vector<float> in(tokens * kHidden), rows(info.n_rows * kHidden), y(rows.size()), out(in.size());
  for (size_t t = 0; t < tokens; ++t)
    for (size_t i = 0; i < kHidden; ++i) in[t * kHidden + i] = in_value(rank, t, i);
  MOECCL_ASSERT_COMM_OK(moecclDispatch(routing, in.data(), rows.data(), nullptr), comm);
  const auto for_each_row = [&](auto&& body) {
    for (size_t s = 0; s < shape.slots; ++s)
      for (auto row = static_cast<size_t>(info.expert_offsets[s]);
           row < static_cast<size_t>(info.expert_offsets[s + 1]); ++row)
        body(step.slot_expert[first_slot + s], row);
  };
  for_each_row([&](int32_t expert, size_t row) {
    for (size_t i = 0; i < kHidden; ++i) {
      EXPECT_EQ(rows[row * kHidden + i], in_value(info.row_source[row], static_cast<size_t>(info.row_token[row]), i));
      y[row * kHidden + i] = expert_factor(expert) * rows[row * kHidden + i];
    }
  });
  MOECCL_ASSERT_COMM_OK(moecclCombine(routing, y.data(), out.data(), nullptr), comm);

  std::vector<float> grad_out(in.size()), grad_y(rows.size()), grad_rows(rows.size()), grad_in(in.size()),
      grad_weight(slots.size() + 1);
  for (size_t t = 0; t < tokens; ++t)
    for (size_t i = 0; i < kHidden; ++i) grad_out[t * kHidden + i] = out_gradient(rank, t, i);
  MOECCL_ASSERT_COMM_OK(
      moecclCombineBackward(routing, grad_out.data(), grad_y.data(), y.data(), grad_weight.data(), nullptr), comm);
  for_each_row([&](int32_t expert, size_t row) {
    for (size_t i = 0; i < kHidden; ++i)
      grad_rows[row * kHidden + i] = expert_factor(expert) * grad_y[row * kHidden + i];
  });
  MOECCL_ASSERT_COMM_OK(moecclDispatchBackward(routing, grad_rows.data(), grad_in.data(), nullptr), comm);

  for (size_t t = 0; t < tokens; ++t) {
    for (size_t i = 0; i < kHidden; ++i) {
      float sum = 0;  // of weight * factor over the kept choices
      for (size_t k = 0; k < shape.top_k; ++k) {
        const size_t c = t * shape.top_k + k;
        if (slots[c] >= 0) sum += weight_of(rank, c) * expert_factor(step.topk[static_cast<size_t>(rank)][c]);
      }
      EXPECT_EQ(out[t * kHidden + i], sum * in_value(rank, t, i)) << "token " << t;
      EXPECT_EQ(grad_in[t * kHidden + i], sum * out_gradient(rank, t, i)) << "token " << t;
    }
    for (size_t k = 0; k < shape.top_k; ++k) {
      const size_t c = t * shape.top_k + k;
      float dot = 0;
      for (size_t i = 0; i < kHidden && slots[c] >= 0; ++i)
        dot += out_gradient(rank, t, i) * expert_factor(step.topk[static_cast<size_t>(rank)][c]) * in_value(rank, t, i);
      EXPECT_EQ(grad_weight[c], dot) << "token " << t << ", choice " << k;
    }
  }
}

class ReplicaDispatch : public ::testing::TestWithParam<Shape> {};

TEST_P(ReplicaDispatch, SharesTokensWithinCapacity) {
  const Shape& shape = GetParam();
  RankOptions options{.mode = shape.mode};
  options.config.topology = shape.topology;
  run_ranks(
      shape.n,
      [&](int rank, moecclComm_t comm) {
        // One layer serves all placements, because its experts are slots.
        moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
        config.hidden_bytes = kHidden * sizeof(float);
        config.type = moecclFloat32;
        config.top_k = static_cast<int32_t>(shape.top_k);
        config.n_experts = static_cast<int32_t>(shape.slots) * shape.n;
        config.max_tokens = kMostTokens;
        config.layout = moecclLayoutExpertMajor;
        moecclMoe_t moe = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
        moecclRouting_t routing = nullptr;
        for (int number = 0; number < scaled(12); ++number) {
          set_note("step " + std::to_string(number));
          const Step step(shape, number);
          const auto me = static_cast<size_t>(rank);
          moecclPlacement_t placement = MOECCL_PLACEMENT_INIT;
          placement.n_experts = static_cast<int32_t>(shape.n_experts);
          placement.slots_per_rank = static_cast<int32_t>(shape.slots);
          placement.slot_expert = step.slot_expert.data();
          moecclReplicaDispatch_t dispatch = MOECCL_REPLICA_DISPATCH_INIT;
          dispatch.placement = &placement;
          dispatch.top_k = static_cast<int32_t>(shape.top_k);
          dispatch.slot_capacity = step.capacity;
          std::vector<int32_t> slots(step.topk[me].size(), -7);
          std::vector<int64_t> popularity(shape.n_experts, -7), dropped(shape.n_experts, -7);
          MOECCL_ASSERT_COMM_OK(moecclChooseReplicas(&dispatch, step.topk[me].data(), step.n_tokens(rank), slots.data(),
                                                     popularity.data(), dropped.data(), comm),
                                comm);
          const size_t most = kMostTokens * shape.top_k;
          std::vector<int32_t> mine = slots, everybody(most * static_cast<size_t>(shape.n));
          mine.resize(most);
          MOECCL_ASSERT_COMM_OK(moecclAllGather(mine.data(), everybody.data(), most, moecclInt32, comm, nullptr), comm);
          std::vector<std::vector<int32_t>> all;
          for (size_t r = 0; r < static_cast<size_t>(shape.n); ++r) {
            const auto begin = everybody.begin() + static_cast<std::ptrdiff_t>(r * most);
            all.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(step.topk[r].size()));
          }
          check_choices(shape, step, all, popularity, dropped);
          if (::testing::Test::HasFailure()) return;
          std::vector<float> weight(slots.size());
          for (size_t c = 0; c < weight.size(); ++c) weight[c] = weight_of(rank, c);
          const auto update = [&] {
            return routing == nullptr
                       ? moecclRoutingCreate(&routing, moe, slots.data(), weight.data(), step.n_tokens(rank))
                       : moecclRoutingUpdate(routing, slots.data(), weight.data(), step.n_tokens(rank));
          };
          MOECCL_ASSERT_COMM_OK(update(), comm);
          check_operations(shape, step, rank, slots, routing, comm);
          if (::testing::Test::HasFailure()) return;
        }
        MOECCL_ASSERT_OK(moecclRoutingDestroy(routing));
        MOECCL_ASSERT_OK(moecclMoeDestroy(moe));
      },
      options);
}

INSTANTIATE_TEST_SUITE_P(Shapes, ReplicaDispatch, ::testing::ValuesIn(kShapes),
                         [](const auto& info) { return std::string(info.param.name); });

// Choices of two ranks, wrong in one way on rank 1 only.
struct Wrong {
  const char* name;
  int32_t topk[4];
  int32_t top_k, capacity;
  moecclResult_t there, here;  // on rank 1; on rank 0
  const char* says;            // on rank 1
};
std::ostream& operator<<(std::ostream& out, const Wrong& w) { return out << w.name; }

class WrongChoices : public ::testing::TestWithParam<Wrong> {};

TEST_P(WrongChoices, FailOnAllRanksWithASentence) {
  const Wrong& wrong = GetParam();
  run_ranks(2, [&](int rank, moecclComm_t comm) {
    const int32_t experts[] = {0, 1, 1, 0};
    moecclPlacement_t placement = MOECCL_PLACEMENT_INIT;
    placement.n_experts = 3;  // the last one has no slot
    placement.slots_per_rank = 2;
    placement.slot_expert = experts;
    moecclReplicaDispatch_t dispatch = MOECCL_REPLICA_DISPATCH_INIT;
    dispatch.placement = &placement;
    dispatch.top_k = 2;
    dispatch.slot_capacity = rank == 1 ? wrong.capacity : 5;
    const int32_t right[] = {0, 1, 1, -1};
    int32_t slots[4] = {};
    const moecclResult_t result =
        moecclChooseReplicas(&dispatch, rank == 1 ? wrong.topk : right, 2, slots, nullptr, nullptr, comm);
    EXPECT_EQ(result, rank == 1 ? wrong.there : wrong.here) << moecclGetLastError(comm);
    if (rank == 1) {
      EXPECT_NE(std::string(moecclGetLastError(comm)).find(wrong.says), std::string::npos) << moecclGetLastError(comm);
    }
    dispatch.slot_capacity = 0;
    MOECCL_EXPECT_COMM_OK(moecclChooseReplicas(&dispatch, right, 2, slots, nullptr, nullptr, comm), comm);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Ways, WrongChoices,
    ::testing::Values(
        Wrong{"NoSuchExpert", {0, 3, 1, 0}, 2, 5, moecclInvalidArgument, moecclRemoteError, "topk_index[0][1] is 3"},
        Wrong{"NoSlot", {0, 1, 2, 0}, 2, 5, moecclInvalidArgument, moecclRemoteError, "no slot for that expert"},
        Wrong{"Twice",
              {0, 1, 1, 1},
              2,
              5,
              moecclInvalidArgument,
              moecclRemoteError,
              "topk_index[1] names expert 1 twice"},
        Wrong{"OtherCapacity", {0, 1, 1, 0}, 2, 6, moecclMismatch, moecclMismatch, "slot_capacity"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(ReplicaDispatchArguments, AreNamed) {
  run_ranks(1, [](int, moecclComm_t comm) {
    const int32_t expert = 0;
    moecclPlacement_t placement = MOECCL_PLACEMENT_INIT;
    placement.n_experts = 1;
    placement.slots_per_rank = 1;
    placement.slot_expert = &expert;
    moecclReplicaDispatch_t dispatch = MOECCL_REPLICA_DISPATCH_INIT;
    dispatch.placement = &placement;
    const int32_t choice = 0;
    int32_t slot = 0;
    const auto refused = [&](const moecclReplicaDispatch_t* how, const int32_t* index, size_t n, const char* says) {
      EXPECT_EQ(moecclChooseReplicas(how, index, n, &slot, nullptr, nullptr, comm), moecclInvalidArgument) << says;
      EXPECT_NE(std::string(moecclGetLastError(comm)).find(says), std::string::npos) << moecclGetLastError(comm);
    };
    refused(nullptr, &choice, 1, "dispatch");
    refused(&dispatch, &choice, 1, "top_k is 0");
    dispatch.top_k = 1;
    dispatch.slot_capacity = -1;
    refused(&dispatch, &choice, 1, "slot_capacity is -1");
    dispatch.slot_capacity = 0;
    refused(&dispatch, nullptr, 1, "topk_index is NULL");
    refused(&dispatch, &choice, SIZE_MAX, "n_tokens is");
    dispatch.placement = nullptr;
    refused(&dispatch, &choice, 1, "placement");
    dispatch.placement = &placement;
    MOECCL_EXPECT_COMM_OK(moecclChooseReplicas(&dispatch, &choice, 1, &slot, nullptr, nullptr, comm), comm);
    EXPECT_EQ(slot, 0);
    MOECCL_EXPECT_COMM_OK(moecclChooseReplicas(&dispatch, nullptr, 0, nullptr, nullptr, nullptr, comm), comm);
  });
}

}  // namespace
}  // namespace moeccl::testing
