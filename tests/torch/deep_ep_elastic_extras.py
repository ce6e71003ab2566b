# SPDX-License-Identifier: Apache-2.0
"""Cases of deep_ep_elastic_test.py about barriers, all-gathers in sessions, tensors between neighbours and the distributed table."""
import functools
import threading
import time
import weakref

import torch
from deep_ep_elastic_support import Case
from deep_ep_support import DEEP_EP, raises, same


def on_cpu(case):
    """Makes the tensors of a case on the CPU, also where the other cases have CUDA tensors."""
    @functools.wraps(case)
    def run(buffer):
        with torch.device("cpu"):
            case(buffer)
    return run


def barrier_waits_for_all_ranks(buffer):
    began = time.monotonic()
    if buffer.rank_idx == 1:
        time.sleep(0.5)
    buffer.barrier()
    assert time.monotonic() - began >= 0.45
    buffer.barrier(use_comm_stream=False, with_cpu_sync=True, sequential=False)
    case = Case(buffer, 30)
    *_, event = case.dispatch(async_with_compute_stream=True)
    buffer.barrier()
    assert event.event.is_done()


def a_rank_that_does_not_come_is_named(buffer):
    """Calls wait for num_cpu_timeout_secs."""
    import moeccl
    other = DEEP_EP().ElasticBuffer(buffer.group, num_bytes=2 << 20, num_cpu_timeout_secs=1)
    case = Case(other, 8)
    if buffer.rank_idx:
        began = time.monotonic()
        raises(moeccl.Error, "rank 0", case.dispatch)
        assert 0.5 < time.monotonic() - began < 30
    buffer.barrier()
    other.destroy()


@on_cpu
def gathers_in_sessions(buffer):
    n, me = buffer.num_ranks, buffer.rank_idx
    room = buffer.get_agrs_num_max_session_bytes(buffer.group, [(3, 5), (7, ), (64, 64)], torch.float32)
    assert room == sum(-(-n * e * 4 // 32) * 32 for e in (15, 7, 4096))
    assert buffer.get_agrs_num_max_session_bytes(buffer.group, (3, 5), torch.float32) == -(-n * 60 // 32) * 32
    assert buffer.get_agrs_buffer_size_hint(buffer.group, room) == 2 << 20
    buffer.agrs_set_config(room, 3)
    data = lambda rank, *shape: torch.arange(torch.Size(shape).numel()).view(shape).float() + 1000 * rank  # noqa: E731
    stacked = lambda *shape: torch.stack([data(r, *shape) for r in range(n)])  # noqa: E731
    for step in range(3):
        with buffer.agrs_new_session():
            one, wait_one = buffer.all_gather(data(me, 3, 5))
            own = buffer.agrs_get_inplace_tensor(((7, ), torch.Size((64, 64))), torch.float32)
            own[0].copy_(data(me, 7))
            own[1].copy_(data(me, 64, 64) + step)
            two, three, wait_both = buffer.all_gather(own)
            wait_both()
            wait_one()
            same(one, stacked(3, 5))
            same(two, stacked(7))
            same(three, stacked(64, 64) + step)
            assert two[me].data_ptr() == own[0].data_ptr()
    with buffer.agrs_new_session(enabled=False):
        raises(RuntimeError, "there is no session", lambda: buffer.all_gather(one))
    buffer.create_agrs_session()
    flat, wait = buffer.all_gather(data(me, 4, 6).t())  # any strides, and a shape of its own
    wait()
    same(flat, torch.stack([data(r, 4, 6).t() for r in range(n)]))
    single = buffer.agrs_get_inplace_tensor((2, ), torch.int64)
    single.fill_(me)
    ranks, wait_ranks = buffer.all_gather(single)
    wait_ranks()
    same(ranks, torch.arange(n).view(n, 1).expand(n, 2))
    other = buffer.agrs_get_inplace_tensor(((2, ), (2, )), torch.int64)[1]
    for kind, words, call in (
            (ValueError, "from another place", lambda: buffer.all_gather(other)),
            (RuntimeError, "begin a new session", lambda: buffer.all_gather(torch.zeros(room))),
            (ValueError, "t is an empty sequence", lambda: buffer.all_gather([])),
            (NotImplementedError, "t lies on meta", lambda: buffer.all_gather(torch.empty(2, device="meta"))),
            (RuntimeError, "a session is open", buffer.create_agrs_session),
            (RuntimeError, "a session is open", lambda: buffer.agrs_set_config(room, 3))):
        raises(kind, words, call)
    _, last = buffer.all_gather(data(me, 1))
    raises(RuntimeError, "as many as", lambda: buffer.all_gather(data(me, 1)))
    buffer.destroy_agrs_session()
    raises(RuntimeError, "session has ended", last)
    raises(RuntimeError, "there is no session", buffer.destroy_agrs_session)
    raises(ValueError, "num_max_session_bytes is", lambda: buffer.agrs_set_config(buffer.num_bytes + 1, 3))
    raises(ValueError, "num_max_all_gathers_per_session is 0", lambda: buffer.agrs_set_config(room, 0))
    Case(buffer, 4).dispatch()  # after the last session's gather


@on_cpu
def tensors_between_neighbours(buffer):
    n, me = buffer.num_ranks, buffer.rank_idx
    after, before = (me + 1) % n, (me - 1) % n
    assert buffer.get_pp_buffer_size_hint(100, 3) == 2 << 20 and buffer.get_pp_buffer_size_hint(1 << 20, 3) == 12 << 20
    raises(RuntimeError, "call pp_set_config first", lambda: buffer.pp_send(torch.zeros(1), after))
    most = 3
    buffer.pp_set_config(600 << 10, most)
    make = lambda source, target, i, size: torch.full((size, 2), 100.0 * source + 10 * target + i)  # noqa: E731
    for size in (1, 70000):  # smaller and larger than what a link takes without the receiver
        for first, second in ((after, before), (before, after)):
            for i in range(most):  # all ranks send before any receives
                given = make(me, first, i, size)
                buffer.pp_send(given, first)
                given.fill_(-1)  # the call has copied it
            for i in range(most):
                got = torch.empty((size, 2))
                buffer.pp_recv(got, second)
                same(got, make(second, me, i, size))
    # Sends beyond the limit wait for the receiver.
    if me == 0:
        begun = []
        sender = threading.Thread(target=lambda: [(buffer.pp_send(make(0, after, i, 70000), after), begun.append(i))
                                                  for i in range(most + 2)])
        sender.start()
        time.sleep(0.3)
        assert len(begun) < most + 2, begun
        buffer.group.barrier().wait()
        sender.join(30)
        assert len(begun) == most + 2
    else:
        buffer.group.barrier().wait()
        if me == 1:
            got = torch.empty((70000, 2))
            for i in range(most + 2):
                buffer.pp_recv(got, 0)
                same(got, make(0, 1, i, 70000))
    for kind, words, call in (
            (ValueError, f"dst_rank_idx is {n}", lambda: buffer.pp_send(torch.zeros(1), n)),
            (ValueError, f"src_rank_idx is {me}: give", lambda: buffer.pp_recv(torch.zeros(1), me)),
            (ValueError, "give a contiguous tensor", lambda: buffer.pp_send(torch.zeros(4, 4).t()[1:], after)),
            (ValueError, "num_max_tensor_bytes is 614400", lambda: buffer.pp_send(torch.zeros(1 << 20), after)),
            (NotImplementedError, "t lies on meta", lambda: buffer.pp_send(torch.zeros(1, device="meta"), after)),
            (ValueError, "num_max_inflight_tensors is 0", lambda: buffer.pp_set_config(64, 0)),
            (ValueError, "this ElasticBuffer has", lambda: buffer.pp_set_config(64 << 20, 4))):
        raises(kind, words, call)
    buffer.pp_set_config(64, 1)  # the communicators stay
    buffer.pp_send(torch.tensor([me]), after)
    got = torch.tensor([-1])
    buffer.pp_recv(got, before)
    assert got.item() == before
    other = DEEP_EP().ElasticBuffer(buffer.group, num_bytes=2 << 20)
    other.pp_set_config(64, 1)
    other.destroy()
    raises(RuntimeError, "was destroyed", lambda: other.pp_send(got, after))
    raises(RuntimeError, "was destroyed", lambda: other.pp_recv(got, before))


@on_cpu
def an_end_on_any_of_its_threads(buffer):
    """As where the last reference to an ElasticBuffer ends there."""
    for of_link in (False, True):
        other = DEEP_EP().ElasticBuffer(buffer.group, num_bytes=2 << 20, explicitly_destroy=True)
        other.pp_set_config(64, 1)
        stream = next(iter(other._out.values())).stream if of_link else other._stream
        event = stream.run(other._end, None, True)
        assert event._done.wait(20)
        event.current_stream_wait()
        until = time.monotonic() + 20
        while other._comm.comm is not None:
            assert time.monotonic() < until
            time.sleep(0.01)


@on_cpu
def destroy_lets_go_of_memory(buffer):
    other = DEEP_EP().ElasticBuffer(buffer.group, num_bytes=4 << 20, num_cpu_bytes=2 << 20)
    other.engram_write(torch.zeros((4, 8)).to(torch.float8_e4m3fn), torch.zeros((4 * buffer.num_ranks, 2)))
    other.agrs_set_config(1 << 10, 3)
    with other.agrs_new_session():
        gathered, wait = other.all_gather(torch.tensor([buffer.rank_idx]))
        wait()
        kept = [weakref.ref(tensor) for tensor in (other._storage, other._scales, other._memory_of_sessions)]
        other.destroy()
        assert gathered.view(-1).tolist() == list(range(buffer.num_ranks))  # results stay while somebody has them
        del gathered, wait
    assert [each() for each in kept] == [None] * 3
    for call in (other.create_agrs_session, lambda: other.all_gather(torch.zeros(1)),
                 lambda: other.engram_fetch(torch.zeros((1, 1), dtype=torch.int32))):
        raises(RuntimeError, "was destroyed", call)


@on_cpu
def rows_of_a_distributed_table(buffer):
    n, me, entries, hidden = buffer.num_ranks, buffer.rank_idx, 50, 24
    of = lambda rank: torch.randn((entries, hidden), generator=torch.Generator().manual_seed(rank))  # noqa: E731
    assert buffer.get_engram_storage_size_hint(1 << 20, 12, 1 << 16) == (2 << 20, 32 << 20)
    whole = torch.cat([of(r) for r in range(n)])
    sf = torch.arange(n * entries * 3).float().view(n * entries, 3)
    random = torch.Generator().manual_seed(77 + me)
    for fp8 in (False, True):
        table = whole.to(torch.float8_e4m3fn if fp8 else torch.bfloat16)
        mine = table[me * entries:(me + 1) * entries].clone()
        buffer.engram_write(mine, sf if fp8 else None)
        mine.fill_(0)  # the call has copied it
        for n_tokens, each in ((20 + me, 5), (0 if me == 0 else 7, 3), (0, 2), (1, 1)):
            idx = torch.randint(0, n * entries, (n_tokens, each), generator=random, dtype=torch.int32)
            for by_column in (False, True):
                rows, scales = buffer.engram_fetch(idx, use_tma_aligned_col_major_sf=by_column)()
                width = table.size(1) * table.element_size()
                same(rows.view(torch.uint8), table.view(torch.uint8)[idx.long().view(-1)].view(n_tokens, each * width))
                assert (scales is None) != fp8
                if fp8:
                    same(scales, sf[idx.long().view(-1)].view(n_tokens, each * 3))
                    assert not by_column or n_tokens < 2 or scales.stride() == (1, -(-n_tokens // 4) * 4)
    several = [buffer.engram_fetch(torch.full((4, 1), i, dtype=torch.int32)) for i in range(3)]
    for i, wait in reversed(list(enumerate(several))):
        assert (wait()[0].float() == table[i].float()).all()
    one = torch.zeros((2, 2), dtype=torch.int32)
    bf16 = torch.zeros((entries, hidden), dtype=torch.bfloat16)
    for kind, words, call in (
            (ValueError, f"indices holds {n * entries}", lambda: buffer.engram_fetch(one + n * entries)),
            (ValueError, "indices holds -1", lambda: buffer.engram_fetch(one - 1)),
            (TypeError, "indices is torch.int64", lambda: buffer.engram_fetch(one.long())),
            (NotImplementedError, "indices lies on meta", lambda: buffer.engram_fetch(one.to("meta"))),
            (TypeError, "storage is torch.float32", lambda: buffer.engram_write(whole[:entries])),
            (ValueError, "sf is given", lambda: buffer.engram_write(bf16, sf)),
            (ValueError, "sf is None", lambda: buffer.engram_write(table[:entries])),
            (ValueError, f"give [{n * entries}, n]", lambda: buffer.engram_write(table[:entries], sf[1:])),
            (ValueError, "num_cpu_bytes is 8388608", lambda: buffer.engram_write(torch.zeros((1 << 12, 1 << 11)).bfloat16())),
            (ValueError, "differ in the number of entries, 49 and 50", lambda: buffer.engram_write(bf16[me == 0:])),
            (ValueError, "differ in the dtype of storage, torch.bfloat16 and torch.float8_e4m3fn", lambda: buffer.engram_write(
                *((bf16, ) if me == 0 else (bf16.to(torch.float8_e4m3fn), sf))))):
        raises(kind, words, call)
    empty = DEEP_EP().ElasticBuffer(buffer.group, num_bytes=2 << 20)
    raises(RuntimeError, "call engram_write first", lambda: empty.engram_fetch(one))
    empty.destroy()


def lists_of_sums_lie_where_their_tensors_do(buffer):
    """Whatever device torch's default is."""
    from deep_ep._sums import Sums
    with torch.device("meta"):
        lists = Sums(torch.zeros((2, 1), dtype=torch.int32, device="cpu"), 1, None)._set(2)
    assert lists.index.device.type == "cpu" and lists.index.tolist() == [[0, 1, 2]] * 2
