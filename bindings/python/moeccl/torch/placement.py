# SPDX-License-Identifier: Apache-2.0
"""Which ranks hold which experts: each on one rank, or in expert domains. swapped.py and replicated.py have those that rebalance() moves."""
import copy
import ctypes
import math

import torch
from torch.autograd.function import once_differentiable

from moeccl import _abi
from ._calls import Owned, call, dtype_of, int32s, listed, memory, uncompiled
from ._group import beside
from .gradient import Remainders


class Fixed:
    """Each expert stays on one rank."""
    hybrid = None
    moves = False  # whether rebalance() may change what is in a slot
    dropped = 0  # choices of the last slots() for which capacity left none

    def __init__(self, n_experts, comm):
        self.n_experts, self.comm, self.n_slots = n_experts, comm, n_experts

    def owners(self):
        """Returns the rank of each slot; None: contiguous, as even as possible."""
        return None

    def numbers(self, local_slots):
        """Returns the experts that are now in this rank's slots."""
        return local_slots

    def counted(self):
        """Returns the indices of this rank's slots whose experts a sum over all ranks counts here; None: all."""
        return None

    def slots(self, index):
        """Returns the slots of the chosen experts index[T, k]."""
        return index

    def routed(self, index, handle):
        """Takes what slots() got when dispatch has accepted it."""

    def passed(self, layer):
        """Takes the layer's last forward pass, whose rows have all moved, before the next one begins."""

    def reduce(self, grad):
        """Returns the gradient [slots, ...] of a parameter, summed over all slots that hold the same expert."""
        return grad

    def begin(self, experts):
        """Starts to move experts. Called before the step's routing."""

    def weights(self, parameters):
        """Returns what to run the experts with; parameters: those of the slots."""
        return parameters

    def limit(self, choices):
        """Takes capacity_factor times the most choices of a rank. Returns the most tokens that a rank may send to a slot."""
        return max(1, math.ceil(choices / self.n_experts))

    def checksums(self, experts):
        """Returns what drift() compares of this rank, as JSON has it."""

    def drift(self, sums, tensors):
        """Takes the checksums() of all ranks and all tensors [slots, ...]. Makes replicas that differ by rounding equal; returns a sentence
        about ones that differ by more, or None. The call is collective."""

    def rebalance(self, tensors, layer):
        """Moves experts between steps, with all tensors [slots, ...], and returns how many slots have changed. layer: the MoELayer, with
        which all expert-parallel groups with the same experts decide alike. The call is collective."""
        return 0


class Hybrid(Fixed):
    """HybridEP: experts travel inside an expert domain, tokens between domains. The gather of a step's experts runs on a thread of the
    library and a separate communicator, in parallel with the router and dispatch. With `ratio` above 1, experts travel as their largest
    differences from a shared expert. The backward pass brings the gradients of held experts to their owners, with `gradient_ratio` above 1
    compressed.

    domains: the size at each level, or a dictionary of moecclHybridConfig_t's figures from which the library chooses the sizes."""

    def __init__(self, n_experts, comm, domains, ratio, gradient_ratio=1):
        super().__init__(n_experts, comm)
        self.remainders = Remainders(self, gradient_ratio) if gradient_ratio != 1 else None
        self.ratio, self._migration, self._shared = float(ratio), None, None
        self._begun = None  # wait()'s arguments for a gather that nothing has waited for
        self.experts_comm = beside(comm)
        if isinstance(domains, dict):
            config = _abi.moecclHybridConfig_t(n_experts=n_experts, compression=self.ratio, gradient_ratio=float(gradient_ratio), **domains)
        else:
            config = _abi.moecclHybridConfig_t(n_experts=n_experts, n_levels=len(domains))
            sizes = int32s(domains)
            config.domain = sizes
        self._owned = Owned(comm, "moecclHybridCreate", "moecclHybridDestroy", comm.handle, ctypes.byref(config))
        self.hybrid = self._owned.handle
        info = _abi.moecclHybridInfo_t()
        call(comm, "moecclHybridGetInfo", self.hybrid, ctypes.byref(info))
        self.domains = list(info.domain[:info.n_levels])
        self.own, self.held = listed(info.own_experts, info.n_own), listed(info.held_experts, info.n_held)

    def __deepcopy__(self, memo):
        """A copy has its own queue of experts, made at its first step."""
        made = memo[id(self)] = copy.copy(self)
        made._migration, made._shared, made._begun = None, None, None
        made.remainders = copy.deepcopy(self.remainders, memo)
        return made

    def numbers(self, local_slots):
        return self.own

    @uncompiled
    def begin(self, experts):
        self._discard()
        parameters = [p.detach() for p in experts.stacked()]
        types = {p.dtype for p in parameters}
        if len(types) > 1:
            raise TypeError(f"an expert's parameters hold {' and '.join(sorted(map(str, types)))}: with domains they travel as one type")
        flat = flatten(parameters)
        count, kind = flat.shape[1], dtype_of(flat)
        made_for = (count, kind, flat.device)
        if self._migration is None or self._made_for != made_for:
            self._made_for = made_for
            config = _abi.moecclMigrationConfig_t(count=count, type=kind, ratio=self.ratio)
            self._migration = Owned(self.comm, "moecclMigrationCreate", "moecclMigrationDestroy", self.hybrid,
                                    self.experts_comm.handle, ctypes.byref(config))
        if self.ratio != 1:
            self._shared = flat.new_empty(count)
            call(self.comm, "moecclSharedExpert", memory(flat), flat.shape[0], self.n_experts, memory(self._shared), count, kind,
                 self.comm.handle, None)
        call(self.comm, "moecclMigrationSend", self._migration.handle, 0, memory(flat), memory(self._shared), None)
        call(self.experts_comm, "moecclMigrationBegin", self._migration.handle, 0)
        self._begun = flat.new_empty(0), count

    def _discard(self):
        """Ends the gather of a forward pass that failed before it used the experts; the next wait would get them."""
        if self._begun is not None:
            self.wait(*self._begun)

    @uncompiled
    def weights(self, parameters):
        return Held.apply(self, *parameters)

    def wait(self, like, count):
        """Waits for the gather and returns the experts of this rank's domain, [held, count]."""
        held = like.new_empty((len(self.held), count))
        self._begun = None
        call(self.experts_comm, "moecclMigrationWait", self._migration.handle, 0, memory(self._shared), memory(held), None)
        return held

    def sum_at_owners(self, grad):
        """Returns [own, count]: for each own expert, the sum of the gradients [held, count] of all ranks that hold it."""
        if self.remainders is not None:
            return self.remainders.sum_at_owners(grad)
        own = grad.new_empty((len(self.own), grad.shape[1]))
        call(self.comm, "moecclHybridReduce", self.hybrid, memory(grad), memory(own), grad.shape[1], dtype_of(grad), None)
        return own


def flatten(tensors):
    """Joins tensors [n, ...] into one tensor [n, elements of all]."""
    return torch.cat([t.reshape(t.shape[0], t.shape[1:].numel()) for t in tensors], dim=1).contiguous()


def unflatten(flat, shapes):
    """Splits a flat tensor back into tensors [n, *shape], without a copy."""
    sizes = [shape.numel() for shape in shapes]
    return [part.view(flat.shape[0], *shape) for part, shape in zip(flat.split(sizes, dim=1), shapes)]


class Held(torch.autograd.Function):
    """own experts -> the experts of this rank's domain. The backward pass is moecclHybridReduce and treats the codec as exact."""

    @staticmethod
    def forward(ctx, holder, *own):
        ctx.holder, ctx.shapes = holder, [p.shape[1:] for p in own]
        return tuple(unflatten(holder.wait(own[0], sum(s.numel() for s in ctx.shapes)), ctx.shapes))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return None, *unflatten(ctx.holder.sum_at_owners(flatten(grads)), ctx.shapes)
