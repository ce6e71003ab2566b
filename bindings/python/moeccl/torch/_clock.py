# SPDX-License-Identifier: Apache-2.0
"""Whether re-placing samples pays off in measured time."""
import collections
import statistics
import time
import weakref

import torch

# As in src/moe/replace_gain.h: the passes of each kind that are tried at first, one of which is cold; how long samples stay after a try
# that did not pay; and how often a pass of the other kind is measured while moving pays.
_TRIED, _KEPT, _FIRST_PAUSE, _MOST_PAUSE, _COMPARE_EVERY = 4, 5, 4, 64, 64
_LEAST_GAIN = 0.02  # of the time from Begin to combine and of combine's backward pass; less is the noise's


def in_backward():
    """Returns whether a backward pass runs, so that a forward pass is a recomputation."""
    return torch._C._current_graph_task_id() >= 0


class Clock:
    """Decides for all forward passes of a step alike, at the first one after a backward pass; the samples of earlier ones must not have
    their backward pass still to come, because a recomputation has to repeat the decision of its forward pass.

    First both kinds run in turns. Then samples move while the median of the latest times with moves is less than without, and are tried
    again after 4 to 64 steps otherwise. All ranks add the same times, so they come to the same decision."""

    def __init__(self):
        self.moves = True
        self._us = {kind: collections.deque(maxlen=_KEPT) for kind in (True, False)}
        self._n = {True: 0, False: 0}
        self._spent_us, self._n_passes = 0.0, 0  # since the last decision, on this rank
        self._waiting = weakref.WeakSet()  # steps whose backward pass has not run
        self._pause, self._paid = _FIRST_PAUSE, 0
        self._left = None  # steps that samples still stay; None: moving them paid or is not known to

    def decide(self, comm):
        """Decides about the forward pass that begins. The call is collective in the first one after a backward pass."""
        if self._n_passes == 0 or in_backward():
            return
        said = torch.zeros(1 + comm.size, dtype=torch.float64, device="cpu")
        said[0], said[1 + comm.rank] = len(self._waiting), self._spent_us / self._n_passes
        comm.all_reduce(said)
        if said[0] > 0:  # on any rank: when a graph ends without a backward pass is up to its own garbage collector
            return
        self._n[self.moves] += 1
        if self._n[self.moves] > 1:  # the first one is cold
            self._us[self.moves].append(float(said[1:].median()))
        self._spent_us, self._n_passes = 0.0, 0
        self.moves = self._next()

    def _next(self):
        if min(self._n.values()) < _TRIED:
            return self._n[True] <= self._n[False]
        if statistics.median(self._us[True]) < (1 - _LEAST_GAIN) * statistics.median(self._us[False]):
            self._pause, self._left, self._paid = _FIRST_PAUSE, None, self._paid + 1
            return self._paid % _COMPARE_EVERY != 0
        if self.moves or self._left is None:
            self._left, self._pause = self._pause, min(2 * self._pause, _MOST_PAUSE)
        self._left -= 1
        return self._left < 0

    def begin(self, step):
        """Takes a step whose backward pass will come; not for a recomputation."""
        if not in_backward():
            self._waiting.add(step)

    def ran(self, begun):
        """Adds the time since `begun`, of time.perf_counter()."""
        self._spent_us += 1e6 * (time.perf_counter() - begun)

    def ran_backward(self, step, begun):
        self._waiting.discard(step)
        self._n_passes += 1
        self.ran(begun)
