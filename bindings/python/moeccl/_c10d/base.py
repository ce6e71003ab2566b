# SPDX-License-Identifier: Apache-2.0
"""What a backend is built on. Up to torch 2.11 at least, no class in Python can be a torch Backend; there the whole group is one
of Python's (group.PlainGroup), and the backend is a plain object."""
from typing import Any

from torch._C._distributed_c10d import Backend as _TorchBackend


class _Plain:
    def __init__(self, rank: int, size: int) -> None:
        self.__rank, self.__size = rank, size

    def rank(self) -> int:
        return self.__rank

    def size(self) -> int:
        return self.__size


def _can_be_made() -> bool:
    try:
        _TorchBackend(0, 1)
    except TypeError:
        return False
    return True


IS_TORCHS = _can_be_made()
Base: Any = _TorchBackend if IS_TORCHS else _Plain
