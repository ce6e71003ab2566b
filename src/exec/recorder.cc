#include "src/exec/recorder.h"

#include <algorithm>

#include "src/base/ticks.h"

namespace moeccl::exec {

void Recorder::begin(uint64_t sequence, const Signature& signature) {
  Record& r = records_[count_++ % kRecords];
  r.sequence = sequence;
  r.signature = signature;
  r.algorithm = "";
  r.state = Record::State::kRunning;
  r.start = Ticks::now();
}

int64_t Recorder::end(bool failed) {
  Record& r = newest();
  r.end = Ticks::now();
  r.state = failed ? Record::State::kFailed : Record::State::kDone;
  return Ticks::to_ns(r.end - r.start);
}

std::string Recorder::text(size_t most) const {
  std::string out;
  const size_t n = std::min({most, count_, kRecords});
  const int64_t now = Ticks::now();
  for (size_t i = count_ - n; i < count_; ++i) {
    const Record& r = records_[i % kRecords];
    const bool running = r.state == Record::State::kRunning;
    const char* state = running ? "RUNNING" : r.state == Record::State::kFailed ? "FAILED" : "done";
    out += format("  #{} {} count {} {} {} plan {} {}", r.sequence, op_name(r.signature.op), r.signature.count,
                  type_name(r.signature.type), reduce_name(r.signature.reduce), r.algorithm, state);
    if (r.state != Record::State::kDoneUntimed)
      out += format(" {:.3f} ms", static_cast<double>(Ticks::to_ns((running ? now : r.end) - r.start)) / 1e6);
    out += format(", {:.3f} s ago\n", static_cast<double>(Ticks::to_ns(now - r.start)) / 1e9);
  }
  return out;
}

}  // namespace moeccl::exec
