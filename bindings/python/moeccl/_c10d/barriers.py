# SPDX-License-Identifier: Apache-2.0
"""monitored_barrier. It runs over the store, so that it can name missing ranks even if the network does not work."""
import time
from typing import Any, List

from .. import _abi
from .failure import BackendError
from .meeting import longest_pause


def monitored(store: Any, key: str, rank: int, size: int, ms: float, wait_all_ranks: bool) -> None:
    """Makes rank 0 wait for all ranks and then release them. The error texts are gloo's."""
    until = time.monotonic() + ms / 1000

    def there(names: List[str]) -> bool:
        pause = 0.0002
        while not store.check(names):
            left = until - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(longest_pause(size), pause * 1.5)
        return True

    if rank == 0:
        if ms <= 0:
            raise BackendError(_abi.moecclTimeout, f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {ms:.0f} ms")
        missing = []
        if not there([f"{key}/{other}" for other in range(1, size)]):
            for other in range(1, size):
                if store.check([f"{key}/{other}"]):
                    continue
                missing.append(other)
                if not wait_all_ranks:
                    break
        if not missing:
            store.set(f"{key}/all", b"1")
            return
        named = f"Rank {missing[0]}" if len(missing) == 1 and not wait_all_ranks else "Ranks " + ", ".join(map(str, missing))
        raise BackendError(_abi.moecclTimeout, f"[Rank 0]: {named} failed to pass monitoredBarrier in {ms:.0f} ms")
    store.set(f"{key}/{rank}", b"1")
    if not there([f"{key}/all"]):
        raise BackendError(_abi.moecclTimeout, f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
                           f"send/recv from rank 0 within {ms:.0f} ms. Please check rank 0 logs for faulty rank.")


class Monitored:
    """A group's monitored_barriers. Rank 0 removes the keys of those that all ranks have left."""

    def __init__(self, store: Any, prefix: str, rank: int, size: int) -> None:
        self._store, self._prefix, self._rank, self._size = store, prefix, rank, size
        self._n, self._n_removed = 0, 0

    def wait(self, ms: float, wait_all_ranks: bool) -> None:
        self._n += 1
        monitored(self._store, f"{self._prefix}/{self._n}", self._rank, self._size, ms, wait_all_ranks)
        while self._rank == 0 and self._n_removed < self._n - 1:  # all ranks have come to the n-th, so they have left the others
            self._n_removed += 1
            for last in ("all", *range(1, self._size)):
                self._store.delete_key(f"{self._prefix}/{self._n_removed}/{last}")
