# SPDX-License-Identifier: Apache-2.0
"""monitored_barrier. It runs over the store, so that it can name missing ranks even if the network does not work."""
import time
from typing import Any

from .. import _abi
from .failure import BackendError


def monitored(store: Any, key: str, rank: int, size: int, ms: float, wait_all_ranks: bool) -> None:
    """Makes rank 0 wait for each rank in turn and then release them all. The error texts are gloo's."""
    until, pause = time.monotonic() + ms / 1000, 0.0002

    def there(name: str, last: bool) -> bool:
        nonlocal pause
        while not store.check([name]):
            if last or time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(0.01, pause * 1.5)
        return True

    if rank == 0:
        missing = []
        if ms <= 0:
            raise BackendError(_abi.moecclTimeout, f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {ms:.0f} ms")
        for other in range(1, size):
            if there(f"{key}/{other}", False):
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
    if not there(f"{key}/all", False):
        raise BackendError(_abi.moecclTimeout, f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
                           f"send/recv from rank 0 within {ms:.0f} ms. Please check rank 0 logs for faulty rank.")
