# SPDX-License-Identifier: Apache-2.0
"""Memory of the symmetric heap, registered memory, and operators of a caller's own."""
import ctypes
import weakref
from typing import TYPE_CHECKING, Any, Optional

from ._buffers import Buffer, type_size
from ._errors import SIZE, check, number
from ._library import lib

if TYPE_CHECKING:
    from .comm import Comm


def mem_alloc(n_bytes: int) -> Any:
    """n_bytes of the process's symmetric heap, which peers on this host read and write directly; zeroed, 64-byte aligned.

    What is returned is a buffer of uint8: numpy.frombuffer(it, dtype) and torch.frombuffer(it, dtype=...) view it, and it goes into
    calls as it is, with type=. The memory is freed when nothing refers to it or to a view of it any more."""
    n_bytes = number("n_bytes", n_bytes, (1, SIZE[1]))
    at = ctypes.c_void_p()
    check(lib.moecclMemAlloc(ctypes.byref(at), n_bytes))
    kind: Any = type("Memory", (ctypes.c_uint8 * n_bytes,), {"__doc__": mem_alloc.__doc__})
    memory = kind.from_address(at.value)
    # Not at exit: what lives until then may still be used by what ends after it, and the process frees it all.
    weakref.finalize(memory, lib.moecclMemFree, at.value).atexit = False
    return memory


class Registration:
    """Memory that was announced to a communicator because it will be used again and again; holds the buffer until close()."""

    def __init__(self, comm: "Comm", buffer: Any) -> None:
        self._comm, self._buffer = comm, Buffer(buffer)
        handle = ctypes.c_void_p()
        comm._check(lib.moecclCommRegister(comm._handle, self._buffer.data, self._buffer.bytes, ctypes.byref(handle)))
        self._handle: Optional[int] = handle.value

    def close(self) -> None:
        """Gives the registration and the buffer back. What is left when the communicator ends has ended with it."""
        if self._handle is not None:
            if self._comm._handle is not None:
                self._comm._check(lib.moecclCommDeregister(self._comm._handle, self._handle))
            self._handle = None
            self._buffer.release()

    def __enter__(self) -> "Registration":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class RedOp:
    """An operator that multiplies each rank's input by its scalar and sums: give its `number` as op=, or itself.

    scalar: a number (FLOAT32, FLOAT64 and integers), or a buffer of one element of `type`; in CUDA memory it is read when each
    operation runs."""

    def __init__(self, comm: "Comm", scalar: Any, type: int) -> None:
        self._comm = comm
        if isinstance(scalar, (int, float)):
            kinds: Any = {0: ctypes.c_int8, 1: ctypes.c_uint8, 2: ctypes.c_int32, 3: ctypes.c_uint32, 4: ctypes.c_int64, 5: ctypes.c_uint64,
                     7: ctypes.c_float, 8: ctypes.c_double}
            type_size(type)
            if type not in kinds:
                raise TypeError(f"type is {type}: give the scalar as a buffer of one element of it")
            bits = kinds[type]()
            if type < 6:
                n = 8 * ctypes.sizeof(bits)
                bits.value = number("scalar", scalar, (0, 2**n - 1) if type % 2 else (-2**(n - 1), 2**(n - 1) - 1))
            else:
                bits.value = scalar
            scalar = bits
        view = Buffer(scalar)
        if view.bytes != type_size(type):
            raise ValueError(f"scalar has {view.bytes} bytes: give one element of {type_size(type)} bytes")
        self._scalar = view
        made = ctypes.c_int32()
        comm._check(lib.moecclRedOpCreatePreMulSum(ctypes.byref(made), view.data, type, comm._handle))
        self.number: int = made.value

    def __index__(self) -> int:
        return self.number

    def close(self) -> None:
        """Frees the operator."""
        if self.number >= 0:
            self._comm._check(lib.moecclRedOpDestroy(self.number, self._comm._handle))
            self.number = -1
            self._scalar.release()
