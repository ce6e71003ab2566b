// SPDX-License-Identifier: Apache-2.0
// The calls of a group by stream: which of them run together, and which the device runs at once.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "src/comm/group.h"
#include "src/comm/meeting.h"
#include "src/driver/cuda/idle.h"

namespace moeccl::comm {

// Returns the persistent kernel that runs the call, or null if a thread drives it.
exec::PersistentKernel* kernel_of(const Call& c);

// The calls that go to one stream, or to this thread, together. Calls of one communicator on several streams are one
// batch, which runs when all of these streams have come to it and which all of them wait for.
struct Batch {
  struct Turn {
    Communicator* comm;
    uint64_t ticket;
    bool comes = true;  // false: the communicator was aborted before the batch began
  };
  std::vector<Communicator::Hold> holds;  // [turns] of a queued batch, until it begins; first, so that they end last
  // [others] Keeps alive the communicators whose memory the stream uses until it reaches the batch. After an abort,
  // that can be later than the end of the communicator.
  std::vector<std::vector<Communicator::Hold>> holds_of_others;
  Stream* stream = nullptr;  // where the batch runs; null: on this thread
  std::vector<Call> calls;
  std::vector<size_t> places;        // [calls] where the call stands in its group
  std::vector<Turn> turns;           // taken when the batch is issued
  std::vector<Stream*> others;       // more streams of the calls
  std::shared_ptr<Meeting> meeting;  // with the others; null if there are none
  // The calls' numbers, if all were launched on the persistent kernel. Messages have one number together.
  std::vector<uint64_t> walks;
  Status launched;
  std::optional<driver::cuda::InFlight> in_flight;                // until the launched calls have ended
  std::vector<std::shared_ptr<const exec::EarlierWork>> earlier;  // of default streams, if no CUDA stream orders it
  bool launchable = false;  // on its one stream, which is a CUDA stream: the persistent kernel runs all calls
  bool captured = false;    // the stream is being captured
  bool in_order = false;    // nothing that was called before still has to be launched, and the stream may wait for it

  bool is_launched() const { return !walks.empty() || !launched.ok(); }
  bool is_queued() const { return stream != nullptr; }
  // Returns whether the communicator's turn comes, or has come.
  bool comes(const Communicator& comm) const {
    return std::any_of(turns.begin(), turns.end(), [&](const Turn& t) { return t.comm == &comm && t.comes; });
  }
  bool has_messages() const { return calls.front().operation == nullptr; }
  std::vector<exec::Message> messages() const;
  Status note_earlier_work();
  // Allocates nothing, so that every ticket that is taken gets its turn.
  void take_turns();
};

using Batches = std::vector<std::shared_ptr<Batch>>;

// Returns the calls by stream, in order of each stream's first call. Calls of one communicator on several streams stay
// together, because a Recv on one stream may be what the peer's Send on another waits for, unless all are launched on
// the device at once, in the order of the calls.
Result<Batches> batches_of(std::vector<Call>& calls);

// Launches the calls that can be launched at once. Calls in a capture must be. If one cannot be, the reason is
// returned, and nothing has been launched outside of captures. What is left in `batches` must be driven, or watched if
// it was launched.
Status launch_at_once(Batches& batches);

}  // namespace moeccl::comm
