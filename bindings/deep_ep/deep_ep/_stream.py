# SPDX-License-Identifier: Apache-2.0
"""A Buffer's communication stream. Calls run one after another; asynchronous calls run on the stream's thread."""
import queue
import threading

import torch

from .utils import EventHandle


class CommStream:
    """Runs work in the order of submission. It ensures that only one thread at a time uses the communicator."""

    def __init__(self):
        self._running = threading.Lock()
        self._queue, self._thread, self._last = None, None, None

    def run(self, work, previous=None, asynchronous=False):
        """Calls work() after all work submitted before it and after `previous`, an EventHandle or None. Returns an
        EventHandle if asynchronous; otherwise returns None after the work has finished."""
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
        """Waits for all submitted work. Failures are left to the holders of its events."""
        last, self._last = self._last, None
        if last is not None:
            last._done.wait()

    def is_own_thread(self):
        return threading.current_thread() is self._thread

    def stop(self):
        self.drain()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _call(self, work, previous):
        if previous is not None:
            previous.current_stream_wait()
        # The caller's mode does not hold on the Buffer's thread, and only inference mode may write to tensors made in either mode.
        with self._running, torch.inference_mode():
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
        except BaseException as caught:  # raised again by waits for the event
            failure = caught
        del task, call, work, previous  # so that their tensors are not kept until the next task
        event._finish(failure)
        del event, failure
