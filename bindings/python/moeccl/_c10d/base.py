# SPDX-License-Identifier: Apache-2.0
"""What torch's versions offer to a backend in Python (docs/decisions/119-older-torch.md).

Since torch 2.14 a class in Python can be a torch Backend. Before that, only a whole ProcessGroup can be written in Python
(plain.PlainGroup), and the backend is an object that torch does not know."""
import re
from typing import Any, Tuple

import torch

LEAST = (2, 4)


def version_of(text: str) -> Tuple[int, int]:
    """Returns torch's major and minor version, and raises where torch is too old for this backend."""
    found = re.match(r"(\d+)\.(\d+)", text)
    version = (int(found[1]), int(found[2])) if found is not None else LEAST
    if version < LEAST:
        least = ".".join(map(str, LEAST))
        raise ImportError(f"the backend moeccl needs torch {least} or newer, and this is torch {text}: install a newer torch, or use "
                          "moeccl.Comm, which does not need torch.distributed")
    return version


# Before the imports that an older torch fails. Sphinx builds the reference with a stand-in for torch, whose version is no str.
VERSION = version_of(str(torch.__version__))

from torch._C import _distributed_c10d as _c10d  # noqa: E402

# Up to torch 2.6, the part of a work that is written in Python ends with Python's last reference, although torch's C++ side still
# holds the work. A wait for what is left of it never ends.
KEEPS_WORKS = VERSION >= (2, 7)


class _Plain:
    """In the place of torch's Backend, where no class in Python can be one."""

    def __init__(self, rank: int, size: int) -> None:
        self.__rank, self.__size = rank, size

    def rank(self) -> int:
        return self.__rank

    def size(self) -> int:
        return self.__size


def _can_be_made() -> bool:
    try:
        _c10d.Backend(0, 1)
    except TypeError:
        return False
    return True


IS_TORCHS = _can_be_made()
_Parent: Any = _c10d.Backend if IS_TORCHS else _Plain
BaseOptions: Any = getattr(_c10d.Backend, "Options", None) or _c10d.ProcessGroup.Options  # the latter up to torch 2.5


class Base(_Parent):  # type: ignore[misc]
    """A Backend with what torch calls for a group that is bound to a device."""

    def eager_connect_single_device(self, device: Any) -> None:
        """Does nothing: the first call with a CUDA tensor connects."""

    def perform_nocolor_split(self, device: Any) -> None:
        """Does nothing: the ranks of a new group meet in the store, without those outside of it."""
