# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors: the library's stream-ordered calls on the caller's current stream.

An operation is ordered on the stream like a kernel. Buffers are torch's and are recorded on the stream, which keeps them alive as
long as its work needs them. All ranks of a group use CUDA tensors on the same number of devices, in the same order."""
import ctypes
from typing import Any, List, Optional, Sequence

import torch

from .. import _abi
from .._library import lib
from .failure import failure
from .work import Work

_LEGACY_DEFAULT = 1  # CU_STREAM_LEGACY, because NULL would make the call block


class CudaWork(Work):
    """An operation on a CUDA stream. wait() makes the current stream wait for it, as torch's own CUDA backends do."""

    def __init__(self, what: str, outputs: Any, device: torch.device, comm: int) -> None:
        super().__init__(what, outputs)
        self._device, self._comm = device, comm
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def _failed(self) -> None:
        result = ctypes.c_int()
        lib.moecclCommGetAsyncError(self._comm, ctypes.byref(result))
        if result.value not in (_abi.moecclSuccess, _abi.moecclInProgress):
            self.end(failure(self.what, result.value, self._comm))

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
        return self._future


def _stream(device: torch.device) -> Any:
    stream = torch.cuda.current_stream(device)
    return stream, stream.cuda_stream or _LEGACY_DEFAULT


def _record(thing: Any, stream: Any) -> None:
    if isinstance(thing, torch.Tensor):
        thing.record_stream(stream)
    elif isinstance(thing, (tuple, list)):
        for part in thing:
            _record(part, stream)


def run(backend: Any, what: str, comm: int, every: Sequence[Any], after: Any, outputs: Any) -> Work:
    """Puts the calls, and the work after them, on the current stream."""
    device = next(torch.device("cuda", i) for i, c in backend._cuda.items() if c == comm)
    with torch.cuda.device(device):
        stream, handle = _stream(device)
        with backend._lock:
            for call in every:
                code = call[0](*call[1:-1], handle)
                if code != 0:
                    raise failure(backend._said(what), code, comm)
                _record(call[-1], stream)
        if after is not None:
            with torch.no_grad():
                after()
        return CudaWork(backend._said(what), outputs, device, comm)


def message(backend: Any, what: str, comm: int, tensor: torch.Tensor, peer: Optional[int], tag: int) -> Work:
    """Sends or receives. As with nccl, messages of a pair match in call order, without tags and without receives from any rank."""
    if peer is None:
        raise ValueError("recv of a CUDA tensor from any rank: name the source, or receive into a CPU tensor")
    if tag != 0:
        raise ValueError(f"{what} of a CUDA tensor with tag {tag}: messages of CUDA tensors have no tags: use 0, or a CPU tensor")
    if not tensor.is_contiguous():
        raise ValueError(f"{what} of a CUDA tensor with gaps: give a contiguous one")
    call = lib.moecclSend if what == "send" else lib.moecclRecv
    bytes_ = tensor.numel() * tensor.element_size()
    calls: List[Any] = [(call, tensor.data_ptr(), bytes_, _abi.moecclUint8, peer, comm, tensor)]
    return run(backend, what, comm, calls, None, [tensor])
