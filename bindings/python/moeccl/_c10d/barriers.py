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
