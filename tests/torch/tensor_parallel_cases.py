# SPDX-License-Identifier: Apache-2.0
"""Cases of layer_test.py about dispatch and combine of a tensor-parallel group."""
import torch
import torch.distributed as dist

import moeccl.torch as mt
from layer_checkpoint_cases import refuses

EXPERTS, HIDDEN, TOKENS = 6, 12, 20


def problem(group):
    """Returns x, choices and weights, which the ranks of a group share."""
    g = torch.Generator().manual_seed(group)
    x = torch.randn((TOKENS, HIDDEN), generator=g, dtype=torch.float64).requires_grad_()
    index = torch.stack([torch.randperm(EXPERTS, generator=g)[:2] for _ in range(TOKENS)])
    index[3] = -1
    index[4, 1] = -1
    weights = torch.rand((TOKENS, 2), generator=g, dtype=torch.float64).requires_grad_()
    return x, index, weights


def experts_of(rows, index, weights, matrices):
    """Returns for each row the weighted sum of its experts, which multiply by a matrix."""
    total = torch.zeros_like(rows)
    for e in range(EXPERTS):
        factor = (weights * (index == e)).sum(1, keepdim=True)
        total = total + factor * (rows @ matrices[e])
    return total


def case_a_tensor_parallel_layer_has_the_gradients_of_a_dense_one(rank, n):
    for topology in (f"node:{n // 2} gpu:2", "node:2 gpu:1+%d" % (n - 1)):
        comm = mt.comm_of(topology=topology)
        group = rank // 2 if "+" not in topology else min(rank, 1)
        matrices = torch.randn((EXPERTS, HIDDEN, HIDDEN), generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        factor = torch.arange(TOKENS * HIDDEN, dtype=torch.float64).view(TOKENS, HIDDEN).sin()
        x, index, weights = problem(group)
        expected = experts_of(x, index, weights, matrices)
        (expected * factor).sum().backward()
        mine, _, my_weights = problem(group)
        step = mt.tensor_dispatch(mine, index, EXPERTS, my_weights, group=comm)
        assert sum(step.row_counts) == len(step.rows) and (step.topk_index >= 0).any(1).all()
        y = step.combine(experts_of(step.rows, step.topk_index, step.topk_weights, matrices))
        torch.testing.assert_close(y, expected)
        (y * factor).sum().backward()
        torch.testing.assert_close(mine.grad, x.grad)
        torch.testing.assert_close(my_weights.grad, weights.grad)


def case_ranks_of_a_tensor_parallel_group_that_differ_are_named(rank, n):
    if n < 4:
        return
    comm = mt.comm_of(topology=f"node:{n // 2} gpu:2")
    x, index, _ = problem(rank // 2)
    if rank == 1:
        index = index.clone()
        index[0] = -1
    refuses(["ranks 0 and 1 of tensor-parallel group 0"], lambda: mt.tensor_dispatch(x, index, EXPERTS, group=comm))
    if rank == 2:
        index = index.clone()
        index[0, 0] = EXPERTS
    refuses([f"give 0 to {EXPERTS - 1}" if rank == 2 else "rank 2"], lambda: mt.tensor_dispatch(x, index, EXPERTS, group=comm))
    dist.barrier()


def loop_of_experts(step, matrices):
    """Returns what a layer's usual loop over its experts makes of the rows."""
    out = torch.zeros_like(step.rows)
    for e in range(EXPERTS):
        token, place = (step.topk_index == e).nonzero(as_tuple=True)
        if len(token):
            out = out.index_add(0, token, step.topk_weights[token, place, None] * (step.rows[token] @ matrices[e]))
    return out


def case_a_group_without_rows_takes_part_in_the_backward_pass(rank, n):
    comm = mt.comm_of(topology=f"node:{n // 2} gpu:2" if n > 2 else "node:2 gpu:1")
    matrices = torch.randn((EXPERTS, HIDDEN, HIDDEN), generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    for needed in ((True, True), (True, False), (False, True)):
        x, _, weights = problem(rank // 2 if n > 2 else rank)
        x.requires_grad_(needed[0]), weights.requires_grad_(needed[1])
        index = torch.tensor([[0, -1]]).expand(TOKENS, 2).contiguous()
        step = mt.tensor_dispatch(x, index, EXPERTS, weights, group=comm)
        assert (len(step.rows) == 0) == (step.row_counts == [0, 0])
        y = step.combine(loop_of_experts(step, matrices))
        y.sum().backward()
        if needed[0]:
            torch.testing.assert_close(x.grad, weights.detach()[:, :1] * matrices[0].sum(1))
        if needed[1]:
            torch.testing.assert_close(weights.grad[:, 0], (x.detach() @ matrices[0]).sum(1))


def case_experts_may_begin_in_place_on_what_arrived(rank, n):
    comm = mt.comm_of(topology=f"node:{n // 2} gpu:2" if n > 2 else "node:2 gpu:1")
    x, index, weights = problem(rank // 2 if n > 2 else rank)
    step = mt.tensor_dispatch(x, index, EXPERTS, weights, group=comm)
    hidden = torch.nn.functional.relu(step.rows, inplace=True)
    y = step.combine(hidden * step.topk_weights.mul_(2).sum(1, keepdim=True))
    y.sum().backward()
    chosen = (index >= 0).to(x.dtype)
    expected = 2 * (weights.detach() * chosen).sum(1, keepdim=True) * (x.detach() > 0)
    torch.testing.assert_close(x.grad, expected)
    torch.testing.assert_close(weights.grad, 2 * chosen * x.detach().relu().sum(1, keepdim=True))
