# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of tokens over the experts of all ranks, with gradients."""
from typing import Any, NamedTuple, Optional, Sequence, Tuple

import jax
import jax.numpy as jnp
import numpy as np

import moeccl
from moeccl._errors import number as whole
from moeccl._owned import Owned
from moeccl._placement import experts_of

from . import _routed
from ._native import lib, number_of, settle

_TYPES = {"float32": moeccl.FLOAT32, "bfloat16": moeccl.BFLOAT16, "float16": moeccl.FLOAT16, "float64": moeccl.FLOAT64}


class Routing(NamedTuple):
    """One step's routing, as arrays: it may be carried through scan, returned from a program, and used any number of times.

    The number stands for all of it. So do not put other choices or weights into a Routing (with _replace): while the library has the number's
    tables, it uses the old ones. Call route() with the new arrays.

    topk_idx:          [T, k] int32, the experts of each token
    topk_weights:      [T, k] float32; gradients of the router flow through it
    number:            [2] uint32, by which the library finds its tables; no other routing of the process has it
    rows_per_expert:   [local experts] int32, the rows of each local expert's group, padding included
    tokens_per_expert: [local experts] int32, without padding
    n_dropped:         [] int32, choices of this rank that capacity dropped"""
    topk_idx: jax.Array
    topk_weights: jax.Array
    number: jax.Array
    rows_per_expert: jax.Array
    tokens_per_expert: jax.Array
    n_dropped: jax.Array


class ExpertParallel:
    """Sends tokens to the ranks of their experts and brings the weighted results back; gradients flow through both.

        rows, counts, routing = ep.dispatch(x, topk_idx, topk_weights)
        out = jax.lax.ragged_dot(rows, w, counts)            # w[len(ep.local_experts), hidden, hidden]
        y = ep.combine(out, routing)                         # y[t] = sum over k of weight[t, k] * expert(x[t])

    comm:         a moeccl.Comm, which outlives this object
    n_experts:    experts on all ranks; expert_rank[n_experts] has the owner of each, None: contiguous, as even as possible
    top_k:        experts per token, at most 64
    hidden:       elements of a token's row
    max_tokens:   most tokens that any rank brings to a step; the ranks' numbers may differ
    dtype:        of the rows: float32, bfloat16, float16 or float64
    capacity:     most tokens that one rank sends to one expert; the rest are dropped and counted; 0: no limit
    align_rows:   each expert's rows begin at a multiple of this, padded with zeros
    algorithm:    "auto" chooses the levels at which tokens are deduplicated (HierMoE) for each routing, or "flat", "hier:2", ...
    routings:     how many steps' tables stay in memory. A step that lies further back, such as that of the first of many layers in the
                  backward pass, has its tables made again, by one more exchange of choices
    options:      memory_cap_bytes and trials, as in moecclMoeConfig_t (include/moeccl/moe.h)

    The constructor is collective, and so are dispatch, combine and their backward passes: all ranks run the same sequence. A rank may have no
    tokens (T = 0), or no experts. But JAX gives an array that was indexed with an empty one (table[ids]) no derivative, and a rank that gets
    its x or its weights so leaves out backward calls that the others make. Pad such a rank to the others' T, with -1 as choices. Arrays have fixed
    shapes: `rows` has ep.room rows, for the most that any choices can bring, and those that a step does not fill are zeros. Without
    capacity that is every rank's max_tokens * min(top_k, local experts); capacity makes it smaller."""

    def __init__(self, comm: moeccl.Comm, n_experts: int, top_k: int, hidden: int, max_tokens: int, *, dtype: Any = jnp.float32,
                 capacity: int = 0, align_rows: int = 1, expert_rank: Optional[Sequence[int]] = None, algorithm: Optional[str] = "auto",
                 routings: int = 16, **options: Any) -> None:
        self.dtype = np.dtype(dtype)
        if self.dtype.name not in _TYPES:
            raise TypeError(f"dtype is {self.dtype.name}: give one of {', '.join(_TYPES)}")
        if whole("routings", routings) < 1:
            raise ValueError(f"routings is {routings}: give a number from 1")
        settle()  # programs of this thread may still use the communicator
        member = number_of(comm)
        moe = moeccl.Moe(comm, hidden * self.dtype.itemsize, n_experts, top_k, max_tokens, _TYPES[self.dtype.name], moeccl.EXPERT_MAJOR,
                         expert_rank, algorithm, capacity=capacity, align_rows=align_rows, **options)
        self.comm, self.n_experts, self.top_k, self.hidden, self.max_tokens = comm, n_experts, top_k, hidden, max_tokens
        self.local_experts = experts_of(comm.rank, comm.size, n_experts, expert_rank)
        n_local, align = len(self.local_experts), max(1, align_rows)
        kept = min(capacity, max_tokens) if capacity else max_tokens
        # As the library's MoeLayer::most_rows() says; it also checks each routing against this number.
        self.rows_of_expert = -(-comm.size * kept // align) * align
        self.room = min(n_local * self.rows_of_expert, comm.size * max_tokens * min(top_k, n_local) + n_local * (align - 1))
        layer = lib.moecclJaxAddLayer(member, moe.handle, moe.row_bytes, top_k, self.room, routings)
        if layer == 0:
            raise MemoryError("no memory for a layer's number")

        def end(number: int) -> int:
            lib.moecclJaxRemoveLayer(number)
            moe.close()
            return 0

        self._owned = Owned(layer, end, comm._leftovers)
        self._parameters = {"layer": layer, "room": self.room, "n_local": n_local}

    def dispatch(self, x: Any, topk_idx: Any, topk_weights: Any = None) -> Tuple[jax.Array, jax.Array, Routing]:
        """Returns rows[room, hidden], the rows of each local expert, and the step's Routing.

        x[T, hidden]; topk_idx[T, k]: the experts of each token, distinct, -1 for none; topk_weights[T, k] or None for ones. Rows are grouped
        by expert, in the order of local_experts, and sorted by (source rank, token) in each group. combine() applies the weights."""
        routing = self.route(topk_idx, topk_weights)
        return self.send(x, routing), routing.rows_per_expert, routing

    def route(self, topk_idx: Any, topk_weights: Any = None) -> Routing:
        """The first half of dispatch(): makes one step's routing without moving any rows."""
        index = jnp.asarray(topk_idx)
        if not jnp.issubdtype(index.dtype, jnp.integer):
            raise TypeError(f"topk_idx holds {index.dtype}: give whole numbers, -1 for no expert")
        if index.ndim != 2 or index.shape[1] != self.top_k:
            raise ValueError(f"topk_idx has shape {index.shape}: give [tokens, {self.top_k}], as top_k says")
        if index.shape[0] > self.max_tokens:
            raise ValueError(f"topk_idx has {index.shape[0]} tokens: max_tokens is {self.max_tokens}")
        weights = jnp.ones(index.shape, jnp.float32) if topk_weights is None else jnp.asarray(topk_weights)
        if weights.shape != index.shape:
            raise ValueError(f"topk_weights has shape {weights.shape}: give {index.shape}, as topk_idx has")
        if not jnp.issubdtype(weights.dtype, jnp.floating):
            raise TypeError(f"topk_weights holds {weights.dtype}: give floating point numbers")
        if index.dtype.itemsize > 4 or index.dtype == jnp.uint32:
            # A number that does not fit becomes one that the library refuses, instead of another expert's.
            index = jnp.clip(index, None if index.dtype.kind == "u" else -2**31, 2**31 - 1)
        index, weights = index.astype(jnp.int32), weights.astype(jnp.float32)
        made = _routed.route.bind(index, jax.lax.stop_gradient(weights), **self._parameters)
        return Routing(index, weights, *made)

    def send(self, x: Any, routing: Routing) -> jax.Array:
        """The second half of dispatch(): returns rows[room, hidden]."""
        x = self._checked("x", jnp.asarray(x), routing.topk_idx.shape[0])
        return _routed.dispatch.bind(x, routing.topk_idx, jax.lax.stop_gradient(routing.topk_weights), routing.number,  # type: ignore[no-any-return]
                                     **self._parameters)[0]

    def combine(self, rows: Any, routing: Routing) -> jax.Array:
        """Returns y[T, hidden]: for each token the weighted sum of its experts' rows[room, hidden]; it does not read rows that are padding."""
        rows = self._checked("rows", jnp.asarray(rows), self.room)
        return _routed.combine.bind(rows, routing.topk_idx, routing.topk_weights, routing.number,  # type: ignore[no-any-return]
                                    **self._parameters)[0]

    def _checked(self, name: str, given: Any, n: int) -> Any:
        if given.shape != (n, self.hidden):
            raise ValueError(f"{name} has shape {given.shape}: give [{n}, {self.hidden}]")
        if given.dtype != self.dtype:
            raise TypeError(f"{name} holds {given.dtype}, and the layer's rows are {self.dtype}: give {name}.astype({self.dtype})")
        return given

    def by_expert(self, rows: jax.Array, counts: jax.Array) -> jax.Array:
        """Returns [local experts, rows_of_expert, hidden], each expert's rows followed by zeros, for a batched product."""
        if not self.local_experts:  # indexing would cut the derivative, and with it this rank's backward calls
            return rows.reshape(0, self.rows_of_expert, *rows.shape[1:])
        place = jnp.arange(self.rows_of_expert)
        filled = place < counts[:, None]
        row = jnp.where(filled, jnp.cumsum(counts)[:, None] - counts[:, None] + place, 0)
        return jnp.where(filled[..., None], rows[row], 0)

    def by_rows(self, grouped: jax.Array, counts: jax.Array) -> jax.Array:
        """Returns [room, ...] from grouped[local experts, rows_of_expert, ...], as combine() takes it: the inverse of by_expert()."""
        if not self.local_experts:
            return grouped.reshape(0, *grouped.shape[2:])
        ends, row = jnp.cumsum(counts), jnp.arange(self.room)
        expert = jnp.minimum(jnp.searchsorted(ends, row, side="right"), len(self.local_experts) - 1)
        place = jnp.clip(row - (ends - counts)[expert], 0, self.rows_of_expert - 1)
        filled = (row < ends[-1]).reshape(-1, *[1] * (grouped.ndim - 2))
        return jnp.where(filled, grouped[expert, place], 0)

    def close(self) -> None:
        """Waits for this thread's programs and frees the layer; programs that use it get an error from then on. The communicator stays."""
        settle()
        self._owned.close()
