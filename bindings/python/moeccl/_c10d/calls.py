# SPDX-License-Identifier: Apache-2.0
"""Torch's collectives as calls of the library: which function, on which memory, with which work before and after.

Each function returns (calls, after). calls are tuples (function of the library, its arguments except the stream, objects to keep
alive); `after` is the work that remains when they have run, or None. A tensor that is not as stored goes through a dense copy; a list
of tensors that are adjacent in one storage is used in place."""
import ctypes
import functools
import itertools
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import torch

from .. import _abi
from .._buffers import address, holder
from .._library import lib
from .kinds import BITWISE, TYPES, as_moved, kind_of, reduction

Call = Tuple[Any, ...]
After = Optional[Callable[[], Any]]
Made = Tuple[List[Call], After]

_NOTHING: After = None


def is_as_stored(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's elements lie one behind another in memory, and are not conjugated or negated when torch reads them."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if is_as_stored(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def writable(tensor: torch.Tensor) -> None:
    """Refuses an output to which torch cannot copy a result later."""
    if any(extent > 1 and step == 0 for extent, step in zip(tensor.shape, tensor.stride())):
        raise ValueError(f"an output of shape {tuple(tensor.shape)} and strides {tensor.stride()} has elements that share memory: give one "
                         "without, such as output.contiguous()")


def room_for(tensor: torch.Tensor) -> Tuple[torch.Tensor, After]:
    """Returns dense memory for an output, and the copy from there to the output, or None."""
    if is_as_stored(tensor):
        return tensor, None
    writable(tensor)
    made = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return made, lambda: tensor.copy_(made)


def one_behind_another(tensors: Sequence[torch.Tensor]) -> Optional[torch.Tensor]:
    """Returns the tensors as one flat view if they are adjacent in memory, otherwise None."""
    tensors = [holder(t) for t in tensors]
    first = tensors[0]
    at, total, storage = first.data_ptr(), 0, first.untyped_storage().data_ptr()
    for t in tensors:
        if t.data_ptr() != at + total * first.element_size() or not is_as_stored(t) or t.dtype != first.dtype or \
                t.untyped_storage().data_ptr() != storage:
            return None
        total += t.numel()
    if total == 0:
        return None
    return first.detach().as_strided((total,), (1,))


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the tensors as one flat tensor, for reading."""
    view = one_behind_another(tensors)
    return view if view is not None else torch.cat([t.detach().reshape(-1) for t in tensors])


def flat_room(tensors: Sequence[torch.Tensor]) -> Tuple[torch.Tensor, After]:
    """Returns flat memory for adjacent outputs, and the copies from there to the outputs, or None."""
    view = one_behind_another(tensors)
    if view is not None:
        return view, None
    for t in tensors:
        writable(t)
    made = torch.empty(sum(t.numel() for t in tensors), dtype=tensors[0].dtype, device=tensors[0].device)

    def copies() -> None:
        at = 0
        for t in tensors:
            t.copy_(made[at:at + t.numel()].view(t.shape))
            at += t.numel()

    return made, copies


def both(first: After, second: After) -> After:
    if first is None or second is None:
        return second if first is None else first
    one, other = first, second

    def run() -> None:
        one()
        other()

    return run


def on_one_device(call: str, tensors: Sequence[torch.Tensor]) -> None:
    for t in tensors:
        if t.device != tensors[0].device:
            raise ValueError(f"{call}: tensors on {tensors[0].device} and {t.device}: give tensors on one device")


def pairs(call: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
    if len(outputs) != len(inputs):
        raise ValueError(f"{call}: {len(outputs)} output and {len(inputs)} input tensors: give one output for each input")
    return zip(outputs, inputs)


def same(call: str, tensors: Sequence[torch.Tensor], numel: Optional[int] = None) -> None:
    """Checks that all tensors have one type, one device and one size."""
    on_one_device(call, tensors)
    first = tensors[0]
    for t in tensors:
        if t.dtype != first.dtype:
            raise ValueError(f"{call}: tensors of {first.dtype} and {t.dtype}: give tensors of one type")
        if numel is not None and t.numel() != numel:
            raise ValueError(f"{call}: a tensor has {t.numel()} elements where {numel} are needed: give tensors of one size")


def _blocks(call: str, whole: torch.Tensor, part: torch.Tensor, size: int, names: Tuple[str, str]) -> None:
    same(call, (whole, part))
    if whole.numel() != part.numel() * size:
        raise ValueError(f"{call}: {names[0]} has {whole.numel()} elements and {names[1]} {part.numel()}: {names[0]} holds one "
                         f"{names[1]} for each of the {size} ranks")


def _factor(op: Any) -> Any:
    if not hasattr(op, "factor"):
        raise ValueError(f"PREMUL_SUM needs torch 2.13 or newer, and this is torch {torch.__version__}, which does not tell the factor: "
                         "multiply the tensor and use SUM, or install a newer torch")
    return op.factor


class Reduced:
    """A tensor in a form that the library can reduce: `source` is the input, `target` takes the result, `after` copies it back."""

    def __init__(self, call: str, op: Any, source: torch.Tensor, target: Optional[torch.Tensor]) -> None:
        self.op, as_type = reduction(call, op, source.dtype)
        self.bare = kind_of(op)
        self.premul = _factor(op) if self.op is None and self.bare not in BITWISE else None
        self.bitwise = None if self.op is not None or self.premul is not None else BITWISE[self.bare]
        home, in_place = target, target is source or target is not None and address(target) == address(source) and \
            target.numel() == source.numel()
        source, self.after = dense(source), _NOTHING
        if home is not None:
            target, self.after = room_for(home)
            if in_place and self.after is not None:
                target = source  # a dense copy, reduced in place
                self.after = functools.partial(home.copy_, source)
        if source.dtype.is_complex:
            source, target = torch.view_as_real(source), None if target is None else torch.view_as_real(target)
        if as_type is not None:
            source, room = source.to(as_type), target
            if room is not None:
                target = source if room.numel() == source.numel() else torch.empty(room.shape, dtype=as_type, device=room.device)
                self.after = both(functools.partial(room.copy_, target), self.after)
        self.source: torch.Tensor = source
        self.target: Any = target
        self.type = TYPES.get(self.source.dtype, _abi.moecclUint8)  # bitwise operators only move data, as bytes if need be


def broadcast(handle: int, rank: int, size: int, tensor: torch.Tensor, root: int) -> Made:
    room, after = (dense(tensor), None) if rank == root else room_for(tensor)
    count, kind = as_moved(room)
    at = address(room)
    return [(lib.moecclBroadcast, at, at, count, kind, root, handle, room)], after


def all_gather(handle: int, target: torch.Tensor, source: torch.Tensor) -> Call:
    count, kind = as_moved(source)
    return (lib.moecclAllGather, address(source), address(target), count, kind, handle, (source, target))


def all_gather_single(handle: int, size: int, target: torch.Tensor, source: torch.Tensor) -> Made:
    _blocks("all_gather_single", target, source, size, ("output", "input"))
    room, after = room_for(target)
    return [all_gather(handle, room, dense(source))], after


def all_gather_list(handle: int, rank: int, size: int, targets: Sequence[torch.Tensor], source: torch.Tensor) -> Made:
    """Makes an all-gather into a list. Tensors of different sizes, which all ranks then have in their lists, come by one broadcast
    from each rank."""
    if len(targets) != size:
        raise ValueError(f"all_gather: {len(targets)} output tensors for {size} ranks: give one for each")
    if any(t.numel() != targets[0].numel() for t in targets):
        same("all_gather", [source, *targets])
        same("all_gather", [source, targets[rank]], source.numel())
        every: List[Call] = []
        last: After = None
        source = dense(source)
        for root, target in enumerate(targets):
            room, after = room_for(target)
            count, kind = as_moved(room)
            every.append((lib.moecclBroadcast, address(source) if root == rank else None, address(room), count, kind, root, handle,
                          (source, room)))
            last = both(last, after)
        return every, last
    same("all_gather", [source, *targets], source.numel())
    room, after = flat_room(targets)
    return [all_gather(handle, room, dense(source))], after


def gather(handle: int, rank: int, size: int, targets: Optional[Sequence[torch.Tensor]], source: torch.Tensor, root: int) -> Made:
    """Makes a gather. targets: on the root, one tensor for each rank or one that holds them all; None elsewhere."""
    room, after = None, _NOTHING
    if rank == root:
        if targets is None or len(targets) not in (1, size):
            raise ValueError(f"gather: {0 if targets is None else len(targets)} output tensors on the root: give {size}, one for "
                             "each rank")
        if len(targets) == 1 and size > 1 or targets[0].numel() != source.numel():
            _blocks("gather", targets[0], source, size, ("output", "input"))
            room, after = room_for(targets[0])
        else:
            same("gather", [source, *targets], source.numel())
            room, after = flat_room(targets)
    source = dense(source)
    count, kind = as_moved(source)
    return [(lib.moecclGather, address(source), None if room is None else address(room), count, kind, root, handle,
             (source, room))], after


def scatter(handle: int, rank: int, size: int, target: torch.Tensor, sources: Optional[Sequence[torch.Tensor]], root: int) -> Made:
    whole = None
    if rank == root:
        if sources is None or len(sources) != size:
            raise ValueError(f"scatter: {0 if sources is None else len(sources)} input tensors on the root: give {size}, one for "
                             "each rank")
        same("scatter", [target, *sources], target.numel())
        whole = flat(sources)
    room, after = room_for(target)
    count, kind = as_moved(room)
    return [(lib.moecclScatter, None if whole is None else address(whole), address(room), count, kind, root, handle,
             (whole, room))], after


def all_to_all_even(handle: int, size: int, target: torch.Tensor, source: torch.Tensor) -> Call:
    count, kind = as_moved(source)
    return (lib.moecclAllToAll, address(source), address(target), count // size, kind, handle, (source, target))


def all_to_all(handle: int, size: int, target: torch.Tensor, source: torch.Tensor, recv: Sequence[int],
               send: Sequence[int]) -> Call:
    """Makes an AllToAllv of adjacent dense blocks; recv and send: the elements of each block, by rank."""
    scale = 1 if source.dtype in TYPES else source.element_size()
    return _all_to_all_of(handle, target, source, _blocks_of([n * scale for n in recv]), _blocks_of([n * scale for n in send]))


def _all_to_all_of(handle: int, target: torch.Tensor, source: torch.Tensor, recv: Any, send: Any) -> Call:
    kind = as_moved(source)[1]
    return (lib.moecclAllToAllv, address(source), *send, address(target), *recv, kind, handle, (source, target, recv, send))


def _blocks_of(counts: Sequence[int]) -> Any:
    """Returns the arrays of the blocks' counts and of their beginnings."""
    array = ctypes.c_size_t * len(counts)
    return array(*counts), array(*itertools.accumulate(counts[:-1], initial=0))


@functools.lru_cache(maxsize=256)
def _even_blocks(size: int, count: int) -> Any:
    """As _blocks_of(), kept, because making the arrays takes as long as a small exchange. The library only reads them."""
    return _blocks_of([count] * size)


def even_blocks_of(size: int, output: torch.Tensor, input: torch.Tensor) -> Any:
    """Returns the blocks of an exchange without split sizes of dense tensors whose type the library has, or None if they do not divide."""
    count = input.numel()
    if output.numel() != count or count % size:
        return None
    for t in (input, output):
        if t.dim() > 0 and t.shape[0] % size:
            return None
    return _even_blocks(size, count // size)


def all_to_all_single(handle: int, size: int, target: torch.Tensor, source: torch.Tensor, recv: Sequence[int],
                      send: Sequence[int]) -> Made:
    same("all_to_all_single", (target, source))
    room, after = room_for(target)
    source = dense(source)
    # The sizes may also be an array, as in torch's own backends.
    recv, send = ([] if rows is None else [int(n) for n in rows] for rows in (recv, send))
    if not recv and not send:
        for name, t in (("input", source), ("output", target)):
            if t.numel() % size or t.dim() > 0 and t.shape[0] % size:
                raise ValueError(f"all_to_all_single: {name} of shape {tuple(t.shape)} for {size} ranks: give a first dimension "
                                 "that they divide, or split sizes")
        if source.numel() == target.numel():
            # Not AllToAll: a rank cannot see whether others give split sizes, and all ranks must make the same call.
            blocks = _even_blocks(size, as_moved(source)[0] // size)
            return [_all_to_all_of(handle, room, source, blocks, blocks)], after
    sides = []
    for name, t, rows in (("output", target, recv), ("input", source, send)):
        length = t.shape[0] if t.dim() > 0 else 1
        rows = list(rows) if rows else [length // size] * size
        if len(rows) != size or sum(rows) != length or min(rows) < 0:
            raise ValueError(f"all_to_all_single: {name}_split_sizes are {rows} for {size} ranks and {length} rows: give one for each "
                             "rank, whose sum is the number of rows")
        row = t.numel() // length if length else 0
        sides.append([n * row for n in rows])
    return [all_to_all(handle, size, room, source, sides[0], sides[1])], after


def all_to_all_list(handle: int, size: int, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Made:
    if len(targets) != size or len(sources) != size:
        raise ValueError(f"all_to_all: {len(targets)} output and {len(sources)} input tensors for {size} ranks: give one for each")
    same("all_to_all", [*targets, *sources])
    room, after = flat_room(targets)
    return [all_to_all(handle, size, room, flat(sources), [t.numel() for t in targets], [t.numel() for t in sources])], after
