# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine as autograd functions. Each backward pass is a collective too, with the routing of the forward pass."""
import torch
from torch.autograd.function import once_differentiable

from ._calls import call, memory, stream_of
from ._memory import new_rows

# Whether another backward pass through the graph may follow the present one. It is a private name of torch; without it routings stay.
_graph_stays = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def let_go(ctx):
    """Frees the routing, the step of a re-placing combine, and a dispatch's flight, at the end of a backward pass that frees its graph, as
    torch does with saved tensors: a loss that is kept for a log keeps the graph's nodes. A later backward pass fails where it reads the
    saved tensors."""
    if not _graph_stays():
        ctx.handle = ctx.step = ctx.flight = None


def move_rows(handle, x):
    """x[T, hidden] -> rows[R, hidden]."""
    rows = new_rows(x, (handle.n_rows, x.shape[1]))
    call(handle.comm, "moecclDispatch", handle.routing, memory(x), memory(rows), stream_of(x))
    return rows


def move_back(handle, grad_rows):
    """The gradients of rows[R, hidden] -> those of x[T, hidden]."""
    grad_x = new_rows(grad_rows, (handle.n_tokens, grad_rows.shape[1]))
    call(handle.comm, "moecclDispatchBackward", handle.routing, memory(grad_rows), memory(grad_x), stream_of(grad_rows))
    return grad_x


def move_combined(handle, rows):
    """rows[R, hidden] -> y[T, hidden], with the routing's weights."""
    y = new_rows(rows, (handle.n_tokens, rows.shape[1]))
    call(handle.comm, "moecclCombine", handle.routing, memory(rows), memory(y), stream_of(rows))
    return y


def new_anchor():
    """Returns an input that needs a gradient and gets none. With it a function takes part in a backward pass where nothing else on this rank
    asks for it."""
    return torch.empty(0, device="cpu", requires_grad=True)


def needs_anchor(x, weights):
    """Returns whether dispatch gets a new_anchor(): if the routing's weights need a gradient and x does not, which may need one on other
    ranks, as where this one has no tokens and makes its batch itself. The weights themselves are no input of dispatch, because parameters
    before the router would then have a second way to the loss, which pipelining's split backward pass cannot follow."""
    return not x.requires_grad and torch.is_grad_enabled() and weights is not None and weights.requires_grad


class Needed(torch.autograd.Function):
    """Returns x, which needs a gradient from here on: its backward pass ends here. It is not a view, which nobody could change in place."""

    @staticmethod
    def forward(ctx, x, anchor):
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        return None, None


class Dispatch(torch.autograd.Function):
    """x[T, hidden] -> rows[R, hidden]; the backward pass is moecclDispatchBackward. anchor: see needs_anchor()."""

    @staticmethod
    def forward(ctx, x, anchor, handle):
        ctx.handle = handle
        return move_rows(handle, x.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows):
        ctx.saved_tensors  # raises torch's error if the graph has been freed
        grad_x = move_back(ctx.handle, grad_rows.contiguous())
        let_go(ctx)
        return grad_x, None, None


def save_for_combine(ctx, rows, weights, weighted, handle):
    """Keeps what the backward pass of a combine needs. Without a gradient of the weights it saves an empty tensor: a recomputation by
    torch's checkpointing begins where the first saved tensor is needed and ends with the last one, and experts may save none, or not
    be on this rank. So all ranks recompute at the same point, as far as here."""
    ctx.handle, ctx.n_rows, ctx.weighted, ctx.weight_dtype = handle, rows.shape[0], weighted, weights.dtype if weighted else None
    ctx.save_for_backward(rows if weighted else rows.new_empty(0))


def combine_gradients(handle, grad_out, rows, n_rows, function):
    """Computes the gradients of combine's n_rows rows and, if `rows` are given, of its weights in float32 on the CPU. function: the name of
    the C function and its first argument."""
    grad_rows = new_rows(grad_out, (n_rows, grad_out.shape[1]))
    weights = None
    if rows is not None:
        weights = torch.empty((max(1, handle.n_tokens), handle.layer.top_k), dtype=torch.float32, device="cpu")  # not NULL even without tokens
    call(handle.comm, *function, memory(grad_out), memory(grad_rows), memory(rows), memory(weights), stream_of(grad_out))
    return grad_rows, None if weights is None else weights[:handle.n_tokens]


def saved_gradients(ctx, saved, grad_out, *function):
    """combine_gradients() of what save_for_combine() has kept; weights get their own type."""
    grad_rows, weights = combine_gradients(ctx.handle, grad_out.contiguous(), saved if ctx.weighted else None, ctx.n_rows, function)
    return grad_rows, None if weights is None else weights.to(device=grad_out.device, dtype=ctx.weight_dtype)


class Combine(torch.autograd.Function):
    """rows[R, hidden] and the routing's weights[T, k] -> y[T, hidden]; the backward pass is moecclCombineBackward, with both gradients."""

    @staticmethod
    def forward(ctx, rows, weights, handle):
        rows = rows.contiguous()
        save_for_combine(ctx, rows, weights, ctx.needs_input_grad[1], handle)
        return move_combined(handle, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        (saved,) = ctx.saved_tensors
        grad_rows, grad_weights = saved_gradients(ctx, saved, grad_y, "moecclCombineBackward", ctx.handle.routing)
        let_go(ctx)
        return grad_rows, grad_weights, None
