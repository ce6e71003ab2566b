# SPDX-License-Identifier: Apache-2.0
"""Arrays of numbers on their way into the C interface, and structures on their way out of it."""
import array
import ctypes
import dataclasses
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Type, TypeVar

from ._buffers import Buffer
from ._errors import INT32, INT64, SIZE, number

_T = TypeVar("_T")
_LETTERS: Dict[Any, str] = {ctypes.c_int32: "i", ctypes.c_int64: "q", ctypes.c_double: "d", ctypes.c_float: "f"}
_LIMITS: Dict[Any, Tuple[int, int]] = {ctypes.c_int32: INT32, ctypes.c_int64: INT64, ctypes.c_size_t: SIZE}
_NAMES: Dict[Any, Tuple[str, Tuple[int, ...]]] = {ctypes.c_int32: ("int32", (2,)), ctypes.c_int64: ("int64", (4,)),
                                                 ctypes.c_float: ("float32", (7,)), ctypes.c_double: ("float64", (8,))}


def _flat(values: Iterable[Any]) -> List[Any]:
    out: List[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            out.extend(_flat(value))
        else:
            out.append(value)
    return out


class Given:
    """An array from the caller: a buffer of exactly this type, or (nested) lists of numbers. None is NULL."""

    def __init__(self, name: str, values: Any, kind: Any, shape: Optional[Sequence[int]] = None, takes_cuda: bool = False) -> None:
        self._buffer: Optional[Buffer] = None
        self._copy: Any = None
        self.address: Optional[int] = None
        self.count = 0
        if values is None:
            return
        if isinstance(values, (list, tuple, range)):
            flat = _flat(values)
            if kind in _LIMITS:
                flat = [number(f"a number of {name}", v, _LIMITS[kind]) for v in flat]
            self.count = len(flat)
            self._copy = (kind * max(1, len(flat)))(*flat)
            self.address = ctypes.addressof(self._copy)
        else:
            type_name, codes = _NAMES[kind]
            self._buffer = Buffer(values)
            if not takes_cuda:
                self._buffer.on_host(name)
            if self._buffer.type not in codes:
                raise TypeError(f"{name} holds elements of format {self._buffer.format!r}: give {type_name}, or lists of numbers")
            self.count = self._buffer.bytes // ctypes.sizeof(kind)
            self.address = self._buffer.data or 1  # not NULL, even without elements
        if shape is not None:
            wanted = 1
            for extent in shape:
                wanted *= extent
            if self.count != wanted:
                raise ValueError(f"{name} has {self.count} numbers: give {' x '.join(str(e) for e in shape)}, {wanted}")

    def pointer(self, kind: Any) -> Any:
        """Returns the array as a pointer for a field of a structure."""
        return ctypes.cast(self.address, ctypes.POINTER(kind)) if self.address is not None else None


def set_array(struct: Any, keep: List[Any], name: str, values: Any, kind: Any, shape: Optional[Sequence[int]]) -> None:
    """Sets a pointer of a structure to an array, which `keep` keeps alive as long as the structure is used."""
    given = Given(name, values, kind, shape)
    keep.append(given)
    if given.address is not None:
        setattr(struct, name, given.pointer(kind))


def made(kind: Any, count: int) -> "array.array[Any]":
    """Makes an array for results."""
    return array.array(_LETTERS[kind], bytes(ctypes.sizeof(kind) * count))


def address(values: "array.array[Any]") -> int:
    """Returns the address of an array."""
    return values.buffer_info()[0]


def record(kind: Type[_T], struct: Any, **arrays: Any) -> _T:
    """Converts a structure of the library to a Python dataclass. arrays: the values for its pointers."""
    values = dict(arrays)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name not in values:
            value = getattr(struct, field.name)
            if isinstance(value, bytes):
                value = value.decode(errors="replace")
            elif isinstance(value, ctypes.Array):
                value = tuple(value)
            values[field.name] = value
    return kind(**values)
