# SPDX-License-Identifier: Apache-2.0
"""Operators by which torch.compile takes dispatch and combine into its graph (docs/decisions/163-compiled-moe.md).

A graph holds tensors and numbers only. A layer is a Key in it, and a step's routing a ticket: an int64 tensor whose memory owns the Handle,
so a routing lives as long as the tensors of the graph that refer to it. Every operator that sends anything has an ordered effect: torch keeps
all of them, in the order of the program, and does not repeat them."""
import copy
import ctypes
import functools
import itertools
import warnings
import weakref

import torch

from moeccl._c10d.base import VERSION
from .aux_loss import loss_gradient
from .float8 import move_scaled
from .functions import combine_gradients, move_back, move_combined, move_rows, needs_anchor, new_anchor

LEAST_TORCH = (2, 15)  # effects of operators in backward passes, which activation checkpointing keeps from repeating
_numbers = itertools.count(1)
_owners = weakref.WeakValueDictionary()  # of Keys: what routes a step
_tickets = weakref.WeakValueDictionary()  # of routings that a graph still needs


def tracing():
    """Returns whether torch.compile traces the caller into a graph that can have the operators."""
    return KNOWN and torch.compiler.is_dynamo_compiling()


def refuse_export():
    """Raises an error where torch.export takes the caller into a program."""
    # torch 2.4 to 2.6 lack it, and the compiler of torch 2.9 takes it for true.
    known = VERSION >= (2, 12) or not torch.compiler.is_dynamo_compiling()
    if known and getattr(torch.compiler, "is_exporting", bool)():
        raise RuntimeError("torch.export cannot take a MoE layer, which needs the communicator of this process: call torch.compile instead, or "
                           "export what is before and after the layer")


class Key:
    """Names an object with traced_route(index, weights, dtype, loss), which returns a Handle and a type for dispatch or None. It is a tensor,
    because torch.compile would make a graph of its own for each number. A copy of the object makes a Key of its own."""

    def __init__(self, owner):
        number = next(_numbers)
        self.tensor, self._owner = torch.tensor([number], device="cpu"), weakref.ref(owner)
        self.anchor = new_anchor()  # for graphs, which cannot make one
        _owners[number] = owner

    def __deepcopy__(self, memo):
        return Key(copy.deepcopy(self._owner(), memo))


class _Ticket(ctypes.c_int64 * 1):
    """The memory of a ticket's tensor."""


def _ticket_for(handle, kind):
    number = next(_numbers)
    memory = _Ticket(number)
    memory.handle, memory.kind = handle, kind
    _tickets[number] = memory
    return torch.frombuffer(memory, dtype=torch.int64)  # whose storage refers to `memory`


def _held_by(ticket):
    memory = _tickets.get(int(ticket))
    if memory is None:
        raise RuntimeError(f"the routing of ticket {int(ticket)} has gone: it lives in the memory of the ticket that dispatch returned, and this "
                           "is a copy. If hooks for saved tensors copy them, let int64 tensors on the CPU pass as they are")
    return memory


def n_routings() -> int:
    """Returns how many routings graphs of torch.compile still need."""
    return len(_tickets)


def _size():
    """Returns a size that is known only when the graph runs. Without fullgraph=True torch.library's own function ends the graph here, unless
    the program sets capture_dynamic_output_shape_ops."""
    context, allocate = torch.library.get_ctx(), getattr(torch._library.fake_impl, "allocate_size", None)
    return context.new_dynamic_size() if allocate is None else allocate(context._shape_env)


@functools.cache
def _keep_whole():
    """Keeps DistributedDataParallel from splitting a graph with the operators where its buckets of gradients end: torch 2.15 cannot run the
    parts of a graph with effects. Tracing calls it, because importing torch's splitter imports the compiler. The splitter of the graph that
    is being traced exists already, so it is a function that it calls which changes: a bucket without outputs goes on past its end."""
    try:
        from torch._dynamo.backends import distributed as splitter
        has_output = splitter.bucket_has_external_output
    except (ImportError, AttributeError):  # the names are torch's own
        if torch._dynamo.config.optimize_ddp:
            warnings.warn(f"DistributedDataParallel may split the graph of a MoE layer, whose parts torch cannot run, because this torch "
                          f"({torch.__version__}) lacks what MoECCL changes to prevent that: set torch._dynamo.config.optimize_ddp = False")
        return

    def bucket_has_external_output(bucket):
        nodes = (node for m in bucket.nodes[0].graph.owning_module.modules() if isinstance(m, torch.fx.GraphModule) for node in m.graph.nodes)
        return not any(str(node.target).startswith("moeccl.moe_") for node in nodes) and has_output(bucket)

    splitter.bucket_has_external_output = bucket_has_external_output


def _owner_of(key):
    owner = _owners.get(int(key))
    if owner is None:
        raise RuntimeError("the layer of this compiled graph has gone: keep the module as long as what torch.compile made of it")
    return owner


def _route(key, index, weights, like, loss):
    return _ticket_for(*_owner_of(key).traced_route(index, weights, like.dtype, loss))


def _counts(ticket, n):
    counts = _held_by(ticket).handle.rows_per_expert
    if len(counts) != n:
        raise RuntimeError(f"the graph was made for {n} experts on this rank, and there are {len(counts)}: call torch.compiler.reset()")
    return list(counts)


def _dispatch(x, anchor, ticket, n_rows):
    held = _held_by(ticket)
    x = x.contiguous()
    return move_rows(held.handle, x) if held.kind is None else move_scaled(held.handle, x, held.kind)


def _dispatch_backward(grad_rows, ticket, n_tokens):
    return move_back(_held_by(ticket).handle, grad_rows.contiguous())


def _combine(rows, weights, ticket, n_tokens):
    return move_combined(_held_by(ticket).handle, rows.contiguous())


def _combine_backward(grad_y, rows, weights, ticket, n_rows):
    handle = _held_by(ticket).handle
    grad_rows, grad_weights = combine_gradients(handle, grad_y.contiguous(), None if rows is None else rows.contiguous(), n_rows,
                                                ("moecclCombineBackward", handle.routing))
    return grad_rows, grad_y.new_empty(0) if rows is None else grad_weights.to(device=weights.device, dtype=weights.dtype)


def _define():
    """Registers the operators. Returns torch's library, which keeps them registered."""
    lib = torch.library.Library("moeccl", "FRAGMENT")

    def add(name, schema, run, shapes, effect=True):
        lib.define(f"{name}{schema}", tags=(torch.Tag.cudagraph_unsafe,))  # what they do is not in a CUDA graph's record
        lib.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"moeccl::{name}", shapes, lib=lib)
        if effect:
            lib._register_effectful_op(f"moeccl::{name}", torch._library.effects.EffectType.ORDERED)

    def ticket_of(key, index, weights, like, loss):
        _keep_whole()
        return torch.empty(1, dtype=torch.int64, device="cpu")

    add("moe_route", "(Tensor key, Tensor index, Tensor? weights, Tensor like, Tensor? loss) -> Tensor", _route, ticket_of)
    # It moves nothing, but if checkpointing repeated it, the sizes in the backward pass would be other numbers to torch.
    add("moe_counts", "(Tensor ticket, int n) -> SymInt[]", _counts, lambda ticket, n: [_size() for _ in range(n)])
    add("moe_dispatch", "(Tensor x, Tensor? anchor, Tensor ticket, SymInt n_rows) -> Tensor", _dispatch,
        lambda x, anchor, ticket, n_rows: x.new_empty((n_rows, x.shape[1])))
    add("moe_dispatch_backward", "(Tensor grad_rows, Tensor ticket, SymInt n_tokens) -> Tensor", _dispatch_backward,
        lambda grad_rows, ticket, n_tokens: grad_rows.new_empty((n_tokens, grad_rows.shape[1])))
    add("moe_combine", "(Tensor rows, Tensor? weights, Tensor ticket, SymInt n_tokens) -> Tensor", _combine,
        lambda rows, weights, ticket, n_tokens: rows.new_empty((n_tokens, rows.shape[1])))
    add("moe_combine_backward", "(Tensor grad_y, Tensor? rows, Tensor? weights, Tensor ticket, SymInt n_rows) -> (Tensor, Tensor)",
        _combine_backward, lambda grad_y, rows, weights, ticket, n_rows: (grad_y.new_empty((n_rows, grad_y.shape[1])),
                                                                          grad_y.new_empty(0) if rows is None else weights.new_empty(weights.shape)))
    add("moe_sum_gradients", "(Tensor[] gradients, Tensor key) -> Tensor[]", lambda gradients, key: _owner_of(key).summed(gradients),
        lambda gradients, key: [torch.empty_like(g, memory_format=torch.contiguous_format) for g in gradients])
    # It takes grad_y, so that torch cannot run it before the backward pass, when the scale may be another one.
    add("moe_loss_gradient", "(Tensor grad_y, Tensor loss) -> Tensor", lambda grad_y, loss: loss_gradient(loss),
        lambda grad_y, loss: loss.new_empty(loss.shape), effect=False)

    def keep_dispatch(ctx, inputs, output):
        x, _, ticket, _ = inputs
        ctx.save_for_backward(ticket)
        ctx.n_tokens = x.shape[0]

    def dispatch_backward(ctx, grad_rows):
        (ticket,) = ctx.saved_tensors
        return torch.ops.moeccl.moe_dispatch_backward(grad_rows, ticket, ctx.n_tokens), None, None, None

    def keep_combine(ctx, inputs, output):
        rows, weights, ticket, _ = inputs
        ctx.n_rows, ctx.weighted = rows.shape[0], weights is not None and ctx.needs_input_grad[1]
        ctx.save_for_backward(*((ticket, rows, weights) if ctx.weighted else (ticket,)))

    def combine_backward(ctx, grad_y):
        ticket, *both = ctx.saved_tensors
        rows, weights = both if ctx.weighted else (None, None)
        grad_rows, grad_weights = torch.ops.moeccl.moe_combine_backward(grad_y, rows, weights, ticket, ctx.n_rows)
        return grad_rows, grad_weights if ctx.weighted else None, None, None

    torch.library.register_autograd("moeccl::moe_dispatch", dispatch_backward, setup_context=keep_dispatch, lib=lib)
    torch.library.register_autograd("moeccl::moe_combine", combine_backward, setup_context=keep_combine, lib=lib)
    return lib


try:
    _library = _define() if VERSION >= LEAST_TORCH else None
except (AttributeError, TypeError, RuntimeError) as e:  # a later torch has other names for effects
    warnings.warn(f"torch.compile breaks its graphs at MoECCL's layers, because this torch ({torch.__version__}) refuses their operators: {e}")
    _library = None
KNOWN = _library is not None  # whether this torch can trace the operators


class TracedHandle:
    """What a dispatch in a graph of torch.compile returns in place of a Handle. Its numbers are known when the graph runs."""

    def __init__(self, ticket, rows_per_expert, n_tokens, dtype, weights):
        self.ticket, self.rows_per_expert, self.n_tokens, self.dtype, self.weights = ticket, rows_per_expert, n_tokens, dtype, weights

    @property
    def n_rows(self):
        return sum(self.rows_per_expert)


def dispatch(key, n_slots, x, index, weights, loss):
    """Routes and moves rows; returns rows[R, hidden] and a TracedHandle. loss: the balancing loss or None, for the layer to show."""
    ops = torch.ops.moeccl
    ticket = ops.moe_route(key.tensor, index, *(None if t is None else t.detach() for t in (weights, x, loss)))
    counts = ops.moe_counts(ticket, n_slots) if n_slots else []
    anchor = key.anchor if needs_anchor(x, weights) else None
    return ops.moe_dispatch(x, anchor, ticket, sum(counts)), TracedHandle(ticket, counts, x.shape[0], x.dtype, weights)


def combine(rows, handle):
    return torch.ops.moeccl.moe_combine(rows, handle.weights, handle.ticket, handle.n_tokens)


class AttachLoss(torch.autograd.Function):
    """aux_loss.py's _Attach in a graph, where it copies y, mostly as part of another operation."""

    @staticmethod
    def forward(ctx, y, loss):
        ctx.save_for_backward(loss)
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        (loss,) = ctx.saved_tensors
        return grad, torch.ops.moeccl.moe_loss_gradient(grad, loss)


class Finish(torch.autograd.Function):
    """layer.py's _Finish in a graph, which cannot call the layer."""

    @staticmethod
    def forward(ctx, key, divisor, summed, *weights):
        ctx.save_for_backward(key)
        ctx.divisor, ctx.summed = divisor, summed
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    def backward(ctx, *grads):
        (key,) = ctx.saved_tensors
        if ctx.summed:
            grads = torch.ops.moeccl.moe_sum_gradients(list(grads), key)
        return None, None, None, *(g if ctx.divisor is None else g / ctx.divisor for g in grads)
