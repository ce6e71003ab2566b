// SPDX-License-Identifier: Apache-2.0
// Any file as a routing trace (perf/TRACE.md) is either refused with a message, or gives a trace whose experts are in
// range.
#include <sys/mman.h>
#include <unistd.h>

#include "perf/common/routing.h"
#include "src/base/data_type.h"
#include "tests/fuzz/fuzz.h"

// The API's entry points are not linked into this program.
const char* moecclTypeName(moecclDataType_t type) { return moeccl::type_name(type); }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int fd = memfd_create("trace", 0);
  if (ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != static_cast<ssize_t>(size)) return 0;
  perf::Trace trace;
  if (!perf::read_trace("/proc/self/fd/" + std::to_string(fd), trace).empty()) return 0;
  FUZZ_CHECK(trace.n_layers > 0 && trace.n_steps > 0 && trace.k > 0);
  for (const int32_t expert : trace.index) FUZZ_CHECK(expert >= -1 && expert < trace.n_experts);
  return 0;
}
