/* SPDX-License-Identifier: Apache-2.0 */
/* Communicators, memory, streams and groups. Conventions: types.h. */
#ifndef MOECCL_COMM_H_
#define MOECCL_COMM_H_

#include <moeccl/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Where the ranks meet and the key that admits them: address and a random 256-bit secret. Pass it to the other ranks
 * over a channel that you trust; it is never written to a log. */
#define MOECCL_UNIQUE_ID_BYTES 128
typedef struct {
  char internal[MOECCL_UNIQUE_ID_BYTES];
} moecclUniqueId;

/* Classes of traffic (MoNTA, communication conflicts): where communicators share a lane, the higher number goes first,
 * chunk by chunk; the lower ones keep a sixteenth of the lane. Auto is by operation: MoE, AllToAll(v) and
 * TensorAllToAll are EP, Send/Recv PP, AllGather CP, all others DP. Numbers between 1 and 8 may be used as they are. */
typedef enum MOECCL_INT {
  moecclPriorityAuto = 0,
  moecclPriorityDP = 1,
  moecclPriorityCP = 3,
  moecclPriorityPP = 5,
  moecclPriorityEP = 7
} moecclPriority_t;
#define MOECCL_HIGHEST_PRIORITY 8

/* All zero means: everything default. deterministic, pace, topology, staging_bytes and priority must be the same on all
 * ranks, and so must MOECCL_PLAN, MOECCL_TRIALS, MOECCL_CALIBRATE and what MOECCL_PROFILE names: a difference is
 * moecclMismatch at init on all ranks, which names two ranks, the field and both values. Timeouts, name and cuda_sms
 * are each rank's own. */
typedef struct {
  size_t size;             /* sizeof(moecclConfig_t) */
  int32_t timeout_ms;      /* an operation that waits longer fails; default MOECCL_TIMEOUT_MS or 600000 */
  int32_t init_timeout_ms; /* the same for init and split; default MOECCL_INIT_TIMEOUT_MS or 60000 */
  int32_t deterministic;   /* 1: fixed-order reductions, bit-identical across plans and runs */
  int32_t pace;            /* 1: links are slowed to the topology's figures (results are EMULATED) */
  const char* topology;    /* "node:2(bw=1GB/s,lat=20us) gpu:4", a file (docs/topology.md) or "auto" */
  size_t staging_bytes;    /* cap on this rank's staging memory; default MOECCL_STAGING_BYTES or 16 MiB. Send/Recv
                               slots take up to 2 MiB more: moecclCommMemoryUsage() counts everything */
  const char* name;        /* shown in errors and the flight recorder; at most 31 bytes are kept */
  int32_t priority;        /* of this communicator's traffic: a moecclPriority_t or another number up to 8 */
  int32_t cuda_sms;        /* most multiprocessors that this rank's kernels use at a time; default MOECCL_CUDA_SMS or
                              an eighth of the device, at least 16 */
} moecclConfig_t;
#define MOECCL_CONFIG_INIT \
  { sizeof(moecclConfig_t), 0, 0, 0, 0, NULL, 0, NULL, 0, 0 }

/* Makes an id and starts the meeting point for it in this process. Call it once, on one rank. The meeting point ends by
 * itself when all ranks have met or when the init timeout passes. */
MOECCL_API moecclResult_t moecclGetUniqueId(moecclUniqueId* id);

/* Joins rank `rank` of `n_ranks` to a new communicator. Blocks until all ranks have joined or the init timeout passes
 * (the error names the missing ranks). Ranks are threads or processes, in any mix; between moecclGroupStart() and
 * moecclGroupEnd() one thread may join several ranks. */
MOECCL_API moecclResult_t moecclCommInitRank(moecclComm_t* comm, int n_ranks, moecclUniqueId id, int rank);
MOECCL_API moecclResult_t moecclCommInitRankConfig(moecclComm_t* comm, int n_ranks, moecclUniqueId id, int rank,
                                                   const moecclConfig_t* config);

/* Makes n_ranks communicators in this process, comms[n_ranks], one for each rank. config may be NULL. */
MOECCL_API moecclResult_t moecclCommInitAll(moecclComm_t* comms, int n_ranks, const moecclConfig_t* config);

/* Joins as the rank that the launcher says: torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), mpirun
 * (OMPI_COMM_WORLD_*), MPICH/hydra (PMI_*), srun (SLURM_*). config may be NULL. moecclInvalidUsage when there is no
 * launcher. */
MOECCL_API moecclResult_t moecclCommInitEnv(moecclComm_t* comm, const moecclConfig_t* config);

/* Splits by color: ranks of the same color >= 0 form a new communicator, ordered by (key, rank). A negative color joins
 * none and gets NULL. Collective over comm. config NULL inherits comm's, but for topology and pace. With config->pace 1
 * and no topology the new communicator's ranks keep their places in comm's topology and share its paced lanes. */
MOECCL_API moecclResult_t moecclCommSplit(moecclComm_t comm, int color, int key, moecclComm_t* new_comm,
                                          const moecclConfig_t* config);

/* The class of this rank's calls on comm from now on, those in flight keep theirs; moecclPriorityAuto: by operation.
 * Not collective: give the same on all ranks, or the lane serves them as they say. */
MOECCL_API moecclResult_t moecclCommSetPriority(moecclComm_t comm, int priority);

/* Waits until this rank's operations have finished. Not collective. */
MOECCL_API moecclResult_t moecclCommFinalize(moecclComm_t comm);
/* Waits until this rank's operations have finished, then frees the communicator. Not collective: peers that still need
 * this rank get moecclRemoteError. */
MOECCL_API moecclResult_t moecclCommDestroy(moecclComm_t comm);
/* Ends all operations of this communicator, here at once and at the peers as soon as they notice; each returns
 * moecclAborted (here) or moecclRemoteError naming this rank (there). From any thread. Destroy it afterwards. */
MOECCL_API moecclResult_t moecclCommAbort(moecclComm_t comm);
/* *result: moecclSuccess, moecclInProgress while operations run on streams, or the communicator's error. */
MOECCL_API moecclResult_t moecclCommGetAsyncError(moecclComm_t comm, moecclResult_t* result);
MOECCL_API moecclResult_t moecclCommCount(moecclComm_t comm, int* count);
MOECCL_API moecclResult_t moecclCommUserRank(moecclComm_t comm, int* rank);
/* Bytes of memory that this communicator holds on this rank: control, staging and tables. */
MOECCL_API moecclResult_t moecclCommMemoryUsage(moecclComm_t comm, size_t* bytes);

/* Memory from the process's symmetric heap, which peers on the same host read and write directly: the fastest buffers
 * for large collectives. 64-byte aligned, zeroed. The heap has as many addresses as the machine has memory, or, under a
 * limit of addresses (ulimit -v), a sixteenth of what is left at the first use; MOECCL_HEAP_BYTES says another number.
 * Memory itself is taken only where something is allocated. */
MOECCL_API moecclResult_t moecclMemAlloc(void** ptr, size_t bytes);
MOECCL_API moecclResult_t moecclMemFree(void* ptr);
/* Announces ordinary memory that will be used again and again, so that transports that need to may pin it. Ranges may
 * overlap and may be registered twice, each with a handle of its own; those that are left end with the communicator. */
MOECCL_API moecclResult_t moecclCommRegister(moecclComm_t comm, void* ptr, size_t bytes, void** handle);
/* moecclInvalidArgument unless `handle` is one of moecclCommRegister on this communicator that was not given back. */
MOECCL_API moecclResult_t moecclCommDeregister(moecclComm_t comm, void* handle);

MOECCL_API moecclResult_t moecclStreamCreate(moecclStream_t* stream);
/* Waits for the stream's operations; returns the first failure since the last call. */
MOECCL_API moecclResult_t moecclStreamSynchronize(moecclStream_t stream);
/* Finishes the stream's operations, then frees it. */
MOECCL_API moecclResult_t moecclStreamDestroy(moecclStream_t stream);

/* Calls of this thread between GroupStart and GroupEnd are issued together at GroupEnd: Sends and Recvs cannot deadlock
 * on their order, and one thread may drive several ranks. Groups nest; the outermost End issues.
 *
 * A group takes the operations of collectives.h, pipeline.h and experts.h, moecclHybridGather and -Reduce, and
 * moecclCommInitRank, -InitRankConfig and -InitAll, whose communicators are there when the group has ended. All other
 * calls that wait for other ranks are moecclInvalidUsage: dispatch and combine, splits, and the making of layers,
 * routings, placements and profiles. Everything else acts at once.
 *
 * The arguments are checked, and operators and AllToAllv's arrays read, at the call; buffers are used from GroupEnd on.
 * When a call that belongs in a group was refused, GroupEnd issues nothing and returns the first refusal; otherwise it
 * returns the first failure of the calls without a stream. Until then a communicator, stream or placement that the
 * group has calls on cannot be destroyed: that is moecclInvalidUsage, destroys nothing, and leaves the group as it is.
 * A communicator may be aborted; GroupEnd then returns moecclAborted. */
MOECCL_API moecclResult_t moecclGroupStart(void);
MOECCL_API moecclResult_t moecclGroupEnd(void);
/* Abandons all of the thread's open groups: nothing that they hold is issued. The end of the thread does the same. */
MOECCL_API moecclResult_t moecclGroupCancel(void);

/* An operator that multiplies each rank's input by *scalar (one element of `type`) and sums. Each rank may give its own
 * scalar. In host memory it is read at once. In memory of a CUDA device each operation reads it when it runs, after
 * what its stream had before, and a graph at every replay; buffers must be CUDA memory then. */
MOECCL_API moecclResult_t moecclRedOpCreatePreMulSum(moecclRedOp_t* op, const void* scalar, moecclDataType_t type,
                                                     moecclComm_t comm);
MOECCL_API moecclResult_t moecclRedOpDestroy(moecclRedOp_t op, moecclComm_t comm);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_COMM_H_ */
