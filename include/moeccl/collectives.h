/* SPDX-License-Identifier: Apache-2.0 */
/* Standard collectives. Shapes in [brackets] are in elements, n is the communicator's size. Conventions: types.h.
 *
 * All ranks of a communicator call the same operation with the same count, type, operator and root, in the same order;
 * a difference is moecclMismatch, which names two ranks and the field. Ranks do not wait for one another in order to
 * compare, so whose data a rank needs decides whether it learns of the difference in the operation itself:
 *   AllReduce, AllGather, ReduceScatter, AllToAll: every rank does.
 *   AllToAllv: every rank does of type and order, both ranks of the pair of sizes that differ.
 *   Broadcast, Scatter: a rank that is not its own root does when it and that root differ. A root that only sends may
 *     return moecclSuccess, also beside another root, and so may ranks that agree with their root.
 *   Reduce, Gather: a root does when any rank differs from it. Ranks that only send may return moecclSuccess.
 *   Send, Recv: the receiver does, of size and type. The sender of a message that fits the slots may return
 *     moecclSuccess.
 *   experts.h, moe.h, hybrid.h: a rank does that needs data of a rank that differs.
 * A rank that could not know may be told in the operation all the same, and is told at the latest by the second next
 * operation on the communicator; by the next, when that is one of the first two groups. The communicator cannot be used
 * any more then. docs/mismatches.md has the table.
 *
 * A count of 0 is allowed everywhere and a buffer of no elements may be NULL. In place means that the output overlaps
 * the input exactly where each comment says; any other overlap is moecclInvalidArgument, and so are buffers of more
 * than 2^56 bytes.
 *
 * Arithmetic. Integers wrap, also in a sum whose average is taken, and the average of integers is cut towards 0. Max
 * and Min of floats are NaN where any rank gives NaN, and of -0 and +0 give either. Floats of 8 and 16 bits are reduced
 * in fp32 and rounded to nearest even where a plan stores a partial result. What is too large becomes infinity; in fp8
 * e4m3, which has none, it becomes plus or minus 448. */
#ifndef MOECCL_COLLECTIVES_H_
#define MOECCL_COLLECTIVES_H_

#include <moeccl/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/* recv[count] = reduction over ranks of send[count], on every rank. In place: send == recv. */
MOECCL_API moecclResult_t moecclAllReduce(const void* send, void* recv, size_t count, moecclDataType_t type,
                                          moecclRedOp_t op, moecclComm_t comm, moecclStream_t stream);
/* The same on the root only; recv may be NULL elsewhere. In place at the root: send == recv. */
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
/* Block for rank r: send_counts[r] elements at send + send_displs[r]; from rank r: recv_counts[r] at recv +
 * recv_displs[r]. The arrays [n] are read at once. recv_counts[r] must equal what rank r sends, otherwise both ranks
 * get moecclMismatch. Out of place only. */
MOECCL_API moecclResult_t moecclAllToAllv(const void* send, const size_t* send_counts, const size_t* send_displs,
                                          void* recv, const size_t* recv_counts, const size_t* recv_displs,
                                          moecclDataType_t type, moecclComm_t comm, moecclStream_t stream);
/* Root's recv[n][count]: block r is rank r's send[count]. In place at the root: send == recv + root * count. */
MOECCL_API moecclResult_t moecclGather(const void* send, void* recv, size_t count, moecclDataType_t type, int root,
                                       moecclComm_t comm, moecclStream_t stream);
/* recv[count] = block `rank` of the root's send[n][count]. In place at the root: recv == send + root * count. */
MOECCL_API moecclResult_t moecclScatter(const void* send, void* recv, size_t count, moecclDataType_t type, int root,
                                        moecclComm_t comm, moecclStream_t stream);
/* Point to point; matched per pair of ranks in call order. Outside a group a Send blocks until the peer receives.
 * Sizes or types that differ are moecclMismatch at the receiver. Sending to oneself needs a group. */
MOECCL_API moecclResult_t moecclSend(const void* send, size_t count, moecclDataType_t type, int peer, moecclComm_t comm,
                                     moecclStream_t stream);
MOECCL_API moecclResult_t moecclRecv(void* recv, size_t count, moecclDataType_t type, int peer, moecclComm_t comm,
                                     moecclStream_t stream);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_COLLECTIVES_H_ */
