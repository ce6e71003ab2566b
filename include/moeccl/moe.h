/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Mixture-of-Experts: dispatch and combine of tokens by top-k routing, deduplicated at every level of the topology
 * (HierMoE, Section III). Conventions: types.h.
 *
 *   moecclMoeCreate      once per layer shape
 *   moecclRoutingCreate  once per step, from top-k indices and weights (moecclRoutingUpdate reuses the memory)
 *   moecclDispatch       tokens -> expert rows           moecclDispatchBackward  gradient of expert rows -> of tokens
 *   moecclCombine        expert rows -> tokens           moecclCombineBackward   gradient of tokens -> of expert rows
 *
 * T tokens on this rank, k = top_k, row = hidden_bytes bytes, R = rows in the layer's layout (moecclRoutingGetInfo).
 * The order of rows never depends on the plan: received rows are sorted by (source rank, token index).
 */
#ifndef MOECCL_MOE_H_
#define MOECCL_MOE_H_

#include <moeccl/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum MOECCL_INT {
  /* Each token once, however many of this rank's experts it chose: [n_unique, row]. The caller applies experts and
   * weights; combine takes one row per received row, already weighted and summed over local experts. */
  moecclLayoutRows = 0,
  /* Grouped by local expert, ascending: [R, row], each group sorted by (source rank, token), aligned and zero-padded as
   * configured. Combine takes the experts' plain outputs in the same shape and applies the weights. */
  moecclLayoutExpertMajor = 1
} moecclMoeLayout_t;

typedef struct {
  size_t size;                /* sizeof(moecclMoeConfig_t) */
  size_t hidden_bytes;        /* bytes of a row, any number >= 1; for combine a multiple of the type's size */
  moecclDataType_t type;      /* element type of rows in combine; dispatch moves bytes */
  int32_t top_k;              /* experts chosen per token, 1..n_experts and at most 64 */
  int32_t n_experts;          /* 1..65535 */
  const int32_t* expert_rank; /* [n_experts] owner of each expert; NULL: contiguous, as even as possible */
  size_t max_tokens;          /* most tokens that any rank brings to a step */
  moecclMoeLayout_t layout;
  int32_t align_rows;      /* ExpertMajor: each expert's group starts at a multiple of this; 0 means 1. With the Rows
                              layout more than 1 is an error */
  int32_t capacity;        /* most tokens that one rank sends to one expert; 0: no limit. The first in token order
                              stay, the rest are dropped and counted */
  size_t memory_cap_bytes; /* cap on staging + tables of this layer on this rank, in host and device memory; 0:
                              MOECCL_MOE_MEMORY_CAP or none. Staging takes half of it, or, where the layer needs more,
                              what the tables of any routing leave */
  const char* algorithm;   /* "auto" (NULL), "flat", "2dh", "hier:1", "hier:2", ...: see moecclMoeExplain */
  size_t scale_bytes;      /* bytes of scales of a row in moecclDispatchScaled; 0: the layer has none */
  size_t scaled_row_bytes; /* bytes of such a row without its scales (fp8 rows of a bf16 layer have half of
                              hidden_bytes); 0: hidden_bytes */
  size_t staging_bytes;    /* moecclMoeCheck and -QuerySize: that the communicator will have (moecclConfig_t); 0:
                              MOECCL_STAGING_BYTES or its default. moecclMoeCreate: 0, or the communicator's */
  int32_t deterministic;   /* the same: 1 for a communicator with deterministic sums. moecclMoeCreate: 0, or 1 with
                              such a communicator */
  int32_t trials;          /* 0: updates may try plans whose prices lie close, and what steps took corrects the prices
                              (MOECCL_TRIALS=0 turns it off everywhere). -1: prices alone choose, so equal routings run
                              by equal plans; without `deterministic`, other plans round sums in another order */
} moecclMoeConfig_t;
#define MOECCL_MOE_CONFIG_INIT \
  { sizeof(moecclMoeConfig_t), 0, moecclBfloat16, 0, 0, NULL, 0, moecclLayoutRows, 0, 0, 0, NULL, 0, 0, 0, 0, 0 }

/* Says, before anything expensive and without a communicator, whether a layer of this shape can run on n_ranks ranks of
 * `topology` (a synthetic string, a file, or NULL for flat). On failure message[message_bytes] names the limit and
 * the remedy. message may be NULL. moecclMoeCheck, moecclMoeQuerySize and moecclMoeCreate on a communicator of that
 * kind accept and refuse the same layers. */
MOECCL_API moecclResult_t moecclMoeCheck(const moecclMoeConfig_t* config, int n_ranks, const char* topology,
                                         char* message, size_t message_bytes);
/* The most bytes that the layer will hold on one rank (staging and routing tables, not the caller's buffers), for any
 * routing; where there is a CUDA driver, with what choices and tables take on the device. One routing at a time.
 * For a config without a cap, this many memory_cap_bytes let the layer run every routing. Same arguments as
 * moecclMoeCheck. */
MOECCL_API moecclResult_t moecclMoeQuerySize(const moecclMoeConfig_t* config, int n_ranks, const char* topology,
                                             size_t* bytes);

/* Collective: all ranks give the same config. */
MOECCL_API moecclResult_t moecclMoeCreate(moecclMoe_t* moe, moecclComm_t comm, const moecclMoeConfig_t* config);
MOECCL_API moecclResult_t moecclMoeDestroy(moecclMoe_t moe);

/* Collective. topk_index[n_tokens][k]: expert of each choice, -1 for none; a token's experts are distinct.
 * topk_weight[n_tokens][k], or NULL for all ones. Read before the call returns. n_tokens may differ between ranks and
 * be 0. Blocks until the routing tables are exchanged; with algorithm "auto" this also chooses the plan for this
 * routing (HierMoE Eq. 6, Algorithm 1). */
MOECCL_API moecclResult_t moecclRoutingCreate(moecclRouting_t* routing, moecclMoe_t moe, const int32_t* topk_index,
                                              const float* topk_weight, size_t n_tokens);
/* The same into an existing routing. On failure the routing is empty. */
MOECCL_API moecclResult_t moecclRoutingUpdate(moecclRouting_t routing, const int32_t* topk_index,
                                              const float* topk_weight, size_t n_tokens);
/* The same in the order of `stream`, a CUDA stream: kernels read the choices when the stream gets there, exchange them
 * with those of the other ranks and make the tables, and the host waits for nothing. All buffers are device memory, of
 * n_tokens rows; n_tokens_device, in device memory or NULL, says how many of these are tokens. topk_weight is NULL on
 * all ranks or on none, also where there are no tokens. The routing keeps the plan of its last moecclRoutingCreate or
 * -Update, whose choices need only be typical. The first call after one of these makes room for any choices of
 * max_tokens tokens: it is collective, blocks, and cannot be captured; all later calls can. What follows on this
 * routing, further updates too, is on the same stream, or ordered after it by events, takes CUDA memory with room for
 * max_tokens and most_rows rows (moecclRoutingGetDeviceInfo, which says how many there are), and cannot ask for
 * gradients of the weights. moecclRoutingGetInfo has nothing to say until the next moecclRoutingUpdate; when a graph
 * with an update is replayed after that, only the device knows again. Choices that are wrong fail the operation that
 * follows, on all ranks, with a sentence that names rank and token. moecclUnsupported without the persistent kernel. */
MOECCL_API moecclResult_t moecclRoutingUpdateOnStream(moecclRouting_t routing, const int32_t* topk_index,
                                                      const float* topk_weight, size_t n_tokens,
                                                      const uint64_t* n_tokens_device, moecclStream_t stream);
MOECCL_API moecclResult_t moecclRoutingDestroy(moecclRouting_t routing);

/* One level of the chosen plan, outermost first. */
typedef struct {
  char name[32];  /* the topology's name for the level */
  uint64_t rows;  /* payload rows that this rank sends across this level in one dispatch: with dedup, the number of
                     distinct (token, group) pairs (HierMoE Eq. 7) */
  uint64_t bytes; /* payload bytes of those rows */
  uint64_t metadata_bytes; /* bytes of routing records that this rank sent across this level */
} moecclLevelTraffic_t;
#define MOECCL_MAX_LEVELS 8

/* What a routing means on this rank. Pointers are the routing's and live until it is updated or destroyed. */
typedef struct {
  size_t size;     /* sizeof(moecclRoutingInfo_t), set by the caller */
  size_t n_tokens; /* T */
  size_t n_rows;   /* R: rows that dispatch writes and combine reads, padding included */
  size_t n_unique; /* distinct tokens received */
  int32_t n_local_experts;
  const int32_t* local_experts; /* [n_local_experts] global expert numbers, ascending */
  const int32_t* expert_counts; /* [n_local_experts] tokens per local expert, without padding */
  const int64_t*
      expert_offsets;        /* [n_local_experts + 1] ExpertMajor: first row of each expert's group; NULL otherwise */
  const int32_t* row_source; /* [n_rows] source rank of each row; -1 for padding */
  const int32_t* row_token;  /* [n_rows] token index on the source rank; -1 for padding */
  const int64_t* choice_offsets; /* Rows layout: [n_rows + 1] into the next two arrays; NULL otherwise */
  const int32_t* choice_expert;  /* each row's local expert index (0..n_local_experts-1), ascending */
  const float* choice_weight;    /* and its weight. ExpertMajor: [n_rows], the row's weight (0 for padding) */
  const int32_t* drop_counts;    /* [n_experts] tokens of this rank that capacity dropped, per expert */
  uint64_t n_dropped;            /* their sum */
  uint64_t logical_bytes;        /* T * k * hidden_bytes: what a plain AlltoAll would carry from this rank */
  int32_t n_levels;
  moecclLevelTraffic_t levels[MOECCL_MAX_LEVELS];
  char algorithm[32];                                 /* the plan that will run, such as "hier:2" */
  int32_t emulated;                                   /* 1 when links are paced */
  double predicted_dispatch_us, predicted_combine_us; /* under the profile; 0 when unknown */
  double measured_dispatch_us, measured_combine_us;   /* the last run on this rank; 0 before the first */
} moecclRoutingInfo_t;
MOECCL_API moecclResult_t moecclRoutingGetInfo(moecclRouting_t routing, moecclRoutingInfo_t* info);

/* The same where kernels can read it, for CUDA graphs. A captured operation on this routing, forward or backward, is
 * one node, and each replay uses the tables of the routing's last update, which keeps to the captured plan. So buffers
 * must have room for the most that an update can bring: max_tokens and most_rows rows. The routing must outlive the
 * graph, and no replay may be under way while it is updated. A replay after an update that failed fails all ranks. */
typedef struct {
  size_t size;      /* sizeof(moecclRoutingDeviceInfo_t), set by the caller */
  size_t most_rows; /* R of any routing of this layer on this rank, padding included */
  int32_t n_local_experts;
  /* In device memory, of the last update; the addresses stay until the routing is destroyed. */
  const uint64_t* n_tokens; /* one number each, as in moecclRoutingInfo_t */
  const uint64_t* n_rows;   /* R */
  const uint64_t* n_unique;
  const int32_t* expert_counts;  /* [n_local_experts] */
  const int64_t* expert_offsets; /* [n_local_experts + 1]; NULL but for ExpertMajor */
} moecclRoutingDeviceInfo_t;
/* moecclUnsupported where operations on CUDA memory do not run on the persistent kernel, and so cannot be captured. */
MOECCL_API moecclResult_t moecclRoutingGetDeviceInfo(moecclRouting_t routing, moecclRoutingDeviceInfo_t* info);

/* out[R, row] = the rows of in[T, row] that this rank's experts need. Collective. */
MOECCL_API moecclResult_t moecclDispatch(moecclRouting_t routing, const void* in, void* out, moecclStream_t stream);
/* Dispatch of quantised rows: in[T, scaled_row_bytes] and in_scales[T, scale_bytes] arrive as out[R, scaled_row_bytes]
 * and out_scales[R, scale_bytes], in the same order; padding is zeros in both. One operation: scales travel with their
 * rows. Nothing is computed, so rows and scales may be of any type. All four buffers are of one kind, host or CUDA
 * memory. moecclInvalidUsage when the layer was created with scale_bytes 0. Collective. */
MOECCL_API moecclResult_t moecclDispatchScaled(moecclRouting_t routing, const void* in, const void* in_scales,
                                               void* out, void* out_scales, moecclStream_t stream);
/* out[T, row]: for each token the sum over its experts of weight * row (ExpertMajor) or of the given rows (Rows).
 * Partial sums are formed at every level, in fp32 (fp64 for fp64), rounded to `type` for the wire. Rows of integers are
 * weighted in fp64, each product is cut towards 0, and their sums wrap. A token without experts gets zeros.
 * in[R, row]; padding is not read. Collective. */
MOECCL_API moecclResult_t moecclCombine(moecclRouting_t routing, const void* in, void* out, moecclStream_t stream);
/* grad_in[T, row] = for each token the plain sum of grad_out[R, row] over its rows. Collective. */
MOECCL_API moecclResult_t moecclDispatchBackward(moecclRouting_t routing, const void* grad_out, void* grad_in,
                                                 moecclStream_t stream);
/* grad_in[R, row] = the gradient of combine's input: grad_out[T, row] dispatched, times the weight for ExpertMajor;
 * padding is zeros. With in[R, row], the tensor that combine was given, and grad_weight[T][k] not NULL (ExpertMajor
 * only), also the gradient of the weights, <grad_out[t], in of that choice> in fp32; 0 where there is no expert.
 * Collective: all ranks pass grad_weight or none does; a rank without tokens passes any pointer that is not NULL. With
 * grad_weight the call blocks, also on a stream. */
MOECCL_API moecclResult_t moecclCombineBackward(moecclRouting_t routing, const void* grad_out, void* grad_in,
                                                const void* in, float* grad_weight, moecclStream_t stream);

/* Writes a page for a person into text[text_bytes]: the candidates with predicted times, the choice and why, rows and
 * bytes per level, predicted beside measured, the steps of this rank. *needed (may be NULL) gets the full length + 1.
 * Not collective. */
MOECCL_API moecclResult_t moecclMoeExplain(moecclRouting_t routing, char* text, size_t text_bytes, size_t* needed);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_MOE_H_ */
