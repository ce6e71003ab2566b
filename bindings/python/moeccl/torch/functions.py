# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine as autograd functions. Each backward pass is a collective too, with the routing of the forward pass."""
import torch
from torch.autograd.function import once_differentiable

from ._calls import call, memory, stream_of
from ._memory import new_rows

# Whether another backward pass through the graph may follow the present one. It is a private name of torch; without it routings stay.
_graph_stays = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def let_go(ctx):
    """Frees the routing, and a re-placing combine's step, at the end of a backward pass that frees its graph, as torch does with saved
    tensors: a loss that is kept for a log keeps the graph's nodes. A later backward pass fails where it reads the saved tensors."""
    if not _graph_stays():
        ctx.handle = ctx.step = None


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
        ctx.saved_tensors  # raises torch's error if the graph has been freed
        handle, grad_rows = ctx.handle, grad_rows.contiguous()
        grad_x = new_rows(grad_rows, (handle.n_tokens, grad_rows.shape[1]))
        call(handle.comm, "moecclDispatchBackward", handle.routing, memory(grad_rows), memory(grad_x), stream_of(grad_rows))
        let_go(ctx)
        return grad_x, None


def save_for_combine(ctx, rows, weights, weighted, handle):
    """Keeps what the backward pass of a combine needs. Without a gradient of the weights it saves an empty tensor: a recomputation by
    torch's checkpointing begins where the first saved tensor is needed and ends with the last one, and experts may save none, or not
    be on this rank. So all ranks recompute at the same point, as far as here."""
    ctx.handle, ctx.n_rows, ctx.weighted, ctx.weight_dtype = handle, rows.shape[0], weighted, weights.dtype if weighted else None
    ctx.save_for_backward(rows if weighted else rows.new_empty(0))


def combine_gradients(ctx, saved, grad_out, function, first):
    """Computes the gradients of combine's rows and, if needed, of its weights. `first` is the C function's first argument."""
    handle, grad_out = ctx.handle, grad_out.contiguous()
    grad_rows = new_rows(grad_out, (ctx.n_rows, grad_out.shape[1]))
    rows = weights = None
    if ctx.weighted:
        rows = saved
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
        save_for_combine(ctx, rows, weights, ctx.needs_input_grad[1], handle)
        y = new_rows(rows, (handle.n_tokens, rows.shape[1]))
        call(handle.comm, "moecclCombine", handle.routing, memory(rows), memory(y), stream_of(rows))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        (saved,) = ctx.saved_tensors
        grad_rows, grad_weights = combine_gradients(ctx, saved, grad_y, "moecclCombineBackward", ctx.handle.routing)
        let_go(ctx)
        return grad_rows, grad_weights, None
