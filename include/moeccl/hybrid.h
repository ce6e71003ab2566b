/* SPDX-License-Identifier: Apache-2.0 */
/* Hybrid expert and data transmission (HybridEP): experts travel inside an expert domain, and tokens travel between
 * domains, always to the rank with the same offset (Algorithm 1). A domain of size 1 at every level is plain expert
 * parallelism. Conventions: types.h.
 *
 *   moecclHybridCreate      once per placement: domain sizes given, or chosen by the stream model (Eq. 1-13)
 *   moecclHybridMoeCreate   a MoE layer (moe.h) whose tokens go to the holder with the same offset
 *   moecclHybridGather      gives every rank the experts of its domain, in the order of that layer's local experts
 *   moecclHybridReduce      its backward pass: sums the gradients of gathered experts at their owners
 *
 * Trees may be uneven: if there is no rank with the same offset, the member at that offset modulo the group's size
 * takes its place. */
#ifndef MOECCL_HYBRID_H_
#define MOECCL_HYBRID_H_

#include <moeccl/moe.h>
#include <moeccl/plan.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct moecclHybrid* moecclHybrid_t; /* which ranks hold which experts besides the owners */

typedef struct {
  size_t size;                /* sizeof(moecclHybridConfig_t) */
  int32_t n_experts;          /* 1..65535 */
  const int32_t* expert_rank; /* [n_experts] owner of each expert; NULL: contiguous, as even as possible */
  int32_t n_levels;           /* entries of domain; ignored when it is NULL */
  const int32_t* domain; /* [n_levels] S_ED of each level of the communicator's topology, outermost first. NULL: the
                            stream model chooses the sizes of least latency from the figures below and the links of
                            topology and profile; all 1 if no other sizes gain */
  double data_bytes;     /* D: this rank's tokens times top_k times row, for one of the two AlltoAlls */
  double expert_bytes;   /* P_E: all experts of a rank, before compression */
  double pre_expert_s;   /* computation before the experts, which hides the AllGather */
  double compression;    /* expert bytes are divided by it; 0: 1 */
  double min_gain;       /* least gain of the model's latency over plain expert parallelism; 0: any */
  /* With top_k, the sizes are those that minimize the time of this library's whole step (moecclDomainProblem_t in
   * solve.h describes each field), with the latencies of topology and profile. 0: Eq. 8 for the forward pass. */
  int32_t top_k, forward_only;
  double expert_s, backward_s, gradient_bytes;
  /* The codec's expert bytes per second on a rank, before compression. 0: the profile's rates, or constants of a host's
   * core or, if the communicator has CUDA, of a GPU (docs/calibration.md); ranks that share a core share its rate.
   * Below 0: the codec takes no time. They count only where compression or gradient_ratio is above 1. */
  double encode_bandwidth, decode_bandwidth;
  double gradient_ratio;
} moecclHybridConfig_t;
#define MOECCL_HYBRID_CONFIG_INIT \
  { sizeof(moecclHybridConfig_t), 0, NULL, 0, NULL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* The handle owns all arrays; they stay valid as long as it does. */
typedef struct {
  size_t size; /* sizeof(moecclHybridInfo_t), set by the caller */
  int32_t n_levels;
  int32_t domain[MOECCL_MAX_LEVELS]; /* S_ED of each level */
  int32_t n_own, n_held;
  const int32_t* own_experts;  /* [n_own] global numbers, ascending: the order of moecclHybridGather's `own` */
  const int32_t* held_experts; /* [n_held] likewise for `held` and local experts of moecclHybridMoeCreate's layer */
  int32_t gather_links;        /* ranks to which this rank sends experts in one gather (Table VII's AG) */
  int32_t token_links;         /* ranks to which it may send tokens in one dispatch, level by level (A2A) */
  double before_us, after_us;  /* the model's latency with all sizes 1 and with these sizes; 0: no figures were given */
  double all_gather_us, all_to_all_us;     /* for these sizes; all_to_all covers both AlltoAlls */
  double measured_gather_us;               /* of the last gather on this rank; 0 before the first */
  double backward_us, return_us, codec_us; /* for these sizes, with top_k; see moecclDomainAnswer_t */
} moecclHybridInfo_t;

/* This call is collective: all ranks pass the same config; a difference in sizes is moecclMismatch.
 * moecclInvalidArgument names the field. Destroying is not collective, and layers made from the hybrid may outlive it.
 */
MOECCL_API moecclResult_t moecclHybridCreate(moecclHybrid_t* hybrid, moecclComm_t comm,
                                             const moecclHybridConfig_t* config);
MOECCL_API moecclResult_t moecclHybridDestroy(moecclHybrid_t hybrid);
MOECCL_API moecclResult_t moecclHybridGetInfo(moecclHybrid_t hybrid, moecclHybridInfo_t* info);

/* Creates a MoE layer, as moecclMoeCreate does, for experts that several ranks hold. A token goes to the holder that
 * Algorithm 1 names, through ranks that differ at one level each. config's n_experts is the hybrid's or 0, its
 * expert_rank is NULL, and its algorithm is "auto", "flat", "flat:ordered" or "hier:N". comm is the hybrid's own
 * communicator, or another one of the same ranks and topology, which lets tokens and experts travel at the same time.
 * Everything else is as in moe.h. The call is collective. */
MOECCL_API moecclResult_t moecclHybridMoeCreate(moecclMoe_t* moe, moecclHybrid_t hybrid, moecclComm_t comm,
                                                const moecclMoeConfig_t* config);

/* held[n_held][expert_bytes] = the experts of this rank's domain, from all ranks' own[n_own][expert_bytes]. The experts
 * may be plain or encoded (codec.h). Each link of Algorithm 1 carries one message, levels outermost first; if peers'
 * memory can be read ("direct"), an expert is copied once, from its owner. The buffers may not overlap. The call is
 * collective. */
MOECCL_API moecclResult_t moecclHybridGather(moecclHybrid_t hybrid, const void* own, void* held, size_t expert_bytes,
                                             moecclStream_t stream);

/* own[n_own][count] = for each expert of this rank, the sum of held[n_held][count] over all ranks that hold it, the
 * owner included. This is the way back of a gather, for gradients. It uses the gather's links in the opposite
 * direction, innermost level first, and rounds partial sums to `type`. If peers' buffers can be read ("direct"), the
 * owner sums all of them in the order of ranks, unless the communicator is deterministic: then the bits do not depend
 * on whether buffers can be read. Sums have the same order in every run. On CUDA memory an expert may come back to a
 * rank from at most 63 others at once; more are moecclUnsupported, and smaller domains help. The buffers may not
 * overlap. The call is collective. */
MOECCL_API moecclResult_t moecclHybridReduce(moecclHybrid_t hybrid, const void* held, void* own, size_t count,
                                             moecclDataType_t type, moecclStream_t stream);

/* Writes a page for a person: domains, the model's latency, and the plans of gather and reduce (of floats) for experts
 * of expert_bytes, with bytes per level, predicted and measured time, and this rank's steps. *needed (may be NULL) gets
 * the full length + 1. This call is not collective. */
MOECCL_API moecclResult_t moecclHybridExplain(moecclHybrid_t hybrid, size_t expert_bytes, char* text, size_t text_bytes,
                                              size_t* needed);

/* The data that this rank has stored into one other rank's host memory since it joined; CUDA memory is not counted. */
typedef struct {
  uint64_t bytes;    /* payload */
  uint64_t messages; /* stores of a plan's steps: one per chunk of each block */
} moecclTraffic_t;
/* Fills to[n_ranks], where n_ranks is the communicator's size. The library's own small exchanges count too; data that
 * peers read ("direct" plans) does not. Call it while no operation runs. This call is not collective. */
MOECCL_API moecclResult_t moecclCommTraffic(moecclComm_t comm, moecclTraffic_t* to, int n_ranks);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_HYBRID_H_ */
