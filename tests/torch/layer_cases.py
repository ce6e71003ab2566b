# SPDX-License-Identifier: Apache-2.0
"""Cases of layer_test.py: each is a function of (rank, number of ranks) that every rank runs."""
import functools
import unittest

import torch
import torch.distributed as dist

import moeccl
import moeccl.torch as mt
from moeccl._c10d.base import VERSION  # torch's, as in (2, 15)
from moeccl.torch import ExpertParallel
from moeccl.torch.float8 import dequantize, quantize

HIDDEN = 24


def needs(version, what):
    """Skips the case where torch is older than `version`, which brought `what`."""
    if VERSION < version:
        raise unittest.SkipTest(f"needs torch {version[0]}.{version[1]} for {what}, this is {torch.__version__}")


def gathered(tensor):
    """Returns the tensors of all ranks, by rank; their shapes may differ."""
    got = [None] * dist.get_world_size()
    dist.all_gather_object(got, tensor.detach())
    return got


def routing_of(rank, tokens, n_experts, top_k, holes=False):
    g = torch.Generator().manual_seed(100 + rank)
    index = torch.stack([torch.randperm(n_experts, generator=g)[:top_k] for _ in range(tokens)]) if tokens else \
        torch.zeros((0, top_k), dtype=torch.int64)
    if holes and tokens:
        index[torch.rand(index.shape, generator=g) < 0.2] = -1
    return index, torch.rand((tokens, top_k), generator=g)


def dense(x, index, weights, matrices):
    """y[t] = sum over k of weight * tanh(x[t] @ M[expert])."""
    y = torch.zeros_like(x)
    for k in range(index.shape[1]):
        e = index[:, k]
        part = torch.tanh(torch.einsum("th,thi->ti", x, matrices[e.clamp(min=0)]))
        y = y + torch.where((e >= 0)[:, None], part * weights[:, k:k + 1].to(x.dtype), torch.zeros_like(part))
    return y


def compare_with_dense(ep, tokens, dtype, tolerance, holes=False, rounds=2, sent=lambda x: x):
    """Compares the values, and the gradients of tokens, weights and experts, of a forward and backward through `ep`. `sent` returns tokens
    as the experts get them."""
    rank = ep.rank
    g = torch.Generator().manual_seed(7)
    matrices = (torch.randn((ep.n_experts, ep.hidden, ep.hidden), generator=g) / ep.hidden**0.5).to(dtype)
    for step in range(rounds):
        g = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn((tokens, ep.hidden), generator=g).to(dtype).requires_grad_()
        index, weights = routing_of(rank + 50 * step, tokens, ep.n_experts, ep.top_k, holes)
        weights.requires_grad_()
        target = torch.randn((tokens, ep.hidden), generator=g).to(dtype)
        own = matrices[ep.local_experts].clone().requires_grad_()
        rows, counts, handle = ep.dispatch(x, index, weights)
        assert handle.local_experts == ep.local_experts and sum(counts) == rows.shape[0]
        out = torch.cat([torch.tanh(part @ m) for part, m in zip(rows.split(counts), own)]) if counts else rows
        y = ep.combine(out, handle)
        (y * target).sum().backward()

        xs, idx, ws, ts = gathered(x), gathered(index), gathered(weights), gathered(target)
        dense_x = torch.cat([sent(t) for t in xs]).requires_grad_()
        dense_w = torch.cat(ws).requires_grad_()
        dense_m = matrices.clone().requires_grad_()
        expected = dense(dense_x, torch.cat(idx), dense_w, dense_m)
        (expected * torch.cat(ts)).sum().backward()
        begin = sum(t.shape[0] for t in xs[:rank])
        mine = slice(begin, begin + tokens)
        near = dict(rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(y, expected[mine], **near)
        torch.testing.assert_close(x.grad, dense_x.grad[mine], **near)
        # The dot products for the weights' gradients are computed and sent in fp32.
        torch.testing.assert_close(weights.grad, dense_w.grad[mine].to(weights.grad.dtype), rtol=max(tolerance, 1e-5), atol=max(tolerance, 1e-5))
        scale = 1 if dtype not in (torch.bfloat16, torch.float16) else 4  # sums over tokens of all ranks
        if ep.local_experts:
            torch.testing.assert_close(own.grad, dense_m.grad[ep.local_experts], rtol=scale * tolerance,
                                       atol=scale * tolerance)


def case_float64_matches_dense(rank, n):
    ep = ExpertParallel(2 * n, 3, HIDDEN, max_tokens=40)
    compare_with_dense(ep, 40 - 3 * rank, torch.float64, 1e-10)


def case_float32_with_choices_left_empty(rank, n):
    ep = ExpertParallel(2 * n + 1, 2, HIDDEN, max_tokens=40)
    compare_with_dense(ep, 37 + rank, torch.float32, 2e-5, holes=True)


def case_results_of_functional_collectives(rank, n):
    """They stand for a tensor that they wait for at its first use, and have no memory of their own."""
    import torch.distributed._functional_collectives as fc
    ep = ExpertParallel(2 * n, 2, HIDDEN, max_tokens=9)
    index, weights = routing_of(0, 9, 2 * n, 2)
    x, same_index, same_weights = (fc.all_reduce(t, op, dist.group.WORLD) for t, op in (
        (torch.ones(9, HIDDEN), "sum"), (index.to(torch.int32), "max"), (weights, "max")))
    rows, _, handle = ep.dispatch(x, same_index, same_weights)
    torch.testing.assert_close(rows, torch.full_like(rows, float(n)))
    torch.testing.assert_close(ep.combine(rows, handle), n * weights.sum(1, keepdim=True).expand(9, HIDDEN))
    needs((2, 5), "torch.distributed.tensor")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    spread = DTensor.from_local(torch.ones(9, HIDDEN), init_device_mesh("cpu", (n,)), [Replicate()])
    try:
        ep.dispatch(spread, index, weights)
    except TypeError as refused:
        assert "DTensor" in str(refused) and "to_local" in str(refused), refused
    else:
        raise AssertionError("a DTensor was dispatched")


def case_bfloat16_and_float16(rank, n):
    for dtype, tolerance in ((torch.bfloat16, 6e-2), (torch.float16, 1e-2)):
        compare_with_dense(ExpertParallel(2 * n, 2, HIDDEN, max_tokens=33), 33, dtype, tolerance)


def case_rows_travel_in_8_bits(rank, n):
    # One block, exact: the largest element becomes 448, which is 1.75 * 2^8, and the spacing of 8 bits is an eighth at least.
    steps = torch.tensor([[448.0, -1.75, 0.0, 2.0**-9]])
    rows, scales = quantize(steps, torch.float8_e4m3fn)
    assert scales.tolist() == [[1.0]] and rows.float().tolist() == steps.tolist(), (rows, scales)
    for hidden, dtype, tolerance in ((24, torch.float32, 1e-5), (200, torch.bfloat16, 0.05), (256, torch.float64, 1e-6)):
        for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
            ep = ExpertParallel(3 * n, 2, hidden, max_tokens=20, align_rows=4, dispatch_dtype=kind)
            tokens = 9 + 2 * rank if rank < 3 else 0
            compare_with_dense(ep, tokens, dtype, tolerance, holes=True, sent=lambda x: dequantize(*quantize(x, kind), x.dtype))
    x = torch.randn((50, 300), generator=torch.Generator().manual_seed(1)) * torch.logspace(-8, 8, 50)[:, None]
    x[3] = 0
    for kind, share in ((torch.float8_e4m3fn, 1 / 16), (torch.float8_e5m2, 1 / 8)):
        back = dequantize(*quantize(x, kind), x.dtype)
        assert ((back - x).abs() <= share * x.abs() + 2e-5 * x.abs().amax(-1, keepdim=True)).all()


def case_a_rank_without_tokens(rank, n):
    ep = ExpertParallel(2 * n, 2, HIDDEN, max_tokens=20)
    compare_with_dense(ep, 0 if rank == 0 else 20, torch.float32, 2e-5)
    compare_with_dense(ep, 20 if rank == 0 else 0, torch.float32, 2e-5)
    compare_with_dense(ep, 0, torch.float32, 2e-5)


def case_top_k_of_16_and_many_experts(rank, n):
    compare_with_dense(ExpertParallel(32, 16, HIDDEN, max_tokens=15), 15, torch.float32, 5e-5)
    compare_with_dense(ExpertParallel(640, 20, 8, max_tokens=9), 9, torch.float32, 5e-5, rounds=1)


def case_a_rank_without_experts_and_owners_in_any_order(rank, n):
    owners = [(e % (n - 1)) + 1 for e in range(2 * n)]
    compare_with_dense(ExpertParallel(2 * n, 2, HIDDEN, max_tokens=21, expert_rank=owners), 21, torch.float32, 2e-5)


def case_alignment_pads_with_zeros(rank, n):
    ep = ExpertParallel(2 * n, 2, HIDDEN, max_tokens=30, align_rows=8)
    compare_with_dense(ep, 30, torch.float32, 2e-5)
    index, weights = routing_of(rank, 30, ep.n_experts, 2)
    rows, counts, handle = ep.dispatch(torch.ones((30, HIDDEN)), index, weights)
    assert all(c % 8 == 0 for c in counts)
    for part, real in zip(rows.split(counts), handle.tokens_per_expert):
        assert part[:real].eq(1).all() and part[real:].eq(0).all()


def case_capacity_drops_are_counted(rank, n):
    ep = ExpertParallel(n, 1, HIDDEN, max_tokens=10, capacity=4)
    x = torch.ones((10, HIDDEN), requires_grad=True)
    weights = torch.ones((10, 1), requires_grad=True)
    rows, counts, handle = ep.dispatch(x, torch.zeros((10, 1), dtype=torch.int64), weights)
    assert handle.n_dropped == 6 and sum(counts) == (4 * n if rank == 0 else 0)
    y = ep.combine(2 * rows, handle)
    y.sum().backward()
    assert y[:4].eq(2).all() and y[4:].eq(0).all()
    assert x.grad[:4].eq(2).all() and x.grad[4:].eq(0).all()
    assert weights.grad[:4].eq(2 * HIDDEN).all() and weights.grad[4:].eq(0).all()


def case_several_steps_are_alive_at_once(rank, n):
    """Micro-batches: several forwards before the first backward, each with its own routing."""
    ep = ExpertParallel(2 * n, 2, HIDDEN, max_tokens=16)
    kept = []
    for step in range(3):
        x = torch.randn((16, HIDDEN), dtype=torch.float64, requires_grad=True)
        index, weights = routing_of(rank + 10 * step, 16, 2 * n, 2)
        rows, _, handle = ep.dispatch(x, index, weights)
        kept.append((x, weights, ep.combine(rows, handle)))
    del handle, rows
    for x, weights, y in kept:
        torch.testing.assert_close(y, x * weights.sum(1, keepdim=True), rtol=1e-6, atol=1e-6)
        y.sum().backward()
        torch.testing.assert_close(x.grad, weights.sum(1, keepdim=True).double().expand_as(x), rtol=1e-6, atol=1e-6)
    del y
    kept.clear()
    assert len(ep.layer(torch.float64)._free) == 3  # the next steps reuse their memory


def case_gradcheck(rank, n):
    """torch's own numerical check of float64 tokens, on every rank at once because each evaluation is collective."""
    ep = ExpertParallel(n, 2, 4, max_tokens=3)
    index, weights = routing_of(rank, 3, n, 2)

    def through(x):
        rows, _, handle = ep.dispatch(x, index, weights)
        return ep.combine(rows * rows, handle)

    x = torch.randn((3, 4), dtype=torch.float64, requires_grad=True)
    # Each rank perturbs only its own tokens, and its rows depend on these alone.
    assert torch.autograd.gradcheck(through, (x,), eps=1e-6, atol=1e-7)


def case_wrong_arguments_are_named(rank, n):
    ep = ExpertParallel(2 * n, 2, HIDDEN, max_tokens=8)
    layer = functools.partial(mt.MoELayer, n_experts=2 * n, top_k=2)
    index, weights = routing_of(rank, 8, 2 * n, 2)
    for wrong, said in ((lambda: layer("8", ffn=4), "hidden is '8': give a whole number from 1"),
                        (lambda: layer(0, ffn=4), "hidden is 0: give"),
                        (lambda: layer(8, ffn=4.5), "ffn is 4.5: give"),
                        (lambda: layer(8, ffn=4, domains=n), f"domains is {n}: give the size of a domain at each level"),
                        (lambda: layer(8, ffn=4, domains="all"), "domains is 'all': give"),
                        (lambda: layer(8, ffn=4)([1.0] * 8), "x is a list: give a tensor [..., 8]"),
                        (lambda: ep.dispatch(torch.zeros((8, 3)), index, weights), "x has shape (8, 3)"),
                        (lambda: ep.dispatch(torch.zeros((8, HIDDEN)), index[:, :1], weights), "topk_idx has shape (8, 1)"),
                        (lambda: ep.dispatch(torch.zeros((8, HIDDEN)), weights, weights), "topk_idx holds torch.float32"),
                        (lambda: ep.dispatch(torch.zeros((8, HIDDEN), dtype=torch.int64), index), "x holds torch.int64"),
                        (lambda: ExpertParallel(4, 5, 8), "top_k is 5"),
                        (lambda: ExpertParallel(4, 2, 0), "hidden is 0"),
                        (lambda: ExpertParallel(4, 2, 8, group="world"), "group is a str")):
        try:
            wrong()
        except (ValueError, TypeError) as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"nothing was said of {said}")
    try:  # an error that only the library finds fails on all ranks, and the layer keeps working
        ep.dispatch(torch.zeros((8, HIDDEN)), torch.full((8, 2), 99), weights)
    except moeccl.Error as error:
        assert "99" in str(error) or "rank" in str(error), error
    else:
        raise AssertionError("expert 99 was taken")


def case_max_tokens_is_agreed(rank, n):
    ep = ExpertParallel(2 * n, 2, HIDDEN)
    compare_with_dense(ep, 5 + rank, torch.float32, 2e-5)
    assert ep.max_tokens == 4 + n


def case_a_subgroup(rank, n):
    half = dist.new_group(list(range(n // 2)))
    if rank < n // 2:
        ep = ExpertParallel(4, 2, HIDDEN, group=half, max_tokens=4)
        assert ep.size == n // 2 and ep.rank == rank
        x = torch.ones((4, HIDDEN))
        rows, _, handle = ep.dispatch(x, torch.tensor([[0, 3]] * 4))
        assert ep.combine(rows, handle).eq(2).all()
        mt.close(half)
    dist.barrier()
