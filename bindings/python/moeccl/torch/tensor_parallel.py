# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of a tensor-parallel group, with gradients."""
from typing import Any, Optional

import torch
from torch.autograd.function import once_differentiable

from moeccl import pipeline
from ._calls import uncompiled
from ._group import Group, comm_of


class _Send(torch.autograd.Function):
    """x[T, width] -> rows[R, width]; `arrived` has the rows if they have been sent already."""

    @staticmethod
    def forward(ctx, x, step, arrived):
        ctx.step = step
        return arrived.view_as(arrived)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.step.combine(grad.contiguous()), None, None


class _Combine(torch.autograd.Function):
    """rows[R, width] -> y[T, width]."""

    @staticmethod
    def forward(ctx, rows, step):
        ctx.step = step
        return step.combine(rows.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.step.send(grad.contiguous()), None


class TensorDispatched:
    """What tensor_dispatch() returns: rows, topk_index, topk_weights and row_counts of moeccl.pipeline.Dispatched, with gradients."""

    def __init__(self, step: pipeline.Dispatched, rows: torch.Tensor, weights: Optional[torch.Tensor]) -> None:
        self._step, self.rows, self.topk_weights = step, rows, weights
        self.topk_index: torch.Tensor = step.topk_index
        self.row_counts = step.row_counts

    @uncompiled
    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """y[tokens, hidden]: for each token the sum of its rows in rows[R, hidden] of all groups. The ranks of a group give equal rows.
        The call and its backward pass are collective."""
        return _Combine.apply(rows, self._step)


@uncompiled
def tensor_dispatch(x: torch.Tensor, topk_index: torch.Tensor, n_experts: int, topk_weights: Optional[torch.Tensor] = None,
                    group: Group = None, **options: Any) -> TensorDispatched:
    """moeccl.pipeline.dispatch() with gradients of x[tokens, hidden] and topk_weights[tokens, k], for tensors on the CPU.

    group: all ranks, as for ExpertParallel; the communicator's topology says which of them are a tensor-parallel group (options such as
    topology="node:2 gpu:4"). The ranks of a group have equal tokens, and the gradients of what arrived must be equal on them, too, as
    tensor parallelism makes them. The call and its backward passes are collective, in the same order on all ranks."""
    weights = None if topk_weights is None else topk_weights.detach().contiguous()
    step = pipeline.dispatch(comm_of(group, **options), x.detach().contiguous(), topk_index, n_experts, weights)
    rows = _Send.apply(x, step, step.rows)
    return TensorDispatched(step, rows, None if weights is None else _Send.apply(topk_weights, step, step.topk_weights))
