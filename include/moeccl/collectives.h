/* SPDX-License-Identifier: Apache-2.0 */
/* Standard collectives. Shapes in [brackets] are in elements; n is the communicator's size. Conventions: types.h.
 *
 * All ranks of a communicator call the same operations in the same order, with the same count, type, operator and root.
 * A difference is moecclMismatch, which names two ranks and the field. Ranks do not wait for one another to compare
 * their calls, so a rank learns of a difference in the operation itself only if it needs data from a rank that differs:
 *   AllReduce, AllGather, ReduceScatter, AllToAll: every rank learns of it.
 *   AllToAllv: every rank learns of a difference in type or order. Both ranks of a pair learn of a difference in sizes.
 *   Broadcast, Scatter: a rank that is not its own root learns of it when it differs from that root. A root that only
 *     sends may return moecclSuccess, even if another rank acts as a root too, and so may ranks that agree with their
 *     root.
 *   Reduce, Gather: a root learns of it when any rank differs from the root. Ranks that only send may return
 *     moecclSuccess.
 *   Send, Recv: the receiver learns of a difference in size or type. The sender of a message that fits the slots may
 *     return moecclSuccess.
 *   experts.h, moe.h, hybrid.h: a rank that needs data of a rank that differs learns of it.
 * Other ranks may get the error in the same operation as well. They get it at the latest in the second operation that
 * follows on the communicator, or in the next one if that belongs to one of the first two groups. The communicator
 * cannot be used after that. docs/mismatches.md has the table.
 *
 * A count of 0 is always allowed, and a buffer of no elements may be NULL. In place means that the output overlaps the
 * input exactly as each comment says; any other overlap is moecclInvalidArgument, and so is a buffer of more than 2^56
 * bytes.
 *
 * Arithmetic. Integers wrap, even in a sum from which an average is taken, and integer averages are truncated towards
 * 0. Max and Min of floats return NaN if any rank passes NaN, and either zero for -0 and +0. Floats of 8 and 16 bits
 * are reduced in fp32 and rounded to nearest even where a plan stores a partial result. Overflow gives infinity, except
 * in fp8 e4m3, which has none: there it gives plus or minus 448. Averages of fp16 and fp8 divide each rank's elements
 * before they are summed, so they do not overflow where the average is in range; other types divide the sum. */
#ifndef MOECCL_COLLECTIVES_H_
#define MOECCL_COLLECTIVES_H_

#include <moeccl/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/* recv[count] = reduction over ranks of send[count], on every rank. In place: send == recv. */
MOECCL_API moecclResult_t moecclAllReduce(const void* send, void* recv, size_t count, moecclDataType_t type,
                                          moecclRedOp_t op, moecclComm_t comm, moecclStream_t stream);
/* As moecclAllReduce, but only for the root; recv may be NULL elsewhere. In place at the root: send == recv. */
MOECCL_API moecclResult_t moecclReduce(const void* send, void* recv, size_t count, moecclDataType_t type,
                                       moecclRedOp_t op, int root, moecclComm_t comm, moecclStream_t stream);
/* recv[count] = the root's send[count]; send may be NULL elsewhere. In place: send == recv. */
MOECCL_API moecclResult_t moecclBroadcast(const void* send, void* recv, size_t count, moecclDataType_t type, int root,
                                          moecclComm_t comm, moecclStream_t stream);
/* recv[n][count]: block r is rank r's send[count]. In place: send == recv + rank * count. */
MOECCL_API moecclResult_t moecclAllGather(const void* send, void* recv, size_t count, moecclDataType_t type,
                                          moecclComm_t comm, moecclStream_t stream);
/* recv[count] = reduction over ranks of block `rank` of their send[n][count]. In place: recv == send + rank * count. */
MOECCL_API moecclResult_t moecclReduceScatter(const void* send, void* recv, size_t count, moecclDataType_t type,
                                              moecclRedOp_t op, moecclComm_t comm, moecclStream_t stream);
/* recv[n][count]: block r is block `rank` of rank r's send[n][count]. In place: send == recv. */
MOECCL_API moecclResult_t moecclAllToAll(const void* send, void* recv, size_t count, moecclDataType_t type,
                                         moecclComm_t comm, moecclStream_t stream);
/* Sends send_counts[r] elements at send + send_displs[r] to rank r, and receives recv_counts[r] elements from it at
 * recv + recv_displs[r]. The arrays have n entries and are read at once. recv_counts[r] must equal the number of
 * elements that rank r sends; otherwise both ranks get moecclMismatch, or moecclInvalidArgument where a rank's two
 * numbers for itself differ. Displacements are checked even where the count is 0. Out of place only. */
MOECCL_API moecclResult_t moecclAllToAllv(const void* send, const size_t* send_counts, const size_t* send_displs,
                                          void* recv, const size_t* recv_counts, const size_t* recv_displs,
                                          moecclDataType_t type, moecclComm_t comm, moecclStream_t stream);
/* At the root, recv[n][count]: block r is rank r's send[count]. In place at the root: send == recv + root * count. */
MOECCL_API moecclResult_t moecclGather(const void* send, void* recv, size_t count, moecclDataType_t type, int root,
                                       moecclComm_t comm, moecclStream_t stream);
/* recv[count] = block `rank` of the root's send[n][count]. In place at the root: recv == send + root * count. */
MOECCL_API moecclResult_t moecclScatter(const void* send, void* recv, size_t count, moecclDataType_t type, int root,
                                        moecclComm_t comm, moecclStream_t stream);
/* Point to point, matched in call order for each pair of ranks. Outside a group, a Send may block until the peer
 * receives; a message that fits into the link's slots returns before. A difference in size or type is moecclMismatch at
 * the receiver. A rank that sends to itself needs a group, with both calls on one stream. */
MOECCL_API moecclResult_t moecclSend(const void* send, size_t count, moecclDataType_t type, int peer, moecclComm_t comm,
                                     moecclStream_t stream);
MOECCL_API moecclResult_t moecclRecv(void* recv, size_t count, moecclDataType_t type, int peer, moecclComm_t comm,
                                     moecclStream_t stream);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_COLLECTIVES_H_ */
