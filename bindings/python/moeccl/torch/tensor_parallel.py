# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of a tensor-parallel group, with gradients."""
from typing import Any, Optional

import torch
from torch.autograd.function import once_differentiable

from moeccl import pipeline
from ._calls import uncompiled
from ._group import Group, comm_of


class _Dispatch(torch.autograd.Function):
    """x[T, hidden] and weights[T, k] or None -> what arrived, and an empty tensor for _Combine.

    arrived: rows[R, hidden] and, with weights, weights[R, k], in a list, because outputs that were inputs would be views, which experts
    could not change in place. One node for both, so that all ranks make the backward pass's exchanges in one order."""

    @staticmethod
    def forward(ctx, x, weights, step, arrived):
        ctx.step = step
        return (*arrived, torch.empty(0, device="cpu"))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        grads = list(grads)
        if len(grads) == 3:  # weights of other groups' experts arrived as 0, whatever they were
            grads[1] = grads[1].masked_fill(ctx.step.topk_index < 0, 0)
        back = [ctx.step.combine(grad.contiguous()) if needed else None for grad, needed in zip(grads[:-1], ctx.needs_input_grad)]
        return (*back, *(4 - len(back)) * [None])


class _Combine(torch.autograd.Function):
    """rows[R, width] -> y[T, width]. `link` is _Dispatch's empty tensor: a group whose result does not depend on what arrived, such as
    one that got no rows, takes part in the backward pass all the same."""

    @staticmethod
    def forward(ctx, rows, link, step):
        ctx.step = step
        return step.combine(rows.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.step.send(grad.contiguous()), grad.new_zeros(0, dtype=torch.float32), None


class TensorDispatched:
    """What tensor_dispatch() returns: rows, topk_index, topk_weights and row_counts of moeccl.pipeline.Dispatched, with gradients."""

    def __init__(self, step: pipeline.Dispatched, rows: torch.Tensor, weights: Optional[torch.Tensor], link: torch.Tensor) -> None:
        self._step, self.rows, self.topk_weights, self._link = step, rows, weights, link
        self.topk_index: torch.Tensor = step.topk_index
        self.row_counts = step.row_counts

    @uncompiled
    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """y[tokens, hidden]: for each token the sum of its rows in rows[R, hidden] of all groups. The ranks of a group give equal rows.
        The call and its backward pass are collective."""
        return _Combine.apply(rows, self._link, self._step)


@uncompiled
def tensor_dispatch(x: torch.Tensor, topk_index: torch.Tensor, n_experts: int, topk_weights: Optional[torch.Tensor] = None,
                    group: Group = None, **options: Any) -> TensorDispatched:
    """moeccl.pipeline.dispatch() with gradients of x[tokens, hidden] and topk_weights[tokens, k], for tensors on the CPU.

    group: all ranks, as for ExpertParallel; the communicator's topology says which of them are a tensor-parallel group (options such as
    topology="node:2 gpu:4"). The ranks of a group have equal tokens, and the gradients of what arrived must be equal on them, too, as
    tensor parallelism makes them. The call and its backward passes are collective, in the same order on all ranks. If x or topk_weights
    needs a gradient, a group that gets no rows takes part in them by itself; if only the experts do, what it gives to combine() has to
    depend on its experts all the same."""
    weights = None if topk_weights is None else topk_weights.detach().contiguous()
    step = pipeline.dispatch(comm_of(group, **options), x.detach().contiguous(), topk_index, n_experts, weights)
    arrived = [step.rows] if weights is None else [step.rows, step.topk_weights]
    step.rows = step.topk_weights = None  # they become the outputs below, whose graph holds the step
    *arrived, link = _Dispatch.apply(x, topk_weights, step, arrived)
    return TensorDispatched(step, arrived[0], None if weights is None else arrived[1], link)
