# SPDX-License-Identifier: Apache-2.0
"""Handles of the library that end with the last Python object that uses them."""
import sys
from typing import Any, Callable, Optional

from ._errors import check


class Owned:
    """A handle and the function that destroys it. Copies of an object share its Owned, and thus the handle."""

    def __init__(self, handle: Optional[int], destroy: Callable[[Optional[int]], int]) -> None:
        self._handle, self._destroy = handle, destroy

    def close(self) -> None:
        """Destroys the handle, once."""
        if self._handle is not None:
            check(self._destroy(self._handle))
            self._handle = None

    def __deepcopy__(self, memo: Any) -> "Owned":
        return self

    def __del__(self) -> None:
        # The end of the process frees everything, whereas a destruction may wait there for operations of peers that have gone.
        if self._handle is not None and not sys.is_finalizing():
            self._destroy(self._handle)
