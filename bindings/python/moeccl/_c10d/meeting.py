# SPDX-License-Identifier: Apache-2.0
"""Makes communicators over a torch store, the only means that a group's ranks have to find one another."""
import ctypes
import time
from typing import Any, Callable, Optional

from .. import _abi
from .._errors import check
from .._library import lib
from ..comm import UniqueId, unique_id
from .failure import BackendError, expired

_MOST_MS = 2**31 - 1


def clamp_ms(ms: float) -> int:
    """Converts a timeout to the library's int32."""
    return max(1, min(_MOST_MS, int(ms)))


def own_connection(store: Any) -> Any:
    """Returns a separate store connection for another thread, because a blocking call on a connection delays all others."""
    try:
        return store.clone()
    except Exception:  # older torch and some stores have no clone(); they are polled without blocking
        return store


def await_key(store: Any, key: str, what: str, ms: float, give_up: Optional[Callable[[], bool]] = None) -> Optional[bytes]:
    """Returns the key's value once it is there, polling without blocking the connection; None if give_up() returned True."""
    until, pause = time.monotonic() + ms / 1000, 0.0002
    while not store.check([key]):
        if give_up is not None and give_up():
            return None
        if time.monotonic() > until:
            raise expired(what, ms, f"no other rank has set {key!r} in the store; look for one that failed or came never")
        time.sleep(pause)
        pause = min(0.02, pause * 1.5)
    return bytes(store.get(key))


def join(id_bytes: Any, n_ranks: int, rank: int, config: _abi.moecclConfig_t) -> int:
    """Joins a communicator and returns its handle."""
    handle = ctypes.c_void_p()
    meeting = id_bytes if isinstance(id_bytes, UniqueId) else UniqueId.from_bytes(id_bytes)
    check(lib.moecclCommInitRankConfig(ctypes.byref(handle), n_ranks, meeting, rank, ctypes.byref(config)))
    return handle.value or 0


def prefix(store: Any, rank: int) -> str:
    """Returns the prefix of all keys of a group. Each rank counts its groups, because the store may have served an earlier group of
    the same name."""
    return f"moeccl/{store.add(f'moeccl/turn/{rank}', 1)}"


def meet(store: Any, key: str, n_ranks: int, rank: int, config: _abi.moecclConfig_t) -> int:
    """Makes a communicator of all ranks of a group. `key` is prefix() followed by the communicator's purpose."""
    try:
        if n_ranks == 1:
            return join(unique_id(), 1, 0, config)
        where = f"{key}/id"
        if rank == 0:
            made = unique_id()
            store.set(where, bytes(made))
            return join(made, n_ranks, rank, config)
        found = await_key(store, where, f"joining the group as rank {rank} of {n_ranks}", config.init_timeout_ms)
        return join(found, n_ranks, rank, config)
    except BackendError:
        raise
    except RuntimeError as failure:
        code = getattr(failure, "code", _abi.moecclSystemError)
        text = str(failure).split(": ", 1)[-1] if hasattr(failure, "code") else str(failure)
        raise BackendError(code, f"joining the group as rank {rank} of {n_ranks}: {text}") from None
