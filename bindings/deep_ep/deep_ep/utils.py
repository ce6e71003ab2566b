# SPDX-License-Identifier: Apache-2.0
"""EventHandle and EventOverlap: how a caller waits for a call that was made with async_finish=True."""
import threading

import torch


class EventHandle:
    """A point in the work of a Buffer or of the caller. If made without arguments, it stands for the caller's own work so far:
    that of the current CUDA stream, where CUDA is in use. A CPU has already finished its work."""

    def __init__(self, cuda=torch.cuda):
        self._done, self._failure, self._event = None, None, None
        if cuda.is_initialized():
            self._event = cuda.Event()
            self._event.record(cuda.current_stream())
        self._cuda = cuda

    @classmethod
    def _pending(cls):
        event = cls.__new__(cls)
        event._failure, event._event = None, None
        event._done = threading.Event()
        return event

    def _finish(self, failure=None):
        self._failure = failure
        self._done.set()

    def _wait(self):
        """Returns when work on CPU tensors has finished; if it failed, raises its exception."""
        if self._done is not None:
            self._done.wait()
        if self._failure is not None:
            raise self._failure

    def is_done(self):
        """Returns whether work on CPU tensors has finished."""
        return self._done is None or self._done.is_set()

    def current_stream_wait(self):
        """Makes the current CUDA stream wait for work on CUDA tensors; returns when work on CPU tensors has finished. If that
        failed, raises its exception."""
        self._wait()
        if self._event is not None:
            self._cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """The event that calls return. `with event: ...` runs the body while the call communicates and waits at its end.

    event: None unless the call was made with async_finish=True, or V2's async_with_compute_stream=True. extra_tensors: tensors to
    keep alive with the event. hook_after_wait: None, or what the next wait calls at its end."""

    def __init__(self, event=None, extra_tensors=None):
        self.event, self.extra_tensors = event, extra_tensors
        self.hook_after_wait = None
        self._release = False

    def current_stream_wait(self, release_handle=False):
        """Waits until the call's results are there, or makes the current CUDA stream wait; if the call failed, raises its
        exception. release_handle: drops the event and the tensors that it keeps."""
        if self.event is None:
            raise RuntimeError("there is no event to wait for: the call was made without async_finish=True (V2: "
                               "async_with_compute_stream=True), and its results were there when it returned")
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait):
        """Lets the next wait call hook_after_wait() at its end."""
        if self.hook_after_wait is not None:
            raise RuntimeError("the event has a hook_after_wait that no wait has called yet: register one at a time")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle=False):
        """`with event(release_handle=True): ...` drops the event at the end of the body."""
        self._release = release_handle
        return self

    def __enter__(self):
        return self

    def __exit__(self, exc_type, exc_val, exc_tb):
        release, self._release = self._release, False
        if self.event is not None:
            self.current_stream_wait(release)
