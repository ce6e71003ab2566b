/* SPDX-License-Identifier: Apache-2.0 */
/* Profiles: the measured costs of this machine's links and plans. Conventions: types.h. */
#ifndef MOECCL_PROFILE_H_
#define MOECCL_PROFILE_H_

#include <moeccl/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Measures every algorithm of the standard collectives over a range of sizes, and every level's links, on this
 * communicator, and uses the result from the next operation on. The call is collective and blocks for about budget_ms
 * (0: 20000). Sizes are at most max_bytes (0: 16 MiB) of the larger buffer. Returns moecclMismatch if ranks pass
 * different numbers, and moecclInvalidArgument when budget_ms is too short to time every link once; the error text says
 * how much is enough. MOECCL_CALIBRATE=milliseconds does the same at init, with a cache. */
MOECCL_API moecclResult_t moecclCalibrate(moecclComm_t comm, double budget_ms, size_t max_bytes);
/* Uses a profile file from the next operation on. The call is collective, and every rank reads the file at its own
 * `path`. If the profiles differ, all ranks get moecclMismatch, which names two of them. moecclInvalidArgument names
 * the file, line and column of a mistake. MOECCL_PROFILE=path does the same at init. */
MOECCL_API moecclResult_t moecclProfileLoad(moecclComm_t comm, const char* path);
/* Writes the profile in use as readable JSON (docs/calibration.md). The file appears whole or not at all; a symbolic
 * link is followed. path = NULL: the user's cache, where MOECCL_CALIBRATE looks. Returns moecclInvalidArgument when
 * path is a device, a pipe or a directory. This call is not collective. */
MOECCL_API moecclResult_t moecclProfileSave(moecclComm_t comm, const char* path);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_PROFILE_H_ */
