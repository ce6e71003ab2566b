/*
 * Placement solvers: what to put where, fast enough for every iteration. Conventions: types.h.
 *
 * All are functions of their arguments: no communicator, no clock, the same answer on every rank and every machine for
 * the same input. They may be called from any thread at the same time. Times are in microseconds, bandwidths in bytes a
 * second, volumes in tokens unless a name says bytes.
 *
 * Workspace. Functions that need scratch memory take `workspace` and `workspace_bytes`; the function of the same name
 *   with Workspace at its end says how much. A NULL workspace is allowed: then the call allocates and frees.
 * Gate. Solvers predict what their answer gains under the given figures: gain = 1 - after / before. Where it is below
 *   min_gain (or not above 0) the answer is "keep": the output is what the caller has now, and keep is 1.
 */
#ifndef MOECCL_SOLVE_H_
#define MOECCL_SOLVE_H_

#include <moeccl/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Sample placement (NetMoE, Section 3) ---- */

/* I samples, E experts, J devices on N nodes. num counts tokens: num[i][e] = tokens of sample i routed to expert e
 * (Eq. 2). Each device keeps as many samples as it has now. */
typedef struct {
  size_t size; /* sizeof(moecclSampleProblem_t) */
  int32_t n_samples, n_experts, n_devices, n_nodes;
  const int32_t* num_gather;    /* [I][E] this layer's routing: the gather that brings samples to their new places */
  const int32_t* num_scatter;   /* [I][E] next layer's, predicted; NULL: only the gather counts */
  const int32_t* expert_device; /* [E] ExpDev; NULL: contiguous, as even as possible */
  const int32_t* device_node;   /* [J] Node; NULL: contiguous, as even as possible */
  const int32_t* current;       /* [I] the device of each sample now; NULL: contiguous, as even as possible */
  double alpha_intra_us, alpha_inter_us;
  double beta_intra_us, beta_inter_us; /* per token (Eq. 1); both 0: rows of 4 KiB at NetMoE's 400 and 100 GB/s */
  double min_gain;                     /* 0: the default, 0.05; below 0: any gain */
  int64_t refine_pairs;                /* most pairs of samples that the refinement weighs; 0: 65536; below 0: none */
} moecclSampleProblem_t;
#define MOECCL_SAMPLE_PROBLEM_INIT \
  { sizeof(moecclSampleProblem_t), 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, 0, 0, 0, 0, 0, 0 }

typedef struct {
  size_t size;                /* sizeof(moecclSampleAnswer_t), set by the caller */
  double before_us, after_us; /* Eq. 5, with max over channels and over nodes; after: of the returned placement */
  double two_stage_us;        /* Eq. 5 of the two exact stages alone, before the refinement */
  double gain;                /* of the best placement found, also when it was not taken */
  int32_t keep;               /* 1: the placement is the current one */
  int32_t moved_nodes, moved; /* samples that change node; device */
  int64_t inter_before, inter_after; /* tokens over both operations (Eq. 3), of the returned placement */
  int64_t intra_before, intra_after;
} moecclSampleAnswer_t;

/* placement[I]: the new device of each sample. First an exact minimum of Eq. 6 and then of Eq. 7 for each node, both as
 * transportation problems, then swaps that lower Eq. 5. Never worse than the current placement. */
MOECCL_API moecclResult_t moecclSolveSamples(const moecclSampleProblem_t* problem, int32_t* placement,
                                             moecclSampleAnswer_t* answer, void* workspace, size_t workspace_bytes);
MOECCL_API moecclResult_t moecclSolveSamplesWorkspace(const moecclSampleProblem_t* problem, size_t* bytes);
/* What a placement costs: fills the answer as if moecclSolveSamples had returned placement[I]. */
MOECCL_API moecclResult_t moecclEvaluateSamples(const moecclSampleProblem_t* problem, const int32_t* placement,
                                                moecclSampleAnswer_t* answer);

/* The exact core, for other uses: bin[n_items] so that bin b gets capacity[b] items and the sum of
 * cost[item][bin[item]] is least. cost[n_items][n_bins] in 0 .. 2^30 - 1; the capacities sum to n_items. *total (may be
 * NULL): the sum. */
MOECCL_API moecclResult_t moecclSolveAssignment(const int32_t* cost, const int32_t* capacity, int32_t n_items,
                                                int32_t n_bins, int32_t* bin, int64_t* total, void* workspace,
                                                size_t workspace_bytes);
MOECCL_API moecclResult_t moecclSolveAssignmentWorkspace(int32_t n_items, int32_t n_bins, size_t* bytes);

/* Prediction of the next layer's routing from running statistics (NetMoE Section 3.3). joint[n_now][n_next], zeroed by
 * the caller at first, holds decayed counts of (expert of this layer, expert of the next) of the same token. */
MOECCL_API moecclResult_t moecclPredictorUpdate(double* joint, int32_t n_now, int32_t n_next, double decay,
                                                const int32_t* topk_now, const int32_t* topk_next, int64_t n_tokens,
                                                int32_t top_k);
/* num_next[I][n_next] from num_now[I][n_now]; each row keeps its sum. Experts never seen predict all experts alike. */
MOECCL_API moecclResult_t moecclPredictorApply(const double* joint, int32_t n_now, int32_t n_next,
                                               const int32_t* num_now, int32_t n_samples, int32_t* num_next);

/* A solver on its own thread, so that the solve overlaps scatter and experts. One thread uses a handle at a time. */
typedef struct moecclSampleSolver* moecclSampleSolver_t;
typedef enum {
  moecclAnswerFresh = 0,   /* of the problem submitted last */
  moecclAnswerLast = 1,    /* time was up: the answer before it, which still gains on this problem */
  moecclAnswerCurrent = 2, /* time was up and nothing better is known: the current placement */
} moecclAnswerSource_t;
MOECCL_API moecclResult_t moecclSampleSolverCreate(moecclSampleSolver_t* solver);
/* Copies the problem and returns at once. A problem that has not begun is replaced by the next one. */
MOECCL_API moecclResult_t moecclSampleSolverSubmit(moecclSampleSolver_t solver, const moecclSampleProblem_t* problem);
/* Waits at most deadline_us (0: looks once; below 0: to the end) and always gives a valid placement[n_samples] for the
 * problem submitted last. moecclInvalidUsage when nothing was submitted. */
MOECCL_API moecclResult_t moecclSampleSolverFetch(moecclSampleSolver_t solver, double deadline_us, int32_t* placement,
                                                  moecclSampleAnswer_t* answer, moecclAnswerSource_t* source);
MOECCL_API moecclResult_t moecclSampleSolverDestroy(moecclSampleSolver_t solver);

/* ---- Expert swap (HierMoE Section IV, HierD-ES) ---- */

typedef enum {
  moecclMaxSmooth = 0,    /* Eq. 11 */
  moecclMaxPlain = 1,     /* max */
  moecclMaxLogSumExp = 2, /* ln sum exp */
} moecclMaxFunction_t;

/* E experts in E slots; D levels of groups of slots, outermost first, each refining the one before; the groups of the
 * last level are the G GPUs. */
typedef struct {
  size_t size; /* sizeof(moecclSwapProblem_t) */
  int32_t n_experts, top_k, n_levels;
  const int32_t* n_groups;      /* [D] U[i], each at most E */
  const int32_t* group_of_slot; /* [D][E]; NULL: slot s lies in group s * U[i] / E */
  const int32_t* placement;     /* [E] slot of each expert, a permutation; NULL: expert e in slot e */
  double row_bytes;             /* M v; 0: 14336 */
  /* Per level i, alpha in us and beta in us per byte: Inter-level-(i+1), and Intra-level-(i) of the dimension i + 1
   * that ends there (entry 0 is the flat AlltoAll). NULL: HierMoE Fig. 9; all four or none. */
  const double *inter_alpha_us, *inter_beta_us, *intra_alpha_us, *intra_beta_us;
  int32_t dimension; /* d of Eq. 8, 1..D; 0: Eq. 6 chooses for the current placement */
  moecclMaxFunction_t max_function;
  double gamma;             /* 0: 10 */
  int32_t count_duplicates; /* 1: SmartMoE's way, loads are counted without deduplication (for comparison) */
  double migrate_us;        /* price of one swap */
  double horizon;           /* iterations that a placement lives; 0: 1. A swap must gain migrate_us in them */
  double min_gain;          /* 0: any gain; of each swap, relative */
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
  int32_t n_swaps;                         /* taken */
  int32_t dimension;                       /* d that was used */
  int64_t max_load_before, max_load_after; /* duplicate-free tokens of the fullest GPU */
} moecclSwapAnswer_t;

/* Counts are sums over tokens: each rank counts its own tokens, one AllReduce (moecclInt32, moecclSum) of the array
 * joins them. *n: entries of the array. */
MOECCL_API moecclResult_t moecclSwapCountsLength(const moecclSwapProblem_t* problem, size_t* n);
/* counts[n] for topk[n_tokens][top_k] (-1: none). O(T K^2 + D E^2). */
MOECCL_API moecclResult_t moecclSwapCount(const moecclSwapProblem_t* problem, const int32_t* topk, int64_t n_tokens,
                                          int32_t* counts, void* workspace, size_t workspace_bytes);
MOECCL_API moecclResult_t moecclSwapCountWorkspace(const moecclSwapProblem_t* problem, size_t* bytes);
/* The table Z of Eq. 9 for one level (0 .. D-1), z[E][E][U]: duplicate-free tokens of each group after swapping experts
 * r and c. For inspection: the solver does not need it. */
MOECCL_API moecclResult_t moecclSwapTable(const moecclSwapProblem_t* problem, const int32_t* counts, int32_t level,
                                          int32_t* z);
/* The best pair (Eq. 10), pair[2], from the joined counts; pair is -1, -1 when the answer is keep. */
MOECCL_API moecclResult_t moecclSolveSwap(const moecclSwapProblem_t* problem, const int32_t* counts, int32_t* pair,
                                          moecclSwapAnswer_t* answer, void* workspace, size_t workspace_bytes);
MOECCL_API moecclResult_t moecclSolveSwapWorkspace(const moecclSwapProblem_t* problem, size_t* bytes);
/* A sequence of at most max_swaps swaps for tokens that are all here, each the best one after those before it, until
 * none gains. pairs[max_swaps][2]; placement[E]: the slot of each expert afterwards. */
MOECCL_API moecclResult_t moecclSolveSwapSequence(const moecclSwapProblem_t* problem, const int32_t* topk,
                                                  int64_t n_tokens, int32_t max_swaps, int32_t* pairs,
                                                  int32_t* placement, moecclSwapAnswer_t* answer);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_SOLVE_H_ */
