// SPDX-License-Identifier: Apache-2.0
// Every collective, with a difference in each of its fields, on one host and between two, from no element to megabytes:
// one rank makes another call. Ranks that must notice the difference in the operation itself get moecclMismatch there,
// and all others by their second next call. The sentence names two ranks and the field. docs/mismatches.md has the same
// in a table.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <optional>

#include "tests/fault/mismatch_calls.h"
#include "tests/support/hosts.h"

namespace moeccl::testing {
namespace {

constexpr int kCallsAfter = 2;  // calls within which a rank that could not know is told

enum class Field { kCount, kNothing, kType, kOperator, kRoot, kOwnRoot, kOrder, kSplits };
struct FieldName {
  Field field;
  const char* name;  // as printed in a failure
  const char* word;  // as used in the sentence
};
constexpr FieldName kFields[] = {
    {Field::kCount, "another count", "count"},
    {Field::kNothing, "a count of 0 (or 1)", "count"},
    {Field::kType, "type", "type"},
    {Field::kOperator, "operator", "operator"},
    {Field::kRoot, "root", "root"},
    {Field::kOwnRoot, "itself as root", "root"},
    {Field::kOrder, "order", "order"},
    {Field::kSplits, "split sizes", "split sizes"},
};

// Returns the call of the rank that differs, or nothing where the operation has no such field.
std::optional<Call> other_call(const Collective& op, Call usual, Field field) {
  Call odd = usual;
  const bool v = op.op == moecclOpAllToAllv;
  switch (field) {
    case Field::kCount:
      odd.count += 4;
      return v ? std::nullopt : std::optional(odd);
    case Field::kNothing:
      odd.count = usual.count == 0 ? 1 : 0;
      return v ? std::nullopt : std::optional(odd);
    case Field::kType:
      odd.type = moecclInt32;  // has the same size
      return odd;
    case Field::kOperator:
      odd.reduce = op.op == moecclOpExpertAllReduce ? moecclAvg : moecclMax;
      return op.reduces ? std::optional(odd) : std::nullopt;
    case Field::kRoot:
      odd.root = 3;
      return op.rooted ? std::optional(odd) : std::nullopt;
    case Field::kOwnRoot:
      odd.root = kOdd;
      return op.rooted ? std::optional(odd) : std::nullopt;
    case Field::kOrder:
      odd.op = op.op == moecclOpAllGather ? moecclOpAllToAll : moecclOpAllGather;
      return odd;
    case Field::kSplits:
      odd.splits = true;
      return v ? std::optional(odd) : std::nullopt;
  }
  return std::nullopt;
}

bool receives_from_all(moecclOp_t op) {
  return op == moecclOpAllReduce || op == moecclOpAllGather || op == moecclOpReduceScatter || op == moecclOpAllToAll ||
         op == moecclOpAllToAllv;
}

// Returns whether the rank's own result depends on a rank that differs, so that success would be wrong.
bool must_see(int rank, const Call& usual, const Call& odd) {
  const Call& mine = rank == kOdd ? odd : usual;
  if (usual.op == odd.op && odd.splits) return rank == kOdd || rank == 1;
  if (receives_from_all(mine.op)) return true;
  switch (mine.op) {
    case moecclOpBroadcast:
    case moecclOpScatter:
      return mine.root != rank && (rank == kOdd || mine.root == kOdd);
    case moecclOpReduce:
    case moecclOpGather:
      return mine.root == rank;
    default:  // ExpertAllReduce: the replicas of one expert are on ranks 0 and 2
      return rank == kOdd || rank == 0;
  }
}

std::string who(const FieldName& field, const Collective& op, size_t count, int rank) {
  return std::string(op.name) + ", rank 2 differs in " + field.name + ", " + std::to_string(count) +
         " elements, on rank " + std::to_string(rank);
}

// Runs one case on a separate communicator. `again`: the ranks agree on one call before.
void run_case(int rank, moecclComm_t parent, const Collective& op, const FieldName& field, size_t count, bool again) {
  const Call usual{.op = op.op, .count = count};
  const std::optional<Call> odd = other_call(op, usual, field.field);
  if (!odd) return;
  const std::string what = who(field, op, count, rank);
  moecclComm_t comm = nullptr;
  MOECCL_ASSERT_COMM_OK(moecclCommSplit(parent, 0, rank, &comm, nullptr), parent);
  set_note(what);
  Buffers b(count);
  if (again) {
    MOECCL_ASSERT_COMM_OK(perform(usual, comm, b), comm);
    // All ranks have finished the call, so that later events cannot affect it.
    int32_t done = 1, all = 0;
    MOECCL_ASSERT_COMM_OK(moecclAllReduce(&done, &all, 1, moecclInt32, moecclSum, parent, nullptr), parent);
  }
  const Stopwatch watch;
  moecclResult_t result = perform(rank == kOdd ? *odd : usual, comm, b);
  EXPECT_FALSE(result == moecclSuccess && must_see(rank, usual, *odd)) << what << ": success, though it can see it";
  for (int i = 0; i < kCallsAfter && result == moecclSuccess; ++i) result = perform(usual, comm, b);
  EXPECT_EQ(result, moecclMismatch) << what << ": " << moecclGetErrorString(result) << ": " << moecclGetLastError(comm);
  EXPECT_LE(watch.fair_ms(), patient_ms(kLimitMs)) << what << " took so long";
  if (result != moecclSuccess) expect_named(moecclGetLastError(comm), field.word, what);
  EXPECT_EQ(moecclCommDestroy(comm), moecclSuccess);
}

enum class Where { kThreads, kProcesses, kHosts };

// Two ranks that both are roots put to the same staging of a third, which copies one of the puts; the calls fail later.
// The thread sanitizer sees this race where the library's own thread writes what comes from another host.
bool races([[maybe_unused]] const FieldName& field, [[maybe_unused]] Where where) {
#if defined(__SANITIZE_THREAD__)
  return where == Where::kHosts && field.field == Field::kOwnRoot;
#else
  return false;
#endif
}

class MismatchMatrix : public ::testing::TestWithParam<std::tuple<Collective, Where>> {};

TEST_P(MismatchMatrix, EveryFieldIsNamedToEveryRank) {
  const Collective op = std::get<0>(GetParam());
  const Where where = std::get<1>(GetParam());
  RankOptions options{.mode = where == Where::kThreads ? RankMode::kThreads : RankMode::kProcesses,
                      .deadline_ms = 120'000};
  std::unique_ptr<TestHosts> hosts;
  if (where == Where::kHosts) {
    std::string why;
    hosts = TestHosts::create({.weights = {1, 1}, .named = true}, &why);
    ASSERT_NE(hosts, nullptr) << why;
    options.hosts = hosts.get();
  }
  // Sizes within the first word, staged, and in several chunks; 64 MiB if there is enough time.
  std::vector<size_t> counts = {0, 1, 1 << 10, 64 << 10, 1 << 20};
  if (test_scale() >= 4) counts.push_back(16 << 20);
  run_ranks(
      kRanks,
      [&](int rank, moecclComm_t parent) {
        bool again = false;
        for (const size_t count : counts) {
          for (const FieldName& field : kFields) {
            if (races(field, where)) continue;
            run_case(rank, parent, op, field, count, again);
            again = !again;
          }
        }
      },
      options);
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<Collective, Where>>& info) {
  const Where where = std::get<1>(info.param);
  const char* name = where == Where::kThreads ? "threads" : where == Where::kProcesses ? "processes" : "hosts";
  return std::string(std::get<0>(info.param).name) + "_" + name;
}

INSTANTIATE_TEST_SUITE_P(Collectives, MismatchMatrix,
                         ::testing::Combine(::testing::ValuesIn(kCollectives),
                                            ::testing::Values(Where::kThreads, Where::kProcesses, Where::kHosts)),
                         name_of);

// A rank that only sends is told by its second next call, whatever its peers do.
TEST(MismatchStream, ARootThatOnlySendsIsToldByTheSecondNextCall) {
  for (const RankMode mode : {RankMode::kThreads, RankMode::kProcesses}) {
    run_ranks(2,
              [](int rank, moecclComm_t comm) {
                float data[2] = {1, 2};
                for (int i = 0; i < 20; ++i)
                  MOECCL_ASSERT_COMM_OK(moecclBroadcast(data, data, 2, moecclFloat32, 0, comm, nullptr), comm);
                const Stopwatch watch;
                moecclResult_t result = moecclSuccess;
                int calls = 0;
                // Each rank passes itself as the root.
                for (; calls <= kCallsAfter && result == moecclSuccess; ++calls)
                  result = moecclBroadcast(data, data, 2, moecclFloat32, rank, comm, nullptr);
                EXPECT_EQ(result, moecclMismatch) << moecclGetLastError(comm);
                MOECCL_EXPECT_WITHIN(watch, kLimitMs);
                const std::string text = moecclGetLastError(comm);
                for (const char* part : {"root", "rank 0", "rank 1"})
                  EXPECT_NE(text.find(part), std::string::npos) << text;
              },
              {.mode = mode});
  }
}

// Rank 1 sends an amount that rank 0 does not expect, with sizes around that of the first word.
TEST(MismatchSplits, BothRanksOfAPairAreToldAtOnce) {
  for (const RankMode mode : {RankMode::kThreads, RankMode::kProcesses}) {
    run_ranks(3,
              [](int rank, moecclComm_t parent) {
                for (const size_t n :
                     {size_t{10}, size_t{500}, size_t{1000}, size_t{3000}, size_t{20'000}, size_t{500'000}}) {
                  for (const int difference : {4, -4}) {
                    moecclComm_t comm = nullptr;
                    MOECCL_ASSERT_COMM_OK(moecclCommSplit(parent, 0, rank, &comm, nullptr), parent);
                    std::vector<int> in(3 * n + 50, rank), out(3 * n + 50);
                    size_t sends[3] = {n, n, n}, expects[3] = {n, n, n}, at[3] = {0, n + 10, 2 * n + 20};
                    const auto exchange = [&] {
                      return moecclAllToAllv(in.data(), sends, at, out.data(), expects, at, moecclInt32, comm, nullptr);
                    };
                    MOECCL_ASSERT_COMM_OK(exchange(), comm);
                    if (rank == 1) sends[0] = static_cast<size_t>(static_cast<int64_t>(n) + difference);
                    const moecclResult_t result = exchange();
                    if (rank < 2) {
                      EXPECT_EQ(result, moecclMismatch) << n << " " << difference << ": " << moecclGetLastError(comm);
                      const std::string text = moecclGetLastError(comm);
                      EXPECT_NE(text.find("rank 1 sends"), std::string::npos) << text;
                      EXPECT_NE(text.find("rank 0 expects " + std::to_string(n)), std::string::npos) << text;
                    }
                    EXPECT_EQ(moecclCommDestroy(comm), moecclSuccess);
                  }
                }
              },
              {.mode = mode});
  }
}

// The receiver of a message compares size and type.
TEST(MismatchMessage, OfSizeAndTypeIsToldToTheReceiver) {
  for (const bool of_type : {false, true}) {
    for (const size_t count : {size_t{2}, size_t{100'000}}) {
      run_ranks(2,
                [&](int rank, moecclComm_t comm) {
                  std::vector<float> data(count + 4);
                  const moecclDataType_t theirs = of_type ? moecclInt32 : moecclFloat32;
                  const Stopwatch watch;
                  if (rank == 0) {
                    const moecclResult_t sent = moecclSend(data.data(), count, moecclFloat32, 1, comm, nullptr);
                    EXPECT_TRUE(sent == moecclSuccess || sent == moecclMismatch) << moecclGetLastError(comm);
                  } else {
                    EXPECT_EQ(moecclRecv(data.data(), of_type ? count : count + 1, theirs, 0, comm, nullptr),
                              moecclMismatch);
                    const std::string text = moecclGetLastError(comm);
                    for (const char* part : {"rank 0", "rank 1", of_type ? "type" : "size"})
                      EXPECT_NE(text.find(part), std::string::npos) << text;
                  }
                  MOECCL_EXPECT_WITHIN(watch, kLimitMs);
                },
                {.mode = RankMode::kProcesses});
    }
  }
}

// One rank uses layers and routings of the same shape in another order, or a combine where others run a backward
// dispatch.
class MismatchMoe : public ::testing::TestWithParam<RankMode> {};

TEST_P(MismatchMoe, AnotherRoutingLayerOrPassIsNamed) {
  enum Kind { kRouting, kLayer, kPass, kOrder, kKinds };
  run_ranks(2,
            [](int rank, moecclComm_t parent) {
              for (int kind = 0; kind < kKinds; ++kind) {
                moecclComm_t comm = nullptr;
                MOECCL_ASSERT_COMM_OK(moecclCommSplit(parent, 0, rank, &comm, nullptr), parent);
                moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
                config.hidden_bytes = 64;
                config.type = moecclFloat32;
                config.top_k = 1;
                config.n_experts = 4;
                config.max_tokens = 8;
                moecclMoe_t layers[2] = {};
                moecclRouting_t routings[3] = {};
                std::vector<int32_t> topk(8);
                for (moecclMoe_t& layer : layers) MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&layer, comm, &config), comm);
                for (int i = 0; i < 3; ++i) {
                  for (int t = 0; t < 8; ++t) topk[static_cast<size_t>(t)] = (t + i) % 4;
                  MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routings[i], layers[i / 2], topk.data(), nullptr, 8),
                                        comm);
                }
                std::vector<float> tokens(8 * 16, 1), rows(16 * 16, 1);
                const bool odd = rank == 1;
                moecclResult_t result = moecclSuccess;
                const Stopwatch watch;
                for (int i = 0; i < 3 && result == moecclSuccess; ++i) {
                  if (kind == kOrder && odd) {
                    result = moecclCombine(routings[0], rows.data(), tokens.data(), nullptr);
                  } else if (kind == kPass) {
                    result = odd ? moecclDispatchBackward(routings[0], rows.data(), tokens.data(), nullptr)
                                 : moecclCombine(routings[0], rows.data(), tokens.data(), nullptr);
                  } else {
                    const int which = !odd || kind == kOrder ? 0 : kind == kRouting ? 1 : 2;
                    result = moecclDispatch(routings[which], tokens.data(), rows.data(), nullptr);
                  }
                }
                const std::string text = moecclGetLastError(comm);
                EXPECT_EQ(result, moecclMismatch) << kind << ": " << text;
                MOECCL_EXPECT_WITHIN(watch, kLimitMs);
                for (const char* part : {"rank 0", "rank 1", kind == kOrder ? "order" : "routing"})
                  EXPECT_NE(text.find(part), std::string::npos) << kind << ": " << text;
                for (moecclRouting_t r : routings) (void)moecclRoutingDestroy(r);
                for (moecclMoe_t layer : layers) (void)moecclMoeDestroy(layer);
                (void)moecclCommDestroy(comm);
              }
            },
            {.mode = GetParam()});
}

INSTANTIATE_TEST_SUITE_P(Modes, MismatchMoe, ::testing::Values(RankMode::kThreads, RankMode::kProcesses),
                         [](const ::testing::TestParamInfo<RankMode>& info) { return mode_name(info.param); });

TEST(MismatchCreation, OfAReplacementNamesTheField) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
    config.hidden_bytes = 64;
    config.type = moecclFloat32;
    config.top_k = 1;
    config.n_experts = 4;
    config.max_tokens = 8;
    moecclMoe_t layer = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&layer, comm, &config), comm);
    moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
    replace.sample_tokens = rank == 0 ? 4 : 2;
    moecclReplacement_t replacement = nullptr;
    EXPECT_EQ(moecclReplaceCreate(&replacement, layer, &replace), moecclMismatch);
    const std::string text = moecclGetLastError(comm);
    for (const char* part : {"rank 0", "rank 1", "sample_tokens", "4", "2"})
      EXPECT_NE(text.find(part), std::string::npos) << text;
    EXPECT_EQ(moecclMoeDestroy(layer), moecclSuccess);
  });
}

// A rank whose config cannot be read takes part in the exchange, so that its peers need not wait for their timeout.
TEST(MismatchCreation, ARankWithoutAConfigTellsTheOthers) {
  Meeting told;
  run_ranks(2, [&](int rank, moecclComm_t comm) {
    const auto told_at_once = [&](moecclResult_t result, const Stopwatch& watch, const char* what) {
      EXPECT_EQ(result, rank == 1 ? moecclInvalidArgument : moecclRemoteError);
      const std::string said = moecclGetLastError(comm);
      EXPECT_NE(said.find(rank == 1 ? "config" : what), std::string::npos) << said;
      MOECCL_EXPECT_WITHIN(watch, kLimitMs);
    };
    const Stopwatch of_split;
    moecclConfig_t wrong = MOECCL_CONFIG_INIT;
    wrong.size = 3;
    moecclComm_t part = nullptr;
    told_at_once(moecclCommSplit(comm, rank, 0, &part, rank == 1 ? &wrong : nullptr), of_split,
                 "rank 1 could not split the communicator");
    moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
    config.hidden_bytes = 64, config.type = moecclFloat32;
    config.top_k = 1, config.n_experts = 4, config.max_tokens = 8;
    moecclMoe_t layer = nullptr;
    EXPECT_EQ(moecclMoeCreate(&layer, comm, &config), moecclSuccess) << moecclGetLastError(comm);
    const moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
    moecclReplacement_t replacement = nullptr;
    const Stopwatch of_replace;
    told_at_once(moecclReplaceCreate(&replacement, layer, rank == 1 ? nullptr : &replace), of_replace,
                 "rank 1 fails in moecclReplaceCreate");
    EXPECT_TRUE(told.meet(2));  // a rank that leaves would end the other's wait
    EXPECT_EQ(moecclMoeDestroy(layer), moecclSuccess);
  });
}

// Settings that must be equal on all ranks at init.
TEST(MismatchInit, NamesTwoRanksTheFieldAndBothValues) {
  struct Case {
    const char* words[3];
    void (*differ)(moecclConfig_t& config);
  };
  const Case cases[] = {
      {{"deterministic", "false", "true"}, [](moecclConfig_t& c) { c.deterministic = 1; }},
      {{"staging_bytes", "16777216", "1048576"}, [](moecclConfig_t& c) { c.staging_bytes = 1 << 20; }},
      {{"topology", "\"\"", "node:3"}, [](moecclConfig_t& c) { c.topology = "node:3"; }},
      {{"priority", "0", "5"}, [](moecclConfig_t& c) { c.priority = 5; }},
      {{"pace", "false", "true"},
       [](moecclConfig_t& c) { c.pace = 1, c.topology = "node:3(bw=1GB/s,lat=20us) gpu:1"; }},
      {{"MOECCL_TRIALS", "1", "0"}, [](moecclConfig_t&) { setenv("MOECCL_TRIALS", "0", 1); }},
      {{"MOECCL_CUDA_GRAPH_MIXING", "1", "0"}, [](moecclConfig_t&) { setenv("MOECCL_CUDA_GRAPH_MIXING", "0", 1); }},
      {{"MOECCL_ENCRYPT", "0", "1"}, [](moecclConfig_t&) { setenv("MOECCL_ENCRYPT", "1", 1); }},
      {{"MOECCL_PLAN", "\"\"", "allreduce:ring"}, [](moecclConfig_t&) { setenv("MOECCL_PLAN", "allreduce:ring", 1); }},
  };
  for (const Case& c : cases) {
    run_ranks(3,
              [&](int rank, moecclComm_t) {
                moecclConfig_t config = MOECCL_CONFIG_INIT;
                config.init_timeout_ms = static_cast<int32_t>(patient_ms(10'000));
                if (rank == 2) c.differ(config);
                moecclComm_t comm = nullptr;
                const Stopwatch watch;
                EXPECT_EQ(moecclCommInitRankConfig(&comm, 3, unique_id(), rank, &config), moecclMismatch) << c.words[0];
                MOECCL_EXPECT_WITHIN(watch, kLimitMs);
                const std::string text = moecclGetLastError(nullptr);
                for (const char* part : {"rank 0", "rank 2", c.words[0], c.words[1], c.words[2]})
                  EXPECT_NE(text.find(part), std::string::npos) << part << ": " << text;
              },
              {.mode = RankMode::kProcesses, .init = false});
  }
}

}  // namespace
}  // namespace moeccl::testing
