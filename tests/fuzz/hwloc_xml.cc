// SPDX-License-Identifier: Apache-2.0
// Any XML is either refused with its position, or gives a graph that merges, prints and has levels.
#include "topology/hwloc_xml.h"

#include "tests/fuzz/fuzz.h"
#include "topology/merge.h"
#include "topology/svg.h"
#include "topology/text.h"

using namespace moeccl;
using namespace moeccl::topology;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto part = read_hwloc_xml(text_of(data, size), "f.xml");
  if (!part.ok()) {
    FUZZ_CHECK(part.status().message().starts_with("f.xml:"));
    return 0;
  }
  const auto graph = merge({part.value()});
  FUZZ_CHECK(graph.ok() && validate(graph.value()).ok());
  FUZZ_CHECK(!to_text(graph.value()).empty());
  FUZZ_CHECK(!to_svg({&graph.value(), 1}).empty());
  return 0;
}
