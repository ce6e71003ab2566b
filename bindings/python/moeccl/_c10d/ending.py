# SPDX-License-Identifier: Apache-2.0
"""The end of a process that has not destroyed its groups."""
import atexit
import os
import time
from typing import Any, Set

# How long operations that still run may go on, all groups together: peers that come in this time get their results. The last
# operations of a stream may lie behind a training step's computation on the GPU.
_PATIENCE_S, _CUDA_PATIENCE_S = 1.0, 10.0

# Backends live here until they are shut down, because torch's wrapper for DETAIL keeps only the C++ half of a backend.
alive: Set[Any] = set()
os.register_at_fork(after_in_child=alive.clear)  # their threads are in the parent alone, and a child would wait for them


@atexit.register
def _end_all() -> None:
    """Ends groups that were not destroyed: their threads must end before the interpreter does. What runs is given some time and then
    aborted, because a peer may never come."""
    begun = time.monotonic()
    for backend in list(alive):
        until = begun + (_CUDA_PATIENCE_S if backend._cuda else _PATIENCE_S)
        while backend.runs() and time.monotonic() < until:
            time.sleep(0.005)
        if backend.runs():
            backend.stop()
        backend.shutdown()
