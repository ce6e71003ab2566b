/* SPDX-License-Identifier: Apache-2.0 */
/* Status: what the communicators of a process, even a hung one, are doing and waiting for. Conventions: types.h. */
#ifndef MOECCL_STATUS_H_
#define MOECCL_STATUS_H_

#include <moeccl/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Writes JSON about all communicators of process `pid` of this host; 0 means the calling process. This call is not
 * collective, works from any thread, and neither stops the process nor waits for it. The caller must own the process or
 * be root, and must be in the same pid namespace.
 *   {"format": "moeccl-status", "version": 1, "host", "host_id", "pid", "written_unix_ms", "communicators": [
 *     {"group" (the same on all ranks of a communicator), "name", "memory": "host" or "CUDA", "rank", "n_ranks",
 *      "hosts": [{"name", "host_id", "ranks": [[first, last], ...], "clock_ahead_ms"}] where the ranks are on several
 *        hosts; clock_ahead_ms: by how much its clock was ahead of the first one's at init, if by 1 s or more,
 *      "state": "running" or "failed", then also "code", "failure", "failed_unix_ms";
 *      "operations": the last 64, oldest first: [{"sequence" (0: Send/Recv, with "peer" instead of "root"), "op",
 *        "count" (elements), "type", "reduce", "root", "plan", "state": "running", "done" or "failed", "began_ms_ago",
 *        "took_ms"}],
 *      "waits": what has been blocked for 10 ms or more: [{"what", "sequence", "thread", "blocked_ms", "for": ranks
 *        that have not done all of their part, "for_total", "awaits": the only rank that can let it go on, if known
 *      }]}]}
 * text[bytes] gets the JSON, truncated if it is too long, and always ends in a zero byte; NULL only asks for the size.
 * *needed (may be NULL) gets the full length + 1, which may differ in the next call. Returns moecclRemoteError if there
 * is no such process, if the caller may not read it, or if it has made no communicator.
 * MOECCL_DUMP=path writes the same JSON when a communicator fails; `moeccl status` and `moeccl postmortem` read it. */
MOECCL_API moecclResult_t moecclStatus(int pid, char* text, size_t bytes, size_t* needed);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_STATUS_H_ */
