/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for NCCL. The test programs link to it, as ordinary programs link to NCCL, and the shim forwards to it. It
 * communicates nothing; it counts its calls and leaves marks that the tests look for.
 */
#include <stdlib.h>
#include <string.h>

#include "shim/nccl/table.h"

#define EXPORT __attribute__((visibility("default")))
#define FAKE_VERSION 22899

struct ncclComm {
  int rank, n_ranks;
};

static struct {
  const char* name;
  int calls, grouped;
} counters[128];
static _Thread_local int depth; /* of the thread's groups */

void fake_count(const char* name);
#define count fake_count
void fake_count(const char* name) {
  for (int i = 0; i < 128; ++i) {
    if (counters[i].name == NULL) counters[i].name = name;
    if (strcmp(counters[i].name, name) != 0) continue;
    __atomic_add_fetch(&counters[i].calls, 1, __ATOMIC_RELAXED);
    if (depth > 0) __atomic_add_fetch(&counters[i].grouped, 1, __ATOMIC_RELAXED);
    return;
  }
}

/* Returns how often the function (without "nccl") was called in this process. */
EXPORT int fakeNcclCalls(const char* name) {
  for (int i = 0; i < 128 && counters[i].name != NULL; ++i) {
    if (strcmp(counters[i].name, name) == 0) return counters[i].calls;
  }
  return 0;
}

/* Returns how often it was called inside a group. */
EXPORT int fakeNcclGroupedCalls(const char* name) {
  for (int i = 0; i < 128 && counters[i].name != NULL; ++i) {
    if (strcmp(counters[i].name, name) == 0) return counters[i].grouped;
  }
  return 0;
}

EXPORT ncclResult_t ncclGetVersion(int* version) {
  count("GetVersion");
  *version = FAKE_VERSION;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  count("GetUniqueId");
  memset(id, 'f', sizeof *id);
  return ncclSuccess;
}
EXPORT const char* ncclGetErrorString(ncclResult_t result) {
  count("GetErrorString");
  return result == ncclSuccess ? "fake success" : "fake failure";
}
EXPORT const char* ncclGetLastError(ncclComm_t comm) {
  (void)comm;
  count("GetLastError");
  return "fake last error";
}

static ncclResult_t make(ncclComm_t* comm, int n_ranks, int rank) {
  *comm = malloc(sizeof **comm);
  (*comm)->rank = rank;
  (*comm)->n_ranks = n_ranks;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int n_ranks, ncclUniqueId id, int rank,
                                           ncclConfig_t* config) {
  (void)config;
  count("CommInitRankConfig");
  const ncclResult_t made = id.internal[0] == 'f' ? make(comm, n_ranks, rank) : ncclInvalidArgument;
  return made == ncclSuccess && getenv("FAKE_NCCL_NEVER_READY") != NULL ? ncclInProgress : made;
}
EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* comm, int n_ranks, ncclUniqueId id, int rank) {
  count("CommInitRank");
  return id.internal[0] == 'f' ? make(comm, n_ranks, rank) : ncclInvalidArgument;
}
EXPORT ncclResult_t ncclCommInitAll(ncclComm_t* comms, int n_devices, const int* devices) {
  (void)devices;
  count("CommInitAll");
  /* Calls by the public name, as NCCL does. A shim in between must pass the call back. */
  ncclUniqueId id;
  ncclResult_t result = ncclGetUniqueId(&id);
  for (int r = 0; r < n_devices && result == ncclSuccess; ++r) {
    result = ncclCommInitRankConfig(&comms[r], n_devices, id, r, NULL);
  }
  return result;
}
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  count("CommDestroy");
  free(comm);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
  count("CommAbort");
  free(comm);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int* n) {
  count("CommCount");
  *n = comm->n_ranks;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  count("CommUserRank");
  *rank = comm->rank;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  (void)comm;
  count("CommGetAsyncError");
  *state = getenv("FAKE_NCCL_NEVER_READY") != NULL ? ncclInProgress : ncclSuccess;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclAllReduce(const void* send, void* recv, size_t n, ncclDataType_t type, ncclRedOp_t op,
                                  ncclComm_t comm, cudaStream_t stream) {
  (void)send, (void)type, (void)op, (void)comm, (void)stream;
  count("AllReduce");
  memset(recv, 0xfa, n); /* the mark */
  return ncclSuccess;
}
EXPORT ncclTeam_t ncclTeamWorld(ncclComm_t comm) {
  count("TeamWorld");
  const ncclTeam_t team = {comm->n_ranks, comm->rank, 77};
  return team;
}
EXPORT ncclResult_t ncclGroupStart(void) {
  count("GroupStart");
  ++depth;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclGroupEnd(void) {
  count("GroupEnd");
  --depth;
  return ncclSuccess;
}
