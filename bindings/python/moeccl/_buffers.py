# SPDX-License-Identifier: Apache-2.0
"""Buffers that are lent to the library: torch tensors, CUDA arrays, and everything with Python's buffer protocol.

torch is never imported: an object with data_ptr() and a dtype counts as a tensor. CUDA arrays of other libraries (CuPy, Numba) are
recognized by __cuda_array_interface__. NumPy, array.array, bytearray, memoryview and bytes export the buffer protocol."""
import array
import ctypes
import math
from typing import Any, Dict, List, Optional, Tuple

from . import _abi
from ._errors import number
from ._library import lib

_SIZES: Tuple[int, ...] = tuple(lib.moecclTypeSize(t) for t in range(_abi.MOECCL_NUM_DATA_TYPES))
_SIGNED = {1: _abi.moecclInt8, 4: _abi.moecclInt32, 8: _abi.moecclInt64}
_UNSIGNED = {1: _abi.moecclUint8, 4: _abi.moecclUint32, 8: _abi.moecclUint64}
# Indexed by the letter of a buffer's format and the size of its elements, because exporters differ in the size of "l".
_BY_LETTER: Dict[str, Dict[int, int]] = {letter: _SIGNED for letter in "bilqn"}
_BY_LETTER.update({letter: _UNSIGNED for letter in "BcILQN?"})
_BY_LETTER.update({"e": {2: _abi.moecclFloat16}, "f": {4: _abi.moecclFloat32}, "d": {8: _abi.moecclFloat64}})
# Indexed by the name that torch, NumPy extensions and others use.
_BY_NAME = {"int8": _abi.moecclInt8, "uint8": _abi.moecclUint8, "bool": _abi.moecclUint8, "int32": _abi.moecclInt32,
            "uint32": _abi.moecclUint32, "int64": _abi.moecclInt64, "uint64": _abi.moecclUint64,
            "float16": _abi.moecclFloat16, "float32": _abi.moecclFloat32, "float64": _abi.moecclFloat64,
            "bfloat16": _abi.moecclBfloat16, "float8_e4m3fn": _abi.moecclFloat8e4m3, "float8_e5m2": _abi.moecclFloat8e5m2}
_NAMES = {code: name for name, code in _BY_NAME.items() if name != "bool"}
# torch dtype -> (MoECCL type or None, bytes of an element, name), filled in at first use of each dtype.
_torch_types: Dict[Any, Tuple[Optional[int], int, str]] = {}


class _PyBuffer(ctypes.Structure):  # CPython's Py_buffer
    _fields_ = [("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
                ("readonly", ctypes.c_int), ("ndim", ctypes.c_int), ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p)]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_PyBuffer)]
_byref = ctypes.byref
_READ = 0x4 | 0x8 | 0x10 | 0x20  # format, C-contiguous
_WRITE = _READ | 0x1


def type_size(type_: Any) -> int:
    """Returns the bytes of an element of a MoECCL type; raises ValueError if there is no such type."""
    code: int = type_ if type_.__class__ is int else number("type", type_)
    if not 0 <= code < len(_SIZES):
        raise ValueError(f"type is {code}: give one of moeccl.INT8 to moeccl.FLOAT8E5M2")
    return _SIZES[code]


# The fast path for most calls: contiguous tensors and writable NumPy arrays of a known type. dtype -> type.
_plain_torch: Dict[Any, int] = {}
_plain_numpy: Dict[Any, int] = {}
_TENSOR, _ARRAY, _PLAIN_ARRAY, _OTHER = 1, 2, 3, 4
_ways: Dict[type, int] = {}
_address_of, _from_buffer = ctypes.addressof, ctypes.c_char.from_buffer


def _way(thing: Any) -> int:
    kind = type(thing)
    if hasattr(thing, "data_ptr") and hasattr(thing, "is_contiguous"):
        way = _TENSOR
    elif kind.__name__ == "ndarray" and kind.__module__ == "numpy":
        way = _ARRAY
    elif kind is array.array:
        way = _PLAIN_ARRAY
    else:
        way = _OTHER
    _ways[kind] = way
    return way


def holder(tensor: Any) -> Any:
    """Returns the tensor in whose memory a tensor's elements lie: itself, or what a functional collective's result stands for, after
    waiting for it."""
    if tensor.data_ptr() or not tensor.numel():
        return tensor
    if not hasattr(tensor, "trigger_wait"):
        raise TypeError(f"a {type(tensor).__name__} has no memory of its own: give its local tensor (DTensor.to_local())")
    return holder(tensor.trigger_wait())


def address(tensor: Any) -> int:
    """Returns the address of a tensor's elements; 0 if it has none."""
    return tensor.data_ptr() or holder(tensor).data_ptr()  # type: ignore[no-any-return]


def plain(thing: Any) -> Optional[Tuple[int, int, int, Any]]:
    """Returns (address, elements, type, owner) by the fast path, or None: then Buffer handles the object or reports the error."""
    way = _ways.get(thing.__class__) or _way(thing)
    if way == _TENSOR:
        kind = _plain_torch.get(thing.dtype)
        if kind is not None and thing.is_contiguous() and (thing.is_cpu or thing.is_cuda):
            return address(thing), thing.numel(), kind, thing
    elif way == _ARRAY:
        kind = _plain_numpy.get(thing.dtype)
        if kind is not None and thing.flags.c_contiguous:
            try:
                hold = _from_buffer(thing)
            except (TypeError, ValueError):  # read-only, or without elements
                return None
            return _address_of(hold), thing.size, kind, hold
    elif way == _PLAIN_ARRAY and thing:
        sizes = _BY_LETTER.get(thing.typecode)
        kind = None if sizes is None else sizes.get(thing.itemsize)
        if kind is not None:
            hold = _from_buffer(thing)
            return _address_of(hold), len(thing), kind, hold
    return None


class Held:
    """A buffer from plain() for a call that outlives its function: in a group or on a stream."""
    __slots__ = ("hold",)

    def __init__(self, hold: Any) -> None:
        self.hold = hold

    def release(self) -> None:
        """Releases the buffer."""
        self.hold = None


class Buffer:
    """A buffer while it is lent to the library. None stands for no buffer, without elements.

    data: its address; bytes: its size; itemsize: bytes of an element; type: the MoECCL type of its elements or None; format: the
    owner's name for that type; on_device: it is CUDA memory."""
    __slots__ = ("data", "bytes", "itemsize", "type", "format", "present", "on_device", "_shape", "_view", "_owner")

    def __init__(self, thing: Any, writable: bool = False) -> None:
        self._view: Optional[_PyBuffer] = None
        self._owner = thing
        self._shape: Any = None
        self.on_device = False
        if thing is None:
            self.data: Optional[int] = None
            self.bytes, self.itemsize, self.present = 0, 1, False
            self.type: Optional[int] = None
            self.format = ""
            return
        self.present = True
        if hasattr(thing, "data_ptr"):
            self._of_tensor(thing)
        elif hasattr(thing, "__cuda_array_interface__"):
            self._of_cuda(thing.__cuda_array_interface__, writable)
        else:
            self._of_buffer(thing, writable)

    def _of_tensor(self, tensor: Any) -> None:
        known = _torch_types.get(tensor.dtype)
        if known is None:
            name = str(tensor.dtype).rpartition(".")[2]
            known = _torch_types[tensor.dtype] = (_BY_NAME.get(name), tensor.element_size(), name)
            if known[0] is not None and name != "bool":
                _plain_torch[tensor.dtype] = known[0]
        if not (tensor.is_cpu or tensor.is_cuda):
            raise TypeError(f"the tensor is on {tensor.device}: MoECCL reads CPU and CUDA memory, copy it there first")
        if not tensor.is_contiguous():
            raise ValueError(f"the tensor of shape {tuple(tensor.shape)} is not contiguous: give tensor.contiguous()")
        self.type, self.itemsize, self.format = known
        self.data = address(tensor)
        self.on_device = tensor.is_cuda
        self.bytes = tensor.numel() * self.itemsize
        self._shape = tensor

    def _of_cuda(self, interface: Dict[str, Any], writable: bool) -> None:
        shape, typestr = tuple(interface["shape"]), interface["typestr"]
        self.itemsize = int(typestr[2:])
        strides, expected = interface.get("strides"), self.itemsize
        for extent, stride in zip(reversed(shape), reversed(strides or ())):
            if extent != 1 and stride != expected and 0 not in shape:
                raise ValueError(f"the CUDA array of shape {shape} is not C-contiguous: copy it")
            expected *= extent
        self.data, readonly = interface["data"]
        self.on_device = True
        if writable and readonly:
            raise BufferError("the CUDA array is read-only, and the call writes to it")
        self.format = typestr
        self.type = None if typestr[0] == ">" else _BY_NAME.get(
            {"i": "int", "u": "uint", "f": "float", "b": "bool"}.get(typestr[1], "") + ("" if typestr[1] == "b" else str(8 * self.itemsize)))
        if typestr[1] == "b":
            self.format = "?"
        self.bytes = self.itemsize * math.prod(shape)
        self._shape = shape

    def _of_buffer(self, thing: Any, writable: bool) -> None:
        view = _PyBuffer()
        try:
            _get_buffer(thing, view, _WRITE if writable else _READ)  # raises BufferError (NumPy: ValueError) with its reason
        except TypeError:
            name = type(thing).__name__
            raise TypeError(f"{'an' if name[0] in 'aeiou' else 'a'} {name} is not a buffer: give a tensor, an array (NumPy, CUDA, "
                            "array.array), a bytearray or a memoryview") from None
        except ValueError:
            # NumPy has no format for the types of extensions (ml_dtypes), so they are recognized by name.
            name = getattr(getattr(thing, "dtype", None), "name", "")
            if name not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
                raise
            self._of_buffer(thing.view("u2" if name == "bfloat16" else "u1"), writable)
            self.type, self.format = _BY_NAME[name], name
            return
        self._view = view
        self.data, self.bytes, self.itemsize = view.buf, view.len, view.itemsize or 1
        own = view.format
        form = own.decode().lstrip("@=<") if own else "B"
        self.format = form
        if "O" in form:
            raise TypeError("the buffer holds Python objects, which mean nothing to other ranks")
        self.type = _BY_LETTER.get(form, {}).get(self.itemsize)
        if self.type is not None and form != "?" and _ways.get(type(thing)) == _ARRAY:
            _plain_numpy[thing.dtype] = self.type

    def on_host(self, name: str) -> None:
        """Raises TypeError for CUDA memory, for a call that reads or writes on the CPU."""
        if self.on_device:
            raise TypeError(f"{name} is CUDA memory: give a copy on the CPU")

    @property
    def shape(self) -> Tuple[int, ...]:
        """The extents of its dimensions."""
        view = self._view
        if view is not None:
            return tuple(ctypes.cast(view.shape, ctypes.POINTER(ctypes.c_ssize_t))[:view.ndim]) if view.shape else ()
        shape = self._shape
        return tuple(shape.shape if hasattr(shape, "shape") else shape or ())

    def holds(self, name: str, type_: int, whose: str = "") -> None:
        """Raises TypeError unless its elements may be of type_: bytes may, and those that have no MoECCL type (uint16 for bfloat16).

        whose: the object that has this type, such as "the layer"."""
        if self.present and self.itemsize > 1 and (self.itemsize != type_size(type_) if self.type is None else self.type != type_):
            of_whom = f", {whose}'s type" if whose else ""
            raise TypeError(f"{name} holds elements of format {self.format!r}: give {_NAMES[type_]}{of_whom}")

    def own_type(self) -> int:
        """Returns the MoECCL type of its elements; raises TypeError if there is none."""
        if self.type is None:
            raise TypeError(f"elements of format {self.format!r} have no MoECCL type: give type=")
        return self.type

    def count(self, type_: int) -> int:
        """Returns the number of its elements if they are of type_."""
        size = type_size(type_)
        if size != self.itemsize and size != 1 and self.itemsize != 1 and self.present:
            raise TypeError(f"type= has {size} bytes, the buffer's elements have {self.itemsize}")
        count, rest = divmod(self.bytes, size)
        if rest:
            raise ValueError(f"{self.bytes} bytes are no whole number of elements of type {type_}")
        return count

    def release(self) -> None:
        """Returns the buffer to its owner."""
        self._owner = self._shape = None
        view, self._view = self._view, None
        if view is not None:
            _release_buffer(view)

    def __del__(self) -> None:  # needed if a later argument was refused
        view, self._view = self._view, None
        if view is not None:
            _release_buffer(view)


def common_type(function: str, buffers: List[Buffer], type_: Optional[int], summed: bool = False) -> int:
    """Returns the common type of a call's buffers, or type_. With `summed`, the elements must be numbers."""
    buffers = [b for b in buffers if b.present]
    if not buffers:
        raise TypeError(f"{function}: give a buffer")
    if type_ is not None:
        return type_
    kinds = {b.own_type() for b in buffers}
    if len(kinds) > 1:
        raise TypeError(f"{function}: the buffers' elements differ, {' and '.join(b.format for b in buffers)}: give two of "
                        "one type, or type=")
    if summed and any(b.format in ("?", "bool") for b in buffers):
        raise TypeError(f"{function}: truth values have no sum: use MAX (any) or MIN (all), or type=UINT8 for bytes")
    return kinds.pop()
