/* SPDX-License-Identifier: Apache-2.0 */
/* Asynchronous migration of experts inside their domains (HybridEP, Section IV-B, Fig. 10): each layer has a send queue
 * of encoded experts and a receive queue of gathered ones, and the gather runs on a thread of the library while the
 * caller computes. Conventions: types.h.
 *
 *   moecclMigrationSend    encodes this rank's experts into the layer's send queue; local. After the optimizer's step
 *   moecclMigrationBegin   starts the gather of the oldest entry; returns at once. Before the layer's attention
 *   moecclMigrationWait    decodes what has come and switches the layer to it, on all ranks or on none
 *
 * With moecclMigrationBeginInto in the place of Begin another thread of the library decodes as soon as the ranks have
 * agreed; Wait then finds the experts where they belong, and moecclMigrationWaitExpert returns as soon as one of them
 * is there, so that it can be computed with while the others are decoded.
 *
 * Fused (HybridEP, Section IV-B, Fig. 15). moecclMigrationSendFused encodes each piece of an expert right behind the
 * optimizer's step on it. moecclMigrationWaitEncoded switches without decoding, and moecclMigrationUseExpert decodes
 * into the computation, forward and backward, until the layer switches again. Host memory only.
 *
 * Epochs. A layer's epoch counts its switches. Behind each gather the ranks exchange what they sent: layer, epoch, and
 * a checksum of the shared expert. Only when all agree and all have received does Wait write the experts and raise the
 * epoch; else it fails on every rank, names the rank that differs, writes nothing, and the epoch stays.
 * Order. Begin takes part in the order of the communicator's operations, like a call on a stream: all ranks begin the
 * same layers in the same order, and an operation called after it waits for it. Use a communicator of its own
 * (moecclCommSplit) where dispatch and gather shall be under way at once.
 * A migration is used by one thread at a time. */
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
  double ratio;          /* of the codec; 0: 50. 1: experts travel as they are, without shared expert */
  int32_t n_layers;      /* 0: 1 */
  int32_t depth;         /* most entries of each queue; 0: 2 */
} moecclMigrationConfig_t;
#define MOECCL_MIGRATION_CONFIG_INIT \
  { sizeof(moecclMigrationConfig_t), 0, moecclFloat32, 0, 0, 0 }

typedef struct {
  size_t size;                 /* sizeof(moecclMigrationInfo_t), set by the caller */
  uint64_t epoch;              /* of the layer: switches so far */
  int32_t to_send, to_receive; /* entries of the layer's queues; to_receive: begun and not waited for */
  uint64_t expert_bytes;       /* of one expert on the wire: moecclCodecBytes, or count elements with ratio 1 */
  uint64_t sent_bytes;         /* that this rank sends in one gather: expert_bytes times experts times links */
  uint64_t memory_bytes;       /* held by all queues when they are full, and by WaitEncoded's experts: the bound */
} moecclMigrationInfo_t;

/* Collective: all ranks give the same config, a difference is moecclMismatch. comm: the hybrid's or another one of the
 * same ranks; NULL: the hybrid's. The hybrid may be destroyed before the migration. */
MOECCL_API moecclResult_t moecclMigrationCreate(moecclMigration_t* migration, moecclHybrid_t hybrid, moecclComm_t comm,
                                                const moecclMigrationConfig_t* config);
/* Waits for what has begun. Not collective. */
MOECCL_API moecclResult_t moecclMigrationDestroy(moecclMigration_t migration);
MOECCL_API moecclResult_t moecclMigrationGetInfo(moecclMigration_t migration, int layer, moecclMigrationInfo_t* info);

/* Appends experts[n_own][count], in the order of moecclHybridInfo_t's own_experts, to the layer's send queue: the
 * residual to shared[count] (codec.h). errors[n_own]: what encoding lost of each, or NULL. Everything is read before it
 * returns. moecclInvalidUsage when the queue is full. Local. */
MOECCL_API moecclResult_t moecclMigrationSend(moecclMigration_t migration, int layer, const void* experts,
                                              const void* shared, moecclCodecError_t* errors);
/* The same with the optimizer's step fused in: update(context, expert, first, count), expert 0..n_own-1, gives the
 * pieces of all experts their new values, in order (codec.h), and what is queued is what Send would queue behind that.
 * When update ends the call, nothing is queued, the pieces before have their new values and those behind their old
 * ones: finish the step and call Send. The checks of Send come before the first step. moecclUnsupported on CUDA memory.
 */
MOECCL_API moecclResult_t moecclMigrationSendFused(moecclMigration_t migration, int layer, const void* experts,
                                                   const void* shared, moecclExpertUpdateFn_t update, void* context,
                                                   moecclCodecError_t* errors);
/* Takes the oldest entry of the layer's send queue and starts its gather. moecclInvalidUsage when that queue is empty
 * or the receive queue full. Collective, returns at once. */
MOECCL_API moecclResult_t moecclMigrationBegin(moecclMigration_t migration, int layer);
/* The same, and the experts are decoded into held[n_held][count] behind the gather, without the caller. shared[count]:
 * what Send had. Neither may be touched before the layer's Wait, but an expert of `held` may be read as soon as
 * WaitExpert has returned for it; CUDA memory must have no work pending on it. Where the ranks do not agree `held`
 * stays as it is. shared may be NULL with ratio 1. Another thread's time: decoding takes a core. */
MOECCL_API moecclResult_t moecclMigrationBeginInto(moecclMigration_t migration, int layer, const void* shared,
                                                   void* held);
/* Waits until expert `index` (0..n_held-1, in the order of held_experts, in which they are decoded) of the layer's
 * oldest gather is in `held`. Success means that all ranks switch; the epoch rises at Wait, which must still be called.
 * On failure Wait fails alike. moecclInvalidUsage when that gather was not begun by BeginInto. */
MOECCL_API moecclResult_t moecclMigrationWaitExpert(moecclMigration_t migration, int layer, int index);
/* Waits for the layer's oldest gather that was begun and switches: held[n_held][count], in the order of held_experts,
 * and *epoch (may be NULL). shared[count]: what Send had; another content is moecclInvalidUsage, and the gather stays
 * to be waited for. After BeginInto: NULL or what BeginInto had; a shared expert of another content has then kept all
 * ranks from switching. moecclInvalidUsage when nothing has begun. */
MOECCL_API moecclResult_t moecclMigrationWait(moecclMigration_t migration, int layer, const void* shared, void* held,
                                              uint64_t* epoch);
/* Wait without decoding: switches the layer to the experts that have come, which stay encoded until the layer's next
 * switch. shared[count]: what Send had; it must stay as it is until then, because UseExpert adds to it. Not behind
 * BeginInto (moecclInvalidUsage); moecclUnsupported on CUDA memory, and the gather stays to be waited for. */
MOECCL_API moecclResult_t moecclMigrationWaitEncoded(moecclMigration_t migration, int layer, const void* shared,
                                                     uint64_t* epoch);
/* Hands expert `index` (0..n_held-1, in the order of held_experts) over as moecclCodecDecodeFused does, as often as
 * needed. Local. Threads may call it at once, beside each other and beside all but the layer's Wait, WaitEncoded and
 * Destroy. moecclInvalidUsage when the layer's last switch was not by WaitEncoded. */
MOECCL_API moecclResult_t moecclMigrationUseExpert(moecclMigration_t migration, int layer, int index,
                                                   const moecclExpertUse_t* use);
/* *done: 1 when Wait would not block. */
MOECCL_API moecclResult_t moecclMigrationTest(moecclMigration_t migration, int layer, int* done);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_MIGRATE_H_ */
