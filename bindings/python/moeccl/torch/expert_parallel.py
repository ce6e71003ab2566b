# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of tokens over the experts of all ranks, with gradients."""
import copy
import ctypes
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch

import moeccl
from moeccl import _abi
from moeccl._placement import experts_of
from ._calls import DTYPES, FLOATS, Owned, as_int32, call, int32s, is_whole, listed, memory, uncompiled
from ._group import Group, comm_of, largest
from ._traced import Key, TracedHandle, refuse_export, tracing
from ._traced import combine as traced_combine, dispatch as traced_dispatch
from .float8 import KINDS, QuantizedDispatch, n_scales
from .functions import Combine, Dispatch, needs_anchor, new_anchor
from .in_flight import Depart, Flight, stream_for


class Handle:
    """One step's routing, shared by forward and backward; it lives as long as the graph needs it.

    n_tokens:           tokens of this rank, T
    n_rows:             rows that this rank's experts got, R, padding included
    local_experts:      numbers of this rank's experts, ascending: the order of the groups of rows. In a MoELayer with swap or
                        replica_slots these are slots, and layer.experts.numbers() has the expert in each
    tokens_per_expert:  tokens of each local expert, without padding
    rows_per_expert:    rows of each local expert's group, padding included: rows.split(handle.rows_per_expert)
    n_dropped:          choices of this rank that capacity dropped
    algorithm:          the plan that runs, such as "hier:2"
    """

    def __init__(self, layer, routing, weights):
        self.layer, self._routing, self.weights = layer, routing, weights
        info = self.info()
        n = info.n_local_experts
        self.n_tokens, self.n_rows, self.n_dropped = info.n_tokens, info.n_rows, int(info.n_dropped)
        self.local_experts = listed(info.local_experts, n)
        self.tokens_per_expert = listed(info.expert_counts, n)
        offsets = listed(info.expert_offsets, n + 1)
        self.rows_per_expert = [b - a for a, b in zip(offsets, offsets[1:])]
        self.algorithm = info.algorithm.decode()

    @property
    def comm(self) -> moeccl.Comm:
        """The communicator of the layer."""
        return self.layer.comm

    @property
    def routing(self) -> Any:
        """The routing's handle, for calls of moeccl._abi."""
        return self._routing.handle

    def info(self) -> _abi.moecclRoutingInfo_t:
        """Returns the C structure moecclRoutingInfo_t (levels, bytes, times); its pointers are valid as long as this handle lives."""
        info = _abi.moecclRoutingInfo_t()
        call(self.comm, "moecclRoutingGetInfo", self.routing, ctypes.byref(info))
        return info

    def explain(self) -> str:
        """Returns a page for a person: candidates, the choice and the reason, rows and bytes per level, predicted and measured times."""
        needed = ctypes.c_size_t()
        call(self.comm, "moecclMoeExplain", self.routing, None, 0, ctypes.byref(needed))
        text = ctypes.create_string_buffer(needed.value)
        call(self.comm, "moecclMoeExplain", self.routing, text, needed.value, None)
        return text.value.decode()

    def __deepcopy__(self, memo):
        return self

    def __del__(self):
        if hasattr(self, "_routing"):
            self.layer.give_back(self._routing)


class Layer(Owned):
    """A MoE layer of the C interface for one element type, with unused routings, whose memory the next step reuses."""

    def __init__(self, comm, config, dtype, hybrid=None):
        self.top_k, self.row_bytes, self.dtype, self._free = config.top_k, config.hidden_bytes, dtype, []
        if hybrid is None:
            super().__init__(comm, "moecclMoeCreate", "moecclMoeDestroy", comm.handle, ctypes.byref(config))
        else:
            super().__init__(comm, "moecclHybridMoeCreate", "moecclMoeDestroy", hybrid, comm.handle, ctypes.byref(config))

    def route(self, index, weights):
        """Makes a Handle for index[T, k] (int32) and weights[T, k], or None for ones. The call is collective."""
        index = index.contiguous()
        values = None if weights is None else weights.detach().to(torch.float32).contiguous()
        arguments = (memory(index), memory(values), index.shape[0])
        if self._free:
            routing = self._free.pop()
            call(self.comm, "moecclRoutingUpdate", routing.handle, *arguments)
        else:
            routing = Owned(self.comm, "moecclRoutingCreate", "moecclRoutingDestroy", self.handle, *arguments, waits=True)
        return Handle(self, routing, weights)

    def give_back(self, routing):
        if self._handle is not None:
            self._free.append(routing)

    def close(self):
        for routing in self._free:
            routing.close()
        self._free = []
        super().close()


class ExpertParallel:
    """Sends tokens to the ranks of their experts and brings the weighted results back; gradients flow through both.

        ep = ExpertParallel(n_experts=64, top_k=8, hidden=1024, max_tokens=4096)          # on every rank
        rows, counts, handle = ep.dispatch(x, topk_idx, topk_weights)
        out = torch.cat([expert(part) for expert, part in zip(my_experts, rows.split(counts))])
        y = ep.combine(out, handle)                                   # y[t] = sum over k of weight[t, k] * expert(x[t])

    n_experts:    experts on all ranks; expert_rank[n_experts] has the owner of each, None: contiguous, as even as possible
    top_k:        experts per token, at most 64
    hidden:       elements of a token's row
    group:        a ProcessGroup of any backend, a DeviceMesh with one dimension, a moeccl.Comm, or None for the default group
    max_tokens:   most tokens that any rank brings to a step; None: the ranks agree on the most of the first step, and make room for
                  more when a later step has more
    capacity:     most tokens that one rank sends to one expert; the rest are dropped and counted; 0: no limit
    align_rows:   each expert's rows begin at a multiple of this, padded with zeros
    algorithm:    "auto" chooses the levels at which tokens are deduplicated (HierMoE) for each routing, or "flat", "hier:2", ...
    trials:       -1: only prices choose the plan, so that equal routings run by equal plans
    dispatch_dtype: torch.float8_e4m3fn or float8_e5m2: dispatch sends rows so, with a float32 scale for each 128 elements, about half of
                  bfloat16's bytes; the experts get them in the type of x again. Combine and the backward pass stay exact
    comm_options: options of the communicator made for the group (topology, pace, timeout_ms, deterministic, ...)

    The element type is that of the rows: float32, bfloat16, float16 or float64. dispatch, combine and their backward passes are
    collective: every rank runs the same sequence of them. A rank may bring no tokens.

    The backward passes run on a rank where x or topk_weights needs a gradient, and that must be so on all ranks or on none: call
    x.requires_grad_() for a batch that one rank makes itself, such as an empty one, if x comes from trained layers on the others."""

    def __init__(self, n_experts: int, top_k: int, hidden: int, group: Group = None, max_tokens: Optional[int] = None, *,
                 expert_rank: Optional[Sequence[int]] = None, capacity: int = 0, align_rows: int = 1, algorithm: Optional[str] = "auto",
                 memory_cap_bytes: int = 0, trials: int = 0, dispatch_dtype: Optional[torch.dtype] = None,
                 comm_options: Optional[Dict[str, Any]] = None) -> None:
        if dispatch_dtype not in (None, *KINDS):
            raise ValueError(f"dispatch_dtype is {dispatch_dtype}: give {' or '.join(map(str, KINDS))}, or None for the type of the rows")
        for name, value, least in (("n_experts", n_experts, 1), ("top_k", top_k, 1), ("hidden", hidden, 1),
                                   ("align_rows", align_rows, 1), ("capacity", capacity, 0)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}: give a whole number from {least}")
        if top_k > min(64, n_experts):
            raise ValueError(f"top_k is {top_k}: give at most {min(64, n_experts)}, the experts are {n_experts}")
        if expert_rank is not None and len(expert_rank) != n_experts:
            raise ValueError(f"expert_rank has {len(expert_rank)} ranks for {n_experts} experts: give one for each")
        self.comm = comm_of(group, **(comm_options or {}))
        self.rank, self.size = self.comm.rank, self.comm.size
        self.n_experts, self.top_k, self.hidden, self.max_tokens = n_experts, top_k, hidden, max_tokens
        self._owners = None if expert_rank is None else int32s(expert_rank)
        self._options = {"capacity": capacity, "align_rows": align_rows, "algorithm": (algorithm or "auto").encode(),
                         "memory_cap_bytes": memory_cap_bytes, "trials": trials}
        self._dispatch_dtype = dispatch_dtype
        if dispatch_dtype is not None:
            self._options.update(scaled_row_bytes=hidden, scale_bytes=4 * n_scales(hidden))
        self._layers, self._hybrid, self._grows = {}, None, max_tokens is None
        self._key, self._n_local = Key(self), len(self.local_experts)

    def __deepcopy__(self, memo):
        """A copy, as of a model, has the same communicator and its own layers of the C interface."""
        made = memo[id(self)] = copy.copy(self)
        made._layers, made._key = {}, Key(made)
        return made

    @property
    def local_experts(self) -> List[int]:
        """The numbers of this rank's experts, ascending."""
        return experts_of(self.rank, self.size, self.n_experts, self._owners)

    def layer(self, dtype, n_tokens=0):
        """Returns the C layer for rows of `dtype`; the first use of a type is collective."""
        if dtype not in self._layers:
            if self.max_tokens is None:
                self.max_tokens = max(1, largest(self.comm, n_tokens))
            config = _abi.moecclMoeConfig_t(
                hidden_bytes=self.hidden * dtype.itemsize, type=DTYPES[dtype], top_k=self.top_k, n_experts=self.n_experts,
                max_tokens=self.max_tokens, layout=_abi.moecclLayoutExpertMajor, **self._options)
            if self._owners is not None:
                config.expert_rank = self._owners
            self._layers[dtype] = Layer(self.comm, config, dtype, self._hybrid)
        return self._layers[dtype]

    def _checked(self, x, topk_idx, topk_weights):
        if x.dim() != 2 or x.shape[1] != self.hidden:
            raise ValueError(f"x has shape {tuple(x.shape)}: give [tokens, {self.hidden}]")
        if x.dtype not in FLOATS:
            raise TypeError(f"x holds {x.dtype}: give one of {', '.join(str(d) for d in FLOATS)}")
        shape = (x.shape[0], self.top_k)
        for name, given in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if given is not None and tuple(given.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(given.shape)}: give {list(shape)}, as x and top_k say")
        if not is_whole(topk_idx):
            raise TypeError(f"topk_idx holds {topk_idx.dtype}: give whole numbers, -1 for no expert")
        if topk_weights is not None and not topk_weights.is_floating_point():
            raise TypeError(f"topk_weights holds {topk_weights.dtype}: give floating point numbers")

    @uncompiled
    def route(self, topk_idx: torch.Tensor, topk_weights: Optional[torch.Tensor], dtype: torch.dtype) -> Handle:
        """Makes one step's routing without moving any rows. The call is collective."""
        index, n_tokens = as_int32(topk_idx), topk_idx.shape[0]
        try:
            return self.layer(dtype, n_tokens).route(index, topk_weights)
        except moeccl.Error:
            # A routing fails on all ranks if one brings too many tokens, so only then they need to agree on room for them.
            if not self._grows or not self._make_room(n_tokens):
                raise
        return self.layer(dtype).route(index, topk_weights)

    def _make_room(self, n_tokens):
        """Makes max_tokens at least the largest of all ranks' n_tokens, and at least doubles it, so that it rarely changes. Returns
        False if it is large enough. The old layers live as long as the handles of their steps. The call is collective."""
        try:
            needed = largest(self.comm, n_tokens)
        except moeccl.Error:  # the communicator has failed, and the first error says why
            return False
        if needed <= self.max_tokens:
            return False
        self.max_tokens, self._layers = max(needed, 2 * self.max_tokens), {}
        return True

    def dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor,
                 topk_weights: Optional[torch.Tensor] = None) -> Tuple[torch.Tensor, List[int], Handle]:
        """Returns rows[R, hidden], the number of rows of each local expert, and the step's Handle.

        x[T, hidden]; topk_idx[T, k]: the experts of each token, distinct, -1 for none; topk_weights[T, k] or None for ones.
        Rows are grouped by expert and sorted by (source rank, token) in each group. combine() applies the weights, and its backward
        pass computes their gradients. Where torch.compile traces the call into its graph, the Handle is a TracedHandle."""
        refuse_export()
        if tracing():
            rows, handle = self.traced_dispatch(x, topk_idx, topk_weights, self._key)
            return rows, handle.rows_per_expert, handle
        return self._dispatch(x, topk_idx, topk_weights)

    @uncompiled
    def _dispatch(self, x, topk_idx, topk_weights):
        handle = self.checked_route(x, topk_idx, topk_weights)
        return self.send(x, handle), handle.rows_per_expert, handle

    def traced_dispatch(self, x, topk_idx, topk_weights, key, loss=None):
        """dispatch() in a graph, with the routing of the key's owner: returns rows[R, hidden] and a TracedHandle."""
        self._checked(x, topk_idx, topk_weights)
        return traced_dispatch(key, self._n_local, x, topk_idx, topk_weights, loss)

    def traced_route(self, topk_idx, topk_weights, dtype, loss=None):
        """Routes for dispatch in a graph (_traced.py): returns the step's Handle, and the type in which rows travel or None."""
        handle = self.route(topk_idx, topk_weights, dtype)
        handle.weights = None  # the graph has them
        return handle, self._dispatch_dtype

    def checked_route(self, x, topk_idx, topk_weights):
        """The first half of dispatch(): returns the step's Handle."""
        self._checked(x, topk_idx, topk_weights)
        return self.route(topk_idx, topk_weights, x.dtype)

    def send(self, x, handle):
        """The second half of dispatch(): returns rows[R, hidden]."""
        if self._dispatch_dtype is None:
            return Dispatch.apply(x, self._anchor(x, handle), handle)
        return QuantizedDispatch.apply(x, self._anchor(x, handle), handle, self._dispatch_dtype)

    @staticmethod
    def _anchor(x, handle):
        return new_anchor() if needs_anchor(x, handle.weights) else None

    def begin_send(self, x, handle):
        """Returns what send() does and None, or, where rows take long, rows that Arrive waits for and their Flight. The caller computes
        between the two."""
        stream = stream_for(x, self.comm) if self._dispatch_dtype is None else None
        if stream is None:
            return self.send(x, handle), None
        flight = Flight(handle, stream)
        return Depart.apply(x, self._anchor(x, handle), flight), flight

    def combine(self, rows: torch.Tensor, handle: Union[Handle, TracedHandle]) -> torch.Tensor:
        """y[T, hidden] = for each token the weighted sum of its experts' rows[R, hidden]."""
        if isinstance(handle, TracedHandle):
            if rows.dtype != handle.dtype:
                raise TypeError(f"rows hold {rows.dtype}, and dispatch moved {handle.dtype}: cast the experts' results to it")
            return traced_combine(rows, handle)
        return self._combine(rows, handle)

    @uncompiled
    def _combine(self, rows, handle):
        if tuple(rows.shape) != (handle.n_rows, self.hidden):
            raise ValueError(f"rows have shape {tuple(rows.shape)}: give {[handle.n_rows, self.hidden]}, as dispatch did")
        if rows.dtype != handle.layer.dtype:
            raise TypeError(f"rows hold {rows.dtype}, and dispatch moved another type: cast the experts' results to it")
        return Combine.apply(rows, handle.weights, handle)

    def close(self) -> None:
        """Frees the layers of the C interface; the communicator stays."""
        for layer in self._layers.values():
            layer.close()
        self._layers = {}
