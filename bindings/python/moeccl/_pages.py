# SPDX-License-Identifier: Apache-2.0
"""Texts that the library writes into the caller's buffer."""
import ctypes
from typing import Any, Callable

from ._errors import check


def page(call: Callable[..., int], comm: Any = None) -> str:
    """Returns the whole text of a call whose last arguments are text, text_bytes and needed."""
    room = ctypes.create_string_buffer(16384)
    needed = ctypes.c_size_t()
    while True:
        check(call(room, len(room), ctypes.byref(needed)), comm._handle if comm is not None else None)
        if needed.value <= len(room):
            return room.value.decode(errors="replace")
        room = ctypes.create_string_buffer(needed.value)
