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

void Fuzzer::add_experts() {
  add("ExpertAllReduce", [this] {
    const moecclPlacement_t p = placement();
    note(moecclExpertAllReduce(in(), out(), below(6) ? below(200) : huge(), type(), op(), maybe(&p), comm(), stream()));
  });
  add("CollectGradients", [this] {
    const moecclPlacement_t p = placement();
    const size_t n = below(6) ? below(200) : huge();
    if (below(2) == 0) {
      note(moecclCollectGradients(in(), out(), n, type(), maybe(&p), comm(), stream()));
    } else {
      note(moecclPlaceWeights(in(), out(), n, type(), maybe(&p), comm(), stream()));
    }
  });
  add("GradientSource", [this] {
    const moecclPlacement_t p = placement();
    int source = 0;
    note(moecclGradientSource(maybe(&p), rarely() ? number() % 8 : 2, number() % 8, number() % 4, maybe(&source)));
  });
  add("ExpertPopularity", [this] {
    static int64_t counts[64];  // a group may write them after this function has returned
    note(moecclExpertPopularity(choices(), below(choices_.size()), rarely() ? (number() & 63) - 4 : 8, maybe(counts),
                                comm(), nullptr));
  });
  add("ChooseReplicas", [this] {
    int32_t slots[64];
    int64_t counts[2][64];
    const moecclPlacement_t p = placement();
    const bool room = p.n_experts <= 64;
    moecclReplicaDispatch_t dispatch = MOECCL_REPLICA_DISPATCH_INIT;
    dispatch.placement = maybe(&p);
    dispatch.top_k = rarely() ? -1 : 1 + static_cast<int32_t>(below(4));
    dispatch.slot_capacity = rarely() ? number() : 2;
    note(moecclChooseReplicas(maybe(&dispatch), choices(), below(choices_.size() / 4), maybe(slots),
                              room ? maybe(counts[0]) : nullptr, room ? maybe(counts[1]) : nullptr, comm()));
  });
  add("SharedExpert", [this] {
    note(moecclSharedExpert(in(), below(3), rarely() ? huge() : 2, out(), count(), type(), comm(), stream()));
  });
  add("HybridCreate", [this] {
    moecclHybrid_t made = nullptr;
    moecclHybridConfig_t c = MOECCL_HYBRID_CONFIG_INIT;
    const int32_t domain[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    c.n_experts = rarely() ? std::min(number(), 8) : 4;
    c.n_levels = rarely() ? number() : 1;
    c.domain = maybe(domain);
    maybe_resize(c);
    trim(hybrids_, 10, moecclHybridDestroy);
    note(moecclHybridCreate(maybe(&made), comm(), maybe(&c)), made, hybrids_);
  });
  add("HybridMoeCreate", [this] {
    moecclMoe_t made = nullptr;
    moecclMoeConfig_t l = MOECCL_MOE_CONFIG_INIT;
    l.hidden_bytes = 64, l.top_k = 2, l.max_tokens = 16, l.type = moecclFloat32;
    note(moecclHybridMoeCreate(maybe(&made), pick(hybrids_), comm(), maybe(&l)), made, moes_);
  });
  add("HybridGather", [this] { note(moecclHybridGather(pick(hybrids_), in(), out(), count(), stream())); });
  add("HybridReduce", [this] { note(moecclHybridReduce(pick(hybrids_), in(), out(), count(), type(), stream())); });
  add("HybridGetInfo", [this] {
    moecclHybridInfo_t info{};
    info.size = sizeof(info);
    note(moecclHybridGetInfo(pick(hybrids_), maybe(&info)));
  });
  add("HybridExplain", [this] {
    char page[300];
    note(moecclHybridExplain(pick(hybrids_), count(), maybe(page), below(sizeof(page)), nullptr));
  });
  add("HybridDestroy", [this] { destroy(hybrids_, moecclHybridDestroy); });
  add("MigrationCreate", [this] {
    moecclMigration_t made = nullptr;
    moecclMigrationConfig_t c = MOECCL_MIGRATION_CONFIG_INIT;
    c.count = below(8) == 0 ? huge() : below(500);
    c.ratio = static_cast<double>(below(4));
    if (rarely()) c.type = type();
    if (rarely()) c.n_layers = number();
    if (rarely()) c.depth = number();
    maybe_resize(c);
    trim(migrations_, 6, moecclMigrationDestroy);
    note(moecclMigrationCreate(maybe(&made), pick(hybrids_), below(2) ? comm() : nullptr, maybe(&c)), made,
         migrations_);
  });
  add("a turn of a migration", [this] {
    const moecclMigration_t m = pick(migrations_);
    const int at = rarely() ? number() : 0;
    int done = 0;
    uint64_t epoch = 0;
    moecclMigrationInfo_t info{};
    info.size = sizeof(info);
    note(moecclMigrationGetInfo(m, at, maybe(&info)));
    if (below(2) == 0) note(moecclMigrationSend(m, at, in_.data(), held_.data(), nullptr));
    if (below(3) == 0) note(moecclMigrationSendFused(m, at, in_.data(), held_.data(), update, this, nullptr));
    if (below(2) == 0) note(moecclMigrationBegin(m, at));
    if (below(4) == 0) note(moecclMigrationBeginInto(m, at, held_.data(), out_.data()));
    note(moecclMigrationTest(m, at, maybe(&done)));
    note(moecclMigrationWaitExpert(m, at, number()));
    if (below(3) == 0) note(moecclMigrationWaitEncoded(m, at, held_.data(), maybe(&epoch)));
    if (below(2) == 0) note(moecclMigrationWait(m, at, held_.data(), out_.data(), maybe(&epoch)));
    moecclExpertUse_t use = expert_use();
    note(moecclMigrationUseExpert(m, at, number(), maybe(&use)));
  });
  add("MigrationDestroy", [this] { destroy(migrations_, moecclMigrationDestroy); });
  add("GradientReturnCreate", [this] {
    moecclGradientReturn_t made = nullptr;
    moecclGradientReturnConfig_t c = MOECCL_GRADIENT_RETURN_CONFIG_INIT;
    c.ratio = static_cast<double>(below(4));
    c.count = c.ratio == 1 && below(4) == 0 ? huge() : below(500);  // other ratios keep remainders
    if (rarely()) c.type = type();
    if (rarely()) c.n_layers = static_cast<int32_t>(below(5)) - 1;
    maybe_resize(c);
    trim(gradients_, 6, moecclGradientReturnDestroy);
    note(moecclGradientReturnCreate(maybe(&made), pick(hybrids_), below(2) ? comm() : nullptr, maybe(&c)), made,
         gradients_);
  });
  add("GradientReturnReduce", [this] {
    const moecclGradientReturn_t g = pick(gradients_);
    const int at = rarely() ? number() : 0;
    moecclGradientReturnInfo_t info{};
    info.size = sizeof(info);
    note(moecclGradientReturnGetInfo(g, at, maybe(&info)));
    note(moecclGradientReturnReduce(g, at, maybe(held_.data()), maybe(out_.data()), stream()));
    if (rarely()) note(moecclGradientReturnReset(g, at));
  });
  add("GradientReturnDestroy", [this] { destroy(gradients_, moecclGradientReturnDestroy); });
  add("ExpertSwapCreate", [this] {
    moecclExpertSwap_t made = nullptr;
    moecclExpertSwapConfig_t c = MOECCL_EXPERT_SWAP_CONFIG_INIT;
    c.interval = rarely() ? number() : static_cast<int32_t>(below(3));
    if (rarely()) c.max_tokens = number();
    if (rarely()) c.gamma = number();
    c.min_gain = -1;
    maybe_resize(c);
    trim(swaps_, 3, moecclExpertSwapDestroy);
    note(moecclExpertSwapCreate(maybe(&made), comm(), maybe(&c)), made, swaps_);
  });
  add("a turn of expert swap", [this] {
    const moecclExpertSwap_t s = pick(swaps_);
    int32_t n = 0;
    moecclSwapTensor_t tensor{in_.data(), below(3), static_cast<int32_t>(below(2)), 0};
    moecclExpertSwapInfo_t info{};
    info.size = sizeof(info);
    if (below(2) == 0)
      note(moecclExpertSwapAttach(s, pick(moes_), maybe(&tensor), rarely() ? -1 : static_cast<int32_t>(below(2)),
                                  nullptr, &n));
    note(moecclExpertSwapBegin(s));
    note(moecclExpertSwapTest(s, maybe(&n)));
    if (below(4) != 0) note(moecclExpertSwapFinish(s, &n));
    note(moecclExpertSwapGetInfo(s, rarely() ? number() : 0, maybe(&info)));
  });
  add("ExpertSwapDestroy", [this] { destroy(swaps_, moecclExpertSwapDestroy); });
  add("Codec", [this] {
    moecclCodec_t c = MOECCL_CODEC_INIT;
    c.count = count();
    if (rarely()) c.type = type();
    c.ratio = static_cast<double>(below(5));
    maybe_resize(c);
    size_t bytes = 0;
    note(moecclCodecBytes(maybe(&c), maybe(&bytes)));
    std::vector<char> encoded(1 << 14);
    note(moecclCodecEncode(&c, in(), held_.data(), encoded.data(), below(encoded.size()), nullptr));
    note(moecclCodecDecode(&c, encoded.data(), below(encoded.size()), held_.data(), out_.data()));
    note(moecclCodecEncodeFused(&c, in(), below(2), held_.data(), update, this, encoded.data(), below(encoded.size()),
                                nullptr));
    moecclExpertUse_t use = expert_use();
    note(moecclCodecDecodeFused(&c, encoded.data(), below(encoded.size()), held_.data(), maybe(&use)));
  });
  add("SampleSolver", [this] {
    moecclSampleSolver_t made = nullptr;
    if (solvers_.size() < 6) note(moecclSampleSolverCreate(maybe(&made)), made, solvers_);
    moecclSampleProblem_t p = MOECCL_SAMPLE_PROBLEM_INIT;
    std::vector<int32_t> gather(64, 1);
    p.n_samples = rarely() ? number() : 8;
    p.n_experts = rarely() ? number() : 4;
    p.n_devices = 2, p.n_nodes = 1;
    p.num_gather = p.n_samples <= 8 && p.n_experts <= 8 ? maybe(gather.data()) : nullptr;
    std::array<int32_t, 64> placed{};
    const moecclSampleSolver_t s = pick(solvers_);
    note(moecclSampleSolverSubmit(s, maybe(&p)));
    note(moecclSampleSolverFetch(s, static_cast<double>(below(50)), maybe(placed.data()), nullptr, nullptr));
    if (rarely()) destroy(solvers_, moecclSampleSolverDestroy);
    trim(solvers_, 4, moecclSampleSolverDestroy);
  });
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
