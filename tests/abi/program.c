/* SPDX-License-Identifier: Apache-2.0 */
/* Makes every call that takes a struct with a size, on two thread ranks. It is compiled against the headers of one
 * version and run with the library of another. ABI_GROWN: the headers have one more field in each of these structs; the
 * argument "unknown" says that the library does not know that field. */
#include <moeccl/moeccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_RANKS 2
#define N_EXPERTS 4
#define TOKENS 8
#define ROW 64

#define CHECK(what)                                      \
  do {                                                   \
    if (!(what)) {                                       \
      fprintf(stderr, "line %d: %s\n", __LINE__, #what); \
      exit(1);                                           \
    }                                                    \
  } while (0)
#define OK(call)                                                                                               \
  do {                                                                                                         \
    const moecclResult_t result_ = (call);                                                                     \
    if (result_ != moecclSuccess) {                                                                            \
      fprintf(stderr, "line %d: %s: %s\n", __LINE__, moecclGetErrorString(result_), moecclGetLastError(NULL)); \
      exit(1);                                                                                                 \
    }                                                                                                          \
  } while (0)

/* An answer struct, followed by memory that the library must not touch. */
#define ANSWER(type, name)           \
  struct {                           \
    type x;                          \
    unsigned char behind[64];        \
  } name;                            \
  memset(&name, 0xAB, sizeof(name)); \
  name.x.size = sizeof(type)
#define UNTOUCHED(name)                                                                 \
  do {                                                                                  \
    CHECK(name.x.size == sizeof(name.x));                                               \
    for (size_t i_ = 0; i_ < sizeof(name.behind); ++i_) CHECK(name.behind[i_] == 0xAB); \
  } while (0)

static moecclUniqueId id;
static int unknown;

/* A field that the library does not know is an error unless it is zero. */
#ifdef ABI_GROWN
#define GROWN(input, call)                                                      \
  do {                                                                          \
    (input).grown = 1;                                                          \
    const moecclResult_t result_ = (call);                                      \
    CHECK(result_ == (unknown ? moecclInvalidArgument : moecclSuccess));        \
    if (unknown) CHECK(strstr(moecclGetLastError(NULL), "beyond the") != NULL); \
    (input).grown = 0;                                                          \
  } while (0)
#define ZERO(answer) CHECK(!unknown || (answer).grown == 0)
#else
#define GROWN(input, call) (void)(input)
#define ZERO(answer) (void)(answer)
#endif

static void solvers(void) {
  const int32_t num[2 * 2] = {4, 0, 0, 4};
  moecclSampleProblem_t sample = MOECCL_SAMPLE_PROBLEM_INIT;
  sample.n_samples = sample.n_experts = sample.n_devices = sample.n_nodes = 2;
  sample.num_gather = num;
  int32_t placement[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  ANSWER(moecclSampleAnswer_t, sample_answer);
  OK(moecclSolveSamples(&sample, placement, &sample_answer.x, NULL, 0));
  UNTOUCHED(sample_answer);
  ZERO(sample_answer.x);
  CHECK(sample_answer.x.keep == 1 && placement[0] == 0 && placement[1] == 1);
  GROWN(sample, moecclSolveSamples(&sample, placement, NULL, NULL, 0));
  OK(moecclEvaluateSamples(&sample, placement, &sample_answer.x));
  UNTOUCHED(sample_answer);
  moecclSampleSolver_t solver;
  moecclAnswerSource_t source;
  OK(moecclSampleSolverCreate(&solver));
  OK(moecclSampleSolverSubmit(solver, &sample));
  OK(moecclSampleSolverFetch(solver, -1, placement, &sample_answer.x, &source));
  UNTOUCHED(sample_answer);
  CHECK(source == moecclAnswerFresh);
  OK(moecclSampleSolverDestroy(solver));

  const int32_t groups[1] = {2}, topk[4] = {0, 1, 2, 3};
  moecclSwapProblem_t swap = MOECCL_SWAP_PROBLEM_INIT;
  swap.n_experts = N_EXPERTS;
  swap.top_k = 2;
  swap.n_levels = 1;
  swap.n_groups = groups;
  size_t n = 0;
  OK(moecclSwapCountsLength(&swap, &n));
  int32_t* counts = calloc(n, sizeof(int32_t));
  CHECK(counts != NULL);
  OK(moecclSwapCount(&swap, topk, 2, counts, NULL, 0));
  int32_t pair[2];
  ANSWER(moecclSwapAnswer_t, swap_answer);
  OK(moecclSolveSwap(&swap, counts, pair, &swap_answer.x, NULL, 0));
  UNTOUCHED(swap_answer);
  ZERO(swap_answer.x);
  GROWN(swap, moecclSwapCountsLength(&swap, &n));
  free(counts);

  const int32_t demand[2 * 2] = {4, 1, 1, 4};
  moecclReplicaProblem_t replica = MOECCL_REPLICA_PROBLEM_INIT;
  replica.n_experts = replica.n_ranks = 2;
  replica.slots_per_rank = 1;
  replica.demand = demand;
  replica.n_nodes = 1;
  ANSWER(moecclReplicaAnswer_t, replica_answer);
  OK(moecclSolveReplicas(&replica, placement, &replica_answer.x));
  UNTOUCHED(replica_answer);
  ZERO(replica_answer.x);
  GROWN(replica, moecclSolveReplicas(&replica, placement, NULL));
  moecclReplicaCost_t cost = MOECCL_REPLICA_COST_INIT;
  cost.n_ranks = cost.n_experts = 2;
  cost.slots_per_rank = 1;
  cost.grad_bytes = cost.weight_bytes = 1e6;
  cost.pci_bandwidth = cost.net_bandwidth = 1e10;
  double fixed = 0, adaptive = 0;
  OK(moecclReplicaCommTime(&cost, &fixed, &adaptive));
  CHECK(fixed > 0 && adaptive > 0);
  GROWN(cost, moecclReplicaCommTime(&cost, &fixed, &adaptive));

  const int32_t sizes[1] = {4};
  const double bandwidth[1] = {1e9};
  moecclDomainProblem_t domain = MOECCL_DOMAIN_PROBLEM_INIT;
  domain.n_levels = 1;
  domain.scale = sizes;
  domain.bandwidth = bandwidth;
  domain.data_bytes = domain.expert_bytes = 1e6;
  ANSWER(moecclDomainAnswer_t, domain_answer);
  OK(moecclSolveDomains(&domain, placement, &domain_answer.x));
  UNTOUCHED(domain_answer);
  ZERO(domain_answer.x);
  GROWN(domain, moecclSolveDomains(&domain, placement, NULL));

  moecclChunkProblem_t chunk = MOECCL_CHUNK_PROBLEM_INIT;
  chunk.bytes = 1e8;
  chunk.tensor = chunk.expert = 4;
  chunk.inter_bandwidth = chunk.intra_bandwidth = chunk.copy_bandwidth = 1e10;
  ANSWER(moecclChunkAnswer_t, chunk_answer);
  OK(moecclSolveChunks(&chunk, &chunk_answer.x));
  UNTOUCHED(chunk_answer);
  ZERO(chunk_answer.x);
  CHECK(chunk_answer.x.after_us > 0);
  GROWN(chunk, moecclSolveChunks(&chunk, &chunk_answer.x));

  moecclLayoutProblem_t layout = MOECCL_LAYOUT_PROBLEM_INIT;
  layout.n_gpus = 8;
  layout.gpus_per_node = 8;
  layout.gpu_bytes = 80e9;
  layout.intra_bandwidth = layout.inter_bandwidth = 1e11;
  layout.n_layers = layout.n_heads = layout.n_experts = 8;
  layout.top_k = 2;
  layout.hidden = layout.sequence = 1024;
  layout.global_batch = 8;
  layout.dense_parameters = layout.moe_parameters = 1e9;
  int32_t n_layouts = 0;
  OK(moecclSolveLayout(&layout, NULL, 0, &n_layouts));
  CHECK(n_layouts > 0);
  GROWN(layout, moecclSolveLayout(&layout, NULL, 0, &n_layouts));

  moecclSimulateConfig_t simulate = MOECCL_SIMULATE_CONFIG_INIT;
  simulate.topology = "node:2 gpu:2";
  simulate.tokens_per_rank = 16;
  simulate.n_experts = 8;
  simulate.top_k = 2;
  size_t needed = 0;
  OK(moecclSimulate(&simulate, NULL, 0, &needed));
  CHECK(needed > 1);
  GROWN(simulate, moecclSimulate(&simulate, NULL, 0, &needed));
}

static void codec(void) {
  enum { kCount = 1000 };
  static float expert[kCount], shared[kCount], out[kCount];
  for (int i = 0; i < kCount; ++i) expert[i] = (float)i;
  moecclCodec_t c = MOECCL_CODEC_INIT;
  c.count = kCount;
  c.type = moecclFloat32;
  c.ratio = 1;
  size_t bytes = 0;
  OK(moecclCodecBytes(&c, &bytes));
  void* encoded = malloc(bytes);
  CHECK(encoded != NULL);
  OK(moecclCodecEncode(&c, expert, shared, encoded, bytes, NULL));
  OK(moecclCodecDecode(&c, encoded, bytes, shared, out));
  CHECK(memcmp(expert, out, sizeof(out)) == 0);
  GROWN(c, moecclCodecBytes(&c, &bytes));
  free(encoded);
}

static void plans(moecclComm_t comm) {
  ANSWER(moecclPlanInfo_t, plan);
  OK(moecclPlanQuery(comm, moecclOpAllReduce, 1024, moecclFloat32, &plan.x));
  UNTOUCHED(plan);
  ZERO(plan.x);
  CHECK(plan.x.algorithm[0] != 0 && plan.x.n_chunks > 0);
  ANSWER(moecclTensorGroups_t, groups);
  OK(moecclTensorGroups(comm, &groups.x));
  UNTOUCHED(groups);
  ZERO(groups.x);
  CHECK(groups.x.n_groups == 1 && groups.x.n_ranks == N_RANKS);
}

static void replace_samples(moecclMoe_t moe, moecclRouting_t routing, const float* rows, float* out) {
  moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
  replace.sample_tokens = 2;
  moecclReplacement_t replacement;
  OK(moecclReplaceCreate(&replacement, moe, &replace));
  OK(moecclReplaceBegin(replacement, routing, NULL, NULL));
  OK(moecclReplaceCombine(replacement, rows, out, NULL));
  ANSWER(moecclReplaceInfo_t, replaced);
  OK(moecclReplaceGetInfo(replacement, &replaced.x));
  UNTOUCHED(replaced);
  ZERO(replaced.x);
  CHECK(replaced.x.n_samples == N_RANKS * TOKENS / 2);
  OK(moecclReplaceDestroy(replacement));
}

/* moecclDispatch to every expert's rank and back: without weights each token comes back k times. */
static void layer(moecclMoe_t moe, int moves) {
  int32_t topk[TOKENS * 2];
  for (int t = 0; t < TOKENS; ++t) {
    topk[2 * t] = t % 2;
    topk[2 * t + 1] = 2 + t % 2;
  }
  moecclRouting_t routing;
  OK(moecclRoutingCreate(&routing, moe, topk, NULL, TOKENS));
  ANSWER(moecclRoutingInfo_t, info);
  OK(moecclRoutingGetInfo(routing, &info.x));
  UNTOUCHED(info);
  ZERO(info.x);
  CHECK(info.x.n_tokens == TOKENS && info.x.n_rows > 0);
  CHECK(strcmp(info.x.algorithm, "flat") == 0); /* MOECCL_PLAN, which main() sets */
  ANSWER(moecclRoutingDeviceInfo_t, device);
  const moecclResult_t got = moecclRoutingGetDeviceInfo(routing, &device.x);
  CHECK(got == moecclSuccess || got == moecclUnsupported);
  UNTOUCHED(device);
  float in[TOKENS * ROW], out[TOKENS * ROW], *rows = malloc((info.x.n_rows + 1) * ROW * sizeof(float));
  CHECK(rows != NULL);
  for (int i = 0; i < TOKENS * ROW; ++i) in[i] = (float)i;
  OK(moecclDispatch(routing, in, rows, NULL));
  OK(moecclCombine(routing, rows, out, NULL));
  for (int i = 0; i < TOKENS * ROW; ++i) CHECK(out[i] == 2 * in[i]);

  if (moves) replace_samples(moe, routing, rows, out);
  free(rows);
  OK(moecclRoutingDestroy(routing));
}

static moecclMoeConfig_t moe_config(void) {
  moecclMoeConfig_t c = MOECCL_MOE_CONFIG_INIT;
  c.hidden_bytes = ROW * sizeof(float);
  c.type = moecclFloat32;
  c.top_k = 2;
  c.n_experts = N_EXPERTS;
  c.max_tokens = TOKENS;
  c.layout = moecclLayoutExpertMajor;
  return c;
}

static void layers(moecclComm_t comm) {
  moecclMoeConfig_t config = moe_config();
  moecclMoe_t moe;
  OK(moecclMoeCreate(&moe, comm, &config));
  layer(moe, 1);
  OK(moecclMoeDestroy(moe));
}

static void hybrid(moecclComm_t comm) {
  const int32_t domain[1] = {N_RANKS};
  moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
  config.n_experts = N_EXPERTS;
  config.n_levels = 1;
  config.domain = domain;
  moecclHybrid_t h;
  OK(moecclHybridCreate(&h, comm, &config));
  ANSWER(moecclHybridInfo_t, info);
  OK(moecclHybridGetInfo(h, &info.x));
  UNTOUCHED(info);
  ZERO(info.x);
  CHECK(info.x.n_own == N_EXPERTS / N_RANKS && info.x.n_held == N_EXPERTS);
  moecclMoeConfig_t moe = moe_config();
  moecclMoe_t made;
  OK(moecclHybridMoeCreate(&made, h, comm, &moe));
  layer(made, 0);
  OK(moecclMoeDestroy(made));

  moecclMigrationConfig_t migrate = MOECCL_MIGRATION_CONFIG_INIT;
  migrate.count = ROW;
  migrate.ratio = 1;
  moecclMigration_t migration;
  OK(moecclMigrationCreate(&migration, h, NULL, &migrate));
  float experts[N_EXPERTS / N_RANKS * ROW], held[N_EXPERTS * ROW];
  for (int i = 0; i < N_EXPERTS / N_RANKS * ROW; ++i) experts[i] = (float)(i + 1);
  OK(moecclMigrationSend(migration, 0, experts, NULL, NULL));
  OK(moecclMigrationBegin(migration, 0));
  OK(moecclMigrationWait(migration, 0, NULL, held, NULL));
  CHECK(held[0] == 1);
  ANSWER(moecclMigrationInfo_t, state);
  OK(moecclMigrationGetInfo(migration, 0, &state.x));
  UNTOUCHED(state);
  ZERO(state.x);
  CHECK(state.x.epoch == 1);
  OK(moecclMigrationDestroy(migration));
  OK(moecclHybridDestroy(h));
}

static void replicas(moecclComm_t comm) {
  const int32_t slots[N_RANKS * 2] = {0, 1, 1, 0};
  moecclPlacement_t p = MOECCL_PLACEMENT_INIT;
  p.n_experts = 2;
  p.slots_per_rank = 2;
  p.slot_expert = slots;
  float send[2 * ROW], recv[2 * ROW];
  for (int i = 0; i < 2 * ROW; ++i) send[i] = 1;
  for (int again = 0; again < 2; ++again) {
    OK(moecclExpertAllReduce(send, recv, ROW, moecclFloat32, moecclSum, &p, comm, NULL));
    for (int i = 0; i < 2 * ROW; ++i) CHECK(recv[i] == N_RANKS);
  }
  int source = -1;
  OK(moecclGradientSource(&p, N_RANKS, 0, 1, &source));
  CHECK(source == 1);
  GROWN(p, moecclGradientSource(&p, N_RANKS, 0, 1, &source));
}

static void* run(void* argument) {
  moecclConfig_t config = MOECCL_CONFIG_INIT;
  config.timeout_ms = 60000;
  config.name = "abi";
  moecclComm_t comm;
  OK(moecclCommInitRankConfig(&comm, N_RANKS, id, *(const int*)argument, &config));
  plans(comm);
  layers(comm);
  hybrid(comm);
  replicas(comm);
  moecclComm_t half;
  OK(moecclCommSplit(comm, 0, *(const int*)argument, &half, &config));
  OK(moecclCommDestroy(half));
  OK(moecclCommDestroy(comm));
  return NULL;
}

int main(int argc, char** argv) {
  unknown = argc > 1 && strcmp(argv[1], "unknown") == 0;
  setenv("MOECCL_PLAN", "dispatch:flat", 1);
  solvers();
  codec();
  moecclMoeConfig_t config = moe_config();
  size_t bytes = 0;
  OK(moecclMoeCheck(&config, N_RANKS, NULL, NULL, 0));
  OK(moecclMoeQuerySize(&config, N_RANKS, NULL, &bytes));
  CHECK(bytes > 0);
  GROWN(config, moecclMoeCheck(&config, N_RANKS, NULL, NULL, 0));
  config.size = sizeof(size_t); /* no version had so small a struct */
  CHECK(moecclMoeCheck(&config, N_RANKS, NULL, NULL, 0) == moecclInvalidArgument);
  OK(moecclGetUniqueId(&id));
  int rank[N_RANKS];
  pthread_t threads[N_RANKS];
  for (int r = 0; r < N_RANKS; ++r) {
    rank[r] = r;
    CHECK(pthread_create(&threads[r], NULL, run, &rank[r]) == 0);
  }
  for (int r = 0; r < N_RANKS; ++r) pthread_join(threads[r], NULL);
  return 0;
}
