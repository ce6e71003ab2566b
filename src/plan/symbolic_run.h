// SPDX-License-Identifier: Apache-2.0
// The checker's second pass: runs all programs of a plan over symbols, with a vector clock per lane.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "src/plan/symbolic.h"

namespace moeccl::plan {

// A rank's user buffers, as places in one piece of memory: in place they overlap.
struct UserMemory {
  uint64_t in_first = 0, in_size = 0;
  uint64_t out_first = 0, out_size = 0;
};

class SymbolicRun {
 public:
  SymbolicRun(const CheckInput& input, std::vector<UserMemory> users);

  // Runs all programs to their ends. Fails at the first access that is wrong or unordered, and if lanes block each
  // other.
  Status run();
  // After run(): returns the value of an element of Output.
  ValueId output(uint32_t rank, uint64_t unit) const { return user_[rank][users_[rank].out_first + unit].value; }
  const Values& values() const { return values_; }

 private:
  struct LaneState {
    uint32_t rank = 0, lane = 0;
    uint32_t chunk = 0, step = 0;
    uint32_t time = 0;  // steps done
    Clock clock;
    std::shared_ptr<const Clock> snapshot;  // of `clock` since the last wait; signals in flight share it
  };
  struct Sent {
    std::shared_ptr<const Clock> clock;
    Epoch by;
  };
  struct Channel {
    std::vector<Sent> sent;
    uint32_t waiter = kNoLane;
  };
  // A run of elements that a Ref names.
  struct Place {
    std::vector<Unit>* memory = nullptr;
    uint64_t first = 0, length = 0;
    Buffer buffer = Buffer::kInput;

    Unit& operator[](uint64_t i) const { return (*memory)[first + i]; }
  };
  static constexpr uint32_t kNoLane = ~0u;

  Status run_lane(uint32_t id);
  bool take_signal(uint32_t id, const Step& step);  // returns false if the signal has not been sent yet
  void send_signal(uint32_t id, const Step& step);
  Channel& channel(uint32_t from, uint32_t to, uint8_t sig);

  Status move_blocks(uint32_t id, const Step& step);
  Status gather_or_scatter_rows(uint32_t id, const Step& step);
  Status reduce_rows(uint32_t id, const Step& step);
  // Adds a row of `src` to children_, for values_.sum().
  Status add_child(uint32_t id, const Place& src, uint64_t row, const Ref& ref, float weight);
  Result<Place> locate(uint32_t id, const Step& step, const Ref& ref);
  Result<Place> locate_rows(uint32_t id, const Ref& ref);
  Status note_peer(uint32_t id, const Ref& ref);
  Range range_of(uint32_t rank, const Step& step, const Ref& ref, uint32_t chunk) const;

  Status read(uint32_t id, const Place& place, uint64_t i, const Ref& ref, ValueId& value);
  Status write(uint32_t id, const Place& place, uint64_t i, const Ref& ref, ValueId value);
  Status explain(uint32_t id, const Access& access, const Ref& ref, uint64_t i) const;

  Status check_all_ended() const;
  Status check_peers_left() const;
  Status check_staging_used() const;

  const Program& program_of(uint32_t id) const { return plan_.programs[lanes_[id].rank]; }
  Epoch now(uint32_t id) const { return {id, lanes_[id].time}; }
  std::string position(uint32_t id) const;  // names the current step and chunk
  std::string past(Epoch epoch) const;      // names a step done before
  bool runs(const Step& step, uint32_t chunk) const;
  Status fail(uint32_t id, const std::string& why) const;

  const Plan& plan_;
  std::span<const Binding> bindings_;
  bool allow_waste_;
  std::vector<UserMemory> users_;
  Values values_;
  std::vector<std::vector<Unit>> user_, staging_;  // [n_ranks][element]
  std::vector<LaneState> lanes_;
  std::vector<uint32_t> first_lane_;  // [n_ranks + 1]
  std::vector<std::vector<uint32_t>>
      last_touch_;  // [n_ranks][lane]: time of the lane's last access to the user's memory
  std::unordered_map<uint64_t, Channel> channels_;
  std::vector<uint32_t> ready_;
  std::vector<Values::Child> children_;
};

}  // namespace moeccl::plan
