#include "src/exec/recorder.h"

#include <algorithm>

#include "src/base/ticks.h"

namespace moeccl::exec {

void Recorder::begin(uint64_t sequence, const Signature& signature) {
  records_[count_++ % kRecords] = Record{sequence, signature, "", Ticks::now(), 0, false};
}

int64_t Recorder::end(bool failed) {
  Record& r = newest();
  r.end = Ticks::now();
  r.failed = failed;
  return Ticks::to_ns(r.end - r.start);
}

std::string Recorder::text(size_t most) const {
  std::string out;
  const size_t n = std::min({most, count_, kRecords});
  const int64_t now = Ticks::now();
  for (size_t i = count_ - n; i < count_; ++i) {
    const Record& r = records_[i % kRecords];
    const char* state = r.end == 0 ? "RUNNING" : r.failed ? "FAILED" : "done";
    const int64_t end = r.end == 0 ? now : r.end;
    out += format("  #{} {} count {} {} {} plan {} {} {:.3f} ms, {:.3f} s ago\n", r.sequence, op_name(r.signature.op),
                  r.signature.count, type_name(r.signature.type), reduce_name(r.signature.reduce), r.algorithm, state,
                  static_cast<double>(Ticks::to_ns(end - r.start)) / 1e6,
                  static_cast<double>(Ticks::to_ns(now - r.start)) / 1e9);
  }
  return out;
}

}  // namespace moeccl::exec
