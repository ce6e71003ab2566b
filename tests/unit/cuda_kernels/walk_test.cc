// SPDX-License-Identifier: Apache-2.0
// The persistent kernel: ranks' kernels run concurrently, with one thread per rank and per block. Programs are written
// by hand here; cuda_api runs those of the plans.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "kernels/cuda/walk.cuh"
#include "src/plan/binding.h"
#include "tests/unit/cuda_kernels/walk_ranks.h"

namespace moeccl::cuda {
namespace {

constexpr uint32_t kSlots = 4;

WalkStep flag_step(WalkKind kind, uint32_t peer, uint8_t sig, WalkWhen when) {
  WalkStep s{};
  s.kind = static_cast<uint8_t>(kind);
  s.when = static_cast<uint8_t>(when);
  s.sig = sig;
  s.peer = peer;
  s.per_chunk = 1;
  s.run = 1;
  return s;
}
WalkRef ref(uint32_t rank, WalkBuffer buffer, uint16_t index = 0) {
  return {rank, index, 0, 1, static_cast<uint8_t>(buffer), 0};
}

class World {
 public:
  World(uint32_t n, uint64_t half_bytes) : n_(n), ranks_(n) {
    for (WalkRank& r : ranks_) {
      r.header.assign(walk_header_bytes(n) / 8, 0);
      r.staging.assign(2 * half_bytes / 8, 0);
    }
    for (WalkRank& r : ranks_)
      for (WalkRank& p : ranks_)
        r.peers.push_back(
            {reinterpret_cast<WalkHeader*>(p.header.data()), reinterpret_cast<uint8_t*>(p.staging.data()), nullptr});
  }

  // Copies into the own slot, signals all, waits for all and reduces all slots, chunk by chunk, with rotating slots.
  void all_reduce_program() {
    for (uint32_t me = 0; me < n_; ++me) {
      WalkRank& r = ranks_[me];
      r.refs = {ref(me, WalkBuffer::kInput)};
      WalkStep copy{};
      copy.kind = static_cast<uint8_t>(WalkKind::kCopy);
      copy.run = 1;
      copy.dst = ref(me, WalkBuffer::kStaging);
      copy.n_srcs = 1;
      copy.flags = n_ == 1 ? kWalkBarrier : 0;
      r.steps = {copy};
      for (const WalkKind kind : {WalkKind::kSignal, WalkKind::kWait}) {
        uint16_t left = static_cast<uint16_t>(n_ - 1);
        for (uint32_t p = 0; p < n_; ++p) {
          if (p == me) continue;
          r.steps.push_back(flag_step(kind, p, 0, WalkWhen::kEvery));
          r.steps.back().run = left--;
        }
      }
      WalkStep sum{};
      sum.kind = static_cast<uint8_t>(WalkKind::kReduce);
      sum.run = 1;
      sum.flags = n_ == 1 ? kWalkFinal | kWalkBarrier : kWalkFinal;  // with peers the signals make the blocks meet
      sum.dst = ref(me, WalkBuffer::kOutput);
      sum.first_src = 1;
      sum.n_srcs = n_;
      r.steps.push_back(sum);
      for (uint32_t p = 0; p < n_; ++p) r.refs.push_back(ref(p, WalkBuffer::kStaging));
      // A slot is reused after kSlots chunks, when its readers allow it.
      if (n_ > 1) {
        for (uint32_t p = 0; p < n_; ++p)
          if (p != me) r.steps.push_back(flag_step(WalkKind::kSignal, p, 1, WalkWhen::kEvery));
        std::vector<WalkStep> credits;
        for (uint32_t p = 0; p < n_; ++p) {
          if (p == me) continue;
          credits.push_back(flag_step(WalkKind::kWait, p, 1, WalkWhen::kEvery));
          credits.back().lag = kSlots;
        }
        r.steps.insert(r.steps.begin(), credits.begin(), credits.end());
      }
      r.lanes = {{0, static_cast<uint32_t>(r.steps.size())}};
      r.totals.clear();
      for (uint32_t p = 0; p < n_; ++p)
        if (p != me) r.totals.push_back({p * kWalkSigs, 1, 1, 0}), r.totals.push_back({p * kWalkSigs + 1, 1, 1, 0});
    }
  }

  WalkArgs args(uint32_t me, size_t count, uint32_t element_bytes, size_t chunk) {
    return args_of(ranks_[me], me, n_, {count, element_bytes, chunk}, 1, kSlots);
  }

  WalkRank& rank(uint32_t r) { return ranks_[r]; }

 private:
  uint32_t n_;
  std::vector<WalkRank> ranks_;
};

// Under the thread sanitizer, each world takes seconds.
#if defined(__SANITIZE_THREAD__)
constexpr int kWorlds = 3;
#else
constexpr int kWorlds = 12;
#endif

TEST(Walk, OperationsOneAfterAnotherGiveTheReferencesBits) {
  Random random(11);
  for (int world = 0; world < kWorlds; ++world) {
    const auto n = static_cast<uint32_t>(1 + random.below(4));
    World w(n, 64 << 10);
    w.all_reduce_program();
    for (int op = 0; op < 8; ++op) {
      const int type = static_cast<int>(random.below(MOECCL_NUM_DATA_TYPES));
      const size_t size = kTypeSizes[type], count = random.below(3) == 0 ? random.below(4) : random.below(900);
      const size_t chunk = 1 + random.below(400);
      const auto reduce = static_cast<uint32_t>(random.below(4));
      const uint32_t divisor = reduce == 0 && random.chance(30) ? n : 0;
      std::vector<WalkArgs> args;
      std::vector<uint32_t> blocks;
      std::vector<std::vector<uint8_t>> inputs(n);
      for (uint32_t r = 0; r < n; ++r) {
        WalkRank& m = w.rank(r);
        m.in.assign(count * size + 1, 0);
        for (size_t i = 0; i < count; ++i) {
          auto* at = reinterpret_cast<std::byte*>(&m.in[i * size]);
          if (is_float(type)) {
            kernels::write_float(type, at, random.normal());
          } else {
            for (size_t b = 0; b < size; ++b) at[b] = static_cast<std::byte>(random.bits());
          }
        }
        inputs[r] = m.in;
        m.out.assign(count * size + 1, 0xab);
        args.push_back(w.args(r, count, static_cast<uint32_t>(size), chunk));
        args.back().op = reduce;
        args.back().divisor = divisor;
        if (random.chance(30)) args.back().output = m.in.data();  // in place
        blocks.push_back(static_cast<uint32_t>(1 + random.below(3)));
      }
      run_walks("moeccl_walk_" + std::to_string(type), args, blocks, random.bits());
      std::vector<uint8_t> want(count * size + 1, 0xab);
      std::vector<const void*> srcs;
      for (const auto& in : inputs) srcs.push_back(in.data());
      kernels::ReduceArgs reference;
      reference.dst = want.data();
      reference.srcs = srcs.data();
      reference.count = count;
      reference.n_srcs = n;
      reference.divisor = divisor;
      kernels::select("reference")->reduce[type][reduce](reference);
      for (uint32_t r = 0; r < n; ++r) {
        ASSERT_EQ(w.rank(r).report.kind, 0u);
        ASSERT_EQ(w.rank(r).completed, static_cast<uint64_t>(op + 1));
        ASSERT_EQ(std::memcmp(args[r].output, want.data(), count * size), 0)
            << kTypeNames[type] << " op " << reduce << ", count " << count << ", chunk " << chunk << ", " << n
            << " ranks";
      }
    }
  }
}

TEST(Walk, ARankThatNeverComesIsADeadlineThatNamesIt) {
  World w(3, 4096);
  w.all_reduce_program();
  std::vector<WalkArgs> args;
  for (uint32_t r = 0; r < 2; ++r) {  // rank 2 stays away
    w.rank(r).in.assign(40, 1), w.rank(r).out.assign(40, 0);
    args.push_back(w.args(r, 10, 4, 10));
    args.back().timeout_ns = 200'000'000;
  }
  run_walks("moeccl_walk_7", args, {2, 1}, 3);
  for (uint32_t r = 0; r < 2; ++r) {
    const WalkReport& report = w.rank(r).report;
    EXPECT_EQ(report.kind, static_cast<uint64_t>(WalkFailure::kDeadline));
    EXPECT_EQ(report.peer, 2u);
    EXPECT_EQ(report.expected, 1u);
    EXPECT_EQ(report.seq, 1u);
    EXPECT_EQ(w.rank(r).completed, 1u) << "the kernel has left";
  }
  // A rank that has failed ends later launches at once.
  args.pop_back();
  args[0].number = 2;
  args[0].timeout_ns = 600'000'000'000ull;
  run_walks("moeccl_walk_7", args, {1}, 4);
  EXPECT_EQ(w.rank(0).completed, 2u);
}

// Other blocks may change `failed` at any time, here between steps of the block's first and last threads.
MOECCL_KERNEL(test_walk_enter, WalkArgs) {
  MOECCL_SHARED WalkShared s;
  WalkState w;
  if (!walk_begin(a, s, w)) return;
  if (thread_index() == 100) atomic_or(&a.header->failed, 1);
  static_cast<uint8_t*>(a.output)[thread_index()] = walk_enter(a, s, w);
}

// If threads did not share one reading, they would diverge, and the emulation would end the process when they come to
// different barriers.
TEST(Walk, AFailureDuringTheStartIsSeenByAllThreadsOfABlockOrByNone) {
  World w(1, 4096);
  w.all_reduce_program();
  w.rank(0).in.assign(40, 1), w.rank(0).out.assign(256, 0xab);
  const emulation::Kernel* kernel = emulation::find_kernel("test_walk_enter");
  for (uint64_t seed = 0; seed < 50; ++seed) {
    w.rank(0).head().failed = w.rank(0).head().running = 0;  // the kernel above never leaves
    const WalkArgs args = w.args(0, 10, 4, 10);
    emulation::launch(*kernel, &args, {.blocks = 1, .threads = 256, .seed = seed});
    for (const uint8_t entered : w.rank(0).out) ASSERT_EQ(entered, w.rank(0).out[0]) << "seed " << seed;
  }
}

// Nothing but the program orders a graph's replay and an operation that a thread launches.
TEST(Walk, ALaunchBesideAnotherFailsAndEndsBoth) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the launches race, as those of a program that orders them wrongly do";
#endif
  for (const bool replay_first : {false, true}) {
    World w(2, 4096);
    w.all_reduce_program();
    WalkRank& r = w.rank(0);
    r.in.assign(40, 1), r.out.assign(40, 0xab);
    const WalkArgs numbered = w.args(0, 10, 4, 10);
    WalkArgs replay = numbered;
    replay.completed = nullptr;
    const emulation::Kernel* kernel = emulation::find_kernel("moeccl_walk_7");
    // It waits for rank 1, which never comes.
    std::thread first([&] {
      emulation::launch(*kernel, replay_first ? &replay : &numbered,
                        {.blocks = 3, .threads = 64, .concurrent = true, .seed = 1});
    });
    while (std::atomic_ref(r.head().entries[1].seq).load() == 0) std::this_thread::yield();
    emulation::launch(*kernel, replay_first ? &numbered : &replay,
                      {.blocks = 4, .threads = 64, .concurrent = true, .seed = 2});
    first.join();
    EXPECT_EQ(r.report.kind, static_cast<uint64_t>(WalkFailure::kBeside));
    EXPECT_EQ(r.report.seq, 1u);
    EXPECT_EQ(r.completed, 1u) << "both have left";
    EXPECT_EQ(r.out, std::vector<uint8_t>(40, 0xab));
    EXPECT_EQ(r.head().running, 0u);
    for (const WalkTurn& turn : r.head().turns) EXPECT_EQ(turn.verdict + turn.left, 0u);
  }
}

// A kernel that gives up frees the header for those that follow, which end at once.
TEST(Walk, ALaunchThatFailedRunsNoMore) {
  World w(2, 4096);
  w.all_reduce_program();
  WalkRank& r = w.rank(0);
  r.in.assign(40, 1), r.out.assign(40, 0);
  for (uint64_t launch = 1; launch <= 3; ++launch) {
    std::vector<WalkArgs> args{w.args(0, 10, 4, 10)};
    args[0].timeout_ns = 50'000'000;
    run_walks("moeccl_walk_7", args, {2}, launch);
    EXPECT_EQ(r.completed, launch);
    EXPECT_EQ(r.head().running, 0u);
    EXPECT_EQ(r.report.kind, static_cast<uint64_t>(WalkFailure::kDeadline));
  }
}

TEST(Walk, RanksThatRunDifferentOperationsFindOut) {
  World w(2, 4096);
  w.all_reduce_program();
  std::vector<WalkArgs> args;
  for (uint32_t r = 0; r < 2; ++r) {
    w.rank(r).in.assign(44, 1), w.rank(r).out.assign(44, 0);
    args.push_back(w.args(r, 10 + r, 4, 16));
  }
  run_walks("moeccl_walk_7", args, {1, 1}, 5);
  for (uint32_t r = 0; r < 2; ++r) {
    const WalkReport& report = w.rank(r).report;
    EXPECT_EQ(report.kind, static_cast<uint64_t>(WalkFailure::kMismatch));
    EXPECT_EQ(report.peer, 1 - r);
    EXPECT_EQ(report.own.count, 10u + r);
    EXPECT_EQ(report.entry.count, 11u - r);
  }
}

// Returns both ranks' arguments for an AllReduce of 10 elements.
std::vector<WalkArgs> all_reduce_of_tens(World& w) {
  w.all_reduce_program();
  std::vector<WalkArgs> args;
  for (uint32_t r = 0; r < 2; ++r) {
    w.rank(r).in.assign(40, 1), w.rank(r).out.assign(40, 0);
    args.push_back(w.args(r, 10, 4, 10));
  }
  return args;
}
// Launches one rank's kernel, which waits for its peer's.
std::thread launch_early(const WalkArgs& args) {
  return std::thread([&args] {
    emulation::launch(*emulation::find_kernel("moeccl_walk_7"), &args, {.blocks = 1, .threads = 64, .seed = 7});
  });
}

// An acquire empties a multiprocessor's L1 cache. There is one for each word that is waited for, however long the wait.
TEST(Walk, AWaitPollsWithoutAcquires) {
  World w(2, 4096);
  std::vector<WalkArgs> args = all_reduce_of_tens(w);
  const int before = emulation::acquires;
  std::thread early = launch_early(args[0]);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const int waiting = emulation::acquires - before;
  run_walks("moeccl_walk_7", {args[1]}, {1}, 8);
  early.join();
  EXPECT_EQ(w.rank(0).completed, 1u);
  // At its start it checks that no earlier operation has failed, and that the peer has finished the operation before
  // the last.
  EXPECT_LE(waiting, 2);
}

// The host lays the staging out, and the network puts data there; the kernel reads and writes it.
TEST(Walk, SlotsLieWhereThePlanHasThem) {
  Random random(5);
  for (int i = 0; i < 2000; ++i) {
    plan::Program program;
    program.n_slots = static_cast<uint32_t>(1 + random.below(5));
    program.depth = static_cast<uint32_t>(1 + random.below(4));
    program.n_part_slots = static_cast<uint32_t>(random.below(20));
    program.slot_parts = static_cast<uint32_t>(1 + random.below(20));
    plan::Binding binding;
    binding.element_bytes = 1u << random.below(5);
    binding.chunking = {1 + random.below(3000), 7};
    binding.slot_elements = plan::whole_lines(binding.chunking.chunk, binding.element_bytes);
    binding.count = 1 + random.below(7 * binding.chunking.chunk);
    plan::Ref ref;
    ref.buffer = plan::Buffer::kStaging;
    ref.index = static_cast<uint16_t>(random.below(program.n_slots + program.n_part_slots));
    ref.parts = static_cast<uint16_t>(program.slot_parts);
    ref.part = static_cast<uint16_t>(random.below(program.slot_parts));
    const auto chunk = static_cast<uint32_t>(random.below(7));

    std::vector<uint8_t> staging(1);
    const WalkPeer peer{nullptr, staging.data(), nullptr};
    WalkArgs a{};
    a.peers = &peer;
    a.count = binding.count;
    a.chunk = binding.chunking.chunk;
    a.element_bytes = binding.element_bytes;
    a.slot_elements = binding.slot_elements;
    a.part_slot_elements = plan::part_slot_elements(binding, program);
    a.depth = program.depth;
    a.n_slots = program.n_slots;
    a.n_part_slots = program.n_part_slots;
    const WalkSpan got = walk_resolve(a, WalkState{}, {0, ref.index, ref.part, ref.parts, 2, 0}, chunk);
    const plan::Range want = plan::resolve(binding, program, ref, binding.count, chunk);
    ASSERT_EQ(reinterpret_cast<uintptr_t>(got.data) - reinterpret_cast<uintptr_t>(staging.data()),
              want.offset * binding.element_bytes);
    ASSERT_EQ(got.elements, want.length);
    ASSERT_LE(want.offset + want.length, plan::staging_elements(binding, program));
  }
}

TEST(Walk, TheHostsWordEndsAWait) {
  World w(2, 4096);
  w.all_reduce_program();
  w.rank(0).in.assign(40, 1), w.rank(0).out.assign(40, 0);
  std::vector<WalkArgs> args{w.args(0, 10, 4, 10)};
  std::thread host([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::atomic_ref(w.rank(0).report.stop).store(1);
  });
  run_walks("moeccl_walk_7", args, {3}, 6);
  host.join();
  EXPECT_EQ(w.rank(0).report.kind, static_cast<uint64_t>(WalkFailure::kStopped));
}

// The host may find an operation late just when it ends. The next one then still has all of its time.
TEST(Walk, TheDeadlineOfAnotherOperationEndsNothing) {
  World w(2, 4096);
  std::vector<WalkArgs> args = all_reduce_of_tens(w);
  WalkReport& report = w.rank(0).report;
  const uint64_t number = args[0].number;
  report.stop = walk_expired(number + 1, false);
  std::thread early = launch_early(args[0]);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(std::atomic_ref(report.begun).load(), number);
  run_walks("moeccl_walk_7", {args[1]}, {1}, 8);
  early.join();
  EXPECT_EQ(w.rank(0).completed, number);
  EXPECT_EQ(report.kind, 0u);
  args = {w.args(0, 10, 4, 10)};
  report.stop = walk_expired(args[0].number, false);
  run_walks("moeccl_walk_7", args, {1}, 9);
  EXPECT_EQ(report.kind, static_cast<uint64_t>(WalkFailure::kDeadline));
}

}  // namespace
}  // namespace moeccl::cuda
