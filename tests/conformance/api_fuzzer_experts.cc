// SPDX-License-Identifier: Apache-2.0
// The calls of api_fuzz_test.cc about experts: replicas, domains, migration, compressed gradients and swap.
#include "tests/conformance/api_fuzzer.h"

namespace moeccl::testing {

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

}  // namespace moeccl::testing
