# SPDX-License-Identifier: Apache-2.0
"""JAX: collectives, and dispatch and combine of tokens over the experts of all ranks, inside jax.jit and with gradients.

    comm = moeccl.Comm.from_env()                                    # one process for each rank
    ep = moeccl.jax.ExpertParallel(comm, n_experts=8, top_k=2, hidden=256, max_tokens=1024)

    @jax.jit
    def layer(x, topk_idx, topk_weights, experts):
        rows, counts, routing = ep.dispatch(x, topk_idx, topk_weights)
        return ep.combine(jax.lax.ragged_dot(rows, experts, counts), routing)

All ranks run the same programs in the same order. See docs/jax.md."""
from ._primitives import ORDER
from .collectives import all_gather, all_reduce, all_to_all, broadcast, reduce, reduce_scatter
from .experts import ExpertParallel, Routing

__all__ = ["ORDER", "ExpertParallel", "Routing", "all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter"]
