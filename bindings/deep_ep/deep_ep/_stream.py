# SPDX-License-Identifier: Apache-2.0
"""A Buffer's communication streams. Calls run one after another. Asynchronous calls on CPU tensors run on a thread, and calls on
CUDA tensors in the order of a CUDA stream."""
import contextlib
import queue
import threading

import torch

from .utils import EventHandle


class CommStream:
    """Runs work in the order of submission. It ensures that only one thread at a time uses the communicator."""

    def __init__(self):
        self._running = threading.Lock()
        self._queue, self._thread, self._last = None, None, None

    @contextlib.contextmanager
    def ordered(self, previous, reads, asynchronous, inputs):
        """The body of a call. With `reads`, waits for `previous`, an EventHandle or None, first; otherwise its work does."""
        if previous is not None and reads:
            previous.current_stream_wait()
        yield

    def lend(self, tensors):
        """Tells that the caller gets these tensors."""

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

    def finish(self):
        """Waits until memory that calls used may be freed."""
        self.drain()

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


class CudaStream:
    """Runs calls on the caller's thread with this object's CUDA stream as the current one. The stream waits for the caller's stream
    before a call, or for the event that the caller gives; the caller's stream waits for it after a call that is not
    asynchronous. Tensors that a call makes come from this stream's memory, and those that cross over to the other stream are
    recorded there, so that their memory is not used again too early.

    host: the CommStream of the same communicator. cuda: the module torch.cuda, or what stands in for it in tests."""

    def __init__(self, device, host, cuda=torch.cuda):
        self.device, self._host, self._cuda = device, host, cuda
        self.stream = cuda.Stream(device)
        self._caller = None  # the caller's stream during a call

    @contextlib.contextmanager
    def ordered(self, previous, reads, asynchronous, inputs):
        """The body of a call that reads the tensors `inputs`, after the caller's work or after `previous`, an EventHandle."""
        self._host.drain()
        caller = self._cuda.current_stream(self.device)
        if previous is None:
            self.stream.wait_stream(caller)
        else:
            previous._wait()
            if previous._event is not None:
                self.stream.wait_event(previous._event)
        for tensor in inputs:
            self._record(tensor, self.stream)
        with self._cuda.device(self.device), self._cuda.stream(self.stream):
            self._caller = caller
            try:
                yield
            finally:
                self._caller = None
                if not asynchronous:
                    caller.wait_stream(self.stream)

    def lend(self, tensors):
        for tensor in tensors:
            self._record(tensor, self._caller)

    def _record(self, tensor, stream):
        if tensor.is_cuda:
            tensor.record_stream(stream)

    def run(self, work, previous=None, asynchronous=False):
        """Calls work(). Returns an EventHandle if asynchronous. Only called inside ordered(), which has waited for `previous`."""
        with torch.inference_mode():
            work()
        return EventHandle(self._cuda) if asynchronous else None

    def finish(self):
        """Waits until memory that calls used may be freed."""
        self._host.drain()
        self.stream.synchronize()


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
