// SPDX-License-Identifier: Apache-2.0
// Random calls of the standard collectives against a naive reference: operation x type x operator x count x place x
// root x ranks x threads/processes x topology x memory x deterministic x forced plan.
//
// To replay: MOECCL_TEST_SEED=S build/tests/conformance_test --gtest_filter=<the case's name>. MOECCL_TEST_SEED=random
// draws a new seed, and MOECCL_TEST_SCALE=10 runs ten times as many cases. MOECCL_TEST_MOST_BYTES=1048576 limits the
// buffers of a rank to less than 4 MiB.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "tests/conformance/cases.h"
#include "tests/support/plain_call.h"

namespace moeccl::testing {
namespace {

constexpr int kCases = 2000;  // over all worlds
constexpr size_t kGuard = 256;
constexpr unsigned char kCanary = 0xa5;

size_t most_bytes() {
  constexpr size_t kMost = 4u << 20, kLeast = 64u << 10;  // room for some elements of each of 16 ranks
  const char* text = getenv("MOECCL_TEST_MOST_BYTES");
  return text == nullptr ? kMost : std::clamp<size_t>(strtoull(text, nullptr, 10), kLeast, kMost);
}

const World kWorlds[] = {
    {1, RankMode::kThreads, "", false, 0},
    {1, RankMode::kProcesses, "", true, 0},
    {2, RankMode::kThreads, "", false, 0},
    {2, RankMode::kProcesses, "", false, 0},
    {2, RankMode::kProcesses, "node:2 gpu:1", true, 256 << 10},
    {3, RankMode::kThreads, "", true, 256 << 10},
    {3, RankMode::kProcesses, "", false, 0},
    {3, RankMode::kMixed, "", false, 256 << 10},
    {4, RankMode::kProcesses, "node:2 gpu:2", false, 0},
    {5, RankMode::kThreads, "", false, 0},
    {5, RankMode::kProcesses, "", true, 512 << 10},
    {5, RankMode::kMixed, "", false, 0},
    {7, RankMode::kThreads, "", false, 256 << 10},
    {7, RankMode::kProcesses, "", false, 0},
    {7, RankMode::kMixed, "", true, 0},
    {8, RankMode::kThreads, "node:2 gpu:4", false, 0},
    {8, RankMode::kProcesses, "node:2 socket:2 gpu:2", false, 0},
    {8, RankMode::kProcesses, "", true, 512 << 10},
    {8, RankMode::kMixed, "node:4 gpu:2", false, 512 << 10},
    {8, RankMode::kThreads, "node:3 gpu:1+4+3", false, 0},
    {8, RankMode::kMixed, "node:3 gpu:1+4+3", true, 512 << 10},
    {12, RankMode::kThreads, "node:3 socket:2 gpu:2", false, 512 << 10},
    {12, RankMode::kProcesses, "", false, 0},
    {12, RankMode::kMixed, "node:2 gpu:6", true, 0},
    {15, RankMode::kThreads, "node:2 gpu:7+8", false, 0},
    {15, RankMode::kProcesses, "node:2 gpu:7+8", true, 1 << 20},
    {16, RankMode::kThreads, "", false, 1 << 20},
    {16, RankMode::kProcesses, "node:2 socket:2 gpu:4", false, 0},
    {16, RankMode::kMixed, "node:4 gpu:4", false, 0},
    {4, RankMode::kProcesses, "", false, 256 << 10},  // at the end, so that the others keep their names and cases
};

// One rank's memory for all cases of a world.
class Buffers {
 public:
  Buffers() {
    for (int i = 0; i < 2; ++i) {
      malloc_[i].resize(most_bytes() + 2 * kGuard + 1024);
      EXPECT_EQ(moecclMemAlloc(&heap_[i], most_bytes() + 2 * kGuard + 1024), moecclSuccess)
          << moecclGetLastError(nullptr);
    }
  }
  ~Buffers() {
    for (void* p : heap_) EXPECT_EQ(moecclMemFree(p), moecclSuccess);
  }
  unsigned char* base(int which, bool heap) {
    return (heap ? static_cast<unsigned char*>(heap_[which]) : malloc_[which].data()) + kGuard;
  }

 private:
  std::vector<unsigned char> malloc_[2];
  void* heap_[2] = {nullptr, nullptr};
};

// The buffers of one call.
struct Placed {
  unsigned char *send, *recv;  // first elements
  size_t send_bytes, recv_bytes;
  bool separate;  // out of place: the call must not change the input
};

Placed place(const Case& c, int n, int rank, Buffers& buffers) {
  const size_t size = moecclTypeSize(c.type);
  Placed p{};
  p.send_bytes = send_elements(c, n, rank) * size;
  p.recv_bytes = recv_elements(c, n, rank) * size;
  p.recv = buffers.base(1, c.heap_recv) + c.recv_offset * size;
  p.send = buffers.base(0, c.heap_send) + c.send_offset * size;
  const size_t block = c.count * size;
  const size_t mine = static_cast<size_t>(rank) * block;
  const bool at_root = rank == c.root;
  p.separate = true;
  if (!c.in_place) return p;
  switch (c.op) {
    case moecclOpAllReduce:
    case moecclOpAllToAll:
      p.send = p.recv;
      break;
    case moecclOpReduce:
    case moecclOpBroadcast:
      if (!at_root) return p;
      p.send = p.recv;
      break;
    case moecclOpAllGather:
      p.send = p.recv + mine;
      break;
    case moecclOpGather:
      if (!at_root) return p;
      p.send = p.recv + mine;
      break;
    case moecclOpReduceScatter:
      p.recv = p.send + mine;
      break;
    case moecclOpScatter:
      if (!at_root) return p;
      p.recv = p.send + mine;
      break;
    default:
      return p;
  }
  p.separate = false;
  return p;
}

class Runner {
 public:
  Runner(const World& world, int rank, moecclComm_t comm) : world_(world), n_(world.n), rank_(rank), comm_(comm) {
    EXPECT_EQ(moecclStreamCreate(&stream_), moecclSuccess);
  }
  ~Runner() { EXPECT_EQ(moecclStreamDestroy(stream_), moecclSuccess); }

  // Fills the buffers, makes the call and checks. Returns false when the call failed, because the communicator is then
  // useless.
  bool run(const Case& c) {
    const Placed p = place(c, n_, rank_, buffers_);
    if (p.separate) {
      memset(p.recv - kGuard / 2, kCanary, p.recv_bytes + kGuard);
    } else {
      unsigned char* low = std::min(p.send, p.recv);
      unsigned char* high = std::max(p.send + p.send_bytes, p.recv + p.recv_bytes);
      memset(low - kGuard / 2, kCanary, static_cast<size_t>(high - low) + kGuard);
    }
    const size_t elements = send_elements(c, n_, rank_);
    for (size_t i = 0; i < elements; ++i) store(c.type, p.send, i, input_at(c, n_, rank_, i));
    moecclResult_t forced = moecclPlanForce(comm_, c.op, c.algorithm.empty() ? nullptr : c.algorithm.c_str());
    // The algorithm can never apply on this topology.
    if (forced == moecclUnsupported) forced = moecclPlanForce(comm_, c.op, nullptr);
    EXPECT_EQ(forced, moecclSuccess) << moecclGetLastError(comm_);
    moecclResult_t result = call(c, p);
    if (result == moecclSuccess && c.async) result = moecclStreamSynchronize(stream_);
    if (result != moecclSuccess) {
      ADD_FAILURE() << c.describe() << ": " << moecclGetErrorString(result) << ": " << moecclGetLastError(comm_);
      return false;
    }
    check(c, p);
    return true;
  }
  int wrong_cases() const { return wrong_cases_; }

 private:
  moecclResult_t call(const Case& c, const Placed& p) {
    moecclStream_t s = c.async ? stream_ : nullptr;
    moecclRedOp_t op = c.reduction;
    if (c.reduces() && c.reduction == kPreMulSum) {
      unsigned char scalar[8];
      store(c.type, scalar, 0, scalar_for(c.type, rank_, c.seed));
      if (const moecclResult_t r = moecclRedOpCreatePreMulSum(&op, scalar, c.type, comm_); r != moecclSuccess) return r;
    }
    const bool plain = c.op != moecclOpAllToAllv && c.op != moecclOpSendRecv;
    const moecclResult_t result = plain ? plain_call(c, op, p.send, p.recv, comm_, s) : exchange(c, p, s);
    if (op != c.reduction) {  // made above
      EXPECT_EQ(moecclRedOpDestroy(op, comm_), moecclSuccess) << moecclGetLastError(comm_);
    }
    return result;
  }

  // Runs AllToAllv, or the same exchange by Send and Recv in a group.
  moecclResult_t exchange(const Case& c, const Placed& p, moecclStream_t s) {
    const auto n = static_cast<size_t>(n_);
    std::vector<size_t> out(n), out_at(n), in(n), in_at(n);
    for (size_t r = 0; r < n; ++r) {
      out[r] = c.matrix[static_cast<size_t>(rank_) * n + r];
      in[r] = c.matrix[r * n + static_cast<size_t>(rank_)];
      if (r > 0) out_at[r] = out_at[r - 1] + out[r - 1], in_at[r] = in_at[r - 1] + in[r - 1];
    }
    if (c.op == moecclOpAllToAllv) {
      return moecclAllToAllv(p.send, out.data(), out_at.data(), p.recv, in.data(), in_at.data(), c.type, comm_, s);
    }
    const size_t size = moecclTypeSize(c.type);
    EXPECT_EQ(moecclGroupStart(), moecclSuccess);
    for (size_t r = 0; r < n; ++r) {
      const int peer = static_cast<int>(r);
      EXPECT_EQ(moecclSend(p.send + out_at[r] * size, out[r], c.type, peer, comm_, s), moecclSuccess)
          << moecclGetLastError(comm_);
      EXPECT_EQ(moecclRecv(p.recv + in_at[r] * size, in[r], c.type, peer, comm_, s), moecclSuccess)
          << moecclGetLastError(comm_);
    }
    return moecclGroupEnd();
  }

  bool equal(const Case& c, Number got, Number want) const {
    if (!is_float(c.type)) return got.u == want.u;
    if (!rounds(c)) return got.f == want.f;
    // An average may multiply or divide by n, and round twice. In fp16 and fp8, each of up to n partial sums is
    // rounded.
    const bool narrow = moecclTypeSize(c.type) < 4 && c.type != moecclBfloat16;
    const double partial = narrow ? epsilon(c.type) * std::max(exact_limit(c.type), n_) / 2 : 1e-9;
    return std::fabs(got.f - want.f) <= 2 * epsilon(c.type) * std::fabs(want.f) + partial;
  }

  void check(const Case& c, const Placed& p) {
    const size_t elements = recv_elements(c, n_, rank_);
    size_t wrong = 0, first = 0;
    for (size_t i = 0; i < elements; ++i) {
      Number want;
      if (!expected_at(c, n_, rank_, i, &want) || equal(c, load(c.type, p.recv, i), want)) continue;
      if (wrong++ == 0) first = i;
    }
    if (wrong > 0) {
      Number want;
      expected_at(c, n_, rank_, first, &want);
      const Number got = load(c.type, p.recv, first);
      ADD_FAILURE() << c.describe() << ": " << wrong << " of " << elements << " elements are wrong, the first at "
                    << first << ": got " << got.f << "/" << got.u << ", expected " << want.f << "/" << want.u;
    }
    size_t touched = 0;
    const unsigned char* low = p.separate ? p.recv : std::min(p.send, p.recv);
    const unsigned char* high =
        p.separate ? p.recv + p.recv_bytes : std::max(p.send + p.send_bytes, p.recv + p.recv_bytes);
    for (size_t i = 0; i < kGuard / 2; ++i)
      touched += (low[-1 - static_cast<ptrdiff_t>(i)] != kCanary) + (high[i] != kCanary);
    EXPECT_EQ(touched, 0u) << c.describe() << ": bytes beside the output were written";
    size_t changed = 0;
    const size_t inputs = p.separate ? send_elements(c, n_, rank_) : 0;
    for (size_t i = 0; i < inputs; ++i) {
      const Number got = load(c.type, p.send, i), want = input_at(c, n_, rank_, i);
      changed += is_float(c.type) ? got.f != want.f : got.u != want.u;
    }
    EXPECT_EQ(changed, 0u) << c.describe() << ": the input was changed";
    wrong_cases_ += wrong + touched + changed > 0;
  }

  const World& world_;
  int n_, rank_;
  moecclComm_t comm_;
  moecclStream_t stream_ = nullptr;
  Buffers buffers_;
  int wrong_cases_ = 0;
};

// Returns the algorithms of each operation, as the library lists them when it refuses a name.
std::vector<std::vector<std::string>> algorithm_names(moecclComm_t comm) {
  std::vector<std::vector<std::string>> names(moecclOpSendRecv + 1);
  for (int op = 0; op < moecclOpSendRecv; ++op) {
    EXPECT_EQ(moecclPlanForce(comm, static_cast<moecclOp_t>(op), "no-such"), moecclInvalidArgument);
    std::string text = moecclGetLastError(comm);
    const size_t at = text.find("there are ");
    if (at == std::string::npos) continue;
    text = text.substr(at + 10) + ",";
    for (size_t from = 0, to; (to = text.find(',', from)) != std::string::npos; from = to + 2) {
      names[static_cast<size_t>(op)].push_back(text.substr(from, to - from));
    }
  }
  return names;
}

class Conformance : public ::testing::TestWithParam<size_t> {};

TEST_P(Conformance, EveryCallMatchesTheNaiveReference) {
  const World& world = kWorlds[GetParam()];
  const uint64_t seed = mix(test_seed(), GetParam());
  const int cases = std::max(1, scaled(kCases) / static_cast<int>(std::size(kWorlds)) + 1);
  RankOptions options{.mode = world.mode, .deadline_ms = 150'000};
  options.config.topology = world.topology[0] == 0 ? nullptr : world.topology;
  options.config.deterministic = world.deterministic;
  options.config.staging_bytes = world.staging_bytes;
  SCOPED_TRACE(::testing::Message() << "MOECCL_TEST_SEED=" << test_seed() << ", " << world);
  run_ranks(
      world.n,
      [&](int rank, moecclComm_t comm) {
        Runner runner(world, rank, comm);
        const auto names = algorithm_names(comm);
        std::mt19937_64 random(seed);
        for (int i = 0; i < cases; ++i) {
          const Case c = draw_case(random, world, names, most_bytes());
          set_note("case " + std::to_string(i) + ": " + c.describe());
          if (!runner.run(c)) return;
          // The other ranks go on, so this rank must too, but not for ever.
          ASSERT_LT(runner.wrong_cases(), 20) << "too many wrong cases, the rest is not run";
        }
      },
      options);
}

INSTANTIATE_TEST_SUITE_P(Worlds, Conformance, ::testing::Range<size_t>(0, std::size(kWorlds)),
                         [](const ::testing::TestParamInfo<size_t>& info) {
                           const World& w = kWorlds[info.param];
                           return std::to_string(info.param) + "_" + std::to_string(w.n) + mode_name(w.mode);
                         });

}  // namespace
}  // namespace moeccl::testing
