# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors: the library's stream-ordered calls.

An operation is ordered on its stream like a kernel: a blocking call on the caller's current stream, an asynchronous one on a stream of
the group, so that the caller's later work runs beside it until wait(). Buffers are torch's and are recorded on the stream, which
keeps them alive as long as its work needs them. All ranks of a group use CUDA tensors on the same number of devices, in the same order."""
import time
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Sequence

import torch

from .. import _abi
from .._buffers import address, holder
from .._errors import check
from .._library import lib
from ..streams import stream_handle
from .calls import Made, is_as_stored
from .failure import BackendError, failure, overdue
from .work import Work, copy_back


class CudaWork(Work):
    """An operation on a CUDA stream. wait() makes the current stream wait for it, as torch's own CUDA backends do."""

    def __init__(self, backend: Any, what: str, outputs: Any, device: torch.device, comm: int, stream: Any) -> None:
        """stream: the one with the operation at its end."""
        super().__init__(what, outputs)
        self._backend, self._device, self._comm, self._stream = backend, device, comm, stream
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def _failed(self) -> None:
        error = self._backend.error_of(self.what, self._comm)
        if error is not None:
            self.end(error)

    def _wait(self, ms: Optional[float]) -> None:
        self.event.wait(torch.cuda.current_stream(self._device))
        self._failed()

    def is_completed(self) -> bool:
        if not self.done and self.event.query():
            self._failed()
            self.end()
        return self.done

    def get_future(self) -> Any:
        if self._future is None:
            # The result is there from the beginning, and records the current stream: callbacks and waits come after that one.
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._future = torch.futures.Future(devices=[self._device])
                self._future.set_result(self.outputs)
        self._let_go()
        return self._future


class _Limited:
    """An operation whose time is limited. It holds no tensors, because nothing tells when the stream has come past it."""

    def __init__(self, backend: Any, work: CudaWork, comm: int, ms: float) -> None:
        self._backend, self._what, self._event, self._comm, self._ms = backend, work.what, work.event, comm, ms
        self.deadline = time.monotonic() + ms / 1000

    @property
    def done(self) -> bool:
        return bool(self._event.query())

    def expire(self) -> None:
        backend = self._backend
        with backend._freeing:
            if self._comm in backend._cuda.values() and not self.done:
                backend.cuda_side.expired.setdefault(self._comm, overdue(self._what, self._ms))
                lib.moecclCommAbort(self._comm)


class Side:
    """What a backend keeps for CUDA tensors."""

    def __init__(self) -> None:
        self.expired: Dict[int, BackendError] = {}  # by communicator: the error that has ended it
        self._streams: Dict[torch.device, Any] = {}
        self._limited: Deque[_Limited] = deque()

    def stream(self, device: torch.device, current: Any) -> Any:
        """Returns the device's stream for asynchronous calls, after the work of the current one. In a capture it becomes part of it."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._streams[device].wait_stream(current)
        return self._streams[device]

    def limit(self, backend: Any, work: CudaWork, comm: int, ms: float) -> None:
        """Ends the communicator's operations if this one does not end in its time."""
        if torch.cuda.is_current_stream_capturing():  # the operation does not run now, and no event may be asked
            return
        while self._limited and self._limited[0].done:
            backend.deadlines.leave(self._limited.popleft())
        self._limited.append(_Limited(backend, work, comm, ms))
        backend.deadlines.enter(self._limited[-1])


def _device(backend: Any, comm: int) -> torch.device:
    return next(torch.device("cuda", i) for i, c in backend._cuda.items() if c == comm)


def _stream(device: torch.device) -> Any:
    stream = torch.cuda.current_stream(device)
    return stream, stream_handle(stream)


def _record(thing: Any, stream: Any) -> None:
    if isinstance(thing, torch.Tensor):
        holder(thing).record_stream(stream)
    elif isinstance(thing, (tuple, list)):
        for part in thing:
            _record(part, stream)


def run(backend: Any, what: str, comm: int, made: Made, outputs: Any, asynchronous: bool = False, ms: Optional[float] = None) -> Work:
    """Puts the calls, and the work after them, on a stream. An asynchronous operation with such work stays on the current stream too,
    because that work uses more tensors than those of the calls, which are recorded."""
    every, after = made
    device = _device(backend, comm)
    with torch.cuda.device(device):
        stream, handle = _stream(device)
        if asynchronous and after is None:
            stream = backend.cuda_side.stream(device, stream)
            handle = stream_handle(stream)
        with backend._lock:
            for call in every:
                code = call[0](*call[1:-1], handle)
                if code != 0:
                    raise backend.cuda_side.expired.get(comm) or failure(backend._said(what), code, comm)
                _record(call[-1], stream)
        if after is not None:
            copy_back(after)
        work = CudaWork(backend, backend._said(what), outputs, device, comm, stream)
        if ms is not None:
            backend.cuda_side.limit(backend, work, comm, ms)
    if backend.batch is not None:
        backend.batch.works.append(work)
    return work


def run_together(backend: Any, messages: Sequence[Any]) -> List[Work]:
    """Puts the messages of a batch on the current streams as one group."""
    on = {comm: _stream(_device(backend, comm)) for comm, _, _ in messages}
    refused = None
    with backend._lock:
        check(lib.moecclGroupStart())
        for comm, call, _ in messages:
            code = call[0](*call[1:-1], on[comm][1])
            if code != 0:
                refused = failure(backend._said("a batch"), code, comm)
                break
        code = lib.moecclGroupEnd()
        if code != 0 or refused is not None:
            raise refused or failure(backend._said("a batch"), code, messages[0][0])
    for comm, call, _ in messages:
        _record(call[-1], on[comm][0])
    return [CudaWork(backend, backend._said("a batch"), [t for c, _, t in messages if c == comm], _device(backend, comm), comm,
                     stream) for comm, (stream, _) in on.items()]


def message(backend: Any, what: str, comm: int, tensor: torch.Tensor, peer: Optional[int], tag: int) -> Optional[Work]:
    """Sends or receives; in a batch, keeps the message for the batch's end and returns None. As with nccl, messages of a pair match in
    call order, without tags and without receives from any rank."""
    if peer is None:
        raise ValueError("recv of a CUDA tensor from any rank: name the source, or receive into a CPU tensor")
    if tag != 0:
        raise ValueError(f"{what} of a CUDA tensor with tag {tag}: messages of CUDA tensors have no tags: use 0, or a CPU tensor")
    if not is_as_stored(tensor):
        raise ValueError(f"{what} of a CUDA tensor with gaps, or one that torch conjugates or negates when it is read: give "
                         "tensor.contiguous().resolve_conj().resolve_neg()")
    call = lib.moecclSend if what == "send" else lib.moecclRecv
    bytes_ = tensor.numel() * tensor.element_size()
    made = (call, address(tensor), bytes_, _abi.moecclUint8, peer, comm, tensor)
    if backend.batch is not None:
        backend.batch.messages.append((comm, made, tensor))
        return None
    return run(backend, what, comm, ([made], None), [tensor])
