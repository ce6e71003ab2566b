/* SPDX-License-Identifier: Apache-2.0 */
/* A MoE layer on four ranks, which are threads of one process here. Each rank sends every token to the two experts that
 * the token chose, the experts run (here they multiply by ten), and every token gets the weighted sum of its experts'
 * outputs. */
#include <moeccl/moeccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { kRanks = 4, kExperts = 8, kTopK = 2, kTokens = 3, kHidden = 16 };

static int layer(moecclComm_t comm, int rank) {
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  config.hidden_bytes = kHidden * sizeof(float);
  config.type = moecclFloat32;
  config.top_k = kTopK;
  config.n_experts = kExperts;
  config.max_tokens = kTokens;
  config.layout = moecclLayoutExpertMajor;
  float tokens[kTokens][kHidden], out[kTokens][kHidden], weights[kTokens][kTopK], *rows = NULL;
  int32_t experts[kTokens][kTopK];
  for (int t = 0; t < kTokens; t++) {
    for (int h = 0; h < kHidden; h++) tokens[t][h] = (float)(100 * rank + t);
    for (int j = 0; j < kTopK; j++) {
      experts[t][j] = (rank + t + 3 * j) % kExperts;
      weights[t][j] = 0.5f;
    }
  }
  moecclMoe_t moe = NULL;
  moecclRouting_t routing = NULL;
  moecclRoutingInfo_t info = {.size = sizeof info};
  int failed = moecclMoeCreate(&moe, comm, &config) != moecclSuccess ||
               moecclRoutingCreate(&routing, moe, experts[0], weights[0], kTokens) != moecclSuccess ||
               moecclRoutingGetInfo(routing, &info) != moecclSuccess ||
               moecclMemAlloc((void**)&rows, (info.n_rows + 1) * config.hidden_bytes) != moecclSuccess ||
               moecclDispatch(routing, tokens, rows, NULL) != moecclSuccess;
  for (size_t i = 0; !failed && i < info.n_rows * kHidden; i++) rows[i] *= 10; /* the experts */
  failed = failed || moecclCombine(routing, rows, out, NULL) != moecclSuccess;
  if (failed) fprintf(stderr, "rank %d: %s\n", rank, moecclGetLastError(comm));
  if (!failed)
    printf("rank %d: %zu rows, plan %s, token 1: %g -> %g\n", rank, info.n_rows, info.algorithm, tokens[1][0],
           out[1][0]);
  if (routing != NULL) moecclRoutingDestroy(routing);
  if (moe != NULL) moecclMoeDestroy(moe);
  if (rows != NULL) moecclMemFree(rows);
  return failed;
}

static void* run_rank(void* argument) {
  moecclComm_t comm = argument;
  int rank = 0;
  const int failed = moecclCommUserRank(comm, &rank) != moecclSuccess || layer(comm, rank);
  if (failed) moecclCommAbort(comm); /* the others must not wait for this rank */
  return failed ? argument : NULL;
}

int main(void) {
  moecclComm_t comms[kRanks];
  pthread_t threads[kRanks];
  int failed = 0;
  if (moecclCommInitAll(comms, kRanks, NULL) != moecclSuccess) {
    fprintf(stderr, "%s\n", moecclGetLastError(NULL));
    return 1;
  }
  for (int r = 0; r < kRanks; r++)
    if (pthread_create(&threads[r], NULL, run_rank, comms[r]) != 0) abort();
  for (int r = 0; r < kRanks; r++) {
    void* result = NULL;
    pthread_join(threads[r], &result);
    failed |= result != NULL;
    moecclCommDestroy(comms[r]);
  }
  return failed;
}
