# SPDX-License-Identifier: Apache-2.0
"""Experts made small enough to migrate at every step: a shared expert and the largest elements of the residual (include/moeccl/codec.h)."""
import ctypes
from typing import Any, Callable, List, Optional, Tuple

from . import _abi
from ._abi import CodecError
from ._arrays import record
from ._buffers import Buffer, common_type, type_size
from ._errors import SIZE, check, number, real
from ._library import lib
from .comm import Comm
from .constants import FLOAT32
from .streams import give_back, stream_handle

_byref = ctypes.byref
_UpdateFn = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t)
_UseFn = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p)


class Callback:
    """A Python function that the library calls. An exception in it ends the call, and check() raises it again."""

    def __init__(self, kind: Any, function: Callable[..., None]) -> None:
        self._raised: Optional[BaseException] = None

        def call(_context: Any, *given: Any) -> int:
            try:
                function(*given)
            except BaseException as e:  # pylint: disable=broad-except
                self._raised = e
                return 1
            return 0

        self._made = kind(call)
        self.address = ctypes.cast(self._made, ctypes.c_void_p)

    def check(self) -> None:
        if self._raised is not None:
            raise self._raised


def update_callback(update: Callable[[int, int, int], None]) -> Callback:
    """Wraps update(expert, first, count) for the C interface."""
    return Callback(_UpdateFn, update)


def expert_use(use: Callable[[int, memoryview], None], element: int, first: int, count: int, row: int) -> Tuple[Any, Callback]:
    """Makes a moecclExpertUse_t from use(first, bytes of the elements from there on)."""
    def take(at: int, n: int, values: int) -> None:
        use(at, memoryview((ctypes.c_ubyte * (n * element)).from_address(values)).cast("B").toreadonly())

    callback, given = Callback(_UseFn, take), _abi.moecclExpertUse_t()
    given.first, given.count, given.row = number("first", first, SIZE), number("count", count, SIZE), number("row", row, SIZE)
    given.use = callback.address
    return given, callback


class Codec:
    """Encodes experts of `count` elements of FLOAT32 or BFLOAT16. ratio: bytes of the expert over bytes kept; 0: 50; 1: exact.

    The methods are not collective and may be called from any thread. `bytes` is the size of an encoded expert."""

    def __init__(self, count: int, type: int = FLOAT32, ratio: float = 0) -> None:
        self._codec = _abi.moecclCodec_t()
        self._codec.count, self._codec.ratio = number("count", count, SIZE), real("ratio", ratio)
        self._element = type_size(type)
        self._expert = count * self._element
        self._codec.type = self._type = type
        size = ctypes.c_size_t()
        check(lib.moecclCodecBytes(_byref(self._codec), _byref(size)))
        self.bytes: int = size.value

    def _lend(self, names: Tuple[Tuple[str, Any, bool, int], ...]) -> List[Buffer]:
        buffers = []
        for name, thing, writable, wanted in names:
            buffer = Buffer(thing, writable)
            buffers.append(buffer)
            buffer.on_host(name)
            if name != "encoded":
                buffer.holds(name, self._type, "the codec")
            if buffer.bytes != wanted:
                raise ValueError(f"{name} has {buffer.bytes} bytes: give {wanted}")
        return buffers

    def encode(self, expert: Any, shared: Any, encoded: Any) -> CodecError:
        """encoded[bytes] = the largest elements of expert[count] - shared[count]. Returns the encoding error."""
        error = _abi.moecclCodecError_t()
        buffers = self._lend((("expert", expert, False, self._expert), ("shared", shared, False, self._expert),
                              ("encoded", encoded, True, self.bytes)))
        try:
            check(lib.moecclCodecEncode(_byref(self._codec), *[b.data for b in buffers], self.bytes, _byref(error)))
        finally:
            for buffer in buffers:
                buffer.release()
        return record(CodecError, error)

    def encode_fused(self, experts: Any, shared: Any, encoded: Any, update: Callable[[int, int, int], None]) -> List[CodecError]:
        """Encodes each of experts[n, count], each block of 65536 elements after update(expert, first, count), the optimizer's step."""
        size = Buffer(experts)
        n = size.bytes // self._expert
        size.release()
        errors = (_abi.moecclCodecError_t * max(1, n))()
        step = update_callback(update)
        buffers = self._lend((("experts", experts, False, max(1, n) * self._expert), ("shared", shared, False, self._expert),
                              ("encoded", encoded, True, max(1, n) * self.bytes)))
        try:
            result = lib.moecclCodecEncodeFused(_byref(self._codec), buffers[0].data, n, buffers[1].data, step.address, None,
                                                buffers[2].data, n * self.bytes, errors)
            step.check()
            check(result)
        finally:
            for buffer in buffers:
                buffer.release()
        return [record(CodecError, e) for e in errors[:n]]

    def decode_fused(self, encoded: Any, shared: Any, use: Callable[[int, memoryview], None], first: int = 0, count: int = 0,
                     row: int = 0) -> None:
        """Passes elements [first, first + count) to use(first, bytes) in pieces of whole rows; count 0: to the end. The bytes are valid
        only until `use` returns, so copy those that you want to keep."""
        given, callback = expert_use(use, self._element, first, count, row)
        buffers = self._lend((("encoded", encoded, False, self.bytes), ("shared", shared, False, self._expert)))
        try:
            result = lib.moecclCodecDecodeFused(_byref(self._codec), buffers[0].data, self.bytes, buffers[1].data, _byref(given))
            callback.check()
            check(result)
        finally:
            for buffer in buffers:
                buffer.release()

    def decode(self, encoded: Any, shared: Any, out: Any) -> None:
        """out[count] = shared[count] + the residual in encoded[bytes]. Raises Error (moecclInvalidArgument) if encoded is not valid."""
        buffers = self._lend((("encoded", encoded, False, self.bytes), ("shared", shared, False, self._expert),
                              ("out", out, True, self._expert)))
        try:
            check(lib.moecclCodecDecode(_byref(self._codec), buffers[0].data, self.bytes, buffers[1].data, buffers[2].data))
        finally:
            for buffer in buffers:
                buffer.release()


def shared_expert(comm: Comm, experts: Any, n_local: int, n_total: int, shared: Any, type: Optional[int] = None,
                  stream: Any = None) -> None:
    """shared[count] = the mean over all ranks' experts[n_local, count]; n_total: experts on all ranks. The call is collective."""
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
