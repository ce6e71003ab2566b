// SPDX-License-Identifier: Apache-2.0
// After a fault nothing wrong is called success, and nothing is written late. Ranks run random operations on data that
// they can predict until a fault ends them: one is killed, stopped and continued, aborts, or its connections are cut.
// Every operation that returned success holds the right data; memory that a failed call has given back stays as its
// owner fills it. MOECCL_TEST_FAULTS sets how many faults of each kind.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "tests/support/hosts.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

enum class Kind { kKill, kStop, kAbort, kExec, kBlackHole, kReset };
enum class Where { kOneHost, kNamedHosts, kNamespaces };

struct Fault {
  Kind kind = Kind::kKill;
  Where where = Where::kOneHost;
  int n = 4, victim = 0, delay_us = 0;
  bool heap = false;
  uint64_t seed = 0;
  int op = -1;  // one of step()'s; -1: all in turn
};

struct Progress {
  std::atomic<int64_t> event_ms;  // 0: not yet
  std::atomic<int> failed;        // ranks whose loop has ended
  std::atomic<int> over;          // whoever was stopped has been let go
  std::atomic<uint64_t> checked;  // operations that returned success, over all ranks
};

constexpr int kOps = 11;
constexpr size_t kMostLog = 17;  // of a block, in elements: 512 KiB
constexpr unsigned char kMine = 0x5a;

int32_t value(uint64_t it, int from, size_t i) {
  return static_cast<int32_t>(it * 31 + static_cast<uint64_t>(from) * 1009 + i * 7);
}

// One rank's buffers and calls. `wrong` counts elements of successful operations.
class Worker {
 public:
  Worker(const Fault& fault, int rank, moecclComm_t comm) : fault_(fault), n_(fault.n), rank_(rank), comm_(comm) {
    elements_ = (size_t{1} << kMostLog) * static_cast<size_t>(n_) + 64;
    for (int32_t** p : {&in_, &out_}) {
      void* memory = nullptr;
      if (fault.heap) {
        EXPECT_EQ(moecclMemAlloc(&memory, elements_ * 4), moecclSuccess) << moecclGetLastError(nullptr);
      } else {
        memory = malloc(elements_ * 4);
      }
      *p = static_cast<int32_t*>(memory);
    }
  }
  ~Worker() {
    EXPECT_EQ(routing_ == nullptr ? moecclSuccess : moecclRoutingDestroy(routing_), moecclSuccess);
    EXPECT_EQ(moe_ == nullptr ? moecclSuccess : moecclMoeDestroy(moe_), moecclSuccess);
    for (int32_t* p : {in_, out_}) {
      if (fault_.heap) {
        EXPECT_EQ(moecclMemFree(p), moecclSuccess) << moecclGetLastError(nullptr);
      } else {
        free(p);
      }
    }
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  moecclResult_t step(uint64_t it) {
    std::mt19937_64 random(it * 7919 + fault_.seed);
    const size_t count = (size_t{1} << (random() % kMostLog)) + random() % 3;
    const int root = static_cast<int>(random() % static_cast<uint64_t>(n_));
    const int op = fault_.op >= 0 ? fault_.op : static_cast<int>(random() % kOps);
    it_ = it;
    name_ = kNames[op];
    const auto n = static_cast<size_t>(n_);
    switch (op) {
      case 0:
        fill(count);
        if (const auto r = moecclAllReduce(in_, out_, count, moecclInt32, moecclSum, comm_, nullptr)) return r;
        return sums(0, count);
      case 1:
        fill(count);
        if (const auto r = moecclReduce(in_, out_, count, moecclInt32, moecclSum, root, comm_, nullptr)) return r;
        return rank_ == root ? sums(0, count) : moecclSuccess;
      case 2:
        fill(count);
        if (const auto r = moecclBroadcast(in_, out_, count, moecclInt32, root, comm_, nullptr)) return r;
        return block(0, count, root, 0);
      case 3:
        fill(count);
        if (const auto r = moecclAllGather(in_, out_, count, moecclInt32, comm_, nullptr)) return r;
        return blocks(count, 0);
      case 4:
        fill(count * n);
        if (const auto r = moecclReduceScatter(in_, out_, count, moecclInt32, moecclSum, comm_, nullptr)) return r;
        return sums(static_cast<size_t>(rank_) * count, count);
      case 5:
        fill(count * n);
        if (const auto r = moecclAllToAll(in_, out_, count, moecclInt32, comm_, nullptr)) return r;
        return blocks(count, static_cast<size_t>(rank_) * count);
      case 6:
        return all_to_all_v(count);
      case 7:
        fill(count);
        if (const auto r = moecclGather(in_, out_, count, moecclInt32, root, comm_, nullptr)) return r;
        return rank_ == root ? blocks(count, 0) : moecclSuccess;
      case 8:
        fill(count * n);
        if (const auto r = moecclScatter(in_, out_, count, moecclInt32, root, comm_, nullptr)) return r;
        return block(0, count, root, static_cast<size_t>(rank_) * count);
      case 9: {
        fill(count);
        const int from = (rank_ + n_ - 1) % n_;
        EXPECT_EQ(moecclGroupStart(), moecclSuccess);
        const auto a = moecclSend(in_, count, moecclInt32, (rank_ + 1) % n_, comm_, nullptr);
        const auto b = moecclRecv(out_, count, moecclInt32, from, comm_, nullptr);
        const auto c = moecclGroupEnd();
        if (a != moecclSuccess || b != moecclSuccess || c != moecclSuccess) return c != moecclSuccess ? c : a ? a : b;
        return block(0, count, from, 0);
      }
      default:
        return layer();
    }
  }

  // The call has failed: the memory is this rank's again.
  void take_back() {
    for (int32_t* p : {in_, out_}) std::memset(p, kMine, elements_ * 4);
    for (auto* v : {&tokens_, &rows_, &back_}) {
      if (!v->empty()) std::memset(v->data(), kMine, v->size() * sizeof(float));
    }
  }
  size_t bytes_written_late() const {
    size_t late = 0;
    const auto look = [&late](const void* p, size_t bytes) {
      const auto* b = static_cast<const unsigned char*>(p);
      late += static_cast<size_t>(std::count_if(b, b + bytes, [](unsigned char c) { return c != kMine; }));
    };
    for (const int32_t* p : {in_, out_}) look(p, elements_ * 4);
    for (const auto* v : {&tokens_, &rows_, &back_}) look(v->data(), v->size() * sizeof(float));
    return late;
  }
  uint64_t wrong() const { return wrong_; }
  const std::string& what() const { return what_; }
  const char* name() const { return name_; }

 private:
  static constexpr const char* kNames[kOps] = {"allreduce",     "reduce",   "broadcast", "allgather",
                                               "reducescatter", "alltoall", "alltoallv", "gather",
                                               "scatter",       "sendrecv", "layer"};

  void fill(size_t count) {
    for (size_t i = 0; i < count; ++i) in_[i] = value(it_, rank_, i);
  }
  void expect(bool right, size_t at) {
    if (right) return;
    if (wrong_++ == 0) what_ = std::string(name_) + " #" + std::to_string(it_) + ", element " + std::to_string(at);
  }
  moecclResult_t sums(size_t first, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      int32_t sum = 0;
      for (int r = 0; r < n_; ++r) sum += value(it_, r, first + i);
      expect(out_[i] == sum, i);
    }
    return moecclSuccess;
  }
  moecclResult_t block(size_t at, size_t count, int from, size_t first) {
    for (size_t i = 0; i < count; ++i) expect(out_[at + i] == value(it_, from, first + i), at + i);
    return moecclSuccess;
  }
  moecclResult_t blocks(size_t count, size_t first) {
    for (int r = 0; r < n_; ++r) block(static_cast<size_t>(r) * count, count, r, first);
    return moecclSuccess;
  }

  moecclResult_t all_to_all_v(size_t most) {
    const auto n = static_cast<size_t>(n_);
    const auto size = [&](size_t from, size_t to) { return (it_ * 5 + from * 3 + to * 11) % (most + 1); };
    std::vector<size_t> send(n), send_at(n), receive(n), receive_at(n);
    const auto me = static_cast<size_t>(rank_);
    for (size_t r = 0, s = 0, d = 0; r < n; ++r) {
      send[r] = size(me, r), send_at[r] = s, s += send[r];
      receive[r] = size(r, me), receive_at[r] = d, d += receive[r];
      for (size_t i = 0; i < send[r]; ++i) in_[send_at[r] + i] = value(it_, rank_ * 64 + static_cast<int>(r), i);
    }
    if (const auto r = moecclAllToAllv(in_, send.data(), send_at.data(), out_, receive.data(), receive_at.data(),
                                       moecclInt32, comm_, nullptr))
      return r;
    for (size_t r = 0; r < n; ++r) block(receive_at[r], receive[r], static_cast<int>(r) * 64 + rank_, 0);
    return moecclSuccess;
  }

  float token(uint64_t it, int from, size_t i) const {
    return static_cast<float>((it * 3 + static_cast<uint64_t>(from) * 17 + i) % 1000);
  }
  moecclResult_t layer() {
    constexpr size_t kTokens = 48, kHidden = 96;
    constexpr int kTopK = 2;
    const int n_experts = 2 * n_;
    std::mt19937_64 random(it_ * 977 + static_cast<uint64_t>(rank_));
    std::vector<int32_t> experts(kTokens * kTopK);
    std::vector<int> ranks_of(kTokens);
    for (size_t t = 0; t < kTokens; ++t) {
      const auto a = static_cast<int32_t>(random() % static_cast<uint64_t>(n_experts));
      const int32_t b = (a + 1 + static_cast<int32_t>(random() % static_cast<uint64_t>(n_experts - 1))) % n_experts;
      experts[t * kTopK] = a, experts[t * kTopK + 1] = b;
      ranks_of[t] = a / 2 == b / 2 ? 1 : 2;
    }
    if (moe_ == nullptr) {
      moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
      config.hidden_bytes = kHidden * sizeof(float);
      config.type = moecclFloat32;
      config.top_k = kTopK;
      config.n_experts = n_experts;
      config.max_tokens = kTokens;
      if (const auto r = moecclMoeCreate(&moe_, comm_, &config)) return r;
      if (const auto r = moecclRoutingCreate(&routing_, moe_, experts.data(), nullptr, kTokens)) return r;
    } else if (const auto r = moecclRoutingUpdate(routing_, experts.data(), nullptr, kTokens)) {
      return r;
    }
    moecclRoutingInfo_t info = {};
    info.size = sizeof(info);
    if (const auto r = moecclRoutingGetInfo(routing_, &info)) return r;
    tokens_.resize(kTokens * kHidden);
    back_.assign(kTokens * kHidden, -1);
    rows_.assign(std::max<size_t>(1, info.n_rows) * kHidden, -1);
    for (size_t i = 0; i < tokens_.size(); ++i) tokens_[i] = token(it_, rank_, i);
    if (const auto r = moecclDispatch(routing_, tokens_.data(), rows_.data(), nullptr)) return r;
    for (size_t row = 0; row < info.n_rows; ++row) {
      for (size_t h = 0; h < kHidden; h += 7) {
        const size_t at = static_cast<size_t>(info.row_token[row]) * kHidden + h;
        expect(rows_[row * kHidden + h] == token(it_, info.row_source[row], at), row);
      }
    }
    if (const auto r = moecclCombine(routing_, rows_.data(), back_.data(), nullptr)) return r;
    for (size_t t = 0; t < kTokens; ++t) {
      for (size_t h = 0; h < kHidden; h += 7)
        expect(back_[t * kHidden + h] == static_cast<float>(ranks_of[t]) * tokens_[t * kHidden + h], t);
    }
    return moecclSuccess;
  }

  const Fault& fault_;
  int n_, rank_;
  moecclComm_t comm_;
  size_t elements_ = 0;
  int32_t *in_ = nullptr, *out_ = nullptr;
  moecclMoe_t moe_ = nullptr;
  moecclRouting_t routing_ = nullptr;
  std::vector<float> tokens_, rows_, back_;
  uint64_t it_ = 0, wrong_ = 0;
  const char* name_ = "";
  std::string what_;
};

void sleep_us(int64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

void run_rank(const Fault& fault, int rank, moecclComm_t comm, Progress& shared) {
  Worker worker(fault, rank, comm);
  std::thread ender;
  if (fault.kind == Kind::kAbort && rank == fault.victim) {
    ender = std::thread([&] {
      sleep_us(fault.delay_us);
      shared.event_ms = fair_now_ms();
      EXPECT_EQ(moecclCommAbort(comm), moecclSuccess);
    });
  }
  if (fault.kind == Kind::kExec && rank == fault.victim) {
    ender = std::thread([&] {
      sleep_us(fault.delay_us);
      shared.event_ms = fair_now_ms();
      execl("/bin/sleep", "sleep", "3", static_cast<char*>(nullptr));
    });
  }
  moecclResult_t result = moecclSuccess;
  uint64_t it = 0;
  // What ends a rank whose operations need nobody, such as the root of broadcasts, comes with its next question.
  while (result == moecclSuccess && (shared.event_ms == 0 || fair_now_ms() - shared.event_ms < patient_ms(10'000))) {
    result = worker.step(++it);
    if (result == moecclSuccess && it % 16 == 0) {
      EXPECT_EQ(moecclCommGetAsyncError(comm, &result), moecclSuccess);
    }
  }
  const std::string text = moecclGetLastError(comm);
  worker.take_back();
  shared.failed++;
  EXPECT_NE(result, moecclSuccess) << "no failure on rank " << rank;
  EXPECT_EQ(worker.wrong(), 0u) << "rank " << rank << ": success with wrong data in " << worker.what()
                                << "; the loop ended with: " << text;
  shared.checked += it - 1;
  for (const Stopwatch watch; shared.over == 0 && watch.fair_ms() < patient_ms(20'000);) sleep_us(1000);
  sleep_us(100'000);
  EXPECT_EQ(worker.bytes_written_late(), 0u) << "rank " << rank << " after " << worker.name() << ": " << text;
  if (ender.joinable()) ender.join();
}

const char* name_of(Kind kind) {
  constexpr const char* kNames[] = {"kill", "stop", "abort", "exec", "black hole", "reset"};
  return kNames[static_cast<int>(kind)];
}

void cause(const Fault& fault, const std::vector<pid_t>& pids, const TestHosts* hosts, Progress& shared) {
  const pid_t victim = pids[static_cast<size_t>(fault.victim)];
  const bool by_rank = fault.kind == Kind::kAbort || fault.kind == Kind::kExec;
  const bool goes = fault.kind == Kind::kKill || fault.kind == Kind::kStop || fault.kind == Kind::kExec;
  const int others = fault.n - (goes ? 1 : 0);
  if (!by_rank) sleep_us(fault.delay_us);
  if (fault.kind == Kind::kKill) kill(victim, SIGKILL);
  if (fault.kind == Kind::kStop) kill(victim, SIGSTOP);
  if (fault.kind == Kind::kBlackHole) {
    EXPECT_TRUE(hosts->drop_what_it_sends(1));
  }
  if (fault.kind == Kind::kReset) {
    EXPECT_TRUE(hosts->run(fault.victim % 2, "ss -K -t state established >/dev/null"));
  }
  if (!by_rank) shared.event_ms = fair_now_ms();
  for (const Stopwatch watch; shared.failed < others && watch.fair_ms() < patient_ms(20'000);) sleep_us(500);
  EXPECT_GE(shared.failed.load(), others) << "ranks that have not ended 20 s after the fault";
  if (fault.kind == Kind::kStop) {
    kill(victim, SIGCONT);
    for (const Stopwatch watch; shared.failed < fault.n && watch.fair_ms() < patient_ms(10'000);) sleep_us(500);
  }
  shared.over = 1;
  if (fault.kind == Kind::kExec) kill(victim, SIGKILL);
}

int faults(int usual) {
  const char* text = getenv("MOECCL_TEST_FAULTS");
  return text != nullptr ? atoi(text) : scaled(usual);
}

// `only`: of one operation, of which most of the time goes into copies.
void run_faults(Kind kind, Where where, bool heap, int usual, int only = -1) {
  std::unique_ptr<TestHosts> hosts;
  if (where != Where::kOneHost) {
    std::string why;
    hosts = TestHosts::create({.weights = {1, 1}, .named = where == Where::kNamedHosts}, &why);
    if (hosts == nullptr) GTEST_SKIP() << why;
  }
  uint64_t checked = 0;
  const int n_faults = faults(usual);
  for (int i = 0; i < n_faults && !::testing::Test::HasFailure(); ++i) {
    std::mt19937_64 random(test_seed() * 100'000 + static_cast<uint64_t>(i));
    Fault fault{kind, where};
    fault.n = where == Where::kOneHost ? 2 + static_cast<int>(random() % 3) : 4;
    fault.victim = static_cast<int>(random() % static_cast<uint64_t>(fault.n));
    fault.delay_us = static_cast<int>(random() % 60'000);
    fault.heap = heap;
    fault.seed = random();
    fault.op = only;
    SCOPED_TRACE(::testing::Message() << "MOECCL_TEST_SEED=" << test_seed() << ", " << name_of(kind) << " " << i
                                      << " of rank " << fault.victim << " of " << fault.n << " after " << fault.delay_us
                                      << " us");
    Shared<Progress> shared;
    RankOptions options{.mode = RankMode::kProcesses, .deadline_ms = 60'000};
    options.hosts = hosts.get();
    if (kind == Kind::kStop || kind == Kind::kBlackHole)
      options.config.timeout_ms = static_cast<int32_t>(patient_ms(700));
    if (kind == Kind::kKill || kind == Kind::kExec) options.may_die = {fault.victim};
    options.on_running = [&](const std::vector<pid_t>& pids) { cause(fault, pids, hosts.get(), *shared); };
    run_ranks(
        fault.n, [&](int rank, moecclComm_t comm) { run_rank(fault, rank, comm, *shared); }, options);
    if (kind == Kind::kBlackHole) {
      EXPECT_TRUE(hosts->run(1, "tc qdisc del dev eth0 root"));
    }
    checked += shared->checked;
  }
  printf("%d faults (%s): %llu operations returned success, all with the right data\n", n_faults, name_of(kind),
         static_cast<unsigned long long>(checked));
}

constexpr int kAllGather = 3, kReduceScatter = 4, kAllToAll = 5, kGather = 7;

TEST(FaultData, KillOnOneHost) { run_faults(Kind::kKill, Where::kOneHost, false, 6); }
TEST(FaultData, KillInTheHeap) { run_faults(Kind::kKill, Where::kOneHost, true, 6); }
TEST(FaultData, KillBetweenHosts) { run_faults(Kind::kKill, Where::kNamedHosts, false, 6); }
TEST(FaultData, StopOnOneHost) { run_faults(Kind::kStop, Where::kOneHost, false, 3); }
TEST(FaultData, StopInTheHeap) { run_faults(Kind::kStop, Where::kOneHost, true, 3); }
TEST(FaultData, StopInTheHeapOfGathers) { run_faults(Kind::kStop, Where::kOneHost, true, 3, kGather); }
TEST(FaultData, StopInTheHeapOfAllGathers) { run_faults(Kind::kStop, Where::kOneHost, true, 3, kAllGather); }
TEST(FaultData, StopInTheHeapOfReduceScatters) { run_faults(Kind::kStop, Where::kOneHost, true, 3, kReduceScatter); }
TEST(FaultData, StopInTheHeapOfAllToAlls) { run_faults(Kind::kStop, Where::kOneHost, true, 3, kAllToAll); }
TEST(FaultData, StopBetweenHosts) { run_faults(Kind::kStop, Where::kNamedHosts, false, 3); }
TEST(FaultData, ExecOnOneHost) { run_faults(Kind::kExec, Where::kOneHost, false, 3); }
TEST(FaultData, ExecInTheHeap) { run_faults(Kind::kExec, Where::kOneHost, true, 3); }
TEST(FaultData, ExecBetweenHosts) { run_faults(Kind::kExec, Where::kNamedHosts, false, 3); }
TEST(FaultData, AbortOnOneHost) { run_faults(Kind::kAbort, Where::kOneHost, false, 8); }
TEST(FaultData, AbortInTheHeap) { run_faults(Kind::kAbort, Where::kOneHost, true, 8); }
TEST(FaultData, AbortInTheHeapOfAllGathers) { run_faults(Kind::kAbort, Where::kOneHost, true, 8, kAllGather); }
TEST(FaultData, AbortBetweenHosts) { run_faults(Kind::kAbort, Where::kNamedHosts, false, 10); }
TEST(FaultData, BlackHoleBetweenHosts) { run_faults(Kind::kBlackHole, Where::kNamespaces, false, 2); }
TEST(FaultData, ResetBetweenHosts) { run_faults(Kind::kReset, Where::kNamespaces, false, 4); }

}  // namespace
}  // namespace moeccl::testing
