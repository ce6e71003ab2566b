# SPDX-License-Identifier: Apache-2.0
"""Sends and receives: in any order, with tags, from any source, to the sender itself, of strided tensors."""
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from support import raises, same, test

SIZES = (0, 1, 200, 100_000, 2_000_000)


@test(2, 3, 4)
def ring_in_any_order(rank, size, _):
    right, left = (rank + 1) % size, (rank - 1) % size
    for n in SIZES:
        for first in ("send", "recv"):
            out, got = torch.full((n,), float(rank)), torch.zeros(n)
            if first == "send":
                works = [dist.isend(out, right), dist.irecv(got, left)]
            else:
                works = [dist.irecv(got, left), dist.isend(out, right)]
            for work in works:
                work.wait()
                assert work.is_completed()
            same(got, torch.full((n,), float(left)))
            assert works[first == "send"].source_rank() == left


@test(2)
def tags_out_of_order(rank, size, _):
    peer = 1 - rank
    for n in SIZES:
        sends = [dist.isend(torch.full((n,), float(10 * rank + t)), peer, tag=t) for t in (3, 1, 2)]
        got = {t: torch.zeros(n) for t in (1, 2, 3)}
        for t in (1, 2, 3):
            dist.recv(got[t], peer, tag=t)
        for t in got:
            same(got[t], torch.full((n,), float(10 * peer + t)), f"tag {t}")
        for work in sends:
            work.wait()
    first, second = torch.zeros(1), torch.zeros(1)
    if rank == 0:
        dist.send(torch.tensor([1.0]), 1, tag=7)
        dist.send(torch.tensor([2.0]), 1, tag=7)
    else:
        works = [dist.irecv(first, 0, tag=7), dist.irecv(second, 0, tag=7)]
        works[1].wait()
        works[0].wait()
        assert (first.item(), second.item()) == (1.0, 2.0), "messages of one tag keep their order"


@test(2, 3, 4)
def any_source(rank, size, _):
    if rank == 0:
        seen = {}
        for _unused in range(2 * (size - 1)):
            got = torch.zeros(3)
            source = dist.recv(got, tag=5)
            seen.setdefault(source, []).append(got[0].item())
        assert seen == {r: [float(r), float(r) + 0.5] for r in range(1, size)}, seen
        work = dist.irecv(torch.zeros(1))
        assert not work.is_completed()
        dist.barrier()
        work.wait()
        assert work.source_rank() == size - 1
    else:
        dist.send(torch.full((3,), float(rank)), 0, tag=5)
        dist.send(torch.full((3,), float(rank) + 0.5), 0, tag=5)
        dist.barrier()
        if rank == size - 1:
            dist.send(torch.ones(1), 0)
    dist.barrier()


@test(3)
def any_source_leaves_the_others(rank, size, _):
    """A rank that begins to send while a receive from any rank waits connects later, or not at all, and the end of the group waits
    for neither: rank 2 is slow between seeing that it is wanted and answering, and rank 1's message comes meanwhile."""
    from moeccl._c10d import messages as module
    for received_later in (True, False):
        group = dist.new_group([0, 1, 2])
        if rank == 0:
            got = torch.zeros(1)
            assert dist.recv(got, tag=1, group=group) == 1
            time.sleep(1.5)  # rank 2 has answered
            if received_later:
                assert dist.recv(got, 2, tag=1, group=group) == 2 and got.item() == 2.0
        elif rank == 1:
            time.sleep(0.3)
            dist.send(torch.ones(1), 0, tag=1, group=group)
        else:
            quick = module.await_key

            def slow(store, key, *rest):
                found = quick(store, key, *rest)
                time.sleep(1.0 if key.endswith("/wanted") else 0.0)
                return found

            module.await_key = slow
            work = dist.isend(torch.full((1,), 2.0), 0, tag=1, group=group)
            if received_later:
                work.wait()
            time.sleep(1.5)
            module.await_key = quick
        dist.barrier()
        began = time.monotonic()
        dist.destroy_process_group(group)
        took = time.monotonic() - began
        assert took < 5, f"{took:.1f} s"


@test(1, 2)
def to_itself(rank, size, _):
    got = torch.zeros(4)
    work = dist.irecv(got, rank, tag=1)
    dist.isend(torch.full((4,), 3.0), rank, tag=1).wait()
    work.wait()
    same(got, torch.full((4,), 3.0))
    dist.isend(torch.full((4,), 4.0), rank).wait()
    dist.irecv(got, rank).wait()
    same(got, torch.full((4,), 4.0))


@test(2)
def gaps_and_types(rank, size, _):
    for dtype in (torch.float32, torch.bool, torch.complex64, torch.bfloat16, torch.int16):
        for n in (10, 50_000):
            wide = torch.zeros(n, 2, dtype=dtype)
            if rank == 0:
                wide[:, 0] = 1
                dist.send(wide[:, 0], 1)
            else:
                assert dist.recv(wide[:, 0], 0) == 0
                assert wide[:, 0].eq(1).all() and wide[:, 1].eq(0).all()


@test(2)
def beside_collectives(rank, size, _):
    """A receive that waits does not hold up collectives, and they do not hold it up."""
    got = torch.zeros(1_000_000)
    if rank == 0:
        work = dist.irecv(got, 1)
        for _unused in range(20):
            dist.all_reduce(torch.ones(1000))
        work.wait()
        same(got[:3], torch.full((3,), 5.0))
    else:
        for _unused in range(20):
            dist.all_reduce(torch.ones(1000))
        time.sleep(0.2)
        dist.send(torch.full((1_000_000,), 5.0), 0)


@test(2, 4)
def batches(rank, size, _):
    right, left = (rank + 1) % size, (rank - 1) % size
    out, got = torch.full((70_000,), float(rank)), torch.zeros(70_000)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, got, left)])
    for work in works:
        work.wait()
    same(got, torch.full((70_000,), float(left)))


@test(2)
def a_callback_may_wait_for_the_next_message(rank, size, _):
    first, second = torch.full((3,), 1.0), torch.full((3,), 2.0)
    if rank == 0:
        dist.send(first, 1)
        dist.send(second, 1)
        return
    a, b = torch.zeros(3), torch.zeros(3)
    dist.irecv(a, 0).get_future().then(lambda _: dist.recv(b, 0)).wait()
    same([a, b], [first, second])


@test(2)
def last_words(rank, size, _):
    """A message that was sent before the sender left its group arrives."""
    got = torch.zeros(100_000)
    if rank == 0:
        dist.send(torch.ones(100_000), 1)
        dist.destroy_process_group()
    else:
        time.sleep(0.5)
        dist.recv(got, 0)
        same(got, torch.ones(100_000))


@test(2)
def messages_that_do_not_fit(rank, size, _):
    if rank == 0:
        dist.isend(torch.zeros(10), 1).wait()
        dist.isend(torch.ones(3), 1).wait()
    else:
        raises(RuntimeError, ["24 bytes", "40 bytes", "rank 0"], lambda: dist.recv(torch.zeros(6), 0))
        got = torch.zeros(3)
        dist.recv(got, 0)  # the next message is intact
        same(got, torch.ones(3))
    dist.barrier()


@test(2)
def a_receive_that_nobody_answers(rank, size, _):
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        began = time.monotonic()
        raises(RuntimeError, ["receive of 4 bytes from rank 1 with tag 9", "1000 ms"],
               lambda: dist.recv(torch.zeros(1), 1, group=group, tag=9))
        assert time.monotonic() - began < 10
        work = dist.irecv(torch.zeros(1), 1)
        raises(RuntimeError, ["wait()", "50 ms"], lambda: work.wait(timedelta(milliseconds=50)))
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        dist.send(torch.zeros(1), 0)
    dist.barrier()
