/* SPDX-License-Identifier: Apache-2.0 */
/* Compressed return of gradients with error feedback. The gradients of gathered experts (hybrid.h) travel to the owners
 * as the largest of their elements, like migrating experts (codec.h). What an encoding drops stays with its holder as a
 * remainder, which the holder adds to its next gradient of the same expert, so that nothing is lost but delayed (Seide
 * et al., 1-Bit SGD, 2014; Lin et al., Deep Gradient Compression, 2018). HybridEP does not describe how its gradients
 * return. Conventions: types.h.
 *
 *   moecclGradientReturnCreate   once per model, for all layers of one expert shape
 *   moecclGradientReturnReduce   in the backward pass of each layer, instead of moecclHybridReduce
 *   moecclGradientReturnReset    zeroes the remainders of a layer
 *
 * Remainders. Each layer has one for each expert that this rank holds and does not own: fp32 for each element, whatever
 *   the type of the gradients, because bf16 would round away small gradients that are added to a larger remainder. They
 *   are state of the training as the optimizer's moments are, so a checkpoint contains them (see
 *   moecclGradientReturnInfo_t). They belong to a rank and an expert: with other domains or owners, begin with zeros.
 * Errors. A Reduce writes this rank's remainders after its exchange, so a call that fails leaves them as they were.
 *   Work that has been queued on a CUDA stream runs all the same, and changes them. `own` is undefined. Other ranks may
 *   have finished the same call. Before a step is repeated, go back to a checkpoint, or Reset the layer on all ranks.
 *
 * Numbers that are not finite. If a sum of gradient and remainder is infinite or NaN, its remainder becomes 0, so that
 *   a step that the program skips does not spoil those after it.
 */
#ifndef MOECCL_GRADIENT_H_
#define MOECCL_GRADIENT_H_

#include <moeccl/hybrid.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Used from one thread at a time, in the same order on all ranks. Calls for one layer do not overlap: put them on one
 * stream, or wait for the earlier one. Layers may be on different streams. */
typedef struct moecclGradientReturn* moecclGradientReturn_t;

typedef struct {
  size_t size;           /* sizeof(moecclGradientReturnConfig_t) */
  size_t count;          /* elements of an expert's gradient */
  moecclDataType_t type; /* moecclFloat32 or moecclBfloat16; with ratio 1 any */
  double ratio;          /* of the codec; 0: 50. 1: exact, every Reduce is a moecclHybridReduce */
  int32_t n_layers;      /* 0: 1 */
  int32_t device_memory; /* 1: gradients and remainders are CUDA memory of the communicator's device; 0: host memory.
                            With ratio 1 it has no effect */
} moecclGradientReturnConfig_t;
#define MOECCL_GRADIENT_RETURN_CONFIG_INIT \
  { sizeof(moecclGradientReturnConfig_t), 0, moecclFloat32, 0, 0, 0 }

typedef struct {
  size_t size;           /* sizeof(moecclGradientReturnInfo_t), set by the caller */
  uint64_t expert_bytes; /* one gradient on the wire: moecclCodecBytes, or count elements with ratio 1 */
  uint64_t sent_bytes;   /* what this rank sends in one Reduce */
  uint64_t memory_bytes; /* remainders of all layers, and the buffers of one Reduce; with device_memory those of one
                            for each layer */
  int32_t n_remainders;  /* experts with a remainder: n_held - n_own of moecclHybridInfo_t, or 0 with ratio 1 */
  /* [n_remainders][count] of the layer, in the order of held_experts without this rank's own. The handle owns them.
   * While no Reduce of the layer runs, the caller may read them for a checkpoint and write those of a checkpoint. With
   * device_memory they are CUDA memory, and the address stays the same. */
  float* remainders;
} moecclGradientReturnInfo_t;

/* This call is collective: all ranks pass the same config; a difference is moecclMismatch. comm is the hybrid's
 * communicator (NULL stands for it) or another one of the same ranks and topology, which lets gradients and tokens
 * travel at the same time; a split takes the topology in its config. The hybrid may be destroyed before the result. All
 * remainders are 0. */
MOECCL_API moecclResult_t moecclGradientReturnCreate(moecclGradientReturn_t* gradients, moecclHybrid_t hybrid,
                                                     moecclComm_t comm, const moecclGradientReturnConfig_t* config);
/* Waits for calls on streams. This call is not collective. */
MOECCL_API moecclResult_t moecclGradientReturnDestroy(moecclGradientReturn_t gradients);
MOECCL_API moecclResult_t moecclGradientReturnGetInfo(moecclGradientReturn_t gradients, int layer,
                                                      moecclGradientReturnInfo_t* info);

/* own[n_own][count] = for each expert of this rank, in the order of own_experts, its own gradient of
 * held[n_held][count], exactly, plus the decoded gradients of the other ranks that hold the expert, in the order of
 * ranks, each sum rounded to `type`. The bits depend on the input alone. Each holder encodes the sum of its gradient
 * and its remainder, rounded to `type`, as the residual to zeros (codec.h), sends it to the owner, and keeps sum minus
 * decoded. `held` may not change before the call has ended. The buffers may not overlap. With a stream, encoding and
 * decoding also run in the stream's order: on the device for CUDA memory on a CUDA stream, where a capture may contain
 * the call, and otherwise on another thread. Destroy graphs that contain it before the handle. The call is collective,
 * and cannot be part of a group. */
MOECCL_API moecclResult_t moecclGradientReturnReduce(moecclGradientReturn_t gradients, int layer, const void* held,
                                                     void* own, moecclStream_t stream);
/* Sets this rank's remainders of the layer to 0. Call it on all ranks, while no Reduce of the layer runs. The call is
 * local. */
MOECCL_API moecclResult_t moecclGradientReturnReset(moecclGradientReturn_t gradients, int layer);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_GRADIENT_H_ */
