# SPDX-License-Identifier: Apache-2.0
"""Tests of deep_ep.HybridEPBuffer: every call against a dense reference, on 2 and 4 processes, on 4 that count as two
hosts, and on 2 whose calls take the way of CUDA tensors, with streams that stand in for CUDA's. With
DEEP_EP_TEST_DEVICE=cuda the tensors are CUDA tensors of one GPU; tools/gpu-check does that."""
import gc
import sys
import unittest

import with_torch  # noqa: F401 (skips where there is no torch)
import torch
import deep_ep_hybrid_arguments
from deep_ep_hybrid_support import Case, make
from deep_ep_ranks import cases_of, tests_of
from deep_ep_support import DEEP_EP, DEVICE, STAND_IN, close, on_streams, raises, reused, same

TYPES = ((torch.bfloat16, 0.02), (torch.float16, 0.002), (torch.float32, 1e-6), (torch.float64, 1e-14))


# Each case is a function of a HybridEPBuffer for 16 experts, which all ranks call, each with its own.


def dispatch_and_combine_in_every_type(buffer):
    for dtype, tolerance in TYPES:
        case = Case(buffer, 50, dtype=dtype)
        case.check_combine(case.check_dense(case.dispatch()), tolerance=tolerance)
    rows, none, _, handle = case.dispatch(probs=None)
    assert none is None
    same(rows, case.dense(case.of(lambda x: x)))
    case.check_combine(handle, torch.float32, 1e-6)


def permute_and_unpermute_in_every_type(buffer):
    for dtype, tolerance in TYPES:
        for align in (None, 1, 4, 32):
            case = Case(buffer, [50 - 3 * r for r in range(buffer.group_size)], dtype=dtype)
            handle = case.check_permuted(case.permute(pad_multiple=align), align or 1)
            case.check_unpermute(handle, align or 1, tolerance=tolerance)
    rows, none, _, _, handle = case.permute(probs=None, fuse_permute_dispatch=True)
    assert none is None
    same(rows, case.permuted(case.of(lambda x: x)))
    case.check_unpermute(handle, 1, torch.float32, 1e-6)


def rows_arrive_at_their_final_places(buffer):
    """Neither call permutes rows in memory of its own: the library writes to the result, and reads what the caller
    gives."""
    from deep_ep import _native
    case, seen = Case(buffer, 40), []
    usual = _native.Routing.dispatch, _native.Routing.combine
    try:
        _native.Routing.dispatch = lambda self, rows, out: (seen.append(out.data_ptr()), usual[0](self, rows, out))
        _native.Routing.combine = lambda self, rows, out: (seen.append(rows.data_ptr()), usual[1](self, rows, out))
        for padded in (1, 8):
            rows, *_, handle = case.permute(pad_multiple=padded)
            buffer.combine_with_unpermute(hidden=rows, handle=handle)
            assert seen == [rows.data_ptr()] * 2, "a copy was made"
            del seen[:]
        rows, *_, handle = case.dispatch()
        buffer.combine(rows, None, handle)
        assert seen == [rows.data_ptr()] * 2, "a copy was made"
    finally:
        _native.Routing.dispatch, _native.Routing.combine = usual


def choices_mean_the_map(buffer):
    case = Case(buffer, 30)
    idx = torch.where(case.map, torch.arange(16), -1).topk(6, dim=1).values
    weights = torch.where(idx >= 0, case.probs.gather(1, idx.clamp(min=0)), 0.0)
    doubled = [torch.cat((part, part[:, :1]), dim=1) for part in (idx, weights)]  # an expert twice counts once
    for given in ((idx, weights), (idx.int(), weights), doubled):
        how = {"topk_idx": given[0], "topk_weights": given[1], "num_of_experts": 16}
        case.check_dense(buffer.dispatch(case.x, **how))
        case.check_permuted(buffer.dispatch_with_permute(hidden=case.x, pad_multiple=8, **how), 8)
    from deep_ep.hybrid_ep_buffer import indices_to_map  # which torchtitan calls itself
    for given in ((idx, weights), doubled):
        chosen, probs = indices_to_map(*given, 30, 16)
        same(chosen, case.map)
        same(probs, torch.where(case.map, case.probs, 0.0))
    assert indices_to_map(idx, None, 30, 16)[1] is None
    assert buffer.dispatch(case.x, topk_idx=idx, num_of_experts=16)[1] is None
    handle = case.permute()[-1]
    same(buffer.dispatch_with_permute(hidden=case.x, topk_idx=idx, topk_weights=2 * weights, handle=handle)[1],
         2 * case.permuted_probs())


def quantized_rows_and_scales(buffer):
    fp8 = make(buffer.group, use_fp8=True)
    to_fp8 = lambda x: x.to(torch.float8_e4m3fn)  # noqa: E731
    to_bytes = lambda x: (16 * x).to(torch.uint8)  # noqa: E731
    for n in (0, 1, 40):
        for other, quantize, scale in ((fp8, to_fp8, lambda x: x[:, :8].float().contiguous()),
                                       (fp8, to_bytes, lambda x: x[:, :3].float()),
                                       (fp8, to_bytes, lambda x: to_bytes(x[:, :5]).t().contiguous().t())):
            case = Case(other, n)
            given = {"hidden": quantize(case.x), "scaling_factor": scale(case.x)}
            rows, probs, scales, handle = case.dispatch(**given)
            same(rows, case.dense(case.of(quantize)))
            same(scales, case.dense(case.of(scale)))
            case.check_combine(handle)
            for align in (1, 16):
                rows, probs, scales, counts, handle = case.permute(pad_multiple=align, **given)
                same(rows, case.permuted(case.of(quantize), align))
                same(scales, case.permuted(case.of(scale), align))
                same(probs, case.permuted_probs(align))
                case.check_unpermute(handle, align)
                again = other.dispatch_with_permute(handle=handle, **given)
                same(again[0], rows)
                same(again[2], scales)
    for width in (8, 3, 8):  # a handle serves scales of any width
        wide = {"hidden": to_fp8(case.x), "scaling_factor": case.x[:, :width].float()}
        again = fp8.dispatch_with_permute(handle=handle, **wide)
        same(again[2], case.permuted(case.of(lambda x: x[:, :width].float()), 16))
    case = Case(buffer, 20)
    scales = case.x.float()
    rows, _, _, _, handle = case.permute(hidden=to_fp8(case.x), scaling_factor=scales, use_fp8=True)  # the call says it
    same(rows, case.permuted(case.of(to_fp8)))
    assert handle[9].token_data_type.name == "UINT8" and str(handle[9].token_data_type) == "uint8_t"
    _, _, none, _ = case.dispatch(scaling_factor=scales)
    assert none is None  # scales belong to quantized rows
    fp8.destroy()


def tensors_need_not_be_contiguous(buffer):
    case = Case(buffer, 30)
    apart = lambda t: torch.stack((t, t), dim=2)[:, :, 0]  # noqa: E731
    given = {"hidden": apart(case.x), "routing_map": apart(case.map), "probs": apart(case.probs)}
    rows, probs, _, handle = case.dispatch(**given)
    case.check_dense((rows, probs, None, handle))
    out, back = buffer.combine(apart(rows), apart(probs), handle)
    same(back, case.probs)
    close(out, case.x.double() * case.map.view(30, case.n_ranks, -1).any(dim=2).sum(dim=1, keepdim=True), 0.02)
    rows, probs, _, counts, handle = case.permute(**given)
    case.check_permuted((rows, probs, None, counts, handle))
    out, back = buffer.combine_with_unpermute(hidden=apart(rows), probs=apart(probs.unsqueeze(1))[:, 0], handle=handle)
    same(back, case.probs)
    close(out, case.x.double() * case.map.sum(dim=1, keepdim=True), 0.02)


def handles_are_used_again(buffer):
    case = Case(buffer, 40)
    handle, permuted = case.check_dense(case.dispatch()), case.check_permuted(case.permute(pad_multiple=8), 8)
    for dtype, tolerance in TYPES:
        other = Case(buffer, 40)
        other.take([(x.to(dtype) + 1, chosen, 3 * probs) for x, chosen, probs in case.all])
        # Handles may be made anew from their items, of which some lie on the host where rows are CUDA tensors.
        elsewhere = [[item if n != 3 else item.to("meta") for n, item in enumerate(one)] for one in (handle, permuted)]
        for given, back in ((handle, permuted), (list(handle), list(permuted)), elsewhere):
            *result, same_handle = buffer.dispatch(other.x, probs=other.probs, handle=given)
            assert same_handle is given
            other.check_dense((*result, handle))
            other.check_combine(given, tolerance=tolerance)
            rows, probs, _, none, _ = buffer.dispatch_with_permute(
                hidden=other.x, probs=other.probs, handle=back, pad_multiple=8)
            assert none is None
            same(rows, other.permuted(other.of(lambda x: x), 8))
            same(probs, other.permuted_probs(8))
            other.check_unpermute(back, 8, tolerance=tolerance)
            assert buffer.dispatch_with_permute(hidden=other.x, handle=back)[1] is None
    case.check_dense(case.dispatch())


def handles_serve_every_buffer_of_the_group(buffer):
    """Megatron may make a new buffer while handles of the last one wait for backward."""
    for dropped in (False, True):
        first = make(buffer.group)
        case = Case(first, 40)
        handle, permuted = case.check_dense(case.dispatch()), case.check_permuted(case.permute(pad_multiple=4), 4)
        if dropped:
            ended, case.buffer, first = first._comm, None, None
            gc.collect()
            assert ended.comm is None
        second = case.buffer = make(buffer.group)
        for _ in range(2):
            case.check_combine(handle)
            case.check_unpermute(permuted, 4)
            same(second.dispatch(case.x, handle=handle)[0], case.dense(case.of(lambda x: x)))
            again = second.dispatch_with_permute(hidden=case.x, handle=permuted)[0]
            same(again, case.permuted(case.of(lambda x: x), 4))


def number_of_rows_may_be_given(buffer):
    case = Case(buffer, 30)
    for align in (1, 8):
        n = sum(case.counts(align))
        for given in (n, torch.tensor(n), n + 3 * align):
            for non_blocking in (False, True):
                how = {"pad_multiple": align, "num_permuted_tokens": given, "non_blocking": non_blocking}
                rows, probs, none, counts, handle = case.permute(**how)
                assert rows.size(0) == probs.size(0) == int(given) and not rows[n:].any() and not probs[n:].any()
                case.check_permuted((rows[:n], probs[:n], none, counts, handle), align)
                assert handle[3].device == counts.device == (case.x.device if non_blocking else torch.device("cpu"))
                rows[n:] = float("nan")  # as padding, these rows are not read
                out, back = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
                close(out, case.x.double() * case.map.sum(dim=1, keepdim=True), 0.02)
                same(back, case.probs)
                for more, size in ((n, n), (n + 5, n + 5), (None, int(given))):
                    again = buffer.dispatch_with_permute(hidden=case.x, handle=handle, num_permuted_tokens=more)[0]
                    assert again.size(0) == size
                    same(again[:n], case.permuted(case.of(lambda x: x), align))
                case.check_unpermute(handle, align)
    few = sum(case.counts()) - 1 if buffer.rank == 1 else sum(case.counts())
    raises(ValueError, "num_permuted_tokens of rank 1 is", lambda: case.permute(num_permuted_tokens=few))
    raises(ValueError, "give as many or more", lambda: buffer.dispatch_with_permute(
        hidden=case.x, handle=handle, num_permuted_tokens=n - 1))
    case.check_permuted(case.permute())  # all ranks were refused, so the next call works


def rows_without_room_are_dropped(buffer):
    case = Case(buffer, 40)
    for align in (1, 8):
        n = sum(case.counts(align))
        starts = [sum(case.counts(align)[:e]) for e in range(case.n_local)]
        for room in (0, align, n // 2 // align * align, n - align):
            room = room if buffer.rank else n  # rank 0 drops nothing
            rows, probs, _, counts, handle = case.permute(
                pad_multiple=align, num_permuted_tokens=room, non_blocking=True)
            same(rows, case.permuted(case.of(lambda x: x), align)[:room])
            same(probs, case.permuted_probs(align)[:room])
            kept = [max(0, min(count, room - start)) for count, start in zip(case.counts(), starts)]
            assert handle[7].tolist() == kept and counts.tolist() == [-(-k // align) * align for k in kept]
            assert handle[10].tolist() == [int(sum(kept) < sum(case.counts()))]
            assert handle[3].tolist() == [handle[4].size(0)]
            again = buffer.dispatch_with_permute(
                hidden=case.x, probs=case.probs, handle=handle, num_permuted_tokens=n + 2)
            same(again[0][:room], rows)
            assert not again[0][room:].any() and not again[1][room:].any()
            # A pair that was dropped counts as zeros. Its rank says which ones those are.
            ones, _ = buffer.combine_with_unpermute(hidden=torch.ones(room, 1), handle=handle)
            out, back = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
            alive = (back > 0) | (case.map & (case.probs == 0))
            close(ones, alive.sum(dim=1, keepdim=True), 0)
            close(out, case.x.double() * alive.sum(dim=1, keepdim=True), 0.02)
            same(back, case.probs * alive)
            assert case.map[:, :case.n_local].equal(alive[:, :case.n_local])


def ranks_without_tokens(buffer):
    n = buffer.group_size
    for counts in ([0] + [20] * (n - 1), [20] + [0] * (n - 1), [0] * n):
        case = Case(buffer, counts)
        case.check_combine(case.check_dense(case.dispatch()))
        for align in (1, 16):
            case.check_unpermute(case.check_permuted(case.permute(pad_multiple=align), align), align)


def ranks_and_experts_that_receive_nothing(buffer):
    case = Case(buffer, 30, holes=False)
    for only in (slice(0, 1), slice(15, 16), slice(0, 0)):
        keep = torch.zeros(16, dtype=torch.bool)
        keep[only] = True
        case.take([(x, chosen & keep, probs * keep) for x, chosen, probs in case.all])
        case.check_combine(case.check_dense(case.dispatch()))
        case.check_unpermute(case.check_permuted(case.permute(pad_multiple=8), 8), 8)


def large_shapes(buffer):
    odd = 3 * buffer.group_size
    for hidden, n_experts, top_k in ((8192, 16, 4), (64, 1024, 8), (64, 64, 33), (7, 16, 16), (64, 128, 64),
                                     (64, odd, odd)):
        other = make(buffer.group, hidden, n_experts)
        case = Case(other, 24, hidden, n_experts, top_k)
        case.check_combine(case.check_dense(case.dispatch()))
        case.check_unpermute(case.check_permuted(case.permute(pad_multiple=16), 16), 16)
        other.destroy()
    other = make(buffer.group, 8, 128)
    case = Case(other, 5, 8, 128, 65, holes=False)
    raises(ValueError, "a token has 65 experts", case.dispatch)
    same(case.permute(routing_map=case.map & (torch.arange(128) % 2 == 0))[0][:0], case.x[:0])
    other.destroy()


def steps_of_other_sizes(buffer):
    for step, n in enumerate((10, 300, 3, 0, 129, 2000, 64)):
        case = Case(buffer, [(n + 13 * r) % 2048 for r in range(buffer.group_size)], seed=step)
        case.check_combine(case.check_dense(case.dispatch()))
        case.check_unpermute(case.check_permuted(case.permute(pad_multiple=32), 32), 32)


def steps_share_memory(buffer):
    """The first layer has room for the largest max_num_of_tokens_per_rank, and a routing serves all rows."""
    from deep_ep import _handles
    most = 100 * (1 + buffer.rank)
    other = DEEP_EP().HybridEPBuffer(buffer.group, 64, most, 16 // buffer.group_size)
    assert other.configurer.buffer_config.max_num_of_tokens_per_rank == 100 * buffer.group_size
    for n in (3, 100 * buffer.group_size, 20):
        case = Case(other, n, holes=False)
        case.check_unpermute(case.check_permuted(case.permute()))
    assert len(other._comm._layers) == 1, list(other._comm._layers)
    x8 = case.x.to(torch.float8_e4m3fn)
    handle = case.permute(hidden=x8, scaling_factor=case.x[:, :8].contiguous(), use_fp8=True)[-1]
    case.check_unpermute(handle)
    assert len(_handles._states[handle[4]].routings) == 1, "combine's rows have the routing of the quantized ones"
    other.destroy()


def experts_per_rank_may_differ_by_call(buffer):
    case = Case(buffer, 20, n_experts=8 * buffer.group_size, top_k=3)
    handle = case.check_permuted(case.permute(num_of_experts_per_rank=8))
    case.check_unpermute(handle)
    assert handle[9].num_of_experts_per_rank == 8 and handle[9].hidden_dim == 64


class Dispatch(torch.autograd.Function):
    """Dispatches, and combines the gradients, as Megatron's HybridEPDispatch does; so does Combine."""

    @staticmethod
    def forward(ctx, x, probs, buffer, how):
        rows, row_probs, _, counts, ctx.handle = buffer.dispatch_with_permute(hidden=x, probs=probs, **how)
        ctx.buffer, ctx.align = buffer, how["pad_multiple"]
        ctx.mark_non_differentiable(counts)
        return rows, row_probs, counts, ctx.handle

    @staticmethod
    def backward(ctx, grad_rows, grad_probs, *_):
        grads = ctx.buffer.combine_with_unpermute(
            hidden=grad_rows, probs=grad_probs, handle=ctx.handle, pad_multiple=ctx.align)
        return (*grads, None, None)


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, buffer, handle, n, align):
        ctx.how = {"handle": handle, "pad_multiple": align, "num_permuted_tokens": n}
        ctx.buffer = buffer
        return buffer.combine_with_unpermute(hidden=rows, handle=handle, pad_multiple=align)[0]

    @staticmethod
    def backward(ctx, grad):
        rows = ctx.buffer.dispatch_with_permute(hidden=grad, scaling_factor=None, **ctx.how)[0]
        return rows, None, None, None, None


def gradients_of_a_layer(buffer):
    """Output and gradients of a layer of experts, compared with the same layer on this rank's tokens alone."""
    if STAND_IN:
        return
    n = buffer.group_size
    shared = torch.Generator("cpu").manual_seed(5)
    weights = torch.randn((16, 12, 12), generator=shared, dtype=torch.float64, device="cpu").to(DEVICE)
    for counts in ([20 + 3 * r for r in range(n)], [0] + [15] * (n - 1)):
        for align, room in ((None, 0), (8, 0), (8, 16)):
            case = Case(buffer, counts, hidden=12, dtype=torch.float64)
            dense = [t.clone().requires_grad_() for t in (case.x, case.probs)]
            value = torch.tanh(torch.einsum("th,ehg->teg", dense[0], weights)) * (dense[1] * case.map).unsqueeze(2)
            expected = value.sum(dim=1)
            expected.backward(torch.cos(case.x))
            mine = [t.clone().requires_grad_() for t in (case.x, case.probs)]
            most = sum(case.counts(align or 1)) + room if room else None
            rows, probs, per_expert, handle = Dispatch.apply(*mine, buffer, {
                "routing_map": case.map, "pad_multiple": align, "num_permuted_tokens": most,
                "non_blocking": bool(room)})
            first, parts = 0, []
            for e, count in enumerate(per_expert.tolist()):
                here = slice(first, first + count)
                parts.append(torch.tanh(rows[here] @ weights[case.first + e]) * probs[here].unsqueeze(1))
                first += count
            out = Combine.apply(torch.cat((*parts, rows[first:] * 0)), buffer, handle,
                                None if room else per_expert.sum(), align)
            out.backward(torch.cos(case.x))
            close(out, expected, 1e-14)
            close(mine[0].grad, dense[0].grad, 1e-14)
            close(mine[1].grad, dense[1].grad, 1e-6)  # probabilities and their gradients are float32


def gradients_of_dense_rows(buffer):
    """combine is the gradient of dispatch, and dispatch that of combine."""
    case, grad = Case(buffer, 25, dtype=torch.float64), None
    rows, probs, _, handle = case.dispatch()
    grad, grad_probs = torch.sin(rows), torch.sin(probs)
    out, back = buffer.combine(grad, grad_probs, handle)
    owners = case.map.view(25, case.n_ranks, case.n_local).any(dim=2).sum(dim=1, keepdim=True)
    close(out, torch.sin(case.x) * owners, 1e-14)
    same(back, torch.sin(case.probs) * case.map)


def memory_of_results_is_used_again(buffer):
    if DEVICE != "cpu":
        return  # torch itself keeps CUDA memory
    case = Case(buffer, 300, hidden=2048, seed=3)
    case.check_permuted(reused(case.permute))


def modes_of_the_caller(buffer):
    """Calls work in inference mode and outside it, also with handles of the other; only outside it are results for
    autograd."""
    for inside in (True, False):
        with torch.inference_mode(inside):
            case = Case(buffer, 20)
            dense, permuted = case.dispatch(), case.permute(pad_multiple=4)
            parts = (*dense[:2], *permuted[:2], permuted[3], *dense[3], *permuted[4])
            tensors = [part for part in parts if isinstance(part, torch.Tensor)]
            assert all(t.is_inference() == inside for t in tensors), "a result has the mode of its call"
        for then_inside in (True, False):
            with torch.inference_mode(then_inside):
                case = Case(buffer, 20)
                case.check_combine(case.check_dense(dense))
                case.check_unpermute(case.check_permuted(permuted, 4), 4)
                again = buffer.dispatch_with_permute(hidden=case.x, probs=case.probs, handle=permuted[4])
                if not then_inside:
                    (again[0].requires_grad_() * 2).sum().backward()


def streams_wait_for_each_other(buffer):
    """Calls come after the caller's work and before its further work; inputs are recorded on the Buffer's stream,
    results on the caller's."""
    usual = buffer._stream_for
    streams, recorded = on_streams(buffer)
    own, caller = buffer._stream_for(None).stream, streams.current_stream()
    case = Case(buffer, 8)
    handles = case.dispatch()[-1], case.permute()[-1]
    rows = case.dense(case.of(lambda x: x)), case.permuted(case.of(lambda x: x))
    for number, (given, call) in enumerate((
            (case.probs, case.dispatch), (case.map, case.permute),
            (rows[0], lambda: buffer.combine(rows[0], None, handles[0])),
            (rows[1], lambda: buffer.combine_with_unpermute(hidden=rows[1], handle=handles[1])))):
        caller.after, own.after = {f"before {number}"}, {f"call {number}"}
        del recorded[:]
        result = call()
        assert f"before {number}" in own.after and f"call {number}" in caller.after
        assert (given.data_ptr(), own) in recorded and (result[0].data_ptr(), caller) in recorded
    buffer._stream_for = usual


globals().update(tests_of(cases_of(sys.modules[__name__], deep_ep_hybrid_arguments), make, late="ranks_without_tokens"))

if __name__ == "__main__":
    unittest.main()
