// SPDX-License-Identifier: Apache-2.0
// Swaps the experts of a model's live layers (HierMoE, Section IV). moeccl/swap.h states the contract.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "moeccl/swap.h"
#include "src/comm/communicator.h"
#include "src/comm/stream.h"
#include "src/moe/moe_layer.h"
#include "src/moe/rooms.h"
#include "src/moe/swap/level_costs.h"
#include "src/routing/expert_map.h"

namespace moeccl::comm {

class ExpertSwap {
 public:
  // Collective. The object makes its own communicator, so `parent` need not outlive it.
  static Result<std::unique_ptr<ExpertSwap>> create(Communicator& parent, const moecclExpertSwapConfig_t* config);

  Status attach(MoeLayer& layer, std::span<const moecclSwapTensor_t> tensors, const int32_t* slot_of, int32_t* number);
  Status begin();
  Status test(int32_t* done) const;
  Status finish(int32_t* n_swaps);
  Status info(int32_t layer, moecclExpertSwapInfo_t* info) const;

 private:
  // A layer: values that are equal on all ranks, and this rank's measurements.
  struct Layer {
    std::shared_ptr<algo::ExpertMap> map;
    std::vector<uint32_t> owner;                         // [E] the rank of each slot
    std::vector<uint32_t> local_index;                   // [E] the slot's place among its rank's
    std::vector<int32_t> n_groups, group_of_slot, kind;  // of the problem; slots of one kind may swap
    LevelCosts costs;
    moecclSwapProblem_t problem = MOECCL_SWAP_PROBLEM_INIT;
    uint64_t slot_bytes = 0;  // of all tensors, on the rank with the most
    std::vector<moecclSwapTensor_t> tensors;
    uint64_t counted_at = 0;  // the step of the last count
    double own_swap_us = 0;   // what the last swap took on this rank
    moecclExpertSwapInfo_t info{};
  };
  // A layer's share of one round.
  struct Part {
    Layer* layer = nullptr;
    algo::SeenRouting seen;
    std::vector<int32_t> slot_of;
    uint64_t n_steps = 0;  // since its last count
    size_t first_word = 0;
    int32_t pair[2] = {-1, -1};
    double gain = 0, step_us = 0, swap_us = 0;
    bool swaps = false;
    // True on a rank that holds one of the two experts.
    bool mine = false;
    uint32_t peer = 0, place = 0;
    std::vector<Room> rooms;  // one for each tensor that arrives
    double moved_us = 0;
  };
  // The work from a Begin to its Finish.
  struct Round {
    std::vector<Part> parts;
    std::vector<int32_t> words;  // of the AllReduce
    std::atomic<bool> done{false};
  };

  ExpertSwap(std::unique_ptr<Communicator> comm, const Communicator& parent, const moecclExpertSwapConfig_t& config)
      : comm_(std::move(comm)), place_(parent.companions(), *comm_), config_(config) {}
  Status set_up(Layer& made, const MoeLayer& layer, std::span<const moecclSwapTensor_t> tensors,
                const int32_t* slot_of) const;
  Status agree(Layer& made, const MoeLayer& layer, const Status& own) const;
  size_t n_words(const Layer& layer) const;
  // Runs a part of a round. A rank that gives up tells its peers, which would wait for what it does not send.
  template <class Body>
  Status or_break_off(Body&& body) {
    Status status = contained(body);
    if (!status.ok()) comm_->break_off(status);
    return status;
  }
  Status start_round();
  // Runs on the background thread.
  Status run(Round& round);
  void count(Part& part, std::span<int32_t> words) const;
  void decide(Part& part, std::span<const int32_t> words) const;
  // Replaces this rank's decisions by rank 0's: mathematical functions of other machines may round differently, and
  // loads that are equal in truth may then differ in their last bits.
  Status agree_on_decisions(std::vector<Part>& parts);
  // Finds this rank's part in a swap.
  void find_peer(Part& part) const;
  // For every part that swaps, sends this rank's expert and receives the other one into a separate room.
  Status exchange(Round& round, bool at_finish);
  Status write(Part& part);
  std::byte* slot(const Part& part, const moecclSwapTensor_t& tensor) const {
    return static_cast<std::byte*>(tensor.slots) + part.place * tensor.slot_bytes;
  }

  std::unique_ptr<Communicator> comm_;
  Companions::Place place_;
  moecclExpertSwapConfig_t config_;
  std::vector<std::unique_ptr<Layer>> layers_;
  uint64_t n_steps_ = 0;
  bool begun_ = false;
  std::unique_ptr<Round> round_;  // null while no round is under way
  Rooms rooms_{*comm_};
  HostStream background_{/*waiters_run=*/false};  // declared last: its thread uses the other members
};

}  // namespace moeccl::comm
