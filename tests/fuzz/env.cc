// Any environment: each variable is taken, or refused with a sentence that does not tell the secret.
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
  for (const std::string& v : variables) {
    const std::string prefix = "MOECCL_SECRET=";
    if (v.starts_with(prefix) && v.size() > prefix.size() + 8)
      FUZZ_CHECK(parsed.status.message().find(v.substr(prefix.size())) == std::string::npos ||
                 !parsed.status.message().starts_with("MOECCL_SECRET"));
  }
  return 0;
}
