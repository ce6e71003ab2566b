# SPDX-License-Identifier: Apache-2.0
"""Experts made small enough to migrate at every step: a shared expert and the largest elements of the residual (include/moeccl/codec.h)."""
import ctypes
from typing import Any, List, Optional, Tuple

from . import _abi
from ._abi import CodecError
from ._arrays import record
from ._buffers import Buffer, common_type, type_size
from ._errors import SIZE, check, number
from ._library import lib
from .comm import Comm
from .constants import FLOAT32
from .streams import give_back, stream_handle

_byref = ctypes.byref


class Codec:
    """Encodes experts of `count` elements of FLOAT32 or BFLOAT16. ratio: bytes of the expert over bytes kept; 0: 50; 1: exact.

    Nothing here is collective; any thread may call. `bytes`: of an encoded expert."""

    def __init__(self, count: int, type: int = FLOAT32, ratio: float = 0) -> None:
        self._codec = _abi.moecclCodec_t()
        self._codec.count, self._codec.ratio = number("count", count, SIZE), ratio
        self._expert = count * type_size(type)
        self._codec.type = type
        size = ctypes.c_size_t()
        check(lib.moecclCodecBytes(_byref(self._codec), _byref(size)))
        self.bytes: int = size.value

    def _lend(self, names: Tuple[Tuple[str, Any, bool, int], ...]) -> List[Buffer]:
        buffers = []
        for name, thing, writable, wanted in names:
            buffer = Buffer(thing, writable)
            buffers.append(buffer)
            if buffer.bytes != wanted:
                raise ValueError(f"{name} has {buffer.bytes} bytes: give {wanted}")
        return buffers

    def encode(self, expert: Any, shared: Any, encoded: Any) -> CodecError:
        """encoded[bytes] = the largest elements of expert[count] less shared[count]. Returns what was lost."""
        error = _abi.moecclCodecError_t()
        buffers = self._lend((("expert", expert, False, self._expert), ("shared", shared, False, self._expert),
                              ("encoded", encoded, True, self.bytes)))
        try:
            check(lib.moecclCodecEncode(_byref(self._codec), *[b.data for b in buffers], self.bytes, _byref(error)))
        finally:
            for buffer in buffers:
                buffer.release()
        return record(CodecError, error)

    def decode(self, encoded: Any, shared: Any, out: Any) -> None:
        """out[count] = shared[count] + the residual in encoded[bytes]; Error (moecclInvalidArgument) if it is no such thing."""
        buffers = self._lend((("encoded", encoded, False, self.bytes), ("shared", shared, False, self._expert),
                              ("out", out, True, self._expert)))
        try:
            check(lib.moecclCodecDecode(_byref(self._codec), buffers[0].data, self.bytes, buffers[1].data, buffers[2].data))
        finally:
            for buffer in buffers:
                buffer.release()


def shared_expert(comm: Comm, experts: Any, n_local: int, n_total: int, shared: Any, type: Optional[int] = None,
                  stream: Any = None) -> None:
    """shared[count] = the mean over all ranks' experts[n_local, count]; n_total: experts of all ranks. Collective."""
    buffers = [Buffer(experts), Buffer(shared, True)]
    try:
        kind = common_type("moecclSharedExpert", buffers, type)
        n_local, n_total = number("n_local", n_local, SIZE), number("n_total", n_total, SIZE)
        count = buffers[1].count(kind)
        if buffers[0].count(kind) != n_local * count:
            raise ValueError(f"experts has {buffers[0].count(kind)} elements: {n_local} experts of {count} are {n_local * count}")
        comm._check(lib.moecclSharedExpert(buffers[0].data, n_local, n_total, buffers[1].data, count, kind, comm._handle,
                                           stream_handle(stream)))
    finally:
        give_back(buffers, stream)
