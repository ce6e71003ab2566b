// SPDX-License-Identifier: Apache-2.0
// What all parts of the persistent kernel (walk.cuh) need: its state, failures, waits and barriers.
#pragma once

#include "kernels/cuda/copy.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/walk_args.h"

namespace moeccl::cuda {

inline constexpr uint32_t kWalkSharedSteps = 96, kWalkSharedRefs = 192;
struct WalkShared {
  ReduceKernelArgs reduce;
  uint32_t failed, last, refused;
  uint64_t until;  // end of the arrivals below
  WalkArrival arrivals[kNetRound];
  WalkStep steps[kWalkSharedSteps];
  WalkRef refs[kWalkSharedRefs];
};

MOECCL_DEVICE uint64_t* walk_done(WalkHeader* h) { return reinterpret_cast<uint64_t*>(h + 1); }
MOECCL_DEVICE uint64_t* walk_word(WalkHeader* h, uint32_t n_ranks) { return walk_done(h) + n_ranks; }
MOECCL_DEVICE uint32_t* walk_sent(WalkHeader* h, uint32_t n_ranks) {
  return reinterpret_cast<uint32_t*>(walk_word(h, n_ranks) + static_cast<size_t>(n_ranks) * kWalkSigs);
}
MOECCL_DEVICE uint32_t* walk_awaited(WalkHeader* h, uint32_t n_ranks) {
  return walk_sent(h, n_ranks) + static_cast<size_t>(n_ranks) * kWalkSigs;
}

MOECCL_DEVICE uint64_t walk_mix(uint64_t h, uint64_t v) {
  h = (h ^ v) * 0x9e3779b97f4a7c15ull;
  h ^= h >> 32;
  h *= 0xd6e8feb86659fd93ull;
  return h ^ h >> 29;
}

// A thread's knowledge of its operation; it is the same in all threads of a block.
struct WalkState {
  uint64_t seq, history;
  uint32_t lane, block, n_blocks;  // of the lane's team
  uint32_t met;                    // barriers of the lane so far
  // For ranks on other hosts: the number of cells used of the lane's queue, which is the same in all threads, and of
  // commands issued, which only the first thread of the first block counts.
  uint64_t used, given;
  const WalkStep* steps;
  const WalkRef* refs;
};
struct WalkPlace {
  uint64_t step, chunk, peer, expected, seen;
};

// The first block that fails reports why; the others of this launch, and later launches, see `failed`.
MOECCL_DEVICE void walk_fail(const WalkArgs& a, const WalkState& w, WalkFailure kind, const WalkPlace& at) {
  if (atomic_or(&a.header->failed, 1) != 0) return;
  WalkReport& r = *a.report;
  store_relaxed_system(&r.lane, w.lane);
  store_relaxed_system(&r.step, at.step);
  store_relaxed_system(&r.chunk, at.chunk);
  store_relaxed_system(&r.peer, at.peer);
  store_relaxed_system(&r.expected, at.expected);
  store_relaxed_system(&r.seen, at.seen);
  store_relaxed_system(&r.seq, w.seq);
  store_relaxed_system(&r.own.signature, a.signature);
  store_relaxed_system(&r.own.count, a.count);
  store_relaxed_system(&r.own.plan, a.plan);
  if (at.peer < a.n_ranks) {
    const WalkEntry& theirs = a.peers[at.peer].header->entries[w.seq % kWalkEntries];
    store_relaxed_system(&r.entry.seq, load_acquire_system(&theirs.seq));
    store_relaxed_system(&r.entry.signature, load_relaxed_system(&theirs.signature));
    store_relaxed_system(&r.entry.count, load_relaxed_system(&theirs.count));
    store_relaxed_system(&r.entry.plan, load_relaxed_system(&theirs.plan));
  }
  // Release: pairs with the acquire in exec::PersistentKernel::failure().
  store_release_system(&r.kind, static_cast<uint64_t>(kind));
}

// Returns true if the peer has entered this operation with other arguments, or has run other operations before it.
MOECCL_DEVICE bool walk_differs(const WalkArgs& a, const WalkState& w, uint32_t peer, bool must_be_there) {
  const WalkEntry& theirs = a.peers[peer].header->entries[w.seq % kWalkEntries];
  // Polls call this, so it acquires, which pairs with the release in walk_enter(), only when there is an entry.
  if (load_relaxed_system(&theirs.seq) != w.seq || load_acquire_system(&theirs.seq) != w.seq) return must_be_there;
  return load_relaxed_system(&theirs.history) != w.history;
}

// Words of 64 bits belong to other ranks and hosts; words of 32 bits belong to blocks of this launch.
MOECCL_DEVICE uint64_t walk_relaxed(const uint64_t* word) { return load_relaxed_system(word); }
MOECCL_DEVICE uint32_t walk_relaxed(const uint32_t* word) { return load_relaxed_device(word); }
MOECCL_DEVICE uint64_t walk_acquire(const uint64_t* word) { return load_acquire_system(word); }
MOECCL_DEVICE uint32_t walk_acquire(const uint32_t* word) { return load_acquire_device(word); }

// Polls until ready(the word's value), or until there is a reason to give up. at.peer is the rank that it waits for, or
// n_ranks for blocks of this launch. Each acquire empties the multiprocessor's L1 cache for all of its blocks, so polls
// are relaxed and one acquire of the same word follows. The acquire reads what the poll read or a later store, because
// loads of one word by one thread do not go back. *seen is the value that it read.
template <class Word, class Ready>
MOECCL_DEVICE bool walk_wait(const WalkArgs& a, const WalkState& w, const WalkPlace& at, const Word* word,
                             Ready&& ready, Word* seen = nullptr) {
  constexpr uint32_t kPollsBetweenChecks = 64;
  uint64_t since = 0;
  for (uint32_t polls = 1; !ready(walk_relaxed(word)); ++polls) {
    pause();
    if (polls % kPollsBetweenChecks != 0) continue;
    if (load_relaxed_device(&a.header->failed) != 0) return false;
    const uint64_t now = device_ns();
    if (since == 0) since = now;
    WalkFailure why = WalkFailure::kNone;
    const uint64_t stop = load_relaxed_system(&a.report->stop);
    if (stop == kWalkStop)
      why = WalkFailure::kStopped;
    else if (stop == walk_expired(a.number, false) || now - since > a.timeout_ns)
      why = WalkFailure::kDeadline;
    else if (at.peer < a.n_ranks && at.peer != a.rank && walk_differs(a, w, static_cast<uint32_t>(at.peer), false))
      why = WalkFailure::kMismatch;
    if (why == WalkFailure::kNone) continue;
    // The word may have changed meanwhile; then there is no failure.
    if (ready(walk_relaxed(word))) break;
    walk_fail(a, w, why, at);
    return false;
  }
  const Word value = walk_acquire(word);
  if (seen != nullptr) *seen = value;
  return true;
}
// Does the same without a deadline, to wait for blocks that have one.
template <class Word, class Ready>
MOECCL_DEVICE void walk_until(const Word* word, Ready&& ready) {
  while (!ready(walk_relaxed(word))) pause();
  (void)walk_acquire(word);
}

// All blocks of a team (or of the grid) meet: what each did before is visible to all after. Returns false if the
// operation failed.
MOECCL_DEVICE bool walk_meet(const WalkArgs& a, WalkShared& s, const WalkState& w, uint32_t* counter, uint32_t n_blocks,
                             uint32_t round) {
  block_sync();
  if (n_blocks == 1) return true;
  if (thread_index() == 0) {
    const uint32_t all = (round + 1) * n_blocks;
    // Release, and acquire of the others' releases: pairs among the blocks of this launch.
    s.failed = 0;
    if (add_release_device(counter, 1) + 1 < all) {
      const WalkPlace at{0, 0, a.n_ranks, all, 0};
      if (!walk_wait(a, w, at, counter, [&](uint32_t n) { return n >= all; })) s.failed = 1;
    }
  }
  block_sync();
  return s.failed == 0;
}

}  // namespace moeccl::cuda
