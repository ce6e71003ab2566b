/* SPDX-License-Identifier: Apache-2.0 */
/* Experts made small enough to migrate at every step (HybridEP, Section IV-B): a shared expert, which every rank holds,
 * plus the largest elements of the residual, as values and indices. Conventions: types.h. None of the encode and decode
 * calls is collective or waits; they may run on any thread. Only moecclFloat32 and moecclBfloat16. */
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
