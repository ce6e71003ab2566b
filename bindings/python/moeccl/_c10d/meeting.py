# SPDX-License-Identifier: Apache-2.0
"""Makes communicators over a torch store, the only means that a group's ranks have to find one another."""
import contextlib
import ctypes
import secrets
import time
from typing import Any, Callable, Iterator, Optional

from .. import _abi
from .._errors import Error, check
from .._library import lib
from ..comm import UniqueId, unique_id
from .failure import BackendError, expired, failure

_MOST_MS = 2**31 - 1
_GIVEN_UP = b"given up"  # in place of the id of a rank 0 that could not form its group


def clamp_ms(ms: float) -> int:
    """Converts a timeout to the library's int32."""
    return max(1, min(_MOST_MS, int(ms)))


def own_connection(store: Any) -> Any:
    """Returns a separate store connection for another thread, because a blocking call on a connection delays all others."""
    try:
        return store.clone()
    except Exception:  # older torch and some stores have no clone(); they are polled without blocking
        return store


def longest_pause(n_ranks: int) -> float:
    """Returns the seconds between two looks at a store that `n_ranks` ranks poll: it serves all of them, some 20,000 a second."""
    return max(0.02, n_ranks / 20_000)


def _look(store: Any, key: str) -> Optional[bytes]:
    return bytes(store.get(key)) if store.check([key]) else None


def await_key(store: Any, key: str, what: str, ms: float, give_up: Optional[Callable[[], bool]] = None,
              n_ranks: int = 2, unlike: Optional[bytes] = None) -> Optional[bytes]:
    """Returns the key's value once it is there and is not `unlike`, polling without blocking the connection; None if give_up() returned
    True. `n_ranks` poll the store for it."""
    until, pause = time.monotonic() + ms / 1000, 0.0002
    while (found := _look(store, key)) in (None, unlike):
        if give_up is not None and give_up():
            return None
        if time.monotonic() > until:
            raise expired(what, ms, f"no other rank has set {key!r} in the store; look for one that failed or came never")
        time.sleep(pause)
        pause = min(longest_pause(n_ranks), pause * 1.5)
    return found


def join(id_bytes: Any, n_ranks: int, rank: int, config: _abi.moecclConfig_t) -> int:
    """Joins a communicator and returns its handle."""
    handle = ctypes.c_void_p()
    meeting = id_bytes if isinstance(id_bytes, UniqueId) else UniqueId.from_bytes(id_bytes)
    check(lib.moecclCommInitRankConfig(ctypes.byref(handle), n_ranks, meeting, rank, ctypes.byref(config)))
    return handle.value or 0


def prefix(comm: int) -> str:
    """Returns the prefix of a group's keys: rank 0 draws it, because the store may have served groups of the same name."""
    drawn = ctypes.create_string_buffer(secrets.token_bytes(8), 8)
    code = lib.moecclBroadcast(drawn, drawn, 8, _abi.moecclUint8, 0, comm, None)
    if code != 0:
        failed = failure("forming the group", code, comm)
        lib.moecclCommAbort(comm)
        lib.moecclCommDestroy(comm)
        raise failed
    return f"moeccl/{drawn.raw.hex()}"


def _lead(store: Any, where: str, n_ranks: int, config: _abi.moecclConfig_t) -> int:
    """Joins as rank 0, whose id replaces that of an earlier group."""
    made = unique_id()
    store.set(where, bytes(made))
    try:
        return join(made, n_ranks, 0, config)
    except BaseException:
        with contextlib.suppress(Exception):
            store.set(where, _GIVEN_UP)
        raise


def _follow(store: Any, where: str, n_ranks: int, rank: int, config: _abi.moecclConfig_t) -> int:
    """Joins as another rank. An id that is there from the start may be that of an earlier group: of one that was formed, or whose
    rank 0 died while it formed, in a job that was restarted with its store."""
    what = f"joining the group as rank {rank} of {n_ranks}"
    until = time.monotonic() + config.init_timeout_ms / 1000
    old = _look(store, where)
    found = old
    if old is None or old == _GIVEN_UP:
        found = await_key(store, where, what, config.init_timeout_ms, n_ranks=n_ranks, unlike=old)
        old = None
    try:
        return join(found, n_ranks, rank, config)
    except Error as failed:
        if old is None or failed.code != _abi.moecclRemoteError:
            raise
        left_ms = (until - time.monotonic()) * 1000
        try:
            found = await_key(store, where, what, left_ms, n_ranks=n_ranks, unlike=old)
        except RuntimeError:  # the time has passed, or the store has ended with rank 0
            raise failed from None
        if found == _GIVEN_UP:
            raise
    config.init_timeout_ms = clamp_ms((until - time.monotonic()) * 1000)
    return join(found, n_ranks, rank, config)


@contextlib.contextmanager
def _as_backend_error(n_ranks: int, rank: int) -> Iterator[None]:
    try:
        yield
    except BackendError:
        raise
    except RuntimeError as failed:
        code = getattr(failed, "code", _abi.moecclSystemError)
        text = str(failed).split(": ", 1)[-1] if hasattr(failed, "code") else str(failed)
        raise BackendError(code, f"joining the group as rank {rank} of {n_ranks}: {text}") from None


def meet_over(comm: int, what: str, n_ranks: int, rank: int, config: _abi.moecclConfig_t) -> int:
    """Makes another communicator of the ranks of `comm`, over which rank 0 sends the id. All ranks call it; `what` is for errors."""
    with _as_backend_error(n_ranks, rank):
        if n_ranks == 1:
            return join(unique_id(), 1, 0, config)
        # All ranks are here before there is an id, because an id that no rank joins ends after the init timeout. A barrier takes the
        # maximum of a byte and this the minimum, so that a rank that is in a barrier instead is an error.
        byte = ctypes.create_string_buffer(1)
        code = lib.moecclAllReduce(byte, byte, 1, _abi.moecclUint8, _abi.moecclMin, comm, None)
        made = unique_id() if rank == 0 and code == 0 else UniqueId()
        code = code or lib.moecclBroadcast(ctypes.byref(made), ctypes.byref(made), ctypes.sizeof(made), _abi.moecclUint8, 0, comm, None)
        if code != 0:
            raise failure(what, code, comm)
        return join(made, n_ranks, rank, config)


def meet(store: Any, key: str, n_ranks: int, rank: int, config: _abi.moecclConfig_t) -> int:
    """Makes a communicator of all ranks of a group. `key` names the group and the communicator's purpose."""
    with _as_backend_error(n_ranks, rank):
        if n_ranks == 1:
            return join(unique_id(), 1, 0, config)
        if rank == 0:
            return _lead(store, f"{key}/id", n_ranks, config)
        return _follow(store, f"{key}/id", n_ranks, rank, config)
