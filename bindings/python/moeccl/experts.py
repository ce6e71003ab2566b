# SPDX-License-Identifier: Apache-2.0
"""Replicated experts: gradients and weights of experts with any number of replicas on any ranks (include/moeccl/experts.h).

All expert tensors have `count` elements. A rank's buffer of slots is [slots, count]; its shards are [n_experts, shard(count, n_ranks)]."""
import array
import ctypes
from typing import Any, List, Optional, Sequence, Tuple, Union

from . import _abi
from ._arrays import Given, made, set_array
from ._buffers import Buffer, common_type, type_size
from ._errors import SIZE, check, number
from ._library import lib
from ._pages import page
from .comm import Comm
from .constants import FLOAT32, INT64, SUM
from .plan import op_number
from .streams import give_back, stream_handle

_byref = ctypes.byref


class Placement:
    """Which expert each slot holds. slot_expert: [sum of slots], rank after rank; -1 for an empty slot.

    Pass slots_per_rank for all ranks, or slot_counts [n_ranks]. The arrays are read before a call returns."""

    def __init__(self, n_experts: int, slot_expert: Any, slots_per_rank: int = 0, slot_counts: Optional[Sequence[int]] = None) -> None:
        self.struct, self._keep = _abi.moecclPlacement_t(), []  # type: ignore[var-annotated]
        self.struct.n_experts = number("n_experts", n_experts)
        self.struct.slots_per_rank = number("slots_per_rank", slots_per_rank)
        set_array(self.struct, self._keep, "slot_counts", slot_counts, ctypes.c_int32, None)
        set_array(self.struct, self._keep, "slot_expert", slot_expert, ctypes.c_int32, None)
        self.n_experts: int = self.struct.n_experts
        self._counts = list(slot_counts) if slot_counts is not None else None
        self._slots = self._keep[1].count

    def slots(self, n_ranks: int, rank: int) -> int:
        """Returns the number of slots of a rank; raises ValueError if the placement is not for n_ranks ranks."""
        counts = self._counts if self._counts is not None else [self.struct.slots_per_rank] * n_ranks
        if len(counts) != n_ranks or sum(counts) != self._slots:
            raise ValueError(f"slot_expert has {self._slots} slots: {n_ranks} ranks with {counts} slots need {sum(counts)}")
        return int(counts[rank])


def shard(count: int, n_ranks: int) -> int:
    """Returns the elements in one rank's shard of an expert with `count` elements."""
    return int(lib.moecclExpertShard(number("count", count, SIZE), number("n_ranks", n_ranks)))


def popularity(comm: Comm, topk_index: Any, n_experts: int) -> "array.array[int]":
    """Returns [n_experts] (int64): how often each expert occurs in all ranks' topk_index (int32); -1 is not counted. The call is
    collective. In a group the counts are there at its end."""
    given = Given("topk_index", topk_index, ctypes.c_int32, takes_cuda=True)
    n_experts = number("n_experts", n_experts, (1, 2**31 - 1))
    counts = made(ctypes.c_int64, n_experts)
    out = Buffer(counts, True)
    try:
        comm._check(lib.moecclExpertPopularity(given.address, given.count, n_experts, out.data, comm._handle, None))
    finally:
        give_back([out])  # a group writes at its end
    return counts


def choose_replicas(comm: Comm, placement: Placement, topk_index: Any, top_k: int, slot_capacity: int = 0,
                    popularity: Any = None, dropped: Any = None) -> "array.array[int]":
    """Returns [n_tokens * top_k] (int32): the slot, numbered across all ranks, of the replica that serves each choice of topk_index,
    or -1 for no choice and for a dropped one. The result is for a Moe with an expert for each slot. The call is collective.

    slot_capacity: most tokens per slot, from all ranks together; 0: no limit. popularity, dropped: arrays of n_experts int64 that
    get the choices of each expert over all ranks, and how many of these were dropped."""
    given = Given("topk_index", topk_index, ctypes.c_int32, takes_cuda=True)
    placement.slots(comm.size, comm.rank)
    top_k = number("top_k", top_k, (1, 64))
    if given.count % top_k:
        raise ValueError(f"topk_index has {given.count} numbers: give a multiple of top_k, {top_k}")
    how = _abi.moecclReplicaDispatch_t()
    how.placement = ctypes.pointer(placement.struct)
    how.top_k, how.slot_capacity = top_k, number("slot_capacity", slot_capacity)
    slots = made(ctypes.c_int32, given.count)
    loads = [Buffer(popularity, True), Buffer(dropped, True)]
    try:
        for name, load in zip(("popularity", "dropped"), loads):
            if not load.present:
                continue
            if load.type != INT64:
                raise TypeError(f"{name} holds elements of format {load.format!r}: give {placement.n_experts} of int64")
            if load.count(INT64) != placement.n_experts:
                raise ValueError(f"{name} has {load.count(INT64)} numbers: give {placement.n_experts} of int64")
        comm._check(lib.moecclChooseReplicas(_byref(how), given.address, given.count // top_k, slots.buffer_info()[0],
                                             loads[0].data, loads[1].data, comm._handle))
    finally:
        give_back(loads, None)
    return slots


def _run(comm: Comm, function: str, placement: Placement, first: Any, second: Any, slots_at: Any, count: Optional[int],
         type_: Optional[int], op: Any, stream: Any) -> None:
    """Runs a function on two buffers. slots_at: which of the two hold slots; the others hold shards."""
    buffers = [Buffer(first), Buffer(second, True)]
    try:
        kind = common_type(function, buffers, type_) if type_ is None else type_  # a rank without slots or shards may pass None
        slots = placement.slots(comm.size, comm.rank)
        if count is None:
            lent = next((b for b, is_slots in zip(buffers, slots_at) if is_slots and b.present), None)
            if lent is None or slots == 0:
                raise ValueError(f"{function}: this rank has no slots, give count=, the elements of an expert")
            count = lent.count(kind) // slots
        count = number("count", count, SIZE)
        for buffer, is_slots in zip(buffers, slots_at):
            wanted = slots * count if is_slots else placement.n_experts * shard(count, comm.size)
            if buffer.count(kind) != wanted:
                raise ValueError(f"{function}: a buffer of {'slots' if is_slots else 'shards'} has {buffer.count(kind)} elements, "
                                 f"{wanted} are needed for experts of {count}")
        tail = [] if op is None else [number("op", op)]
        comm._check(getattr(lib, function)(buffers[0].data, buffers[1].data, count, kind, *tail, _byref(placement.struct), comm._handle,
                                           stream_handle(stream)))
    finally:
        give_back(buffers, stream)


def all_reduce(comm: Comm, placement: Placement, send: Any, recv: Any = None, op: int = SUM, count: Optional[int] = None,
               type: Optional[int] = None, stream: Any = None) -> None:
    """recv[slots, count]: for each slot the sum (or AVG) of send[slots, count] over all replicas of its expert.

    Without recv the call works in place. Empty slots of recv are not written. count is needed on a rank without slots."""
    _run(comm, "moecclExpertAllReduce", placement, send, send if recv is None else recv, (True, True), count, type, op, stream)


def collect_gradients(comm: Comm, placement: Placement, slots: Any, shards: Any, count: Optional[int] = None,
                      type: Optional[int] = None, stream: Any = None) -> None:
    """shards[n_experts, shard]: shard `rank` of every expert's tensor, from one of its replicas in slots[slots, count]."""
    _run(comm, "moecclCollectGradients", placement, slots, shards, (True, False), count, type, None, stream)


def reduce_gradients(comm: Comm, placement: Placement, slots: Any, shards: Any, op: int = SUM, count: Optional[int] = None,
                     type: Optional[int] = None, stream: Any = None) -> None:
    """shards[n_experts, shard]: shard `rank` of the sum (or AVG) of every expert's tensor over all its replicas in slots[slots, count].

    The result is that of all_reduce() followed by collect_gradients(), with fewer bytes for every expert on two ranks or more."""
    _run(comm, "moecclReduceGradients", placement, slots, shards, (True, False), count, type, op, stream)


def layers(comm: Comm, what: Union[str, int], given: Sequence[Tuple[Placement, Any, Any]], count: int, op: int = SUM,
           type: Optional[int] = None, stream: Any = None) -> None:
    """Runs "reduce_gradients", "collect_gradients" or "place_weights" on several layers as one operation.

    given is [(placement, slots, shards)]. Placements and buffers may differ; `count` and the type apply to all layers. A rank without
    slots in a layer passes None there."""
    what, count = op_number(what), number("count", count, SIZE)
    places = what == op_number("place_weights")
    buffers = [Buffer(buffer, is_slots == places) for _, slots, shards in given for buffer, is_slots in ((slots, True), (shards, False))]
    try:
        kind = common_type("moecclExpertLayers", buffers, type) if type is None else type
        table = (_abi.moecclExpertLayer_t * max(1, len(given)))()
        for i, (placement, _, _) in enumerate(given):
            wanted = (placement.slots(comm.size, comm.rank) * count, placement.n_experts * shard(count, comm.size))
            for name, buffer, n in zip(("slots", "shards"), buffers[2 * i:2 * i + 2], wanted):
                if buffer.count(kind) != n:
                    raise ValueError(f"layer {i}: {name} has {buffer.count(kind)} elements, {n} are needed for experts of {count}")
                setattr(table[i], name, buffer.data)
            table[i].placement = ctypes.pointer(placement.struct)
        comm._check(lib.moecclExpertLayers(what, table, len(given), count, kind, number("op", op), comm._handle, stream_handle(stream)))
    finally:
        give_back(buffers, stream)


def place_weights(comm: Comm, placement: Placement, shards: Any, slots: Any, count: Optional[int] = None,
                  type: Optional[int] = None, stream: Any = None) -> None:
    """slots[slots, count]: the weights of each slot's expert, from the shards of all ranks. Empty slots are not written."""
    _run(comm, "moecclPlaceWeights", placement, shards, slots, (False, True), count, type, None, stream)


def gradient_source(placement: Placement, n_ranks: int, expert: int, rank: int) -> int:
    """Returns the rank from which collect_gradients() takes shard `rank` of an expert. This call is not collective."""
    source = ctypes.c_int()
    placement.slots(number("n_ranks", n_ranks), 0)
    check(lib.moecclGradientSource(_byref(placement.struct), n_ranks, number("expert", expert), number("rank", rank),
                                   _byref(source)))
    return source.value


def explain(comm: Comm, op: Union[str, int], count: int, placement: Placement, type: int = FLOAT32) -> str:
    """Returns a page for a person about "expert_allreduce", "collect_gradients", "reduce_gradients" or "place_weights". This call is
    not collective."""
    type_size(type)
    placement.slots(comm.size, comm.rank)
    return page(lambda *room: lib.moecclExpertExplain(comm._handle, op_number(op), number("count", count, SIZE), type,
                                                      _byref(placement.struct), *room), comm)


__all__: List[str] = ["Placement", "all_reduce", "choose_replicas", "collect_gradients", "explain", "gradient_source", "layers",
                      "place_weights", "popularity", "reduce_gradients", "shard"]
