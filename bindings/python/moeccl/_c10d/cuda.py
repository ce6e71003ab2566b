# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors: the library's stream-ordered calls on the caller's current stream.

An operation is ordered on the stream like a kernel. Buffers are torch's and are recorded on the stream, which keeps them alive as
long as its work needs them. All ranks of a group use CUDA tensors on the same number of devices, in the same order."""
from typing import Any, List, Optional, Sequence

import torch

from .. import _abi
from .._errors import check
from .._library import lib
from ..streams import stream_handle
from .failure import failure
from .work import Work, copy_back


class CudaWork(Work):
    """An operation on a CUDA stream. wait() makes the current stream wait for it, as torch's own CUDA backends do."""

    def __init__(self, backend: Any, what: str, outputs: Any, device: torch.device, comm: int, stream: Any) -> None:
        """stream: the one with the operation at its end."""
        super().__init__(what, outputs)
        self._backend, self._device, self._comm = backend, device, comm
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def _failed(self) -> None:
        error = self._backend.error_of(self.what, self._comm)
        if error is not None:
            self.end(error)

    def _wait(self, ms: Optional[float]) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))
        self._failed()

    def is_completed(self) -> bool:
        if not self.done and self._event.query():
            self._failed()
            self.end()
        return self.done

    def get_future(self) -> Any:
        if self._future is None:
            with torch.cuda.device(self._device):
                self._future = torch.futures.Future(devices=[self._device])
                self._event.wait(torch.cuda.current_stream(self._device))
                self._future.set_result(self.outputs)  # records the current stream, so that callbacks come after it
        self._let_go()
        return self._future

    def _settle(self, future: Any) -> None:
        """Does nothing: the future had its result from the beginning."""


def _device(backend: Any, comm: int) -> torch.device:
    return next(torch.device("cuda", i) for i, c in backend._cuda.items() if c == comm)


def _stream(device: torch.device) -> Any:
    stream = torch.cuda.current_stream(device)
    return stream, stream_handle(stream)


def _record(thing: Any, stream: Any) -> None:
    if isinstance(thing, torch.Tensor):
        thing.record_stream(stream)
    elif isinstance(thing, (tuple, list)):
        for part in thing:
            _record(part, stream)


def run(backend: Any, what: str, comm: int, every: Sequence[Any], after: Any, outputs: Any) -> Work:
    """Puts the calls, and the work after them, on the current stream."""
    device = _device(backend, comm)
    with torch.cuda.device(device):
        stream, handle = _stream(device)
        with backend._lock:
            for call in every:
                code = call[0](*call[1:-1], handle)
                if code != 0:
                    raise failure(backend._said(what), code, comm)
                _record(call[-1], stream)
        if after is not None:
            copy_back(after)
        return CudaWork(backend, backend._said(what), outputs, device, comm, stream)


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
    if not tensor.is_contiguous():
        raise ValueError(f"{what} of a CUDA tensor with gaps: give a contiguous one")
    call = lib.moecclSend if what == "send" else lib.moecclRecv
    bytes_ = tensor.numel() * tensor.element_size()
    made = (call, tensor.data_ptr(), bytes_, _abi.moecclUint8, peer, comm, tensor)
    if backend.batch is not None:
        backend.batch.messages.append((comm, made, tensor))
        return None
    return run(backend, what, comm, [made], None, [tensor])
