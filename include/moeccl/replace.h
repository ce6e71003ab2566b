/* SPDX-License-Identifier: Apache-2.0 */
/* Re-placing combine: combine brings each sample (a run of consecutive tokens of a rank) not back to where it came from
 * but to the rank where this layer's combine and the next layer's dispatch cross the fewest slow links (NetMoE).
 * Conventions: types.h. Example: examples/training.
 *
 *   moecclReplaceCreate        once per layer
 *   moecclReplaceBegin         once per step, after moecclRoutingCreate or -Update: every rank learns all ranks'
 * choices, and a thread begins to solve, while dispatch and experts run (Algorithm 1, line 9) moecclReplaceCombine
 * instead of moecclCombine: the same plan, the same number of exchanges, other homes moecclReplaceCombineBackward
 * instead of moecclCombineBackward: gradients go from the new homes to the experts
 *
 * moecclDispatch and moecclDispatchBackward stay as they are: they speak of the homes from before. Each rank keeps as
 * many samples, and so tokens, as it brought; the order is by sample number. The ranks solve the same problem to the
 * end, each by itself, without a deadline that clocks could see differently; that they came to the same placement is
 * checked, by a hash in the combine's announcement, before any row moves.
 *
 * Residual (Appendix A). A residual connection out[t] = x[t] + combine[t] cannot be added after combine, because x[t]
 * is still at the old home. With `residual` set combine's input has extra rows (moecclReplaceRows), which
 * moecclReplaceResidual fills.
 *   1: x[t] is the row that dispatch sent. It is added with weight 1 where the first expert of t is, costs no row of
 * its own on any link, and reaches the new home also for a token without experts. 2: x[t] is any row of the caller's,
 * as models need that normalise before the layer: dispatch sends norm(x), and the residual is x, or x plus the output
 * of shared experts. It travels as one more row from the old home to the new one, on which the solver counts; tokens
 * that stay send none.
 *
 * What it costs. Begin's own time is measured, and with mode Solve and min_gain of 0 or more re-placing has to pay by
 * the clock: the first steps combine both ways in turns, `gain` is what is left of the prediction, and while that is
 * below min_gain samples stay. Then Begin exchanges nothing for 4 to 64 steps at a time and combine runs as
 * moecclCombine would. Calls on a stream have no times: there the prediction decides.
 *
 * Sums. Where rows are fp32 or fp64 and the communicator is deterministic, out[t] has the same bits wherever t goes;
 * with residual 1 Begin then exchanges in every step. */
#ifndef MOECCL_REPLACE_H_
#define MOECCL_REPLACE_H_

#include <moeccl/moe.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct moecclReplacement* moecclReplacement_t;

typedef enum MOECCL_INT {
  moecclReplaceSolve = 0, /* the sample solver chooses (moecclSolveSamples) */
  moecclReplaceKeep = 1,  /* every sample stays: for comparison */
  moecclReplaceGiven = 2  /* moecclReplaceBegin gets the placement */
} moecclReplaceMode_t;

typedef struct {
  size_t size;          /* sizeof(moecclReplaceConfig_t) */
  size_t sample_tokens; /* tokens of a sample; each rank's n_tokens must be a multiple */
  moecclReplaceMode_t mode;
  int32_t residual;     /* 1 or 2: combine's input has rows for the residual, see above */
  int32_t use_next;     /* 1: moecclReplaceBegin gets the next layer's counts; 2: its choices, token by token */
  double min_gain;      /* of `gain`, below which all samples stay; 0: 0.05; below 0: any predicted gain, untimed */
  int64_t refine_pairs; /* as in moecclSampleProblem_t; bounds the solver's time */
} moecclReplaceConfig_t;
#define MOECCL_REPLACE_CONFIG_INIT \
  { sizeof(moecclReplaceConfig_t), 1, moecclReplaceSolve, 0, 0, 0, 0 }

/* Collective: all ranks give the same config. The layer may be destroyed before. */
MOECCL_API moecclResult_t moecclReplaceCreate(moecclReplacement_t* replacement, moecclMoe_t moe,
                                              const moecclReplaceConfig_t* config);
MOECCL_API moecclResult_t moecclReplaceDestroy(moecclReplacement_t replacement);

/* Collective, blocks for one exchange of the choices, 2 k + 1 bytes a token, unless the step is skipped (info.skipped);
 * in such a step a wrong argument is told to this rank alone. `routing` is one of the same layer and must not be
 * updated or destroyed before the step's last call here. All tables are read before the call returns. next: the second
 * term of Eq. 5, in the rows that a dispatch with this step's plan would send; experts lie where this layer has them.
 * NULL without use_next. use_next 1: next[samples of this rank][n_experts], tokens of each sample for each expert of
 * the next layer, as moecclPredictorApply predicts them. Plans that deduplicate send one row for several choices of a
 * token; counts do not show them, so as many are taken to share a row as in this layer. use_next 2: next[n_tokens][k],
 * each token's experts in the next layer as moecclRoutingCreate takes them, known or predicted token by token: the rows
 * are exact. placement[samples of all ranks]: new home of each sample, the same on all ranks and as many on each as
 * now; read in mode Given, else NULL. */
MOECCL_API moecclResult_t moecclReplaceBegin(moecclReplacement_t replacement, moecclRouting_t routing,
                                             const int32_t* next, const int32_t* placement);
/* *n_rows: rows of combine's input in this step: those of dispatch's output, then the residual's (residual 2: one for
 * each token of this rank, in their order). Does not wait. */
MOECCL_API moecclResult_t moecclReplaceRows(moecclReplacement_t replacement, size_t* n_rows);
/* Puts the residual into combine's input in[n_rows, row]: from x[T, row], this rank's tokens (residual 1: as given to
 * dispatch), and dispatched[R, row], what it received (residual 2: not read, may be NULL). ExpertMajor: fills the rows
 * after the first R. Rows: with residual 1 also adds to the first R, in `type`, so the experts' outputs must be there
 * before. Blocks, and comes after the default stream on CUDA memory; not collective. */
MOECCL_API moecclResult_t moecclReplaceResidual(moecclReplacement_t replacement, const void* x, const void* dispatched,
                                                void* in);
/* out[T, row] for the tokens of the samples that are here now: moecclCombine's sums, with the residual if configured.
 * in[n_rows, row]. Waits for the solver. Collective. */
MOECCL_API moecclResult_t moecclReplaceCombine(moecclReplacement_t replacement, const void* in, void* out,
                                               moecclStream_t stream);
/* moecclCombineBackward of it: grad_out[T, row] of the tokens that are here now, grad_in[n_rows, row],
 * grad_weight[T][k] of the tokens that this rank brought (its gate chose the weights). */
MOECCL_API moecclResult_t moecclReplaceCombineBackward(moecclReplacement_t replacement, const void* grad_out,
                                                       void* grad_in, const void* in, float* grad_weight,
                                                       moecclStream_t stream);
/* The residual's way back: adds its rows of grad_in[n_rows, row] to grad_dispatched[R, row], which then goes into
 * moecclDispatchBackward, and to grad_x[T, row], which is what that gave for the tokens that this rank brought.
 * Either may be NULL: call it before moecclDispatchBackward with the first and after it with the second (grad_x gets
 * all tokens with residual 2 and in skipped steps, else those without experts). Blocks; not collective. */
MOECCL_API moecclResult_t moecclReplaceResidualBackward(moecclReplacement_t replacement, const void* grad_in,
                                                        void* grad_dispatched, void* grad_x);

/* What was decided. Pointers are the replacement's and live until the next moecclReplaceBegin. */
typedef struct {
  size_t size;                  /* sizeof(moecclReplaceInfo_t), set by the caller */
  int32_t n_samples;            /* of all ranks; numbered in the order of ranks */
  const int32_t* placement;     /* [n_samples] new home of each */
  int32_t n_local;              /* samples of this rank */
  const int32_t* local_samples; /* [n_local] those that are here now, in the order of their tokens in out */
  int32_t keep;                 /* 1: all samples stay */
  int32_t moved, moved_nodes;   /* samples that change rank; group of the outermost level */
  /* What the step is expected to save of this combine and, with use_next, the next dispatch: Eq. 5's share as far as
   * measured steps bore it out, less the share of that time that moecclReplaceBegin takes by the clock. Before both
   * have been measured, and with min_gain below 0: Eq. 5 alone. */
  double gain;
  /* Payload bytes of this combine between groups of the topology's outermost level, over all ranks, by the solver's
   * counts (Eq. 3): with every sample where it was, and as placed. */
  uint64_t node_bytes_before, node_bytes_after;
  /* The same as this rank's lists will send them: the sum over ranks is node_bytes_after. */
  uint64_t node_bytes_sent;
  double solve_us;    /* the background thread's time for placement and lists */
  double wait_us;     /* how long the first call that needed them had to wait */
  double measured_us; /* the last moecclReplaceCombine on this rank */
  char algorithm[32];
  double predicted_gain; /* of Eq. 5 alone, of the best placement that was found; 0 in a skipped step */
  double begin_us;       /* the last moecclReplaceBegin on this rank */
  int32_t skipped;       /* 1: Begin exchanged nothing, because re-placing did not pay by the clock; node_bytes_before,
                            node_bytes_after and those of the next layer are then 0 */
  /* With use_next: the same bytes of the next layer's dispatch, as the solver counts them. */
  uint64_t next_bytes_before, next_bytes_after;
} moecclReplaceInfo_t;
/* Waits for the solver. Not collective. */
MOECCL_API moecclResult_t moecclReplaceGetInfo(moecclReplacement_t replacement, moecclReplaceInfo_t* info);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_REPLACE_H_ */
