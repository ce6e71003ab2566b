# SPDX-License-Identifier: Apache-2.0
"""Failures of the library as exceptions, and checks of arguments that ctypes would silently truncate."""
import operator
from typing import Any, Optional, Tuple, Type

from ._library import lib

INT32 = (-2**31, 2**31 - 1)
INT64 = (-2**63, 2**63 - 1)
SIZE = (0, 2**64 - 1)


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
        whole = operator.index(value)
    except TypeError:
        what = "moeccl.SUM, PROD, MAX, MIN, AVG or one of comm.premul_sum()" if name == "op" else "a whole number"
        raise TypeError(f"{name} is {value!r}: give {what}") from None
    if not limits[0] <= whole <= limits[1]:
        raise ValueError(f"{name} is {whole}: give a number from {limits[0]} to {limits[1]}")
    return whole


def text(name: str, value: Any) -> Optional[bytes]:
    """Returns value as bytes for a const char*; None stays None."""
    encoded = value.encode() if isinstance(value, str) else value
    if encoded is not None and (not isinstance(encoded, bytes) or b"\0" in encoded):
        raise TypeError(f"{name} is {value!r}: give a text without NUL")
    return encoded
