# SPDX-License-Identifier: Apache-2.0
"""Streams and groups, and the ownership of a call's buffers until it has run."""
import contextlib
import ctypes
import threading
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

from ._buffers import Buffer
from ._errors import check, number, SIZE
from ._library import lib
from ._owned import OfThisProcess, at_the_end


class _Open(threading.local):
    """The calling thread's open group, the buffers of its calls, the streams of those that have one, and its joins."""
    depth = 0

    def __init__(self) -> None:
        self.lent: List[Any] = []
        self.at_end: List[Callable[[], None]] = []  # each sets the handles that the end of the group has made
        self.on_streams: List[Tuple["Stream", Sequence[Any]]] = []


_open = _Open()


def in_group() -> bool:
    """Returns True if this thread has an open group."""
    return _open.depth > 0


class Stream(OfThisProcess):
    """A host stream: calls with it return at once and run in order on its own thread.

    Their buffers stay lent (and alive) until synchronize(), which raises the first failure since its last call. Leaving a
    `with` block synchronizes and closes the stream."""

    def __init__(self) -> None:
        made = ctypes.c_void_p()
        check(lib.moecclStreamCreate(ctypes.byref(made)))
        self._handle: Optional[int] = made.value
        self._lent: List[Any] = []

    @property
    def handle(self) -> int:
        """The moecclStream_t; 0 after close()."""
        return self._handle or 0

    def synchronize(self) -> None:
        """Waits for the calls that were made with this stream, then releases their buffers."""
        lent, self._lent = self._lent, []  # another thread may lend more meanwhile, or wait too
        try:
            check(lib.moecclStreamSynchronize(self._live()))
        finally:
            for thing in lent:
                thing.release()

    def _live(self) -> int:
        if self._handle is None:
            raise ValueError("the stream is closed")
        return self._handle

    def close(self) -> None:
        """Finishes the stream's calls and frees it."""
        if self._handle is not None:
            check(lib.moecclStreamDestroy(self._handle))  # refused while a group holds calls on it
            self._handle = None
            lent, self._lent = self._lent, []
            for thing in lent:
                thing.release()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            self.synchronize()
        except Exception:
            if kind is None:  # otherwise the exception that ended the block says more
                raise
        finally:
            self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None and not at_the_end(self._lent):
            lib.moecclStreamDestroy(self._handle)


_LEGACY_DEFAULT = 1  # CU_STREAM_LEGACY. The default stream of torch and CuPy is 0, and NULL would make the call block


def stream_handle(stream: Any) -> Optional[int]:
    """Returns the moecclStream_t of a Stream or a CUDA stream (torch's, CuPy's, or its number); None for None."""
    if stream is None:
        return None
    if isinstance(stream, Stream):
        return stream._live()
    for name in ("cuda_stream", "ptr"):
        if hasattr(stream, name):
            return int(getattr(stream, name)) or _LEGACY_DEFAULT
    return number("stream", stream, SIZE)


def at_group_end(action: Callable[[], None]) -> None:
    """Calls action() after the end of this thread's open group, also after a failure."""
    _open.at_end.append(action)


def give_back(buffers: Sequence[Any], stream: Any = None) -> None:
    """Releases a call's buffers once it has run: now, at the end of the group, or when its stream is synchronized."""
    if _open.depth:  # the group uses them, and the stream, at its end
        if isinstance(stream, Stream):
            _open.on_streams.append((stream, buffers))
        else:
            _open.lent.extend(buffers)
        return
    if isinstance(stream, Stream):
        stream._lent.extend(buffers)
        return
    # The owner keeps buffers of a CUDA stream alive, as with every other call on that stream.
    for buffer in buffers:
        buffer.release()


@contextlib.contextmanager
def group() -> Iterator[None]:
    """Issues the calls inside together at its end: sends and receives in any order, several ranks from one thread.

    An exception that leaves the outermost group abandons it, and nothing is issued."""
    check(lib.moecclGroupStart())
    _open.depth += 1
    end = lib.moecclGroupEnd
    try:
        yield
    except BaseException:
        if _open.depth == 1:
            end = lib.moecclGroupCancel
        raise
    finally:
        _open.depth -= 1
        code = end()
        if _open.depth == 0:
            actions, _open.at_end = _open.at_end, []
            for action in actions:
                action()
            lent, _open.lent = _open.lent, []
            for thing in lent:
                thing.release()
            on_streams, _open.on_streams = _open.on_streams, []
            for stream, buffers in on_streams:  # not before: a synchronize() meanwhile would have released them
                stream._lent.extend(buffers)
    check(code)


__all__ = ["Buffer", "Stream", "group"]
