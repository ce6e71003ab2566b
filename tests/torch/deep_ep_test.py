# SPDX-License-Identifier: Apache-2.0
"""Tests of bindings/deep_ep: every call against a dense reference, on 2 and 4 processes, on 4 that count as two hosts, and on 2 whose
calls take the way of CUDA tensors, with streams that stand in for CUDA's. With DEEP_EP_TEST_DEVICE=cuda the tensors are CUDA tensors
of one GPU; tools/gpu-check does that."""
import functools
import gc
import os
import sys
import unittest

import with_torch  # noqa: F401 (skips where there is no torch)
import torch
import torch.distributed as dist
import deep_ep_low_latency
from deep_ep_ranks import cases_of, tests_of
from deep_ep_support import (DEEP_EP, DEVICE, Case, close, expected_dispatch, in_rank_of, inputs, on_streams, raises, reused,
                             same)


# Each case is a function of a Buffer, which all ranks call, each with its own.


def layout_counts_tokens_once_a_rank(buffer):
    case = Case(buffer, 37)
    layout, in_rank = case.layout(), in_rank_of(case.idx, 16, buffer.group_size)
    same(layout["is_token_in_rank"], in_rank)
    same(layout["num_tokens_per_rank"], in_rank.sum(0).int())
    same(layout["num_tokens_per_expert"], torch.stack([(case.idx == e).sum() for e in range(16)]).int())
    for case.idx in (case.idx.repeat_interleave(2, 1)[:, ::2], case.idx.t().contiguous().t()):  # any strides
        again = case.layout()
        assert all(again[name] is layout[name] or torch.equal(again[name], layout[name]) for name in layout)
    layout["is_token_in_rank"] = in_rank.t().contiguous().t()
    rows = buffer.dispatch(case.x, topk_idx=case.idx, topk_weights=case.weights, **layout)[0]
    same(rows, case.expected()[0])
    hosts = torch.tensor(HOST_OF(buffer))
    if hosts.max() == 0:
        assert layout["num_tokens_per_rdma_rank"] is None
    else:
        same(layout["num_tokens_per_rdma_rank"], torch.stack([in_rank[:, hosts == h].any(1).sum() for h in range(2)]).int())


def HOST_OF(buffer):
    return [r // 2 if os.environ.get("MOECCL_HOST_ID") else 0 for r in range(buffer.group_size)]


def dispatch_and_combine_in_every_type(buffer):
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float16, 0.002), (torch.float32, 1e-6), (torch.float64, 1e-14)):
        case = Case(buffer, 50, dtype=dtype)
        case.check_combine(case.check(case.dispatch()), tolerance=tolerance)


def handle_says_where_rows_come_from(buffer):
    case = Case(buffer, [5 + 7 * r for r in range(buffer.group_size)])
    handle = case.check(case.dispatch())
    sent = torch.stack([in_rank_of(i, 16, buffer.group_size).sum(0) for _, i, _ in case.all])
    ends = sent.cumsum(0).int()
    if max(HOST_OF(buffer)) == 0:
        assert len(handle) == 6
        same(handle[0], ends)
    else:
        assert len(handle) == 10
        same(handle[-4], ends[:, buffer.rank])
    tokens = handle[3] if max(HOST_OF(buffer)) == 0 else handle[7]
    same(tokens, case.expected()[4].int())


def ranks_without_tokens(buffer):
    n = buffer.group_size
    for counts in ([0] + [20] * (n - 1), [20] + [0] * (n - 1), [0] * n):
        case = Case(buffer, counts)
        case.check_combine(case.check(case.dispatch()))


def ranks_that_receive_nothing(buffer):
    case = Case(buffer, 30, holes=False)
    n_local = 16 // buffer.group_size
    case.all = [(x, idx % n_local, w) for x, idx, w in case.all]  # every expert is rank 0's
    for x, idx, w in case.all:
        idx[:, 1:] = -1
    case.x, case.idx, case.weights = case.all[buffer.rank]
    rows, idx, weights, counts, handle, _ = case.dispatch()
    assert rows.size(0) == (30 * buffer.group_size if buffer.rank == 0 else 0) and counts == case.expected_counts()
    case.check_combine(handle)


def large_shapes(buffer):
    for hidden, n_experts, top_k in ((8192, 16, 4), (64, 1024, 8), (64, 64, 33), (7, 16, 16)):
        case = Case(buffer, 24, hidden, n_experts, top_k)
        case.check_combine(case.check(case.dispatch()))


def steps_of_other_sizes(buffer):
    for step, n in enumerate((10, 300, 3, 0, 129, 2000, 64)):
        case = Case(buffer, [(n + 13 * r) % 2048 for r in range(buffer.group_size)], seed=step)
        case.check_combine(case.check(case.dispatch()))


def without_choices(buffer):
    case = Case(buffer, 40)
    rows, idx, weights, counts, handle, _ = buffer.dispatch(case.x, **case.layout())
    same(rows, case.expected()[0])
    assert idx is None and weights is None and counts == case.expected_counts()
    case.check_combine(handle)


def worst_tokens(buffer):
    case = Case(buffer, 32)
    for asynchronous in (False, True):
        worst = 32 * buffer.group_size + 5
        rows, idx, weights, counts, handle, event = case.dispatch(num_worst_tokens=worst, async_finish=asynchronous)
        if asynchronous:
            event.current_stream_wait()
        expected = case.expected()
        n = expected[0].size(0)
        assert counts == [] and rows.size(0) == idx.size(0) == weights.size(0) == worst
        for got, right in zip((rows, idx, weights), expected):
            same(got[:n], right)
        assert (idx[n:] == -1).all() and (rows[n:] == 0).all() and (weights[n:] == 0).all()
        again = buffer.dispatch(case.x, handle=handle)[0]
        assert again.size(0) == worst
        same(again[:n], expected[0])
        padded = rows.clone()
        padded[n:] = float("nan")
        out, _, _ = buffer.combine(padded, handle)
        close(out, case.x.float() * in_rank_of(case.idx, 16, buffer.group_size).sum(1, keepdim=True), 0.02)
    raises(ValueError, "num_worst_tokens of rank 0 is 1,", lambda: case.dispatch(num_worst_tokens=1))
    case.check(case.dispatch())  # all ranks were refused, so the next call works


def alignment_rounds_counts_up(buffer):
    case = Case(buffer, 33)
    rows, _, _, counts, _, _ = case.dispatch(expert_alignment=16)
    assert counts == [-(-c // 16) * 16 for c in case.expected_counts()]
    same(rows, case.expected()[0])


def cached_dispatch(buffer):
    case = Case(buffer, 40)
    handle = case.check(case.dispatch())
    other = [(x + 1, i, w) for x, i, w in case.all]
    for dtype in (torch.bfloat16, torch.float32):
        again = [(x.to(dtype), i, w) for x, i, w in other]
        rows, idx, weights, counts, none, _ = buffer.dispatch(again[buffer.rank][0], handle=handle)
        assert idx is weights is counts is none is None
        same(rows, expected_dispatch(again, buffer.rank, 16)[0])
        case.check_combine(handle, dtype)
    x8, scales = fp8_of(case.x)
    rows, got_scales = buffer.dispatch((x8, scales), handle=handle)[0]
    check_fp8(case, rows, got_scales)
    case.check_combine(handle)


def fp8_of(x):
    return x.to(torch.float8_e4m3fn), x[:, :8].float().contiguous()


def check_fp8(case, rows, scales):
    pairs = [fp8_of(x) for x, _, _ in case.all]
    for part, got in enumerate((rows, scales)):
        same(got, expected_dispatch([(pairs[r][part], i, w) for r, (_, i, w) in enumerate(case.all)], case.rank, 16)[0])


def fp8_rows_and_scales(buffer):
    case = Case(buffer, 40)
    x8, scales = fp8_of(case.x)
    columns = scales.t().contiguous().t()  # scales may lie column by column
    (rows, got_scales), idx, weights, counts, handle, _ = case.dispatch(x=(x8, columns))
    check_fp8(case, rows, got_scales)
    expected = case.expected()
    same(idx, expected[1])
    same(weights, expected[2])
    case.check_combine(handle)
    for odd in map(functools.partial(Case, buffer), (0, 1, 2, 9)):  # scales of any width and stride, for a row or none too
        for part in (lambda x: (16 * x[:, :3]).to(torch.uint8).contiguous(), lambda x: x[:, :8].float()[:, ::8]):
            (_, got), *_ = odd.dispatch(x=(fp8_of(odd.x)[0], part(odd.x)))
            same(got, expected_dispatch([(part(x), i, w) for x, i, w in odd.all], odd.rank, 16)[0])


def biases_are_added(buffer):
    case = Case(buffer, 20)
    handle = case.check(case.dispatch())
    rows = case.expected()[0]
    bias = [torch.full_like(case.x, value) for value in (3.0, 40.0)]
    plain = buffer.combine(rows, handle)[0]
    for given, total in ((None, 0.0), (bias[0], 3.0), (tuple(bias), 43.0), ((bias[0], None), 3.0), ((None, bias[1]), 40.0),
                         ((None, None), 0.0)):
        out, none, _ = buffer.combine(rows, handle, bias=given)
        assert none is None
        close(out, plain.float() + total, 0.02)
    exact = buffer.combine(rows.double(), handle)[0]
    close(buffer.combine(rows.double(), handle, bias=exact / 3)[0], exact + exact / 3, 1e-14)


def asynchronous_calls(buffer):
    first, second = Case(buffer, 60, seed=1), Case(buffer, 30, seed=2)
    results = [case.dispatch(async_finish=True, previous_event=buffer.capture()) for case in (first, second)]
    outs = [buffer.combine(r[0], r[4], topk_weights=r[2], async_finish=True, previous_event=r[5]) for r in results]
    for case, result, (out, weights, event) in zip((first, second), results, outs):
        with event:
            pass
        case.check(result)
        close(out, case.x.float() * in_rank_of(case.idx, 16, buffer.group_size).sum(1, keepdim=True), 0.02)
        same(weights, torch.where(case.idx >= 0, case.weights, 0.0))
    raises(RuntimeError, "without async_finish", first.dispatch()[5].current_stream_wait)
    # A call reads inputs that an asynchronous call writes after that call's event.
    for _ in range(5):
        made = first.dispatch(num_worst_tokens=60 * buffer.group_size, async_finish=True)
        *_, per_expert, _, event = buffer.get_dispatch_layout(made[1], 16, previous_event=made[5], async_finish=True)
        event.current_stream_wait()
        same(per_expert, torch.bincount(made[1].view(-1) + 1, minlength=17)[1:].int())


def many_handles_live_together(buffer):
    cases = [Case(buffer, 10 + i, seed=i) for i in range(6)]
    handles = [case.check(case.dispatch()) for case in cases]
    for case, handle in reversed(list(zip(cases, handles))):
        case.check_combine(handle)
    del handles, handle
    for case in cases:
        case.check_combine(case.check(case.dispatch()))


def memory_of_results_is_used_again(buffer):
    if DEVICE != "cpu":
        return  # torch itself keeps CUDA memory, and says when it may be used again
    case = Case(buffer, 300, hidden=2048, seed=3)
    case.check_combine(case.check(reused(case.dispatch)))


def ranks_that_differ_are_told(buffer):
    mine = Case(buffer, 12, hidden=64 if buffer.rank else 32)
    raises(ValueError, "differ in the columns of x", mine.dispatch)
    case = Case(buffer, 12)
    raises(ValueError, "differ in the columns of topk_idx, None and 4",
           lambda: case.dispatch() if buffer.rank else buffer.dispatch(case.x, **case.layout()))
    case.check_combine(case.check(case.dispatch()))


def bad_arguments_are_named(buffer):
    case = Case(buffer, 12)
    layout, handle = case.layout(), case.check(case.dispatch())
    with_layout = lambda **more: lambda: buffer.dispatch(more.pop("x", case.x), **{**layout, **more})  # noqa: E731
    stats_of = lambda stats: lambda: buffer.low_latency_dispatch(case.x, case.idx, 12, 16, stats, use_fp8=False)  # noqa: E731
    n = buffer.group_size
    for kind, words, call in (
            (ValueError, "num_experts is 15", lambda: buffer.get_dispatch_layout(case.idx, 15)),
            (ValueError, "topk_idx holds", lambda: buffer.get_dispatch_layout(case.idx + 5, 16)),
            (TypeError, "topk_idx is torch.float32", lambda: buffer.get_dispatch_layout(case.idx.float(), 16)),
            (TypeError, "x is a list", with_layout(x=[1])),
            (TypeError, "x is torch.int64", with_layout(x=case.x.long())),
            (ValueError, "x is torch.bfloat16 [768]", with_layout(x=case.x.view(-1))),
            (TypeError, "x lies on meta", with_layout(x=case.x.to("meta"))),
            (TypeError, "x[0] is torch.bfloat16", with_layout(x=(case.x, case.x))),
            (ValueError, "x[1] is [64]", with_layout(x=(case.x.to(torch.float8_e4m3fn), torch.ones(64)))),
            (ValueError, "topk_weights is None", with_layout(topk_idx=case.idx)),
            (ValueError, "topk_weights is torch.float32 [12, 3]", with_layout(topk_idx=case.idx, topk_weights=torch.ones(12, 3))),
            (ValueError, "is_token_in_rank is None", with_layout(is_token_in_rank=None)),
            (ValueError, f"is_token_in_rank is torch.bool [{n}, 12]", with_layout(is_token_in_rank=layout["is_token_in_rank"].t())),
            (ValueError, "expert_alignment is 0", with_layout(expert_alignment=0)),
            (ValueError, "num_worst_tokens is -1", with_layout(num_worst_tokens=-1)),
            (ValueError, "belong to the dispatch that made", lambda: buffer.dispatch(
                case.x, handle=handle, topk_idx=case.idx, topk_weights=case.weights)),
            (ValueError, "x has 3 rows", lambda: buffer.dispatch(case.x[:3], handle=handle)),
            (TypeError, "handle is a tuple", lambda: buffer.combine(case.x, (case.x, ) * 6)),
            (TypeError, "handle is a NoneType", lambda: buffer.combine(case.x, None)),
            (ValueError, "give as many", lambda: buffer.combine(torch.zeros(999, 64), handle)),
            (ValueError, "bias is torch.bfloat16 [1, 64]", lambda: buffer.combine(case.expected()[0], handle, bias=case.x[:1])),
            (ValueError, "bias is a tuple of 3", lambda: buffer.combine(case.expected()[0], handle, bias=(case.x, ) * 3)),
            (ValueError, "topk_weights is torch.float64", lambda: buffer.combine(
                case.expected()[0], handle, topk_weights=case.expected()[2].double())),
            (ValueError, "x has 12 tokens", lambda: buffer.low_latency_dispatch(case.x, case.idx, 11, 16)),
            (ValueError, "x has 64 columns: use_fp8", lambda: buffer.low_latency_dispatch(case.x, case.idx, 12, 16)),
            (ValueError, "use_ue8m0 is True", lambda: buffer.low_latency_dispatch(case.x, case.idx, 12, 16, use_ue8m0=True)),
            (ValueError, "not both", lambda: buffer.low_latency_dispatch(
                case.x, case.idx, 12, 16, async_finish=True, return_recv_hook=True)),
            (TypeError, "recv_stats is torch.int64", stats_of(torch.zeros(16 // n, dtype=torch.int64))),
            (ValueError, "recv_stats is torch.int32 [1]", stats_of(torch.zeros(1, dtype=torch.int32))),
            (ValueError, "recv_stats is torch.int32 [1, ", stats_of(torch.zeros(1, 16 // n, dtype=torch.int32))),
            (ValueError, "recv_stats is not contiguous", stats_of(torch.zeros(32 // n, dtype=torch.int32)[::2])),
            (TypeError, "recv_stats is a list", stats_of([0] * (16 // n))),
            (NotImplementedError, "dispatch_wait_recv_cost_stats", lambda: buffer.low_latency_dispatch(
                case.x, case.idx, 12, 16, dispatch_wait_recv_cost_stats=case.weights, use_fp8=False)),
            (NotImplementedError, "get_local_buffer_tensor", lambda: buffer.get_local_buffer_tensor(torch.int8, torch.Size((4, )))),
            (ValueError, "new_num_sms is 3", lambda: buffer.set_num_sms(3)),
            (ValueError, "num_max_nvl_chunked_send_tokens is 9", lambda: DEEP_EP().Config(20, 9, 9))):
        raises(kind, words, call)
    case.check_combine(handle)


class LikeMpi:
    """The part of an mpi4py communicator that Buffer uses."""

    def __init__(self, group):
        self.group = group

    def Get_rank(self):
        return self.group.rank()

    def Get_size(self):
        return self.group.size()

    def allgather(self, thing):
        told = [None] * self.group.size()
        dist.all_gather_object(told, thing, self.group)
        return told


def made_and_dropped(buffer):
    """A Buffer made from an MPI communicator; without destroy() its communicator ends with it, and others keep working."""
    for _ in range(3):
        other = DEEP_EP().Buffer(None, comm=LikeMpi(buffer.group))
        case = Case(other, 8)
        case.check_combine(case.check(case.dispatch()))
        del other, case
    other = DEEP_EP().Buffer(None, comm=LikeMpi(buffer.group))
    case = Case(other, 8)
    event = case.dispatch(num_worst_tokens=8 * buffer.group_size, async_finish=True)[-1]
    del other, case
    if event.event._done is not None:
        event.event._done.wait(60)
        assert event.event._done.is_set(), "the call of a Buffer that was dropped meanwhile does not end"
    for explicitly in (False, True):
        other = DEEP_EP().Buffer(None, comm=LikeMpi(buffer.group), explicitly_destroy=explicitly)
        case, kept = Case(other, 8), other._comm
        case.check_combine(case.check(case.dispatch()))
        del other, case
        assert (kept.comm is not None) == explicitly, "explicitly_destroy decides whether the communicator ends with its Buffer"
        kept.close()
    other = DEEP_EP().Buffer(None, 0, 0, False, 24, True, False, True, LikeMpi(buffer.group))  # v1.2.1's order
    assert other.explicitly_destroy and other.group_size == buffer.group_size
    other.destroy()
    raises(ValueError, "group and comm are None", lambda: DEEP_EP().Buffer(None))
    raises(TypeError, "group is a int", lambda: DEEP_EP().Buffer(3))
    raises(ValueError, "enable_shrink is True", lambda: DEEP_EP().Buffer(buffer.group, enable_shrink=True))


def handles_serve_every_buffer_of_the_group(buffer):
    """Megatron makes a larger Buffer while handles of the last one wait for backward."""
    make = lambda size: DEEP_EP().Buffer(buffer.group, size, low_latency_mode=True)  # noqa: E731
    for dropped in (False, True):
        first = make(0)
        case = Case(first, 40)
        result = case.dispatch()
        handle = case.check(result)
        expected = first.combine(result[0], handle, topk_weights=result[2])
        rows, _, quick, _, _ = first.low_latency_dispatch(case.x, case.idx, 40, 16, use_fp8=False)
        summed = first.low_latency_combine(rows, case.idx, case.weights, quick)[0]
        ended = first._comm
        if dropped:
            case.buffer = first = None
            gc.collect()
            assert ended.comm is None
        second = case.buffer = make(1 << 20)
        for _ in range(2):
            out, weights, _ = second.combine(result[0], handle, topk_weights=result[2])
            same(out, expected[0])
            same(weights, expected[1])
            same(second.low_latency_combine(rows, case.idx, case.weights, quick)[0], summed)
            same(second.dispatch(case.x, handle=handle)[0], result[0])
            x8, scales = fp8_of(case.x)
            check_fp8(case, *second.dispatch((x8, scales), handle=handle)[0])
        if first is None:
            continue
        calls = [each.combine(result[0], handle, async_finish=True) for each in (first, second) * 3]
        for out, _, event in calls:
            event.current_stream_wait()
            same(out, expected[0])


def handles_may_be_rebuilt(buffer):
    """From their items, as by save_for_backward; a dispatch's own tensor in them tells which dispatch they are of."""
    first, second = Case(buffer, 20, seed=1), Case(buffer, 20, seed=2)
    handles = [case.check(case.dispatch()) for case in (first, second)]
    for case, handle in zip((first, second), handles):
        for rebuilt in (list(handle), tuple(list(handle))):
            case.check_combine(rebuilt)
            same(buffer.dispatch(case.x, handle=rebuilt)[0], case.expected()[0])


def internode_calls_take_worst_tokens(buffer):
    case = Case(buffer, 20)
    rows, idx, weights, counts, handle, _ = buffer.internode_dispatch(
        case.x, topk_idx=case.idx, topk_weights=case.weights, num_worst_tokens=20 * buffer.group_size, **case.layout())
    expected = case.expected()[0]
    assert counts == [] and rows.size(0) == 20 * buffer.group_size
    same(rows[:len(expected)], expected)
    case.check_combine(handle)


def results_can_be_freed_and_made_again(buffer):
    """Megatron frees activations by resizing their storage."""
    case = Case(buffer, 300, hidden=2048, seed=3)
    for _ in range(3):
        rows, *_, handle, _ = case.dispatch()
        out = buffer.combine(rows, handle)[0]
        for tensor in (rows, out):
            n_bytes = tensor.untyped_storage().nbytes()
            tensor.untyped_storage().resize_(0)
            tensor.untyped_storage().resize_(n_bytes)
            tensor.fill_(1)
        rows = case.dispatch()[0]
        rows.untyped_storage().resize_(0)
        if DEVICE == "cpu":
            case.dispatch()[0].view(torch.int16).numpy()  # makes a storage that cannot be resized
            case.dispatch()[0].share_memory_()  # another process may have it
            assert not case.dispatch()[0].is_shared()
        case.check_combine(case.check(case.dispatch()))


def many_ranks_get_staging(buffer):
    """Low-latency Buffers of many ranks get the staging that their layers need."""
    from deep_ep import _native
    hint = DEEP_EP().Buffer.get_low_latency_rdma_size_hint
    for n_ranks in (8, 320, 1024):
        assert hint(256, 7168, n_ranks, n_ranks) > 2 * n_ranks * 256 * 7168 * 2
    usual, _native._STAGING_A_RANK = _native._STAGING_A_RANK, 24 << 20
    try:
        many = DEEP_EP().Buffer(buffer.group, low_latency_mode=True)
        x = torch.ones(1, 2 << 20, dtype=torch.bfloat16)
        idx = torch.full((1, 1), buffer.rank)
        rows, count, *_ = many.low_latency_dispatch(x, idx, 1, buffer.group_size, use_fp8=False)
        same(rows[0, :1], x)
        many.destroy()
    finally:
        _native._STAGING_A_RANK = usual


def modes_of_the_caller(buffer):
    """Calls work in inference mode and outside it, with the handle of a call in the other mode too; only outside it are results
    for autograd."""
    n_experts, most = 4 * buffer.group_size, 8
    x, idx, weights = inputs(buffer.rank, most, 512, n_experts, 4, holes=False)

    def throughput(inside, then_inside, asynchronous):
        with torch.inference_mode(inside):
            case = Case(buffer, most, n_experts=n_experts)
            *result, event = case.dispatch(async_finish=asynchronous)
            if asynchronous:
                event.current_stream_wait()
            assert result[0].is_inference() == inside, "a result has the mode of its call"
            handle = case.check((*result, event))
        with torch.inference_mode(then_inside):
            rows, event = result[0].clone(), None
            out, _, event = buffer.combine(rows, handle, async_finish=asynchronous, bias=torch.ones_like(case.x))
            if asynchronous:
                event.current_stream_wait()
            if not then_inside:
                (out.requires_grad_() * 2).sum().backward()

    def low_latency(inside, then_inside, **how):
        def wait(event, hook):
            if hook is not None:
                hook()
            elif how:
                event.current_stream_wait()

        stats = torch.zeros(4, dtype=torch.int32)
        with torch.inference_mode(inside):
            (rows, scales), _, handle, *later = buffer.low_latency_dispatch(x, idx, most, n_experts, stats, **how)
            wait(*later)
            rows, _, handle, *later = buffer.low_latency_dispatch(x, idx, most, n_experts, use_fp8=False, **how)
            wait(*later)
        with torch.inference_mode(then_inside):
            for zero_copy in (False, True):
                if zero_copy:
                    buffer.get_next_low_latency_combine_buffer(handle).copy_(rows)
                out, *later = buffer.low_latency_combine(rows, idx, weights, handle, zero_copy=zero_copy, **how)
                wait(*later)
                close(out, x.float().mul(weights.sum(1, keepdim=True)).bfloat16(), 0.02)

    for inside in (True, False):
        for then_inside in (True, False):
            for asynchronous in (True, False):
                throughput(inside, then_inside, asynchronous)
            for how in ({}, {"async_finish": True}, {"return_recv_hook": True}):
                low_latency(inside, then_inside, **how)
    buffer.clean_low_latency_buffer(most, 512, n_experts)


def sizes_and_streams(buffer):
    deep_ep = DEEP_EP()
    config = deep_ep.Buffer.get_dispatch_config(buffer.group_size)
    assert config.get_nvl_buffer_size_hint(8192, 4) > config.get_nvl_buffer_size_hint(4096, 4) > 0
    assert config.get_rdma_buffer_size_hint(8192, 4) == 0 < config.get_rdma_buffer_size_hint(8192, 16)
    small, large = (deep_ep.Buffer.get_low_latency_rdma_size_hint(n, 512, 4, 16) for n in (16, 128))
    assert large - small >= 2 * 16 * (128 - 16) * 512 * 2 and small > 0
    before = deep_ep.Buffer.num_sms
    deep_ep.Buffer.set_num_sms(8)
    assert deep_ep.Buffer.get_combine_config(5).num_sms == 8
    deep_ep.Buffer.set_num_sms(before)
    assert buffer.get_comm_stream() is not None and deep_ep.Buffer.is_sm90_compiled()
    assert deep_ep.topk_idx_t == torch.int64
    from deep_ep.utils import EventHandle, EventOverlap
    EventOverlap(EventHandle()).current_stream_wait()


def streams_wait_for_each_other(buffer):
    """A call comes after the caller's work, or only after the event that it is given; the caller's work comes after the call, or after
    its event. Inputs are recorded on the Buffer's stream, and results on the caller's."""
    from deep_ep.utils import EventHandle, EventOverlap
    usual = buffer._stream_for
    streams, recorded = on_streams(buffer)
    own, caller = buffer._stream_for(None).stream, streams.current_stream()
    case = Case(buffer, 8)
    layout = case.layout()
    for asynchronous in (False, True):
        for given in (False, True):
            caller.after, own.after = {"early"}, {f"call {asynchronous} {given}"}
            event = EventOverlap(EventHandle(streams)) if given else None
            caller.after.add("late")
            del recorded[:]
            rows, *_, handle, done = buffer.dispatch(case.x, topk_idx=case.idx, topk_weights=case.weights, previous_event=event,
                                                     async_finish=asynchronous, **layout)
            assert "early" in own.after and ("late" in own.after) != given, own.after
            assert (case.x.data_ptr(), own) in recorded and (rows.data_ptr(), caller) in recorded
            work = f"call {asynchronous} {given}"
            assert (work in caller.after) != asynchronous
            if asynchronous:
                done.current_stream_wait()
            assert work in caller.after and (done.event is None) != asynchronous
            case.check_combine(handle)
    buffer._stream_for = usual


globals().update(tests_of(
    cases_of(sys.modules[__name__], deep_ep_low_latency),
    lambda group: DEEP_EP().Buffer(group, low_latency_mode=True, explicitly_destroy=True), late="ranks_without_tokens"))

if __name__ == "__main__":
    unittest.main()
