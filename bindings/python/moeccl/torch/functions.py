# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine as autograd functions. Each backward pass is a collective too, with the routing of the forward pass."""
import torch
from torch.autograd.function import once_differentiable

from ._calls import call, memory, stream_of
from ._memory import new_rows


class Dispatch(torch.autograd.Function):
    """x[T, hidden] -> rows[R, hidden]; the backward pass is moecclDispatchBackward."""

    @staticmethod
    def forward(ctx, x, handle):
        x = x.contiguous()
        ctx.handle = handle
        rows = new_rows(x, (handle.n_rows, x.shape[1]))
        call(handle.comm, "moecclDispatch", handle.routing, memory(x), memory(rows), stream_of(x))
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows):
        handle, grad_rows = ctx.handle, grad_rows.contiguous()
        grad_x = new_rows(grad_rows, (handle.n_tokens, grad_rows.shape[1]))
        call(handle.comm, "moecclDispatchBackward", handle.routing, memory(grad_rows), memory(grad_x), stream_of(grad_rows))
        return grad_x, None


def combine_gradients(ctx, grad_out, function, n_rows, first):
    """Computes the gradients of combine's rows and, if needed, of its weights. `first` is the C function's first argument."""
    handle, grad_out = ctx.handle, grad_out.contiguous()
    grad_rows = new_rows(grad_out, (n_rows, grad_out.shape[1]))
    rows = weights = None
    if ctx.weighted:
        (rows,) = ctx.saved_tensors
        weights = torch.empty((max(1, handle.n_tokens), handle.layer.top_k), dtype=torch.float32)  # not NULL even without tokens
    call(handle.comm, function, first, memory(grad_out), memory(grad_rows), memory(rows), memory(weights),
         stream_of(grad_out))
    if weights is not None:
        weights = weights[:handle.n_tokens].to(device=grad_out.device, dtype=ctx.weight_dtype)
    return grad_rows, weights


class Combine(torch.autograd.Function):
    """rows[R, hidden] and the routing's weights[T, k] -> y[T, hidden]; the backward pass is moecclCombineBackward, with both gradients."""

    @staticmethod
    def forward(ctx, rows, weights, handle):
        rows = rows.contiguous()
        ctx.handle, ctx.weighted = handle, ctx.needs_input_grad[1]
        if ctx.weighted:
            ctx.save_for_backward(rows)
            ctx.weight_dtype = weights.dtype
        y = new_rows(rows, (handle.n_tokens, rows.shape[1]))
        call(handle.comm, "moecclCombine", handle.routing, memory(rows), memory(y), stream_of(rows))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        grad_rows, grad_weights = combine_gradients(ctx, grad_y, "moecclCombineBackward", ctx.handle.n_rows, ctx.handle.routing)
        return grad_rows, grad_weights, None
