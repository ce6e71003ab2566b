/* SPDX-License-Identifier: Apache-2.0 */
/* Experts made small enough to migrate at every step (HybridEP, Section IV-B): a shared expert, which every rank holds,
 * plus the largest elements of the residual, as values and indices. Conventions: types.h. The encode and decode calls
 * are not collective, do not wait, and may run on any thread. They take only moecclFloat32 and moecclBfloat16.
 *
 * The Fused calls (Fig. 15) work through an expert piece by piece and call a function of the program for each piece, so
 * that the optimizer's step and the codec, or the codec and the computation, find the same piece in the cache. The
 * function runs on the calling thread, in ascending order, and each element is in exactly one piece. If the function
 * returns a number other than 0, the call ends at once with moecclInvalidUsage, and the error text has the number and
 * the elements. */
#ifndef MOECCL_CODEC_H_
#define MOECCL_CODEC_H_

#include <moeccl/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Parameters of a codec call. count and type must be set; all zero except for the size is not valid. */
typedef struct {
  size_t size;           /* sizeof(moecclCodec_t) */
  size_t count;          /* elements of an expert */
  moecclDataType_t type; /* moecclFloat32 or moecclBfloat16 */
  double ratio; /* bytes of the expert over bytes that are kept, >= 1; 0 means 50. 1 is exact: nothing is dropped */
} moecclCodec_t;
#define MOECCL_CODEC_INIT \
  { sizeof(moecclCodec_t), 0, moecclFloat32, 0 }

/* What encoding lost from one expert. */
typedef struct {
  double max_dropped; /* the magnitude of the largest residual that was dropped */
  double relative;    /* |expert - decoded| / |expert| in the Euclidean norm, from squares in fp32: NaN where they
                         overflow (elements from 1e19 on); infinity where only the expert is 0 */
} moecclCodecError_t;

/* Gets the size of an encoded expert: a header of 32 bytes and, for each block of n elements (65536, the last one
 * fewer), floor(n * e / (ratio * (e + 2))) values of e bytes, but at least one, and as many indices of 2 bytes, where e
 * is the type's size. With ratio 1 it is the header and the expert itself. The shape determines the size, not the data.
 */
MOECCL_API moecclResult_t moecclCodecBytes(const moecclCodec_t* codec, size_t* bytes);
/* Writes encoded[bytes], with bytes at least moecclCodecBytes(): the largest elements of expert[count] - shared[count]
 * in each block (on a tie, the one with the lower index). The result has the same bytes on every processor. error may
 * be NULL. Returns moecclInvalidArgument if encoded overlaps expert or shared. The call takes about 1 MiB of scratch
 * memory while it runs. */
MOECCL_API moecclResult_t moecclCodecEncode(const moecclCodec_t* codec, const void* expert, const void* shared,
                                            void* encoded, size_t bytes, moecclCodecError_t* error);
/* out[count] = shared[count] + the residual in encoded[bytes]. Returns moecclInvalidArgument if out overlaps shared or
 * encoded, even in place, or if `encoded` was not made with this codec (its header or an index is wrong); only then is
 * out undefined. With ratio 1, shared is not read. */
MOECCL_API moecclResult_t moecclCodecDecode(const moecclCodec_t* codec, const void* encoded, size_t bytes,
                                            const void* shared, void* out);

/* The optimizer's step on elements [first, first + count) of an expert. It gives them their new values and changes
 * neither another element nor the shared expert. `expert` is the expert's index in the call's array. Returns 0 on
 * success. */
typedef int (*moecclExpertUpdateFn_t)(void* context, int expert, size_t first, size_t count);

/* Encodes experts[n][count] that share one expert, fused with the optimizer's step (HybridEP, Section IV-B, Fig. 15 a).
 * encoded[n][moecclCodecBytes()], `bytes` in all, gets exactly the bytes that moecclCodecEncode would make of each
 * expert after update(context, expert, first, count) on all of its elements. `experts` is the memory that update writes
 * to. The experts take turns, in blocks of 65536 elements, so that the shared one is loaded from memory once. All
 * arguments are checked before the first step. If update ends the call, earlier pieces have their new values, the
 * others their old ones, and `encoded` is undefined. errors[n] may be NULL. */
MOECCL_API moecclResult_t moecclCodecEncodeFused(const moecclCodec_t* codec, const void* experts, size_t n,
                                                 const void* shared, moecclExpertUpdateFn_t update, void* context,
                                                 void* encoded, size_t bytes, moecclCodecError_t* errors);

/* A computation with values[count], elements [first, first + count) of an expert. The values are valid only during the
 * call. Returns 0 on success. */
typedef int (*moecclExpertUseFn_t)(void* context, size_t first, size_t count, const void* values);

/* Which elements are decoded, and for what computation. All zero except for size and use means the whole expert, in any
 * pieces. */
typedef struct {
  size_t size;             /* sizeof(moecclExpertUse_t) */
  size_t first, count;     /* elements [first, first + count) of the expert; count 0: from first to its end */
  size_t row;              /* pieces are whole rows of this many elements, starting at first; divides count; 0: 1 */
  moecclExpertUseFn_t use; /* called for each piece of about 16384 elements, or one row if that is longer */
  void* context;           /* its first argument */
} moecclExpertUse_t;
#define MOECCL_EXPERT_USE_INIT \
  { sizeof(moecclExpertUse_t), 0, 0, 0, NULL, NULL }

/* Decodes an expert, fused with its computation (HybridEP, Section IV-B, Fig. 15 b). `use` gets the values that
 * moecclCodecDecode would write, bit for bit, from a buffer of one piece that the call owns; the expert is never
 * written to memory. With ratio 1 the values lie in `encoded` itself. The cost of a range is proportional to its
 * length, so threads may share an expert, and a backward pass may start with its second matrix. Returns
 * moecclInvalidArgument as moecclCodecDecode does, before any call of `use`. */
MOECCL_API moecclResult_t moecclCodecDecodeFused(const moecclCodec_t* codec, const void* encoded, size_t bytes,
                                                 const void* shared, const moecclExpertUse_t* use);

/* shared[count] = the mean over all ranks' experts[n_local][count]; n_total is the number of experts on all ranks. The
 * call is collective, and does not compare n_total. With a stream, the sum over this rank's experts is formed before
 * the call returns (on CUDA memory, with at most 64 experts per rank, on the stream), and the AllReduce runs on the
 * stream, in parallel with the backward pass. Host memory of `shared` is written only then; until then the library
 * holds the sum. CUDA memory of `shared` holds this rank's part of the mean from the call on, also in a group: after
 * moecclGroupCancel, or a moecclGroupEnd that is refused, it still holds that part. Sums are formed in fp32 and rounded
 * to `type` between ranks. */
MOECCL_API moecclResult_t moecclSharedExpert(const void* experts, size_t n_local, size_t n_total, void* shared,
                                             size_t count, moecclDataType_t type, moecclComm_t comm,
                                             moecclStream_t stream);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_CODEC_H_ */
