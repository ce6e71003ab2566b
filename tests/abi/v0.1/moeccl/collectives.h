/* Standard collectives. Shapes in [brackets] are in elements, n is the communicator's size. Conventions: types.h.
 *
 * All ranks of a communicator call the same operation with the same count, type, operator and root, in the same order;
 * a difference is moecclMismatch, which names both ranks and the field. A count of 0 is allowed everywhere and a buffer
 * of no elements may be NULL. In place means that the output overlaps the input exactly where each comment says; any
 * other overlap is moecclInvalidArgument. */
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
 * recv_displs[r]. The arrays [n] are read at once. recv_counts[r] must equal what rank r sends, otherwise
 * moecclMismatch. Out of place only. */
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
 * Sizes that differ are moecclMismatch at the receiver. Sending to oneself needs a group. */
MOECCL_API moecclResult_t moecclSend(const void* send, size_t count, moecclDataType_t type, int peer, moecclComm_t comm,
                                     moecclStream_t stream);
MOECCL_API moecclResult_t moecclRecv(void* recv, size_t count, moecclDataType_t type, int peer, moecclComm_t comm,
                                     moecclStream_t stream);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_COLLECTIVES_H_ */
