/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Placement solvers: decide where to place samples, experts and replicas, fast enough for every iteration. Conventions:
 * types.h.
 *
 * All solvers are functions of their arguments only: they use no communicator and no clock, and give the same answer
 * for the same input on all machines whose C library computes pow, exp and log alike, as machines of one kind do.
 * Between machines of different kinds, solve on one rank and broadcast its answer. Solvers may be called from several
 * threads at once. Times are in microseconds, bandwidths in bytes per second, and volumes in tokens unless a name says
 * bytes.
 *
 * Workspace. Functions that need scratch memory take `workspace` and `workspace_bytes`; the function of the same name
 *   with the suffix Workspace says how much they need. With a NULL workspace the call allocates and frees its own.
 * Gate. A solver predicts the gain of its answer under the given figures: gain = 1 - after / before. If the gain is
 *   below min_gain (or not above 0), the answer is "keep": the output is the current placement, and keep is 1.
 */
#ifndef MOECCL_SOLVE_H_
#define MOECCL_SOLVE_H_

#include <moeccl/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Sample placement (NetMoE, Section 3) ---- */

/* There are I samples, E experts, and J devices on N nodes. num counts tokens: num[i][e] is the number of tokens of
 * sample i that are routed to expert e (Eq. 2). Each device keeps as many samples as it has now. */
typedef struct {
  size_t size; /* sizeof(moecclSampleProblem_t) */
  int32_t n_samples, n_experts, n_devices, n_nodes;
  const int32_t* num_gather;  /* [I][E] this layer's routing, for the gather that brings samples to their new places */
  const int32_t* num_scatter; /* [I][E] the next layer's, predicted; NULL: only the gather counts */
  const int32_t* expert_device; /* [E] ExpDev; NULL: contiguous, as even as possible */
  const int32_t* device_node;   /* [J] Node; NULL: contiguous, as even as possible */
  const int32_t* current;       /* [I] the present device of each sample; NULL: contiguous, as even as possible */
  double alpha_intra_us, alpha_inter_us;
  double beta_intra_us, beta_inter_us; /* per token (Eq. 1); both 0: rows of 4 KiB at NetMoE's 400 and 100 GB/s */
  double min_gain;                     /* 0: the default, 0.05; below 0: any gain */
  int64_t refine_pairs;                /* most sample pairs that the refinement tries; 0: 65536; below 0: none */
  /* Levels between nodes and devices (sockets, switches), outermost first; each refines the one before. Traffic that
   * crosses such a level inside a node takes the time of Eq. 1 with that level's figures, in parallel with the other
   * channels; intra then covers traffic inside a group of the last of these levels. At most 6. */
  int32_t n_inner;
  const int32_t* inner_group;                   /* [n_inner][J] group of each device, below J */
  const double *inner_alpha_us, *inner_beta_us; /* [n_inner] */
} moecclSampleProblem_t;
#define MOECCL_SAMPLE_PROBLEM_INIT \
  { sizeof(moecclSampleProblem_t), 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL }

typedef struct {
  size_t size;                /* sizeof(moecclSampleAnswer_t), set by the caller */
  double before_us, after_us; /* Eq. 5, with max over channels and over nodes; after: for the returned placement */
  double two_stage_us;        /* Eq. 5 of the two exact stages alone, before the refinement */
  double gain;                /* of the best placement found, even if it was not taken */
  int32_t keep;               /* 1: the placement is the current one */
  int32_t moved_nodes, moved; /* samples that change node; samples that change device */
  int64_t inter_before, inter_after; /* tokens in both operations (Eq. 3); after: for the returned placement */
  int64_t intra_before, intra_after;
} moecclSampleAnswer_t;

/* placement[I]: the new device of each sample. The solver finds an exact minimum of Eq. 6 and then, for each node, of
 * Eq. 7, both as transportation problems, and then makes swaps that lower Eq. 5. The result is never worse than the
 * current placement. */
MOECCL_API moecclResult_t moecclSolveSamples(const moecclSampleProblem_t* problem, int32_t* placement,
                                             moecclSampleAnswer_t* answer, void* workspace, size_t workspace_bytes);
MOECCL_API moecclResult_t moecclSolveSamplesWorkspace(const moecclSampleProblem_t* problem, size_t* bytes);
/* Evaluates a placement: fills the answer as if moecclSolveSamples had returned placement[I]. */
MOECCL_API moecclResult_t moecclEvaluateSamples(const moecclSampleProblem_t* problem, const int32_t* placement,
                                                moecclSampleAnswer_t* answer);

/* The exact core, for other uses. It finds bin[n_items] so that bin b gets capacity[b] items and the sum of
 * cost[item][bin[item]] is minimal. Entries of cost[n_items][n_bins] are in 0 .. 2^30 - 1; the capacities sum to
 * n_items. *total (may be NULL) gets the sum. */
MOECCL_API moecclResult_t moecclSolveAssignment(const int32_t* cost, const int32_t* capacity, int32_t n_items,
                                                int32_t n_bins, int32_t* bin, int64_t* total, void* workspace,
                                                size_t workspace_bytes);
MOECCL_API moecclResult_t moecclSolveAssignmentWorkspace(int32_t n_items, int32_t n_bins, size_t* bytes);

/* Predicts the next layer's routing from running statistics (NetMoE Section 3.3). joint[n_now][n_next], initially
 * zeroed by the caller, holds decayed counts of pairs (expert in this layer, expert in the next) of the same token. */
MOECCL_API moecclResult_t moecclPredictorUpdate(double* joint, int32_t n_now, int32_t n_next, double decay,
                                                const int32_t* topk_now, const int32_t* topk_next, int64_t n_tokens,
                                                int32_t top_k);
/* Computes num_next[I][n_next] from num_now[I][n_now]; each row keeps its sum. An expert that was never seen predicts
 * all experts equally. */
MOECCL_API moecclResult_t moecclPredictorApply(const double* joint, int32_t n_now, int32_t n_next,
                                               const int32_t* num_now, int32_t n_samples, int32_t* num_next);

/* A solver on its own thread, so that solving overlaps scatter and experts. One thread uses a handle at a time. */
typedef struct moecclSampleSolver* moecclSampleSolver_t;
typedef enum MOECCL_INT {
  moecclAnswerFresh = 0,   /* of the problem submitted last */
  moecclAnswerLast = 1,    /* the deadline passed: the previous answer, which still gains on this problem */
  moecclAnswerCurrent = 2, /* the deadline passed and nothing better is known: the current placement */
} moecclAnswerSource_t;
MOECCL_API moecclResult_t moecclSampleSolverCreate(moecclSampleSolver_t* solver);
/* Copies the problem and returns at once. The next problem replaces one whose solve has not begun. */
MOECCL_API moecclResult_t moecclSampleSolverSubmit(moecclSampleSolver_t solver, const moecclSampleProblem_t* problem);
/* Waits at most deadline_us (0: does not wait; below 0: waits until the end) and always gives a valid
 * placement[n_samples] for the problem submitted last. Returns moecclInvalidUsage if nothing was submitted. */
MOECCL_API moecclResult_t moecclSampleSolverFetch(moecclSampleSolver_t solver, double deadline_us, int32_t* placement,
                                                  moecclSampleAnswer_t* answer, moecclAnswerSource_t* source);
MOECCL_API moecclResult_t moecclSampleSolverDestroy(moecclSampleSolver_t solver);

/* ---- Expert swap (HierMoE Section IV, HierD-ES) ---- */

typedef enum MOECCL_INT {
  moecclMaxSmooth = 0,    /* Eq. 11 */
  moecclMaxPlain = 1,     /* max */
  moecclMaxLogSumExp = 2, /* ln sum exp */
} moecclMaxFunction_t;

/* There are E experts in E slots, and D levels of groups of slots, outermost first, each refining the one before. The
 * groups of the last level are the G GPUs. */
typedef struct {
  size_t size; /* sizeof(moecclSwapProblem_t) */
  int32_t n_experts, top_k, n_levels;
  const int32_t* n_groups;      /* [D] U[i], each at most E */
  const int32_t* group_of_slot; /* [D][E]; NULL: slot s is in group s * U[i] / E */
  const int32_t* placement;     /* [E] slot of each expert, a permutation; NULL: expert e in slot e */
  double row_bytes;             /* M v; 0: 14336 */
  /* Per level i, alpha in us and beta in us per byte: Inter-level-(i+1), and Intra-level-(i) of the dimension i + 1
   * that ends there (entry 0 is the flat AlltoAll). NULL: HierMoE Fig. 9; all four or none. */
  const double *inter_alpha_us, *inter_beta_us, *intra_alpha_us, *intra_beta_us;
  int32_t dimension; /* d of Eq. 8, 1..D; 0: Eq. 6 chooses for the current placement */
  moecclMaxFunction_t max_function;
  double gamma;             /* 0: 10 */
  int32_t count_duplicates; /* 1: loads are counted without deduplication, as in SmartMoE (for comparison) */
  double migrate_us;        /* price of one swap */
  double horizon;           /* iterations that a placement lasts; 0: 1. A swap must gain migrate_us in them */
  double min_gain;          /* of each swap, relative; 0: any gain */
} moecclSwapProblem_t;
#define MOECCL_SWAP_PROBLEM_INIT                                                                                       \
  {                                                                                                                    \
    sizeof(moecclSwapProblem_t), 0, 0, 0, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, 0, moecclMaxSmooth, 0, 0, 0, 0, \
        0                                                                                                              \
  }

typedef struct {
  size_t size;                /* sizeof(moecclSwapAnswer_t), set by the caller */
  double before_us, after_us; /* Eq. 8 with Eq. 9's maximum as configured */
  double gain;
  int32_t keep;
  int32_t n_swaps;                         /* swaps taken */
  int32_t dimension;                       /* the d that was used */
  int64_t max_load_before, max_load_after; /* duplicate-free tokens of the fullest GPU */
} moecclSwapAnswer_t;

/* Gets *n, the number of entries of the counts array. Counts are sums over tokens: each rank counts its own tokens, and
 * one AllReduce (moecclInt32, moecclSum) of the array joins them. Times are for counts joined over all G GPUs: Eq. 2, 4
 * and 5 are about one GPU's tokens, so the solver divides by the number of GPUs that hold them. */
MOECCL_API moecclResult_t moecclSwapCountsLength(const moecclSwapProblem_t* problem, size_t* n);
/* Fills counts[n] for topk[n_tokens][top_k] (-1: none). O(T K^2 + D E^2). */
MOECCL_API moecclResult_t moecclSwapCount(const moecclSwapProblem_t* problem, const int32_t* topk, int64_t n_tokens,
                                          int32_t* counts, void* workspace, size_t workspace_bytes);
MOECCL_API moecclResult_t moecclSwapCountWorkspace(const moecclSwapProblem_t* problem, size_t* bytes);
/* Computes the table Z of Eq. 9 for one level (0 .. D-1): z[E][E][U] is the number of duplicate-free tokens of each
 * group after swapping experts r and c. It is for inspection; the solver does not need it. */
MOECCL_API moecclResult_t moecclSwapTable(const moecclSwapProblem_t* problem, const int32_t* counts, int32_t level,
                                          int32_t* z);
/* Finds the best pair (Eq. 10), pair[2], from the joined counts; pair is -1, -1 if the answer is keep. */
MOECCL_API moecclResult_t moecclSolveSwap(const moecclSwapProblem_t* problem, const int32_t* counts, int32_t* pair,
                                          moecclSwapAnswer_t* answer, void* workspace, size_t workspace_bytes);
MOECCL_API moecclResult_t moecclSolveSwapWorkspace(const moecclSwapProblem_t* problem, size_t* bytes);
/* Finds a sequence of at most max_swaps swaps, for tokens that are all on this rank. Each swap is the best one after
 * those before it, until none gains. pairs[max_swaps][2] gets the swaps; placement[E] gets the slot of each expert
 * afterwards. */
MOECCL_API moecclResult_t moecclSolveSwapSequence(const moecclSwapProblem_t* problem, const int32_t* topk,
                                                  int64_t n_tokens, int32_t max_swaps, int32_t* pairs,
                                                  int32_t* placement, moecclSwapAnswer_t* answer);

/* ---- Expert replication (adaptive replication, Sections 3 and 4) ---- */

/* Algorithm 1: computes counts[n_experts], each at least 1 and summing to n_slots, proportional to popularity >= 0. */
MOECCL_API moecclResult_t moecclReplicaCounts(const double* popularity, int32_t n_experts, int32_t n_slots,
                                              int32_t* counts);
/* Computes the counts that drop the fewest tokens at capacity_factor * sum(popularity) / n_slots tokens per slot; among
 * equals, the expert with the most tokens per replica gets the next replica. */
MOECCL_API moecclResult_t moecclReplicaCountsFewestDrops(const double* popularity, int32_t n_experts, int32_t n_slots,
                                                         double capacity_factor, int32_t* counts);
/* Sets *dropped to the number of tokens above the capacity of their expert's replicas. counts[n_experts] are as above.
 */
MOECCL_API moecclResult_t moecclReplicaDrops(const double* popularity, const int32_t* counts, int32_t n_experts,
                                             int32_t n_slots, double capacity_factor, double* dropped);

typedef struct {
  size_t size; /* sizeof(moecclReplicaProblem_t) */
  int32_t n_experts, n_ranks, slots_per_rank, n_nodes;
  const int32_t* demand;    /* [n_ranks][n_experts] tokens of each rank for each expert */
  const int32_t* counts;    /* [n_experts] replicas; NULL: Algorithm 1 of the demand */
  const int32_t* rank_node; /* [n_ranks]; NULL: contiguous, as even as possible */
  double beta_inter_us;     /* per token that enters or leaves a node; 0: 0.04096 */
  double compute_us;        /* per token that a rank computes; 0: 0.1 */
  double min_gain;          /* 0: any gain */
} moecclReplicaProblem_t;
#define MOECCL_REPLICA_PROBLEM_INIT \
  { sizeof(moecclReplicaProblem_t), 0, 0, 0, 0, NULL, NULL, NULL, 0, 0, 0 }

typedef struct {
  size_t size;                             /* sizeof(moecclReplicaAnswer_t), set by the caller */
  double before_us, after_us, gain;        /* before: contiguous placement (Algorithm 1) */
  int32_t keep;                            /* 1: contiguous placement is returned */
  int64_t inter_before, inter_after;       /* tokens that cross nodes */
  int64_t max_load_before, max_load_after; /* tokens of the fullest rank */
} moecclReplicaAnswer_t;

/* slot_expert[n_ranks * slots_per_rank]: rank r owns slots_per_rank slots from r * slots_per_rank on. The solver starts
 * from contiguous placement and lowers the time of the busiest node's traffic and the fullest rank. */
MOECCL_API moecclResult_t moecclSolveReplicas(const moecclReplicaProblem_t* problem, int32_t* slot_expert,
                                              moecclReplicaAnswer_t* answer);
/* Computes which replica serves which rank: split[n_slots][n_ranks], tokens of each rank for each slot. Replicas of an
 * expert share its tokens as evenly as whole tokens allow. A rank's tokens go to its own replicas first, then to those
 * of its node, then to others. problem's counts are not used. */
MOECCL_API moecclResult_t moecclReplicaSplit(const moecclReplicaProblem_t* problem, const int32_t* slot_expert,
                                             int32_t* split);
/* Algorithm 2: source[n_experts][n_ranks] is the rank that sends expert e's gradient shard to rank r. sends[n_ranks]
 * (may be NULL) gets the number of shards that each rank sends to others, which shows the balance. */
MOECCL_API moecclResult_t moecclGradSources(const int32_t* slot_expert, int32_t n_experts, int32_t n_ranks,
                                            int32_t slots_per_rank, int32_t* source, int64_t* sends);

/* Parameters for the seconds of gradient plus weight communication per rank, with static and with adaptive replication
 * (Appendix A.2). */
typedef struct {
  size_t size; /* sizeof(moecclReplicaCost_t) */
  int32_t n_ranks, n_experts, slots_per_rank;
  double grad_bytes, weight_bytes; /* of one expert */
  double pci_bandwidth, net_bandwidth;
} moecclReplicaCost_t;
#define MOECCL_REPLICA_COST_INIT \
  { sizeof(moecclReplicaCost_t), 0, 0, 0, 0, 0, 0, 0 }
MOECCL_API moecclResult_t moecclReplicaCommTime(const moecclReplicaCost_t* cost, double* static_s, double* adaptive_s);

/* ---- Expert load balance (EPLB) ---- */

/* L layers have E experts each, whose replicas fill S slots of G GPUs on N nodes. GPU g has the S / G slots from
 * g * S / G on, and node n the G / N GPUs from n * G / N on. The replicas of an expert share its load evenly. As in
 * DeepSeek's EPLB (github.com/deepseek-ai/EPLB, rebalance_experts), the groups decide about the policy:
 *   hierarchical, if N divides n_groups: the experts are n_groups groups of consecutive experts, all replicas of a
 *     group's experts are on one node, and each node has n_groups / N groups. It suits gates that limit a token to few
 *     groups.
 *   global, if it does not: a replica may be on any GPU. */
typedef struct {
  size_t size;               /* sizeof(moecclBalanceProblem_t) */
  int32_t n_layers;          /* L */
  int32_t n_experts;         /* E of a layer */
  int32_t n_slots;           /* S of a layer, at least E: a multiple of G, at most 65536 */
  int32_t n_groups, n_nodes; /* N; 0: 1. Hierarchical: n_groups divides E, and N divides G */
  int32_t n_gpus;            /* G, at most 1024, with at most 1024 slots each */
  const double* load;        /* [L][E] 0 or more, in any unit, such as tokens; a layer without load keeps `current` if
                                that has all experts, no empty slot, and the groups on the nodes */
  const int32_t* current;    /* [L][S] the expert in each slot now, -1: none; NULL: nothing is placed yet */
  double move_cost;          /* the load that the fullest GPU has to lose for each expert that a GPU has to receive:
                                seconds of a transfer / seconds of a unit of load while the placement lasts */
  double tolerance;          /* searches end when the fullest GPU is so near to its lower bound, relative; 0: 0.001 */
  int64_t max_work; /* bounds the time of each of a layer's searches, of which there are at most three: loads of
                       GPUs that it computes, counted once more for each 10 slots of a GPU. 0: 4096 S; below 0: no
                       search, which gives EPLB's placement, where nothing keeps `current` */
} moecclBalanceProblem_t;
#define MOECCL_BALANCE_PROBLEM_INIT \
  { sizeof(moecclBalanceProblem_t), 0, 0, 0, 0, 0, 0, NULL, NULL, 0, 0, 0 }

/* A balance is the mean load of a GPU, summed over the layers, divided by the load of each layer's fullest GPU, summed
 * likewise: 1 is best. Without any load it is 1. */
typedef struct {
  size_t size;           /* sizeof(moecclBalanceAnswer_t), set by the caller */
  double balance;        /* of the returned placement */
  double balance_before; /* of the current one; 0: there is none, or it has an empty slot or lacks an expert */
  double balance_greedy; /* of EPLB's */
  double balance_bound;  /* no placement has more */
  int64_t moved;         /* experts that GPUs have to receive, in all layers; 0 without a current placement */
  int32_t kept_layers;   /* layers whose placement is the current one */
} moecclBalanceAnswer_t;

/* slot_expert[L][S]: the expert in each slot. For each layer the solver lowers the load of the fullest GPU plus
 * move_cost for each expert that a GPU has to receive. With a move_cost of 0 the fullest GPU never has more load than
 * with EPLB's greedy method, which is computed in float32 as eplb.py does. With a higher one the sum is never above
 * that of EPLB's placement nor, unless max_work is below 0, that of the current one if it has all experts, no empty
 * slot and the groups on the nodes. Among placements within the tolerance, fewer moves count. Experts that stay on a
 * GPU keep their slots. */
MOECCL_API moecclResult_t moecclSolveBalance(const moecclBalanceProblem_t* problem, int32_t* slot_expert,
                                             moecclBalanceAnswer_t* answer);

/* ---- Hybrid domains (HybridEP, Sections III and IV) ---- */

/* Levels are listed outermost first. There are scale[0] workers at level 0, and a worker of level i-1 holds scale[i]
 * workers of level i. */
typedef struct {
  size_t size;             /* sizeof(moecclDomainProblem_t) */
  int32_t n_levels;        /* 1..8 */
  const int32_t* scale;    /* [L] SF; read if sizes is NULL */
  const int32_t* sizes;    /* for uneven trees: level by level, the number of sub-workers of each worker above */
  const double* bandwidth; /* [L] between workers of the level, bytes/s per GPU */
  double data_bytes;       /* D, per GPU, for one of the two AlltoAlls */
  double expert_bytes;     /* P_E, all experts of a GPU, before compression */
  double pre_expert_s;     /* computation before the experts, which hides the AllGather */
  double compression;      /* expert bytes are divided by it; 0: 1 */
  double min_gain;         /* 0: any gain over plain expert parallelism */
  /* For the time of one layer's step on this library. If top_k is 0, the fields below have no effect, and the latency
   * is Eq. 8's of the forward pass, in which every row of data_bytes travels by itself. */
  int32_t top_k;           /* K: data_bytes is tokens times K times row. A row travels once to each group of each level
                              that has one of its token's experts, through the dimensions of least time (moe.h) */
  int32_t n_experts;       /* E, on all GPUs; the gate is even */
  const double* latency_s; /* [L] one way between workers of the level; NULL: 0 */
  double expert_s;         /* n Lat^Ep of Eq. 2, forward; its backward takes twice as long */
  double backward_s;       /* computation that hides the return of the gradients; 0: twice pre_expert_s */
  double gradient_bytes;   /* of all experts of a GPU, returned to their owners; 0: expert_bytes */
  double encode_bandwidth; /* expert bytes per second of the codec, before compression; 0: takes no time. Experts are
                              encoded if compression is above 1, gradients if gradient_ratio is */
  double decode_bandwidth;
  int32_t forward_only;  /* 1: no backward pass. 0: includes both backward AlltoAlls, the return of gradients and, with
                            a compression above 1, the AllReduce of one shared expert */
  double gradient_ratio; /* gradients return encoded (moeccl/gradient.h) with this ratio; 0 or 1: exactly, summed on the
                            way (moecclHybridReduce) */
} moecclDomainProblem_t;
#define MOECCL_DOMAIN_PROBLEM_INIT \
  { sizeof(moecclDomainProblem_t), 0, NULL, NULL, NULL, 0, 0, 0, 0, 0, 0, 0, NULL, 0, 0, 0, 0, 0, 0, 0 }

typedef struct {
  size_t size;                         /* sizeof(moecclDomainAnswer_t), set by the caller */
  double before_us, after_us, gain;    /* before: all domains of size 1, which is plain expert parallelism (p = 1) */
  int32_t keep;                        /* 1: all domains of size 1 */
  double all_gather_us, all_to_all_us; /* for the answer; all_to_all covers both AlltoAlls */
  double backward_us;                  /* both backward AlltoAlls; this field and the next two are 0 without top_k */
  double return_us;                    /* gradients to their owners, their codec, and the shared expert's AllReduce */
  double codec_us;                     /* encoding of a GPU's own experts, decoding of all that it holds */
} moecclDomainAnswer_t;

/* The shapes of m transformer blocks without experts followed by one with experts, as one GPU computes them. */
typedef struct {
  size_t size;             /* sizeof(moecclComputeShape_t) */
  double throughput;       /* C: multiply-adds per second */
  int64_t tokens;          /* L: rows of a GPU, forward */
  int64_t sequence;        /* keys that a token attends to; 0: none are counted */
  int64_t hidden;          /* H */
  int32_t n_dense;         /* m */
  int32_t matrices;        /* per FFN or expert: 2, or 3 if it is gated; 0: 2 */
  int64_t ffn, expert_ffn; /* M of a dense block and of an expert */
  int32_t top_k;           /* K: experts per token; 0: 1 */
} moecclComputeShape_t;
#define MOECCL_COMPUTE_SHAPE_INIT \
  { sizeof(moecclComputeShape_t), 0, 0, 0, 0, 0, 0, 0, 0, 0 }
/* Computes Eq. 1 and 2, in seconds: the work before the experts, (m + 1) attentions and m FFNs (Lat^PE, for
 * pre_expert_s), and the experts' own computation for an even gate (n Lat^Ep, for expert_s). Either may be NULL. */
MOECCL_API moecclResult_t moecclComputeLatency(const moecclComputeShape_t* shape, double* pre_expert_s,
                                               double* expert_s);
/* Computes the p that minimizes Eq. 10 on one even level of n_workers GPUs (Eq. 11 and 12, unrounded) and its latency.
 * latency_s may be NULL. */
MOECCL_API moecclResult_t moecclDomainProportion(int32_t n_workers, double bandwidth, double pre_expert_s,
                                                 double data_bytes, double expert_bytes, double* p, double* latency_s);
/* domain[L]: the size S_ED of the expert domains at each level. */
MOECCL_API moecclResult_t moecclSolveDomains(const moecclDomainProblem_t* problem, int32_t* domain,
                                             moecclDomainAnswer_t* answer);
/* Computes the latency of given sizes, in seconds: Eq. 2 to 9 summed over levels, or, if top_k is given, of a whole
 * step. */
MOECCL_API moecclResult_t moecclDomainLatency(const moecclDomainProblem_t* problem, const int32_t* domain, double* s);
/* Computes location[L] of GPU m by Eq. 13 and its uneven form. */
MOECCL_API moecclResult_t moecclDomainLocate(const moecclDomainProblem_t* problem, int64_t gpu, int32_t* location);
typedef enum MOECCL_INT { moecclLinkNone = 0, moecclLinkAllGather = 1, moecclLinkAllToAll = 2 } moecclDomainLink_t;
/* Algorithm 1: what GPUs m and n do with each other at a level. */
MOECCL_API moecclResult_t moecclDomainLink(const moecclDomainProblem_t* problem, const int32_t* domain, int32_t level,
                                           int64_t gpu_m, int64_t gpu_n, moecclDomainLink_t* link);

/* ---- Pipeline chunks (MoNTA) ---- */

/* Efficiency (0..1] at a volume, linear in the volume's logarithm between points and constant outside. Volumes ascend.
 */
typedef struct {
  int32_t n_points; /* 0: 1 everywhere */
  const double* bytes;
  const double* efficiency;
} moecclCurve_t;
/* Efficiencies of a strategy that differ from the common curves: lanes that run at the same time slow each other down,
 * as MoNTA says of O3's AllGather and copy. A curve without points stands for the common one. */
typedef struct {
  moecclCurve_t inter, intra, copy;
  double chunk_us; /* fixed cost of each chunk: lanes wait for each other, and ranks are not in step */
} moecclChunkContention_t;
typedef struct {
  size_t size;                                             /* sizeof(moecclChunkProblem_t) */
  double bytes;                                            /* I = b s h BPE (Eq. 3) */
  int32_t tensor;                                          /* t */
  int32_t expert;                                          /* e */
  double inter_bandwidth, intra_bandwidth, copy_bandwidth; /* B1, B2, B3 */
  moecclCurve_t inter, intra, copy;                        /* r1 over I/(N t); r2 and r3 over I/N */
  double min_bytes;                                        /* I_minimal; 0: 65536 */
  int32_t max_chunks;                                      /* 0: 1024 */
  double start_us;                                         /* fixed cost of each communication; 0 in MoNTA */
  double min_gain;                                         /* 0: any gain over the original AllToAll */
  moecclChunkContention_t o2, o3;
} moecclChunkProblem_t;
/* clang-format off */
#define MOECCL_CHUNK_PROBLEM_INIT \
  { sizeof(moecclChunkProblem_t), 0, 0, 0, 0, 0, 0, {0, NULL, NULL}, {0, NULL, NULL}, {0, NULL, NULL}, 0, 0, 0, 0, \
    {{0, NULL, NULL}, {0, NULL, NULL}, {0, NULL, NULL}, 0}, {{0, NULL, NULL}, {0, NULL, NULL}, {0, NULL, NULL}, 0} }
/* clang-format on */

typedef enum MOECCL_INT {
  moecclChunkBaseline = 0, /* the original AllToAll */
  moecclChunkO1 = 1,       /* Drop + AllToAll + AllGather (Eq. 11) */
  moecclChunkO2 = 2,       /* AllToAll and AllGather pipelined (Algorithm 1) */
  moecclChunkO3 = 3        /* like O2, with AllGather and copy pipelined too (Algorithm 2) */
} moecclChunkStrategy_t;
typedef struct {
  size_t size;                    /* sizeof(moecclChunkAnswer_t), set by the caller */
  moecclChunkStrategy_t strategy; /* Algorithm 3 */
  int32_t n_chunks;               /* of this strategy */
  double before_us, after_us, gain;
  int32_t keep;
  int32_t chunks[4]; /* the best number for each strategy */
  double us[4];      /* and its time */
} moecclChunkAnswer_t;
MOECCL_API moecclResult_t moecclSolveChunks(const moecclChunkProblem_t* problem, moecclChunkAnswer_t* answer);
/* Computes the time of a strategy with n_chunks chunks (1 for the baseline and O1). */
MOECCL_API moecclResult_t moecclChunkTime(const moecclChunkProblem_t* problem, moecclChunkStrategy_t strategy,
                                          int32_t n_chunks, double* us);

/* ---- Cluster layout (MoNTA, memory Tables 3 and 4, cluster expansion) ---- */

typedef enum MOECCL_INT {
  moecclRecomputeNone = 0,
  moecclRecomputeSelective = 1, /* attention's scores */
  moecclRecomputeFull = 2
} moecclRecompute_t;
typedef struct {
  size_t size; /* sizeof(moecclLayoutProblem_t) */
  int32_t n_gpus, gpus_per_node;
  double gpu_bytes; /* usable memory of a GPU */
  double intra_bandwidth, inter_bandwidth;
  int32_t n_layers, n_heads, n_experts, top_k; /* l, a, experts per layer, k */
  int64_t hidden, sequence;                    /* h; context length s */
  int32_t micro_batch;                         /* b; 0: 1 */
  int32_t global_batch;                        /* sequences per step; 0: one micro batch per data-parallel rank */
  double dense_parameters, moe_parameters;     /* P1, P2, for the whole model */
  int32_t zero_stage;                          /* 0..3 (Table 3) */
  int32_t sequence_parallel;                   /* 1: Table 4's SP rows */
  moecclRecompute_t recompute;                 /* needs sequence_parallel, as in Table 4 */
  double gpu_flops;                            /* peak of a GPU per second; 0: computing takes no time, MFU is 0 */
  double compute_efficiency;                   /* share of the peak while computing; 0: 0.5 */
  int32_t switch_ranks; /* most ranks of one TP position that a network between nodes connects at full
                           rate: ep x cp, vertical max(ep, cp), must fit; 0: any */
  double max_bubble;    /* layouts whose pipeline idles longer are listed last; 0: 0.3 */
} moecclLayoutProblem_t;
#define MOECCL_LAYOUT_PROBLEM_INIT \
  { sizeof(moecclLayoutProblem_t), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, moecclRecomputeNone, 0, 0, 0, 0 }

typedef struct {
  int32_t tensor, expert, context, pipeline, data; /* TP, EP, CP, PP, DP: order of ranks, innermost first */
  int32_t vertical;                                /* 1: CP and EP use the same ranks (c >= e); 0: orthogonal */
  double weight_bytes;                             /* weights, gradients, optimizer: psi_1 + psi_2 (Eq. 1) */
  double activation_bytes;                         /* Mem_act */
  double comm_us;                                  /* communication of one step, per GPU; EP with Eq. 11's AllGather */
  double tp_us, ep_us, cp_us, pp_us, dp_us;
} moecclLayout_t;
/* The cost of one step of a layout. moecclPriceLayout computes it for the degrees of `layout`, which must make n_gpus
 * ranks, and reads no other fields of it. */
typedef struct {
  size_t size;           /* sizeof(moecclLayoutCost_t), set by the caller */
  int32_t micro_batches; /* through each pipeline */
  double bubble;         /* share of the step in which a stage waits: (p - 1) / (micro_batches + p - 1) */
  double compute_us;     /* of one GPU: forward, twice that for backward, forward again with full recomputation */
  double step_us;        /* (compute + TP + EP + CP) / (1 - bubble) + PP + DP, nothing overlapped */
  double mfu;            /* operations of the model for the step's sequences, divided by the peak of all GPUs */
  int32_t switch_ranks;  /* ranks that the network between nodes must connect: ep x cp, vertical max(ep, cp) */
} moecclLayoutCost_t;
MOECCL_API moecclResult_t moecclPriceLayout(const moecclLayoutProblem_t* problem, const moecclLayout_t* layout,
                                            moecclLayoutCost_t* cost);

/* Writes the feasible layouts into layouts[max_layouts], ascending by step_us, with those above max_bubble last.
 * *n_layouts gets the number of feasible layouts, which may exceed max_layouts; layouts may be NULL with 0. If none is
 * feasible, the call returns moecclSuccess and the number is 0. */
MOECCL_API moecclResult_t moecclSolveLayout(const moecclLayoutProblem_t* problem, moecclLayout_t* layouts,
                                            int32_t max_layouts, int32_t* n_layouts);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_SOLVE_H_ */
