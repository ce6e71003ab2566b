/* SPDX-License-Identifier: Apache-2.0 */
/* Communicators that lose or gain ranks. Conventions: types.h; what a rank can rely on after a failure: docs/faults.md.
 *
 * After a failure: moecclCommShrink() on every rank that is left, moecclCommDestroy() of the old communicator, and new
 * layers, routings and registrations on the new one. Nothing of the old one's links is used for that, so that it does
 * not matter what became of them. */
#ifndef MOECCL_ELASTIC_H_
#define MOECCL_ELASTIC_H_

#include <moeccl/comm.h>
#include <moeccl/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Flags of moecclCommShrink. */
#define MOECCL_SHRINK_DEFAULT 0x00 /* this rank's operations on comm end first, as they do by themselves */
#define MOECCL_SHRINK_ABORT 0x01   /* they are ended as by moecclCommAbort, and comm serves for no further ones */

/* A new communicator *new_comm of the ranks of comm that stay. They keep their order, and moecclCommUserRank and
 * moecclCommCount say the new numbers; levels of a discovered topology are those of the hosts that are left. comm may
 * work, have failed, or have been aborted or revoked; a shrink changes nothing on it, and it must be destroyed as
 * before.
 *
 * exclude_ranks [n_exclude]: the ranks of comm that do not stay, which may be alive and do not call; read during the
 * call. Every other rank calls with the same list. When yet another rank is gone, all get moecclRemoteError that names
 * it.
 * n_exclude 0 (exclude_ranks may be NULL): whichever ranks are gone do not stay: those whose process has ended, that
 * have destroyed comm without a failure before, or that no rank which calls is connected with any more. A rank that is
 * alive and does not call is waited for: moecclTimeout names it, and a call that excludes it goes on without it. Parts
 * of a network that is cut in two become a communicator each: compare moecclCommCount with what you need.
 * A rank that dies during the call, even the last but one, is left out in the same way. So nobody needs to have noticed
 * a failure before it calls.
 *
 * config: NULL inherits comm's, but for topology and pace, as moecclCommSplit; init_timeout_ms is the time for all of
 * it. flags: MOECCL_SHRINK_*. Blocks; collective over the ranks that stay; not in a group. comm must not be destroyed
 * meanwhile; other communicators may be used.
 *
 * moecclInvalidArgument: an excluded rank that is none of comm's or is the calling one, flags that do not exist;
 * moecclMismatch: two ranks exclude different ranks, or their configurations differ; moecclTimeout: ranks that did not
 * come; moecclRemoteError: a rank failed, or is gone beside those that are excluded. */
MOECCL_API moecclResult_t moecclCommShrink(moecclComm_t comm, const int* exclude_ranks, int n_exclude,
                                           moecclComm_t* new_comm, const moecclConfig_t* config, int flags);

/* An id under which comm's ranks and new ones meet for one moecclCommGrow: as moecclGetUniqueId, at an address of this
 * host that comm's hosts reach, where there are several. When new ranks come on another host than the only one of comm,
 * MOECCL_SOCKET_ADDR must say where to meet. Call it on one rank. */
MOECCL_API moecclResult_t moecclCommGetUniqueId(moecclComm_t comm, moecclUniqueId* id);

/* A new communicator *new_comm of n_ranks: all ranks of comm with their numbers, and new ranks behind them.
 *
 * On the ranks of comm: comm, which must work (shrink first after a failure) and can be used meanwhile by nothing else;
 * rank -1; id on the one rank that has it of moecclCommGetUniqueId, or on several the same, and NULL on the others.
 * config NULL inherits comm's, but for topology and pace.
 * On new ranks: comm NULL; id; rank, from the old number of ranks to n_ranks - 1; config as for
 * moecclCommInitRankConfig, with the same deterministic, staging_bytes and priority as comm's.
 *
 * Blocks until all n_ranks have come. comm stays as it is and must be destroyed. Not in a group.
 * moecclInvalidArgument: n_ranks that is not more than comm has, a rank out of range, no id or two different ones;
 * moecclTimeout: names the ranks that did not come; moecclMismatch: n_ranks or the configuration differ, or a rank was
 * joined twice; moecclRemoteError: a rank died. */
MOECCL_API moecclResult_t moecclCommGrow(moecclComm_t comm, int n_ranks, const moecclUniqueId* id, int rank,
                                         moecclComm_t* new_comm, const moecclConfig_t* config);

/* Ends what runs on comm, on all its ranks: operations that wait, and later ones, return moecclAborted, "rank 2 revoked
 * the communicator", on the caller at once, elsewhere within milliseconds. An operation that needs nothing more from
 * any rank may still succeed, and a rank that reaches no other is told by nobody. On a communicator that has failed,
 * the ranks that do not know it yet are told. comm can then be shrunk and destroyed. Not collective; any thread. */
MOECCL_API moecclResult_t moecclCommRevoke(moecclComm_t comm);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_ELASTIC_H_ */
