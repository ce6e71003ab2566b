# SPDX-License-Identifier: Apache-2.0
"""Torch's reductions as calls of the library; see calls.py.

The library does not have BAND, BOR and BXOR. They run as a gather of all ranks' tensors (or an exchange of blocks) and a
reduction on this rank, which takes n times the memory of the result."""
import ctypes
from typing import Any, List, Optional, Sequence, Tuple

import torch

from .._buffers import address
from .._errors import check
from .._library import lib
from .calls import After, Call, Made, Reduced, all_gather, all_to_all_even, both, flat, on_one_device, writable
from .kinds import as_moved


class _Operator:
    """The library's number of an operator. An operator for PREMUL_SUM is made for the call, which reads it at once."""

    def __init__(self, r: Reduced, handle: int) -> None:
        self._handle, self.made = handle, False
        if r.op is not None:
            self.number: int = r.op
            return
        factor = r.premul.to(r.source.dtype) if isinstance(r.premul, torch.Tensor) else \
            torch.tensor(r.premul, dtype=r.source.dtype, device="cpu")
        if factor.numel() != 1:
            raise ValueError(f"PREMUL_SUM: a factor of {factor.numel()} elements: give one number")
        factor, op = factor.reshape(()).cpu(), ctypes.c_int32()
        check(lib.moecclRedOpCreatePreMulSum(ctypes.byref(op), factor.data_ptr(), r.type, handle), handle)
        self.number, self.made = op.value, True

    def __del__(self) -> None:
        if self.made:
            lib.moecclRedOpDestroy(self.number, self._handle)


def _fold(r: Reduced, parts: torch.Tensor, into: torch.Tensor) -> None:
    if into.numel() == 0:
        return
    rows = parts.view(-1, into.numel())
    out = into.view(-1)
    out.copy_(rows[0])
    for row in rows[1:]:
        r.bitwise(out, row, out=out)


def all_reduce(handle: int, size: int, call: str, tensor: torch.Tensor, op: Any) -> Made:
    r = Reduced(call, op, tensor, tensor)
    if r.bitwise is not None:
        parts = torch.empty(size * r.source.numel(), dtype=r.source.dtype, device=r.source.device)
        return [all_gather(handle, parts, r.source)], both(lambda: _fold(r, parts, r.target), r.after)
    operator = _Operator(r, handle)
    return [(lib.moecclAllReduce, address(r.source), address(r.target), r.source.numel(), r.type, operator.number, handle,
             (r.source, r.target, operator))], r.after


def all_reduce_coalesced(handle: int, size: int, tensors: Sequence[torch.Tensor], op: Any, most_bytes: int) -> Made:
    """Reduces several tensors; small tensors of one type are joined into one operation."""
    first = tensors[0]
    on_one_device("all_reduce_coalesced", tensors)
    total = sum(t.numel() for t in tensors)
    if len(tensors) > 1 and total * first.element_size() <= most_bytes and all(t.dtype == first.dtype for t in tensors):
        for t in tensors:
            writable(t)
        together = torch.cat([t.detach().reshape(-1) for t in tensors])
        calls, after = all_reduce(handle, size, "all_reduce_coalesced", together, op)

        def home() -> None:
            at = 0
            for t in tensors:
                t.copy_(together[at:at + t.numel()].view(t.shape))
                at += t.numel()

        return calls, both(after, home)
    every: List[Call] = []
    last: After = None
    for t in tensors:
        calls, after = all_reduce(handle, size, "all_reduce_coalesced", t, op)
        every += calls
        last = both(last, after)
    return every, last


def reduce(handle: int, rank: int, size: int, tensor: torch.Tensor, op: Any, root: int) -> Made:
    return _reduce_to(handle, size, "reduce", tensor if rank == root else None, tensor, op, root)


def _reduce_to(handle: int, size: int, name: str, into: Optional[torch.Tensor], tensor: torch.Tensor, op: Any, root: int) -> Made:
    """into: on the root, the tensor that takes the result; None elsewhere."""
    r = Reduced(name, op, tensor, into)
    target = None if r.target is None else address(r.target)
    if r.bitwise is not None:
        at_root = into is not None
        parts = torch.empty(size * r.source.numel() if at_root else 0, dtype=r.source.dtype, device=r.source.device)
        count, kind = as_moved(r.source)
        call = (lib.moecclGather, address(r.source), address(parts) if at_root else None, count, kind, root, handle,
                (r.source, parts))
        return [call], both(lambda: _fold(r, parts, r.target), r.after) if at_root else None
    operator = _Operator(r, handle)
    return [(lib.moecclReduce, address(r.source), target, r.source.numel(), r.type, operator.number, root, handle,
             (r.source, r.target, operator))], r.after


def reduce_scatter(handle: int, size: int, call: str, target: torch.Tensor, source: torch.Tensor, op: Any) -> Made:
    """Makes a reduce-scatter. source: [size, ...], adjacent blocks of target's size."""
    if source.dtype != target.dtype:
        raise ValueError(f"{call}: input of {source.dtype} and output of {target.dtype}: give tensors of one type")
    if source.numel() != target.numel() * size:
        raise ValueError(f"{call}: input has {source.numel()} elements and output {target.numel()}: the input holds one output for "
                         f"each of the {size} ranks")
    r = Reduced(call, op, source, target)
    if r.bitwise is not None:
        parts = torch.empty(r.source.numel(), dtype=r.source.dtype, device=r.source.device)
        return [all_to_all_even(handle, size, parts, r.source)], both(lambda: _fold(r, parts, r.target), r.after)
    operator = _Operator(r, handle)
    return [(lib.moecclReduceScatter, address(r.source), address(r.target), r.target.numel(), r.type, operator.number, handle,
             (r.source, r.target, operator))], r.after


def reduce_scatter_list(handle: int, rank: int, size: int, target: torch.Tensor, sources: Sequence[torch.Tensor], op: Any) -> Made:
    """Makes a reduce-scatter of a list. Tensors of different sizes, which all ranks then have in their lists, take one reduction to
    each rank."""
    if len(sources) != size:
        raise ValueError(f"reduce_scatter: {len(sources)} input tensors for {size} ranks: give one for each")
    for t in (sources[rank], *sources):
        if t.dtype != target.dtype or t is sources[rank] and t.numel() != target.numel():
            raise ValueError(f"reduce_scatter: an input tensor of {t.numel()} {t.dtype}, an output of {target.numel()} {target.dtype}: "
                             "give tensors of one type, and on each rank an output of the size of its input")
    if all(t.numel() == target.numel() for t in sources):
        return reduce_scatter(handle, size, "reduce_scatter", target, flat(sources), op)
    every: List[Call] = []
    last: After = None
    for root, t in enumerate(sources):
        calls, after = _reduce_to(handle, size, "reduce_scatter", target if root == rank else None, t, op, root)
        every += calls
        last = both(last, after)
    return every, last


def sparse_sizes(tensor: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a coalesced sparse tensor's indices, its values, and their number."""
    tensor = tensor.coalesce()
    return tensor.indices().contiguous(), tensor.values().contiguous(), torch.tensor([tensor.indices().shape[1]], device="cpu")
