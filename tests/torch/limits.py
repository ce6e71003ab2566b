# SPDX-License-Identifier: Apache-2.0
"""Timeouts and failures that no thread waits for: of futures, of works that are polled, of DDP; ranks that come late."""
import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from support import gloo, raises, same, test
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from works import PATIENCE, until

SECOND = timedelta(seconds=1)


def limited(limit=SECOND):
    """Returns a group whose operations may take that long."""
    group = dist.new_group()
    group._get_backend(torch.device("cpu")).set_timeout(limit)
    return group


@test(2)
def futures_that_expire(rank, size, _):
    """set_timeout holds for them and for works that are polled, also in a batch; a callback may wait for another one that expires."""
    from moeccl._c10d.batches import BatchWork
    groups = [limited() for _unused in range(5)]
    began = time.monotonic()
    if rank == 0:
        late = ["moecclTimeout", "1000 ms"]
        collective, polled, batched = (dist.all_reduce(torch.ones(3), group=g, async_op=True) for g in groups[:3])
        messages = [dist.irecv(torch.ones(3), 1, group=groups[3]) for _unused in range(3)]
        batch = BatchWork([batched, messages[0]])
        futures = [collective.get_future(), batch.get_future(), messages[1].get_future()]
        second = dist.irecv(torch.ones(3), 1, group=groups[4]).get_future()
        chained = dist.irecv(torch.ones(3), 1, group=groups[4]).get_future().then(lambda _: raises(RuntimeError, late, second.wait) and 5)
        assert until(polled.is_completed) and until(messages[2].is_completed)
        for error in (polled.exception(), messages[2].exception()):
            assert all(word in str(error) for word in late), error
        for future in futures:
            raises(RuntimeError, late, future.wait)
        assert chained.wait() == 5
        assert time.monotonic() - began < 20 * PATIENCE
    dist.barrier()


@test(2)
def futures_in_time(rank, size, _):
    """An operation that has ended in its time does not end its group later."""
    group = limited(2 * PATIENCE * SECOND)
    t = torch.ones(3)
    for _unused in range(3):
        dist.all_reduce(t, group=group, async_op=True).get_future().wait()
        sent, got = dist.isend(t, 1 - rank, group=group), dist.irecv(torch.zeros(3), 1 - rank, group=group)
        same(got.get_future().wait()[0], t)
        sent.get_future().wait()
    deadlines = group._backend.deadlines
    assert not deadlines._works
    time.sleep(2.2 * PATIENCE)
    dist.all_reduce(t, group=group)
    same(t, torch.full((3,), 16.0))


@test(2)
def ddp_expires(rank, size, _):
    group = dist.new_group()
    net = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    net(torch.ones(2, 4)).sum().backward()
    group._get_backend(torch.device("cpu")).set_timeout(SECOND)
    if rank == 0:
        raises(RuntimeError, ["moecclTimeout", "1000 ms"], lambda: net(torch.ones(2, 4)).sum().backward())
    dist.barrier()


@test(3, status={1: -signal.SIGKILL})
def a_check(rank, size, _):
    """It raises once a rank has been lost, and nothing before."""
    from moeccl.distributed import check
    other, group = gloo(), dist.new_group()
    dist.all_reduce(torch.ones(4), group=group)
    check()
    check(group)
    raises(ValueError, ["gloo"], lambda: check(other))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    raises(RuntimeError, ["rank 1"], work.wait)
    raises(dist.DistBackendError, ["check", "rank 1"], check)
    dist.group.WORLD.abort()
    raises(dist.DistBackendError, ["aborted"], check)


@test(2, init=False)
def a_layers_late_rank(rank, size, where):
    """Ranks come to the communicator of layers as late as their group lets them."""
    os.environ["MOECCL_INIT_TIMEOUT_MS"] = str(int(2000 * PATIENCE))
    import moeccl.torch as mt
    dist.init_process_group("gloo", store=dist.FileStore(where, size), rank=rank, world_size=size)
    time.sleep(4 * PATIENCE if rank == 1 else 0)
    t = torch.full((2,), rank + 1.0)
    mt.comm_of(None).all_reduce(t)
    same(t, torch.full((2,), 3.0))
    mt.close()
