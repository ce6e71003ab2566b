// SPDX-License-Identifier: Apache-2.0
// What every operation that all ranks call alike has in common: its place in the order of operations, the entry that
// peers can read, and how a disagreement is found and named.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "src/exec/operation.h"
#include "src/exec/task.h"

namespace moeccl::exec {

class AgreedTask : public Task {
 public:
  // The operation must live until the task has ended.
  AgreedTask(Fabric& fabric, const Operation& op, bool eager = false) : Task(fabric), op_(op), eager_(eager) {}

  Status diagnose() override;
  uint64_t sequence() const override { return sequence_; }
  bool needs(uint32_t peer) const override;

 protected:
  // Goes on with an operation that another task has entered.
  void continue_from(const AgreedTask& begun);
  // Takes the communicator's next sequence number, so operations are started one after another.
  void take_number();
  void note_begin();  // in the flight recorder, once
  void begin() {
    take_number();
    note_begin();
  }
  // kMoved: all peers are at most one operation behind, and have told what they have to tell.
  Progress enter();
  void publish();  // this rank's entry
  // The one rank with which this one compares what it ran then, or kAll.
  static constexpr uint32_t kAll = ~0u, kNobody = kAll - 1;
  uint32_t to_compare_with(uint64_t sequence) const;
  // Compares what peers that this rank has not met in the operation have published by now.
  Status look_around();
  // Tells the peers that this rank has finished. Fails when the communicator has failed meanwhile: what this rank put
  // since then may be lost, so peers must not hear that it took its part. Fails, too, where it looks around and sees a
  // peer that calls something else.
  Progress end(uint64_t wire_bytes);

  Status check_entry(uint32_t peer);  // compares signatures; the peer has entered this operation
  // The history of this rank in one of the last operations, and that of a peer that has finished it.
  uint64_t own_history(uint64_t sequence) const {
    return fabric().own->board().entries[sequence % transport::kEntries].history.load(std::memory_order_relaxed);
  }
  uint64_t history_at_end(uint32_t peer, uint64_t sequence) const;
  Status find_difference(uint32_t peer);  // in the last operations, this one included
  Status check_blocks(uint32_t peer);     // AllToAllv: what it sends is what we expect, and the other way round
  // The first word of a peer in this operation: does it call the same?
  Status check_tag(uint32_t peer, uint32_t tag);
  const transport::Entry& entry_of(uint32_t peer) const { return entry_of(peer, sequence_); }
  const transport::Entry& entry_of(uint32_t peer, uint64_t sequence) const {
    return fabric().link(peer).board().entries[sequence % transport::kEntries];
  }
  static Signature read_signature(const transport::Entry& entry, uint64_t& flags);
  // Whether peers can reach it; no buffer (of a rank that is not the root) is no obstacle.
  bool reachable(const void* buffer) const { return buffer == nullptr || fabric().in_heap(buffer); }
  bool is_v() const { return plan::facts(op_.signature.op).private_sizes; }

  bool is_timed() const;
  bool has_published(uint32_t peer) const { return has_published(peer, sequence_); }
  bool has_published(uint32_t peer, uint64_t sequence) const {
    // Acquire: pairs with the release in publish().
    return entry_of(peer, sequence).seq.load(std::memory_order_acquire) == sequence;
  }
  // The word of `teller` from all other ranks' entries, [n_ranks]; false: one is still on its way.
  bool hear(uint64_t teller, std::span<uint64_t> words);
  bool hear_timings();
  bool hear_votes();

  const Operation& op_;
  bool eager_;  // or goes on with what began so
  uint64_t sequence_ = 0;
  uint64_t history_ = 0;
  uint32_t tag_ = 0;  // of the history, carried by every signal
  uint32_t waiting_peer_ = 0;
  bool noted_ = false;  // in the flight recorder
  bool entered_ = false;
  uint64_t largest_block_ = 0;  // AllToAllv: elements, of all ranks; 0: not known yet, or fitted_
  bool fitted_ = false;         // AllToAllv: all data went with the first word, whatever the plan
  bool ran_in_heap_ = false;    // by the plan for buffers that all peers can reach
  // What publish() has told the peers: it stays so, whatever is detached from the heap meanwhile.
  bool input_in_heap_ = false, output_in_heap_ = false;
  uint32_t heap_detached_ = 0;  // SharedHeap::n_detached() then
};

}  // namespace moeccl::exec
