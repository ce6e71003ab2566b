/* SPDX-License-Identifier: Apache-2.0 */
/* Profiles: what this machine's links and plans cost, as measured. Conventions: types.h. */
#ifndef MOECCL_PROFILE_H_
#define MOECCL_PROFILE_H_

#include <moeccl/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Measures every algorithm of the standard collectives over sizes, and every level's links, on this communicator, and
 * uses the result from the next operation on. Collective, blocks, for about budget_ms (0: 20000); sizes are at most
 * max_bytes (0: 16 MiB) of the larger buffer. moecclInvalidArgument when budget_ms does not suffice to time every link
 * once; the sentence says how much does. MOECCL_CALIBRATE=milliseconds does it at init, with a cache. */
MOECCL_API moecclResult_t moecclCalibrate(moecclComm_t comm, double budget_ms, size_t max_bytes);
/* Uses a profile file from the next operation on. Collective: every rank reads its `path`; moecclMismatch on all ranks,
 * naming two, when they read different profiles. moecclInvalidArgument names file, line and column of a mistake.
 * MOECCL_PROFILE=path does it at init. */
MOECCL_API moecclResult_t moecclProfileLoad(moecclComm_t comm, const char* path);
/* Writes the profile in use: readable JSON, docs/calibration.md. The file appears whole or not at all; a symbolic link
 * is followed. moecclInvalidArgument when path is a device, a pipe or a folder. Not collective. */
MOECCL_API moecclResult_t moecclProfileSave(moecclComm_t comm, const char* path);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_PROFILE_H_ */
