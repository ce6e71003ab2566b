/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MoECCL: result codes, data types, reduction operators and handles.
 *
 * Conventions, said once for all headers:
 *
 * Errors. Every function returns a moecclResult_t. On failure, moecclGetLastError() gives a sentence that says what was
 *   tried, on what, and what to do. Nothing is thrown through this interface. After a failure inside a collective the
 *   communicator is in an error state: further calls on it return the same code until it is destroyed.
 * Faults. An operation that returned success holds the right data, whatever happens to other ranks meanwhile; after a
 *   failure its buffers are the caller's, and nothing is written to them later. Ranks may differ in whether the last
 *   operation before a fault succeeded: those that had all of its data report success. docs/faults.md.
 * Ownership. Buffers belong to the caller and must stay valid until the operation has finished; they need no
 *   alignment. Handles belong to the caller, who destroys them with the matching Destroy function; a stale or foreign
 *   handle is an error, not a crash. Destroy waits for operations that run, and refuses while an open group holds calls
 *   on the handle (comm.h). NULL may be destroyed: nothing happens. What was made with a communicator may be destroyed
 *   after it; every other call on it is then an error.
 * Threads. A communicator, and each handle that was made with it, is used by one thread at a time; different
 *   communicators may be used from different threads. moecclCommAbort(), moecclCommGetAsyncError() and
 *   moecclGetLastError() may be called from any thread at any time, also while the owner destroys the communicator:
 *   they do their work, or say that it is no live communicator. An abort ends a moecclCommDestroy() that waits.
 * Forks. A forked child may make communicators of its own. Calls on those of its parent, and on all else that the
 *   parent made, are moecclInvalidUsage. Destroying or freeing it in the child succeeds, and changes nothing for the
 *   parent.
 * Streams. A NULL stream makes the call blocking. With a stream of moecclStreamCreate() the call returns at once and
 *   the operation runs in the stream's order; errors appear at moecclStreamSynchronize() and
 *   moecclCommGetAsyncError().
 * CUDA. Buffers may be CUDA memory, and a CUstream (cudaStream_t) cast to moecclStream_t may stand for a stream, when
 *   every rank's thread had a current CUDA context when it joined: docs/cuda.md.
 * Structs. Each begins with its size, set by its _INIT macro; it grows only at its end; zero in a field means default.
 *   A program may be older than the library, whose new fields are then 0, or newer: then a field that the library does
 *   not know must be 0, or the call is moecclInvalidArgument. Answers are written up to the size that the caller set.
 * Counts are in elements of the data type unless a name says bytes. Ranks are 0..n-1.
 */
#ifndef MOECCL_TYPES_H_
#define MOECCL_TYPES_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MOECCL_API __attribute__((visibility("default")))
#else
#define MOECCL_API
#endif

/* In C++ an enumeration without a type can hold its own values alone, and C callers may give any number. */
#ifdef __cplusplus
#define MOECCL_INT : int
#else
#define MOECCL_INT
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum MOECCL_INT {
  moecclSuccess = 0,
  moecclSystemError = 1,     /* a call to the operating system failed */
  moecclInternalError = 2,   /* a bug in MoECCL */
  moecclInvalidArgument = 3, /* an argument is not acceptable; the sentence names it */
  moecclInvalidUsage = 4,    /* the call is not allowed in this state */
  moecclRemoteError = 5,     /* another rank died or failed; the sentence names it */
  moecclInProgress = 6,      /* the operation has not finished yet (only from GetAsyncError and queries) */
  moecclTimeout = 7,         /* a deadline passed; the sentence names the missing ranks */
  moecclAborted = 8,         /* moecclCommAbort() was called */
  moecclMismatch = 9,        /* ranks disagree (count, type, operator, root, order); the sentence names both */
  moecclOutOfMemory = 10,    /* memory or a cap on it is exhausted */
  moecclUnsupported = 11     /* not available here; the sentence says why and what works instead */
} moecclResult_t;

/* The numbers are NCCL's. fp8 moves as bytes and is reduced through fp32. */
typedef enum MOECCL_INT {
  moecclInt8 = 0,
  moecclUint8 = 1,
  moecclInt32 = 2,
  moecclUint32 = 3,
  moecclInt64 = 4,
  moecclUint64 = 5,
  moecclFloat16 = 6,
  moecclFloat32 = 7,
  moecclFloat64 = 8,
  moecclBfloat16 = 9,
  moecclFloat8e4m3 = 10,
  moecclFloat8e5m2 = 11
} moecclDataType_t;
#define MOECCL_NUM_DATA_TYPES 12

/* Values of MOECCL_NUM_REDUCTIONS and above are made by moecclRedOpCreatePreMulSum(). */
typedef enum MOECCL_INT {
  moecclSum = 0,
  moecclProd = 1,
  moecclMax = 2,
  moecclMin = 3,
  moecclAvg = 4
} moecclBuiltinRedOp_t;
typedef int32_t moecclRedOp_t;
#define MOECCL_NUM_REDUCTIONS 5

typedef struct moecclComm* moecclComm_t;       /* one rank's membership of a communicator */
typedef struct moecclStream* moecclStream_t;   /* a host stream: operations run in order on its own thread */
typedef struct moecclMoe* moecclMoe_t;         /* one MoE layer's static description on a communicator */
typedef struct moecclRouting* moecclRouting_t; /* one step's token routing on a layer */

/* The name of a result code, such as "moecclTimeout". Never NULL. */
MOECCL_API const char* moecclGetErrorString(moecclResult_t result);

/* The sentence of the last failure on `comm`, or of the calling thread when comm is NULL or no live communicator. The
 * text is the library's; it stays valid for the calling thread's next seven calls of this function. Never NULL; empty
 * when nothing has failed. */
MOECCL_API const char* moecclGetLastError(moecclComm_t comm);

/* The version of the loaded library, comparable with MOECCL_VERSION. */
MOECCL_API moecclResult_t moecclGetVersion(int* version);

/* Bytes of one element; 0 for an unknown type. */
MOECCL_API size_t moecclTypeSize(moecclDataType_t type);
/* The name of a type, such as "float32" or "bfloat16"; "unknown type" beyond the last. Never NULL. */
MOECCL_API const char* moecclTypeName(moecclDataType_t type);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_TYPES_H_ */
