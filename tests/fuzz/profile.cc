// SPDX-License-Identifier: Apache-2.0
// Any JSON as a measured profile is either refused with its position, or gives a profile that its own text reproduces.
#include "src/plan/profile_file.h"

#include "tests/fuzz/fuzz.h"

using namespace moeccl;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto profile = plan::read_profile(text_of(data, size), "f.json");
  if (!profile.ok()) {
    FUZZ_CHECK(profile.status().message().starts_with("f.json"));
    return 0;
  }
  const std::string text = plan::write_profile(profile.value(), "note", "topology");
  const auto again = plan::read_profile(text, "again.json");
  FUZZ_CHECK(again.ok() && plan::write_profile(again.value(), "note", "topology") == text);
  return 0;
}
