// The flight recorder: the last operations of a rank with their state, always on, printed when something goes wrong.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "src/exec/operation.h"

namespace moeccl::exec {

struct Record {
  uint64_t sequence = 0;  // 0: unused, or Send/Recv which have none
  Signature signature;
  const char* algorithm = "";
  int64_t start = 0, end = 0;  // Ticks; end: of timed ones that have ended
  enum class State : uint8_t { kRunning, kDone, kDoneUntimed, kFailed } state = State::kRunning;
};

class Recorder {
 public:
  static constexpr size_t kRecords = 64;

  // Called by the rank's executing thread. The record's number, for operations beside which others may begin; from 1.
  size_t begin(uint64_t sequence, const Signature& signature);
  void chose(const char* algorithm) { newest().algorithm = algorithm; }
  int64_t end(bool failed) { return end(count_, failed); }  // of the newest; ns since its begin
  int64_t end(size_t number, bool failed);                  // nothing when newer records have taken its place
  void end_untimed() { newest().state = Record::State::kDoneUntimed; }
  // The last `most` operations, oldest first, one line each.
  std::vector<std::string> lines(size_t most) const;

 private:
  Record& newest() { return records_[(count_ + kRecords - 1) % kRecords]; }
  std::array<Record, kRecords> records_;
  size_t count_ = 0;
};

}  // namespace moeccl::exec
