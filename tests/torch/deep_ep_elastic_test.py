# SPDX-License-Identifier: Apache-2.0
"""Tests of deep_ep.ElasticBuffer (V2): every call against a dense reference, on 2 and 4 processes, on 4 that count as two hosts, and on 2
whose calls take the way of CUDA tensors, with streams that stand in for CUDA's. Sums are compared bit by bit, except those that MoECCL
forms on the way between hosts. With DEEP_EP_TEST_DEVICE=cuda the tensors are CUDA tensors of one GPU."""
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import unittest

import with_torch  # noqa: F401 (skips where there is no torch)
import torch
import torch.distributed as dist
import deep_ep_elastic_extras
import deep_ep_elastic_use
from deep_ep_elastic_support import Case, fp8_of, make, round_up, rows_per_rank, several_hosts
from deep_ep_ranks import cases_of, tests_of
from deep_ep_support import DEVICE, close, expected_dispatch, raises, same

# Each case is a function of an ElasticBuffer, which all ranks call, each with its own.


def dispatch_and_combine_in_every_type(buffer):
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        case = Case(buffer, [50 - 7 * r for r in range(buffer.num_ranks)], dtype=dtype)
        case.check_combine(case.check(case.dispatch()), tolerance=0.004 if several_hosts() and dtype == torch.float16 else None)


def expanded_rows_and_their_sums(buffer):
    for align in (1, 8):
        case = Case(buffer, [50 - 7 * r for r in range(buffer.num_ranks)], top_k=6)
        for zero in (False, True):
            handle = case.check_expanded(case.dispatch(do_expand=True, expert_alignment=align, do_zero_padding=zero), align)
            case.check_combine(handle, align)
        ends = handle.psum_num_recv_tokens_per_expert.tolist()
        out, _, _ = buffer.combine(case.outputs(align)[:ends[-1]], handle)  # without the last expert's padding
        close(out, case.combined(), 0.03)
    again = Case(buffer, 40, n_experts=4 * buffer.num_ranks, top_k=4, holes=False, seed=2)
    again.take([(x, idx * 0 + torch.arange(4), w) for x, idx, w in again.all])  # all experts are rank 0's
    again.check_combine(again.check_expanded(again.dispatch(do_expand=True)), 1)


def sums_are_rounded_once_without_multiple_reduction(buffer):
    """Each row of an expert then returns by itself."""
    single = make(buffer.group, allow_multiple_reduction=False)
    case = Case(single, 45, top_k=6, n_experts=24)
    bias = torch.randn_like(case.x)
    for align in (1, 16):
        handle = case.check_expanded(case.dispatch(do_expand=True, expert_alignment=align), align)
        case.check_combine(handle, align, each_choice=True)
        case.check_combine(handle, align, each_choice=True, biases=bias)
    case.check_combine(case.check(case.dispatch()))
    twice = Case(buffer, 45, top_k=6, n_experts=24)
    if torch.equal(case.combined(each_choice=True), twice.combined()):
        raise AssertionError("the case does not tell one rounding from two")
    single.destroy()


def handle_tells_about_rows(buffer):
    n, align = buffer.num_ranks, 4
    case = Case(buffer, [5 + 7 * r for r in range(n)])
    for expand in (False, True):
        *_, handle, _ = case.dispatch(do_expand=expand, expert_alignment=align, num_sms=6)
        _, local, _, source, token = case.received()
        counts = case.counts()
        padded = [round_up(c, align) for c in counts]
        starts = [sum(padded[:e]) for e in range(case.n_local)]
        assert (handle.do_expand, handle.num_experts, handle.expert_alignment, handle.num_max_tokens_per_rank, handle.num_sms) == (
            expand, 16, align, case.most, 6)
        assert handle.num_recv_tokens == len(source) and handle.num_expanded_tokens == sum(padded)
        assert handle.num_recv_tokens_per_expert_list == padded
        same(handle.num_unaligned_recv_tokens_per_expert, torch.tensor(counts).int())
        same(handle.psum_num_recv_tokens_per_expert, (torch.tensor(starts) + torch.tensor(counts if expand else padded)).int())
        peers = buffer.num_scaleup_ranks
        same(handle.psum_num_recv_tokens_per_scaleup_rank, torch.tensor(rows_per_rank(case)).view(-1, peers).sum(0).cumsum(0).int())
        about = handle.recv_src_metadata
        last = torch.where(local >= 0, torch.arange(4), -1).amax(1)
        same(about[:, 0], (source * case.most + token).int())
        same(about[:, 1], (source % peers * 4 + last).int())
        same(about[:, 2:], (case.places(align)[0] if expand else torch.full_like(local, -1)).int())
        owner = torch.where(case.idx >= 0, case.idx // case.n_local, -1)
        slots, sent = torch.full_like(case.idx, -1), [0] * n
        for t, ranks in enumerate(owner.tolist()):
            for j, rank in enumerate(ranks):
                if rank >= 0 and rank not in ranks[j + 1:]:
                    slots[t, j] = buffer.rank_idx * case.most + sent[rank]
                    sent[rank] += 1
        same(handle.dst_buffer_slot_idx, slots.int())
        assert handle.token_metadata_at_forward is handle.channel_linked_list is None
    same(handle.topk_idx, case.idx)


def worst_case_sizes_without_a_sync(buffer):
    n, align = buffer.num_ranks, 4
    case = Case(buffer, 32)
    rows, local, weights, source, _ = case.received()
    for asynchronous in (False, True):
        for expand in (False, True):
            got, idx, got_weights, handle, event = case.dispatch(do_cpu_sync=False, do_expand=expand, expert_alignment=align,
                                                                 async_with_compute_stream=asynchronous)
            expected = (case.expanded(rows, align), None, case.expanded(weights, align)) if expand else (rows, local, weights)
            worst = n * case.most
            if expand:
                worst = round_up(worst * min(4, case.n_local) + (align - 1) * case.n_local, align)
            assert got.size(0) == worst == (handle.num_expanded_tokens if expand else handle.num_recv_tokens)
            out, _, done = buffer.combine(got, handle, async_with_compute_stream=asynchronous)  # reads no row that is not filled
            if asynchronous:
                event.current_stream_wait()
                done.current_stream_wait()
            m = expected[0].size(0)
            same(got[:m], expected[0])
            same(got_weights[:m], expected[2])
            assert (got[m:] == 0).all() and (got_weights[m:] == 0).all()
            if not expand:
                same(idx[:m], local)
                assert (idx[m:] == -1).all()
            assert handle.num_recv_tokens_per_expert_list == [] and handle.recv_src_metadata.size(0) == n * case.most
            assert handle.psum_num_recv_tokens_per_scaleup_rank[-1] == len(source)
            assert (handle.recv_src_metadata[len(source):] == -1).all()
            copies = (case.idx >= 0).sum(1, keepdim=True) if expand else torch.stack(
                [(case.idx // case.n_local == r).any(1) for r in range(n)], 1).sum(1, keepdim=True)
            close(out, case.x.float() * copies, 0.03)
            again = buffer.dispatch(case.x, handle=handle, do_expand=expand)[0]
            assert again.size(0) == worst
            same(again[:m], expected[0])


def combine_knows_the_rows_of_a_dispatch_under_way(buffer):
    case = Case(buffer, 32)
    for align in (None, 1):
        if DEVICE == "cpu":
            buffer._submit(lambda: time.sleep(0.3))  # so that the dispatch comes later
        *_, handle, event = case.dispatch(do_cpu_sync=False, async_with_compute_stream=True, do_expand=align is not None)
        raises(ValueError, "give as many", lambda: buffer.combine(case.outputs(align)[:-1], handle))
        case.check_combine(handle, align)
        event.current_stream_wait()


def cached_dispatch(buffer):
    case = Case(buffer, 40)
    other = Case(buffer, 40, seed=9)
    mixed = Case(buffer, 40).take([(x, i, w) for (x, _, w), (_, i, _) in zip(other.all, case.all)])  # another step, the same choices
    rows, local, weights, _, _ = mixed.received()
    for align, expand in ((1, False), (8, True)):
        handle = case.dispatch(do_expand=expand, expert_alignment=align)[3]
        place = (lambda t: mixed.expanded(t, align)) if expand else lambda t: t  # noqa: E731
        got, idx, none, returned, _ = buffer.dispatch(mixed.x, handle=handle, do_expand=expand)
        same(got, place(rows))
        assert none is None and returned is handle
        got, idx, got_weights, *_ = buffer.dispatch(mixed.x.float(), topk_weights=mixed.weights, handle=handle, num_experts=16,
                                                    do_expand=expand)
        same(got, place(rows.float()))
        same(got_weights, place(weights))
        assert (idx is None) == expand
        if not expand:
            same(idx, local)
            idx.zero_()  # the result is the caller's
            same(buffer.dispatch(mixed.x, handle=handle)[1], local)
        mixed.check_combine(handle, align if expand else None)
    same(buffer.dispatch(mixed.x, handle=handle)[0], rows)  # rows of an expanded handle need not be expanded


def fp8_rows_and_scales(buffer):
    case = Case(buffer, 40)
    plain = lambda t: t.view(torch.uint8) if t.element_size() == 1 else t  # noqa: E731 (torch up to 2.8 cannot index float8)
    for kind in (torch.float32, torch.int32, torch.float8_e5m2):
        pairs = [fp8_of(x, kind) for x, _, _ in case.all]
        rows, scales = (plain(expected_dispatch([(p[part], i, w) for p, (_, i, w) in zip(pairs, case.all)], case.rank, 16)[0])
                        for part in (0, 1))
        for expand, align in ((False, 1), (True, 1), (True, 8)):
            for by_column in (False, True):
                mine = pairs[case.rank][0], pairs[case.rank][1].t().contiguous().t()
                (got, got_scales), *_, handle, _ = case.dispatch(mine, do_expand=expand, expert_alignment=align,
                                                                 use_tma_aligned_col_major_sf=by_column)
                place = (lambda t: case.expanded(t, align)) if expand else lambda t: t  # noqa: E731
                same(got.view(torch.uint8), place(rows))
                same(plain(got_scales), place(scales))
                n = got.size(0)
                assert (got.dtype, got_scales.dtype) == (torch.float8_e4m3fn, kind)
                assert got_scales.stride() == ((1, round_up(n, 4)) if by_column else (7, 1))
                (again, scales_again), *_ = buffer.dispatch(mine, handle=handle, do_expand=expand)
                same(again.view(torch.uint8), place(rows))
                same(plain(scales_again), place(scales))
                case.check_combine(handle, align if expand else None)
            (got, got_scales), *_ = case.dispatch(mine, do_expand=expand, expert_alignment=align, do_cpu_sync=False)
            same(plain(got_scales)[:n], place(scales))
            assert (got[n:].view(torch.uint8) == 0).all() and (plain(got_scales)[n:] == 0).all() and got.size(0) > n


def wide_rows_are_summed_too(buffer):
    """The sums on one rank of such rows do not fit the staging of its communicator, and flat's do not fit that of 4 ranks."""
    each = make(buffer.group, allow_hybrid_mode=False)
    for hidden in (40_000, 120_000):
        case = Case(each, 3, hidden=hidden, dtype=torch.float32)
        bias = torch.randn_like(case.x)
        handle = case.check(case.dispatch())
        case.check_combine(handle)
        case.check_combine(handle, biases=bias)
        case.check_combine(case.check_expanded(case.dispatch(do_expand=True)), 1, biases=bias)
    each.destroy()


def biases_come_first(buffer):
    """Biases are added before the sum is rounded."""
    flat = make(buffer.group, allow_hybrid_mode=False)
    for each in (flat, buffer):
        case = Case(each, 60)
        handle = case.check(case.dispatch())
        bias = tuple(100 * torch.randn_like(case.x) for _ in range(2))
        for given in (bias[0], bias, (bias[0], None), (None, bias[1]), (None, None)):
            case.check_combine(handle, biases=given)
        expanded = case.check_expanded(case.dispatch(do_expand=True))
        case.check_combine(expanded, 1, biases=bias)
    late = Case(flat, 60)
    if torch.equal(late.combined(bias), (late.combined().float() + bias[0] + bias[1]).bfloat16()):
        raise AssertionError("the case does not tell biases that come first from biases that come last")
    flat.destroy()


def sums_by_torch_in_several_blocks(buffer):
    """As for CUDA tensors."""
    from deep_ep import _sums
    usual, sizes = _sums.Sums._by_moeccl, dict(_sums._BLOCK_BYTES)
    single = make(buffer.group, allow_multiple_reduction=False)
    _sums.Sums._by_moeccl = lambda *_: False
    try:
        for block_bytes in (1, 4 << 20):  # blocks of the fewest lists, and one block
            _sums._BLOCK_BYTES.update(dict.fromkeys(sizes, block_bytes))
            for each in (buffer, single):
                case = Case(each, [50 - 7 * r for r in range(buffer.num_ranks)], top_k=6)
                bias = tuple(torch.randn_like(case.x) for _ in range(2))
                for biases in (None, bias):
                    case.check_combine(case.check(case.dispatch()), biases=biases)
                    case.check_combine(case.check_expanded(case.dispatch(do_expand=True)), 1, biases=biases, each_choice=each is single)
    finally:
        _sums.Sums._by_moeccl = usual
        _sums._BLOCK_BYTES.update(sizes)
    single.destroy()


def moeccl_forms_the_sums(buffer):
    """Where it can: with a plan of its own between hosts if the caller allows it, otherwise in the order of choices. Nowhere does it do so with
    biases, or where the row of each choice returns; the rank itself then adds up what has returned."""
    from deep_ep import _native
    usual, seen = _native.Routing.combine, []
    _native.Routing.combine = lambda self, rows, out: (seen.append((self.comm.size > 1, self.shape.ordered)), usual(self, rows, out))
    here, there = (False, True), (buffer.num_ranks > 1, True)  # on this rank alone, and on all
    try:
        for hybrid in (True, False):
            for multiple in (True, False):
                each = make(buffer.group, allow_hybrid_mode=hybrid, allow_multiple_reduction=multiple)
                case = Case(each, 30)
                bias = torch.randn_like(case.x)
                hosts = several_hosts() and hybrid
                once = (True, False) if hosts and multiple else here if hosts else there
                plain, expanded = case.check(case.dispatch()), case.check_expanded(case.dispatch(do_expand=True))
                for handle, align, biases, expected in (
                        (plain, None, None, [once]), (plain, None, bias, [once if hosts and multiple else here]),
                        (expanded, 1, None, [here, once] if multiple else [here])):
                    del seen[:]
                    case.check_combine(handle, align, biases=biases, each_choice=align is not None and not multiple)
                    assert seen == (expected if DEVICE == "cpu" else [one for one in expected if one is not here]), (hybrid, multiple, seen)
                each.destroy()
    finally:
        _native.Routing.combine = usual


def ranks_without_tokens(buffer):
    n = buffer.num_ranks
    for counts in ([0] + [20] * (n - 1), [20] + [0] * (n - 1), [0] * n):
        case = Case(buffer, counts)
        for sync in (True, False):
            handle = case.dispatch(do_cpu_sync=sync)[3]
            expanded = case.dispatch(do_expand=True, expert_alignment=8, do_cpu_sync=sync)[3]
        case.check_combine(case.check(case.dispatch()))
        case.check_combine(case.check_expanded(case.dispatch(do_expand=True, expert_alignment=8), 8), 8)
        x8 = fp8_of(case.x)
        case.check_combine(case.dispatch(x8)[3])
        assert int(handle.psum_num_recv_tokens_per_scaleup_rank[-1]) == case.received()[0].size(0)
        assert expanded.num_unaligned_recv_tokens_per_expert.tolist() == case.counts()


def ranks_that_receive_nothing(buffer):
    case = Case(buffer, 30, holes=False)
    case.take([(x, torch.where(torch.arange(4) == 0, idx % case.n_local, -1), w) for x, idx, w in case.all])  # rank 0's experts
    case.check_combine(case.check(case.dispatch()))
    case.check_combine(case.check_expanded(case.dispatch(do_expand=True)), 1)
    nobody = Case(buffer, 30)
    nobody.take([(x, torch.full_like(idx, -1), w) for x, idx, w in nobody.all])
    bias = torch.ones_like(nobody.x)
    for expand in (False, True):
        rows, *_, handle, _ = nobody.dispatch(do_expand=expand)
        assert rows.size(0) == 0
        same(buffer.combine(rows, handle, bias=bias)[0], bias)


def large_shapes(buffer):
    for hidden, n_experts, top_k in ((8192, 16, 4), (64, 1024, 8), (64, 64, 33), (7, 16, 16)):
        case = Case(buffer, 24, hidden, n_experts, top_k)
        case.check_combine(case.check(case.dispatch()))
        case.check_combine(case.check_expanded(case.dispatch(do_expand=True)), 1)


def steps_of_other_sizes(buffer):
    for step, n in enumerate((10, 300, 3, 0, 129, 1000, 64)):
        case = Case(buffer, [(n + 13 * r) % 1024 for r in range(buffer.num_ranks)], seed=step)
        case.check_combine(case.check(case.dispatch()))
        case.check_combine(case.check_expanded(case.dispatch(do_expand=True, expert_alignment=16), 16), 16)


def choices_of_other_kinds(buffer):
    case = Case(buffer, 30)
    rows, idx, weights, handle, _ = case.dispatch(topk_weights=None)
    same(rows, case.received()[0])
    same(idx, case.received()[1])
    assert weights is None
    case.check_combine(handle)
    narrow = case.dispatch(topk_idx=case.idx.int())
    assert narrow[1].dtype == torch.int32
    case.check(narrow)
    _, none, weights, handle, _ = case.dispatch(topk_weights=None, do_expand=True)
    assert none is weights is None
    case.check_combine(handle, 1)
    twice = Case(buffer, 30)
    twice.take([(x, idx.clone(), w) for x, idx, w in twice.all])
    for _, idx, _ in twice.all:
        idx[:, 2] = idx[:, 0]  # an expert twice
    twice.check_combine(twice.check(twice.dispatch()))
    twice.check_combine(twice.check_expanded(twice.dispatch(do_expand=True)), 1)
    raises(ValueError, "names an expert twice in row", lambda: twice.dispatch(do_expand=True, do_cpu_sync=False))
    own, kept = (case.dispatch(do_handle_copy=copied)[3].topk_idx for copied in (True, False))
    assert own.data_ptr() != case.idx.data_ptr() == kept.data_ptr()
    default = make(buffer.group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=30, hidden=64)
    handle = default.dispatch(case.x, topk_idx=case.idx, num_experts=16)[3]
    assert handle.num_max_tokens_per_rank == 30 and handle.expert_alignment == 1
    default.destroy()


def choices_of_any_strides(buffer):
    single = make(buffer.group, allow_multiple_reduction=False)
    for each in (buffer, single):
        case = Case(each, 30)
        for idx in (case.idx.repeat_interleave(2, 1)[:, ::2], case.idx.t().contiguous().t()):
            assert not idx.is_contiguous()
            case.check_combine(case.check(case.dispatch(topk_idx=idx)))
            expanded = case.check_expanded(case.dispatch(topk_idx=idx, do_expand=True))
            case.check_combine(expanded, 1, each_choice=each is single)
    single.destroy()


def counts_are_added_to_statistics(buffer):
    case = Case(buffer, 50)
    stats = torch.full((case.n_local, ), 5, dtype=torch.int32)
    for _ in range(2):
        case.dispatch(cumulative_local_expert_recv_stats=stats, expert_alignment=16)
    event = case.dispatch(cumulative_local_expert_recv_stats=stats, do_cpu_sync=False, async_with_compute_stream=True)[-1]
    event.current_stream_wait()
    same(stats, 5 + 3 * torch.tensor(case.counts()).int())


CASES = cases_of(sys.modules[__name__], deep_ep_elastic_use, deep_ep_elastic_extras)
globals().update(tests_of(CASES, make, late="ranks_without_tokens"))


def _lose_a_rank(rank, meeting, pipe):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", world_size=3, rank=rank)
    buffer = make(dist.group.WORLD, num_cpu_timeout_secs=20)
    case = Case(buffer, 20, n_experts=18)
    case.check_combine(case.check(case.dispatch()))
    buffer.pp_set_config(64, 1)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    import moeccl
    for call in (case.dispatch, case.dispatch, buffer.barrier, lambda: buffer.pp_recv(torch.empty(4), 1)):
        try:
            call()
            pipe.send(f"{call} did not fail")
        except moeccl.Error as failure:
            pipe.send(str(failure))
    try:
        case.dispatch(do_cpu_sync=False, async_with_compute_stream=True)[-1].current_stream_wait()
        pipe.send("no error")
    except moeccl.Error as failure:
        pipe.send(str(failure))
    buffer.destroy()
    pipe.send("ended")


class ALostRank(unittest.TestCase):
    """The calls of the other ranks raise an error, and destroy() returns."""

    def test(self):
        context = multiprocessing.get_context("fork")
        with tempfile.TemporaryDirectory() as folder:
            ranks = []
            for rank in range(3):
                here, there = context.Pipe()
                process = context.Process(target=_lose_a_rank, args=(rank, folder + "/meeting", there))
                process.start()
                there.close()
                ranks.append((process, here))
            for rank in (0, 2):
                process, pipe = ranks[rank]
                told = [pipe.recv() if pipe.poll(60) else "no answer" for _ in range(6)]
                self.assertEqual(told[-1], "ended", told)
                self.assertIn("rank 1", told[0])
                self.assertFalse([one for one in told if "did not fail" in one or one in ("no answer", "no error")], told)
            for process, _ in ranks:
                process.join(20)
                if process.is_alive():
                    process.kill()
                    self.fail("a process does not end")


if __name__ == "__main__":
    unittest.main()
