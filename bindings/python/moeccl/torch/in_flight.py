# SPDX-License-Identifier: Apache-2.0
"""A dispatch that moves its rows while this rank computes something that does not need them, forward and backward.

The forward pass has three steps: Depart, the computation, Arrive. Autograd runs those functions first that were called last, so the backward
pass has Arrive, the computation's backward pass, Depart: Arrive puts the gradients' way back on the stream and Depart waits for it."""
import ctypes
import weakref

import torch
from torch.autograd.function import once_differentiable

from moeccl.streams import Stream, give_back
from ._calls import call, memory
from ._levels import levels_of
from ._memory import new_rows
from .functions import let_go

_streams = weakref.WeakKeyDictionary()  # for each communicator: its Stream; None: its ranks have no slow link between them


def stream_for(x, comm):
    """Returns the host stream of a communicator whose topology has groups of ranks, such as hosts, between which rows take long; None for
    others. Inside a group rows move by the copies of a thread, which needs a core of its own for that. Operations on CUDA memory have CUDA's
    streams. A tensor of inference mode does not count its changes, see Flight.wait()."""
    if not x.is_cpu or comm.size == 1 or x.is_inference():
        return None
    if comm not in _streams:
        _streams[comm] = Stream() if levels_of(comm).nodes()[0] > 1 else None
        if _streams[comm] is not None:
            comm._before_close.append(_end)
    return _streams[comm]


def _end(comm):
    stream = _streams.pop(comm, None)
    if stream is not None:
        stream.close()


class _Lent:
    """What an operation uses until the stream has run it, also if nobody waits for it because an error has ended the pass."""

    def __init__(self, *used):
        self._used = used

    def release(self):
        self._used = None


class Flight:
    """The operations of one dispatch and of its backward pass on a stream."""

    def __init__(self, handle, stream):
        self.handle, self._stream, self._target = handle, stream, None

    def start(self, name, source, shape):
        """Puts an operation from `source` to a new tensor on the stream."""
        self._target, self._source, self._version = new_rows(source, shape), weakref.ref(source), source._version
        lent = _Lent(self.handle, source, self._target)
        try:
            call(self.handle.comm, name, self.handle.routing, memory(source), memory(self._target), ctypes.c_void_p(self._stream.handle))
        finally:
            give_back([lent], self._stream)  # not before: another thread's wait() would release it
        return self._target

    def wait(self):
        """Waits for the operation that was started last and returns its result."""
        target, source, self._target = self._target, self._source(), None
        self._stream.synchronize()
        if source is not None and source._version != self._version:
            raise ValueError("the shared expert has changed its input in place while dispatch was reading it: give it a first operation that "
                             "is not in place, such as nn.ReLU(inplace=False)")
        return target


class Depart(torch.autograd.Function):
    """x[T, hidden] -> rows[R, hidden], which only Arrive may read. anchor: see needs_anchor()."""

    @staticmethod
    def forward(ctx, x, anchor, flight):
        ctx.handle, ctx.flight = flight.handle, flight
        return flight.start("moecclDispatch", x.contiguous(), (flight.handle.n_rows, x.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        ctx.saved_tensors  # raises torch's error if the graph has been freed
        grad_x = ctx.flight.wait()
        let_go(ctx)
        return grad_x, None, None


class Arrive(torch.autograd.Function):
    """The rows of Depart, when they are there. The result is not a view, which experts could not change in place."""

    @staticmethod
    def forward(ctx, rows, flight):
        ctx.handle, ctx.flight = flight.handle, flight
        return flight.wait().detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows):
        ctx.saved_tensors
        ctx.flight.start("moecclDispatchBackward", grad_rows.contiguous(), (ctx.handle.n_tokens, grad_rows.shape[1]))
        let_go(ctx)
        return grad_rows, None
