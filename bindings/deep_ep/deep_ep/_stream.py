# SPDX-License-Identifier: Apache-2.0
"""A Buffer's communication stream: calls run one after another, at once or, asynchronous ones, on a thread of their own."""
import queue
import threading

import torch

from .utils import EventHandle


class CommStream:
    """Runs work in the order of its submission. A communicator is used by one thread at a time: this sees to it."""

    def __init__(self):
        self._running = threading.Lock()
        self._queue, self._thread, self._last = None, None, None

    def run(self, work, previous=None, asynchronous=False):
        """Calls work() after what was submitted before and after `previous`, an EventHandle or None. Returns an
        EventHandle when asynchronous; otherwise the work has finished, and None is returned."""
        if not asynchronous:
            self.drain()
            self._call(work, previous)
            return None
        if self._thread is None:
            self._queue = queue.SimpleQueue()
            self._thread = threading.Thread(target=_serve, args=(self._queue, ), daemon=True, name="deep_ep")
            self._thread.start()
        event = EventHandle._pending()
        self._last = event
        self._queue.put((self._call, work, previous, event))
        return event

    def drain(self):
        """Waits for all submitted work; its failures are for those that hold its events."""
        last, self._last = self._last, None
        if last is not None:
            last._done.wait()

    def stop(self):
        self.drain()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _call(self, work, previous):
        if previous is not None:
            previous.current_stream_wait()
        with self._running, torch.no_grad():
            work()


def _serve(tasks):
    while True:
        task = tasks.get()
        if task is None:
            return
        call, work, previous, event = task
        failure = None
        try:
            call(work, previous)
        except BaseException as caught:  # handed to those that wait for the event
            failure = caught
        del task, call, work, previous  # the tensors that they hold are not kept until the next task
        event._finish(failure)
        del event, failure
