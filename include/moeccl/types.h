/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MoECCL: result codes, data types, reduction operators and handles.
 *
 * These conventions hold for all headers:
 *
 * Errors. Every function that can fail returns a moecclResult_t. On failure, moecclGetLastError() returns a sentence
 *   that says what was tried, on what, and what to do about it. No exception leaves this interface. After a failure
 *   inside a collective the communicator is in an error state: until it is destroyed, its operations and all other
 *   calls that wait for ranks return the same code, except moecclCommShrink() (elastic.h).
 * Faults. The output of an operation that returned success is correct, whatever happens to other ranks meanwhile. After
 *   a failure the operation's buffers belong to the caller again, and the library does not write to them later. Ranks
 *   may differ in whether the last operation before a fault succeeded: a rank that had received all of its data reports
 *   success. See docs/faults.md.
 * Ownership. Buffers belong to the caller and must stay valid until the operation has finished; they need no
 *   alignment. Handles belong to the caller and are destroyed with the matching Destroy function. A stale or foreign
 *   handle is an error, not a crash. Destroy waits for running operations and refuses while an open group holds calls
 *   on the handle (comm.h). Destroying NULL does nothing. A handle that was made with a communicator may be destroyed
 *   after the communicator; every other call on it is then an error.
 * Threads. A communicator, and each handle that was made with it, may be used by one thread at a time; different
 *   communicators may be used from different threads. moecclCommAbort(), moecclCommRevoke(), moecclCommGetAsyncError()
 *   and moecclGetLastError() may be called from any thread at any time, even while the owner destroys the communicator:
 *   they either do their work or report that it is not a live communicator. An abort ends a moecclCommDestroy() that
 *   is waiting.
 * Forks. A forked child may make its own communicators. Calls on its parent's communicators, and on everything else
 *   that the parent made, return moecclInvalidUsage. Destroying or freeing such an object in the child succeeds and
 *   changes nothing for the parent; operators and registrations belong to their communicator and are refused.
 * Streams. A NULL stream makes the call blocking. With a stream from moecclStreamCreate() the call returns at once and
 *   the operation runs in the stream's order. moecclStreamSynchronize() and moecclCommGetAsyncError() report its
 *   errors.
 * CUDA. If every rank's thread had a current CUDA context when it joined, buffers may be CUDA memory, and a CUstream
 *   (cudaStream_t) cast to moecclStream_t may be passed as the stream. See docs/cuda.md.
 * Structs. Initialise a config with its _INIT macro, never with {0}: the macro sets the size and the defaults, and some
 *   defaults are not zero. Zero in a field means what the field's comment says. Structs with a size begin with it and
 *   grow only at their end. If the program is older than the library, fields that it does not know count as 0. If it is
 *   newer, fields that the library does not know must be 0; otherwise the call returns moecclInvalidArgument. Output
 *   structs have no macro: the caller sets their size, and they are filled up to it. Elements of arrays, such as
 *   moecclSwapTensor_t, and some small results have no size.
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

/* C callers may pass any number, but a C++ enumeration without a fixed type can hold only its own values. */
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
  moecclInvalidArgument = 3, /* an argument is not acceptable; the error text names it */
  moecclInvalidUsage = 4,    /* the call is not allowed in this state */
  moecclRemoteError = 5,     /* another rank died or failed; the error text names it */
  moecclInProgress = 6,      /* the operation has not finished yet (only from GetAsyncError and queries) */
  moecclTimeout = 7,         /* a deadline passed; the error text names the missing ranks */
  moecclAborted = 8,         /* moecclCommAbort() or moecclCommRevoke() was called */
  moecclMismatch = 9,        /* ranks disagree (count, type, operator, root, order); the error text names two of them */
  moecclOutOfMemory = 10,    /* memory, or a cap on it, is exhausted */
  moecclUnsupported = 11     /* not available here; the error text says why and what works instead */
} moecclResult_t;

/* The numbers are NCCL's. fp8 is moved as bytes and reduced in fp32. */
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

/* moecclRedOpCreatePreMulSum() makes values of MOECCL_NUM_REDUCTIONS and above. */
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
typedef struct moecclStream* moecclStream_t;   /* a host stream: its operations run in order, in the background */
typedef struct moecclMoe* moecclMoe_t;         /* one MoE layer's static description on a communicator */
typedef struct moecclRouting* moecclRouting_t; /* one step's token routing on a layer */

/* Returns the name of a result code, such as "moecclTimeout". Never NULL. */
MOECCL_API const char* moecclGetErrorString(moecclResult_t result);

/* Returns a sentence about the last failure on `comm`, or about the calling thread's last failure when comm is NULL or
 * not a live communicator. The library owns the text, which stays valid during the calling thread's next seven calls of
 * this function. Never NULL; empty when nothing has failed. After a call with a bad handle, pass NULL. */
MOECCL_API const char* moecclGetLastError(moecclComm_t comm);

/* Gets the version of the loaded library, comparable with MOECCL_VERSION. */
MOECCL_API moecclResult_t moecclGetVersion(int* version);

/* Returns the size of one element in bytes; 0 for an unknown type. */
MOECCL_API size_t moecclTypeSize(moecclDataType_t type);
/* Returns the name of a type, such as "float32" or "bfloat16"; "unknown type" for any other value. Never NULL. */
MOECCL_API const char* moecclTypeName(moecclDataType_t type);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_TYPES_H_ */
