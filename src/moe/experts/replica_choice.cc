// SPDX-License-Identifier: Apache-2.0
#include "src/moe/experts/replica_choice.h"

#include <cstring>
#include <numeric>
#include <utility>

#include "src/base/adopt.h"
#include "src/base/hash.h"
#include "src/comm/split.h"
#include "src/moe/creation.h"
#include "src/moe/experts/expert_calls.h"
#include "src/solve/replica_split.h"

namespace moeccl::comm {
namespace {

// What every rank sends before its counts.
struct Hello {
  int32_t code = moecclSuccess;
  int32_t slot_capacity = 0;
  uint64_t placement = 0;  // its hash
};

struct Dispatch {
  algo::ReplicaPlacement placement;
  uint32_t top_k = 1;
  int32_t slot_capacity = 0;
};

Result<Dispatch> check_dispatch(const moecclReplicaDispatch_t& given, uint32_t n_ranks) {
  Dispatch d;
  if (given.top_k < 1 || given.top_k > 64)
    return error(moecclInvalidArgument, "top_k is {}: give 1 to 64", given.top_k);
  if (given.slot_capacity < 0)
    return error(moecclInvalidArgument, "slot_capacity is {}: give the most tokens of a slot, or 0 for no limit",
                 given.slot_capacity);
  MOECCL_ASSIGN_OR_RETURN(d.placement, read_placement(given.placement, n_ranks));
  constexpr uint32_t kMostOfLayer = 65535;  // like a MoE layer
  if (d.placement.n_experts > kMostOfLayer)
    return error(moecclInvalidArgument, "placement.n_experts is {}: at most {} are possible", d.placement.n_experts,
                 kMostOfLayer);
  d.top_k = static_cast<uint32_t>(given.top_k);
  d.slot_capacity = given.slot_capacity;
  return d;
}

// Fills counts[n_experts] with this rank's choices of each expert.
Status count_choices(const Dispatch& d, const ReplicaChoice& choice, std::span<uint32_t> counts) {
  if (choice.n_tokens > 0 && choice.topk_index == nullptr)
    return error(moecclInvalidArgument, "topk_index is NULL: give [{}][{}] expert numbers", choice.n_tokens, d.top_k);
  if (choice.n_tokens > 0 && choice.slot_index == nullptr)
    return error(moecclInvalidArgument, "slot_index is NULL: give room for [{}][{}] slot numbers", choice.n_tokens,
                 d.top_k);
  std::vector<uint64_t> last(counts.size(), 0);  // 1 + the last token that chose the expert
  for (uint64_t i = 0; i < choice.n_tokens * d.top_k; ++i) {
    const int32_t e = choice.topk_index[i];
    if (e < -1 || e >= static_cast<int64_t>(d.placement.n_experts))
      return error(moecclInvalidArgument, "topk_index[{}][{}] is {}: experts are 0..{}, and -1 means none", i / d.top_k,
                   i % d.top_k, e, d.placement.n_experts - 1);
    if (e < 0) continue;
    if (d.placement.hosts[static_cast<size_t>(e)].empty())
      return error(moecclInvalidArgument,
                   "topk_index[{}][{}] is {}: the placement has no slot for that expert; give each expert one",
                   i / d.top_k, i % d.top_k, e);
    if (std::exchange(last[static_cast<size_t>(e)], i / d.top_k + 1) == i / d.top_k + 1)
      return error(moecclInvalidArgument, "topk_index[{}] names expert {} twice: a token's experts are distinct",
                   i / d.top_k, e);
    ++counts[static_cast<size_t>(e)];
  }
  return {};
}

// Brings choices in device memory to the host.
struct OnHost {
  std::vector<int32_t> topk_index, slot_index;

  Status bring(Communicator& comm, uint64_t n_choices, ReplicaChoice& choice) {
    MOECCL_TRY(comm.check_reach({choice.topk_index, choice.slot_index, choice.popularity, choice.dropped}));
    for (const auto& [name, pointer] :
         {std::pair<const char*, const void*>{"popularity", choice.popularity}, {"dropped", choice.dropped}})
      if (pointer != nullptr && comm.is_device_memory(pointer))
        return error(moecclInvalidArgument, "{} is CUDA memory: give host memory, or NULL", name);
    if (choice.slot_index != nullptr && comm.is_device_memory(choice.slot_index)) {
      slot_index.resize(n_choices);
      choice.slot_index = slot_index.data();
    }
    if (choice.topk_index == nullptr || !comm.is_device_memory(choice.topk_index)) return {};
    topk_index.resize(n_choices);
    MOECCL_TRY(comm.copy_across(topk_index.data(), choice.topk_index, n_choices * sizeof(int32_t)));
    choice.topk_index = topk_index.data();
    return {};
  }
};

// Returns where this rank's tokens for each expert go, in this order; the rest are dropped. counts[n_ranks][n_experts]
// is the same on all ranks, so all ranks agree on what each slot gets.
std::vector<std::vector<solve::SlotTokens>> share_out(const Dispatch& d, const solve::NodeRanks& ranks, uint32_t rank,
                                                      const std::vector<uint32_t>& counts,
                                                      const ReplicaChoice& choice) {
  const algo::ReplicaPlacement& p = d.placement;
  std::vector<std::vector<solve::SlotTokens>> shares(p.n_experts);
  std::vector<int64_t> tokens(p.n_ranks);
  std::vector<size_t> slot_rank, slots;
  for (uint32_t e = 0; e < p.n_experts; ++e) {
    int64_t wanted = 0;
    for (uint32_t r = 0; r < p.n_ranks; ++r) wanted += tokens[r] = counts[size_t{r} * p.n_experts + e];
    slot_rank.clear();
    slots.clear();
    for (const algo::ExpertHost& host : p.hosts[e]) {
      for (const uint32_t s : host.slots) {
        slot_rank.push_back(host.rank);
        slots.push_back(p.first_slot[host.rank] + s);
      }
    }
    const int64_t kept = solve::keep_capacity(
        tokens, d.slot_capacity > 0 ? static_cast<int64_t>(slots.size()) * d.slot_capacity : INT64_MAX);
    if (choice.popularity != nullptr) choice.popularity[e] = wanted;
    if (choice.dropped != nullptr) choice.dropped[e] = wanted - kept;
    if (tokens[rank] == 0) continue;
    solve::share_tokens(ranks, tokens, slot_rank, [&](size_t k, size_t r, int64_t n) {
      if (r == rank) shares[e].push_back({slots[k], n});
    });
  }
  return shares;
}

}  // namespace

Status choose_replicas(Communicator& comm, const moecclReplicaDispatch_t* given, const ReplicaChoice& asked) {
  MOECCL_TRY(comm.usable());
  const uint32_t n = comm.n_ranks();
  // A rank without a valid dispatch does not know how many counts to send, so it leaves before the exchange.
  MOECCL_ASSIGN_OR_RETURN(const moecclReplicaDispatch_t dispatch, adopt(given, "dispatch"));
  MOECCL_ASSIGN_OR_RETURN(const Dispatch d, check_dispatch(dispatch, n));
  const size_t n_experts = d.placement.n_experts;
  std::vector<uint32_t> counts(n_experts);
  ReplicaChoice choice = asked;
  OnHost host;
  Status own;
  if (choice.n_tokens > INT32_MAX / d.top_k)
    own = error(moecclInvalidArgument, "n_tokens is {}: at most {} with top_k {}", choice.n_tokens, INT32_MAX / d.top_k,
                d.top_k);
  if (own.ok()) own = host.bring(comm, choice.n_tokens * d.top_k, choice);
  if (own.ok()) own = count_choices(d, choice, counts);

  const Hello hello{own.code(), d.slot_capacity, d.placement.hash()};
  const size_t bytes = sizeof(Hello) + n_experts * sizeof(uint32_t);
  std::vector<std::byte> mine(bytes), all(bytes * n);
  std::memcpy(mine.data(), &hello, sizeof(hello));
  std::memcpy(mine.data() + sizeof(hello), counts.data(), n_experts * sizeof(uint32_t));
  MOECCL_TRY(all_gather_bytes(comm, mine.data(), bytes, all.data()));
  MOECCL_TRY(std::move(own));
  counts.resize(n * n_experts);
  for (uint32_t r = 0; r < n; ++r) {
    Hello theirs;
    std::memcpy(&theirs, &all[r * bytes], sizeof(theirs));
    if (theirs.code != moecclSuccess) return failed_there(r, "could not choose replicas", theirs.code);
    if (theirs.placement != hello.placement || theirs.slot_capacity != hello.slot_capacity)
      return error(moecclMismatch,
                   "moecclChooseReplicas: rank {} gives another {} than rank {}: give all ranks the same", r,
                   theirs.placement != hello.placement ? "placement" : "slot_capacity", comm.rank());
    std::memcpy(&counts[r * n_experts], &all[r * bytes + sizeof(Hello)], n_experts * sizeof(uint32_t));
  }

  if (const uint64_t choices = std::accumulate(counts.begin(), counts.end(), uint64_t{0}); choices > INT32_MAX)
    return error(moecclUnsupported, "all ranks' tokens make {} choices: at most {} are possible", choices, INT32_MAX);

  const std::vector<uint32_t>& group = comm.tree().levels.front().group_of_rank;
  const solve::NodeRanks ranks(std::vector<int32_t>(group.begin(), group.end()));
  std::vector<std::vector<solve::SlotTokens>> shares = share_out(d, ranks, comm.rank(), counts, choice);
  std::vector<size_t> at(n_experts, 0);
  for (uint64_t i = 0; i < choice.n_tokens * d.top_k; ++i) {
    const int32_t expert = choice.topk_index[i];
    choice.slot_index[i] = -1;
    if (expert < 0) continue;
    const auto e = static_cast<size_t>(expert);
    while (at[e] < shares[e].size() && shares[e][at[e]].tokens == 0) ++at[e];
    if (at[e] == shares[e].size()) continue;  // dropped
    --shares[e][at[e]].tokens;
    choice.slot_index[i] = static_cast<int32_t>(shares[e][at[e]].slot);
  }
  if (choice.slot_index != asked.slot_index)
    return comm.copy_across(asked.slot_index, choice.slot_index, choice.n_tokens * d.top_k * sizeof(int32_t));
  return {};
}

}  // namespace moeccl::comm
