// SPDX-License-Identifier: Apache-2.0
// The ladder's own kernels, for what the library's kernels cannot show alone.
#include "kernels/cuda/device.cuh"
#include "tests/gpu/ladder/kernels_args.h"

namespace moeccl::cuda {

// Returns false once the time is over.
template <class Ready>
MOECCL_DEVICE bool ladder_wait(uint64_t most_ns, Ready&& ready) {
  const uint64_t since = device_ns();
  while (!ready()) {
    if (device_ns() - since > most_ns) return false;
    pause();
  }
  return true;
}

}  // namespace moeccl::cuda

using namespace moeccl::cuda;
using namespace moeccl::ladder;

MOECCL_KERNEL(moeccl_ladder_spin, SpinArgs) {
  if (thread_index() != 0) return;
  store_release_system(a.started, 1);
  (void)ladder_wait(a.most_ns, [&] { return load_acquire_system(a.stop) != 0; });
}

MOECCL_KERNEL(moeccl_ladder_shake, ShakeArgs) {
  if (thread_index() != 0) return;
  uint64_t since = 0, round = 0;
  while (round < a.rounds) {
    const uint64_t next = round + 1;
    // Release: pairs with the acquire below, in the other launch.
    store_release_system(a.own, next);
    if (!ladder_wait(a.most_ns, [&] { return load_acquire_system(a.other) >= next; })) break;
    if (round == 0) since = device_ns();  // the first round also waits for the other launch to begin
    round = next;
  }
  a.done[0] = round;
  a.done[1] = device_ns() - since;
}

MOECCL_KERNEL(moeccl_ladder_ticks, TicksArgs) {
  if (thread_index() != 0) return;
  const uint64_t since = device_ns();
  uint64_t last = since;
  for (uint64_t i = 0; i < a.n;) {
    const uint64_t now = device_ns();
    if (now == last) continue;
    a.values[i++] = last = now;
    if (now - since > a.most_ns) break;
  }
}

MOECCL_KERNEL(moeccl_ladder_loads, TouchArgs) {
  if (thread_index() != 0) return;
  const uint64_t since = device_ns();
  uint64_t at = 0;
  for (uint64_t i = 0; i < a.n; ++i) at += load_relaxed_system(a.words + at);
  a.ns[0] = device_ns() - since + at;
}

MOECCL_KERNEL(moeccl_ladder_stores, TouchArgs) {
  if (thread_index() != 0) return;
  const uint64_t since = device_ns();
  for (uint64_t i = 0; i < a.n; ++i) store_release_system(a.words, i);
  a.ns[0] = device_ns() - since;
}

MOECCL_KERNEL(moeccl_ladder_meet, MeetArgs) {
  uint64_t since = 0, round = 0;
  MOECCL_SHARED uint32_t expired;
  if (thread_index() == 0) expired = 0;
  block_sync();
  for (; round < a.rounds && expired == 0; ++round) {
    block_sync();
    if (thread_index() == 0) {
      const auto all = static_cast<uint32_t>((round + 1) * grid_blocks());
      // Releases, and acquires the others' releases: the add pairs with the load in the other blocks of this launch.
      if (add_release_device(a.counter, 1) + 1 < all &&
          !ladder_wait(a.most_ns, [&] { return load_acquire_device(a.counter) >= all; }))
        expired = 1;
      if (round == 0) since = device_ns();
    }
    block_sync();
  }
  if (thread_index() != 0 || block_index() != 0) return;
  a.done[0] = expired != 0 ? round - 1 : round;
  a.done[1] = device_ns() - since;
}

MOECCL_KERNEL(moeccl_ladder_plant_write, PlantArgs) {
  if (thread_index() == 0) a.words[a.n] = 1;
}

MOECCL_KERNEL(moeccl_ladder_plant_race, PlantArgs) {
  MOECCL_SHARED uint32_t words[kBlockThreads];
  words[thread_index()] = thread_index();
  // The barrier that belongs here is left out on purpose: racecheck must report it.
  a.words[thread_index() % a.n] = words[(thread_index() + kWarp) % block_threads()];
}
