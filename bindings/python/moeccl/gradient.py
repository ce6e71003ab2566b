# SPDX-License-Identifier: Apache-2.0
"""Compressed return of the gradients of gathered experts, with error feedback (include/moeccl/gradient.h)."""
import ctypes
from typing import Any, Optional

from . import _abi
from ._abi import GradientReturnInfo
from ._arrays import record
from ._buffers import Buffer, type_size
from ._errors import SIZE, number, of_kind, real
from ._library import lib
from ._owned import OfThisProcess, Owned
from .comm import Comm
from .constants import FLOAT32
from .hybrid import Hybrid
from .streams import give_back, stream_handle

_byref = ctypes.byref


class GradientReturn(OfThisProcess):
    """The return of gradients of a model's layers. The constructor is collective: all ranks pass the same.

    count: elements of an expert's gradient. ratio: of the codec; 0: 50; 1: exact, as Hybrid.reduce(). comm: another communicator of the
    hybrid's ranks, which lets gradients and tokens travel at the same time. device_memory: gradients and remainders are CUDA memory of the
    communicator's device."""

    def __init__(self, hybrid: Hybrid, count: int, type: int = FLOAT32, ratio: float = 0, n_layers: int = 1,
                 comm: Optional[Comm] = None, device_memory: bool = False) -> None:
        config = _abi.moecclGradientReturnConfig_t()
        size = type_size(type)
        config.count, config.type, config.ratio = number("count", count, SIZE), type, real("ratio", ratio)
        config.n_layers, config.device_memory = number("n_layers", n_layers), int(device_memory)
        self._on_device = device_memory and ratio != 1
        of_kind("hybrid", hybrid, Hybrid)
        self._comm, self._n_own, self._n_held, self._expert = comm or hybrid.comm, hybrid.n_own, hybrid.n_held, count * size
        self._count, self._type = count, type
        handle = ctypes.c_void_p()
        self._comm._leftovers.clear()
        self._comm._check(lib.moecclGradientReturnCreate(_byref(handle), hybrid._handle, comm._handle if comm else None, _byref(config)))
        self._handle: Optional[int] = handle.value
        self._owned = Owned(handle.value, lib.moecclGradientReturnDestroy, self._comm._leftovers)

    @property
    def handle(self) -> int:
        """The moecclGradientReturn_t as a number; 0 after close()."""
        return self._handle or 0

    def _info(self, layer: int) -> Any:
        info = _abi.moecclGradientReturnInfo_t()
        self._comm._check(lib.moecclGradientReturnGetInfo(self._handle, number("layer", layer), _byref(info)))
        return info

    def info(self, layer: int = 0) -> GradientReturnInfo:
        """Returns bytes on the wire and in memory. `remainders` is the address of the layer's; see remainders()."""
        info = self._info(layer)
        return record(GradientReturnInfo, info, remainders=ctypes.cast(info.remainders, ctypes.c_void_p).value or 0)

    def remainders(self, layer: int = 0) -> "memoryview[float]":
        """Returns the layer's remainders as a writable view of floats [n_remainders * count], valid until close(). Copy them to a
        checkpoint, and write those of a checkpoint into the view, while no reduce() of the layer runs. With device_memory they are CUDA
        memory at the address info(layer).remainders, and this call is an error."""
        if self._on_device:
            raise TypeError("the remainders are CUDA memory: copy from and to the address info(layer).remainders")
        info = self._info(layer)
        n = info.n_remainders * self._count
        if n == 0:
            return memoryview(bytearray()).cast("f")
        address = ctypes.cast(info.remainders, ctypes.c_void_p).value
        return memoryview((ctypes.c_float * n).from_address(address or 0)).cast("B").cast("f")

    def reduce(self, held: Any, own: Any, layer: int = 0, stream: Any = None) -> None:
        """own[n_own, count] = this rank's own gradients in held[n_held, count] plus what the other holders send, encoded. The call is
        collective. Buffers are CUDA memory if device_memory was set, otherwise host memory; with ratio 1 they may be either."""
        buffers = [Buffer(held), Buffer(own, True)]
        try:
            for name, buffer, experts in (("held", buffers[0], self._n_held), ("own", buffers[1], self._n_own)):
                if buffer.bytes != experts * self._expert:
                    raise ValueError(f"{name} has {buffer.bytes} bytes: {experts} gradients of {self._expert} bytes are {experts * self._expert}")
                buffer.holds(name, self._type, "this object")
            self._comm._check(lib.moecclGradientReturnReduce(self._handle, number("layer", layer), buffers[0].data, buffers[1].data,
                                                             stream_handle(stream)))
        finally:
            give_back(buffers, stream)

    def reset(self, layer: int = 0) -> None:
        """Sets this rank's remainders of the layer to 0. The call is local; make it on all ranks."""
        self._comm._check(lib.moecclGradientReturnReset(self._handle, number("layer", layer)))

    def close(self) -> None:
        """Waits for calls on streams and frees the remainders."""
        self._owned.close()
        self._handle = None
