# SPDX-License-Identifier: Apache-2.0
"""barrier and monitored_barrier: what they wait for, and what they leave behind."""
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from streams import stand_ins
from support import VERSION, raises, test


def barrier(group=None, timeout=None, wait_all_ranks=False):
    if VERSION >= (2, 14):
        dist.monitored_barrier(group, timeout, wait_all_ranks)
    else:  # where torch offers it only for gloo
        (group or dist.group.WORLD).monitored_barrier(timeout, wait_all_ranks)


@test(3)
def monitored(rank, size, _):
    barrier()
    barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)
    group = dist.new_group()
    wait = timedelta(milliseconds=500)
    if rank == 0:
        raises(RuntimeError, ["Rank 1 failed to pass monitoredBarrier"], lambda: barrier(group, wait))
    elif rank == 2:
        raises(RuntimeError, ["Rank 2 successfully reached monitoredBarrier"], lambda: barrier(group, wait))
    dist.barrier()


@test(1)
def monitored_asks_for_all_ranks_at_once(rank, size, _):
    from moeccl._c10d import barriers
    from moeccl._c10d.meeting import longest_pause

    class Counting:
        def __init__(self, there):
            self.keys, self.checks = {f"barrier/{r}" for r in there}, 0

        def check(self, keys):
            self.checks += 1
            return self.keys.issuperset(keys)

        def set(self, key, value):
            self.keys.add(key)

    everyone = Counting(range(1, 64))
    barriers.monitored(everyone, "barrier", 0, 64, 5000, False)
    assert everyone.checks < 8 and "barrier/all" in everyone.keys, everyone.checks
    absent = Counting(set(range(1, 64)) - {5, 9})
    raises(RuntimeError, ["Ranks 5, 9 failed to pass"], lambda: barriers.monitored(absent, "barrier", 0, 64, 50, True))
    raises(RuntimeError, ["Rank 5 failed to pass"], lambda: barriers.monitored(absent, "barrier", 0, 64, 50, False))
    assert longest_pause(8) == 0.02 and longest_pause(4096) > 0.2


@test(3)
def monitored_removes_its_keys(rank, size, _):
    """Also those of a barrier that failed. Only the latest barrier's stay, because ranks may still look for them."""
    backend = dist.group.WORLD._backend
    made = backend._monitored

    def barriers_with_keys():
        names = ("all", *range(1, size))
        return [n for n in range(1, made._n + 1) if any(backend._store.check([f"{made._prefix}/{n}/{name}"]) for name in names)]

    for _unused in range(3):
        barrier()
    dist.barrier()
    assert barriers_with_keys() == [3], barriers_with_keys()
    soon = timedelta(milliseconds=200)
    if rank != 1:
        raises(RuntimeError, ["monitoredBarrier"], lambda: barrier(timeout=soon))
    dist.barrier()
    if rank == 1:  # comes to the barrier that the others have left
        raises(RuntimeError, ["Rank 1 successfully reached"], lambda: barrier(timeout=soon))
    dist.barrier()
    barrier()
    dist.barrier()
    assert barriers_with_keys() == [5], barriers_with_keys()


@test(2)
def a_barrier_waits_for_the_gpu(rank, size, _):
    """A blocking barrier ends after what the current stream held, as with nccl."""
    with stand_ins() as (_backend, _comm, current):
        ended = []
        current.synchronize = lambda: (time.sleep(0.2), ended.append(True))
        dist.barrier()
        assert ended == [True]
        work = dist.barrier(async_op=True)
        if hasattr(dist.AllreduceOptions(), "asyncOp"):  # torch says that the call does not block
            assert ended == [True]
        work.wait()
