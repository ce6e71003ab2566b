// SPDX-License-Identifier: Apache-2.0
// The parts that all collective operations share: the place in the order of operations, the entry that peers can read,
// and the detection and naming of disagreements.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "src/base/device_order.h"
#include "src/exec/operation.h"
#include "src/exec/task.h"

namespace moeccl::exec {

class AgreedTask : public Task {
 public:
  // `op` must live until the task has ended.
  AgreedTask(Fabric& fabric, const Operation& op, bool eager = false) : Task(fabric), op_(op), eager_(eager) {}

  Status diagnose() override;
  uint64_t sequence() const override { return sequence_; }
  bool needs(uint32_t peer) const override;
  bool has_entered(uint32_t peer) const override { return has_published(peer); }

 protected:
  // Continues an operation that another task has entered.
  void continue_from(const AgreedTask& begun);
  // Takes the communicator's next sequence number, so operations are started one after another.
  void take_number();
  void note_begin();  // records it in the flight recorder, once
  void begin() {
    take_number();
    note_begin();
  }
  // kMoved: all peers are at most one operation behind, and the votes that are due have arrived.
  Progress enter();
  void publish();  // publishes this rank's entry
  static constexpr uint32_t kNobody = Fabric::kAll - 1;
  // Compares this rank's history with the entries published so far by peers that it has not met in the operation.
  Status look_around();
  // Tells the peers that this rank has finished. Fails if the communicator has failed meanwhile: data that this rank
  // has put since then may be lost, so peers must not hear that it took part. Also fails if it looks around and sees a
  // peer that calls something else.
  Progress end(uint64_t wire_bytes);

  Status check_entry(uint32_t peer);  // compares signatures; the peer must have entered this operation
  // Returns this rank's history at one of the last operations. history_at_end() returns that of a peer that has
  // finished it.
  uint64_t own_history(uint64_t sequence) const {
    return fabric().own->board().entries[sequence % transport::kEntries].history.load(std::memory_order_relaxed);
  }
  uint64_t history_at_end(uint32_t peer, uint64_t sequence) const;
  Status find_difference(uint32_t peer);  // searches the last operations, including this one
  Status check_blocks(uint32_t peer);     // AllToAllv: compares what each of the two sends with what the other expects
  // Checks the tag in a peer's first signal of this operation, to see whether the peer calls the same operation.
  Status check_tag(uint32_t peer, uint32_t tag);
  const transport::Entry& entry_of(uint32_t peer) const { return entry_of(peer, sequence_); }
  const transport::Entry& entry_of(uint32_t peer, uint64_t sequence) const {
    return fabric().link(peer).board().entries[sequence % transport::kEntries];
  }
  static Signature read_signature(const transport::Entry& entry, uint64_t& flags);
  // Returns whether peers can reach the buffer. A null buffer (of a rank that is not the root) counts as reachable.
  bool reachable(const void* buffer) const { return buffer == nullptr || fabric().in_heap(buffer); }
  bool is_v() const { return plan::facts(op_.signature.op).private_sizes; }

  bool is_timed() const;
  bool has_published(uint32_t peer) const { return has_published(peer, sequence_); }
  bool has_published(uint32_t peer, uint64_t sequence) const {
    // Acquire: pairs with the release in publish().
    return load_from_device(entry_of(peer, sequence).seq) == sequence;
  }
  // Reads the word that each rank's entry of the ballot's operation carries. Returns false while an entry has not
  // arrived.
  bool hear_votes();

  const Operation& op_;
  bool eager_;  // or continues an operation that began eagerly
  uint64_t sequence_ = 0;
  uint64_t history_ = 0;
  uint32_t tag_ = 0;  // part of the history, carried by every signal
  uint32_t waiting_peer_ = 0;
  size_t record_ = 0;  // in the flight recorder; 0: not recorded yet
  int64_t began_ = 0;  // ticks at that time
  bool entered_ = false;
  uint64_t largest_block_ = 0;  // AllToAllv: in elements, over all ranks; 0: not known yet, or fitted_
  bool fitted_ = false;         // AllToAllv: all data was sent with the first word, whatever the plan
  bool ran_in_heap_ = false;    // ran with the plan for buffers that all peers can reach
  // What publish() has told the peers. Detaching buffers from the heap later does not change it.
  bool input_in_heap_ = false, output_in_heap_ = false;
  uint32_t heap_detached_ = 0;  // SharedHeap::n_detached() at that time
};

}  // namespace moeccl::exec
