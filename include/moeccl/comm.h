/* SPDX-License-Identifier: Apache-2.0 */
/* Communicators, memory, streams and groups. Conventions: types.h. */
#ifndef MOECCL_COMM_H_
#define MOECCL_COMM_H_

#include <moeccl/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The meeting point of the ranks and the key that admits them: an address and a random 256-bit secret. Pass it to the
 * other ranks over a channel that you trust; it is never written to a log. */
#define MOECCL_UNIQUE_ID_BYTES 128
typedef struct {
  char internal[MOECCL_UNIQUE_ID_BYTES];
} moecclUniqueId;

/* Traffic classes (MoNTA, communication conflicts). Where communicators share a link, which is the network over TCP or
 * an uplink of a paced topology, the class with the higher number goes first, chunk by chunk; lower classes keep a
 * sixteenth of the link. Auto chooses by operation: EP for MoE operations, AllToAll(v) and TensorAllToAll, PP for
 * Send/Recv, CP for AllGather, and DP for all others. Any number from 1 to 8 is accepted. */
typedef enum MOECCL_INT {
  moecclPriorityAuto = 0,
  moecclPriorityDP = 1,
  moecclPriorityCP = 3,
  moecclPriorityPP = 5,
  moecclPriorityEP = 7
} moecclPriority_t;
#define MOECCL_HIGHEST_PRIORITY 8

/* Initialise it with MOECCL_CONFIG_INIT, which gives every field its default; 0 in a field other than size means the
 * default too. deterministic, pace, topology, staging_bytes and priority must be the same on all ranks, and so must
 * MOECCL_ENCRYPT, MOECCL_PLAN, MOECCL_TRIALS, MOECCL_CUDA_GRAPH_MIXING, the content of the profile that MOECCL_PROFILE
 * names and, without a profile, MOECCL_CALIBRATE. On a difference, init fails on all ranks with moecclMismatch and
 * names two ranks, the field and both values. Timeouts, name and cuda_sms may differ between ranks. */
typedef struct {
  size_t size;             /* sizeof(moecclConfig_t) */
  int32_t timeout_ms;      /* an operation that waits longer for other ranks fails (docs/faults.md); default
                              MOECCL_TIMEOUT_MS or 600000 */
  int32_t init_timeout_ms; /* the same for init and split; default MOECCL_INIT_TIMEOUT_MS or 60000 */
  int32_t deterministic;   /* 1: fixed-order reductions, bit-identical across plans and runs */
  int32_t pace;            /* 1: links are slowed down to the topology's figures (results are EMULATED) */
  const char* topology;    /* "node:2(bw=1GB/s,lat=20us) gpu:4", a file (docs/topology.md) or "auto" */
  size_t staging_bytes;    /* cap on this rank's staging, the library's memory into which other ranks write; default
                              MOECCL_STAGING_BYTES, or 1 MiB for each host and at least 16 MiB. On a long line it is up
                              to 256 MiB, as far as the ranks' hosts have room: a line is long if its bandwidth times
                              its round trip, by topology or profile, exceeds 3.2 MiB. Messages of Send/Recv take 2 MiB
                              more, on a long line up to half of the staging; moecclCommMemoryUsage() counts all of
                              it */
  const char* name;        /* shown in errors and the flight recorder; the first 31 bytes are kept */
  int32_t priority;        /* of this communicator's traffic: a moecclPriority_t or another number up to 8 */
  int32_t cuda_sms;        /* most multiprocessors that this rank's kernels use at a time; default MOECCL_CUDA_SMS or
                              an eighth of the device's, at least 16 */
} moecclConfig_t;
#define MOECCL_CONFIG_INIT \
  { sizeof(moecclConfig_t), 0, 0, 0, 0, NULL, 0, NULL, 0, 0 }

/* Makes an id and starts its meeting point in this process. Call it once, on one rank. The meeting point ends by itself
 * when all ranks have met or when the init timeout passes. */
MOECCL_API moecclResult_t moecclGetUniqueId(moecclUniqueId* id);

/* Joins rank `rank` of `n_ranks` (1 to 65535) to a new communicator. Blocks until all ranks have joined or the init
 * timeout passes; the error then names the missing ranks. Ranks are threads or processes, in any mix. Between
 * moecclGroupStart() and moecclGroupEnd() one thread may join several ranks. */
MOECCL_API moecclResult_t moecclCommInitRank(moecclComm_t* comm, int n_ranks, moecclUniqueId id, int rank);
MOECCL_API moecclResult_t moecclCommInitRankConfig(moecclComm_t* comm, int n_ranks, moecclUniqueId id, int rank,
                                                   const moecclConfig_t* config);

/* Makes n_ranks communicators in this process, one per rank, in comms[n_ranks]. config may be NULL. */
MOECCL_API moecclResult_t moecclCommInitAll(moecclComm_t* comms, int n_ranks, const moecclConfig_t* config);

/* Joins as the rank that the launcher assigned: torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), mpirun
 * (OMPI_COMM_WORLD_*), MPICH/hydra (PMI_*), srun (SLURM_*). Ranks on several hosts meet at MASTER_ADDR; where srun
 * started them, that is by default the first node of their step. config may be NULL. Returns moecclInvalidUsage when
 * there is no launcher. */
MOECCL_API moecclResult_t moecclCommInitEnv(moecclComm_t* comm, const moecclConfig_t* config);

/* Splits by color: ranks with the same color >= 0 form a new communicator, ordered by (key, rank). A rank with a
 * negative color joins none and gets NULL. The call is collective over comm. A NULL config inherits comm's settings
 * except topology and pace. Without a topology in config, the new communicator's ranks keep their places in comm's
 * topology: if comm is paced, only with config->pace 1, and then they share its paced links. */
MOECCL_API moecclResult_t moecclCommSplit(moecclComm_t comm, int color, int key, moecclComm_t* new_comm,
                                          const moecclConfig_t* config);

/* Sets the class of this rank's later calls on comm; calls in flight keep theirs. moecclPriorityAuto chooses by
 * operation. This call is not collective, but all ranks should pass the same value; otherwise each rank's traffic is
 * ordered by its own class. */
MOECCL_API moecclResult_t moecclCommSetPriority(moecclComm_t comm, int priority);

/* Waits until this rank's operations have finished. This call is not collective. */
MOECCL_API moecclResult_t moecclCommFinalize(moecclComm_t comm);
/* Waits until this rank's operations have finished, then frees the communicator. This call is not collective: peers
 * that still need this rank get moecclRemoteError. */
MOECCL_API moecclResult_t moecclCommDestroy(moecclComm_t comm);
/* Ends all operations of this communicator: on this rank at once, with moecclAborted, and on the peers as soon as they
 * notice, with moecclRemoteError that names this rank. A call that a thread has not begun, because its stream is busy
 * with other work, returns moecclAborted to the stream when its place comes; Destroy does not wait for it. May be
 * called from any thread. Destroy the communicator afterwards. */
MOECCL_API moecclResult_t moecclCommAbort(moecclComm_t comm);
/* Sets *result to moecclSuccess, to moecclInProgress while operations run on streams, or to the communicator's error.
 * Where CUDA graphs replay its operations, this call also ends the replays that wait for a rank that has failed or is
 * lost: nothing else does so before the timeout. */
MOECCL_API moecclResult_t moecclCommGetAsyncError(moecclComm_t comm, moecclResult_t* result);
MOECCL_API moecclResult_t moecclCommCount(moecclComm_t comm, int* count);
MOECCL_API moecclResult_t moecclCommUserRank(moecclComm_t comm, int* rank);
/* Gets the bytes of memory that this communicator holds on this rank: control, staging, tables and the network's
 * buffers. */
MOECCL_API moecclResult_t moecclCommMemoryUsage(moecclComm_t comm, size_t* bytes);

/* Allocates from the process's symmetric heap, whose memory peers on the same host can read and write directly; such
 * buffers are the fastest for large collectives. The memory is 64-byte aligned and zeroed. The heap reserves as many
 * addresses as the machine has bytes of memory, less where a limit of addresses (ulimit -v) or many cores leave each
 * process a smaller share. MOECCL_HEAP_BYTES sets another size. An allocation takes memory, a reservation does
 * not. */
MOECCL_API moecclResult_t moecclMemAlloc(void** ptr, size_t bytes);
MOECCL_API moecclResult_t moecclMemFree(void* ptr);
/* Registers ordinary memory that will be used repeatedly, so that transports that need pinned memory can pin it. Ranges
 * may overlap and may be registered twice, each time with a separate handle. Ranges that are still registered are
 * deregistered when the communicator is destroyed. */
MOECCL_API moecclResult_t moecclCommRegister(moecclComm_t comm, void* ptr, size_t bytes, void** handle);
/* Returns moecclInvalidArgument unless `handle` came from moecclCommRegister on this communicator and is still
 * registered. */
MOECCL_API moecclResult_t moecclCommDeregister(moecclComm_t comm, void* handle);

MOECCL_API moecclResult_t moecclStreamCreate(moecclStream_t* stream);
/* Waits for the stream's operations and returns the first failure since the last call. Operations that have not begun
 * run on the calling thread, unless it is inside a group. */
MOECCL_API moecclResult_t moecclStreamSynchronize(moecclStream_t stream);
/* Finishes the stream's operations, then frees it. */
MOECCL_API moecclResult_t moecclStreamDestroy(moecclStream_t stream);

/* Calls that this thread makes between GroupStart and GroupEnd are issued together at GroupEnd. Sends and Recvs
 * therefore cannot deadlock on their order, and one thread can drive several ranks. Groups nest; the outermost End
 * issues the calls.
 *
 * A group accepts the operations of collectives.h and pipeline.h, and those of experts.h except moecclChooseReplicas.
 * It accepts moecclSharedExpert (its own sum is formed at the call, on CUDA memory in `shared`), moecclHybridGather and
 * -Reduce, and moecclCommInitRank, -InitRankConfig and -InitAll (their communicators exist once the group has ended).
 * All other calls that wait for other ranks return moecclInvalidUsage: dispatch and combine, splits, waits for
 * migrations, and calls that create layers, routings, placements or profiles. Every other call takes effect at once.
 *
 * Calls on one stream, or on none, run beside each other. In CUDA memory, however, a communicator's Sends and Recvs
 * between ranks of a host come after its collectives of the group, as in NCCL. If the calls of a communicator lie on
 * several streams, or on streams and on none, they also run together: they begin when the earlier work of all these
 * streams has ended, and these streams, and GroupEnd if a call has no stream, wait until all of the calls have ended.
 * Outside of a group, calls of a communicator on different streams run one after another, in the order of the calls. If
 * a communicator fails before the group runs, all communicators whose calls run together with its calls fail with it.
 *
 * Arguments are checked, and operators and AllToAllv's arrays are read, at the call; buffers are used from GroupEnd on.
 * If a call that belongs in a group was refused, or one was made that a group does not accept, GroupEnd issues nothing
 * and returns the first refusal; otherwise it returns the first failure of the calls without a stream. Until GroupEnd,
 * a communicator, stream or placement that the group holds calls on cannot be destroyed: the attempt returns
 * moecclInvalidUsage, destroys nothing and leaves the group as it is. A communicator may be aborted; GroupEnd then
 * returns moecclAborted, also while it waits for a busy stream. */
MOECCL_API moecclResult_t moecclGroupStart(void);
MOECCL_API moecclResult_t moecclGroupEnd(void);
/* Abandons all open groups of the thread; none of the calls that they hold is issued. The end of the thread does the
 * same. Call it where an error leaves a group half filled: until then, what the group holds calls on cannot be
 * destroyed. */
MOECCL_API moecclResult_t moecclGroupCancel(void);

/* Creates an operator that multiplies each rank's input by *scalar (one element of `type`) and sums the products. Each
 * rank may pass its own scalar. A scalar in host memory is read at once. A scalar in CUDA device memory is read by each
 * operation when it runs, after earlier work on its stream, and by a graph at every replay; buffers must then be CUDA
 * memory. An operator may be made and destroyed on any thread, also during other calls on the communicator; calls that
 * were made with it before keep it. */
MOECCL_API moecclResult_t moecclRedOpCreatePreMulSum(moecclRedOp_t* op, const void* scalar, moecclDataType_t type,
                                                     moecclComm_t comm);
MOECCL_API moecclResult_t moecclRedOpDestroy(moecclRedOp_t op, moecclComm_t comm);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_COMM_H_ */
