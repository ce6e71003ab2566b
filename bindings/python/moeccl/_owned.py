# SPDX-License-Identifier: Apache-2.0
"""Handles of the library that end with the last Python object that uses them."""
import collections
import ctypes
import sys
from typing import Any, Callable, Deque, Optional, Tuple, TypeVar

from ._errors import check

Destroy = Callable[[Any], int]
_T = TypeVar("_T")


def at_the_end(*kept: Any) -> bool:
    """Returns True while the interpreter ends. The end of the process then frees everything, whereas a destruction may wait there for
    operations of peers that have gone. The library's threads may still use `kept`, so it stays in memory."""
    if not sys.is_finalizing():
        return False
    for thing in kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return True


class Leftovers:
    """Handles of one communicator whose last objects have gone, and whose destruction waits for the communicator's operations.

    The garbage collector runs on any thread, and also where this rank must not wait: a peer may not come to an operation before this rank
    has done something else. So the handles stay until the thread that uses the communicator waits for its operations anyway, in a
    creation, which is collective, or in close()."""

    def __init__(self) -> None:
        self._handles: Deque[Tuple[Destroy, Any]] = collections.deque()
        self._over = False

    def add(self, destroy: Destroy, handle: Any) -> None:
        """Keeps a handle for clear(). Any thread may call it. After end() it destroys the handle, because nothing runs any more."""
        if self._over:
            destroy(handle)
        else:
            self._handles.append((destroy, handle))

    def clear(self) -> None:
        """Destroys the handles, after this rank's operations."""
        while True:
            try:
                destroy, handle = self._handles.popleft()
            except IndexError:
                return
            destroy(handle)

    def end(self) -> None:
        """The communicator has gone."""
        self._over = True
        self.clear()


class OfThisProcess:
    """An object with a handle of the library, which means nothing to another process, so it cannot be pickled. A copy of an object that
    uses it, such as a model, uses the same one."""
    _instead = "make one there, with the same arguments"  # for another process

    def __copy__(self: _T) -> _T:
        return self

    def __deepcopy__(self: _T, memo: Any) -> _T:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(f"a {type(self).__name__} belongs to its process and cannot be pickled or sent to another: {self._instead}")


class Owned(OfThisProcess):
    """A handle and the function that destroys it.

    leftovers: the communicator's, if `destroy` waits for its operations."""

    def __init__(self, handle: Optional[int], destroy: Destroy, leftovers: Optional[Leftovers] = None) -> None:
        self._handle, self._destroy, self._leftovers = handle, destroy, leftovers

    def close(self) -> None:
        """Destroys the handle, once."""
        if self._handle is not None:
            check(self._destroy(self._handle))
            self._handle = None

    def __del__(self) -> None:
        if self._handle is None or at_the_end():
            return
        if self._leftovers is None:
            self._destroy(self._handle)
        else:
            self._leftovers.add(self._destroy, self._handle)
