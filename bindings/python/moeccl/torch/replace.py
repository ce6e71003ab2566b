# SPDX-License-Identifier: Apache-2.0
"""Re-placing combine (NetMoE): combine brings samples to the rank with the fewest slow links to cross, not back to their old rank."""
import copy
import ctypes
import time
import weakref

import torch
from torch.autograd.function import once_differentiable

import moeccl
from moeccl import _abi
from ._calls import Owned, call, int32s, listed, memory, stream_of, uncompiled
from ._clock import Clock
from ._group import largest
from .functions import saved_gradients, let_go, save_for_combine


class _Timed:
    """What both kinds of steps have: a clock, which gets their time, or None."""

    def _begin(self, handle, clock, begun):
        self.handle, self.comm, self._clock, self._begun = handle, handle.comm, clock, begun
        if clock is not None:
            clock.begin(self)

    def ran(self):
        """Ends the time of the forward pass, once."""
        if self._clock is not None and self._begun is not None:
            self._clock.ran(self._begun)
        self._begun = None

    def ran_backward(self, begun):
        if self._clock is not None:
            self._clock.ran_backward(self, begun)

    def __deepcopy__(self, memo):
        return self


class Step(_Timed):
    """One step's decision: which samples are on this rank after combine. `local_samples` are numbered in the order of ranks."""

    def __init__(self, owner, replacement, handle, residual, clock, begun):
        self._owner, self._replacement, self.residual = owner, replacement, residual
        self._begin(handle, clock, begun)

    @property
    def replacement(self):
        return self._replacement.handle

    def rows(self):
        n = ctypes.c_size_t()
        call(self.comm, "moecclReplaceRows", self.replacement, ctypes.byref(n))
        return n.value

    def decide(self):
        """Waits for the solver and reads its decision."""
        info = _abi.moecclReplaceInfo_t()
        call(self.comm, "moecclReplaceGetInfo", self.replacement, ctypes.byref(info))
        self.local_samples, self.n_samples = listed(info.local_samples, info.n_local), info.n_samples
        self.moved, self.kept = info.moved, bool(info.keep)
        self.node_bytes_before, self.node_bytes_after = info.node_bytes_before, info.node_bytes_after

    def measured_us(self):
        """Returns the time of combine on this rank; 0: not known."""
        info = _abi.moecclReplaceInfo_t()
        call(self.comm, "moecclReplaceGetInfo", self.replacement, ctypes.byref(info))
        return info.measured_us

    def __del__(self):
        if hasattr(self, "_owner"):
            self._owner.append(self._replacement)


class Stayed(_Timed):
    """A step in which all samples stay, because moving them takes longer by the clock: combine is the plain one."""
    moved, kept = 0, True
    node_bytes_before = node_bytes_after = 0  # not counted

    def __init__(self, handle, sample_tokens, clock, begun):
        tokens, rank = listed(handle.info().rank_tokens, handle.comm.size), handle.comm.rank
        for r, n in enumerate(tokens):
            if n % sample_tokens:
                raise moeccl.Error(_abi.moecclInvalidArgument, f"rank {r} has {n} tokens: give a multiple of sample_tokens, {sample_tokens}")
        first = sum(tokens[:rank]) // sample_tokens
        self.local_samples, self.n_samples = list(range(first, first + tokens[rank] // sample_tokens)), sum(tokens) // sample_tokens
        self._begin(handle, clock, begun)

    def decide(self):
        """There is no solver to wait for."""

    def measured_us(self):
        return self.handle.info().measured_combine_us


class Replacing:
    """The replacements of one layer; the next step reuses those that are free.

    residual: with 1, the dispatched row is added to the sum; with 2, the caller's row for each token, which travels by itself.
    placement: with mode moecclReplaceGiven, the new home of each sample of all ranks.

    The solver's choice depends on the routing alone, not on measured times: activation checkpointing repeats a forward pass, and gradients
    belong to the homes of the first one. The layer must choose its plans by prices alone too (trials=-1), because the solver counts the
    rows of the plan. Whether its choice is used is up to the Clock. On CUDA memory, whose calls cannot be timed, and on a deterministic
    communicator, whose sums must be the same in every run, it always is."""

    def __init__(self, sample_tokens, mode, residual=1, placement=None):
        self.sample_tokens = sample_tokens
        self._mode, self._residual = mode, residual
        self._placement = None if placement is None else int32s(placement)
        self._free = weakref.WeakKeyDictionary()  # for each layer of the C interface
        self._clock = Clock()

    def __deepcopy__(self, memo):
        """A copy makes its own replacements, because its layers of the C interface are its own, and times its own steps."""
        made = memo[id(self)] = copy.copy(self)
        made._free, made._clock = weakref.WeakKeyDictionary(), Clock()
        return made

    def renew(self):
        """Takes a new communicator. A failure may have ended a step on some ranks alone, whose clocks would then count other passes."""
        self._clock = Clock()

    @uncompiled
    def begin(self, handle, tokens):
        """Sends all ranks all choices and starts the solver's thread, unless samples stay by the clock. The call is collective."""
        by_clock = self._mode == _abi.moecclReplaceSolve and not tokens.is_cuda and not handle.comm.deterministic
        if by_clock:
            self._clock.decide(handle.comm)
        clock, begun = self._clock if by_clock and torch.is_grad_enabled() else None, time.perf_counter()
        if by_clock and not self._clock.moves:
            return Stayed(handle, self.sample_tokens, clock, begun)
        free = self._free.setdefault(handle.layer, [])
        # Decided together, because a creation is collective, and when a rank's earlier steps end is up to its own garbage collector.
        if largest(handle.comm, not free):
            config = _abi.moecclReplaceConfig_t(sample_tokens=self.sample_tokens, residual=self._residual, mode=self._mode, min_gain=-1)
            free.append(Owned(handle.comm, "moecclReplaceCreate", "moecclReplaceDestroy", handle.layer.handle, ctypes.byref(config),
                              waits=True))
        step = Step(free, free.pop(), handle, self._residual, clock, begun)
        call(handle.comm, "moecclReplaceBegin", step.replacement, handle.routing, None, self._placement)
        return step


@uncompiled
def replace_combine(y, dispatched, x, weights, step):
    """Returns x + combine(y) for the tokens that are on this rank after the step."""
    if isinstance(step, Stayed):
        return StayedCombine.apply(y, x, weights, step)
    return ReplaceCombine.apply(y, dispatched, x, weights, step)


class StayedCombine(torch.autograd.Function):
    """y[R], x[T], weights[T, k] -> x + combine(y)."""

    @staticmethod
    def forward(ctx, y, x, weights, step):
        y = y.contiguous()
        out = y.new_empty((step.handle.n_tokens, y.shape[1]))
        call(step.comm, "moecclCombine", step.handle.routing, memory(y), memory(out), stream_of(out))
        step.ran()
        ctx.step = step
        save_for_combine(ctx, y, weights, ctx.needs_input_grad[2], step.handle)
        return out.add_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        (saved,) = ctx.saved_tensors
        begun = time.perf_counter()
        grad, grad_weights = saved_gradients(ctx, saved, grad_out, "moecclCombineBackward", ctx.step.handle.routing)
        ctx.step.ran_backward(begun)
        let_go(ctx)
        return grad, grad_out, grad_weights, None


class ReplaceCombine(torch.autograd.Function):
    """y[R], dispatched[R], x[T], weights[T, k] -> x + combine(y) for the tokens that are now on this rank. x has the dispatched rows,
    or, with residual 2, any rows."""

    @staticmethod
    def forward(ctx, y, dispatched, x, weights, step):
        handle = step.handle
        given = y.new_zeros((step.rows(), y.shape[1]))
        given[:handle.n_rows] = y
        x, dispatched = x.contiguous(), dispatched.contiguous()
        call(step.comm, "moecclReplaceResidual", step.replacement, memory(x), memory(dispatched), memory(given))
        out = torch.empty_like(x)
        call(step.comm, "moecclReplaceCombine", step.replacement, memory(given), memory(out), stream_of(out))
        step.decide()
        step.ran()
        ctx.step = step
        save_for_combine(ctx, given, weights, ctx.needs_input_grad[3], handle)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        (saved,) = ctx.saved_tensors
        step, handle, begun = ctx.step, ctx.handle, time.perf_counter()
        grad, grad_weights = saved_gradients(ctx, saved, grad_out, "moecclReplaceCombineBackward", step.replacement)
        grad_dispatched = grad.new_zeros((handle.n_rows, grad.shape[1])) if step.residual == 1 else None
        grad_x = grad.new_zeros((handle.n_tokens, grad.shape[1]))
        if grad_dispatched is not None:
            call(step.comm, "moecclReplaceResidualBackward", step.replacement, memory(grad), memory(grad_dispatched), None)
        call(step.comm, "moecclReplaceResidualBackward", step.replacement, memory(grad), None, memory(grad_x))
        step.ran_backward(begun)
        let_go(ctx)
        return grad[:handle.n_rows], grad_dispatched, grad_x, grad_weights, None


@uncompiled
def follow(step, tensor):
    """Returns the samples of `tensor` that are on this rank after the step: it gathers tensor[samples or tokens, ...] of all ranks and
    selects from it. It is for labels, masks and positions; no gradient flows. The call is collective."""
    rank_tokens = listed(step.handle.info().rank_tokens, step.comm.size)  # the same on all ranks, so that all of them raise
    if len(set(rank_tokens)) > 1:
        raise ValueError(f"the ranks have {rank_tokens} tokens: follow() needs as many samples on every rank: pad the smaller batches")
    rank_samples = len(step.local_samples)
    if isinstance(step, Stayed) or rank_samples == 0:
        return tensor.detach().clone()
    flat = tensor.detach().contiguous().view(rank_samples, -1)
    flat = flat.view(torch.uint8).view(rank_samples, -1)
    every = flat.new_empty((step.n_samples, flat.shape[1]))
    call(step.comm, "moecclAllGather", memory(flat), memory(every), flat.numel(), _abi.moecclUint8, step.comm.handle, None)
    return every[step.local_samples].view(-1).view(tensor.dtype).view(tensor.shape)
