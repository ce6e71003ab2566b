/* SPDX-License-Identifier: Apache-2.0 */
/* Asynchronous migration of experts inside their domains (HybridEP, Section IV-B, Fig. 10). Each layer has a send queue
 * of encoded experts and a receive queue of gathered ones, and the gather runs on a thread of the library while the
 * caller computes. Conventions: types.h.
 *
 *   moecclMigrationSend    encodes this rank's experts into the layer's send queue; local. After the optimizer's step
 *   moecclMigrationBegin   starts the gather of the oldest entry and returns at once. Before the layer's attention
 *   moecclMigrationWait    decodes the gathered experts and switches the layer to them, on all ranks or on none; after
 *                          a failure of the communicator see Epochs
 *
 * With moecclMigrationBeginInto in place of Begin, another thread of the library decodes as soon as the ranks have
 * agreed. Wait then finds the experts in place, and moecclMigrationWaitExpert returns as soon as a given expert is
 * there, so that the caller can compute with it while the others are decoded.
 *
 * Fused (HybridEP, Section IV-B, Fig. 15). moecclMigrationSendFused encodes each piece of an expert right after the
 * optimizer's step on it. moecclMigrationWaitEncoded switches without decoding, and moecclMigrationUseExpert decodes
 * into the computation, forward and backward, until the layer switches again. Host memory only.
 *
 * Epochs. A layer's epoch counts its switches. After each gather the ranks exchange what they sent: the layer, the
 * epoch, and a checksum of the shared expert. Only if all agree and all have received their data does Wait write the
 * experts and raise the epoch. Otherwise it fails on every rank, names the rank that differs, writes nothing, and
 * leaves the epoch as it is.
 * When a rank dies, is stopped or aborts during Wait, some ranks may have finished that exchange and others not. Ranks
 * may then be one epoch apart, and each still holds the experts of its own epoch. After a shrink, compare `epoch` of
 * moecclMigrationInfo_t on the new communicator, its least with its greatest value over all ranks. Where they differ,
 * go back to what all ranks have, such as a checkpoint or a gather of the owners' experts.
 * Order. Begin takes its place in the order of the communicator's operations, like a call on a stream: all ranks begin
 * the same layers in the same order, and a later operation waits for it. Use a separate communicator (moecclCommSplit)
 * if dispatch and gather should run at the same time.
 * Threads. A migration may be used by one thread at a time. */
#ifndef MOECCL_MIGRATE_H_
#define MOECCL_MIGRATE_H_

#include <moeccl/codec.h>
#include <moeccl/hybrid.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct moecclMigration* moecclMigration_t;

typedef struct {
  size_t size;           /* sizeof(moecclMigrationConfig_t) */
  size_t count;          /* elements of an expert */
  moecclDataType_t type; /* moecclFloat32 or moecclBfloat16; with ratio 1 any */
  double ratio;          /* of the codec; 0: 50. 1: experts travel as they are, without a shared expert */
  int32_t n_layers;      /* 0: 1 */
  int32_t depth;         /* most entries of each queue; 0: 2 */
} moecclMigrationConfig_t;
#define MOECCL_MIGRATION_CONFIG_INIT \
  { sizeof(moecclMigrationConfig_t), 0, moecclFloat32, 0, 0, 0 }

typedef struct {
  size_t size;                 /* sizeof(moecclMigrationInfo_t), set by the caller */
  uint64_t epoch;              /* of the layer: switches so far */
  int32_t to_send, to_receive; /* entries of the layer's queues; to_receive: gathers begun but not waited for */
  uint64_t expert_bytes;       /* size of one expert on the wire: moecclCodecBytes, or count elements with ratio 1 */
  uint64_t sent_bytes;         /* bytes that this rank sends in one gather: expert_bytes times experts times links */
  uint64_t memory_bytes;       /* the bound on memory: all queues when full, and WaitEncoded's experts */
} moecclMigrationInfo_t;

/* This call is collective: all ranks pass the same config; a difference is moecclMismatch. comm is the hybrid's
 * communicator (NULL stands for it) or another one of the same ranks and topology; a split takes the topology in its
 * config. The hybrid may be destroyed before the migration. */
MOECCL_API moecclResult_t moecclMigrationCreate(moecclMigration_t* migration, moecclHybrid_t hybrid, moecclComm_t comm,
                                                const moecclMigrationConfig_t* config);
/* Waits for gathers that have begun. This call is not collective. */
MOECCL_API moecclResult_t moecclMigrationDestroy(moecclMigration_t migration);
MOECCL_API moecclResult_t moecclMigrationGetInfo(moecclMigration_t migration, int layer, moecclMigrationInfo_t* info);

/* Appends experts[n_own][count], in the order of moecclHybridInfo_t's own_experts, to the layer's send queue, encoded
 * as the residual to shared[count] (codec.h). errors[n_own] gets the encoding error of each expert; it may be NULL. All
 * input is read before the call returns. Returns moecclInvalidUsage if the queue is full. The call is local. */
MOECCL_API moecclResult_t moecclMigrationSend(moecclMigration_t migration, int layer, const void* experts,
                                              const void* shared, moecclCodecError_t* errors);
/* As Send, fused with the optimizer's step: update(context, expert, first, count), with expert 0..n_own-1, gives the
 * pieces of all experts their new values in order (codec.h), and the entry is the one that Send would queue after that.
 * If update ends the call, nothing is queued, earlier pieces have their new values and later ones their old values:
 * finish the step and call Send. The checks of Send come before the first step. Returns moecclUnsupported on CUDA
 * memory. */
MOECCL_API moecclResult_t moecclMigrationSendFused(moecclMigration_t migration, int layer, const void* experts,
                                                   const void* shared, moecclExpertUpdateFn_t update, void* context,
                                                   moecclCodecError_t* errors);
/* Takes the oldest entry of the layer's send queue and starts its gather. Returns moecclInvalidUsage if that queue is
 * empty or the receive queue is full. The call is collective and returns at once. */
MOECCL_API moecclResult_t moecclMigrationBegin(moecclMigration_t migration, int layer);
/* As Begin, but the library also decodes the experts into held[n_held][count] after the gather, without the caller.
 * shared[count] is the shared expert that was passed to Send; it may be NULL with ratio 1. Neither buffer may be
 * touched before the layer's Wait, except that an expert of `held` may be read as soon as WaitExpert has returned for
 * it. CUDA memory must have no pending work. If the ranks do not agree, `held` stays as it is. Decoding takes the time
 * of another thread, and so a core; moecclCommDestroy waits for it. */
MOECCL_API moecclResult_t moecclMigrationBeginInto(moecclMigration_t migration, int layer, const void* shared,
                                                   void* held);
/* Waits until expert `index` of the layer's oldest gather is in `held`. The index is 0..n_held-1 in the order of
 * held_experts, which is also the order of decoding. Success means that all ranks agree to switch; the epoch rises at
 * Wait, which must still be called. If this call fails, Wait fails in the same way. Returns moecclInvalidUsage if that
 * gather was not begun by BeginInto. */
MOECCL_API moecclResult_t moecclMigrationWaitExpert(moecclMigration_t migration, int layer, int index);
/* Waits for the layer's oldest begun gather and switches the layer: fills held[n_held][count], in the order of
 * held_experts, and *epoch (may be NULL). shared[count] is the shared expert that was passed to Send; other content is
 * moecclInvalidUsage, and the gather can still be waited for. After BeginInto, pass NULL or BeginInto's buffer; a
 * shared expert with other content has then kept all ranks from switching. Returns moecclInvalidUsage if no gather has
 * begun. */
MOECCL_API moecclResult_t moecclMigrationWait(moecclMigration_t migration, int layer, const void* shared, void* held,
                                              uint64_t* epoch);
/* As Wait, but without decoding: switches the layer to the gathered experts, which stay encoded until the layer's next
 * switch. shared[count] is the shared expert that was passed to Send. It must not change until the next switch, because
 * UseExpert adds to it. After BeginInto this call returns moecclInvalidUsage, and on CUDA memory moecclUnsupported; the
 * gather can then still be waited for. */
MOECCL_API moecclResult_t moecclMigrationWaitEncoded(moecclMigration_t migration, int layer, const void* shared,
                                                     uint64_t* epoch);
/* Passes expert `index` (0..n_held-1, in the order of held_experts) to the program's function as moecclCodecDecodeFused
 * does, as often as needed. The call is local. Threads may call it concurrently with each other and with every other
 * call except the layer's Wait, WaitEncoded and Destroy. Returns moecclInvalidUsage if the layer's last switch was not
 * by WaitEncoded. */
MOECCL_API moecclResult_t moecclMigrationUseExpert(moecclMigration_t migration, int layer, int index,
                                                   const moecclExpertUse_t* use);
/* Sets *done to 1 if Wait would not block. Returns moecclInvalidUsage if no gather has begun. */
MOECCL_API moecclResult_t moecclMigrationTest(moecclMigration_t migration, int layer, int* done);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_MIGRATE_H_ */
