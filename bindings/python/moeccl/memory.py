# SPDX-License-Identifier: Apache-2.0
"""Memory of the symmetric heap, registered memory, and user-defined operators."""
import ctypes
import weakref
from typing import TYPE_CHECKING, Any, Dict, Optional

from ._buffers import Buffer, type_size
from ._errors import SIZE, check, number
from ._library import lib
from ._owned import OfThisProcess, at_the_end

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


_KINDS: Dict[int, Any] = {0: ctypes.c_int8, 1: ctypes.c_uint8, 2: ctypes.c_int32, 3: ctypes.c_uint32, 4: ctypes.c_int64, 5: ctypes.c_uint64,
                          7: ctypes.c_float, 8: ctypes.c_double}


def _is_number(thing: Any) -> bool:
    """Returns True for Python's and NumPy's numbers, though the latter are buffers too. Arrays and tensors have a length."""
    kind = thing.__class__
    return (hasattr(kind, "__index__") or hasattr(kind, "__float__")) and not hasattr(kind, "__len__")


def _bits(value: Any, type: int) -> Any:
    """Returns a number as an element of a type."""
    bits = _KINDS[type]()
    if type < 6:
        n = 8 * ctypes.sizeof(bits)
        bits.value = number("scalar", value, (0, 2**n - 1) if type % 2 else (-2**(n - 1), 2**(n - 1) - 1))
    else:
        bits.value = float(value)
    return bits


class RedOp(OfThisProcess):
    """An operator that multiplies each rank's input by its scalar and sums. Pass it or its `number` as op=.

    scalar: a number, also NumPy's (FLOAT32, FLOAT64 and integers), or a buffer of one element of `type`. Each operation reads a scalar in
    CUDA memory when it runs. The end of the last reference frees the operator; calls that were made with it keep what they need."""

    number = -1  # until there is one, and after close()

    def __init__(self, comm: "Comm", scalar: Any, type: int) -> None:
        self._comm, size = comm, type_size(type)
        if _is_number(scalar) and type in _KINDS:
            scalar = _bits(scalar, type)
        elif isinstance(scalar, (int, float)):
            raise TypeError(f"type is {type}: give the scalar as a buffer of one element of it")
        try:
            view = Buffer(scalar)
        except TypeError:
            if hasattr(scalar, "data_ptr") or hasattr(scalar, "dtype"):
                raise  # a tensor or an array, and what is wrong with it
            raise TypeError(f"scalar is {scalar!r}: give a number, or a buffer of one element") from None
        view.holds("scalar", type)
        if view.bytes != size:
            raise ValueError(f"scalar has {view.bytes} bytes: give one element of {size} bytes")
        self.scalar: Optional[Buffer] = view
        made = ctypes.c_int32()
        comm._check(lib.moecclRedOpCreatePreMulSum(ctypes.byref(made), view.data, type, comm._handle))
        self.number = made.value

    def __index__(self) -> int:
        return self.number

    def close(self) -> None:
        """Frees the operator. Calls that were made with it keep what they need."""
        if self.number >= 0:
            if self._comm._handle is not None:  # the operator ends with its communicator at the latest
                self._comm._check(lib.moecclRedOpDestroy(self.number, self._comm._handle))
            self.number, self.scalar = -1, None

    def __del__(self) -> None:
        if self.number >= 0 and self._comm._handle is not None and not at_the_end(self.scalar):
            lib.moecclRedOpDestroy(self.number, self._comm._handle)  # any thread may call it, and it does not wait
