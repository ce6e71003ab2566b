# SPDX-License-Identifier: Apache-2.0
"""The library of handlers that XLA calls, and the numbers by which compiled programs name communicators."""
import ctypes
import os
import threading
import weakref
from typing import Any, List

import jax
from jax._src import dispatch

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


def _places() -> List[str]:
    """Returns where the library may be, the first choice first: beside the package in a wheel, in the library's private folder of an
    installation, in bindings/jax of a build folder. A library that LIBMOECCL names comes before, in the same three kinds of places."""
    places = [os.path.join(FOLDERS[0], NAME)] + [os.path.join(f, "moeccl", NAME) for f in FOLDERS[1:]]
    places.append(os.path.join(FOLDERS[0], "..", "..", "jax", NAME))
    beside = os.path.dirname(os.environ.get("LIBMOECCL", ""))
    if beside:
        places = [os.path.join(beside, folder, NAME) for folder in ("", "moeccl", os.path.join("bindings", "jax"))] + places
    return [p for p in places if os.path.exists(p)] + [NAME]


def _load() -> Any:
    failures = []
    for name in _places():
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
    raise ImportError(f"{NAME} is not found ({'; '.join(failures)}): moeccl.jax needs it beside the package moeccl, beside libmoeccl or in "
                      "the folder moeccl there (name libmoeccl in LIBMOECCL), or where the dynamic linker looks (LD_LIBRARY_PATH)")


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
_numbers_lock = threading.Lock()


def settle() -> None:
    """Waits for this thread's programs. The error of one that failed is its results' and no longer this thread's: without this, JAX
    would hand it to every later program with an ordered effect, also on a new communicator."""
    try:
        jax.effects_barrier()
    except Exception:  # jaxlib raises several types
        dispatch.runtime_tokens.clear()  # JAX has no public name for a thread's tokens


def _forget(comm: Comm) -> None:
    """Ends a communicator's number, after the programs that use it."""
    settle()
    with _numbers_lock:
        number = _numbers.pop(comm)
    lib.moecclJaxRemoveComm(number)


def number_of(comm: Comm) -> int:
    """Returns the number of a communicator for programs, the same for each call. Any thread may call it."""
    if not isinstance(comm, Comm):
        raise TypeError(f"comm is a {type(comm).__name__}: give a moeccl.Comm")
    if not comm.handle:
        raise ValueError("the communicator is closed, or has not joined")
    with _numbers_lock:
        if comm in _numbers:
            return _numbers[comm]
    settle()  # not under the lock, because a program may take long
    with _numbers_lock:
        if comm not in _numbers:
            number = lib.moecclJaxAddComm(comm.handle)
            if number == 0:
                raise MemoryError("no memory for a communicator's number")
            _numbers[comm] = number
            comm._before_close.append(_forget)
        return _numbers[comm]
