# SPDX-License-Identifier: Apache-2.0
"""Hybrid expert and data transmission: experts travel inside a domain, tokens between domains (include/moeccl/hybrid.h)."""
import ctypes
from typing import Any, Optional, Sequence

from . import _abi
from ._abi import HybridInfo
from ._arrays import record, set_array
from ._buffers import Buffer, common_type
from ._errors import SIZE, check, listed, number, of_kind
from ._library import lib
from ._owned import OfThisProcess, Owned
from ._pages import page
from .comm import Comm, fill
from .moe import Moe, _config
from .streams import give_back, stream_handle

_byref = ctypes.byref


_STEP = ("top_k", "forward_only", "expert_s", "backward_s", "gradient_bytes", "encode_bandwidth", "decode_bandwidth", "gradient_ratio")


class Hybrid(OfThisProcess):
    """Which ranks hold which experts besides their owners. The constructor is collective: all ranks pass the same arguments.

    expert_rank: [n_experts] owners, None: contiguous. domain: sizes of the expert domains at each level of the topology, outermost
    first. With None the stream model chooses the sizes of least latency from data_bytes (a rank's tokens times top_k times row),
    expert_bytes (all experts of a rank), pre_expert_s (seconds of computation before the experts), compression and min_gain; or,
    with top_k, those of least time of a whole step. step: top_k, forward_only, expert_s, backward_s, gradient_bytes,
    encode_bandwidth and decode_bandwidth (expert bytes per second of the codec; 0: the profile's, below 0: it takes no time),
    gradient_ratio."""

    def __init__(self, comm: Comm, n_experts: int, expert_rank: Optional[Sequence[int]] = None, domain: Optional[Sequence[int]] = None,
                 data_bytes: float = 0, expert_bytes: float = 0, pre_expert_s: float = 0, compression: float = 0,
                 min_gain: float = 0, **step: float) -> None:
        config, keep = _abi.moecclHybridConfig_t(), []  # type: ignore[var-annotated]
        config.n_experts = number("n_experts", n_experts)
        set_array(config, keep, "expert_rank", expert_rank, ctypes.c_int32, (n_experts,))
        if domain is not None:
            config.n_levels = len(listed("domain", domain))
            set_array(config, keep, "domain", list(domain), ctypes.c_int32, None)
        given = {"data_bytes": data_bytes, "expert_bytes": expert_bytes, "pre_expert_s": pre_expert_s, "compression": compression,
                 "min_gain": min_gain, **step}
        for name in step:
            if name not in _STEP:
                raise TypeError(f"unknown option {name}: there are {', '.join([*list(given)[:5], *_STEP])}")
        fill(config, given)
        self.comm, self.n_experts = of_kind("comm", comm, Comm), config.n_experts
        handle = ctypes.c_void_p()
        comm._check(lib.moecclHybridCreate(_byref(handle), comm._handle, _byref(config)))
        self._handle: Optional[int] = handle.value
        self._owned = Owned(handle.value, lib.moecclHybridDestroy)
        info = self.info()
        self.n_own, self.n_held = info.n_own, info.n_held

    @property
    def handle(self) -> int:
        """The moecclHybrid_t as a number; 0 after close()."""
        return self._handle or 0

    def info(self) -> HybridInfo:
        """Returns domains, own and held experts, links, and the model's latency."""
        info = _abi.moecclHybridInfo_t()
        self.comm._check(lib.moecclHybridGetInfo(self._handle, _byref(info)))
        return record(HybridInfo, info, domain=tuple(info.domain[:info.n_levels]), own_experts=tuple(info.own_experts[:info.n_own]),
                      held_experts=tuple(info.held_experts[:info.n_held]))

    def moe(self, hidden_bytes: int, top_k: int, max_tokens: int, comm: Optional[Comm] = None, **options: Any) -> Moe:
        """Makes a MoE layer whose tokens go to the holder that Algorithm 1 names. Arguments: Moe's except n_experts and expert_rank.

        comm: another communicator of the same ranks, so that tokens and experts can travel at the same time. The call is collective."""
        if "expert_rank" in options or "n_experts" in options:
            raise TypeError("n_experts and expert_rank are the hybrid's: leave them out")
        config = _config(hidden_bytes, self.n_experts, top_k, max_tokens, **options)
        comm = comm or self.comm
        handle = ctypes.c_void_p()
        comm._leftovers.clear()
        comm._check(lib.moecclHybridMoeCreate(_byref(handle), self._handle, comm._handle, _byref(config)))
        return Moe._of(comm, handle.value, config)

    def _share(self, function: str, total: int, name: str, what: str, given: Optional[int]) -> int:
        """Returns an expert's part of `total` of the held experts, or what the caller gave. The peers need the same number of a rank that
        holds no expert."""
        if given is not None:
            return number(name, given, SIZE)
        if self.n_held == 0:
            raise ValueError(f"{function}: this rank holds no expert, give {name}=, the {what} of an expert")
        return total // self.n_held

    def gather(self, own: Any, held: Any, stream: Any = None, expert_bytes: Optional[int] = None) -> None:
        """held[n_held, expert] = the experts of this rank's domain, from all ranks' own[n_own, expert]. The call is collective.

        expert_bytes is needed on a rank that holds no expert, which may pass None for the buffers."""
        buffers = [Buffer(own), Buffer(held, True)]
        try:
            n_bytes = self._share("moecclHybridGather", buffers[1].bytes, "expert_bytes", "bytes", expert_bytes)
            if buffers[1].bytes != n_bytes * self.n_held or buffers[0].bytes != n_bytes * self.n_own:
                raise ValueError(f"own has {buffers[0].bytes} bytes for {self.n_own} experts and held {buffers[1].bytes} for "
                                 f"{self.n_held}: give experts of one size")
            self.comm._check(lib.moecclHybridGather(self._handle, buffers[0].data, buffers[1].data, n_bytes, stream_handle(stream)))
        finally:
            give_back(buffers, stream)

    def reduce(self, held: Any, own: Any, type: Optional[int] = None, stream: Any = None, count: Optional[int] = None) -> None:
        """own[n_own, expert] = the sum of held[n_held, expert] over all ranks that hold the expert. The call is collective.

        count is needed on a rank that holds no expert, which may pass None for the buffers with type=."""
        buffers = [Buffer(held), Buffer(own, True)]
        try:
            kind = type if type is not None and not any(b.present for b in buffers) else \
                common_type("moecclHybridReduce", buffers, type, True)
            count = self._share("moecclHybridReduce", buffers[0].count(kind), "count", "elements", count)
            if buffers[0].count(kind) != count * self.n_held or buffers[1].count(kind) != count * self.n_own:
                raise ValueError(f"held has {buffers[0].count(kind)} elements for {self.n_held} experts and own {buffers[1].count(kind)} "
                                 f"for {self.n_own}: give experts of one size")
            self.comm._check(lib.moecclHybridReduce(self._handle, buffers[0].data, buffers[1].data, count, kind, stream_handle(stream)))
        finally:
            give_back(buffers, stream)

    def explain(self, expert_bytes: int) -> str:
        """Returns a page for a person: domains, latency, and the plans of gather and reduce. This call is not collective."""
        return page(lambda *room: lib.moecclHybridExplain(self._handle, number("expert_bytes", expert_bytes, SIZE), *room), self.comm)

    def close(self) -> None:
        """Frees the hybrid; layers made from it stay valid. The end of the last object that uses it does the same."""
        self._owned.close()
        self._handle = None
