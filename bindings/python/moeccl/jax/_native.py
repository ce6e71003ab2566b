# SPDX-License-Identifier: Apache-2.0
"""The library of handlers that XLA calls, and the numbers by which compiled programs name communicators."""
import ctypes
import os
import weakref
from typing import Any

import jax

from moeccl import Comm
from moeccl._library import FOLDERS

if not hasattr(jax, "ffi"):
    raise ImportError(f"jax {jax.__version__} has no jax.ffi: install jax 0.6 or newer")
NAME = "libmoeccl-jax.so"
COLLECTIVES = ("AllReduce", "Reduce", "Broadcast", "AllGather", "ReduceScatter", "AllToAll")
LAYERS = ("Route", "Dispatch", "Combine", "DispatchBackward", "CombineBackward", "CombineBackwardWeights")


def target(name: str) -> str:
    """Returns the name by which XLA knows a handler."""
    return f"moeccl_{name}"


def _load() -> Any:
    # Beside the package in a wheel, in the library's private folder of an installation, in bindings/jax of a build folder.
    places = [os.path.join(FOLDERS[0], NAME)] + [os.path.join(f, "moeccl", NAME) for f in FOLDERS[1:]]
    places.append(os.path.join(FOLDERS[0], "..", "..", "jax", NAME))
    failures = []
    for name in [p for p in places if os.path.exists(p)] + [NAME]:
        try:
            loaded = ctypes.CDLL(name)
        except OSError as failure:
            failures.append(str(failure))
            continue
        for function, result, arguments in (
                ("AddComm", ctypes.c_int64, [ctypes.c_void_p]), ("RemoveComm", None, [ctypes.c_int64]), ("RemoveLayer", None, [ctypes.c_int64]),
                ("AddLayer", ctypes.c_int64, [ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_size_t] * 4])):
            getattr(loaded, f"moecclJax{function}").restype = result
            getattr(loaded, f"moecclJax{function}").argtypes = arguments
        return loaded
    raise ImportError(f"{NAME} is not found ({'; '.join(failures)}): moeccl.jax needs it beside the package moeccl, in the folder moeccl "
                      "beside libmoeccl, or where the dynamic linker looks (LD_LIBRARY_PATH)")


def _register(loaded: Any) -> None:
    for platform, suffix, names in (("cpu", "", COLLECTIVES + LAYERS), ("CUDA", "OnStream", COLLECTIVES)):
        for name in names:
            try:
                jax.ffi.register_ffi_target(target(name), jax.ffi.pycapsule(getattr(loaded, f"moecclJax{name}{suffix}")), platform=platform)
            except Exception as failure:  # jaxlib raises several types
                raise ImportError(f"jax {jax.__version__} does not accept MoECCL's handlers, which are made for XLA's FFI 0.1 to 0.3: "
                                  f"use a MoECCL and a jaxlib of one time ({failure})") from failure


lib = _load()
_register(lib)
_numbers: "weakref.WeakKeyDictionary[Comm, int]" = weakref.WeakKeyDictionary()


class _Number:
    """A communicator's number, which ends with the communicator: close() closes what is in its registrations."""

    def __init__(self, number: int) -> None:
        self._number = number

    def close(self) -> None:
        lib.moecclJaxRemoveComm(self._number)


def number_of(comm: Comm) -> int:
    """Returns the number of a communicator for programs, the same for each call."""
    if not isinstance(comm, Comm):
        raise TypeError(f"comm is a {type(comm).__name__}: give a moeccl.Comm")
    if not comm.handle:
        raise ValueError("the communicator is closed, or has not joined")
    if comm not in _numbers:
        number = lib.moecclJaxAddComm(comm.handle)
        if number == 0:
            raise MemoryError("no memory for a communicator's number")
        _numbers[comm] = number
        comm._registrations.add(_Number(number))  # type: ignore[arg-type]
    return _numbers[comm]
