# SPDX-License-Identifier: Apache-2.0
"""What Buffer and ElasticBuffer have in common: a communicator of the group's ranks, and the streams in whose order calls run."""
import functools
import inspect
import os
import socket
import threading
import weakref

import moeccl
import torch
from moeccl.torch._memory import Memory

from . import _native
from ._check import check_devices, require
from ._stream import CommStream, CudaStream
from .handle import EPHandle
from .utils import EventHandle, EventOverlap


def _host():
    """Returns a name that is unique to this machine; MOECCL_HOST_ID overrides it, as it does in MoECCL."""
    named = os.environ.get("MOECCL_HOST_ID")
    if named:
        return named
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{socket.gethostname()} {boot.read().strip()}"
    except OSError:
        return socket.gethostname()


def hosts_of(gather):
    """Returns the number of each rank's host, counted from 0 in the order of ranks. The call is collective."""
    told = gather(_host())
    hosts = list(dict.fromkeys(told))
    return [hosts.index(host) for host in told]


def ranks_per_host(host_of):
    """Returns the number of ranks of each host; None if the hosts do not have equal numbers of consecutive ranks."""
    each = host_of.count(0)
    return each if len(host_of) % each == 0 and host_of == [rank // each for rank in range(len(host_of))] else None


def _close(stream, cuda, comm, links):
    # A Buffer also ends on its own threads, where its last reference or Python's cycle collector may run; no thread can wait for itself.
    if any(each.is_own_thread() for each in (stream, *(link.stream for link in links))):
        threading.Thread(target=_close, args=(stream, cuda, comm, links), name="deep_ep-close").start()
        return
    stream.stop()
    if cuda is not None:
        cuda.finish()
    for link in links:
        link.close()
    comm.close()


def _tensors(thing):
    """Yields the tensors in a tensor, a handle, a tuple of any of these or of tuples, or anything else."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, EPHandle):
        yield from _tensors(tuple(vars(thing).values()))
    elif isinstance(thing, (tuple, list)):
        for part in thing:
            yield from _tensors(part)


def event_of(given):
    """Returns the EventHandle that a caller gave, by itself or in an EventOverlap, or None."""
    event = given.event if isinstance(given, EventOverlap) else given
    require(event is None or isinstance(event, EventHandle), TypeError, "the event to wait for is a {}: give what capture() or a call "
            "returned", type(event).__name__)
    return event


def call(reads, later=("async_finish", "return_recv_hook"), elsewhere=()):
    """Runs a method on the stream of the device of its first tensor. reads: it reads inputs before it returns, also if it is
    asynchronous. later: the arguments that make it asynchronous. elsewhere: those whose tensors may lie on any device."""

    def wrap(method):
        signature = inspect.signature(method)

        @functools.wraps(method)
        def run(self, *args, **kwargs):
            given = signature.bind(self, *args, **kwargs).arguments
            named = {name: tuple(_tensors(value)) for name, value in given.items() if name not in elsewhere}
            inputs = [tensor for tensors in named.values() for tensor in tensors]
            device = inputs[0].device if inputs else torch.device("cpu")
            check_devices(device, named)
            self._at = self._stream_for(device)
            asynchronous = any(given.get(name, False) for name in later)
            with self._at.ordered(event_of(given.get("previous_event")), reads, asynchronous, inputs):
                result = method(self, *args, **kwargs)
                self._at.lend(_tensors(result))
                return result

        return run

    return wrap


class Base:
    """A communicator of the ranks of a group, and the streams in whose order its calls run."""

    def __init__(self, members, explicitly_destroy, **options):
        """Joins. The call is collective. members: what check_group returned. options: those of _native.Communicator."""
        rank, n_ranks, gather = members
        self.explicitly_destroy = explicitly_destroy
        self._host_of = hosts_of(gather)
        self._n_hosts = max(self._host_of) + 1
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None
        if device is not None:
            torch.cuda.current_stream(device).synchronize()  # makes the device's context this thread's
        # After all ranks have come, because an id that no rank joins ends after the init timeout.
        id_bytes = gather(bytes(moeccl.unique_id()) if rank == 0 else None)[0]
        self._comm = _native.Communicator(n_ranks, rank, id_bytes, **options)
        self._stream, self._memory = CommStream(), Memory()
        self._cuda = CudaStream(device, self._stream) if device is not None else None
        self._at = self._stream  # of the call that runs
        self._links = []  # what else to close at the end
        self._end = functools.partial(_close, self._stream, self._cuda, self._comm, self._links)
        if not explicitly_destroy:
            self._end = weakref.finalize(self, self._end)

    def destroy(self):
        """Waits for this rank's calls and ends the communicator. The object cannot be used afterwards. This call is not
        collective."""
        self._memory.drop()
        self._end()

    def get_comm_stream(self):
        """Returns the CUDA stream in whose order calls on CUDA tensors run. Without CUDA, returns a CPU stream, for callers that
        pass it on: calls then run on a thread of this object, and their events wait for them."""
        return self._cuda.stream if self._cuda is not None else torch.cpu.Stream()

    def _stream_for(self, device):
        """Returns what orders calls on this device's tensors."""
        if device.type != "cuda":
            return self._stream
        require(self._cuda is not None and self._cuda.device == device, TypeError,
                "the tensors lie on {}, and the Buffer was made {}: call torch.cuda.set_device before you make it", device,
                f"for {self._cuda.device}" if self._cuda is not None else "before CUDA was initialised")
        return self._cuda

    def _run(self, work, previous_event, asynchronous):
        self._comm.raw  # raises if the Buffer was destroyed
        return EventOverlap(self._at.run(work, event_of(previous_event), asynchronous))
