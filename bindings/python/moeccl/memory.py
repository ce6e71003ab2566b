# SPDX-License-Identifier: Apache-2.0
"""Memory of the symmetric heap, registered memory, and user-defined operators."""
import ctypes
import weakref
from typing import TYPE_CHECKING, Any, Optional

from ._buffers import Buffer, type_size
from ._errors import SIZE, check, number
from ._library import lib
from ._owned import OfThisProcess

if TYPE_CHECKING:
    from .comm import Comm


def mem_alloc(n_bytes: int) -> Any:
    """Allocates n_bytes of the process's symmetric heap, which peers on this host access directly; zeroed, 64-byte aligned.

    The result is a buffer of uint8. numpy.frombuffer(it, dtype) and torch.frombuffer(it, dtype=...) view it, and calls take it
    directly, with type=. The memory is freed when neither it nor a view of it is referenced any more."""
    n_bytes = number("n_bytes", n_bytes, (1, SIZE[1]))
    at = ctypes.c_void_p()
    check(lib.moecclMemAlloc(ctypes.byref(at), n_bytes))
    kind: Any = type("Memory", (ctypes.c_uint8 * n_bytes,), {"__doc__": mem_alloc.__doc__})
    memory = kind.from_address(at.value)
    # Do not free at exit: objects that end later may still use the memory, and the process frees it anyway.
    weakref.finalize(memory, lib.moecclMemFree, at.value).atexit = False
    return memory


class Registration(OfThisProcess):
    """Memory registered with a communicator for repeated use. The communicator keeps it, and it holds the buffer, until close() of
    either: a network card may use the memory as long as it is registered."""

    def __init__(self, comm: "Comm", buffer: Any) -> None:
        self._comm, self._buffer = comm, Buffer(buffer)
        handle = ctypes.c_void_p()
        comm._check(lib.moecclCommRegister(comm._handle, self._buffer.data, self._buffer.bytes, ctypes.byref(handle)))
        self._handle: Optional[int] = handle.value
        comm._registrations.add(self)

    def close(self) -> None:
        """Ends the registration and releases the buffer. A registration ends with its communicator at the latest."""
        if self._handle is not None:
            if self._comm._handle is not None:
                self._comm._check(lib.moecclCommDeregister(self._comm._handle, self._handle))
            self._handle = None
            self._comm._registrations.discard(self)
            self._buffer.release()

    def __enter__(self) -> "Registration":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class RedOp(OfThisProcess):
    """An operator that multiplies each rank's input by its scalar and sums. Pass it or its `number` as op=.

    scalar: a number (FLOAT32, FLOAT64 and integers), or a buffer of one element of `type`. Each operation reads a scalar in CUDA
    memory when it runs."""

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
