#include "src/exec/recorder.h"

#include <algorithm>

#include "src/base/data_type.h"
#include "src/base/ticks.h"

namespace moeccl::exec {

size_t Recorder::begin(uint64_t sequence, const Signature& signature) {
  Record& r = records_[count_++ % kRecords];
  r.sequence = sequence;
  r.signature = signature;
  r.algorithm = "";
  r.state = Record::State::kRunning;
  r.start = Ticks::now();
  return count_;
}

int64_t Recorder::end(size_t number, bool failed) {
  if (number == 0 || number + kRecords <= count_) return 0;
  Record& r = records_[(number - 1) % kRecords];
  r.end = Ticks::now();
  r.state = failed ? Record::State::kFailed : Record::State::kDone;
  return Ticks::to_ns(r.end - r.start);
}

std::vector<std::string> Recorder::lines(size_t most) const {
  std::vector<std::string> out;
  const size_t n = std::min({most, count_, kRecords});
  const int64_t now = Ticks::now();
  for (size_t i = count_ - n; i < count_; ++i) {
    const Record& r = records_[i % kRecords];
    const bool running = r.state == Record::State::kRunning;
    const char* state = running ? "RUNNING" : r.state == Record::State::kFailed ? "FAILED" : "done";
    std::string line =
        format("#{} {} count {} {} {} plan {} {}", r.sequence, op_name(r.signature.op), r.signature.count,
               type_name(r.signature.type), reduce_name(r.signature.reduce), r.algorithm, state);
    if (r.state != Record::State::kDoneUntimed)
      line += format(" {:.3f} ms", static_cast<double>(Ticks::to_ns((running ? now : r.end) - r.start)) / 1e6);
    line += format(", {:.3f} s ago", static_cast<double>(Ticks::to_ns(now - r.start)) / 1e9);
    out.push_back(std::move(line));
  }
  return out;
}

}  // namespace moeccl::exec
