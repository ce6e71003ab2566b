# SPDX-License-Identifier: Apache-2.0
"""Works: the results of asynchronous calls.

An operation runs on a host stream of the library from the moment of the call. The work that Python has to do at its end (copies
into tensors with gaps, the future) is done once, in the order of the calls, by the first thread that asks: a thread in wait(), in
wait() of a later operation or in a blocking call, or the watcher, which is started when a caller requests a future or polls
is_completed(). From then on the work's deadline holds too (deadlines.py), although no thread may be in wait()."""
import ctypes
import itertools
import threading
import time
from collections import OrderedDict, deque
from typing import Any, Callable, Deque, List, Optional

import torch
from torch._C._distributed_c10d import Work as _TorchWork

from .._errors import check
from .._library import lib
from .base import KEEPS_WORKS
from .deadlines import Deadlines
from .failure import expired, failure, milliseconds, overdue

_MOST_IN_FLIGHT = 128
# Where torch does not keep works alive: those that nobody has waited for yet and whose future nobody has taken. Some callers never
# do either, so the oldest goes when there are more than this.
_MOST_KEPT = 1024
_kept: "OrderedDict[int, Work]" = OrderedDict()


def copy_back(after: Callable[[], Any]) -> None:
    """Fills the outputs. A thread is in inference mode or not on its own, and outside of it no tensor can be written that was made
    inside. The mode has no effect on other tensors: their versions count on."""
    with torch.inference_mode():
        after()


class Work(_TorchWork):
    """An operation. Subclasses define how it completes, and expire() if it has a deadline."""
    deadline: Optional[float] = None  # of time.monotonic()
    _deadlines: Optional[Deadlines] = None  # the group's

    def __init__(self, what: str, outputs: Any, source: int = -1) -> None:
        super().__init__()
        self.what, self.outputs, self.source = what, outputs, source
        self.done = self._watched = False
        self.error: Optional[BaseException] = None
        self._ended = threading.Condition(threading.Lock())
        self._future: Any = None  # that callers get
        self._given: Any = None  # its callback settles _future
        self._on_end: List[Callable[[], None]] = []
        if not KEEPS_WORKS:
            self._keep_alive()

    def _keep_alive(self) -> None:
        _kept[id(self)] = self
        if len(_kept) > _MOST_KEPT:
            _kept.popitem(last=False)

    def _let_go(self) -> None:
        if not KEEPS_WORKS:
            _kept.pop(id(self), None)

    def end(self, error: Optional[BaseException] = None) -> None:
        """Marks the operation as ended; only the first call counts."""
        future = self._mark(error)
        if future is not None:
            self._settle(future)

    def _mark(self, error: Optional[BaseException]) -> Any:
        """Returns the future that is then to be settled, if any. Its callbacks may run long and wait for other operations, so the
        caller holds no lock then."""
        with self._ended:
            if self.done:
                return None
            self.error, self.done = error, True
            self._ended.notify_all()
            given = self._given
        if self._watched and self._deadlines is not None:
            self._deadlines.leave(self)
        return given

    def _settle(self, given: Any) -> None:
        given.set_result(None)

    def _outcome(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.outputs

    def wait(self, timeout: Any = None) -> bool:
        """Blocks until the operation has ended, for at most `timeout`, and raises its failure."""
        if not self.done:
            self._wait(milliseconds(timeout))
        self._let_go()
        if self.error is not None:
            raise self.error
        return True

    def _wait(self, ms: Optional[float]) -> None:
        with self._ended:
            if not self._ended.wait_for(lambda: self.done, None if ms is None else ms / 1000):
                raise expired(f"{self.what}: wait()", ms or 0, "the operation goes on; wait longer, or abort the group")

    def watch(self) -> None:
        """Ensures that the work ends, at its deadline if it has one, even if no thread waits for it."""
        if self._deadlines is not None and self.deadline is not None and not self._watched:
            self._watched = True
            self._deadlines.enter(self)

    def expire(self) -> None:
        """Ends the work with an error, because its deadline has passed."""

    def is_completed(self) -> bool:
        if not self.done:
            self.watch()
        return self.done

    def is_success(self) -> bool:
        return self.is_completed() and self.error is None

    def exception(self) -> Optional[BaseException]:
        return self.error if self.is_completed() else None

    def result(self) -> Any:
        self.wait()
        return self.outputs

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        if self.source < 0:
            raise RuntimeError(f"{self.what} has no source rank: only a receive has one, when it has ended")
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Returns a torch.futures.Future of the output tensors."""
        with self._ended:
            made = self._future is None
            if made:
                # Its failure comes from a callback: set_exception() makes the exception its value for callers in C++, such as DDP's
                # reducer, which then reads tensors that are not there.
                self._given = torch.futures.Future()
                self._future = self._given.then(lambda _: self._outcome())
            done = self.done
        if made and done:
            self._settle(self._given)
        elif not done:
            self.watch()
        self._let_go()
        return self._future


class DoneWork(Work):
    """An operation that ended before its call returned."""

    def __init__(self, what: str, outputs: Any) -> None:
        super().__init__(what, outputs)
        self.done = True


class StreamWork(Work):
    """An operation that is alone on its host stream."""

    def __init__(self, pool: "Streams", what: str, outputs: Any, comm: int, keep: Any, after: Optional[Callable[[], None]],
                 limit_ms: Optional[float]) -> None:
        super().__init__(what, outputs)
        self._pool, self._comm, self._keep, self._after = pool, comm, keep, after
        self._stream: Optional[int] = pool.take()
        self._finishing = threading.Lock()
        self._deadlines, self._limit_ms = pool.deadlines, limit_ms
        self.deadline = None if limit_ms is None else time.monotonic() + limit_ms / 1000
        self._refused: Optional[BaseException] = None

    @property
    def stream(self) -> Optional[int]:
        return self._stream

    def issued(self, error: Optional[BaseException]) -> None:
        """Called when all calls are on the stream. `error` is that of a refused call; it ends the work when the others have run."""
        self._refused = error
        self._pool.add(self)

    def finish(self) -> None:
        """Waits for the stream and ends the work on this thread, after the earlier ones of the group, which have run by then."""
        for work in self._pool.before(self):
            work.complete()
        self.complete()

    def complete(self) -> None:
        with self._finishing:
            if self.done:
                return
            code = lib.moecclStreamSynchronize(self._stream)
            error = self._refused  # not earlier, because expire() may set it meanwhile
            if code != 0 and error is None:
                error = failure(self.what, code, self._comm)
            if error is None and self._after is not None:
                try:
                    copy_back(self._after)
                except Exception as raised:  # a failed copy is the work's failure, whichever thread ends it
                    error = raised
            self._keep = self._after = None
            future = self._mark(error)
            stream, self._stream = self._stream, None
            self._pool.give_back(stream)
        if future is not None:
            self._settle(future)

    def _settle(self, given: Any) -> None:
        self._pool.step_down()
        super()._settle(given)

    def _wait(self, ms: Optional[float]) -> None:
        if ms is None and self.deadline is None:
            self.finish()
            return
        self._pool.watch()
        left = float("inf") if self.deadline is None else max(0.0, self.deadline - time.monotonic()) * 1000
        if ms is not None and ms < left:
            super()._wait(ms)
            return
        with self._ended:
            if self._ended.wait_for(lambda: self.done, left / 1000):
                return
        self.expire()

    def expire(self) -> None:
        self._refused = self._refused or overdue(self.what, self._limit_ms or 0)
        self._pool.abort()
        self.finish()  # after the abort, because until then the operation uses its tensors

    def watch(self) -> None:
        self._pool.watch()
        super().watch()


class Streams:
    """A group's host streams, one for each operation in flight, and the operations on them in the order of their calls."""

    def __init__(self, abort: Callable[[], None], deadlines: Deadlines) -> None:
        """abort() ends all operations on the streams."""
        self.abort, self.deadlines = abort, deadlines
        self._lock = threading.Lock()
        self._free: List[int] = []
        self._all: List[int] = []
        self._works: Deque[StreamWork] = deque()
        self._there = threading.Condition(self._lock)
        self._watcher: Optional[threading.Thread] = None
        self._closed = False

    def take(self) -> int:
        while True:
            with self._lock:
                self._forget()
                if self._free:
                    return self._free.pop()
                oldest = self._works[0] if len(self._all) >= _MOST_IN_FLIGHT and self._works else None
            if oldest is None:
                break
            oldest.finish()
        made = ctypes.c_void_p()
        check(lib.moecclStreamCreate(ctypes.byref(made)))
        with self._lock:
            self._all.append(made.value or 0)
        return made.value or 0

    def give_back(self, stream: Optional[int]) -> None:
        with self._lock:
            if stream is not None:
                self._free.append(stream)
            self._forget()

    def _forget(self) -> None:
        """Drops the works that have ended, with their tensors. Works end in their order, so these are the first. The caller holds
        the lock."""
        while self._works and self._works[0].done:
            self._works.popleft()

    def before(self, work: StreamWork) -> List[StreamWork]:
        """Returns the works before this one that have not ended."""
        with self._lock:
            self._forget()
            return [] if work.done else list(itertools.takewhile(lambda other: other is not work, self._works))

    def in_flight(self) -> List[StreamWork]:
        """Returns the works that have not ended. When a blocking call that was made after them returns, they have run too."""
        if not self._works:  # costs no lock, and the caller's own works are there
            return []
        with self._lock:
            self._forget()
            return list(self._works)

    def add(self, work: StreamWork) -> None:
        with self._lock:
            self._works.append(work)
            if self._watcher is not None:
                self._there.notify()

    def watch(self) -> None:
        with self._lock:
            self._start_watcher()

    def _start_watcher(self) -> None:
        if self._watcher is None and not self._closed:
            self._watcher = threading.Thread(target=self._loop, name="moeccl-watcher", daemon=True)
            self._watcher.start()

    def step_down(self) -> None:
        """Called before a future's callbacks run. They may wait for other operations, so if this thread is the watcher, another one
        takes its place when there is something to watch."""
        with self._lock:
            if self._watcher is threading.current_thread():
                self._watcher = None
                if any(not work.done for work in self._works):
                    self._start_watcher()

    def _loop(self) -> None:
        own = threading.current_thread()
        while True:
            with self._lock:
                if self._watcher is None:  # nobody took its place
                    self._watcher = own
                if self._watcher is not own:
                    return
                self._forget()
                while not self._works and not self._closed:
                    self._there.wait()
                if not self._works:
                    return
                work = self._works[0]
            work.finish()

    def close(self) -> None:
        """Finishes the operations in flight, ends the watcher and frees the streams."""
        with self._lock:
            works, self._closed = list(self._works), True
            self._there.notify_all()
        for work in works:
            work.finish()
        watcher = self._watcher
        if watcher is not None and watcher is not threading.current_thread():
            watcher.join()
        with self._lock:
            streams, self._all, self._free = self._all, [], []
        for stream in streams:
            lib.moecclStreamDestroy(stream)
