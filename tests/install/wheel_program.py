# SPDX-License-Identifier: Apache-2.0
"""One rank of a job, described by torchrun's environment variables but without torch: dispatch and combine of a small layer."""
import array

import moeccl

TOKENS, HIDDEN, EXPERTS, TOP_K = 64, 32, 8, 2

with moeccl.Comm.from_env(timeout_ms=30000) as comm:
    moe = moeccl.Moe(comm, 4 * HIDDEN, n_experts=EXPERTS, top_k=TOP_K, max_tokens=TOKENS)
    index = array.array("i", [(comm.rank + t + j * (1 + t % 3)) % EXPERTS for t in range(TOKENS) for j in range(TOP_K)])
    routing = moe.routing(index, array.array("f", [0.75, 0.5] * TOKENS))
    rows = array.array("f", bytes(4 * HIDDEN * routing.n_rows))
    tokens = array.array("f", [float(comm.rank + t) for t in range(TOKENS) for _ in range(HIDDEN)])
    routing.dispatch(tokens, rows)
    for i, value in enumerate(rows):  # each expert doubles
        rows[i] = 2 * value
    result = array.array("f", bytes(4 * HIDDEN * TOKENS))
    routing.combine(rows, result)
    if list(result) != [2.5 * value for value in tokens]:
        raise SystemExit(f"rank {comm.rank}: combine gave {list(result[:4])} for {list(tokens[:4])}")
    print(f"rank {comm.rank} of {comm.size}: {routing.n_rows} rows")
