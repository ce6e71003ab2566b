// SPDX-License-Identifier: Apache-2.0
// Arguments of the ladder's own kernels. Every wait ends after most_ns, so that no rung can leave a kernel behind.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeccl::ladder {

// One block occupies its multiprocessor until *stop is not 0.
struct SpinArgs {
  uint64_t* started;  // becomes 1
  const uint64_t* stop;
  uint64_t most_ns;
};
// Two launches with exchanged words wait for each other `rounds` times.
struct ShakeArgs {
  uint64_t* own;
  const uint64_t* other;
  uint64_t rounds, most_ns;
  uint64_t* done;  // [0]: rounds; [1]: ns that they took
};
// values[n]: the values that the clock shows, each once.
struct TicksArgs {
  uint64_t* values;
  uint64_t n, most_ns;
};
// Performs n dependent loads, or n release stores, at system scope.
struct TouchArgs {
  uint64_t* words;  // zeros
  uint64_t n;
  uint64_t* ns;
};
// All blocks of the launch meet `rounds` times, as the blocks of the persistent kernel do.
struct MeetArgs {
  uint32_t* counter;  // 0
  uint64_t rounds, most_ns;
  uint64_t* done;  // [0]: rounds; [1]: ns
};
// Errors that compute-sanitizer must find: a store one element past the end; a store to shared memory that races a
// load.
struct PlantArgs {
  uint32_t* words;
  uint64_t n;
};

}  // namespace moeccl::ladder
