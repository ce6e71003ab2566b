# SPDX-License-Identifier: Apache-2.0
"""HierMoE's expert swap between training steps."""
import ctypes
import time
import weakref

import torch

from moeccl import _abi, _library
from ._calls import call, dtype_of, int32s_of, is_whole, memory, numbers_of, uncompiled
from ._levels import even_levels, levels_of
from .placement import Fixed

_LATEST_TOKENS, _LEAST_GAIN = 4096, 0.001  # of a swap: docs/decisions/110-swap-window.md, 094-expert-swap-runtime.md
_FIRST_US_PER_BYTE = 1e-3  # the price of a swap before one has been timed, as in src/moe/swap/expert_swap.cc


class Swapped(Fixed):
    """rebalance() swaps the two experts whose exchange reduces the traffic of the last steps' tokens most, together with the optimizer's
    state, if that saves more time in `horizon` passes than the exchange takes.

    gain: predicted share of the best pair in the last rebalance(); step_us: measured time of the layer's operations in a pass, forward
    and backward, on the median rank; swap_us: time of the last swap on the slowest rank. 0: not known yet."""
    moves = True

    def __init__(self, n_experts, comm, top_k, levels, horizon):
        super().__init__(n_experts, comm)
        if n_experts % comm.size:
            raise ValueError(f"swap: n_experts is {n_experts}: give a multiple of the {comm.size} ranks")
        if not horizon > 0:
            raise ValueError(f"swap_horizon is {horizon}: give the number of passes in which a swap must pay for itself")
        if levels is not None and (not levels or levels[-1] != comm.size or any(b % a for a, b in zip(levels, levels[1:]))):
            raise ValueError(f"swap_levels is {levels}: give the groups of each level, outermost first, the last one {comm.size}")
        self.top_k, self._horizon = top_k, horizon
        self._levels = None if levels is None else even_levels([int(v) for v in levels], comm.size)
        self._slot_of = torch.arange(n_experts, dtype=torch.int32, device="cpu")
        self._algorithm, self._row_bytes = "flat", 0  # of the last step
        self._timed = None  # the training pass whose time is not in self._took_us yet
        self._own_swap_us = 0.0  # the last swap's on this rank; 0 if it was of other ranks
        self.gain, self.step_us, self.swap_us = 0.0, 0.0, 0.0
        self._forget()

    def _forget(self):
        self._seen = torch.empty((0, self.top_k), dtype=torch.int32, device="cpu")
        self._n_tokens, self._n_passes, self._took_us = 0, 0, []

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
        if torch.is_grad_enabled():
            latest = index[-_LATEST_TOKENS:].to(device="cpu", dtype=torch.int32)
            self._seen = torch.cat([self._seen, latest])[-_LATEST_TOKENS:]
            self._n_tokens, self._n_passes = self._n_tokens + len(index), self._n_passes + 1
            self._algorithm, self._row_bytes = handle.algorithm, handle.layer.row_bytes
            self._timed = weakref.ref(handle)

    @uncompiled
    def passed(self, layer):
        handle = layer.handle
        if handle is None or self._timed is None or self._timed() is not handle:
            return
        self._timed, info = None, handle.info()
        combine_us = info.measured_combine_us if layer.step is None else layer.step.measured_us()
        if info.measured_dispatch_us > 0 and combine_us > 0:
            self._took_us.append(2 * (info.measured_dispatch_us + combine_us))  # the backward pass moves the same rows both ways

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

    def _joined_times(self, n_counted, layer):
        """Returns the sums over all ranks of tokens counted, tokens and passes, then each rank's time of a pass, and each rank's time of the
        last swap. Of several expert-parallel groups it returns the mean of the times."""
        size, rank = self.comm.size, self.comm.rank
        said = torch.zeros(3 + 2 * size, dtype=torch.float64, device="cpu")
        said[:3] = torch.tensor([n_counted, self._n_tokens, self._n_passes], device="cpu")
        said[3 + rank] = sum(self._took_us) / max(1, len(self._took_us))
        said[3 + size + rank] = self._own_swap_us
        self.comm.all_reduce(said)
        said = layer.over_data_groups(said)
        sums, times = said[:3].tolist(), said[3:] * size / layer.n_ranks
        return sums, times[:size], times[size:]

    def _solve(self, layer, swap_bytes):
        """Returns the best pair of experts, the same on all ranks; None if none gains what it costs. swap_bytes: of an expert's tensors."""
        self.passed(layer)
        levels = self._levels or levels_of(self.comm)
        group_of_slot = levels.group_of_rank.repeat_interleave(self.n_experts // self.comm.size, dim=1)
        problem = self._problem(levels, group_of_slot)
        counts, n_counted = self._joined_counts(problem, layer)
        (counted, tokens, passes), step_us, swap_us = self._joined_times(n_counted, layer)
        if counted == 0 or tokens == 0:
            return None
        # Eq. 8 then gives the times of one pass.
        problem.row_bytes = max(1, self._row_bytes) * tokens * self.comm.size / (passes * counted)
        pair, answer = torch.empty(2, dtype=torch.int32, device="cpu"), _abi.moecclSwapAnswer_t()
        call(None, "moecclSolveSwap", ctypes.byref(problem), memory(counts), memory(pair), ctypes.byref(answer), None, 0)
        known = step_us[step_us > 0]  # a late rank makes the others wait, so the median counts
        self.gain, self.step_us, self.swap_us = answer.gain, float(known.median()) if len(known) else 0.0, float(swap_us.max())
        price = self.swap_us or _FIRST_US_PER_BYTE * swap_bytes
        if self.gain * (self.step_us or 2 * answer.before_us) * self._horizon <= price:
            pair.fill_(-1)
        pair = layer.of_the_first(pair).tolist()
        return None if pair[0] < 0 else pair

    def rebalance(self, tensors, layer):
        try:
            pair = self._solve(layer, sum(t[0].numel() * t.element_size() for t in tensors))
        finally:  # a failure must not leave one rank with other tokens than the others' next rebalance() counts
            self._forget()
        if pair is None:
            return 0
        a, b = (int(self._slot_of[e]) for e in pair)
        begun = time.perf_counter()
        mine = self._exchange(a, b, tensors)
        self._own_swap_us = 1e6 * (time.perf_counter() - begun) if mine else 0.0
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
