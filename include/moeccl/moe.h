/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Mixture-of-Experts: dispatch and combine of tokens by top-k routing, deduplicated at every level of the topology
 * (HierMoE, Section III). Conventions: types.h.
 *
 *   moecclMoeCreate      once per layer shape
 *   moecclRoutingCreate  once per step, from top-k indices and weights (moecclRoutingUpdate reuses its memory)
 *   moecclDispatch       tokens -> expert rows           moecclDispatchBackward  gradient of expert rows -> of tokens
 *   moecclCombine        expert rows -> tokens           moecclCombineBackward   gradient of tokens -> of expert rows
 *
 * In the shapes below, T is the number of tokens on this rank, k = top_k, a row has hidden_bytes bytes, and R is the
 * number of rows in the layer's layout (moecclRoutingGetInfo). The order of rows never depends on the plan: Rows are
 * sorted by (source rank, token index), ExpertMajor by local expert and then by (source rank, token index).
 *
 * A buffer that a call writes must not overlap another buffer of the call, because rows arrive while others are still
 * to be sent: a call with such buffers returns moecclInvalidArgument.
 */
#ifndef MOECCL_MOE_H_
#define MOECCL_MOE_H_

#include <moeccl/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum MOECCL_INT {
  /* Each token arrives once, however many of this rank's experts it chose: [n_unique, row]. The caller applies experts
   * and weights; combine takes one row per received row, already weighted and summed over local experts. */
  moecclLayoutRows = 0,
  /* Rows are grouped by local expert, ascending: [R, row]. Each group is sorted by (source rank, token), aligned and
   * zero-padded as configured. Combine takes the experts' plain outputs in the same shape and applies the weights. */
  moecclLayoutExpertMajor = 1
} moecclMoeLayout_t;

typedef struct {
  size_t size;                /* sizeof(moecclMoeConfig_t) */
  size_t hidden_bytes;        /* bytes per row, 1 to 4294967295; combine needs a multiple of the type's size */
  moecclDataType_t type;      /* element type of rows in combine; dispatch moves bytes */
  int32_t top_k;              /* experts chosen per token, 1..n_experts and at most 64 */
  int32_t n_experts;          /* 1..65535 */
  const int32_t* expert_rank; /* [n_experts] owner of each expert; NULL: contiguous, as even as possible */
  size_t max_tokens;          /* most tokens that any rank brings to a step */
  moecclMoeLayout_t layout;
  int32_t align_rows;      /* ExpertMajor: each expert's group starts at a multiple of this; 0 means 1. The Rows layout
                              does not accept more than 1 */
  int32_t capacity;        /* most tokens that one rank sends to one expert; 0: no limit. The first ones in token order
                              are kept, the others are dropped and counted */
  size_t memory_cap_bytes; /* cap on this layer's staging and tables on this rank, in host and device memory; 0:
                              MOECCL_MOE_MEMORY_CAP or none. Staging takes half of it or, if the layer needs more
                              staging, all that the tables of any routing leave free */
  const char* algorithm;   /* "flat", "2dh", "hier:1", "hier:2", ...: see moecclMoeExplain. "auto" (NULL or ""): what
                              moecclPlanForce names for moecclOpDispatch, if this layer can run it, or else the best for
                              each routing. "flat:ordered": as flat, but out[t] of combine is summed at t's rank in the
                              order of t's choices and rounded once, in layout Rows with a rank's row at its last one;
                              without moecclRoutingUpdateOnStream and replace.h */
  size_t scale_bytes;      /* bytes of scales per row in moecclDispatchScaled; 0: the layer has none */
  size_t scaled_row_bytes; /* bytes of such a row without its scales (fp8 rows of a bf16 layer have half of
                              hidden_bytes); 0: hidden_bytes */
  size_t staging_bytes;    /* for moecclMoeCheck and -QuerySize: as in the future communicator's moecclConfig_t; 0:
                              MOECCL_STAGING_BYTES or its default, where the groups of the topology's level named node
                              or host, or else the outermost groups, count as hosts, which have room for all of it. For
                              moecclMoeCreate: 0 or the communicator's value */
  int32_t deterministic;   /* for moecclMoeCheck and -QuerySize: 1 if the communicator will have deterministic sums. For
                              moecclMoeCreate: 0, or 1 with such a communicator */
  int32_t trials;          /* 0: updates may try plans with similar prices, and measured times correct the prices
                              (MOECCL_TRIALS=0 turns this off everywhere). -1: only prices choose, so equal routings run
                              by equal plans. Without `deterministic`, another plan rounds sums in another order */
} moecclMoeConfig_t;
#define MOECCL_MOE_CONFIG_INIT \
  { sizeof(moecclMoeConfig_t), 0, moecclBfloat16, 0, 0, NULL, 0, moecclLayoutRows, 0, 0, 0, NULL, 0, 0, 0, 0, 0 }

/* Checks, without a communicator and before anything expensive, whether a layer of this shape can run on n_ranks ranks
 * of `topology` (a synthetic string, a file, or NULL for flat). On failure message[message_bytes] names the limit and
 * the remedy; message may be NULL. moecclMoeCheck, moecclMoeQuerySize and moecclMoeCreate on a communicator of that
 * kind accept and refuse the same layers. */
MOECCL_API moecclResult_t moecclMoeCheck(const moecclMoeConfig_t* config, int n_ranks, const char* topology,
                                         char* message, size_t message_bytes);
/* Gets the most bytes that the layer will hold on one rank for any routing: staging and routing tables, but not the
 * caller's buffers. If there is a CUDA driver, this includes the device memory for choices and tables. It assumes one
 * routing at a time. For a config without a cap, a memory_cap_bytes of this size lets the layer run every routing. The
 * arguments are those of moecclMoeCheck. */
MOECCL_API moecclResult_t moecclMoeQuerySize(const moecclMoeConfig_t* config, int n_ranks, const char* topology,
                                             size_t* bytes);

/* Creates a layer. This call is collective: all ranks pass the same config. */
MOECCL_API moecclResult_t moecclMoeCreate(moecclMoe_t* moe, moecclComm_t comm, const moecclMoeConfig_t* config);
MOECCL_API moecclResult_t moecclMoeDestroy(moecclMoe_t moe);

/* Creates a routing. The call is collective and blocks until the routing tables are exchanged. topk_index[n_tokens][k]
 * has the expert of each choice, -1 for none; a token's experts are distinct. topk_weight[n_tokens][k] may be NULL,
 * which means that all weights are 1; among ranks with tokens, all or none pass NULL, otherwise the result is
 * moecclMismatch. Both are read before the call returns. n_tokens may differ between ranks and be 0. With algorithm
 * "auto" the call also chooses the plan for this routing, as HierMoE's Algorithm 1 does, but by the library's own
 * price. moecclMoeExplain shows the d* of the paper's Eq. 1 to 6 beside it. */
MOECCL_API moecclResult_t moecclRoutingCreate(moecclRouting_t* routing, moecclMoe_t moe, const int32_t* topk_index,
                                              const float* topk_weight, size_t n_tokens);
/* Does the same for an existing routing. On failure the routing is empty, unless the call was refused because it is
 * part of a group: then the routing is as before. */
MOECCL_API moecclResult_t moecclRoutingUpdate(moecclRouting_t routing, const int32_t* topk_index,
                                              const float* topk_weight, size_t n_tokens);
/* Does the same in the order of `stream`, a CUDA stream. When the stream gets there, kernels read the choices, exchange
 * them with the other ranks' choices and make the tables; the host waits for nothing. All buffers are device memory of
 * n_tokens rows. n_tokens_device, in device memory or NULL, says how many of these rows are tokens. Either all ranks
 * pass NULL for topk_weight or none does, even a rank without tokens. The routing keeps the plan of its last
 * moecclRoutingCreate or -Update, whose choices only need to be typical.
 * The first call after moecclRoutingCreate or -Update makes room for any choices of max_tokens tokens: it is
 * collective, blocks, and cannot be captured; all later calls can. Later operations on this routing, including updates,
 * must be on the same stream or ordered after it by events. They take CUDA memory with room for max_tokens and
 * most_rows rows (moecclRoutingGetDeviceInfo, which also reports the actual numbers), and cannot compute gradients of
 * the weights. moecclRoutingGetInfo has no information until the next moecclRoutingUpdate; if a graph with an update is
 * replayed after that, only the device has it again. If choices are wrong, the next operation fails on all ranks, and
 * the error text names the rank and the token. Returns moecclUnsupported without the persistent kernel. */
MOECCL_API moecclResult_t moecclRoutingUpdateOnStream(moecclRouting_t routing, const int32_t* topk_index,
                                                      const float* topk_weight, size_t n_tokens,
                                                      const uint64_t* n_tokens_device, moecclStream_t stream);
MOECCL_API moecclResult_t moecclRoutingDestroy(moecclRouting_t routing);

/* Traffic of one level of the chosen plan. Levels are listed outermost first. */
typedef struct {
  char name[32];  /* the topology's name for the level */
  uint64_t rows;  /* payload rows that this rank sends across this level in one dispatch: with deduplication, the number
                     of distinct (token, group) pairs (HierMoE Eq. 7) */
  uint64_t bytes; /* payload bytes of those rows */
  uint64_t metadata_bytes; /* bytes of routing records that this rank sent across this level */
} moecclLevelTraffic_t;
#define MOECCL_MAX_LEVELS 8

/* A routing as this rank sees it. The routing owns all arrays; they stay valid until it is updated or destroyed. */
typedef struct {
  size_t size;     /* sizeof(moecclRoutingInfo_t), set by the caller */
  size_t n_tokens; /* T */
  size_t n_rows;   /* R: rows that dispatch writes and combine reads, padding included */
  size_t n_unique; /* distinct tokens received */
  int32_t n_local_experts;
  const int32_t* local_experts; /* [n_local_experts] global expert numbers, ascending unless a swap
                                   (swap.h) has moved experts: then by slot */
  const int32_t* expert_counts; /* [n_local_experts] tokens per local expert, without padding */
  const int64_t*
      expert_offsets;        /* [n_local_experts + 1] ExpertMajor: first row of each expert's group; NULL otherwise */
  const int32_t* row_source; /* [n_rows] source rank of each row; -1 for padding */
  const int32_t* row_token;  /* [n_rows] token index at the source rank; -1 for padding */
  const int64_t* choice_offsets; /* Rows layout: [n_rows + 1] into the next two arrays; NULL otherwise */
  const int32_t* choice_expert;  /* each row's local expert index (0..n_local_experts-1), ascending */
  const float* choice_weight;    /* and its weight. ExpertMajor: [n_rows], each row's weight (0 for padding) */
  const int32_t* drop_counts;    /* [n_experts] tokens of this rank that capacity dropped, per expert */
  uint64_t n_dropped;            /* their sum */
  uint64_t logical_bytes;        /* T * k * hidden_bytes: what a plain AlltoAll would carry from this rank */
  int32_t n_levels;
  moecclLevelTraffic_t levels[MOECCL_MAX_LEVELS];
  char algorithm[32];                                 /* the plan that will run, such as "hier:2" */
  int32_t emulated;                                   /* 1 when links are paced */
  double predicted_dispatch_us, predicted_combine_us; /* from the profile; 0 when unknown */
  double measured_dispatch_us, measured_combine_us;   /* of the last run on this rank; 0 before the first */
  const uint64_t* rank_tokens;                        /* [ranks] T of each rank */
} moecclRoutingInfo_t;
MOECCL_API moecclResult_t moecclRoutingGetInfo(moecclRouting_t routing, moecclRoutingInfo_t* info);

/* The same information where kernels can read it, for CUDA graphs. A captured operation on this routing, forward or
 * backward, is one kernel, and each replay uses the tables of the routing's last update, which keeps the captured
 * plan. Buffers therefore need room for the most that an update can bring: max_tokens and most_rows rows. The routing
 * must outlive the graph, and it must not be updated while a replay is in flight. A replay after a failed update fails
 * on all ranks. */
typedef struct {
  size_t size;      /* sizeof(moecclRoutingDeviceInfo_t), set by the caller */
  size_t most_rows; /* largest R of any routing of this layer on this rank, padding included */
  int32_t n_local_experts;
  /* In device memory, for the last update. The addresses stay the same until the routing is destroyed. */
  const uint64_t* n_tokens; /* one number each, as in moecclRoutingInfo_t */
  const uint64_t* n_rows;   /* R */
  const uint64_t* n_unique;
  const int32_t* expert_counts;  /* [n_local_experts] */
  const int64_t* expert_offsets; /* [n_local_experts + 1]; NULL except for ExpertMajor */
} moecclRoutingDeviceInfo_t;
/* Returns moecclUnsupported if operations on CUDA memory do not run on the persistent kernel and so cannot be captured.
 */
MOECCL_API moecclResult_t moecclRoutingGetDeviceInfo(moecclRouting_t routing, moecclRoutingDeviceInfo_t* info);

/* out[R, row] = the rows of in[T, row] that this rank's experts need. The call is collective. */
MOECCL_API moecclResult_t moecclDispatch(moecclRouting_t routing, const void* in, void* out, moecclStream_t stream);
/* Dispatches quantized rows: in[T, scaled_row_bytes] and in_scales[T, scale_bytes] arrive as out[R, scaled_row_bytes]
 * and out_scales[R, scale_bytes], in the same order; padding is zeros in both. This is a single operation, in which
 * scales travel with their rows. Nothing is computed, so rows and scales may have any type. All four buffers must be of
 * one kind, host or CUDA memory. Returns moecclInvalidUsage if the layer was created with scale_bytes 0. The call is
 * collective. */
MOECCL_API moecclResult_t moecclDispatchScaled(moecclRouting_t routing, const void* in, const void* in_scales,
                                               void* out, void* out_scales, moecclStream_t stream);
/* out[T, row] = for each token, the sum over its experts of weight * row (ExpertMajor) or of the given rows (Rows).
 * Partial sums are formed at every level in fp32 (fp64 for fp64) and rounded to `type` for the wire. Rows of integers
 * are weighted in fp64; each product is truncated towards 0, and the sums wrap. A token without experts gets zeros. The
 * input is in[R, row]; its padding is not read. The call is collective. */
MOECCL_API moecclResult_t moecclCombine(moecclRouting_t routing, const void* in, void* out, moecclStream_t stream);
/* grad_in[T, row] = for each token, the plain sum of grad_out[R, row] over its rows. The call is collective. */
MOECCL_API moecclResult_t moecclDispatchBackward(moecclRouting_t routing, const void* grad_out, void* grad_in,
                                                 moecclStream_t stream);
/* grad_in[R, row] = the gradient of combine's input: grad_out[T, row] dispatched, times the weight for ExpertMajor;
 * padding is zeros. If grad_weight[T][k] is not NULL (ExpertMajor only), in[R, row] must be the tensor that combine was
 * given, and the call also computes the gradient of the weights: <grad_out[t], in of that choice> in fp32, and 0 where
 * there is no expert. The call is collective, and either all ranks pass grad_weight or none does; a rank without tokens
 * may pass any pointer other than NULL. With grad_weight the call blocks even on a stream; `in` is then of the same
 * kind of memory as grad_in, and grad_weight may be in either. */
MOECCL_API moecclResult_t moecclCombineBackward(moecclRouting_t routing, const void* grad_out, void* grad_in,
                                                const void* in, float* grad_weight, moecclStream_t stream);

/* Writes a page for a person into text[text_bytes]: the candidates with predicted times, the choice and the reason,
 * rows and bytes per level, predicted and measured times side by side, and this rank's steps. *needed (may be NULL)
 * gets the full length + 1. This call is not collective. */
MOECCL_API moecclResult_t moecclMoeExplain(moecclRouting_t routing, char* text, size_t text_bytes, size_t* needed);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_MOE_H_ */
