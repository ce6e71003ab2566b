# SPDX-License-Identifier: Apache-2.0
"""Calls on CUDA tensors without CUDA: host streams of the library stand in for CUDA's, and CPU tensors for CUDA's."""
import contextlib
import ctypes
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from support import gloo, raises, same, test
from works import PATIENCE, until

_current = []
recorded = []  # (address of a tensor, the stream that it was recorded on)


class Stream:
    """It knows on which streams it has waited."""

    def __init__(self, device=None):
        from moeccl._library import lib
        self._lib, handle = lib, ctypes.c_void_p()
        assert lib.moecclStreamCreate(ctypes.byref(handle)) == 0
        self.cuda_stream, self.behind = handle.value, []

    def wait_stream(self, other):
        self.behind.append(other)

    def synchronize(self):
        self._lib.moecclStreamSynchronize(self.cuda_stream)


class Event:
    def record(self, stream):
        self.stream, self.over = stream, False

    def wait(self, stream):
        self.stream.synchronize()
        self.over = True
        stream.behind.append(self.stream)

    def query(self):
        return self.over


class Future:
    def __init__(self, devices):
        self.devices = devices

    def set_result(self, value):
        self.value, self.stream = value, _current[-1]


@contextlib.contextmanager
def on(stream):
    _current.append(stream)
    yield
    _current.pop()


class Made(torch.Tensor):
    is_cpu = property(lambda self: False)


def made(*values):
    return torch.tensor(values).as_subclass(Made)


@contextlib.contextmanager
def stand_ins(begun=True):
    """Yields the backend of all ranks, whose calls take the way of CUDA tensors, its communicator for them, and the current stream.
    begun: False leaves it to the first call to make the communicator."""
    from moeccl._c10d import cuda as way
    backend, comm = dist.group.WORLD._backend, None
    if begun:
        comm = backend._meet("cuda/0")
        backend._cuda, backend._comm = {0: comm}, lambda tensor: comm
    cuda, current = torch.cuda, Stream()
    _current.append(current)
    cuda.Stream, cuda.Event, cuda.stream, torch.futures.Future = Stream, Event, on, Future
    cuda.current_stream, cuda.device = lambda device=None: _current[-1], lambda device: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.record_stream = lambda self, stream: recorded.append((self.data_ptr(), stream))
    way.copy_back = lambda after: (current.synchronize(), after())
    yield backend, comm, current
    vars(backend).pop("_comm", None)  # the group frees the communicator


@test(2)
def asynchronous_calls_on_cuda(rank, size, _):
    """They run on a stream of their own, behind the current one, and only wait() puts the current one behind them."""
    with stand_ins() as (backend, _comm, current):
        t = made(rank + 1.0, 1.0)
        first = dist.all_reduce(t, async_op=True)
        side = first._stream
        assert side is not current and side.behind == [current] and recorded == [(t.data_ptr(), side)]
        assert first.event.stream is side
        assert first.get_future().stream is side and current.behind == [], "a future lets the current stream go on"
        first.wait()
        assert current.behind == [side]
        same(t.as_subclass(torch.Tensor), torch.tensor([3.0, 2.0]))
        second = dist.all_gather_into_tensor(made(0.0, 0.0, 0.0, 0.0), t, async_op=True)
        assert second._stream is side and side.behind == [current] * 2
        second.wait()
        # Calls that copy their results stay on the current stream, and so do blocking ones, as far as torch says that they block.
        del recorded[:]
        dist.all_reduce(t)
        assert recorded == [(t.data_ptr(), current if hasattr(dist.AllreduceOptions(), "asyncOp") else side)]
        behind = len(side.behind)
        gaps = made([1.0, 2.0], [3.0, 4.0])[:, 0]
        last = dist.all_reduce(gaps, async_op=True)
        assert last._stream is current and len(side.behind) == behind
        last.wait()
        same(gaps.as_subclass(torch.Tensor), torch.tensor([2.0, 6.0]))


@test(2)
def limits_on_cuda(rank, size, _):
    """set_timeout holds for asynchronous and blocking calls, although no thread waits for them."""
    other = gloo()
    with stand_ins() as (backend, comm, _current_one):
        backend.set_timeout(timedelta(seconds=2 * PATIENCE))
        t = made(1.0, 1.0)
        for async_op in (True, False):
            work = dist.all_reduce(t, async_op=async_op)
            if work is not None:
                work.wait()
        time.sleep(2.2 * PATIENCE)
        assert backend.error_of("a call", comm) is None, "an operation that has ended in its time has ended the group"
        dist.barrier()
        if rank == 0:
            dist.all_reduce(t, async_op=True)
            late = ["moecclTimeout", "allreduce", f"{2000 * PATIENCE:.0f} ms"]
            assert until(lambda: backend.error_of("a call", comm) is not None)
            error = str(backend.error_of("a call", comm))
            assert all(word in error for word in late), error
            raises(RuntimeError, late, lambda: dist.all_reduce(t))
        dist.barrier(other)


class OnTheDevice(Made):
    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", 0))


@test(2)
def threads_that_begin_on_a_device_together(rank, size, _):
    with stand_ins(begun=False) as (backend, _comm, _current_one):
        with ThreadPoolExecutor(4) as threads:
            found = set(threads.map(lambda _unused: backend._comm(torch.ones(1).as_subclass(OnTheDevice)), range(4)))
        assert found == {backend._cuda[0]}, (found, backend._cuda)
        t = torch.ones(1).as_subclass(OnTheDevice)
        dist.all_reduce(t, async_op=True).wait()
        same(t.as_subclass(torch.Tensor), torch.tensor([2.0]))
        dist.barrier()


@test(3, status={2: -signal.SIGKILL})
def a_rank_that_dies_before_its_first_call_on_a_device(rank, size, _):
    """The others do not wait for it until the time to make a communicator has passed, which is 60 s."""
    with stand_ins(begun=False):
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        raises(RuntimeError, ["rank 2", "the first call on cuda:0"], lambda: dist.all_reduce(torch.ones(1).as_subclass(OnTheDevice)))
        assert time.monotonic() - began < 10 * PATIENCE
