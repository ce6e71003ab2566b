// SPDX-License-Identifier: Apache-2.0
// The flight recorder: the last operations of a rank with their state, and what the rank waits for. It is always on, is
// printed when something goes wrong, and can be read from other processes (flight.h).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/ticks.h"
#include "src/exec/flight.h"
#include "src/exec/operation.h"
#include "src/profiler/events.h"

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
    std::shared_ptr<profiler::Session> profiler = {};  // is told of every operation; may be null
  };
  // Records the owner. From then on other processes can see the record.
  void introduce(const Owner& owner);

  // Called by the rank's executing thread. Returns the record's number, from 1, by which the other calls name it,
  // because operations of a group overlap. These do nothing if newer records have replaced it, or for number 0.
  size_t begin(uint64_t sequence, const Operation& operation) {
    const size_t number = note(sequence, operation.signature);
    if (events_ != nullptr) [[unlikely]]
      tell_begin(number, sequence, operation);
    return number;
  }
  size_t begin_message(const Signature& signature, bool is_send, void* data);
  int64_t newest_began() const { return newest_began_; }  // in ticks
  void chose(size_t number, const char* algorithm) {
    // As a rule the algorithm is the same as kRecords operations ago, and its text is still there.
    FlightRecord* const r = record(number);
    if (r != nullptr && names_[(number - 1) % kRecords] == algorithm && events_ == nullptr) [[likely]]
      r->has_plan = 1;
    else
      chose_another(number, algorithm);
  }
  // Whether a profiler plugin is told of the operations.
  bool has_profiler() const { return events_ != nullptr; }
  // `device_ns`: how long the operation took by the device's own clock; 0: not measured.
  void end(size_t number, bool failed, uint64_t device_ns = 0);
  void end_untimed(size_t number) {
    if (FlightRecord* r = record(number); r != nullptr) r->state = State::kDoneUntimed;
    if (events_ != nullptr) [[unlikely]]
      events_->end(number, 0);
  }
  // Records one more task that has been blocked for a while. Only the first FlightPage::kWaits are kept.
  void note_wait(const FlightWait& wait);
  bool has_waits() const { return slot_->n_waits > 0; }
  void clear_waits() { slot_->n_waits = 0; }
  void note_failure(Code code, std::string_view sentence);
  // Returns the last `most` operations, oldest first, one line each.
  std::vector<std::string> lines(size_t most) const;

  uint64_t group() const { return slot_->group; }  // 0: not introduced
  const FlightPage* page() const { return &*slot_; }

 private:
  size_t note(uint64_t sequence, const Signature& signature) {
    FlightPage& p = *slot_;
    FlightRecord& r = p.records[p.count++ % kRecords];
    r.sequence = sequence;
    r.count = signature.count;
    r.root = signature.root;
    r.op = static_cast<uint8_t>(signature.op);
    r.type = static_cast<uint8_t>(signature.type);
    r.reduce = signature.reduce;
    r.has_plan = 0;
    r.state = State::kRunning;
    r.start = newest_began_ = Ticks::now();
    return p.count;
  }
  void tell_begin(size_t number, uint64_t sequence, const Operation& operation);
  void chose_another(size_t number, const char* algorithm);
  FlightRecord* record(size_t number) {
    return number == 0 || number + kRecords <= slot_->count ? nullptr : &slot_->records[(number - 1) % kRecords];
  }
  FlightSlot slot_;
  int64_t newest_began_ = 0;
  std::array<const char*, kRecords> names_{};  // sources of the records' algorithm texts
  std::unique_ptr<profiler::Events> events_;   // null: there is no profiler plugin
};

}  // namespace moeccl::exec
