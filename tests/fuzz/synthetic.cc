// SPDX-License-Identifier: Apache-2.0
// Any synthetic topology is either refused with its position, or gives a valid tree that its own text reproduces.
#include "topology/synthetic.h"

#include "tests/fuzz/fuzz.h"
#include "topology/graph.h"

using namespace moeccl;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = text_of(data, size);
  topology::Cpus cpus;
  if (topology::parse_cpus(text, &cpus)) {
    topology::Cpus again;
    FUZZ_CHECK(topology::parse_cpus(topology::cpus_text(cpus), &again) && again == cpus);
  }
  if (const std::string pci = topology::normal_pci(text); !pci.empty()) FUZZ_CHECK(topology::normal_pci(pci) == pci);
  const auto tree = topology::parse_synthetic(text, 0);
  if (!tree.ok()) {
    FUZZ_CHECK(tree.status().message().find("topology") != std::string::npos);
    return 0;
  }
  FUZZ_CHECK(tree.value().validate().ok());
  if (tree.value().n_ranks > 4096) return 0;
  const auto again = topology::parse_synthetic(topology::to_synthetic(tree.value()), 0);
  FUZZ_CHECK(again.ok() && again.value().hash() == tree.value().hash());
  return 0;
}
