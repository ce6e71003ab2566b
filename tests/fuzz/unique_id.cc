// SPDX-License-Identifier: Apache-2.0
// Any 128 bytes as a unique id are either refused, or equal to what encoding gives. For half of the inputs the checksum
// is corrected first, because it only detects accidents and would stop most inputs.
#include "src/bootstrap/unique_id.h"

#include <cstring>

#include "src/base/hash.h"
#include "tests/fuzz/fuzz.h"

using namespace moeccl;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  moecclUniqueId id;
  std::memset(&id, 0, sizeof(id));
  std::memcpy(&id, data + 1, size - 1 < sizeof(id) ? size - 1 : sizeof(id));
  if (data[0] & 1) {
    const uint64_t sum = hash_bytes(&id, sizeof(id) - 8);
    std::memcpy(reinterpret_cast<char*>(&id) + sizeof(id) - 8, &sum, 8);
  }
  const auto decoded = bootstrap::decode_unique_id(id);
  if (!decoded.ok()) {
    FUZZ_CHECK(!decoded.status().message().empty());
    return 0;
  }
  const auto again = bootstrap::encode_unique_id(decoded.value());
  FUZZ_CHECK(again.ok() && std::memcmp(&again.value(), &id, sizeof(id)) == 0);
  return 0;
}
