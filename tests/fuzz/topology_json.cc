// SPDX-License-Identifier: Apache-2.0
// Any JSON is either refused with its position, or gives hosts that their own text reproduces.
#include "topology/json.h"

#include "tests/fuzz/fuzz.h"
#include "topology/merge.h"
#include "topology/text.h"

using namespace moeccl;
using namespace moeccl::topology;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto hosts = read_json(text_of(data, size), "f.json");
  if (!hosts.ok()) {
    FUZZ_CHECK(hosts.status().message().starts_with("f.json"));
    return 0;
  }
  if (hosts.value().size() > 16) return 0;  // counted hosts are alike; time is better spent on other inputs
  const std::string text = to_json(hosts.value());
  const auto again = read_json(text, "again.json");
  FUZZ_CHECK(again.ok() && to_json(again.value()) == text);
  FUZZ_CHECK(!to_text(hosts.value()).empty());
  FUZZ_CHECK(merge({hosts.value()[0]}).ok());
  return 0;
}
