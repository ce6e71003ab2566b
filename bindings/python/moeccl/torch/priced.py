# SPDX-License-Identifier: Apache-2.0
"""Placements that rebalance() changes where that saves more time than moving the experts takes."""
import weakref

import torch

from ._calls import uncompiled
from .placement import Fixed

_FIRST_US_PER_BYTE = 1e-3  # the price of a move before one has been timed, as in src/moe/swap/expert_swap.cc
_FADE = 0.7  # of a move's time at each rebalance() without one: it may have been that of a late peer, and only a move measures it again


class Priced(Fixed):
    """Measures what passes and moves take.

    gain: predicted share of a pass's time that the move which the last rebalance() looked at saves; step_us: measured time of the layer's
    operations in a pass, forward and backward, on the median rank; move_us: time of the last move on the slowest rank, less 30 % for each
    rebalance() since then that moved nothing. 0: not known yet. All ranks have the same figures."""
    moves = True

    def __init__(self, n_experts, comm, horizon):
        """horizon: the passes in which a move has to save its time."""
        super().__init__(n_experts, comm)
        if not horizon > 0:
            raise ValueError(f"swap_horizon is {horizon}: give the number of passes in which moving experts must pay for itself")
        self._horizon = horizon
        self._timed = None  # the training pass whose time is not in self._took_us yet
        self._own_move_us = 0.0  # the last move's on this rank; 0 if it was of other ranks
        self.gain, self.step_us, self.move_us = 0.0, 0.0, 0.0
        self._n_passes, self._took_us = 0, []

    def _forget(self):
        """Begins to count passes anew."""
        self._n_passes, self._took_us = 0, []

    @uncompiled
    def routed(self, index, handle):
        if torch.is_grad_enabled():
            self._n_passes, self._timed = self._n_passes + 1, weakref.ref(handle)

    @uncompiled
    def passed(self, layer):
        handle = layer.handle
        if handle is None or self._timed is None or self._timed() is not handle:
            return
        self._timed, info = None, handle.info()
        combine_us = info.measured_combine_us if layer.step is None else layer.step.measured_us()
        if info.measured_dispatch_us > 0 and combine_us > 0:
            self._took_us.append(2 * (info.measured_dispatch_us + combine_us))  # the backward pass moves the same rows both ways

    def _joined(self, numbers, layer):
        """Returns the sums of this rank's numbers over all ranks of all expert-parallel groups, and sets step_us and move_us from the times
        of all ranks, of several groups from the mean. The call is collective."""
        n, size, rank = len(numbers), self.comm.size, self.comm.rank
        said = torch.zeros(n + 2 * size, dtype=torch.float64, device="cpu")
        said[:n] = torch.tensor(numbers, device="cpu")
        said[n + rank] = sum(self._took_us) / max(1, len(self._took_us))
        said[n + size + rank] = self._own_move_us
        self.comm.all_reduce(said)
        said = layer.over_data_groups(said)
        times = said[n:] * size / layer.n_ranks
        known = times[:size][times[:size] > 0]  # a late rank makes the others wait, so the median counts
        self.step_us, self.move_us = float(known.median()) if len(known) else 0.0, float(times[size:].max())
        return said[:n].tolist()

    def _pays(self, predicted_us, n_bytes):
        """Returns whether a move of n_bytes of this rank pays. predicted_us: of a pass as it is, which counts where none could be timed."""
        return self.gain * (self.step_us or 2 * predicted_us) * self._horizon > (self.move_us or _FIRST_US_PER_BYTE * n_bytes)

    def _stayed(self):
        """Takes that rebalance() has moved nothing."""
        self._own_move_us *= _FADE
