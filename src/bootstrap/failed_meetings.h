// SPDX-License-Identifier: Apache-2.0
// What lets a rank that tries again meet the others anew. The root of a meeting that has failed stays at its place for
// a while, to tell the ranks that come late. A rank that has been there waits for the next root instead.
#pragma once

#include <cstdint>

#include "src/bootstrap/patience.h"
#include "src/bootstrap/unique_id.h"

namespace moeccl::bootstrap {

// Returns the number of the meeting at a root. The roots at one place may share a key; `root_number` then tells them
// apart (RootServer::Config).
uint64_t meeting_number(const Key& key, uint32_t root_number);

// The failed meetings of this process's ranks. Any thread. They are forgotten when no root can be left of them: a root
// notices the failure when the rank does, up to the time that its process does not run.
class FailedMeetings {
 public:
  static constexpr int64_t kRememberMs = 4 * kLingerMs;
  static void add(uint64_t meeting, int rank, int64_t remember_ms = kRememberMs);
  static bool has(uint64_t meeting, int rank);
};

}  // namespace moeccl::bootstrap
