# SPDX-License-Identifier: Apache-2.0
"""Which ranks hold which experts: each on one rank, in several replicas, or in expert domains. swapped.py has slots that change places."""
import copy
import ctypes
import math

import torch
from torch.autograd.function import once_differentiable

from moeccl import _abi, _library
from ._calls import Owned, as_int32, call, dtype_of, int32s, int32s_of, is_whole, listed, memory, numbers_of, uncompiled
from ._group import beside, largest
from ._levels import levels_of
from .gradient import Remainders

# By how many units in the last place of a tensor's largest element replicas may differ, by the bits of the type. A fused CPU optimizer
# rounds elements otherwise in a vector than in the rest at a tensor's end: 3000 steps of AdamW on 263 elements came to 3 in float32
# parameters, 12 in their moments and 0 in bfloat16, which it computes in float32.
_ULPS = {16: 4, 32: 64, 64: 64}


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


class Replicated(Fixed):
    """Adaptive replication: popular experts occupy several slots. Gradients are summed over replicas inside the backward pass;
    rebalance() computes a new placement of the replicas from the choices of the last steps' tokens."""
    moves = True

    def __init__(self, n_experts, comm, slots_per_rank, n_nodes):
        super().__init__(n_experts, comm)
        self.per_rank, self.n_nodes, self._slot_capacity = slots_per_rank, n_nodes, 0
        self.n_slots = slots_per_rank * comm.size
        if self.n_slots < n_experts:
            raise ValueError(f"replica_slots is {slots_per_rank}: {comm.size} ranks then have {self.n_slots} slots for {n_experts} "
                             f"experts: give at least {-(-n_experts // comm.size)}")
        alike = torch.ones(n_experts, dtype=torch.float64, device="cpu")
        counts = torch.empty(n_experts, dtype=torch.int32, device="cpu")
        call(None, "moecclReplicaCounts", memory(alike), n_experts, self.n_slots, memory(counts))
        self._demand = torch.zeros(n_experts, dtype=torch.int64, device="cpu")
        self._place(torch.repeat_interleave(torch.arange(n_experts, dtype=torch.int32, device="cpu"), counts))

    @property
    def slot_expert(self):
        """The expert in each slot of all ranks, a copy. Setting it, on all ranks alike and before load_state_dict(), moves no weights."""
        return self._slot_expert.clone()

    @slot_expert.setter
    def slot_expert(self, given):
        given = numbers_of("slot_expert", given, self.n_slots, self.n_experts)
        absent = sorted(set(range(self.n_experts)) - set(given.tolist()))
        if absent:
            raise ValueError(f"slot_expert has no slot for the experts {absent}: give each at least one")
        self._place(given)

    def _place(self, slot_expert):
        """Takes an int32 CPU tensor of its own."""
        self._slot_expert = slot_expert
        self.placement = _abi.moecclPlacement_t(n_experts=self.n_experts, slots_per_rank=self.per_rank)
        self.placement.slot_expert = int32s_of(self._slot_expert)
        seen, first = set(), self.comm.rank * self.per_rank
        self._counted = []  # this rank's slots that are the first of their expert
        for slot, expert in enumerate(slot_expert.tolist()):
            if expert not in seen and first <= slot < first + self.per_rank:
                self._counted.append(slot - first)
            seen.add(expert)

    def __deepcopy__(self, memo):
        made = memo[id(self)] = copy.copy(self)
        made._demand = self._demand.clone()
        made._place(self.slot_expert)
        return made

    def owners(self):
        return [s // self.per_rank for s in range(self.n_slots)]

    def numbers(self, local_slots):
        return [int(self._slot_expert[s]) for s in local_slots]

    def counted(self):
        return self._counted

    def same_as(self, other):
        return isinstance(other, Replicated) and self._slot_expert.equal(other._slot_expert)

    def follow(self, other):
        """Takes another layer's placement, of which this one's is a copy."""
        self._place(other.slot_expert)
        self._demand.zero_()

    def limit(self, choices):
        """A slot takes its share of the choices from all ranks together, and no rank more than that."""
        self._slot_capacity = max(1, math.ceil(choices * self.comm.size / self.n_slots))
        return self._slot_capacity

    @uncompiled
    def slots(self, index):
        """Shares each expert's tokens among its replicas, to within one: the rank's own first, then those of its node. The call is
        collective."""
        if index.dim() != 2 or not is_whole(index):
            return index  # which dispatch refuses
        experts = as_int32(index.detach()).cpu().contiguous()
        chosen = experts >= 0
        how = _abi.moecclReplicaDispatch_t(top_k=experts.shape[1], slot_capacity=self._slot_capacity)
        how.placement, slots = ctypes.pointer(self.placement), torch.empty_like(experts)
        call(self.comm, "moecclChooseReplicas", ctypes.byref(how), memory(experts), experts.shape[0], memory(slots), None, None,
             self.comm.handle)
        if torch.is_grad_enabled():
            self._demand += torch.bincount(experts[chosen], minlength=self.n_experts)
        self.dropped = int((chosen & (slots < 0)).sum())
        return slots.to(index.device)

    def reduce(self, grad):
        grad, total = grad.contiguous(), torch.empty_like(grad)
        call(self.comm, "moecclExpertAllReduce", memory(grad), memory(total), grad[0].numel(), dtype_of(grad), _abi.moecclSum,
             ctypes.byref(self.placement), self.comm.handle, None)
        return total

    def checksums(self, experts):
        """Returns the sum of the bits of each parameter, for each slot."""
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return [p.detach().reshape(self.per_rank, -1).contiguous().view(bits[p.element_size()]).sum(1, dtype=torch.int64).tolist()
                for p in experts.stacked()]

    def drift(self, sums, tensors):
        experts = self._slot_expert.tolist()
        bits = [[of_parameter[mine] for of_parameter in of_rank] for of_rank in sums for mine in range(self.per_rank)]
        if all(bits[slot] == bits[experts.index(expert)] for slot, expert in enumerate(experts)):
            return None
        # All ranks have the same sums, so all of them come here.
        slot = largest(self.comm, max([self._last_apart(t) for t in tensors]))
        if slot < 0:
            for tensor in tensors:
                tensor.copy_(self._firsts(tensor))
            return None
        first = experts.index(experts[slot])
        return (f"the replicas of expert {experts[slot]} on ranks {first // self.per_rank} and {slot // self.per_rank} have drifted apart: "
                "replicas need an optimizer that treats each element by itself (SGD, Adam), not one that scales by the norm of a rank's "
                "experts (Adafactor); load_full_state_dict(model, full_state_dict(model)) makes them equal again")

    def _firsts(self, tensor):
        """Returns for each slot what the first replica of its expert has in tensor[slots, ...]. The call is collective."""
        alone = torch.zeros_like(tensor)
        alone[self._counted] = tensor[self._counted]
        return self.reduce(alone)

    def _last_apart(self, tensor):
        """Returns this rank's last slot whose replica in tensor[slots, ...] differs by more than rounding from the first of its expert; -1:
        none. The call is collective."""
        first = self._firsts(tensor)
        if not tensor.is_floating_point():
            return -1
        kind = torch.finfo(tensor.dtype)
        largest_value = float(first.nan_to_num(0, 0, 0).abs().max())
        close = torch.isclose(tensor, first, rtol=0, atol=_ULPS[kind.bits] * kind.eps * largest_value, equal_nan=True)
        apart = (~close).reshape(self.per_rank, -1).any(1).nonzero()
        return self.comm.rank * self.per_rank + int(apart.max()) if apart.numel() else -1

    def rebalance(self, tensors, layer):
        size = self.comm.size
        demand = torch.empty((size, self.n_experts), dtype=torch.int64, device="cpu")
        self.comm.all_gather(layer.over_data_groups(self._demand), demand)
        if not demand.any():
            return 0
        demand = (demand // (1 + int(demand.max()) // 2**31)).to(torch.int32)  # the solver's words have 32 bits
        problem = _abi.moecclReplicaProblem_t(n_experts=self.n_experts, n_ranks=size, slots_per_rank=self.per_rank)
        problem.demand = int32s_of(demand)
        if self.n_nodes is None:
            problem.n_nodes, rank_node = levels_of(self.comm).nodes()
            problem.rank_node = int32s_of(rank_node)
        else:
            problem.n_nodes = self.n_nodes
        slot_expert, answer = torch.empty(self.n_slots, dtype=torch.int32, device="cpu"), _abi.moecclReplicaAnswer_t()
        call(None, "moecclSolveReplicas", ctypes.byref(problem), memory(slot_expert), ctypes.byref(answer))
        slot_expert = layer.of_the_first(slot_expert)
        moved = int((slot_expert != self._slot_expert).sum())
        if moved:
            before, kept = self.placement, self._slot_expert  # `before` points into `kept`
            self._place(slot_expert)
            for tensor in tensors:
                self._move(tensor, before)
            del kept
        self._demand.zero_()
        return moved

    def _move(self, tensor, before):
        """Moves tensor[slots, ...] from one placement to the next: cuts it into a shard for each rank and reassembles it."""
        held = tensor.contiguous()
        count = held[0].numel()
        shards = torch.empty((self.n_experts, _library.lib.moecclExpertShard(count, self.comm.size)), dtype=tensor.dtype, device=tensor.device)
        tail = (count, dtype_of(held))
        call(self.comm, "moecclCollectGradients", memory(held), memory(shards), *tail, ctypes.byref(before), self.comm.handle, None)
        call(self.comm, "moecclPlaceWeights", memory(shards), memory(held), *tail, ctypes.byref(self.placement), self.comm.handle, None)
        if held is not tensor:
            tensor.copy_(held)


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
