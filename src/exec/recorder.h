// SPDX-License-Identifier: Apache-2.0
// The flight recorder: the last operations of a rank with their state, and what the rank waits for. It is always on, is
// printed when something goes wrong, and can be read from other processes (flight.h).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "src/exec/flight.h"
#include "src/exec/operation.h"

namespace moeccl::exec {

class Recorder {
 public:
  using State = FlightRecord::State;
  static constexpr size_t kRecords = FlightPage::kRecords;

  struct Owner {
    uint32_t rank = 0, n_ranks = 0;
    uint64_t group = 0;  // shared by all ranks of this communicator and by no other
    std::string_view name = {};
    bool on_cuda_memory = false;
    std::string hosts = {};  // JSON, see FlightSlot::note_hosts(); empty: all ranks are on one host
  };
  // Records the owner. From then on other processes can see the record.
  void introduce(const Owner& owner);

  // Called by the rank's executing thread. Returns the record's number, from 1, for operations that may overlap with
  // others.
  size_t begin(uint64_t sequence, const Signature& signature);
  void chose(const char* algorithm);
  int64_t end(bool failed) { return end(slot_->count, failed); }  // ends the newest; returns ns since its begin
  int64_t end(size_t number, bool failed);                        // does nothing if newer records have replaced it
  void end_untimed() { newest().state = State::kDoneUntimed; }
  // Records one more task that has been blocked for a while. Only the first FlightPage::kWaits are kept.
  void note_wait(const FlightWait& wait);
  bool has_waits() const { return slot_->n_waits > 0; }
  void clear_waits() { slot_->n_waits = 0; }
  void note_failure(Code code, std::string_view sentence);
  // Returns the last `most` operations, oldest first, one line each.
  std::vector<std::string> lines(size_t most) const;

  const FlightPage* page() const { return &*slot_; }

 private:
  FlightRecord& newest() { return slot_->records[(slot_->count + kRecords - 1) % kRecords]; }
  FlightSlot slot_;
  std::array<const char*, kRecords> names_{};  // sources of the records' algorithm texts
};

}  // namespace moeccl::exec
