// SPDX-License-Identifier: Apache-2.0
// Planted hangs: `moeccl postmortem` combines the files that the processes leave behind (MOECCL_DUMP) and names the
// culprit and no other rank. Four kinds take turns, each in several forms: a missing rank, a wrong order, a wrong
// count, and a host that dies. Operation, rank, host and step are random. MOECCL_TEST_PLANTED sets the number of hangs
// (default 16; the full run is 60).
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/fault/postmortem.h"
#include "tests/support/hosts.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr int kTimeoutMs = 1500;

enum class Kind { kMissing, kOrder, kCount, kHost };
constexpr const char* kKinds[] = {"missing rank", "wrong order", "wrong count", "dead host"};

enum class Form {
  kAbsent,    // does not make the call
  kKilled,    // is killed before the call
  kStopped,   // SIGSTOP
  kReceive,   // does not send the data that others receive
  kLate,      // makes the call after the others have given up
  kTwoComms,  // uses two communicators in the opposite order
  kSwapped,   // makes two calls on one communicator in the opposite order
  kCircle,    // all receive before they send
  kCount,
  kPower,   // the host falls silent without notice
  kCrash,   // the host's kernel still closes its connections
  kBehind,  // as kPower, and some ranks wait for ranks that wait for that host, on another communicator
};
constexpr const char* kForms[] = {"absent",  "killed", "stopped", "receive", "late",  "two communicators",
                                  "swapped", "circle", "count",   "power",   "crash", "behind another rank"};
const std::vector<Form> kFormsOf[] = {
    {Form::kAbsent, Form::kKilled, Form::kStopped, Form::kReceive, Form::kLate},
    {Form::kTwoComms, Form::kSwapped, Form::kCircle},
    {Form::kCount},
    {Form::kPower, Form::kCrash, Form::kBehind},
};

enum class Op { kAllReduce, kAllGather, kReduceScatter, kAllToAll, kLayer, kBroadcast, kReduce };
constexpr int kAllWait = 4, kAllWaitOrLayer = 5, kOps = 7;  // the number of leading operations in each group
constexpr const char* kOpNames[] = {"allreduce", "allgather", "reducescatter", "alltoall",
                                    "layer",     "broadcast", "reduce"};

struct Plan {
  Kind kind;
  Form form;
  Op op;
  int stage;  // the stage in which a layer hangs: routing, dispatch or combine
  int n_hosts, n, victim;
  int before;  // operations that all ranks make first
  size_t count;
  bool on_stream;
  int delay_ms;  // of a kill, after all ranks have made those operations
  uint64_t seed;

  bool host_dies() const { return kind == Kind::kHost; }
  int dead_host() const { return victim / 2; }
  bool is_victim(int rank) const { return host_dies() ? rank / 2 == dead_host() : rank == victim; }
  int n_victims() const { return host_dies() ? 2 : 1; }
  // A crash is noticed at once. This rank makes its call after that, and is not to blame.
  bool comes_after_crash(int rank) const { return form == Form::kCrash && rank == (victim + 2) % n; }
};

Plan draw(int i, uint64_t seed) {
  std::mt19937_64 random(seed * 1'000'003 + static_cast<uint64_t>(i));
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); };
  Plan p = {};
  p.seed = random();
  p.kind = static_cast<Kind>(i % 4);
  const auto& forms = kFormsOf[i % 4];
  p.form = forms[static_cast<size_t>(i) / 4 % forms.size()];
  // In an operation with a root, a rank may have finished when its peers notice the problem.
  const bool any = p.form == Form::kAbsent || p.form == Form::kKilled || p.form == Form::kStopped || p.host_dies();
  p.op = static_cast<Op>(below(any ? kOps : p.form == Form::kLate ? kAllWaitOrLayer : kAllWait));
  p.stage = below(3);
  p.n_hosts = p.host_dies() ? 2 + below(2) : 1 + below(3);
  p.n = p.n_hosts == 1 ? 2 + below(3) : 2 * p.n_hosts;
  p.victim = below(p.n);
  p.before = below(80);
  p.count = static_cast<size_t>(1 + below(5000));
  p.delay_ms = below(400);
  p.on_stream = below(2) == 1;
  return p;
}

std::string text_of(const Plan& p) {
  return std::string(kKinds[static_cast<int>(p.kind)]) + " (" + kForms[static_cast<int>(p.form)] + ") in " +
         kOpNames[static_cast<int>(p.op)] + ", victim " + std::to_string(p.victim) + " of " + std::to_string(p.n) +
         " ranks on " + std::to_string(p.n_hosts) + " hosts, after " + std::to_string(p.before) + " operations" +
         (p.on_stream ? ", on a stream" : "");
}

// One rank's operations on one communicator.
class Caller {
 public:
  Caller(const Plan& plan, int rank, moecclComm_t comm)
      : plan_(plan), comm_(comm), random_(plan.seed + static_cast<uint64_t>(rank)) {
    EXPECT_EQ(moecclCommCount(comm, &n_), moecclSuccess);
    EXPECT_EQ(plan.on_stream ? moecclStreamCreate(&stream_) : moecclSuccess, moecclSuccess);
  }
  ~Caller() {
    EXPECT_EQ(routing_ == nullptr ? moecclSuccess : moecclRoutingDestroy(routing_), moecclSuccess);
    EXPECT_EQ(moe_ == nullptr ? moecclSuccess : moecclMoeDestroy(moe_), moecclSuccess);
    EXPECT_EQ(stream_ == nullptr ? moecclSuccess : moecclStreamDestroy(stream_), moecclSuccess);
  }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  moecclResult_t make_layer() {
    moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
    config.hidden_bytes = kHidden * sizeof(float);
    config.type = moecclFloat32;
    config.top_k = kTopK;
    config.n_experts = 2 * n_;
    config.max_tokens = kTokens;
    if (const auto r = moecclMoeCreate(&moe_, comm_, &config)) return r;
    return moecclRoutingCreate(&routing_, moe_, choose(), nullptr, kTokens);
  }

  // root: of the operations that have one. stages: of a layer.
  moecclResult_t call(Op op, size_t count, int root = 0, int stages = 3) {
    const size_t n = static_cast<size_t>(n_);
    in_.resize(std::max(in_.size(), count * n));
    out_.resize(std::max(out_.size(), count * n));
    switch (op) {
      case Op::kAllReduce:
        return ended(moecclAllReduce(in_.data(), out_.data(), count, moecclFloat32, moecclSum, comm_, stream_));
      case Op::kAllGather:
        return ended(moecclAllGather(in_.data(), out_.data(), count, moecclFloat32, comm_, stream_));
      case Op::kReduceScatter:
        return ended(moecclReduceScatter(in_.data(), out_.data(), count, moecclFloat32, moecclSum, comm_, stream_));
      case Op::kAllToAll:
        return ended(moecclAllToAll(in_.data(), out_.data(), count, moecclFloat32, comm_, stream_));
      case Op::kBroadcast:
        return ended(moecclBroadcast(in_.data(), out_.data(), count, moecclFloat32, root, comm_, stream_));
      case Op::kReduce:
        return ended(moecclReduce(in_.data(), out_.data(), count, moecclFloat32, moecclSum, root, comm_, stream_));
      case Op::kLayer:
        return layer(stages);
    }
    return moecclInternalError;
  }
  // Makes n calls one after the other, the same on all ranks.
  moecclResult_t calls(int n) {
    std::mt19937_64 random(plan_.seed);
    for (int i = 0; i < n; ++i) {
      const auto op = static_cast<Op>(random() % kOps);
      const auto root = static_cast<int>(random() % static_cast<uint64_t>(n_));
      if (op == Op::kLayer && moe_ == nullptr) continue;
      if (const auto r = call(op, 1 + random() % 3000, root)) return r;
    }
    return moecclSuccess;
  }

 private:
  static constexpr size_t kTokens = 24, kHidden = 32;
  static constexpr int kTopK = 2;

  const int32_t* choose() {
    experts_.resize(kTokens * kTopK);
    const auto n = static_cast<uint64_t>(2 * n_);
    for (size_t t = 0; t < kTokens; ++t) {
      const uint64_t a = random_() % n;
      experts_[t * kTopK] = static_cast<int32_t>(a);
      experts_[t * kTopK + 1] = static_cast<int32_t>((a + 1 + random_() % (n - 1)) % n);
    }
    return experts_.data();
  }
  moecclResult_t layer(int stages) {
    if (stages < 1) return moecclSuccess;
    if (const auto r = moecclRoutingUpdate(routing_, choose(), nullptr, kTokens)) return r;
    moecclRoutingInfo_t info = {};
    info.size = sizeof(info);
    if (const auto r = moecclRoutingGetInfo(routing_, &info)) return r;
    tokens_.resize(kTokens * kHidden);
    rows_.resize((info.n_rows + 1) * kHidden);
    if (stages < 2) return moecclSuccess;
    if (const auto r = ended(moecclDispatch(routing_, tokens_.data(), rows_.data(), stream_))) return r;
    return stages < 3 ? moecclSuccess : ended(moecclCombine(routing_, rows_.data(), tokens_.data(), stream_));
  }
  moecclResult_t ended(moecclResult_t issued) const {
    return issued != moecclSuccess || stream_ == nullptr ? issued : moecclStreamSynchronize(stream_);
  }

  const Plan& plan_;
  moecclComm_t comm_;
  int n_ = 0;
  std::mt19937_64 random_;
  moecclStream_t stream_ = nullptr;
  moecclMoe_t moe_ = nullptr;
  moecclRouting_t routing_ = nullptr;
  std::vector<int32_t> experts_;
  std::vector<float> in_, out_, tokens_, rows_;
};

struct Meetings {
  Meeting there;                      // all ranks have made the calls before the hang
  Meeting done;                       // the other ranks have given up
  Shared<std::atomic<bool>> starved;  // a rank did not get that far in time, so there is nothing to report
};

// Makes the call in which the others hang, as far as the victim gets in it.
moecclResult_t hanging_call(const Plan& p, Caller& caller) {
  return caller.call(p.op, p.count, p.op == Op::kBroadcast ? p.victim : (p.victim + p.n_victims()) % p.n);
}

Op other_than(Op op) { return static_cast<Op>((static_cast<int>(op) + 1) % kAllWait); }

void hang_victim(const Plan& p, moecclComm_t comm, Caller& caller, Caller* second, const Meetings& meetings) {
  switch (p.form) {
    case Form::kLate:
      EXPECT_TRUE(meetings.done.wait_for(1));
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      (void)hanging_call(p, caller);
      break;
    case Form::kTwoComms:
      if (second->call(p.op, p.count) == moecclSuccess) (void)caller.call(p.op, p.count);
      break;
    case Form::kSwapped:
      if (caller.call(other_than(p.op), p.count) == moecclSuccess) (void)caller.call(p.op, p.count);
      break;
    case Form::kCircle: {
      float word = 0;
      (void)moecclRecv(&word, 1, moecclFloat32, (p.victim + 1) % p.n, comm, nullptr);
      break;
    }
    case Form::kCount:
      (void)caller.call(p.op, p.count + 1);
      break;
    default:  // until it is killed, or the others have given up
      if (p.op == Op::kLayer) (void)caller.call(p.op, p.count, 0, p.stage);
      EXPECT_TRUE(meetings.done.wait_for(p.n - p.n_victims()));
  }
}

void hang_other(const Plan& p, int rank, moecclComm_t comm, Caller& caller, Caller* second, const Meetings& meetings) {
  float word = 0;
  if (p.comes_after_crash(rank)) {
    EXPECT_TRUE(meetings.done.wait_for(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  switch (p.form) {
    case Form::kReceive:
      (void)moecclRecv(&word, 1, moecclFloat32, p.victim, comm, nullptr);
      break;
    case Form::kTwoComms:
      if (caller.call(p.op, p.count) == moecclSuccess) (void)second->call(p.op, p.count);
      break;
    case Form::kSwapped:
      if (caller.call(p.op, p.count) == moecclSuccess) (void)caller.call(other_than(p.op), p.count);
      break;
    case Form::kCircle:
      (void)moecclRecv(&word, 1, moecclFloat32, (rank + 1) % p.n, comm, nullptr);
      break;
    default:
      (void)hanging_call(p, caller);
  }
}

// Ranks 2h and 2h + 1 are on host h. The first rank of each pair communicates with its counterparts on the other hosts,
// including the dead one; the second waits for the first.
void hang_behind(const Plan& p, int rank, moecclComm_t comm, Meetings& meetings) {
  const bool crosses = rank % 2 == 0;
  moecclComm_t local = nullptr, cross = nullptr;
  MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, rank / 2, rank, &local, nullptr), comm);
  MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, crosses ? 0 : -1, rank, &cross, nullptr), comm);
  {
    Caller caller(p, rank, crosses ? cross : local);
    meetings.there.arrive();
    if (!p.is_victim(rank)) {
      (void)caller.call(Op::kAllReduce, p.count);
      meetings.done.arrive();
    } else {
      EXPECT_TRUE(meetings.done.wait_for(p.n - p.n_victims()));
    }
  }
  (void)moecclCommDestroy(cross);
  (void)moecclCommDestroy(local);
}

// Runs one rank's part. Every call at its end may fail.
void run_rank(const Plan& p, int rank, moecclComm_t comm, Meetings& meetings) {
  moecclComm_t second = nullptr;
  if (p.form == Form::kTwoComms) {
    MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, 0, rank, &second, nullptr), comm);
  }
  {
    Caller caller(p, rank, comm);
    std::unique_ptr<Caller> on_second;
    if (second != nullptr) on_second = std::make_unique<Caller>(p, rank, second);
    moecclResult_t ready = caller.make_layer();
    if (ready == moecclSuccess) ready = caller.calls(p.before);
    if (ready != moecclSuccess) {
      // The others have failed with it, or will. Any other error than a timeout is a finding, on some rank at least.
      *meetings.starved = true;
      EXPECT_TRUE(ready == moecclTimeout || ready == moecclRemoteError) << moecclGetLastError(comm);
      meetings.there.arrive();
      meetings.done.arrive();
    } else if (p.form == Form::kBehind) {
      hang_behind(p, rank, comm, meetings);
    } else {
      meetings.there.arrive();
      if (p.is_victim(rank)) {
        hang_victim(p, comm, caller, on_second.get(), meetings);
      } else {
        hang_other(p, rank, comm, caller, on_second.get(), meetings);
        meetings.done.arrive();
      }
    }
  }
  if (second != nullptr) (void)moecclCommDestroy(second);
}

// The test's part: kills, stops and cuts cables.
void strike(const Plan& p, const std::vector<pid_t>& pids, const TestHosts* hosts, bool cables, Meetings& meetings) {
  if (!p.host_dies() && p.form != Form::kKilled && p.form != Form::kStopped) return;
  EXPECT_TRUE(meetings.there.wait_for(p.n));
  if (*meetings.starved) return;
  std::this_thread::sleep_for(std::chrono::milliseconds(p.delay_ms));
  // Without a cable the others get no notice: no segment that closes or resets a connection gets out.
  if (cables && (p.form == Form::kPower || p.form == Form::kBehind)) {
    EXPECT_TRUE(hosts->pull_cable(p.dead_host()));
  }
  const auto send_all = [&](int signal) {
    for (int rank = 0; rank < p.n; ++rank) {
      if (p.is_victim(rank)) kill(pids[static_cast<size_t>(rank)], signal);
    }
  };
  send_all(p.form == Form::kStopped ? SIGSTOP : SIGKILL);
  EXPECT_TRUE(meetings.done.wait_for(p.n - p.n_victims()));
  send_all(SIGKILL);
}

size_t count_of(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}

// Checks that the report names one culprit, the right one.
bool names(const Plan& p, const std::string& text, const std::string& host) {
  const std::string rank = "rank " + std::to_string(p.victim);
  const size_t culprits = count_of(text, "Culprit: "), differences = count_of(text, "Calls differ");
  const auto says = [&](const std::string& part) { return text.find(part) != std::string::npos; };
  switch (p.form) {
    case Form::kCount:
    case Form::kSwapped:
      return culprits == 0 && differences == 1 && says(rank + " calls");
    case Form::kTwoComms:
    case Form::kCircle:
      return culprits == 1 && differences == 0 && says("Culprit: each of these waits for the next one") &&
             says("  " + rank + " of communicator");
    default:
      break;
  }
  if (culprits != 1 || differences != 0) return false;
  if (!p.host_dies()) return says("Culprit: " + rank + " of communicator");
  const int first = 2 * p.dead_host();
  return says("Culprit: host " + host + " is gone, with ranks " + std::to_string(first) + ", " +
              std::to_string(first + 1) + " of communicator");
}

// Returns the name of a host, as the library reports it.
std::string host_name(bool cables, int host) { return (cables ? "test-host-" : "test host ") + std::to_string(host); }

enum class Outcome { kNamed, kNotNamed, kStarved };

Outcome plant(const Plan& p, bool cables) {
  std::unique_ptr<TestHosts> hosts;
  if (p.n_hosts > 1) {
    const std::vector<int> weights(static_cast<size_t>(p.n_hosts), 1);
    std::string why;
    hosts = TestHosts::create({.weights = weights, .named = !cables}, &why);
    EXPECT_NE(hosts, nullptr) << why;
    if (hosts == nullptr) return Outcome::kNotNamed;
  }
  const Folder folder;
  EXPECT_EQ(setenv("MOECCL_DUMP", (folder.path() + "/job").c_str(), 1), 0);
  RankOptions options;
  options.mode = RankMode::kProcesses;
  options.config.timeout_ms = static_cast<int32_t>(patient_ms(kTimeoutMs));
  options.check_leaks = false;
  options.hosts = hosts.get();
  for (int rank = 0; rank < p.n; ++rank) {
    if (p.is_victim(rank) && (p.host_dies() || p.form == Form::kKilled || p.form == Form::kStopped))
      options.may_die.insert(rank);
  }
  Meetings meetings;
  options.on_running = [&](const std::vector<pid_t>& pids) { strike(p, pids, hosts.get(), cables, meetings); };
  const bool ran = run_ranks(
      p.n, [&](int rank, moecclComm_t comm) { run_rank(p, rank, comm, meetings); }, options);
  unsetenv("MOECCL_DUMP");
  if (*meetings.starved || !ran) return ran ? Outcome::kStarved : Outcome::kNotNamed;
  int code = 0;
  const std::string text = folder.report(&code);
  if (code == 0 && names(p, text, host_name(cables, p.dead_host()))) return Outcome::kNamed;
  ADD_FAILURE() << "exit code " << code << "\n" << text;
  return Outcome::kNotNamed;
}

TEST(PlantedHangs, PostMortemNamesTheCulpritAndNobodyElse) {
  const char* asked = getenv("MOECCL_TEST_PLANTED");
  const int planted = asked != nullptr ? atoi(asked) : scaled(16);
  std::string why;
  const bool cables = TestHosts::create({}, &why) != nullptr;
  if (!cables) printf("hosts have no cables, and their deaths close their connections: %s\n", why.c_str());
  int named[4] = {}, of[4] = {}, starved = 0;
  for (int i = 0; i < planted; ++i) {
    const Plan p = draw(i, test_seed());
    SCOPED_TRACE(::testing::Message() << "MOECCL_TEST_SEED=" << test_seed() << ", hang " << i << ": " << text_of(p));
    Outcome outcome = plant(p, cables);
    // Other work on the machine may keep a rank off its cores for longer than the timeout.
    constexpr int kMostTries = 5;
    for (int tries = 1; outcome == Outcome::kStarved && tries < kMostTries; ++tries, ++starved)
      outcome = plant(p, cables);
    EXPECT_NE(outcome, Outcome::kStarved)
        << "no hang in " << kMostTries << " tries: the operations before it timed out (MOECCL_TEST_PATIENCE)";
    ++of[static_cast<int>(p.kind)];
    named[static_cast<int>(p.kind)] += outcome == Outcome::kNamed ? 1 : 0;
  }
  std::string each;
  for (int k = 0; k < 4; ++k) {
    each +=
        std::string(k == 0 ? "" : ", ") + kKinds[k] + " " + std::to_string(named[k]) + " of " + std::to_string(of[k]);
  }
  if (starved > 0) printf("planted again, because the operations before the hang timed out: %d\n", starved);
  printf("%d planted hangs, %d named: %s\n", planted, named[0] + named[1] + named[2] + named[3], each.c_str());
}

}  // namespace
}  // namespace moeccl::testing
