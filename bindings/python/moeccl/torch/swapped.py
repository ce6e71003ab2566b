# SPDX-License-Identifier: Apache-2.0
"""HierMoE's expert swap between training steps."""
import ctypes
import time

import torch

from moeccl import _abi, _library
from ._calls import call, dtype_of, int32s_of, is_whole, memory, numbers_of, uncompiled
from ._levels import even_levels, levels_of
from .priced import Priced

_LATEST_TOKENS, _LEAST_GAIN = 4096, 0.001  # of a swap: docs/decisions/110-swap-window.md, 094-expert-swap-runtime.md


class Swapped(Priced):
    """rebalance() swaps the two experts whose exchange reduces the traffic of the last steps' tokens most, together with the optimizer's
    state, if that saves more time in `horizon` passes than the exchange takes.

    gain: that of the best pair, by Eq. 8. swap_us is move_us."""
    swap_us = property(lambda self: self.move_us)

    def __init__(self, n_experts, comm, top_k, levels, horizon):
        super().__init__(n_experts, comm, horizon)
        if n_experts % comm.size:
            raise ValueError(f"swap: n_experts is {n_experts}: give a multiple of the {comm.size} ranks")
        if levels is not None and (not levels or levels[-1] != comm.size or any(b % a for a, b in zip(levels, levels[1:]))):
            raise ValueError(f"swap_levels is {levels}: give the groups of each level, outermost first, the last one {comm.size}")
        self.top_k = top_k
        self._levels = None if levels is None else even_levels([int(v) for v in levels], comm.size)
        self._slot_of = torch.arange(n_experts, dtype=torch.int32, device="cpu")
        self._algorithm, self._row_bytes = "flat", 0  # of the last step
        self._forget()

    def _forget(self):
        super()._forget()
        self._seen, self._n_tokens = torch.empty((0, self.top_k), dtype=torch.int32, device="cpu"), 0

    @property
    def slot_of(self):
        """The slot of each expert, a copy. Setting it, on all ranks alike and before load_state_dict(), moves no weights."""
        return self._slot_of.clone()

    @slot_of.setter
    def slot_of(self, given):
        given = numbers_of("slot_of", given, self.n_experts, self.n_experts)
        if len(given.unique()) < self.n_experts:
            raise ValueError(f"slot_of has two experts in one slot: give each of the {self.n_experts} slots once")
        self._slot_of = given

    def numbers(self, local_slots):
        return torch.argsort(self._slot_of)[list(local_slots)].tolist()

    @uncompiled
    def slots(self, index):
        if not is_whole(index):
            return index  # which dispatch refuses, as it does numbers that are no expert's
        known, index = (index >= 0) & (index < self.n_experts), index.long()
        return self._slot_of.to(index.device, torch.int64)[index.clamp(0, self.n_experts - 1)].where(known, index)

    @uncompiled
    def routed(self, index, handle):
        super().routed(index, handle)
        if torch.is_grad_enabled():
            latest = index[-_LATEST_TOKENS:].to(device="cpu", dtype=torch.int32)
            self._seen = torch.cat([self._seen, latest])[-_LATEST_TOKENS:]
            self._n_tokens += len(index)
            self._algorithm, self._row_bytes = handle.algorithm, handle.layer.row_bytes

    def same_as(self, other):
        return isinstance(other, Swapped) and self._slot_of.equal(other._slot_of)

    def follow(self, other):
        """Takes another layer's placement, of which this one's is a copy."""
        self._slot_of = other.slot_of
        self._forget()

    def _problem(self, levels, group_of_slot):
        """Returns the solver's problem, which refers to the arguments and to the placement."""
        problem = _abi.moecclSwapProblem_t(n_experts=self.n_experts, top_k=self.top_k, min_gain=_LEAST_GAIN)
        levels.fill_in(problem, group_of_slot)
        kind, _, dimensions = self._algorithm.partition(":")  # Eq. 8 is about the plan that runs
        problem.count_duplicates = int(kind != "hier")
        problem.dimension = min(len(levels), int(dimensions or (2 if kind == "2dh" else 1)))
        problem.placement = int32s_of(self._slot_of)
        return problem

    def _joined_counts(self, problem, layer):
        """Returns the counts of all ranks' latest tokens, and how many these are."""
        n = ctypes.c_size_t()
        call(None, "moecclSwapCountsLength", ctypes.byref(problem), ctypes.byref(n))
        topk = self._seen[-((2**31 - 1) // layer.n_ranks):]  # the counts of all ranks add up in words of 32 bits
        counts = torch.zeros(n.value, dtype=torch.int32, device="cpu")
        call(None, "moecclSwapCount", ctypes.byref(problem), memory(topk), topk.shape[0], memory(counts), None, 0)
        self.comm.all_reduce(counts)
        return layer.over_data_groups(counts), topk.shape[0]

    def _solve(self, layer, swap_bytes):
        """Returns the best pair of experts, the same on all ranks; None if none gains what it costs. swap_bytes: of an expert's tensors."""
        self.passed(layer)
        levels = self._levels or levels_of(self.comm)
        group_of_slot = levels.group_of_rank.repeat_interleave(self.n_experts // self.comm.size, dim=1)
        problem = self._problem(levels, group_of_slot)
        counts, n_counted = self._joined_counts(problem, layer)
        counted, tokens, passes = self._joined([n_counted, self._n_tokens, self._n_passes], layer)
        if counted == 0 or tokens == 0:
            return None
        # Eq. 8 then gives the times of one pass.
        problem.row_bytes = max(1, self._row_bytes) * tokens * self.comm.size / (passes * counted)
        pair, answer = torch.empty(2, dtype=torch.int32, device="cpu"), _abi.moecclSwapAnswer_t()
        call(None, "moecclSolveSwap", ctypes.byref(problem), memory(counts), memory(pair), ctypes.byref(answer), None, 0)
        self.gain = answer.gain
        if not self._pays(answer.before_us, swap_bytes):
            pair.fill_(-1)
        pair = layer.of_the_first(pair).tolist()
        return None if pair[0] < 0 else pair

    def rebalance(self, tensors, layer):
        try:
            pair = self._solve(layer, sum(t[0].numel() * t.element_size() for t in tensors))
        finally:  # a failure must not leave one rank with other tokens than the others' next rebalance() counts
            self._forget()
        if pair is None:
            self._stayed()
            return 0
        a, b = (int(self._slot_of[e]) for e in pair)
        begun = time.perf_counter()
        mine = self._exchange(a, b, tensors)
        self._own_move_us = 1e6 * (time.perf_counter() - begun) if mine else 0.0
        self._slot_of[pair[0]], self._slot_of[pair[1]] = b, a
        return 2

    def _exchange(self, a, b, tensors):
        """Swaps two slots of tensors[slots, ...]; returns whether one of them is on this rank."""
        share = self.n_experts // self.comm.size
        here = [s for s in (a, b) if s // share == self.comm.rank]
        if len(here) == 2:
            for t in tensors:
                t[[a % share, b % share]] = t[[b % share, a % share]]
        elif here:
            mine, peer = here[0] % share, (b if here[0] == a else a) // share
            given = [t[mine].contiguous() for t in tensors]
            got = [torch.empty_like(g) for g in given]
            call(None, "moecclGroupStart")
            try:
                for g, r in zip(given, got):
                    kind = dtype_of(g)
                    call(self.comm, "moecclSend", memory(g), g.numel(), kind, peer, self.comm.handle, None)
                    call(self.comm, "moecclRecv", memory(r), r.numel(), kind, peer, self.comm.handle, None)
            except BaseException:
                _library.lib.moecclGroupCancel()
                raise
            call(self.comm, "moecclGroupEnd")
            for t, r in zip(tensors, got):
                t[mine] = r
        return bool(here)
