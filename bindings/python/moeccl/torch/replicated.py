# SPDX-License-Identifier: Apache-2.0
"""Adaptive replication: popular experts on several ranks."""
import copy
import ctypes
import math
import time

import torch

from moeccl import _abi, _library
from ._calls import as_int32, call, dtype_of, int32s_of, is_whole, memory, numbers_of, uncompiled
from ._group import largest
from ._levels import levels_of
from .priced import Priced

# By how many units in the last place of a tensor's largest element replicas may differ, by the bits of the type. A fused CPU optimizer
# rounds elements otherwise in a vector than in the rest at a tensor's end: 3000 steps of AdamW on 263 elements came to 3 in float32
# parameters, 12 in their moments and 0 in bfloat16, which it computes in float32.
_ULPS = {16: 4, 32: 64, 64: 64}
_US_PER_CROSSING, _US_PER_TOKEN = 0.04096, 0.1  # of a token that enters or leaves a node, and that a rank computes: the solver's defaults
_LEAST_FEWER = 0.01  # of all choices: so many more that capacity does not drop are worth a move at any price


class Replicated(Priced):
    """Adaptive replication: popular experts occupy several slots. Gradients are summed over replicas inside the backward pass;
    rebalance() computes a new placement of the replicas from the choices of the last steps' tokens, and takes it if it saves more time in
    `horizon` passes than moving the experts takes, and more than it would by chance, or if fewer tokens are then dropped for capacity.

    gain: share of the traffic and computation of the tokens since the rebalance() before, by the solver's prices, that the placement
    would save which the last one computed."""

    def __init__(self, n_experts, comm, slots_per_rank, n_nodes, horizon):
        super().__init__(n_experts, comm, horizon)
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
        made._timed, made._demand = None, self._demand.clone()
        made._took_us = list(self._took_us)
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
        self._forget()

    def _forget(self):
        super()._forget()
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
        wanted = self._solve(layer, sum(t.numel() * t.element_size() for t in tensors))
        self._forget()
        moved = int((wanted != self._slot_expert).sum())
        if moved == 0:
            self._stayed()
            return 0
        before, kept, begun = self.placement, self._slot_expert, time.perf_counter()  # `before` points into `kept`
        self._place(wanted)
        for tensor in tensors:
            self._move(tensor, before)
        del kept
        self._own_move_us = 1e6 * (time.perf_counter() - begun)
        return moved

    def _solve(self, layer, n_bytes):
        """Returns the placement to take, the same on all ranks; the present one if no other pays."""
        self.passed(layer)
        demand = torch.empty((self.comm.size, self.n_experts), dtype=torch.int64, device="cpu")
        self.comm.all_gather(layer.over_data_groups(self._demand), demand)
        (passes,) = self._joined([self._n_passes / self.comm.size], layer)
        if not demand.any():
            return self._slot_expert
        scale = 1 + int(demand.max()) // 2**31  # the solver's words have 32 bits
        scaled, (n_nodes, node) = (demand // scale).to(torch.int32), self._nodes()
        problem = _abi.moecclReplicaProblem_t(n_experts=self.n_experts, n_ranks=self.comm.size, slots_per_rank=self.per_rank, n_nodes=n_nodes,
                                             beta_inter_us=_US_PER_CROSSING, compute_us=_US_PER_TOKEN)
        problem.demand, problem.rank_node = int32s_of(scaled), int32s_of(node)
        solved, answer = torch.empty(self.n_slots, dtype=torch.int32, device="cpu"), _abi.moecclReplicaAnswer_t()
        call(None, "moecclSolveReplicas", ctypes.byref(problem), memory(solved), ctypes.byref(answer))
        solved = self._kept_in_place(solved)
        # The answer's own gain is over contiguous placement, not over the present one.
        now_us, then_us = (self._predicted_us(problem, node, placed) for placed in (self._slot_expert, solved))
        self.gain = 1 - then_us / now_us
        fewer = self._dropped(demand.sum(0), passes, self._slot_expert) - self._dropped(demand.sum(0), passes, solved)
        # A placement made for these tokens gains by chance what an expert's share differs from one time to the next.
        pays = self.gain > math.sqrt(self.n_experts / int(demand.sum())) and self._pays(now_us * scale / max(1, passes), n_bytes)
        if not pays and fewer <= _LEAST_FEWER * int(demand.sum()):
            solved = self._slot_expert.clone()
        return layer.of_the_first(solved)

    def _nodes(self):
        """Returns how many nodes there are, and the node of each rank."""
        if self.n_nodes is None:
            return levels_of(self.comm).nodes()
        return self.n_nodes, torch.arange(self.comm.size, dtype=torch.int32, device="cpu") * self.n_nodes // self.comm.size

    def _kept_in_place(self, wanted):
        """Returns a placement with the same experts on each rank, where those that the rank has already keep their slots."""
        placed = []
        for now, then in zip(self._slot_expert.view(-1, self.per_rank).tolist(), wanted.view(-1, self.per_rank).tolist()):
            row = []
            for expert in now:
                row.append(expert if expert in then else None)
                if expert in then:
                    then.remove(expert)
            placed += [then.pop(0) if expert is None else expert for expert in row]
        return torch.tensor(placed, dtype=torch.int32, device="cpu")

    def _predicted_us(self, problem, node, slot_expert):
        """Returns the time of the demand's tokens by the solver's prices: the busiest node's traffic and the fullest rank."""
        split = torch.empty((self.n_slots, self.comm.size), dtype=torch.int32, device="cpu")
        call(None, "moecclReplicaSplit", ctypes.byref(problem), memory(slot_expert), memory(split))
        owner = node.repeat_interleave(self.per_rank)
        crossing = split * (owner[:, None] != node)
        nodes = torch.zeros(problem.n_nodes, dtype=torch.int64, device="cpu")
        busiest = max(int(nodes.index_add(0, owner, crossing.sum(1)).max()), int(nodes.index_add(0, node, crossing.sum(0)).max()))
        return _US_PER_CROSSING * busiest + _US_PER_TOKEN * int(split.sum(1).view(-1, self.per_rank).sum(1).max())

    def _dropped(self, wanted, passes, slot_expert):
        """Returns how many of the tokens wanted[n_experts] of so many passes find no room in their experts' slots."""
        if self._slot_capacity == 0:
            return 0
        room = self._slot_capacity * passes * torch.bincount(slot_expert, minlength=self.n_experts)
        return int((wanted - room).clamp(min=0).sum())

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
