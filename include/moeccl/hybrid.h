/* SPDX-License-Identifier: Apache-2.0 */
/* Hybrid expert and data transmission (HybridEP): inside an expert domain the experts travel, between domains the
 * tokens do, always to the rank of the same offset (Algorithm 1). A domain of size 1 at every level is plain expert
 * parallelism. Conventions: types.h.
 *
 *   moecclHybridCreate      once per placement: domain sizes given, or chosen by the stream model (Eq. 1-13)
 *   moecclHybridMoeCreate   a MoE layer (moe.h) whose tokens go to the holder with the same offset
 *   moecclHybridGather      every rank gets the experts of its domain, in the order of that layer's local experts
 *   moecclHybridReduce      its backward: the gradients of gathered experts are summed at their owners
 *
 * Trees may be uneven: where a rank of the same offset does not exist, the member at that offset modulo the group's
 * size stands for it. */
#ifndef MOECCL_HYBRID_H_
#define MOECCL_HYBRID_H_

#include <moeccl/moe.h>
#include <moeccl/plan.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct moecclHybrid* moecclHybrid_t; /* who holds which experts besides their owner */

typedef struct {
  size_t size;                /* sizeof(moecclHybridConfig_t) */
  int32_t n_experts;          /* 1..65535 */
  const int32_t* expert_rank; /* [n_experts] owner of each expert; NULL: contiguous, as even as possible */
  int32_t n_levels;           /* entries of domain; ignored when it is NULL */
  const int32_t* domain; /* [n_levels] S_ED of each level of the communicator's topology, outermost first. NULL: the
                            sizes of least latency by the stream model, from the figures below and the links of
                            topology and profile; all 1 when nothing gains */
  double data_bytes;     /* D: a rank's tokens times top_k times row, for one of the two AlltoAlls */
  double expert_bytes;   /* P_E: all experts of a rank, before compression */
  double pre_expert_s;   /* computation before the experts, which hides the AllGather */
  double compression;    /* expert bytes are divided by it; 0: 1 */
  double min_gain;       /* of the model's latency over plain expert parallelism; 0: any */
  /* With top_k the sizes are those of least time of a whole step of this library (moecclDomainProblem_t in solve.h,
   * which says what each is); latencies are those of topology and profile. 0: Eq. 8 of the forward pass. */
  int32_t top_k, forward_only;
  double expert_s, backward_s, gradient_bytes, encode_bandwidth, decode_bandwidth;
} moecclHybridConfig_t;
#define MOECCL_HYBRID_CONFIG_INIT \
  { sizeof(moecclHybridConfig_t), 0, NULL, 0, NULL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* Pointers are the handle's and live as long as it does. */
typedef struct {
  size_t size; /* sizeof(moecclHybridInfo_t), set by the caller */
  int32_t n_levels;
  int32_t domain[MOECCL_MAX_LEVELS]; /* S_ED of each level */
  int32_t n_own, n_held;
  const int32_t* own_experts;  /* [n_own] global numbers, ascending: the order of moecclHybridGather's `own` */
  const int32_t* held_experts; /* [n_held] the same of `held`, and the local experts of moecclHybridMoeCreate's layer */
  int32_t gather_links;        /* ranks to which this rank sends experts in one gather (Table VII's AG) */
  int32_t token_links;         /* ranks to which it may send tokens in one dispatch, level by level (A2A) */
  double before_us, after_us;  /* the model's latency with all sizes 1 and with these; 0: no figures were given */
  double all_gather_us, all_to_all_us;     /* of these sizes; all_to_all: both */
  double measured_gather_us;               /* the last gather on this rank; 0 before the first */
  double backward_us, return_us, codec_us; /* of these sizes, with top_k; see moecclDomainAnswer_t */
} moecclHybridInfo_t;

/* Collective: all ranks give the same config; sizes that differ are moecclMismatch. moecclInvalidArgument names the
 * field. Destroying is not collective; layers made from it may live on. */
MOECCL_API moecclResult_t moecclHybridCreate(moecclHybrid_t* hybrid, moecclComm_t comm,
                                             const moecclHybridConfig_t* config);
MOECCL_API moecclResult_t moecclHybridDestroy(moecclHybrid_t hybrid);
MOECCL_API moecclResult_t moecclHybridGetInfo(moecclHybrid_t hybrid, moecclHybridInfo_t* info);

/* moecclMoeCreate for experts that several ranks hold: a token goes to the holder that Algorithm 1 names, through ranks
 * that differ at one level each. config's n_experts is the hybrid's or 0, its expert_rank NULL; its algorithm "auto",
 * "flat" or "hier:N". comm: the hybrid's own or another one of the same ranks and topology, so that tokens and experts
 * may be under way at once. Everything else is as moe.h says. Collective. */
MOECCL_API moecclResult_t moecclHybridMoeCreate(moecclMoe_t* moe, moecclHybrid_t hybrid, moecclComm_t comm,
                                                const moecclMoeConfig_t* config);

/* held[n_held][expert_bytes] = the experts of this rank's domain, from everybody's own[n_own][expert_bytes]: the
 * experts as they are, or encoded ones (codec.h). Each link of Algorithm 1 carries one message, levels outermost first;
 * where peers' memory can be read ("direct") an expert is copied once, from its owner. The buffers may not overlap.
 * Collective. */
MOECCL_API moecclResult_t moecclHybridGather(moecclHybrid_t hybrid, const void* own, void* held, size_t expert_bytes,
                                             moecclStream_t stream);

/* own[n_own][count] = for each expert of this rank the sum of what all ranks that hold it have in held[n_held][count],
 * the owner included: the way back of a gather, for gradients. Over the gather's links the other way round, innermost
 * level first, partial sums rounded to `type`; where peers' buffers can be read ("direct") the owner adds up all of
 * them, by rank, unless the communicator is deterministic: then the bits do not depend on that. Sums have the same
 * order at every run. On CUDA memory an expert may come back to a rank from at most 63 others at once: more are
 * moecclUnsupported, use smaller domains. The buffers may not overlap. Collective. */
MOECCL_API moecclResult_t moecclHybridReduce(moecclHybrid_t hybrid, const void* held, void* own, size_t count,
                                             moecclDataType_t type, moecclStream_t stream);

/* A page for a person: domains, the model's latency, and the plans of gather and reduce (of floats) for experts of
 * expert_bytes: bytes per level, predicted and measured time, this rank's steps. *needed (may be NULL) gets the full
 * length + 1. Not collective. */
MOECCL_API moecclResult_t moecclHybridExplain(moecclHybrid_t hybrid, size_t expert_bytes, char* text, size_t text_bytes,
                                              size_t* needed);

/* What this rank has stored into one other rank's memory since it joined. */
typedef struct {
  uint64_t bytes;    /* payload */
  uint64_t messages; /* stores of a plan's steps: one for each chunk of each block */
} moecclTraffic_t;
/* to[n_ranks], n_ranks as the communicator has. Small exchanges of the library's own count too; what peers read by
 * themselves ("direct" plans) does not. Call it while no operation runs. Not collective. */
MOECCL_API moecclResult_t moecclCommTraffic(moecclComm_t comm, moecclTraffic_t* to, int n_ranks);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_HYBRID_H_ */
