# SPDX-License-Identifier: Apache-2.0
"""Tests of bindings/deep_ep: low-latency calls of Buffers with enable_shrink, on processes some of which end, are masked or do not come.
With DEEP_EP_TEST_DEVICE=cuda the tensors are CUDA tensors of one GPU; tools/gpu-check does that for some cases."""
import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import time
import traceback
import unittest

import with_torch  # noqa: F401 (skips where there is no torch)
import torch
import torch.distributed as dist
from deep_ep_support import DEEP_EP, close, inputs, raises, same, use_device

A_RANK, TOP_K, HIDDEN, MOST = 4, 4, 256, 24  # experts of a rank, choices, columns, tokens of a rank
SECONDS = 120
HOWS = ({}, {"return_recv_hook": True}, {"async_finish": True})


def wait(how, event, hook):
    if how:
        hook() if hook is not None else event.current_stream_wait()


def masked(buffer):
    status = torch.full((buffer.group_size, ), -1, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert not status[buffer.rank] and status.min() >= 0 and status.max() <= 1, status
    return frozenset(status.nonzero()[:, 0].tolist())


def between(before, after):
    """Yields the sets of ranks that a call may have left out: those masked before it, and of those masked after it any."""
    new = sorted(after - before)
    for chosen in itertools.product((False, True), repeat=len(new)):
        yield before | frozenset(itertools.compress(new, chosen))


class Step:
    """A dispatch and a combine, and whether they brought what they should. A rank that ends meanwhile may still count."""

    def __init__(self, buffer, number, use_fp8=False):
        self.buffer, self.how, self.n, self.use_fp8 = buffer, HOWS[number % 3], buffer.group_size, use_fp8
        self.all = [inputs(r, MOST - r, HIDDEN, A_RANK * self.n, TOP_K, seed=number) for r in range(self.n)]
        self.x, self.idx, self.weights = self.all[buffer.rank]

    def dispatch(self):
        before = self.missing = masked(self.buffer)
        stats = torch.zeros(A_RANK, dtype=torch.int32)
        recv, count, self.handle, *later = self.buffer.low_latency_dispatch(
            self.x, self.idx, MOST, A_RANK * self.n, stats, use_fp8=self.use_fp8, **self.how)
        wait(self.how, *later)
        self.rows = recv if not self.use_fp8 else (recv[0].float().unflatten(2, (-1, 128)) * recv[1].unsqueeze(3)).flatten(2).bfloat16()
        same(stats, count)
        source, layout = self.handle[:2]
        assert any(self._sources(missing, count, source, layout) for missing in between(before, masked(self.buffer))), (
            f"rows are not those of all ranks but {sorted(before)} to {sorted(masked(self.buffer))}: {layout}")

    def _sources(self, missing, count, source, layout):
        """Returns whether the rows are those of all ranks but the missing ones; and checks the rows if they are."""
        for local in range(A_RANK):
            at = 0
            for rank, (x, idx, _) in enumerate(self.all):
                here = (idx == self.buffer.rank * A_RANK + local).any(1) if rank not in missing else torch.zeros(len(idx), dtype=torch.bool)
                tokens = here.nonzero()[:, 0]
                packed = layout[local, rank].item()
                if packed & 0xffffffff != len(tokens):
                    return False
                assert packed >> 32 == at
                same(source[local, at:at + len(tokens)], tokens.int())
                close(self.rows[local, at:at + len(tokens)], x[tokens], 0.07 if self.use_fp8 else 0)
                at += len(tokens)
            assert count[local] == at
        return True

    def combine(self):
        before = masked(self.buffer)
        numbers = torch.arange(A_RANK).view(-1, 1, 1) + self.buffer.rank * A_RANK + 1
        out, *later = self.buffer.low_latency_combine((self.rows.float() * numbers).bfloat16(), self.idx, self.weights, self.handle, **self.how)
        wait(self.how, *later)
        differences = []
        for missing in between(before | self.missing, masked(self.buffer) | self.missing):
            counts = (self.idx >= 0) & ~torch.isin(self.idx // A_RANK, torch.tensor(sorted(missing), dtype=self.idx.dtype))
            expected = torch.where(counts, self.weights * (self.idx + 1), 0.0).sum(1, keepdim=True) * self.x.float()
            differences.append(((out.float() - expected).norm() / expected.norm()).item())
        assert min(differences) < (0.08 if self.use_fp8 else 0.02), (differences, before, masked(self.buffer))

    def run(self):
        self.dispatch()
        self.combine()


def end():
    os.kill(os.getpid(), signal.SIGKILL)


# What each rank does. A rank that comes to its end tells its parent.


def ranks_end_between_calls(buffer, pipe):
    for number in range(3):
        Step(buffer, number).run()
        assert not masked(buffer)
    if buffer.rank == 1:
        end()
    step = Step(buffer, 3, use_fp8=True)
    step.dispatch()
    assert masked(buffer) == {1}, "a rank that is gone before a dispatch is masked by it"
    if buffer.rank == 3:
        end()
    step.combine()
    assert masked(buffer) == {1, 3}
    for number in range(4, 7):
        Step(buffer, number).run()
    buffer.clean_low_latency_buffer(MOST, HIDDEN, A_RANK * buffer.group_size)
    if buffer.rank == 4:
        end()
    buffer.clean_low_latency_buffer(MOST, HIDDEN, A_RANK * buffer.group_size)
    assert masked(buffer) == {1, 3, 4}
    buffer.low_latency_clean_mask_buffer()
    assert not masked(buffer)
    Step(buffer, 7).run()
    assert masked(buffer) == {1, 3, 4}, "ranks that are gone are masked again"


def ranks_end_while_rows_move(buffer, pipe):
    """As on CUDA tensors: a call that moves rows returns before they have moved, and only the communicator tells that this has failed."""
    import moeccl
    from deep_ep._native import Routing

    def on_a_stream(move):
        def begin(*args):
            try:
                move(*args)
            except moeccl.Error:
                pass
        return begin

    for name in ("dispatch", "dispatch_scaled", "combine"):
        setattr(Routing, name, on_a_stream(getattr(Routing, name)))
    Step(buffer, 0).run()
    if buffer.rank == 1:
        Routing.dispatch = lambda *_: end()
    if buffer.rank == 2:
        Routing.dispatch_scaled = lambda *_: end()
    if buffer.rank == 3:
        Routing.combine = lambda *_: end()
    step = Step(buffer, 1)
    step.dispatch()
    assert masked(buffer) == {1}
    step = Step(buffer, 2, use_fp8=True)
    step.dispatch()
    assert masked(buffer) == {1, 2}
    step.combine()
    assert masked(buffer) == {1, 2, 3}
    Step(buffer, 3).run()


def a_rank_that_is_gone_is_taken_back(buffer, pipe):
    """Rank 1 ends when a dispatch is complete, which rank 0 does not learn in it, so the others notice in different calls."""
    from deep_ep._native import Communicator
    Step(buffer, 0).run()
    barrier = Communicator.barrier
    if buffer.rank == 0:
        Communicator.barrier = lambda comm: (barrier(comm), barrier(comm))  # the second one fails when rank 1 has ended
    if buffer.rank == 1:
        Communicator.barrier = lambda comm: (barrier(comm), time.sleep(0.3), end())
    step = Step(buffer, 1)
    step.dispatch()
    Communicator.barrier = barrier
    step.combine()
    for number in range(2, 4):
        buffer.low_latency_update_mask_buffer(1, False)
        step = Step(buffer, number)
        step.dispatch()
        assert masked(buffer) == {1}, "the dispatch masks it again"
        step.combine()
    step.missing = masked(buffer)
    buffer.low_latency_clean_mask_buffer()
    step.combine()
    assert not masked(buffer), "a combine leaves out the ranks that its dispatch left out"


def ranks_end_while_the_others_meet(buffer, pipe):
    """Rank 3 ends before it tells the others of its calls, and rank 4 after."""
    from deep_ep import _native
    Step(buffer, 0).run()
    tell = _native.Communicator.all_gather
    if buffer.rank == 3:
        _native.Communicator.all_gather = lambda comm, told: end()
    if buffer.rank == 4:
        _native.Communicator.all_gather = lambda comm, told: (tell(comm, told), end())
    if buffer.rank == 1:
        end()
    Step(buffer, 1).run()
    assert masked(buffer) == {1, 3, 4}
    Step(buffer, 2).run()


def a_rank_leaves(buffer, pipe):
    Step(buffer, 0).run()
    if buffer.rank == 2:
        return  # its destroy() tells the others
    Step(buffer, 1).run()
    assert masked(buffer) == {2}
    Step(buffer, 2).run()


def ranks_end_at_any_time(buffer, pipe):
    """The parent kills ranks 1 and 2. The others go on for some steps after they have noticed both."""
    pipe.send("begun")
    after = number = 0
    while after < 3:
        Step(buffer, number).run()
        number, after = number + 1, after + (masked(buffer) == {1, 2})


def without_masks(step, buffer):
    buffer.low_latency_combine(step.rows, step.idx, step.weights, step.handle)


def ranks_are_masked(buffer, pipe):
    own, other = buffer.rank, DEEP_EP().Buffer(buffer.group, low_latency_mode=True, explicitly_destroy=True)
    Step(buffer, 0).run()
    for again in range(2):
        if own != 3:
            buffer.low_latency_update_mask_buffer(3, True)
            assert masked(buffer) == {3}
            Step(buffer, 1).run()
            step = Step(buffer, 2)
            step.dispatch()
            raises(ValueError, "ranks [3] took no part", lambda: without_masks(step, other))
            buffer.low_latency_update_mask_buffer(3)
            step.combine()  # rank 3 has not taken part in the dispatch
        else:
            for rank in range(3):
                buffer.low_latency_update_mask_buffer(rank, True)
            Step(buffer, 1).run()  # alone
            for rank in range(3):
                buffer.low_latency_update_mask_buffer(rank, False)
        if again:
            buffer.low_latency_clean_mask_buffer()
        assert not masked(buffer)
        Step(buffer, 3).run()
    step = Step(buffer, 4)
    step.dispatch()
    if own != 0:
        buffer.low_latency_update_mask_buffer(0, True)
        step.combine()  # masked after the dispatch: its rows are not returned, and its experts add nothing
        assert masked(buffer) == {0}
    for rank in (own, -1, buffer.group_size):
        raises(ValueError, f"rank_to_mask is {rank}", lambda: buffer.low_latency_update_mask_buffer(rank, True))
    raises(TypeError, "mask_status is torch.int64", lambda: buffer.low_latency_query_mask_buffer(torch.zeros(4, dtype=torch.int64)))
    raises(ValueError, "mask_status is", lambda: buffer.low_latency_query_mask_buffer(torch.zeros(3, dtype=torch.int32)))
    assert buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_().numel() == 0
    for call in (lambda: other.low_latency_update_mask_buffer(1), other.low_latency_clean_mask_buffer,
                 lambda: other.low_latency_query_mask_buffer(torch.zeros(4, dtype=torch.int32))):
        raises(RuntimeError, "enable_shrink=True", call)
    other.destroy()


def go_on_without_rank_1(buffer):
    """A rank that lives is not masked by itself."""
    import moeccl
    Step(buffer, 0).run()
    if buffer.rank != 1:
        raises(moeccl.Error, "rank 1 of 3 did not join", Step(buffer, 1).run)
        assert not masked(buffer)
        buffer.low_latency_update_mask_buffer(1, True)
        Step(buffer, 2).run()
        assert masked(buffer) == {1}
        dist.barrier()
    else:
        dist.barrier()  # the others have gone on without it


def go_on_together(buffer):
    for number in range(3, 6):
        Step(buffer, number).run()
        assert not masked(buffer)


def a_rank_does_not_come(buffer, pipe):
    """As vLLM does after a fault, all ranks then go on together."""
    go_on_without_rank_1(buffer)
    buffer.low_latency_clean_mask_buffer()
    go_on_together(buffer)


def a_rank_that_did_not_come_is_taken_back(buffer, pipe):
    import moeccl
    go_on_without_rank_1(buffer)
    if buffer.rank != 1:
        buffer.low_latency_update_mask_buffer(1, False)
    raises(moeccl.Error, "", Step(buffer, 2).run)  # on the communicator on which calls have failed
    go_on_together(buffer)


def a_rank_comes_late(buffer, pipe):
    """The others' call has failed, and they wait for it."""
    import moeccl
    Step(buffer, 0).run()
    for number in range(1, 3):
        if buffer.rank == 1:
            time.sleep(1.5)
        raises(moeccl.Error, "", Step(buffer, number).run)
        Step(buffer, number).run()
    go_on_together(buffer)


def a_rank_comes_when_the_others_have_gone_on(buffer, pipe):
    import moeccl
    go_on_without_rank_1(buffer)
    if buffer.rank == 1:
        raises(moeccl.Error, "low_latency_clean_mask_buffer on all ranks", Step(buffer, 1).run)
    dist.barrier()
    buffer.low_latency_clean_mask_buffer()
    go_on_together(buffer)


def a_rank_comes_late_and_another_ends(buffer, pipe):
    """The others' call has failed, because they waited for rank 1 in vain. They have begun the next one, in which they wait again."""
    import moeccl
    Step(buffer, 0).run()
    if buffer.rank == 2:
        end()
    if buffer.rank == 1:
        time.sleep(4.5)
        raises(moeccl.Error, "this rank has come too late", Step(buffer, 1).dispatch)
    else:
        raises(moeccl.Error, "rank 1", Step(buffer, 1).dispatch)
        assert not masked(buffer)
    for number in range(2, 5):
        Step(buffer, number).run()
        assert masked(buffer) == {2}


def note_those_made():
    """Returns a list that gets each communicator that is made of some of the ranks."""
    from deep_ep._native import Communicator
    made, shrunk = [], Communicator.shrunk

    def noted(comm, exclude=()):
        made.append(shrunk(comm, exclude))
        return made[-1]

    Communicator.shrunk = noted
    return made


def _serve(rank, n_ranks, meeting, pipe, case, timeout_ms, hosts):
    try:
        if hosts:
            os.environ["MOECCL_HOST_ID"] = f"host{rank // 2}"
        if timeout_ms:
            os.environ.update(MOECCL_TIMEOUT_MS=str(timeout_ms), MOECCL_INIT_TIMEOUT_MS=str(3 * timeout_ms))
        torch.set_num_threads(1)
        use_device()
        dist.init_process_group("gloo", init_method=f"file://{meeting}", world_size=n_ranks, rank=rank)
        made = note_those_made()
        buffer = DEEP_EP().Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True, enable_shrink=True)
        case(buffer, pipe)
        open_ones = [comm for comm in made if comm.comm is not None]
        assert set(open_ones) <= set(buffer._participants._of.values()), "communicators that no call uses are still open"
        buffer.destroy()
        assert all(comm.comm is None for comm in made)
        raises(RuntimeError, "the Buffer was destroyed", lambda: buffer.clean_low_latency_buffer(MOST, HIDDEN, A_RANK * n_ranks))
        pipe.send("ended")
    except BaseException:
        pipe.send(f"rank {rank}: {traceback.format_exc()}")


class Ranks(unittest.TestCase):
    def run_case(self, case, n_ranks, survivors, kill=None, timeout_ms=0, hosts=False):
        """kill: a function of the processes, called when all ranks have said that they have begun. hosts: pairs of ranks count as hosts."""
        context = multiprocessing.get_context("fork")
        with tempfile.TemporaryDirectory() as folder:
            ranks = []
            for rank in range(n_ranks):
                here, there = context.Pipe()
                process = context.Process(target=_serve, args=(rank, n_ranks, folder + "/meeting", there, case, timeout_ms, hosts))
                process.start()
                there.close()
                ranks.append((process, here))
            try:
                if kill is not None:
                    self.assertEqual([self.answer(pipe) for _, pipe in ranks], ["begun"] * n_ranks)
                    kill([process for process, _ in ranks])
                told = [self.answer(ranks[rank][1]) for rank in survivors]
                self.assertEqual(told, ["ended"] * len(survivors), "\n".join(map(str, told)))
            finally:
                for process, _ in ranks:
                    process.join(5)
                    if process.is_alive():
                        process.kill()
                        process.join()

    @staticmethod
    def answer(pipe):
        try:
            return pipe.recv() if pipe.poll(SECONDS) else f"no answer in {SECONDS} s"
        except EOFError:
            return "the process ended"

    def test_ranks_end_between_calls(self):
        for hosts in (False, True):
            self.run_case(ranks_end_between_calls, 5, (0, 2), hosts=hosts)

    def test_ranks_end_while_rows_move(self):
        self.run_case(ranks_end_while_rows_move, 5, (0, 4))

    def test_a_rank_that_is_gone_is_taken_back(self):
        self.run_case(a_rank_that_is_gone_is_taken_back, 3, (0, 2))

    def test_ranks_end_while_the_others_meet(self):
        self.run_case(ranks_end_while_the_others_meet, 5, (0, 2))

    def test_a_rank_leaves(self):
        self.run_case(a_rank_leaves, 4, (0, 1, 2, 3))

    def test_ranks_end_at_any_time(self):
        chance = random.Random(5)
        for _ in range(8):
            def kill(processes):
                for rank in (1, 2):
                    time.sleep(chance.uniform(0, 0.15))
                    processes[rank].kill()
            self.run_case(ranks_end_at_any_time, 4, (0, 3), kill)

    def test_ranks_are_masked(self):
        for hosts in (False, True):
            self.run_case(ranks_are_masked, 4, (0, 1, 2, 3), hosts=hosts)

    def test_a_rank_does_not_come(self):
        for case in (a_rank_does_not_come, a_rank_that_did_not_come_is_taken_back, a_rank_comes_when_the_others_have_gone_on):
            self.run_case(case, 3, (0, 1, 2), timeout_ms=1000)

    def test_a_rank_comes_late(self):
        self.run_case(a_rank_comes_late, 3, (0, 1, 2), timeout_ms=1000)

    def test_a_rank_comes_late_and_another_ends(self):
        self.run_case(a_rank_comes_late_and_another_ends, 4, (0, 1, 3), timeout_ms=1000)


if __name__ == "__main__":
    unittest.main()
