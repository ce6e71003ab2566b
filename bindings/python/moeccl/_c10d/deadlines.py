# SPDX-License-Identifier: Apache-2.0
"""Deadlines: ends the operations whose time has passed although no thread waits for them.

A thread in wait() looks at the clock itself. Callers that take a work's future or poll it, such as DDP, do not, so their works are
entered here."""
import threading
import time
from typing import Any, Optional, Set


class Deadlines:
    """The works of a group that are watched, and the thread that calls expire() of each whose deadline passes.

    A work has `done`, `deadline` (of time.monotonic()) and `expire()`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._works: Set[Any] = set()
        self._thread: Optional[threading.Thread] = None
        self._next = float("inf")  # the deadline for which the thread waits
        self._closed = False

    def enter(self, work: Any) -> None:
        with self._changed:
            if work.done or self._closed:
                return
            self._works.add(work)
            if self._thread is None:
                self._start()
            elif work.deadline < self._next:
                self._changed.notify()

    def leave(self, work: Any) -> None:
        with self._changed:
            self._works.discard(work)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="moeccl-deadlines", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        with self._changed:
            while not self._closed:
                first = min(self._works, key=lambda work: work.deadline, default=None)
                self._next = float("inf") if first is None else first.deadline
                left = self._next - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(None if first is None else left)
            if self._closed or first is None:
                return
            self._works.discard(first)
            # expire() runs callbacks, which may wait for other works, so another thread goes on with those.
            self._thread = None
            if self._works:
                self._start()
        first.expire()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._works.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
