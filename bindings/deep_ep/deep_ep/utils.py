# SPDX-License-Identifier: Apache-2.0
"""EventHandle and EventOverlap: how a caller waits for a call that was made with async_finish=True."""
import threading


class EventHandle:
    """A point in the work of a Buffer. If made without arguments, it stands for the caller's own work so far, which a
    CPU has already finished, so waiting for it returns at once."""

    def __init__(self):
        self._done, self._failure = None, None

    @classmethod
    def _pending(cls):
        event = cls()
        event._done = threading.Event()
        return event

    def _finish(self, failure=None):
        self._failure = failure
        self._done.set()

    def current_stream_wait(self):
        """Returns when the work has finished; if it failed, raises its exception."""
        if self._done is not None:
            self._done.wait()
        if self._failure is not None:
            raise self._failure


class EventOverlap:
    """The event that calls return. `with event: ...` runs the body while the call communicates and waits at its end.

    event: None unless the call was made with async_finish=True. extra_tensors: tensors to keep alive with the event."""

    def __init__(self, event=None, extra_tensors=None):
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self):
        """Waits until the call's results are there; if it failed, raises its exception."""
        if self.event is None:
            raise RuntimeError("there is no event to wait for: the call was made without async_finish=True, and its "
                               "results were there when it returned")
        self.event.current_stream_wait()

    def __enter__(self):
        return self

    def __exit__(self, exc_type, exc_val, exc_tb):
        if self.event is not None:
            self.event.current_stream_wait()
