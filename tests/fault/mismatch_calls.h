// SPDX-License-Identifier: Apache-2.0
// Calls of four ranks of which one may differ, and what the others must say then.
#pragma once

#include <array>
#include <ostream>
#include <string>
#include <vector>

#include "tests/support/plain_call.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {

inline constexpr int kRanks = 4;
inline constexpr int kOdd = 2;  // the rank that makes another call
inline constexpr int64_t kLimitMs = 2000;

struct Collective {
  moecclOp_t op;
  const char* name;
  bool reduces, rooted;
};
inline void PrintTo(const Collective& c, std::ostream* out) { *out << c.name; }
inline constexpr Collective kCollectives[] = {
    {moecclOpAllReduce, "AllReduce", true, false},
    {moecclOpReduce, "Reduce", true, true},
    {moecclOpBroadcast, "Broadcast", false, true},
    {moecclOpAllGather, "AllGather", false, false},
    {moecclOpReduceScatter, "ReduceScatter", true, false},
    {moecclOpAllToAll, "AllToAll", false, false},
    {moecclOpGather, "Gather", false, true},
    {moecclOpScatter, "Scatter", false, true},
    {moecclOpAllToAllv, "AllToAllv", false, false},
    {moecclOpExpertAllReduce, "ExpertAllReduce", true, false},
};
inline constexpr size_t kPlainCollectives = 8;  // the first ones: every rank has the same counts

// The call of one rank.
struct Call {
  moecclOp_t op = moecclOpAllReduce;
  size_t count = 4096;
  moecclDataType_t type = moecclFloat32;
  moecclRedOp_t reduce = moecclSum;
  int root = 0;
  const char* plan = nullptr;
  bool splits = false;  // AllToAllv: this rank expects more from rank 1 than rank 1 sends
};

struct Buffers {
  // The counts of the ranks differ by at most 8.
  explicit Buffers(size_t count) : in(kRanks * (count + 8)), out(in.size()) {}
  std::vector<float> in, out;
};

inline moecclResult_t perform(const Call& c, moecclComm_t comm, Buffers& b) {
  const void* in = b.in.data();
  void* out = b.out.data();
  if (c.plan != nullptr) {
    EXPECT_EQ(moecclPlanForce(comm, c.op, c.plan), moecclSuccess) << moecclGetLastError(comm);
  }
  switch (c.op) {
    case moecclOpExpertAllReduce: {
      const int32_t slots[kRanks] = {0, 1, 0, 1};  // two experts with two replicas each
      moecclPlacement_t placement = MOECCL_PLACEMENT_INIT;
      placement.n_experts = 2;
      placement.slots_per_rank = 1;
      placement.slot_expert = slots;
      return moecclExpertAllReduce(in, out, c.count, c.type, c.reduce, &placement, comm, nullptr);
    }
    case moecclOpAllToAllv: {
      std::array<size_t, kRanks> sends, expects, at;
      sends.fill(c.count);
      expects.fill(c.count);
      if (c.splits) expects[1] += 2;
      for (size_t r = 0; r < kRanks; ++r) at[r] = r * (c.count + 2);
      return moecclAllToAllv(in, sends.data(), at.data(), out, expects.data(), at.data(), c.type, comm, nullptr);
    }
    default:
      return plain_call(c, c.reduce, in, out, comm, nullptr);
  }
}

// Expects a sentence that names the odd rank, another one and `word`. what: of the case.
inline void expect_named(const std::string& text, const char* word, const std::string& what) {
  EXPECT_NE(text.find("rank 2"), std::string::npos) << what << ": the odd rank is not named: " << text;
  const bool another = text.find("rank 0") != std::string::npos || text.find("rank 1") != std::string::npos ||
                       text.find("rank 3") != std::string::npos;
  EXPECT_TRUE(another) << what << ": the other rank is not named: " << text;
  EXPECT_NE(text.find(word), std::string::npos) << what << ": " << word << " is not named: " << text;
}

}  // namespace moeccl::testing
