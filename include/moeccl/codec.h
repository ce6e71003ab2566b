/* SPDX-License-Identifier: Apache-2.0 */
/* Experts made small enough to migrate at every step (HybridEP, Section IV-B): a shared expert, which every rank holds,
 * plus the largest elements of the residual, as values and indices. Conventions: types.h. None of the encode and decode
 * calls is collective or waits; they may run on any thread. Only moecclFloat32 and moecclBfloat16.
 *
 * The calls named Fused (Fig. 15) work through an expert piece by piece and call the program for each, so that the
 * optimizer's step and the codec, or the codec and the computation, meet the same piece in the cache. The program's
 * function runs on the calling thread, in ascending order; each element is in exactly one piece. When it returns
 * another number than 0 the call ends at once with moecclInvalidUsage, and the sentence has the number and the
 * elements. */
#ifndef MOECCL_CODEC_H_
#define MOECCL_CODEC_H_

#include <moeccl/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a codec call is about. All zero but for the size is not valid: count and type must be set. */
typedef struct {
  size_t size;           /* sizeof(moecclCodec_t) */
  size_t count;          /* elements of an expert */
  moecclDataType_t type; /* moecclFloat32 or moecclBfloat16 */
  double ratio; /* bytes of the expert over bytes of what is kept, >= 1; 0 means 50. 1 is exact: nothing is dropped */
} moecclCodec_t;
#define MOECCL_CODEC_INIT \
  { sizeof(moecclCodec_t), 0, moecclFloat32, 0 }

/* What encoding lost of one expert. */
typedef struct {
  double max_dropped; /* the largest residual that was dropped, by magnitude */
  double relative;    /* |expert - decoded| / |expert| in the Euclidean norm */
} moecclCodecError_t;

/* *bytes: of an encoded expert: a header of 32 bytes and, in blocks of 65536 elements, floor(n * e / (ratio * (e + 2)))
 * values of e bytes and as many indices of 2 bytes. Fixed by the shape, not by the data. */
MOECCL_API moecclResult_t moecclCodecBytes(const moecclCodec_t* codec, size_t* bytes);
/* encoded[bytes], bytes at least moecclCodecBytes(): expert[count] less shared[count], the largest elements of each
 * block (ties: the lower index). The same bytes on every processor. error may be NULL. Takes about 1 MiB of scratch
 * memory for the time of the call. */
MOECCL_API moecclResult_t moecclCodecEncode(const moecclCodec_t* codec, const void* expert, const void* shared,
                                            void* encoded, size_t bytes, moecclCodecError_t* error);
/* out[count] = shared[count] + the residual in encoded[bytes]; out may not overlap shared. moecclInvalidArgument when
 * `encoded` was not made with this codec (its header or an index is wrong); out is then undefined. */
MOECCL_API moecclResult_t moecclCodecDecode(const moecclCodec_t* codec, const void* encoded, size_t bytes,
                                            const void* shared, void* out);

/* The optimizer's step on elements [first, first + count) of an expert: gives them their new values and changes no
 * other element, nor the shared expert. expert: its place in the call's array. Returns 0 when it is done. */
typedef int (*moecclExpertUpdateFn_t)(void* context, int expert, size_t first, size_t count);

/* Encoding fused with the optimizer's step (HybridEP, Section IV-B, Fig. 15 a), for experts[n][count] that share one:
 * encoded[n][moecclCodecBytes()], `bytes` in all, get what moecclCodecEncode makes of each expert behind
 * update(context, expert, first, count) on all of its elements, to the byte. `experts` is the memory that update writes
 * to. The experts take turns, in blocks of 65536 elements, so that the shared one comes from memory once. All arguments
 * are checked before the first step. When update ends the call, the pieces before have their new values, the others
 * their old ones, and `encoded` is undefined. errors[n] may be NULL. */
MOECCL_API moecclResult_t moecclCodecEncodeFused(const moecclCodec_t* codec, const void* experts, size_t n,
                                                 const void* shared, moecclExpertUpdateFn_t update, void* context,
                                                 void* encoded, size_t bytes, moecclCodecError_t* errors);

/* A computation with values[count], elements [first, first + count) of an expert, which are gone when it returns.
 * Returns 0 when it is done. */
typedef int (*moecclExpertUseFn_t)(void* context, size_t first, size_t count, const void* values);

/* Which elements are decoded, and for what. All zero but for size and use: the whole expert, in any pieces. */
typedef struct {
  size_t size;             /* sizeof(moecclExpertUse_t) */
  size_t first, count;     /* elements [first, first + count) of the expert; count 0: from first to its end */
  size_t row;              /* pieces are whole rows of so many elements, from first on; divides count; 0: 1 */
  moecclExpertUseFn_t use; /* called for each piece: of about 16384 elements, or one row where that is longer */
  void* context;           /* its first argument */
} moecclExpertUse_t;
#define MOECCL_EXPERT_USE_INIT \
  { sizeof(moecclExpertUse_t), 0, 0, 0, NULL, NULL }

/* Decoding fused with the expert's computation (HybridEP, Section IV-B, Fig. 15 b): hands over what moecclCodecDecode
 * would write, bit for bit, out of a buffer of one piece that the call owns; the expert is never written to memory.
 * With ratio 1 the values lie in `encoded` itself. Ranges cost what they hold: threads may share an expert, and a
 * backward pass may take its second matrix first. moecclInvalidArgument as for moecclCodecDecode; `use` has then not
 * run. */
MOECCL_API moecclResult_t moecclCodecDecodeFused(const moecclCodec_t* codec, const void* encoded, size_t bytes,
                                                 const void* shared, const moecclExpertUse_t* use);

/* shared[count] = the mean over all ranks' experts[n_local][count]; n_total: experts of all ranks. Collective. With a
 * stream, the sum over this rank's experts is formed before the call returns (on CUDA memory, at most 64 experts a
 * rank: on the stream), the AllReduce runs on the stream: beside the backward pass. Sums are formed in fp32 and rounded
 * to `type` between ranks. */
MOECCL_API moecclResult_t moecclSharedExpert(const void* experts, size_t n_local, size_t n_total, void* shared,
                                             size_t count, moecclDataType_t type, moecclComm_t comm,
                                             moecclStream_t stream);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_CODEC_H_ */
