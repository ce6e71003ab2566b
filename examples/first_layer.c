/* SPDX-License-Identifier: Apache-2.0 */
/* The smallest program with a MoE layer. Start it with torchrun, mpirun or srun, one process per rank. */
#include <moeccl/moeccl.h>
#include <stdio.h>

int main(void) {
  static uint16_t tokens[2][7168], rows[64][7168]; /* bf16; a real program takes n_rows from `info` */
  const int32_t experts[2][2] = {{0, 5}, {3, 5}};  /* each token's two experts */
  const float weights[2][2] = {{0.7f, 0.3f}, {0.5f, 0.5f}};
  moecclMoeConfig_t layer = MOECCL_MOE_CONFIG_INIT;
  layer.hidden_bytes = sizeof tokens[0], layer.layout = moecclLayoutExpertMajor;
  layer.n_experts = 8, layer.top_k = 2, layer.max_tokens = 2;
  moecclComm_t comm = NULL;
  moecclMoe_t moe;
  moecclRouting_t routing;
  moecclRoutingInfo_t info = {.size = sizeof info};
  if (moecclCommInitEnv(&comm, NULL) || moecclMoeCreate(&moe, comm, &layer) ||
      moecclRoutingCreate(&routing, moe, experts[0], weights[0], 2) || moecclRoutingGetInfo(routing, &info))
    return fprintf(stderr, "%s\n", moecclGetLastError(comm)), 1;
  if (info.n_rows > 64) return fprintf(stderr, "no room for %zu rows\n", info.n_rows), 1;
  if (moecclDispatch(routing, tokens, rows, NULL) || /* here this rank's experts work on `rows` */
      moecclCombine(routing, rows, tokens, NULL))
    return fprintf(stderr, "%s\n", moecclGetLastError(comm)), 1;
  printf("%zu rows came here by %s\n", info.n_rows, info.algorithm);
  return moecclRoutingDestroy(routing) || moecclMoeDestroy(moe) || moecclCommDestroy(comm);
}
