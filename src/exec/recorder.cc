#include "src/exec/recorder.h"

#include <algorithm>

#include "src/base/clock.h"

namespace moeccl::exec {

void Recorder::begin(uint64_t sequence, const Signature& signature, int64_t now) {
  records_[count_++ % kRecords] = Record{sequence, signature, "", now, 0, false};
}

void Recorder::end(int64_t now, bool failed) {
  newest().end_ns = now;
  newest().failed = failed;
}

std::string Recorder::text(size_t most) const {
  std::string out;
  const size_t n = std::min({most, count_, kRecords});
  const int64_t now = now_ns();
  for (size_t i = count_ - n; i < count_; ++i) {
    const Record& r = records_[i % kRecords];
    const char* state = r.end_ns == 0 ? "RUNNING" : r.failed ? "FAILED" : "done";
    const int64_t end = r.end_ns == 0 ? now : r.end_ns;
    out += format("  #{} {} count {} {} {} plan {} {} {:.3f} ms, {:.3f} s ago\n", r.sequence, op_name(r.signature.op),
                  r.signature.count, type_name(r.signature.type), reduce_name(r.signature.reduce), r.algorithm, state,
                  static_cast<double>(end - r.start_ns) / 1e6, static_cast<double>(now - r.start_ns) / 1e9);
  }
  return out;
}

}  // namespace moeccl::exec
