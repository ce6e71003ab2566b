// SPDX-License-Identifier: Apache-2.0
// Files of MOECCL_DUMP as `moeccl postmortem` reads them: those of up to four processes, separated by a byte 0.
#include "tools/postmortem.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view rest = text_of(data, size);
  tools::PostMortem all(false);
  for (int i = 0; i < 4 && !rest.empty(); ++i) {
    const size_t end = std::min(rest.size(), rest.find('\0'));
    try {
      all.add(std::string(rest.substr(0, end)));
    } catch (const std::runtime_error& e) {  // `moeccl postmortem` leaves the file out
      FUZZ_CHECK(e.what()[0] != '\0');
    }
    rest.remove_prefix(std::min(rest.size(), end + 1));
  }
  bool found = false;
  const std::string report = all.report(&found);
  FUZZ_CHECK(!found || !report.empty());
  return 0;
}
