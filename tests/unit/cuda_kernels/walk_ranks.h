// SPDX-License-Identifier: Apache-2.0
// Ranks of the persistent kernel in one process: their memory, their arguments, and a launch of all kernels at once.
#pragma once

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cuda/walk_args.h"
#include "tests/unit/cuda_kernels/harness.h"

namespace moeccl::cuda {

// One rank's device memory, its report and a program.
struct WalkRank {
  std::vector<uint64_t> header, staging;
  std::vector<WalkPeer> peers;
  WalkReport report{};
  uint64_t completed = 0;
  std::vector<WalkLane> lanes;
  std::vector<WalkStep> steps;
  std::vector<WalkRef> refs;
  std::vector<WalkTotal> totals;
  std::vector<uint8_t> in, out;

  WalkHeader& head() { return *reinterpret_cast<WalkHeader*>(header.data()); }
};

// The total number of elements, those of a chunk, and the bytes of one.
struct WalkSize {
  size_t count;
  uint32_t element_bytes;
  size_t chunk;
};

// Returns the arguments of the next operation of rank `me`, whose staging has `slots` slots in `depth` rotations.
inline WalkArgs args_of(WalkRank& r, uint32_t me, uint32_t n_ranks, const WalkSize& size, uint32_t slots,
                        uint32_t depth) {
  WalkArgs a{};
  a.lanes = r.lanes.data(), a.steps = r.steps.data(), a.refs = r.refs.data(), a.totals = r.totals.data();
  a.n_lanes = static_cast<uint32_t>(r.lanes.size()), a.n_steps = static_cast<uint32_t>(r.steps.size());
  a.n_refs = static_cast<uint32_t>(r.refs.size()), a.n_totals = static_cast<uint32_t>(r.totals.size());
  a.header = &r.head();
  a.peers = r.peers.data();
  a.report = &r.report;
  a.completed = &r.completed;
  a.number = r.completed + 1;
  a.rank = me;
  a.n_ranks = n_ranks;
  a.count = size.count;
  a.input = r.in.data();
  a.output = r.out.data();
  a.chunk = size.chunk;
  a.n_chunks = static_cast<uint32_t>(std::max<size_t>(1, (size.count + size.chunk - 1) / size.chunk));
  a.slot_elements = (size.chunk * size.element_bytes + 63) / 64 * 64 / size.element_bytes;
  a.half_bytes = r.staging.size() * 8 / 2;
  a.depth = depth;
  a.n_slots = slots;
  a.element_bytes = size.element_bytes;
  a.timeout_ns = 60'000'000'000ull;
  return a;
}

// Runs all ranks' kernels concurrently, each with blocks[r] blocks.
inline void run_walks(const std::string& kernel, const std::vector<WalkArgs>& args, const std::vector<uint32_t>& blocks,
                      uint64_t seed) {
  const emulation::Kernel* k = emulation::find_kernel(kernel);
  ASSERT_NE(k, nullptr) << kernel;
  ASSERT_EQ(k->bytes, sizeof(WalkArgs));
  std::vector<std::thread> threads;
  for (size_t r = 0; r < args.size(); ++r) {
    threads.emplace_back([&, r] {
      emulation::launch(*k, &args[r], {.blocks = blocks[r], .threads = 64, .concurrent = true, .seed = seed + r});
    });
  }
  for (auto& t : threads) t.join();
  ++shapes_run();
}

}  // namespace moeccl::cuda
