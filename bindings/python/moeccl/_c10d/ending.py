# SPDX-License-Identifier: Apache-2.0
"""The end of a process that has not destroyed its groups."""
import atexit
import os
from typing import Any, Set

# Backends live here until they are shut down, because torch's wrapper for DETAIL keeps only the C++ half of a backend.
alive: Set[Any] = set()
os.register_at_fork(after_in_child=alive.clear)  # their threads are in the parent alone, and a child would wait for them


@atexit.register
def _end_all() -> None:
    """Ends groups that were not destroyed: their threads must end before the interpreter does."""
    for backend in list(alive):
        if backend._streams.busy():
            backend.stop()
        backend.shutdown()
