/* SPDX-License-Identifier: Apache-2.0 */
/* Status: what the communicators of a process do and wait for, also of a process that hangs. Conventions: types.h. */
#ifndef MOECCL_STATUS_H_
#define MOECCL_STATUS_H_

#include <moeccl/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Writes JSON about all communicators of process `pid` of this host; 0: the calling one. Not collective; any thread; it
 * neither stops the process nor waits for it. The caller must be its owner, or root, and in the same pid namespace.
 *   {"format": "moeccl-status", "version": 1, "host", "host_id", "pid", "written_unix_ms", "communicators": [
 *     {"group" (the same on all ranks of a communicator), "name", "memory": "host" or "CUDA", "rank", "n_ranks",
 *      "hosts": [{"name", "host_id", "ranks": [[first, last], ...]}] where the ranks are on several hosts,
 *      "state": "running" or "failed", then also "code", "failure", "failed_unix_ms";
 *      "operations": the last 64, oldest first: [{"sequence" (0: Send/Recv, with "peer" instead of "root"), "op",
 *        "count" (elements), "type", "reduce", "root", "plan", "state": "running", "done" or "failed", "began_ms_ago",
 *        "took_ms"}],
 *      "waits": what has been blocked for 10 ms or more: [{"what", "sequence", "thread", "blocked_ms", "for": ranks
 * that have not taken all of their part, "for_total", "awaits": the only rank that can let it go on, if known}]}]}
 * text: [bytes], cut where it is too small, with a 0 behind; NULL asks for the size alone. *needed (may be NULL): the
 * full length + 1, which may differ in the next call. moecclRemoteError when there is no such process, it may not be
 * looked at, or it has made no communicator.
 * MOECCL_DUMP=path writes the same when a communicator fails; `moeccl status` and `moeccl postmortem` read it. */
MOECCL_API moecclResult_t moecclStatus(int pid, char* text, size_t bytes, size_t* needed);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_STATUS_H_ */
