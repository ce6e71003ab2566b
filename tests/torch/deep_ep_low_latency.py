# SPDX-License-Identifier: Apache-2.0
"""Cases of deep_ep_test.py about the low-latency calls."""
import torch

from deep_ep_support import DEEP_EP, DEVICE, Case, close, raises, same


def on_host(inputs):
    """Returns all ranks' inputs as CPU tensors: what a test looks at one by one costs a wait for the device each time."""
    return [tuple(t.cpu() for t in each) for each in inputs]


def back_from_fp8(rows, scales):
    if scales.dtype == torch.int32:
        scales = (scales.contiguous().view(torch.uint8).to(torch.int32) << 23).view(torch.float32)
    groups = rows.float().view(*rows.shape[:-1], -1, 128) * scales.unsqueeze(-1)
    return groups.view(rows.shape).bfloat16()


def low_latency(buffer, counts, hidden, n_experts, top_k, hook=False, asynchronous=False, **kinds):
    """Compares one dispatch and combine with the reference, with room for 64 tokens of each rank."""
    case, most = Case(buffer, counts, hidden, n_experts, top_k), 64
    n, n_local = buffer.group_size, n_experts // buffer.group_size
    stats = torch.ones(n_local, dtype=torch.int32)
    later = {"return_recv_hook": hook, "async_finish": asynchronous}

    def wait(event, hooked):
        hooked() if hook else event.current_stream_wait() if asynchronous else None

    recv, count, handle, event, hooked = buffer.low_latency_dispatch(
        case.x, case.idx, most, n_experts, cumulative_local_expert_recv_stats=stats, **kinds, **later)
    wait(event, hooked)
    rows = back_from_fp8(*recv) if kinds["use_fp8"] else recv
    assert rows.shape == (n_local, n * most, hidden) and count.dtype == torch.int32
    same(stats, count + 1)
    (found, counts, sources, layout), every = (t.cpu() for t in (rows, count, *handle[:2])), on_host(case.all)
    for local in range(n_local):
        at = 0
        for source, (x, idx, _) in enumerate(every):
            tokens = (idx == buffer.rank * n_local + local).any(1).nonzero()[:, 0]
            packed = layout[local, source].item()
            assert (packed >> 32, packed & 0xffffffff) == (at, len(tokens)), f"{packed >> 32} {packed & 0xffffffff} {at} {len(tokens)}"
            same(sources[local, at:at + len(tokens)], tokens.int())
            close(found[local, at:at + len(tokens)], x[tokens], 0.07 if kinds["use_fp8"] else 0)
            at += len(tokens)
        assert counts[local] == at
    weighted = torch.where(case.idx >= 0, case.weights, 0.0).sum(1, keepdim=True) * case.x.float()
    out, event, hooked = buffer.low_latency_combine(rows, case.idx, case.weights, handle, **later)
    wait(event, hooked)
    close(out, weighted, 0.08 if kinds["use_fp8"] else 0.02)
    return case, rows, handle, weighted


def low_latency_in_every_form(buffer):
    for number, kinds in enumerate(({"use_fp8": False}, {"use_fp8": True}, {"use_fp8": True, "round_scale": True},
                                    {"use_fp8": True, "round_scale": True, "use_ue8m0": True})):
        for hook, asynchronous in ((False, False), (True, False), (False, True)):
            low_latency(buffer, [20 + r for r in range(buffer.group_size)], 1024, 16, 4, hook, asynchronous, **kinds)


def low_latency_with_odd_shapes(buffer):
    n = buffer.group_size
    for use_fp8 in (False, True):
        for counts, hidden, n_experts, top_k in (
                ([0] + [20] * (n - 1), 128, 16, 4), ([0] * n, 128, 16, 4), (64, 128, 16, 12), (3, 8192, 16, 4), (9, 128, 1024, 8)):
            low_latency(buffer, counts, hidden, n_experts, top_k, use_fp8=use_fp8)


def low_latency_combine_options(buffer):
    case, rows, handle, weighted = low_latency(buffer, 16, 128, 16, 4, use_fp8=False)
    out = torch.full_like(case.x, float("nan"))
    got, _, _ = buffer.low_latency_combine(rows, case.idx, case.weights, handle, out=out, use_logfmt=True)
    assert got is out
    close(out, weighted, 0.02)
    buffer.get_next_low_latency_combine_buffer(handle)[:] = rows * 2
    close(buffer.low_latency_combine(rows, case.idx, case.weights, handle, zero_copy=True)[0], 2 * weighted, 0.02)
    fewer = case.idx.clone()
    fewer[:, 1] = -1
    part = torch.where(fewer >= 0, case.weights, 0.0).sum(1, keepdim=True) * case.x.float()
    close(buffer.low_latency_combine(rows, fewer, case.weights, handle)[0], part, 0.02)
    other = case.idx.clone()
    other[5] = (case.idx[5] + 1).clamp(min=1) % 16
    raises(ValueError, "topk_idx[5][0] is", lambda: buffer.low_latency_combine(rows, other, case.weights, handle))
    close(buffer.low_latency_combine(rows, case.idx, case.weights, list(handle))[0], weighted, 0.02)
    wrong = case.check(case.dispatch())
    raises(TypeError, "handle is a tuple", lambda: buffer.low_latency_combine(rows, case.idx, case.weights, wrong))


def tokens_may_name_an_expert_twice(buffer):
    """As routers that draw with replacement do: the token goes there once, with the sum of the weights."""
    case, most = Case(buffer, 24, 128), 24
    for _, idx, _ in case.all:
        idx[1::2, 2] = idx[1::2, 0]
        idx[2::4, 1:] = idx[2::4, :1]
    n_local = 16 // buffer.group_size
    for how in ({}, {"return_recv_hook": True}, {"async_finish": True}):
        wait = lambda event, hook: hook() if hook else event.current_stream_wait() if how else None  # noqa: B023, E731
        rows, count, handle, *later = buffer.low_latency_dispatch(case.x, case.idx, most, 16, use_fp8=False, **how)
        wait(*later)
        same(count, torch.stack([sum((i == buffer.rank * n_local + e).any(1).sum() for _, i, _ in case.all)
                                 for e in range(n_local)]).int())
        scale = torch.arange(1, n_local + 1).view(-1, 1, 1) + buffer.rank * n_local
        fewer = case.idx.clone()
        fewer[:, 0] = -1
        for idx in (case.idx, fewer):
            factor = torch.where(idx >= 0, case.weights * (idx + 1), 0.0).sum(1, keepdim=True)
            out, *later = buffer.low_latency_combine((rows * scale).bfloat16(), idx, case.weights, handle, **how)
            wait(*later)
            close(out, factor * case.x.float(), 0.03)


def rows_in_nvfp4(buffer):
    """Numbers and scales are where DeepEP has them. Choices among 32 experts, of which one takes all tokens, so that it has several tiles."""
    n, most, hidden, n_experts = buffer.group_size, 80, 192, 32
    case, n_local = Case(buffer, [most - r for r in range(n)], hidden, n_experts, holes=False), n_experts // n
    for x, idx, _ in case.all:
        idx[:, 1:][idx[:, 1:] == 5] = -1
        idx[:, 0] = 5
        x[::3] *= 100
        x[1] = 0
    scale = torch.tensor([448 * 6 / max(x.abs().max().item() for x, _, _ in case.all)])
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cpu")
    for how in ({}, {"return_recv_hook": True}, {"async_finish": True}):
        (rows, scales), count, handle, event, hook = buffer.low_latency_dispatch(
            case.x, case.idx, most, n_experts, use_fp8=False, use_nvfp4=True, x_global_scale=scale, **how)
        hook() if hook is not None else event.current_stream_wait() if how else None
        assert rows.shape == (n * most, hidden // 2, n_local) and rows.dtype == torch.uint8 and rows.permute(2, 0, 1).is_contiguous()
        assert scales.shape == (32, 4, -(-n * most // 128), 4, hidden // 64, n_local) and scales.permute(5, 2, 4, 0, 1, 3).is_contiguous()
        assert scales.dtype == torch.float8_e4m3fn
        found, every = torch.zeros((n_local, n * most, hidden), device="cpu"), on_host(case.all)
        rows, scales, count, factor = (t.cpu() for t in (rows, scales.float(), count, scale))
        for local in range(n_local):
            tokens = [(source, token) for source, (_, idx, _) in enumerate(every)
                      for token in (idx == buffer.rank * n_local + local).any(1).nonzero()[:, 0].tolist()]
            assert count[local] == len(tokens)
            for row, (source, token) in enumerate(tokens):
                codes = torch.stack([rows[row, :, local] & 15, rows[row, :, local] >> 4], dim=1).view(-1).long()
                at = scales[row % 32, row % 128 // 32, row // 128, :, :, local].t().reshape(-1) / factor
                found[local, row] = torch.where(codes > 7, -1, 1) * numbers[codes % 8] * at.repeat_interleave(16)
                x = every[source][0][token].float().view(-1, 16)
                same(at * factor, (factor * x.abs().amax(1) / 6).to(torch.float8_e4m3fn).float())
                left = (found[local, row].view(-1, 16) - x).abs()
                assert (left <= 1.001 * at.view(-1, 1) + 0.07 * x.abs()).all(), "each element is the nearest of those with its scale"
        assert found.abs().max() > 50
        out, event, hook = buffer.low_latency_combine(found.bfloat16().to(DEVICE), case.idx, case.weights, handle, **how)
        hook() if hook is not None else event.current_stream_wait() if how else None
        expected = torch.where(case.idx >= 0, case.weights, 0.0).sum(1, keepdim=True) * case.x.float()
        assert (out.float() - expected).norm() < 0.12 * expected.norm()
    for kind, words, given in (
            (ValueError, "use_fp8 is True and use_nvfp4 True", {"use_fp8": True, "x_global_scale": scale}),
            (TypeError, "x_global_scale is a NoneType", {}), (TypeError, "x_global_scale is torch.float64 [1]", {"x_global_scale": scale.double()}),
            (ValueError, "x_global_scale is torch.float32 [2]", {"x_global_scale": torch.ones(2)}),
            (NotImplementedError, "use_ue8m0_for_sf is True", {"x_global_scale": scale, "use_ue8m0_for_sf": True}),
            (ValueError, "use_nvfp4 needs a multiple of 64", {"x_global_scale": scale, "x": case.x[:, :96].contiguous()})):
        raises(kind, words, lambda: buffer.low_latency_dispatch(
            given.get("x", case.x), case.idx, most, n_experts, use_nvfp4=True,
            **{"use_fp8": False, **{name: value for name, value in given.items() if name != "x"}}))


def nvfp4_goes_to_the_nearest_number(buffer):
    """A token whose largest element is 6 has a scale of 1 with x_global_scale 1. What lies in the middle goes to the even number."""
    x = torch.zeros((1, 64), dtype=torch.bfloat16)
    x[0, :16] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -5, 0.26, 0.24, 5.125, -6, 1.5])
    idx = torch.full((1, 1), buffer.rank * 16 // buffer.group_size)
    (rows, scales), *_ = buffer.low_latency_dispatch(x, idx, 4, 16, use_fp8=False, use_nvfp4=True, x_global_scale=torch.tensor(1.0))
    codes = torch.stack([rows[0, :8, 0] & 15, rows[0, :8, 0] >> 4], dim=1).view(-1)
    same(codes, torch.tensor([7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 14, 1, 0, 7, 15, 3], dtype=torch.uint8))
    assert scales[0, 0, 0, :, 0, 0].tolist() == [1, 0, 0, 0]


def low_latency_inputs_may_be_used_again(buffer):
    """With a hook at once, with zero_copy in turns, and the choices in any case."""
    case = Case(buffer, 64, 2048, holes=False)
    x, idx, weights = case.x.clone(), case.idx.to(torch.int32), case.weights.clone()
    rows, _, handle, _, hook = buffer.low_latency_dispatch(x, idx, 64, 16, use_fp8=False, return_recv_hook=True)
    x.zero_()
    hook()
    saved = rows.clone()
    out, _, hook = buffer.low_latency_combine(rows, idx, weights, handle, return_recv_hook=True)
    rows.zero_(), weights.zero_()
    hook()
    close(out, case.weights.sum(1, keepdim=True) * case.x.float(), 0.02)
    first = buffer.get_next_low_latency_combine_buffer(handle)
    first[:] = saved
    out, event, _ = buffer.low_latency_combine(first, idx, case.weights, handle, zero_copy=True, async_finish=True)
    buffer.get_next_low_latency_combine_buffer(handle).zero_()
    event.current_stream_wait()
    close(out, case.weights.sum(1, keepdim=True) * case.x.float(), 0.02)
    idx[:, 1:] = -1
    out, _, _ = buffer.low_latency_combine(saved, idx, case.weights, handle)
    close(out, case.weights[:, :1] * case.x.float(), 0.02)


def low_latency_has_two_buffers(buffer):
    case = Case(buffer, 16, 128)
    call = lambda x: buffer.low_latency_dispatch(x, case.idx, 16, 16, use_fp8=False)[0]  # noqa: E731
    first, second = call(case.x), call(case.x * 2)
    assert first.data_ptr() != second.data_ptr()
    kept = first.clone()
    assert torch.equal(kept, first) and call(case.x * 3).data_ptr() == first.data_ptr()
    buffer.clean_low_latency_buffer(16, 128, 16)
    call(case.x)


def low_latency_needs_its_mode(buffer):
    plain = DEEP_EP().Buffer(buffer.group, explicitly_destroy=True)
    case = Case(plain, 4)
    raises(RuntimeError, "low_latency_mode=True", lambda: plain.low_latency_dispatch(case.x, case.idx, 4, 16))
    case.check_combine(case.check(case.dispatch()))
    plain.destroy()
    raises(RuntimeError, "was destroyed", lambda: case.dispatch())
