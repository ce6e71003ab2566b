# SPDX-License-Identifier: Apache-2.0
"""Groups: subgroups, splits, overlap, futures, errors, ranks that die, shutdown."""
import os
import pickle
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from support import VERSION, gloo, raises, same, test


@test()
def names(rank, size, _):
    group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    assert dist.get_backend() == "moeccl" and backend.name() == "moeccl" and group.name() == "moeccl"
    assert (backend.rank(), backend.size()) == (rank, size)
    assert backend.options._timeout == timedelta(seconds=60)
    before = group._get_sequence_number_for_group()
    dist.barrier()
    assert group._get_sequence_number_for_group() == before + 1
    assert backend.supports_splitting == hasattr(dist.ProcessGroup, "split_group")


@test(3, 4)
def subgroups(rank, size, _):
    odd = dist.new_group([1, 0])  # new_group sorts the ranks by default
    last = dist.new_group([size - 1, 1])
    if rank < 2:
        t = torch.full((3,), float(rank))
        dist.all_reduce(t, group=odd)
        same(t, torch.ones(3))
        out = [torch.zeros(1), torch.zeros(1)]
        dist.all_gather(out, torch.tensor([float(rank)]), group=odd)
        assert sorted(o.item() for o in out) == [0.0, 1.0]
        t = torch.tensor([float(rank)])
        dist.broadcast(t, 1, group=odd)
        assert t.item() == 1.0
    if rank in (1, size - 1):
        peer = size - rank
        t = torch.zeros(2)
        works = [dist.isend(torch.full((2,), float(rank)), peer, group=last), dist.irecv(t, peer, group=last)]
        for work in works:
            work.wait()
        same(t, torch.full((2,), float(peer)))
        got = torch.zeros(1)
        if rank == 1:
            dist.send(torch.ones(1), peer, group=last)
        else:
            assert dist.recv(got, group=last) == 1
    dist.barrier()


@test(4)
def a_groups_own_split(rank, size, _):
    half = dist.group.WORLD.split_group([2, 0] if rank in (0, 2) else [3, 1])
    t = torch.tensor([float(rank)])
    dist.all_reduce(t, group=half)
    assert t.item() == (2.0 if rank in (0, 2) else 4.0)
    assert (half.rank(), half.size()) == (0 if rank >= 2 else 1, 2)
    one = dist.group.WORLD.split_group([1, 2])
    assert (one is None) == (rank in (0, 3))
    dist.barrier()


@test(4)
def messages_of_groups_that_are_split_at_once(rank, size, _):
    """Each stays in its group, although the ranks of both groups have the same numbers, and whichever rank comes last."""
    from moeccl._c10d import meeting
    quick = meeting.prefix

    def slow(comm):
        time.sleep(0.5 if rank in (0, 3) else 0)
        return quick(comm)

    meeting.prefix = slow
    half = dist.group.WORLD.split_group([0, 1] if rank < 2 else [2, 3])
    t = torch.full((2,), float(rank))
    if half.rank() == 0:
        half.send([t], 1).wait()
    else:
        half.recv([t], 0).wait()
        same(t, torch.full((2,), rank - 1.0))
    dist.barrier()


@test(4, since=(2, 15), what="split_group without a device")
def splits(rank, size, _):
    half = dist.split_group(split_ranks=[[2, 0], [3, 1]])
    t = torch.tensor([float(rank)])
    dist.all_reduce(t, group=half)
    assert t.item() == (2.0 if rank in (0, 2) else 4.0)
    assert dist.get_rank(half) == (0 if rank >= 2 else 1)
    work = dist.all_reduce(t, group=half, async_op=True)
    work.wait()
    assert work.is_completed()
    one = dist.split_group(split_ranks=[[1, 2]])
    assert (one is dist.GroupMember.NON_GROUP_MEMBER) == (rank in (0, 3))
    short = dist.split_group(split_ranks=[[0, 1], [2, 3]], timeout=timedelta(seconds=2))
    if dist.get_rank(short) == 0:
        began = time.monotonic()
        raises(dist.DistBackendError, ["timeout"], lambda: dist.all_reduce(t, group=short))
        assert time.monotonic() - began < 30
    dist.barrier()


@test(2)
def an_instance_of_its_own(rank, size, where):
    """One group after another, with the same store and the same names."""
    for turn in range(3):
        t = torch.tensor([float(rank + turn)])
        dist.all_reduce(t)
        assert t.item() == 1.0 + 2 * turn
        dist.destroy_process_group()
        dist.init_process_group("moeccl", store=dist.FileStore(where, size), rank=rank, world_size=size)
    dist.barrier()


@test(2, init=False)
def a_store_with_the_id_of_a_rank_0_that_failed(rank, size, where):
    """As after a restart by torchrun, which keeps its store: whether that rank died or gave up, the next one meets the others."""
    from moeccl import _abi
    from moeccl._c10d import meeting
    from moeccl._library import lib
    store = dist.FileStore(where, size)

    def meet(ms):
        config = _abi.moecclConfig_t()
        config.init_timeout_ms = ms
        return meeting.meet(store, "moeccl", size, rank, config)

    for how in ("dies", "gives up"):
        if rank == 0:
            alone = os.fork()
            if alone == 0:
                try:
                    meet(60000 if how == "dies" else 300)
                finally:
                    os._exit(0)
            if how == "dies":
                store.wait(["moeccl/id"])
                os.kill(alone, signal.SIGKILL)
            os.waitpid(alone, 0)
            store.set(f"{how}/over", b"1")
            time.sleep(0.5)  # rank 1 finds what that one has left
        store.wait([f"{how}/over"])
        comm = meet(20000)
        store.set(f"{how}/{rank}", meeting.prefix(comm))
        assert store.get(f"{how}/0") == store.get(f"{how}/1")
        lib.moecclCommDestroy(comm)


@test(2, 4)
def overlap(rank, size, _):
    """Many operations are in flight and waited for in another order; a call returns before a late rank arrives."""
    works, tensors = [], [torch.full((5000,), float(i)) for i in range(200)]
    if rank == 1:
        time.sleep(0.5)
    began = time.monotonic()
    for t in tensors[:20]:
        works.append(dist.all_reduce(t, async_op=True))
    if rank == 0:
        assert time.monotonic() - began < 0.4, "an asynchronous call waited for another rank"
        assert not works[19].is_completed()
    for t in tensors[20:]:
        works.append(dist.all_reduce(t, async_op=True))
    dist.barrier()  # comes after them all
    for work in reversed(works):
        work.wait()
    for i, t in enumerate(tensors):
        same(t, torch.full((5000,), float(i * size)))


@test(2)
def one_work_at_a_time(rank, size, _):
    """wait() of the first operation does not wait for the second, which the peer calls only afterwards."""
    a, b = torch.ones(4), torch.ones(4)
    if rank == 0:
        first = dist.all_reduce(a, async_op=True)
        second = dist.all_reduce(b, async_op=True)
        first.wait()
        dist.send(torch.zeros(1), 1)
        second.wait()
    else:
        dist.all_reduce(a)
        dist.recv(torch.zeros(1), 0)
        dist.all_reduce(b)
    same([a, b], [torch.full((4,), 2.0)] * 2)


@test(2)
def futures(rank, size, _):
    t = torch.full((10,), float(rank + 1))
    work = dist.all_reduce(t, async_op=True)
    halved = work.get_future().then(lambda f: f.value()[0] / 2)
    same(halved.wait(), torch.full((10,), 1.5))
    assert work.is_completed() and work.result()[0] is t
    many = [dist.all_reduce(torch.full((3,), float(i)), async_op=True).get_future() for i in range(20)]
    for i, value in enumerate(torch.futures.wait_all(many)):
        same(value[0], torch.full((3,), 2.0 * i))
    done = dist.all_reduce(t, async_op=True)
    done.wait()
    assert done.get_future().done()
    other = dist.all_reduce(torch.ones(3), async_op=True).get_future()  # callbacks that wait, as in torch's PowerSGD hook
    same(dist.all_reduce(torch.ones(3), async_op=True).get_future().then(
        lambda f: dist.all_reduce(f.value()[0], async_op=True).get_future().wait()[0] + other.wait()[0]).wait(), torch.full((3,), 6.0))
    first = dist.all_reduce(torch.ones(1 << 20), async_op=True).get_future()
    second = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    same(first.then(lambda f: second.wait()[0]).wait(), torch.full((3,), 2.0))
    got = dist.irecv(torch.zeros(1), 1 - rank)
    future = got.get_future()
    dist.send(torch.ones(1), 1 - rank)
    same(future.wait()[0], torch.ones(1))
    dropped = dist.all_reduce(t, async_op=True)
    del dropped  # not waited for, but its tensor lives until it has run
    dist.barrier()


@test(2)
def ranks_that_disagree(rank, size, _):
    group = dist.new_group()
    failure = raises(dist.DistBackendError, ["moecclMismatch", "count"], lambda: dist.all_reduce(torch.ones(3 + rank), group=group))
    import moeccl
    assert isinstance(failure, moeccl.Error) and failure.name == "moecclMismatch"
    sent = pickle.loads(pickle.dumps(failure))  # as from a data loader's or an elastic agent's process
    assert type(sent) is type(failure) and (str(sent), sent.code, sent.name) == (str(failure), failure.code, failure.name)
    group = dist.new_group()
    work = dist.all_reduce(torch.ones(3 + rank), group=group, async_op=True)
    future = work.get_future()
    raises(RuntimeError, ["moecclMismatch"], work.wait)
    raises(RuntimeError, ["moecclMismatch"], future.wait)
    raises(RuntimeError, ["moecclMismatch"], lambda: dist.barrier(group=group))
    assert work.is_completed() and work.exception() is not None
    dist.barrier()


@test(2)
def timeouts(rank, size, _):
    group = dist.new_group(timeout=timedelta(milliseconds=600))
    if rank == 0:
        raises(RuntimeError, ["moecclTimeout", "600 ms", "rank 1"], lambda: dist.all_reduce(torch.ones(1), group=group))
    dist.barrier()
    shorter = dist.new_group()
    shorter._get_backend(torch.device("cpu")).set_timeout(timedelta(milliseconds=300))
    if rank == 0:
        raises(RuntimeError, ["300 ms"], lambda: dist.all_reduce(torch.ones(1), group=shorter))
    dist.barrier()
    third = dist.new_group()
    if rank == 0:
        if VERSION >= (2, 13):  # with a timeout for the barrier
            raises(RuntimeError, ["200 ms"], lambda: dist.barrier(group=third, timeout=timedelta(milliseconds=200)))
        work = dist.all_reduce(torch.ones(1), async_op=True)
        raises(RuntimeError, ["wait()", "100 ms"], lambda: work.wait(timedelta(milliseconds=100)))
        dist.send(torch.ones(1), 1)
        work.wait()
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(1))
    dist.barrier()


@test(3, status={1: -signal.SIGKILL})
def a_killed_peer(rank, size, _):
    dist.all_reduce(torch.ones(4))
    quiet = dist.irecv(torch.ones(1), 1) if rank == 0 else None
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        dist.send(torch.zeros(1), 1)
    began = time.monotonic()
    raises(RuntimeError, ["rank 1"], lambda: dist.all_reduce(torch.ones(4)))
    if quiet is not None:
        raises(RuntimeError, ["rank 1"], quiet.wait)
    assert time.monotonic() - began < 20
    if hasattr(dist.distributed_c10d, "_abort_process_group"):
        dist.distributed_c10d._abort_process_group()
    else:
        dist.group.WORLD.abort()


@test(2)
def aborts(rank, size, _):
    import threading
    group = dist.new_group()
    dist.barrier()
    if rank == 0:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        message = dist.irecv(torch.ones(4), 1, group=group)
        threading.Timer(0.3, group.abort).start()
        raises(RuntimeError, ["moecclAborted"], work.wait)
        raises(RuntimeError, ["moecclAborted"], message.wait)
    dist.barrier()


@test(2, since=(2, 14), what="a Backend in Python")
def mixed_with_another_backend(rank, size, _):
    """As one of a group's backends, and under torch's wrapper, it is a Backend that torch calls."""
    mixed = dist.new_group(backend="cpu:moeccl,meta:fake")
    t = torch.full((3,), float(rank))
    dist.all_reduce(t, group=mixed)
    same(t, torch.ones(3))
    work = dist.all_reduce(t, group=mixed, async_op=True)
    work.wait()
    same(t, torch.full((3,), 2.0))
    same(dist.all_reduce(t, group=mixed, async_op=True).get_future().wait()[0], torch.full((3,), 4.0))
    second = dist.new_group(backend="cpu:gloo,meta:moeccl")
    assert second._get_backend(torch.device("cpu")).name() == "gloo" and second._get_backend(torch.device("meta")).name() == "moeccl"
    import moeccl.distributed
    plain = dist.new_group(pg_options=moeccl.distributed.Options(direct=False))
    assert type(plain) is dist.ProcessGroup
    dist.all_reduce(t, group=plain)
    same(t, torch.full((3,), 8.0))


@test(2)
def what_an_older_torch_lacks(rank, size, _):
    """It is refused with the version that has it, and the group of all goes on."""
    from moeccl._c10d import base
    from moeccl.distributed import Options
    if VERSION < (2, 14):
        words = ["torch 2.14 or newer", torch.__version__]
        raises(ValueError, ["cpu:moeccl,meta:fake", *words], lambda: dist.new_group(backend="cpu:moeccl,meta:fake"))
        raises(ValueError, ["direct", *words], lambda: dist.new_group(pg_options=Options(direct=False)))
    raises(ImportError, ["2.4 or newer", "torch 1.13.1", "install"], lambda: base.version_of("1.13.1"))
    assert base.version_of("2.11.0+cu130") == (2, 11)
    dist.barrier()


@test(2)
def options_of_the_library(rank, size, _):
    import moeccl.distributed
    group = dist.new_group(pg_options=moeccl.distributed.Options(deterministic=1, topology=f"gpu:{size}", priority=2))
    t = torch.ones(5)
    dist.all_reduce(t, group=group)
    same(t, torch.full((5,), 2.0))


@test(2)
def options_of_a_split(rank, size, _):
    """They are added to those of the group above."""
    from moeccl.distributed import Options
    above = dist.new_group(pg_options=Options(priority=2, topology=f"gpu:{size}"))
    made = above.split_group([0, 1], opts=Options(deterministic=1))
    assert made._backend.options.config == {"priority": 2, "deterministic": 1}
    if VERSION >= (2, 15):  # without a device
        split = dist.split_group(split_ranks=[[0, 1]], pg_options=Options(deterministic=1))
        assert split._backend.options.config == {"deterministic": 1}
    t = torch.ones(5)
    dist.all_reduce(t, group=made)
    same(t, torch.full((5,), 2.0))
    raises(RuntimeError, ["priority"], lambda: above.split_group([0, 1], opts=Options(priority=99)))


@test(2)
def options_of_another_backend(rank, size, _):
    """They hold nothing for moeccl, and nccl's have a `config` of another kind."""
    import warnings
    from moeccl._c10d.base import BaseOptions

    class Others(BaseOptions):
        def __init__(self):
            super().__init__("other")
            self.config = object()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        group = dist.new_group(pg_options=Others())
        half = group.split_group([0, 1], opts=Others())
    assert len([w for w in seen if "Others" in str(w.message)]) == 2, [str(w.message) for w in seen]
    for made in (group, half):
        t = torch.ones(5)
        dist.all_reduce(t, group=made)
        same(t, torch.full((5,), 2.0))
        assert made._backend.options.config == {}


@test(3, init=False, since=(2, 15), what="groups of a CPU device")
def groups_of_a_device(rank, size, where):
    """The group of all keeps the device, and groups of some ranks are made of it on members and others."""
    device = torch.device("cpu:0")
    dist.init_process_group("moeccl", store=dist.FileStore(where, size), rank=rank, world_size=size, device_id=device)
    assert dist.group.WORLD.bound_device_id == device
    two = dist.new_group([0, 2])
    if rank != 1:
        t = torch.ones(2)
        dist.all_reduce(t, group=two)
        same(t, torch.full((2,), 2.0))
    dist.barrier()


@test(2)
def timeouts_of_the_options(rank, size, _):
    """They count where the call gives none; a call that gives another one, and a longer one than a group can have, warn."""
    import warnings
    from moeccl.distributed import Options
    five, nine = timedelta(seconds=5), timedelta(seconds=9)

    def made(**given):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            group = dist.new_group(**given)
        return group, [str(w.message) for w in seen if "timeout" in str(w.message)]

    options = Options(timeout=five)
    for _unused in range(2):  # the group does not change the options
        group, said = made(pg_options=options)
        assert group._backend.options._timeout == five and not said, said
    if VERSION >= (2, 15):  # without a device
        split = dist.split_group(split_ranks=[[0, 1]], pg_options=options)
    else:
        split = dist.group.WORLD.split_group([0, 1], opts=options)
    assert split._backend.options._timeout == five
    group, said = made(pg_options=options, timeout=nine)
    assert group._backend.options._timeout == nine and len(said) == 1 and "0:00:05" in said[0], said
    group, said = made(pg_options=Options(timeout=nine), timeout=nine)
    assert not said and group._backend._comm_ms == 9000, said
    set_timeout = getattr(dist, "set_timeout", lambda timeout, group: group.set_timeout(timeout))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        set_timeout(five, group)
        assert group._backend._limit_ms == 5000 and not seen
        set_timeout(timedelta(seconds=30), group)
    assert len(seen) == 1 and "9000 ms" in str(seen[0].message) and "0:00:30" in str(seen[0].message), seen


@test(2)
def two_threads(rank, size, _):
    """Two threads, each with its own group."""
    import threading
    groups = [dist.new_group() for _ in range(2)]
    wrong = []

    def body(group):
        try:
            for i in range(50):
                t = torch.full((7,), float(i))
                dist.all_reduce(t, group=group)
                same(t, torch.full((7,), 2.0 * i))
        except BaseException as failure:
            wrong.append(failure)

    threads = [threading.Thread(target=body, args=(g,)) for g in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


@test(2, init=False)
def by_torchrun_without_an_import(rank, size, where):
    """The program also ends well without destroy_process_group()."""
    if rank == 1:
        return
    script = where + ".py"
    with open(script, "w", encoding="utf-8") as out:
        out.write("import torch, torch.distributed as dist, moeccl.distributed\n"
                  "dist.init_process_group('moeccl')\n"
                  "t = torch.ones(3); dist.all_reduce(t); assert t[0] == dist.get_world_size()\n"
                  "w = dist.all_reduce(t, async_op=True); w.get_future().wait(); dist.barrier()\n"
                  "print('all is well')\n")
    ran = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script],
                         capture_output=True, text=True, timeout=110, check=False)
    assert ran.returncode == 0 and ran.stdout.count("all is well") == 2, ran.stdout + ran.stderr


@test(2)
def same_answers_as_gloo_in_a_random_program(rank, size, _):
    import random
    other, choose = gloo(), random.Random(7)
    pending = []
    for _unused in range(60):
        n, root = choose.choice((1, 17, 4097)), choose.randrange(size)
        mine = torch.arange(float(n)) * (rank + 1)
        theirs = mine.clone()
        call = choose.choice((lambda t, g, a: dist.all_reduce(t, group=g, async_op=a),
                              lambda t, g, a: dist.broadcast(t, root, group=g, async_op=a)))
        in_background = choose.random() < 0.5
        work = call(mine, None, in_background)
        call(theirs, other, False)
        pending.append((work, mine, theirs))
        if choose.random() < 0.3:
            for work, a, b in pending:
                if work is not None:
                    work.wait()
                same(a, b)
            pending = []
    for work, a, b in pending:
        if work is not None:
            work.wait()
        same(a, b)
