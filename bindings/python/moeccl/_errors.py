# SPDX-License-Identifier: Apache-2.0
"""Failures of the library as exceptions, and checks of arguments that ctypes would silently truncate."""
import operator
from typing import Any, Optional, Tuple, Type, TypeVar

from ._library import lib

_T = TypeVar("_T")
INT32 = (-2**31, 2**31 - 1)
INT64 = (-2**63, 2**63 - 1)
SIZE = (0, 2**64 - 1)
# Arguments whose numbers have names.
_NAMES = {"op": "moeccl.SUM, PROD, MAX, MIN, AVG or one of comm.premul_sum()", "layout": "moeccl.EXPERT_MAJOR or ROWS",
          "type": "a type such as moeccl.FLOAT32", "priority": "moeccl.PRIORITY_AUTO, _DP, _CP, _PP or _EP",
          "stream": "a moeccl.Stream, or a CUDA stream or its number"}


class Error(RuntimeError):
    """A failed call. str() is the code's name and MoECCL's error text, `code` is the moecclResult_t, and `name` is the code's name."""

    def __init__(self, code: int, sentence: str) -> None:
        self.code = code
        self.name: str = lib.moecclGetErrorString(code).decode()
        super().__init__(f"{self.name}: {sentence}")

    def __reduce__(self) -> Any:
        return _again, (type(self), self.code, self.name, str(self))


Error.__module__ = "moeccl"


def _again(kind: Type[Error], code: int, name: str, whole: str) -> Error:
    """Rebuilds an error that another process raised and sent here."""
    error = kind.__new__(kind, whole)
    error.code, error.name = code, name
    return error


def check(code: int, comm: Optional[int] = None) -> None:
    """Raises an Error if code is a failure, with the error text of the communicator, or of this thread without one."""
    if code != 0:
        raise Error(code, lib.moecclGetLastError(comm).decode(errors="replace"))


def number(name: str, value: Any, limits: Tuple[int, int] = INT32) -> int:
    """Returns value as an integer that fits its C type; ctypes would truncate one that does not."""
    try:
        whole = int(value) if type(value).__name__ in ("bool", "bool_") else operator.index(value)  # NumPy's bool is no index
    except TypeError:
        raise TypeError(f"{name} is {value!r}: give {_NAMES.get(name, 'a whole number')}") from None
    if not limits[0] <= whole <= limits[1]:
        raise ValueError(f"{name} is {whole}: give a number from {limits[0]} to {limits[1]}")
    return whole


def real(name: str, value: Any) -> float:
    """Returns value as a float; ctypes and float() say what is wrong without the argument's name."""
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{name} is {value!r}: give a number")


def listed(name: str, value: Any) -> Any:
    """Returns value, a sequence of numbers, or a list of what it yields."""
    if not hasattr(value, "__iter__") or isinstance(value, (str, bytes)):
        raise TypeError(f"{name} is {value!r}: give a list of numbers")
    return value if hasattr(value, "__len__") else list(value)


def of_kind(name: str, value: Any, kind: Type[_T]) -> _T:
    """Returns value, an object of this package that a constructor works with."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is a {type(value).__name__}: give a moeccl.{kind.__name__}")
    return value


def text(name: str, value: Any) -> Optional[bytes]:
    """Returns value as bytes for a const char*; None stays None."""
    encoded = value.encode() if isinstance(value, str) else value
    if encoded is not None and (not isinstance(encoded, bytes) or b"\0" in encoded):
        raise TypeError(f"{name} is {value!r}: give a text without NUL")
    return encoded
