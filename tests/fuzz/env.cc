// SPDX-License-Identifier: Apache-2.0
// Any environment: each variable is accepted, or refused with a message that does not reveal the secret.
#include "src/base/env.h"

#include <string>
#include <vector>

#include "tests/fuzz/fuzz.h"

using namespace moeccl;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::string> variables;
  std::string now = "MOECCL_";
  for (const char c : text_of(data, size)) {
    if (c != '\0' && c != '\x1e') {
      now += c;
      continue;
    }
    variables.push_back(now);
    now = "MOECCL_";
  }
  variables.push_back(now);
  std::vector<const char*> pointers;
  for (const std::string& v : variables) pointers.push_back(v.c_str());
  const EnvParse parsed = parse_env(pointers);
  FUZZ_CHECK(parsed.env.timeout_ms >= 1 && parsed.env.staging_bytes >= 65536);
  // A secret may be any text, even a part of the message, so the message must be the same for all secrets.
  const char* const short_secret[] = {"MOECCL_SECRET=x"};
  static const std::string expected = parse_env(short_secret).status.message();
  const std::string& sentence = parsed.status.message();
  FUZZ_CHECK(!sentence.starts_with("MOECCL_SECRET:") || sentence == expected);
  return 0;
}
