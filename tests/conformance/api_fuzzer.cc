// SPDX-License-Identifier: Apache-2.0
// The calls that api_fuzz_test.cc makes.
#include "tests/conformance/api_fuzzer.h"

#include <sys/wait.h>

namespace moeccl::testing {

void Fuzzer::add_calls() {
  add_communicators();
  add_operations();
  add_layers();
  add_experts();
  add_questions();
  add_elastic();
  add_solvers();
}

void Fuzzer::add_communicators() {
  add(
      "CommInitAll",
      [this] {
        if (below(3) != 0) return;  // the most expensive of all calls
        const moecclConfig_t c = config();
        trim(comms_, 30, moecclCommDestroy);
        if (comms_.size() + joining_.size() < 60)
          note(moecclCommInitAll(maybe(&joining_.emplace_back(nullptr)), 1, maybe(&c)));
        take_joined();
      },
      2);
  add("CommInitRank", [this] {
    moecclUniqueId id;
    std::memset(&id, number(), sizeof(id));
    const bool alone = below(4) == 0;
    note(moecclCommInitRank(&joining_.emplace_back(nullptr), alone ? 1 : number(), id, alone ? 0 : number()));
    take_joined();
  });
  add("CommInitAll of many", [this] { note(moecclCommInitAll(nullptr, number(), nullptr)); });
  add("CommSplit", [this] {
    moecclComm_t made = nullptr;
    if (comms_.size() < 60 && below(4) == 0)
      note(moecclCommSplit(comm(), static_cast<int>(below(3)) - 1, number(), maybe(&made), nullptr), made, comms_);
  });
  add("CommDestroy", [this] { destroy(comms_, moecclCommDestroy); });
  add("CommAbort", [this] {
    if (rarely()) note(moecclCommAbort(comm()));
  });
  add("CommFinalize", [this] { note(moecclCommFinalize(comm())); });
  add("CommGetAsyncError", [this] {
    moecclResult_t state{};
    note(moecclCommGetAsyncError(comm(), maybe(&state)));
  });
  add("CommCount", [this] {
    int n = 0;
    note(moecclCommCount(comm(), maybe(&n)));
    note(moecclCommUserRank(comm(), maybe(&n)));
  });
  add("CommMemoryUsage", [this] {
    size_t n = 0;
    note(moecclCommMemoryUsage(comm(), maybe(&n)));
  });
  add("CommSetPriority", [this] { note(moecclCommSetPriority(comm(), number())); });
  add("CommTraffic", [this] {
    moecclTraffic_t to[4];
    note(moecclCommTraffic(comm(), maybe(to), rarely() ? number() : 1));
  });
  add("CommRegister", [this] {
    const moecclComm_t c = comm();
    void* made = nullptr;
    note(moecclCommRegister(c, maybe(in_.data()), rarely() ? huge() : 100, maybe(&made)));
    if (made != nullptr && registrations_.size() < 200) registrations_.emplace_back(c, made);
  });
  add("CommDeregister", [this] {
    if (rarely() || registrations_.empty()) return note(moecclCommDeregister(comm(), as<void*>(random_())));
    const size_t i = below(registrations_.size());
    const auto [c, made] = registrations_[i];
    note(moecclCommDeregister(rarely() ? comm() : c, made));
    if (!rarely()) registrations_.erase(registrations_.begin() + static_cast<ptrdiff_t>(i));
  });
  add("StreamCreate", [this] {
    moecclStream_t made = nullptr;
    trim(streams_, 8, moecclStreamDestroy);
    if (streams_.size() < 12) note(moecclStreamCreate(maybe(&made)), made, streams_);
  });
  add("StreamSynchronize", [this] { note(moecclStreamSynchronize(stream())); });
  add("StreamDestroy", [this] { destroy(streams_, moecclStreamDestroy); });
  add("GroupStart", [this] {
    note(moecclGroupStart());
    ++depth_;
  });
  add(
      "GroupEnd", [this] { end_group(); }, 4);
  add("GroupCancel", [this] {
    const moecclResult_t r = moecclGroupCancel();
    note(r);
    EXPECT_EQ(r, depth_ > 0 ? moecclSuccess : moecclInvalidUsage);
    depth_ = 0;
    take_joined();
  });
  add("MemAlloc", [this] {
    void* made = nullptr;
    const size_t bytes = rarely() ? size_t{1} << (45 + below(19)) : below(1 << 18);
    if (memory_.size() < 40) note(moecclMemAlloc(maybe(&made), bytes));
    if (made != nullptr) memory_.push_back(made);
  });
  add("MemFree", [this] {
    if (memory_.empty() || rarely()) return note(moecclMemFree(as<void*>(random_())));
    const size_t i = below(memory_.size());
    note(moecclMemFree(memory_[i]));
    if (!rarely()) memory_.erase(memory_.begin() + static_cast<ptrdiff_t>(i));
  });
  add("RedOpCreatePreMulSum", [this] {
    moecclRedOp_t made{};
    const double two = 2;
    const moecclResult_t r = moecclRedOpCreatePreMulSum(maybe(&made), maybe(&two), type(), comm());
    note(r);
    if (r == moecclSuccess && ops_.size() < 100) ops_.push_back(made);
  });
  add("RedOpDestroy", [this] { note(moecclRedOpDestroy(op(), comm())); });
  add("fork", [this] {
    if (below(400) == 0) fork_child();
  });
  add("a pair of ranks", [this] {
    if (below(40) == 0) drive_pair();
  });
}

void Fuzzer::add_operations() {
  add(
      "AllReduce", [this] { note(moecclAllReduce(in(), out(), count(), type(), op(), comm(), stream())); }, 3);
  add("Reduce", [this] { note(moecclReduce(in(), out(), count(), type(), op(), root(), comm(), stream())); });
  add("Broadcast", [this] { note(moecclBroadcast(in(), out(), count(), type(), root(), comm(), stream())); });
  add("AllGather", [this] { note(moecclAllGather(in(), out(), count(), type(), comm(), stream())); });
  add("ReduceScatter", [this] { note(moecclReduceScatter(in(), out(), count(), type(), op(), comm(), stream())); });
  add("AllToAll", [this] { note(moecclAllToAll(in(), out(), count(), type(), comm(), stream())); });
  add("TensorAllToAll", [this] { note(moecclTensorAllToAll(in(), out(), count(), type(), comm(), stream())); });
  add("AllToAllv", [this] {
    // Sizes are those of the largest communicator here; most have one rank.
    const size_t sends[2] = {count()}, send_at[2] = {below(3) == 0 ? count() : 0};
    const size_t receives[2] = {below(3) == 0 ? count() : sends[0]}, receive_at[2] = {below(3) == 0 ? count() : 0};
    note(moecclAllToAllv(in(), maybe(sends), maybe(send_at), out(), maybe(receives), maybe(receive_at), type(), comm(),
                         stream()));
  });
  add("Gather", [this] { note(moecclGather(in(), out(), count(), type(), root(), comm(), stream())); });
  add("Scatter", [this] { note(moecclScatter(in(), out(), count(), type(), root(), comm(), stream())); });
  add("Send and Recv", [this] {
    const moecclComm_t c = comm();
    const auto t = type();
    const size_t n = count();
    const moecclStream_t s = stream();
    note(moecclGroupStart());
    ++depth_;
    note(moecclSend(in(), n, t, root(), c, s));
    note(moecclRecv(out(), rarely() ? count() : n, t, root(), c, s));
    end_group();
  });
  add("a lone Send", [this] { note(moecclSend(in(), count(), type(), root(), comm(), stream())); });
}

void Fuzzer::add_layers() {
  add("MoeCheck", [this] {
    char message[100];
    const moecclMoeConfig_t l = layer();
    const int n_ranks = below(3) != 0 ? 1 : static_cast<int>(below(300)) - 10;
    note(moecclMoeCheck(maybe(&l), n_ranks, nullptr, maybe(message), below(2) * 100));
  });
  add("MoeQuerySize", [this] {
    const moecclMoeConfig_t l = layer();
    size_t bytes = 0;
    note(moecclMoeQuerySize(maybe(&l), 1 + static_cast<int>(below(8)), text(), maybe(&bytes)));
  });
  add(
      "MoeCreate",
      [this] {
        moecclMoe_t made = nullptr;
        moecclMoeConfig_t l = layer();
        if (l.max_tokens > 100'000) l.max_tokens = 16;  // only in the check: real tables this large take seconds
        if (l.n_experts > 1000) l.n_experts = 8;
        if (l.hidden_bytes > 100'000) l.hidden_bytes = 64;
        trim(moes_, 20, moecclMoeDestroy);
        note(moecclMoeCreate(maybe(&made), comm(), maybe(&l)), made, moes_);
      },
      2);
  add("MoeDestroy", [this] { destroy(moes_, moecclMoeDestroy); });
  add(
      "RoutingCreate",
      [this] {
        moecclRouting_t made = nullptr;
        trim(routings_, 20, moecclRoutingDestroy);
        const moecclMoe_t moe = pick(moes_);
        note(moecclRoutingCreate(maybe(&made), moe, choices(), nullptr, rarely() ? huge() : below(17)), made,
             routings_);
        if (made != nullptr) routing_of_[moe] = made;
      },
      2);
  add("RoutingUpdate",
      [this] { note(moecclRoutingUpdate(pick(routings_), choices(), nullptr, rarely() ? huge() : below(17))); });
  add("RoutingUpdateOnStream",
      [this] { note(moecclRoutingUpdateOnStream(pick(routings_), choices(), nullptr, below(17), nullptr, stream())); });
  add("RoutingGetInfo", [this] {
    moecclRoutingInfo_t info{};
    info.size = sizeof(info);
    maybe_resize(info);
    if (info.size > sizeof(info) && info.size <= 4096) info.size = sizeof(info);
    note(moecclRoutingGetInfo(pick(routings_), maybe(&info)));
  });
  add("RoutingDestroy", [this] { destroy(routings_, moecclRoutingDestroy); });
  add(
      "Dispatch", [this] { note(moecclDispatch(pick(routings_), in(), out(), stream())); }, 2);
  add("DispatchScaled",
      [this] { note(moecclDispatchScaled(pick(routings_), in(), in(), out(), held_.data(), stream())); });
  add(
      "Combine", [this] { note(moecclCombine(pick(routings_), in(), out(), stream())); }, 2);
  add("DispatchBackward", [this] { note(moecclDispatchBackward(pick(routings_), in(), out(), stream())); });
  add("CombineBackward", [this] {
    note(moecclCombineBackward(pick(routings_), in(), out(), in(), below(2) ? held_.data() : nullptr, stream()));
  });
  add("MoeExplain", [this] {
    char page[300];
    size_t needed = 0;
    note(moecclMoeExplain(pick(routings_), maybe(page), below(sizeof(page)), maybe(&needed)));
  });
  add("ReplaceCreate", [this] {
    moecclReplacement_t made = nullptr;
    moecclReplaceConfig_t c = MOECCL_REPLACE_CONFIG_INIT;
    if (rarely()) c.sample_tokens = count();
    if (rarely()) c.mode = static_cast<moecclReplaceMode_t>(number());
    if (rarely()) c.residual = number();
    maybe_resize(c);
    trim(replacements_, 10, moecclReplaceDestroy);
    const moecclMoe_t moe = pick(moes_);
    note(moecclReplaceCreate(maybe(&made), moe, maybe(&c)), made, replacements_);
    if (made != nullptr) layer_of_[made] = moe;
  });
  add("a step of a replacement", [this] {
    const moecclReplacement_t r = pick(replacements_);
    size_t n = 0;
    moecclReplaceInfo_t info{};
    info.size = sizeof(info);
    note(moecclReplaceBegin(r, rarely() ? pick(routings_) : routing_of_[layer_of_[r]], nullptr, nullptr));
    note(moecclReplaceRows(r, maybe(&n)));
    if (below(4) == 0) note(moecclReplaceResidual(r, in(), in(), out()));
    if (below(2) == 0) note(moecclReplaceCombine(r, in(), out(), stream()));
    if (below(4) == 0) note(moecclReplaceResidualBackward(r, in(), maybe(out_.data()), maybe(held_.data())));
    if (below(2) == 0) note(moecclReplaceCombineBackward(r, in(), out(), in(), nullptr, stream()));
    note(moecclReplaceGetInfo(r, maybe(&info)));
  });
  add("ReplaceDestroy", [this] { destroy(replacements_, moecclReplaceDestroy); });
}

void Fuzzer::add_questions() {
  const auto any_count = [this] { return below(4) == 0 ? size_t{1} << below(60) : count(); };
  add("PlanQuery", [this, any_count] {
    moecclPlanInfo_t info{};
    info.size = sizeof(info);
    note(moecclPlanQuery(comm(), kind(), any_count(), type(), maybe(&info)));
  });
  add("PlanExplain", [this, any_count] {
    char page[300];
    size_t needed = 0;
    note(moecclPlanExplain(comm(), kind(), any_count(), type(), maybe(page), below(sizeof(page)), maybe(&needed)));
  });
  add("PlanTimeline", [this, any_count] {
    moecclLaneSpan_t spans[4];
    size_t n = 0;
    note(moecclPlanTimeline(comm(), kind(), any_count(), type(), maybe(spans), below(5), maybe(&n)));
  });
  add("PlanForce", [this] { note(moecclPlanForce(comm(), kind(), text())); });
  add("ExpertExplain", [this, any_count] {
    const moecclPlacement_t p = placement();
    char page[300];
    note(moecclExpertExplain(comm(), kind(), any_count(), type(), maybe(&p), page, below(sizeof(page)), nullptr));
  });
  add("SwapLevels", [this] {
    moecclSwapLevels_t levels{};
    levels.size = sizeof(levels);
    int32_t groups[64];
    note(moecclSwapLevels(comm(), maybe(&levels), maybe(&groups[0]), below(std::size(groups))));
  });
  add("TensorGroups", [this] {
    moecclTensorGroups_t groups{};
    groups.size = sizeof(groups);
    note(moecclTensorGroups(comm(), maybe(&groups)));
  });
  add("Simulate", [this, any_count] {
    if (below(8) != 0) return;  // some milliseconds each
    moecclSimulateConfig_t c = MOECCL_SIMULATE_CONFIG_INIT;
    const int32_t domain[4] = {1, 1, 1, 1};
    c.topology = rarely() ? text() : "node:2 gpu:2";
    c.op = kind(), c.type = type();
    c.count = any_count();
    c.tokens_per_rank = below(20), c.hidden_bytes = rarely() ? huge() : 64;
    c.n_experts = rarely() ? number() % 1000 : 8, c.top_k = rarely() ? number() % 100 : 2;
    if (below(2) == 0) c.domain = domain, c.n_levels = rarely() ? number() : 2;
    if (rarely()) c.algorithm = text();
    if (rarely()) c.layout = static_cast<moecclMoeLayout_t>(number());
    maybe_resize(c);
    note(moecclSimulate(maybe(&c), nullptr, 0, nullptr));
  });
  add("names and sizes", [this] {
    EXPECT_NE(moecclGetErrorString(static_cast<moecclResult_t>(number())), nullptr);
    (void)moecclTypeSize(static_cast<moecclDataType_t>(number()));
    (void)moecclExpertShard(count(), number());
  });
}

// A child continues with all handles of its parent, then with some of its own.
// gcc 12's address sanitizer does not hold its allocator's lock during fork(). In a child whose parent's threads were
// in the allocator at that moment, the first free() waits for ever. Such a child is ended and not counted; without the
// sanitizer it is a failure.
#ifdef __SANITIZE_ADDRESS__
constexpr bool kMayLockUp = true;
#else
constexpr bool kMayLockUp = false;
#endif

void Fuzzer::fork_child() {
  if (is_child_) return;
  const pid_t child = fork();
  if (child == 0) {
    alarm(kMayLockUp ? 10 : static_cast<unsigned>(patient_ms(30'000) / 1000));
    is_child_ = true;
    trace_ = nullptr;
    if (depth_ > 0) {
      EXPECT_EQ(moecclGroupCancel(), moecclSuccess);
      depth_ = 0;
    }
    for (int i = 0; i < 300; ++i) calls_[below(calls_.size())].second();
    close_groups();
    destroy_all();
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (kMayLockUp && WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) return;
  EXPECT_FALSE(WIFSIGNALED(status)) << "a forked child died of signal " << WTERMSIG(status);
  EXPECT_TRUE(!WIFEXITED(status) || WEXITSTATUS(status) == 0) << "a forked child found something";
}

// Drives both ranks of a communicator from this thread, mostly with the same call.
void Fuzzer::drive_pair() {
  close_groups();
  if (pairs_.empty() || rarely()) {
    for (const moecclComm_t old : pairs_) (void)moecclCommDestroy(old);
    pairs_.assign(2, nullptr);
    moecclConfig_t c = config();
    c.size = sizeof(c);  // with its timeout
    note(moecclCommInitAll(pairs_.data(), 2, &c));
    watched_[below(kWatched)] = pairs_[0];
  }
  const size_t n = below(1000);
  const auto t = static_cast<moecclDataType_t>(below(12));
  note(moecclGroupStart());
  ++depth_;
  const size_t other = rarely() ? below(1000) : n;
  note(moecclAllReduce(in_.data(), out_.data(), n, t, moecclSum, pairs_[0], nullptr));
  note(moecclAllReduce(in_.data(), held_.data(), other, t, moecclSum, pairs_[1], stream()));
  if (below(4) == 0) note(moecclCommDestroy(pairs_[below(2)]));
  if (below(8) == 0) {
    note(moecclGroupCancel());
    depth_ = 0;
  } else {
    end_group();
  }
  for (const moecclStream_t s : streams_) note(moecclStreamSynchronize(s));
}

}  // namespace moeccl::testing
