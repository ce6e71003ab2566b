/* SPDX-License-Identifier: Apache-2.0 */
/* Re-placing combine: combine brings each sample (a run of consecutive tokens of a rank) not back to the rank it came
 * from but to the rank where this layer's combine and the next layer's dispatch cross the fewest slow links (NetMoE).
 * Conventions: types.h. Example: examples/training.
 *
 *   moecclReplaceCreate           once per layer
 *   moecclReplaceBegin            once per step, after moecclRoutingCreate or -Update: every rank learns all ranks'
 *                                 choices, and a thread starts to solve while dispatch and experts run (Algorithm 1,
 *                                 line 9)
 *   moecclReplaceCombine          instead of moecclCombine: the same plan and number of exchanges, but other homes
 *   moecclReplaceCombineBackward  instead of moecclCombineBackward: gradients go from the new homes to the experts
 *
 * moecclDispatch and moecclDispatchBackward do not change: they use the homes from before. Each rank keeps as many
 * samples, and so tokens, as it brought; samples are in the order of their numbers. Every rank solves the same problem
 * to the end by itself. There is no deadline, because ranks with different clocks could see it differently. A hash in
 * the combine's announcement checks that all ranks came to the same placement before any row moves.
 *
 * Residual (Appendix A). A residual connection out[t] = x[t] + combine[t] cannot be added after combine, because x[t]
 * is still at the old home. With `residual` set, combine's input has extra rows (moecclReplaceRows), which
 * moecclReplaceResidual fills.
 *   1: x[t] is the row that dispatch sent. It is added with weight 1 at the rank of t's first expert, costs no
 *     additional row on any link, and reaches the new home even for a token without experts.
 *   2: x[t] is any row of the caller. Models that normalize before the layer need this: dispatch sends norm(x), and the
 *     residual is x, or x plus the output of shared experts. It travels as one more row from the old home to the new
 *     one, and the solver counts that row; tokens that stay send none.
 *
 * Cost. Begin's own time is measured. With mode Solve and min_gain of 0 or more, re-placing must pay off by the clock:
 * the first steps combine both ways in turns, `gain` is the part of the prediction that remains, and samples stay while
 * it is below min_gain. Begin then exchanges nothing for 4 to 64 steps at a time, and combine runs as moecclCombine
 * would. Calls on a stream cannot be timed, so the prediction decides for them.
 *
 * Sums. If rows are fp32 or fp64 and the communicator is deterministic, out[t] has the same bits wherever t goes; with
 * residual 1, Begin then exchanges in every step. */
#ifndef MOECCL_REPLACE_H_
#define MOECCL_REPLACE_H_

#include <moeccl/moe.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct moecclReplacement* moecclReplacement_t;

typedef enum MOECCL_INT {
  moecclReplaceSolve = 0, /* the sample solver chooses (moecclSolveSamples) */
  moecclReplaceKeep = 1,  /* every sample stays, for comparison */
  moecclReplaceGiven = 2  /* moecclReplaceBegin gets the placement */
} moecclReplaceMode_t;

typedef struct {
  size_t size;          /* sizeof(moecclReplaceConfig_t) */
  size_t sample_tokens; /* tokens of a sample; each rank's n_tokens must be a multiple */
  moecclReplaceMode_t mode;
  int32_t residual;     /* 1 or 2: combine's input has rows for the residual, see above; 0: no residual */
  int32_t use_next;     /* 1: moecclReplaceBegin gets the next layer's counts; 2: its choices, token by token */
  double min_gain;      /* least `gain` for which samples move; 0: 0.05; below 0: any predicted gain, untimed */
  int64_t refine_pairs; /* as in moecclSampleProblem_t; the solver's exact stages, whose time grows with the samples,
                           come before them */
} moecclReplaceConfig_t;
#define MOECCL_REPLACE_CONFIG_INIT \
  { sizeof(moecclReplaceConfig_t), 1, moecclReplaceSolve, 0, 0, 0, 0 }

/* This call is collective: all ranks pass the same config. The layer may be destroyed before the replacement. */
MOECCL_API moecclResult_t moecclReplaceCreate(moecclReplacement_t* replacement, moecclMoe_t moe,
                                              const moecclReplaceConfig_t* config);
MOECCL_API moecclResult_t moecclReplaceDestroy(moecclReplacement_t replacement);

/* Begins a step. The call is collective and blocks for one exchange of the choices, 2 k + 1 bytes per token, unless the
 * step is skipped (info.skipped). In a skipped step, only the rank that passed a wrong argument gets the error.
 * `routing` is a routing of the same layer and must not be updated or destroyed before the step's last call here. All
 * tables are read before the call returns.
 * next: the second term of Eq. 5, in the rows that a dispatch with this step's plan would send, if the next layer's
 * experts are placed like this layer's. It is NULL without use_next. With use_next 1 it is next[samples of this
 * rank][n_experts], the tokens of each sample for each expert of the next layer, as moecclPredictorApply predicts them.
 * A plan that deduplicates sends one row for several choices of a token. Counts do not show this, so the same share of
 * choices is assumed to share rows as in this layer. With use_next 2 it is next[n_tokens][k], each token's experts in
 * the next layer in the form that moecclRoutingCreate takes, known or predicted token by token; rows are then exact.
 * The rows of a sample in this combine and the next dispatch together are at most 2^30 - 1.
 * placement[samples of all ranks]: the new home of each sample, the same on all ranks and with as many samples on each
 * rank as now; read in mode Given, else NULL. */
MOECCL_API moecclResult_t moecclReplaceBegin(moecclReplacement_t replacement, moecclRouting_t routing,
                                             const int32_t* next, const int32_t* placement);
/* Sets *n_rows to the number of rows in combine's input in this step: the rows of dispatch's output, then the
 * residual's (residual 2: one per token of this rank, in token order). The call does not wait. */
MOECCL_API moecclResult_t moecclReplaceRows(moecclReplacement_t replacement, size_t* n_rows);
/* Puts the residual into combine's input in[n_rows, row]. x[T, row] has this rank's tokens (residual 1: as given to
 * dispatch), and dispatched[R, row] is dispatch's output (residual 2: not read, may be NULL). With ExpertMajor the call
 * fills the rows after the first R. With Rows and residual 1 it also adds to the first R, in `type`, so the experts'
 * outputs must be there before. All buffers that it reads or writes are of one kind of memory. It blocks, runs after
 * the default stream on CUDA memory, and is not collective. */
MOECCL_API moecclResult_t moecclReplaceResidual(moecclReplacement_t replacement, const void* x, const void* dispatched,
                                                void* in);
/* out[T, row] for the tokens of the samples that are now on this rank: moecclCombine's sums, with the residual if
 * configured. The input is in[n_rows, row], which must not overlap out. The call waits for the solver and is
 * collective. */
MOECCL_API moecclResult_t moecclReplaceCombine(moecclReplacement_t replacement, const void* in, void* out,
                                               moecclStream_t stream);
/* The counterpart of moecclCombineBackward: grad_out[T, row] is for the tokens that are now on this rank, grad_in has
 * the shape [n_rows, row], and grad_weight[T][k] is for the tokens that this rank brought (its gate chose the weights).
 */
MOECCL_API moecclResult_t moecclReplaceCombineBackward(moecclReplacement_t replacement, const void* grad_out,
                                                       void* grad_in, const void* in, float* grad_weight,
                                                       moecclStream_t stream);
/* The residual's way back. Adds its rows of grad_in[n_rows, row] to grad_dispatched[R, row], which then goes into
 * moecclDispatchBackward, and to grad_x[T, row], moecclDispatchBackward's result for the tokens that this rank brought.
 * Either may be NULL: call it with the first before moecclDispatchBackward and with the second after it. grad_x gets
 * all tokens with residual 2 and in skipped steps, otherwise those without experts. The call blocks and is not
 * collective. */
MOECCL_API moecclResult_t moecclReplaceResidualBackward(moecclReplacement_t replacement, const void* grad_in,
                                                        void* grad_dispatched, void* grad_x);

/* The decision of a step. The replacement owns all arrays; they stay valid until the next moecclReplaceBegin. */
typedef struct {
  size_t size;                  /* sizeof(moecclReplaceInfo_t), set by the caller */
  int32_t n_samples;            /* of all ranks; numbered in the order of ranks */
  const int32_t* placement;     /* [n_samples] new home of each */
  int32_t n_local;              /* samples of this rank */
  const int32_t* local_samples; /* [n_local] the samples that are now here, in the order of their tokens in out */
  int32_t keep;                 /* 1: all samples stay */
  int32_t moved, moved_nodes;   /* samples that change their rank; samples that change their outermost-level group */
  /* The share that the step is expected to save of this combine's time and, with use_next, the next dispatch's: Eq. 5's
   * share as far as measured steps confirmed it, less the measured share of that time that moecclReplaceBegin takes.
   * Before both have been measured, and with min_gain below 0, it is Eq. 5 alone. */
  double gain;
  /* Payload bytes of this combine between groups of the topology's outermost level, over all ranks, by the solver's
   * counts (Eq. 3): with every sample where it was, and with every sample as placed. */
  uint64_t node_bytes_before, node_bytes_after;
  /* The bytes that this rank's lists will send; the sum over ranks is node_bytes_after. */
  uint64_t node_bytes_sent;
  double solve_us;    /* the background thread's time for placement and lists */
  double wait_us;     /* how long the first call that needed them waited */
  double measured_us; /* of the last moecclReplaceCombine on this rank */
  char algorithm[32];
  double predicted_gain; /* by Eq. 5 alone, of the best placement that was found; 0 in a skipped step */
  double begin_us;       /* time of the last moecclReplaceBegin on this rank */
  int32_t skipped;       /* 1: Begin exchanged nothing, because re-placing did not pay off by the clock;
                            node_bytes_before, node_bytes_after and those of the next layer are then 0 */
  /* With use_next: the same bytes for the next layer's dispatch, as the solver counts them. */
  uint64_t next_bytes_before, next_bytes_after;
} moecclReplaceInfo_t;
/* Waits for the solver. This call is not collective. */
MOECCL_API moecclResult_t moecclReplaceGetInfo(moecclReplacement_t replacement, moecclReplaceInfo_t* info);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_REPLACE_H_ */
