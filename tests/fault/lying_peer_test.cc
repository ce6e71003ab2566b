// SPDX-License-Identifier: Apache-2.0
// A process writes arbitrary values into the control words that ranks of a host share: boards, entries, signals,
// outboxes, block words, message slots. The others may fail, wait for their timeout or get wrong data, but may not
// crash. With the address sanitizer, the test also shows that they access no memory that is not theirs.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "tests/support/ranks.h"
#include "transport/shm/segment.h"

namespace moeccl::testing {
namespace {

using transport::Board;
using transport::Entry;

constexpr int kRanks = 3, kLiar = 2;
constexpr size_t kFirst = 64;  // the segment's magic number comes before this: it is read at init only

enum class Lie { kAnything, kOwnEntries, kTheirSignatures, kDisplacements, kOutboxes, kStaging };

struct Area {
  uint64_t* first;
  size_t words;
  bool own;
};

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// The parts of the mapped segments that a lie changes. Offsets are those of transport/shm/segment.cc.
std::vector<Area> areas(Lie lie, int rank) {
  const size_t signals = round_up(kFirst + sizeof(Board), transport::kLine);
  const size_t blocks = signals + kRanks * transport::kSigsPerPeer * sizeof(transport::SignalLine);
  const size_t pace = round_up(blocks + 2 * kRanks * sizeof(transport::BlockWord), transport::kLine);
  const size_t outboxes =
      round_up(pace + transport::kPaceLevels * sizeof(transport::PaceWords), alignof(transport::Outbox));
  const size_t staging = round_up(outboxes + 2 * sizeof(transport::Outbox), 4096);
  std::vector<Area> found;
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  char line[512], name[256];
  uint64_t from = 0, to = 0;
  while (maps != nullptr && std::fgets(line, sizeof(line), maps) != nullptr) {
    name[0] = 0;
    if (std::sscanf(line, "%" SCNx64 "-%" SCNx64 " rw-s %*s %*s %*s %255s", &from, &to, name) != 3) continue;
    const char* at = std::strstr(name, "moeccl-rank");
    if (at == nullptr || to - from < staging) continue;
    const bool own = std::atoi(at + std::strlen("moeccl-rank")) == rank;
    size_t first = kFirst, end = staging;
    if (lie == Lie::kOwnEntries || lie == Lie::kTheirSignatures)
      first = kFirst + offsetof(Board, entries), end = kFirst + sizeof(Board);
    if (lie == Lie::kDisplacements) first = blocks, end = pace;
    if (lie == Lie::kOutboxes) first = outboxes, end = staging;
    if (lie == Lie::kStaging) first = staging, end = to - from;
    if (lie == Lie::kTheirSignatures ? !own : own || lie == Lie::kAnything || lie == Lie::kStaging)
      found.push_back({reinterpret_cast<uint64_t*>(from + first), (end - first) / sizeof(uint64_t), own});
  }
  if (maps != nullptr) std::fclose(maps);
  return found;
}

// Returns how many words were written.
int64_t lie_until(const std::atomic<bool>& stop, Lie lie, uint64_t seed) {
  std::mt19937_64 random(seed);
  int64_t n_written = 0;
  const std::vector<Area> where = areas(lie, kLiar);
  static constexpr uint64_t kWords[] = {0, 1, 63, 0xffffffff, 0x100000000, 1ull << 47, 1ull << 63, ~0ull, ~0ull - 63};
  while (!stop.load(std::memory_order_relaxed) && !where.empty()) {
    const Area& area = where[random() % where.size()];
    auto* word = reinterpret_cast<std::atomic<uint64_t>*>(area.first + random() % area.words);
    if (lie == Lie::kOwnEntries) {  // keeps the number that identifies an entry, to be believed at first
      const size_t field = static_cast<size_t>(reinterpret_cast<uint64_t*>(word) - area.first) % 8;
      if (field == offsetof(Entry, seq) / 8) continue;
    }
    if (lie == Lie::kTheirSignatures) {  // the root is in a rank's own entry too
      const size_t field = static_cast<size_t>(reinterpret_cast<uint64_t*>(word) - area.first) % 8;
      if (field != offsetof(Entry, signature) / 8) continue;
      ++n_written;
      word->store((word->load(std::memory_order_relaxed) & ~0xffffffffull) | (random() & 0xffffffff),
                  std::memory_order_relaxed);
      continue;
    }
    if (lie == Lie::kDisplacements) {  // counts are compared before, but the start of a block is only the peer's word
      constexpr size_t kBlock = sizeof(transport::BlockWord) / 8;
      const size_t field = static_cast<size_t>(reinterpret_cast<uint64_t*>(word) - area.first) % kBlock;
      if (field != offsetof(transport::BlockWord, displacement) / 8) continue;
      ++n_written;
      // A little below 0, in elements or in bytes, so that adding to it wraps round to a valid place.
      const uint64_t below = 1 + random() % 20'000;
      word->store(random() % 2 == 0 ? 0 - below : (1ull << 62) - below, std::memory_order_relaxed);
      continue;
    }
    ++n_written;
    const uint64_t was = word->load(std::memory_order_relaxed);
    switch (random() % 4) {
      case 0:
        word->store(kWords[random() % std::size(kWords)], std::memory_order_relaxed);
        break;
      case 1:
        word->store(was + (random() % 2 == 0 ? 1 : -1ull), std::memory_order_relaxed);
        break;
      case 2:
        word->store(was ^ (1ull << random() % 64), std::memory_order_relaxed);
        break;
      default:
        word->store(random(), std::memory_order_relaxed);
    }
    if (lie == Lie::kAnything) usleep(static_cast<useconds_t>(random() % 300));
    if (lie == Lie::kOutboxes || lie == Lie::kStaging) usleep(static_cast<useconds_t>(random() % 20));
  }
  return n_written;
}

struct Buffers {
  size_t count = 0;
  float *in = nullptr, *out = nullptr;
  std::vector<float> plain_in, plain_out;
};

// Runs one operation of a kind. Its result does not matter.
moecclResult_t operate(unsigned kind, Buffers& b, int rank, moecclComm_t comm) {
  const size_t small = 1 + kind * 37 % 400, large = b.count / kRanks, n = kind % 2 == 0 ? small : large;
  const bool heap = kind / 2 % 2 == 0;
  float *in = heap ? b.in : b.plain_in.data(), *out = heap ? b.out : b.plain_out.data();
  switch (kind / 4 % 8) {
    case 0:
      return moecclAllReduce(in, out, n, moecclFloat32, moecclSum, comm, nullptr);
    case 1:
      return moecclAllGather(in, out, n, moecclFloat32, comm, nullptr);
    case 2:
    case 3: {
      size_t counts[kRanks], displs[kRanks];
      for (size_t r = 0; r < kRanks; ++r) counts[r] = n, displs[r] = r * n;
      return moecclAllToAllv(in, counts, displs, out, counts, displs, moecclFloat32, comm, nullptr);
    }
    case 4:
      return moecclBroadcast(in, out, n, moecclFloat32, static_cast<int>(kind % kRanks), comm, nullptr);
    case 5:
      if (moecclGroupStart() != moecclSuccess) return moecclInternalError;
      (void)moecclSend(in, n, moecclFloat32, (rank + 1) % kRanks, comm, nullptr);
      (void)moecclRecv(out, n, moecclFloat32, (rank + kRanks - 1) % kRanks, comm, nullptr);
      return moecclGroupEnd();
    case 6:
      return moecclReduceScatter(in, out, n, moecclFloat32, moecclMax, comm, nullptr);
    default: {
      moecclMoeConfig_t c = MOECCL_MOE_CONFIG_INIT;
      c.hidden_bytes = 64, c.type = moecclFloat32, c.top_k = 2, c.n_experts = 6, c.max_tokens = 16;
      moecclMoe_t moe = nullptr;
      moecclRouting_t routing = nullptr;
      moecclResult_t result = moecclMoeCreate(&moe, comm, &c);
      if (result != moecclSuccess) return result;
      int32_t index[32];
      for (int i = 0; i < 32; ++i) index[i] = (i / 2 + rank + i % 2 * 3) % 6;
      result = moecclRoutingCreate(&routing, moe, index, nullptr, 16);
      moecclRoutingInfo_t info{};
      info.size = sizeof(info);
      if (result == moecclSuccess) result = moecclRoutingGetInfo(routing, &info);
      std::vector<char> tokens(16 * 64), rows(info.n_rows * 64 + 1);
      if (result == moecclSuccess) result = moecclDispatch(routing, tokens.data(), rows.data(), nullptr);
      if (result == moecclSuccess) result = moecclCombine(routing, rows.data(), tokens.data(), nullptr);
      if (routing != nullptr) (void)moecclRoutingDestroy(routing);
      (void)moecclMoeDestroy(moe);
      return result;
    }
  }
}

void work_beside_a_liar(Lie lie, uint64_t seed, int rank, moecclComm_t comm, std::atomic<int64_t>& n_written) {
  std::mt19937_64 random(seed);
  Buffers b;
  b.count = 60'000;
  b.plain_in.assign(b.count, 1), b.plain_out.assign(b.count, 0);
  MOECCL_ASSERT_OK(moecclMemAlloc(reinterpret_cast<void**>(&b.in), b.count * sizeof(float)));
  MOECCL_ASSERT_OK(moecclMemAlloc(reinterpret_cast<void**>(&b.out), b.count * sizeof(float)));
  if (lie == Lie::kDisplacements || random() % 2 == 0) (void)moecclPlanForce(comm, moecclOpAllToAllv, "direct");
  std::atomic<bool> stop{false};
  std::thread liar;
  if (rank == kLiar) liar = std::thread([&] { n_written += lie_until(stop, lie, seed + 1); });
  for (int i = 0; i < 200; ++i) {
    // The plan that takes blocks from the peers' buffers reads displacements; broadcasts have roots.
    const unsigned kind = lie == Lie::kDisplacements     ? 9
                          : lie == Lie::kTheirSignatures ? 16 + static_cast<unsigned>(random() % 4)
                                                         : static_cast<unsigned>(random() % 64);
    set_note("operation " + std::to_string(i) + " of kind " + std::to_string(kind));
    if (operate(kind, b, rank, comm) != moecclSuccess) break;
  }
  stop = true;
  if (liar.joinable()) liar.join();
  (void)moecclCommDestroy(comm);
  (void)moecclMemFree(b.in);
  (void)moecclMemFree(b.out);
}

class LyingPeer : public ::testing::TestWithParam<Lie> {};

TEST_P(LyingPeer, CrashesNobody) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the liar writes into memory that the ranks read, which is a race on purpose";
#endif
  const int trials = std::max(3, scaled(8));
  Shared<std::atomic<int64_t>> n_written;  // of trials whose liar survives to report it
  for (int t = 0; t < trials; ++t) {
    // The liar may also break its own words, so the values that the library reads back may end the liar itself.
    RankOptions options{.mode = RankMode::kProcesses, .may_die = {kLiar}};
    options.config.timeout_ms = 150;
    options.config.staging_bytes = 1 << 17;
    options.destroy = false;
    options.check_leaks = false;  // a failed communicator still holds memory
    const uint64_t seed = test_seed() * 1000 + static_cast<uint64_t>(t);
    SCOPED_TRACE("trial " + std::to_string(t));
    if (!run_ranks(
            kRanks, [&](int rank, moecclComm_t comm) { work_beside_a_liar(GetParam(), seed, rank, comm, *n_written); },
            options))
      return;
  }
  EXPECT_GT(n_written->load(), 0);
  printf("%lld random words written by the liar in %d trials\n", static_cast<long long>(n_written->load()), trials);
}

INSTANTIATE_TEST_SUITE_P(Kinds, LyingPeer,
                         ::testing::Values(Lie::kAnything, Lie::kOwnEntries, Lie::kTheirSignatures, Lie::kDisplacements,
                                           Lie::kOutboxes, Lie::kStaging));

}  // namespace
}  // namespace moeccl::testing
