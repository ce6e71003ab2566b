# SPDX-License-Identifier: Apache-2.0
"""Works that nobody waits for, inference mode, batches, and what an aborted group leaves behind."""
import contextlib
import ctypes
import gc
import os
import signal
import threading
import time
import weakref

import torch
import torch.distributed as dist
from moeccl._c10d import ending
from support import VERSION, raises, same, test

PATIENCE = float(os.environ.get("MOECCL_TEST_PATIENCE", "1"))


def until(condition, seconds=10):
    """Waits until condition() holds, and returns whether it does."""
    end = time.monotonic() + seconds * PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@test(2, since=(2, 7), what="works that end with their last reference")
def works_that_were_dropped(rank, size, _):
    """A call that comes after them and has ended frees their tensors, whichever kind of call it is."""
    def dropped():
        tensors = [torch.ones(1000) for _unused in range(10)]
        for t in tensors:
            dist.all_reduce(t, async_op=True)
        return [weakref.ref(t) for t in tensors]

    enders = {"barrier": dist.barrier, "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
              "broadcast": lambda: dist.broadcast(torch.ones(1), 0),
              "wait": lambda: dist.all_reduce(torch.ones(1), async_op=True).wait()}
    for name, end in enders.items():
        refs = dropped()
        end()
        gc.collect()
        assert not any(ref() is not None for ref in refs), f"after {name} some tensors are still held"
    dist.all_reduce(torch.ones(1), async_op=True)
    for _unused in range(20):
        t = torch.ones(1000)
        ref = weakref.ref(t)
        dist.all_reduce(t, async_op=True).wait()
        del t
        assert ref() is None, "a work that was waited for still holds its tensor"


@test(2)
def a_work_that_only_torch_holds(rank, size, _):
    """It ends, and is waited for long after that: up to torch 2.6 the part of it that is in Python would be gone by then."""
    import torch.distributed._functional_collectives as functional
    for _unused in range(3):
        sums = [functional.all_reduce(torch.full((3,), rank + i + 1.0), "sum", dist.group.WORLD) for i in range(20)]
        dist.barrier()  # ends them
        gc.collect()
        same([functional.wait_tensor(t) for t in sums], [torch.full((3,), 2.0 * i + 3) for i in range(20)])


@test(2)
def wait_of_the_last_work(rank, size, _):
    """It fills the outputs of the earlier works, as the order of a stream does; so does a blocking call."""
    def gathered():
        return [torch.zeros(2) for _unused in range(size)]

    mine, wanted = torch.full((2,), float(rank + 1)), [torch.full((2,), float(r + 1)) for r in range(size)]
    first, second, third, fourth = (gathered() for _unused in range(4))
    work = dist.all_gather(first, mine, async_op=True)
    dist.all_gather(second, mine, async_op=True).wait()
    same([first, second], [wanted, wanted])
    assert work.done and work.wait()
    dist.all_gather(third, mine, async_op=True)
    dist.barrier()
    same(third, wanted)
    dist.all_gather(fourth, mine, async_op=True)
    dist.all_reduce(torch.ones(1))  # takes a shorter way than the barrier
    same(fourth, wanted)
    # A callback runs outside of the locks, and may wait for the operation behind its own.
    future = dist.all_gather(first, mine, async_op=True).get_future()
    last = dist.all_gather(second, mine, async_op=True)
    waited = future.then(lambda f: last.wait())
    last.wait()
    assert waited.wait()


@test(2)
def inference_mode(rank, size, _):
    """Other threads write tensors that were made in it; tensors that were not keep counting their versions."""
    mine, wanted = torch.full((2,), float(rank)), [torch.full((2,), float(r)) for r in range(size)]
    with torch.inference_mode():
        outs = [torch.empty(2) for _unused in range(size)]
        work = dist.all_gather(outs, mine, async_op=True)
        assert until(work.is_completed)  # which starts the watcher, a thread of its own
        assert work.exception() is None, work.exception()
        same(outs, wanted)
        outs[0].zero_()
        same(dist.all_gather(outs, mine, async_op=True).get_future().wait()[0], wanted)
        gaps = torch.zeros(3, 2)[:, 0]
        if rank == 0:
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(gaps, 0)
            same(gaps, torch.ones(3))
    dist.all_gather(outs, mine)  # outside, a blocking call writes them too
    leaf = torch.zeros(2, 2, requires_grad=True)
    columns = [leaf.detach()[:, r] for r in range(size)]
    before = leaf._version
    work = dist.all_gather(columns, mine, async_op=True)
    assert until(work.is_completed)
    same(list(leaf.detach().t()), wanted)
    assert leaf._version > before and not leaf.is_inference()


@test(2)
def what_an_aborted_group_leaves(rank, size, _):
    def held():
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def cycle():
        group = dist.new_group()
        dist.all_reduce(torch.ones(4), group=group)
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        work.get_future()
        work.wait()
        dist.barrier()
        group.abort()
        raises(RuntimeError, ["abort"], lambda: dist.all_reduce(torch.ones(4), group=group))
        return group._backend

    end = cycle()
    assert until(lambda: end.comm_handle == 0)
    raises(dist.DistBackendError, ["moecclAborted"], lambda: end.allreduce([torch.ones(1)], dist.AllreduceOptions()))
    end.abort()  # once more, which does nothing
    end.shutdown()
    dist.barrier()
    before = held()
    backends = [cycle() for _unused in range(5)]
    assert until(lambda: all(b.comm_handle == 0 for b in backends)), "an aborted group still has its communicator"
    # 4: two groups are as much as may be on their way out.
    assert until(lambda: all(now <= then + 4 for now, then in zip(held(), before))), f"threads, descriptors: {before}, now {held()}"
    dist.barrier()



@test(2)
def batches_of_cuda_tensors(rank, size, _):
    """The code for CUDA tensors with a host stream in the place of the CUDA stream: messages lie one behind another on it, so that two
    large sends would wait for each other."""
    from moeccl._c10d import cuda
    from moeccl._library import lib
    handle = ctypes.c_void_p()
    assert lib.moecclStreamCreate(ctypes.byref(handle)) == 0
    backend = dist.group.WORLD._backend

    class HostWork(cuda.Work):
        def __init__(self, _backend, what, outputs, *_unused):
            super().__init__(what, outputs)

        def _wait(self, ms):
            assert lib.moecclStreamSynchronize(handle) == 0
            self.end()

    class Made(torch.Tensor):
        is_cpu = property(lambda self: False)

    comm = backend._meet("cuda/0")
    backend._cuda = {0: comm}
    backend._comm = lambda tensor: comm
    cuda._stream, cuda._record, cuda.CudaWork = lambda device: (None, handle), lambda *_unused: None, HostWork
    torch.cuda.device = lambda device: contextlib.nullcontext()
    type(backend).supports_coalescing = property(lambda self: True)
    for n in (4, 2_000_000):
        out, got = torch.full((n,), float(rank)).as_subclass(Made), torch.zeros(n).as_subclass(Made)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, out, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)])
        assert len(works) == 1
        for work in works:
            work.wait()
        same(got.as_subclass(torch.Tensor), torch.full((n,), float(1 - rank)))
    assert backend.batch is None
    raises(ValueError, ["tag"], lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, out, 1 - rank, tag=3)]))
    assert backend.batch is None, "a batch that failed takes up later messages"
    backend._cuda = {}
    lib.moecclStreamDestroy(handle)
    lib.moecclCommDestroy(comm)
    del backend._comm


@test(2, 3)
def coalesced_collectives(rank, size, _):
    """With `device`, torch takes the work that the end of the batch returns."""
    tensors = [torch.full((n,), rank + 1.0) for n in (3, 200_000, 5)]
    for _ in range(3):
        for device in (None, torch.device("cpu")):
            given = [t.clone() for t in tensors]
            with dist._coalescing_manager(device=device, async_ops=True) as manager:
                for t in given:
                    dist.all_reduce(t)
            manager.wait()
            same(given, [torch.full_like(t, size * (size + 1) / 2) for t in tensors])


@test(2, 3)
def batches_with_coalescing(rank, size, _):
    """As where torch has CUDA: torch begins and ends each batch, on both ways to the backend."""
    import moeccl.distributed
    moeccl.distributed.Backend.supports_coalescing = property(lambda self: True)
    right, left = (rank + 1) % size, (rank - 1) % size
    for direct in (True, False) if VERSION >= (2, 14) else (True,):
        group = dist.new_group(pg_options=moeccl.distributed.Options(direct=direct))
        for n in (4, 500_000):
            out, got, other = torch.full((n,), float(rank)), torch.zeros(n), torch.zeros(3)
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, out, right, group), dist.P2POp(dist.irecv, got, left, group),
                                            dist.P2POp(dist.isend, torch.ones(3), right, group),
                                            dist.P2POp(dist.irecv, other, left, group)])
            assert len(works) == 1
            works[0].wait()
            same([got, other], [torch.full((n,), float(left)), torch.ones(3)])
        if direct:
            work, = dist.batch_isend_irecv([dist.P2POp(dist.isend, out, right, group), dist.P2POp(dist.irecv, got, left, group)])
            assert len(work.get_future().wait()) == 2 and until(work.is_completed) and work.is_success()


@test(2)
def a_child_that_is_forked(rank, size, where):
    """It ends as any process does, although a thread of its parent's was waiting for an operation."""
    forked = where + ".forked"
    if rank == 1:
        assert until(lambda: os.path.exists(forked), 30)
        dist.all_reduce(torch.ones(4))
        return
    future = dist.all_reduce(torch.ones(4), async_op=True).get_future()
    time.sleep(0.2)  # the watcher waits now
    child = os.fork()
    if child == 0:
        try:
            ending._end_all()  # not all exit functions: one of them removes the folder `where`
        finally:
            os._exit(0)
    if not until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
        os.kill(child, signal.SIGKILL)
        raise AssertionError("the child waits for a thread of its parent's")
    os.mkdir(forked)
    same(future.wait(), [torch.full((4,), 2.0)])


@test(3)
def a_rank_that_ends_without_waiting(rank, size, where):
    """Its operation has run, so its end does not disturb the others."""
    mine, ended = torch.full((4,), float(rank)), where + ".ended"
    if rank == 0:
        work = dist.gather(mine, dst=1, async_op=True)
        time.sleep(0.5 * PATIENCE)
        ending._end_all()
        os.mkdir(ended)
        assert not work.error
    elif rank == 1:
        rows = [torch.zeros(4) for _unused in range(size)]
        dist.gather(mine, rows, dst=1)
        same(rows, [torch.full((4,), float(r)) for r in range(size)])
    else:
        assert until(lambda: os.path.exists(ended), 30)
        dist.gather(mine, dst=1)


@test(2)
def a_rank_that_ends_with_operations_that_run(rank, size, where):
    """They end long before their timeouts, be they on a thread or on a stream."""
    other = dist.new_group()
    if rank == 1:
        assert until(lambda: os.path.exists(where + ".ended"), 30)
        return
    dist.all_reduce(torch.ones(4), group=other, async_op=True)
    threading.Thread(target=lambda: dist.all_reduce(torch.ones(4)), daemon=True).start()
    time.sleep(0.2)
    began = time.monotonic()
    ending._end_all()
    took = time.monotonic() - began
    os.mkdir(where + ".ended")
    assert took < 10 * PATIENCE, took
