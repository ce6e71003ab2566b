/* SPDX-License-Identifier: Apache-2.0 */
/* Communicators that lose or gain ranks. Conventions: types.h. docs/faults.md says what a rank can rely on after a
 * failure.
 *
 * After a failure, call moecclCommShrink() on every remaining rank, destroy the old communicator with
 * moecclCommDestroy(), and make new layers, routings and registrations on the new one. A shrink uses none of the old
 * communicator's links, so their state does not matter. */
#ifndef MOECCL_ELASTIC_H_
#define MOECCL_ELASTIC_H_

#include <moeccl/comm.h>
#include <moeccl/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Flags of moecclCommShrink. */
#define MOECCL_SHRINK_DEFAULT 0x00 /* this rank's operations on comm first end by themselves */
#define MOECCL_SHRINK_ABORT 0x01   /* they are ended as by moecclCommAbort, and comm accepts no further ones */

/* Makes a new communicator *new_comm of the ranks of comm that stay. They keep their order; moecclCommUserRank and
 * moecclCommCount return the new numbers, and the levels of a discovered topology are those of the remaining hosts.
 * comm may be working, failed, aborted or revoked. A shrink changes nothing on it, and it must still be destroyed.
 *
 * exclude_ranks[n_exclude]: the ranks of comm that do not stay. They may be alive, and they do not call. The array is
 * read during the call. Every other rank calls with the same list. If a rank outside the list is gone too, all ranks
 * get moecclRemoteError, which names it.
 * With n_exclude 0 (exclude_ranks may be NULL) all ranks stay except those that are gone. A rank is gone if its process
 * has ended, if it has destroyed comm without an earlier failure, or if no calling rank is connected to it any more.
 * The calling ranks wait for a rank that is alive but does not call; moecclTimeout then names it, and a call that
 * excludes it can go on without it. If a network is cut in two, each part becomes a communicator: compare
 * moecclCommCount with the number of ranks that you need.
 * Ranks that die during the call, even all but one, are left out in the same way. A rank therefore does not need to
 * have noticed a failure before it calls.
 *
 * config: NULL inherits comm's settings except topology and pace, as in moecclCommSplit; init_timeout_ms limits the
 * whole call, but for the wait for running operations of MOECCL_SHRINK_DEFAULT. flags: MOECCL_SHRINK_*. The call
 * blocks, is collective over the ranks that stay, and is not allowed in a group. comm must not be destroyed meanwhile;
 * other communicators may be used.
 *
 * Returns moecclInvalidArgument if an excluded rank is not in comm or is the calling rank, or if flags are unknown;
 * moecclMismatch if two ranks exclude different ranks or have different configurations; moecclTimeout if ranks did not
 * come; moecclRemoteError if a rank failed, or if a rank that is not excluded is gone. */
MOECCL_API moecclResult_t moecclCommShrink(moecclComm_t comm, const int* exclude_ranks, int n_exclude,
                                           moecclComm_t* new_comm, const moecclConfig_t* config, int flags);

/* Makes an id under which comm's ranks and new ones meet for one moecclCommGrow. It is like moecclGetUniqueId, but if
 * comm spans several hosts, the meeting point has an address of this host that the others can reach. If comm is on a
 * single host and new ranks come from another one, MOECCL_SOCKET_ADDR must name the address. Call it on one rank. */
MOECCL_API moecclResult_t moecclCommGetUniqueId(moecclComm_t comm, moecclUniqueId* id);

/* Makes a new communicator *new_comm of n_ranks: all ranks of comm, with their numbers, followed by new ranks.
 *
 * On the ranks of comm: comm must be working (shrink first after a failure) and must not be used for anything else
 * meanwhile; rank is -1; id is passed by the rank that has it from moecclCommGetUniqueId and is NULL on the others
 * (several ranks may pass the same id). A NULL config inherits comm's settings except topology and pace. comm's
 * topology says nothing about new ranks, so *new_comm has one only if all ranks give the same in config. On new ranks:
 * comm is NULL; id is required; rank is between the old number of ranks and n_ranks - 1; config is as for
 * moecclCommInitRankConfig, with the same deterministic, staging_bytes and priority as comm's.
 *
 * Blocks until all n_ranks have come. comm stays as it is and must still be destroyed. The call is not allowed in a
 * group.
 * Returns moecclInvalidArgument if n_ranks is not larger than comm's, a rank is out of range, or there is no id or two
 * different ones; moecclTimeout, which names the ranks that did not come; moecclMismatch if n_ranks or the
 * configuration differ, or a rank joined twice; moecclRemoteError if a rank died. */
MOECCL_API moecclResult_t moecclCommGrow(moecclComm_t comm, int n_ranks, const moecclUniqueId* id, int rank,
                                         moecclComm_t* new_comm, const moecclConfig_t* config);

/* Ends the operations of comm on all its ranks: waiting and later operations return moecclAborted, "rank 2 revoked the
 * communicator", at once on the caller and within milliseconds elsewhere. An operation that needs nothing more from any
 * rank may still succeed, and a rank without any connection is not told. On a communicator that has failed, the call
 * tells the ranks that do not know about the failure yet. comm can then be shrunk and destroyed. This call is not
 * collective and may be made from any thread. */
MOECCL_API moecclResult_t moecclCommRevoke(moecclComm_t comm);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_ELASTIC_H_ */
