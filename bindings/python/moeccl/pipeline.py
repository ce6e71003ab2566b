# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel AllToAll between nodes, dispatch and combine of a tensor-parallel group by it, and when each lane of a plan was busy
(include/moeccl/pipeline.h)."""
import array
import ctypes
import importlib
from typing import Any, List, Optional, Sequence, Union

from . import _abi
from ._abi import LaneSpan, TensorGroups
from ._arrays import record
from ._buffers import Buffer, common_type, type_size
from ._errors import SIZE, number, of_kind
from ._library import lib
from .comm import Comm
from .constants import FLOAT32
from .plan import op_number
from .streams import give_back, stream_handle


def tensor_groups(comm: Comm) -> TensorGroups:
    """Returns how the communicator's topology groups its ranks: n_groups, this rank's group and index, n_ranks of the group."""
    groups = _abi.moecclTensorGroups_t()
    of_kind("comm", comm, Comm)._check(lib.moecclTensorGroups(comm._handle, ctypes.byref(groups)))
    return record(TensorGroups, groups)


def tensor_all_to_all(comm: Comm, send: Any, recv: Any, type: Optional[int] = None, stream: Any = None) -> None:
    """recv[n_groups, ...]: block g is block `own group` of group g's send[n_groups, ...]. Ranks of a group pass equal send buffers."""
    blocks = tensor_groups(comm).n_groups
    comm._run("moecclTensorAllToAll", send, recv, (blocks, blocks), type, None, None, stream)


def tensor_all_to_all_v(comm: Comm, send: Any, recv: Any, counts: Sequence[int], type: Optional[int] = None, stream: Any = None) -> None:
    """Does the same with blocks of any size: counts[s * n_groups + d] elements from group s to group d, the same on all ranks.

    send: this rank's group's blocks for groups 0, 1, ..., one after another; recv: the blocks that groups 0, 1, ... sent to it. Each
    element crosses between groups once; the same call with transposed counts is the way back."""
    groups = tensor_groups(comm)
    e, mine = groups.n_groups, groups.group
    if len(counts) != e * e:
        raise ValueError(f"counts has {len(counts)} numbers: give {e * e}, one for each pair of the {e} groups")
    given = (ctypes.c_size_t * (e * e))(*(number(f"counts[{i}]", n, SIZE) for i, n in enumerate(counts)))
    buffers = [Buffer(send), Buffer(recv, True)]
    try:
        kind = common_type("moecclTensorAllToAllv", buffers, type)
        wanted = [sum(counts[mine * e:(mine + 1) * e]), sum(counts[mine::e])]
        for name, buffer, n in zip(("send", "recv"), buffers, wanted):
            if buffer.count(kind) != n:
                raise ValueError(f"{name} has {buffer.count(kind)} elements: group {mine} needs {n} by counts")
        comm._check(lib.moecclTensorAllToAllv(buffers[0].data, buffers[1].data, given, kind, comm._handle, stream_handle(stream)))
    finally:
        give_back(buffers, stream)


class Dispatched:
    """One step's routing of a tensor-parallel group, made by dispatch(), and what arrived.

    rows [R, hidden]: the tokens that chose an expert of this rank's group, by source group, then in order; equal on the group's ranks.
    topk_index [R, k] (int32) and topk_weights [R, k]: their choices, with -1 and 0 for experts of other groups; topk_weights is None
    without weights. row_counts: the rows from each group."""

    def __init__(self, comm: Comm, xp: Any, index: Any, n_experts: int) -> None:
        self._comm, self._xp, self._n_experts, self._groups = comm, xp, n_experts, tensor_groups(comm)
        self._n_tokens = int(index.shape[0])
        self._tokens: List[Any] = []  # for each group the tokens that go there
        self._counts: List[int] = []  # of rows, from group s to group d at s * e + d
        self.rows = self.topk_index = self.topk_weights = None

    def _owner(self, index: Any) -> Any:
        """Returns the groups of experts, -1 of none: in order, and the first groups have one expert more if not all have as many."""
        share, more = divmod(self._n_experts, self._groups.n_groups)
        large = more * (share + 1)
        owner = self._xp.where(index < large, index // (share + 1), more + (index - large) // max(1, share))
        return self._xp.where(index < 0, self._xp.full_like(owner, -1), owner)

    def _agree(self, index: Any, wrong: Optional[str]) -> None:
        """Chooses tokens and tells all ranks the counts. All ranks raise if anything is wrong on one, or if those of a group differ."""
        e, mine, size = self._groups.n_groups, self._groups.group, self._comm.size
        if wrong is None:
            owner = self._owner(index)
            self._tokens = [_places((owner == g).any(1)) for g in range(e)]
        said = array.array("q", [mine, wrong is not None, self._n_tokens, *(len(t) for t in self._tokens or [()] * e)])
        got = array.array("q", bytes(8 * len(said) * size))
        self._comm.all_gather(said, got)
        if wrong is not None:
            raise ValueError(wrong)
        of_rank = [got[r * len(said):(r + 1) * len(said)] for r in range(size)]
        failed = next((r for r in range(size) if of_rank[r][1]), None)
        if failed is not None:
            raise ValueError(f"the arguments of rank {failed} are wrong: its own error says how")
        first = {of_rank[r][0]: r for r in reversed(range(size))}
        for r, one in enumerate(of_rank):
            if one != of_rank[first[one[0]]]:
                raise ValueError(f"ranks {first[one[0]]} and {r} of tensor-parallel group {one[0]} have other tokens or choices: give the ranks "
                                 "of a group the same")
        self._counts = [n for g in range(e) for n in of_rank[first[g]][3:]]

    @property
    def row_counts(self) -> List[int]:
        """The rows from each group."""
        return self._counts[self._groups.group::self._groups.n_groups]

    def _exchange(self, given: Any, n_rows: int, back: bool) -> Any:
        e, width = self._groups.n_groups, int(given.shape[1])
        counts = [width * (self._counts[d * e + s] if back else self._counts[s * e + d]) for s in range(e) for d in range(e)]
        made = _empty(given, (n_rows, width))
        tensor_all_to_all_v(self._comm, given, made, counts)
        return made

    def send(self, x: Any) -> Any:
        """Returns [R, width] for x[tokens, width], which travels as dispatch()'s rows did: the backward pass of combine(). Collective."""
        if len(x.shape) != 2 or x.shape[0] != self._n_tokens:
            raise ValueError(f"x has shape {tuple(x.shape)}: give a row for each of the {self._n_tokens} tokens")
        return self._exchange(x[self._xp.concatenate(self._tokens)], sum(self.row_counts), False)

    def combine(self, rows: Any) -> Any:
        """Returns [tokens, width]: for each token the sum of its rows in rows[R, width] of all groups, which have been weighted. The ranks of
        a group give equal rows: tensor-parallel experts sum theirs first. It is the backward pass of dispatch(), too. Collective."""
        if len(rows.shape) != 2 or rows.shape[0] != sum(self.row_counts):
            raise ValueError(f"rows has shape {tuple(rows.shape)}: give a row for each of the {sum(self.row_counts)} that arrived")
        back = self._exchange(rows, sum(len(t) for t in self._tokens), True)
        total, at = _empty(rows, (self._n_tokens, int(rows.shape[1]))), 0
        total[:] = 0
        for tokens in self._tokens:  # a token is in a group's block at most once
            total[tokens] += back[at:at + len(tokens)]
            at += len(tokens)
        return total


def _places(mask: Any) -> Any:
    """Returns where a mask of one dimension is true."""
    found = mask.nonzero()
    return found[0] if isinstance(found, tuple) else found[:, 0]


def _empty(like: Any, shape: Any) -> Any:
    return like.new_empty(shape) if hasattr(like, "new_empty") else importlib.import_module("numpy").empty(shape, like.dtype)


def _wrong(x: Any, index: Any, n_experts: int, weights: Any) -> Optional[str]:
    """Returns what is wrong about dispatch()'s arguments."""
    if len(x.shape) != 2 or len(index.shape) != 2 or x.shape[0] != index.shape[0]:
        return f"x has shape {tuple(x.shape)} and topk_index {tuple(index.shape)}: give [tokens, hidden] and [tokens, k]"
    if "int" not in str(index.dtype):
        return f"topk_index holds {index.dtype}: give whole numbers, -1 for no expert"
    if weights is not None and tuple(weights.shape) != tuple(index.shape):
        return f"topk_weights has shape {tuple(weights.shape)}: give topk_index's, {tuple(index.shape)}"
    if 0 not in index.shape and not -1 <= int(index.min()) <= int(index.max()) < n_experts:
        return f"topk_index has numbers from {int(index.min())} to {int(index.max())}: give 0 to {n_experts - 1}, or -1 for no expert"
    return None


def dispatch(comm: Comm, x: Any, topk_index: Any, n_experts: int, topk_weights: Any = None) -> Dispatched:
    """Sends each token of a tensor-parallel group once to each group that has one of its experts, instead of once from each rank (MoNTA).

        step = moeccl.pipeline.dispatch(comm, x, topk_index, n_experts, topk_weights)
        out = ...                  # from step.rows, step.topk_index and step.topk_weights: the weighted sum of this group's experts per row
        y = step.combine(out)      # [tokens, hidden]

    x [tokens, hidden] and the other arrays are NumPy's, or torch tensors on the CPU, equal on the ranks of a group. topk_index [tokens, k]:
    the experts of each token, distinct, -1 for none. The groups have the n_experts in order, as evenly as possible. topk_weights
    [tokens, k] travel with the rows. The call is collective. Wrong arguments, and ranks with other counts than their group's, raise
    ValueError on all ranks. moeccl.torch.tensor_dispatch has gradients."""
    xp = importlib.import_module("torch" if hasattr(x, "data_ptr") else "numpy")
    step, wrong = Dispatched(comm, xp, topk_index, number("n_experts", n_experts)), _wrong(x, topk_index, n_experts, topk_weights)
    chosen = topk_index if wrong else xp.asarray(topk_index, dtype=xp.int32)  # of any whole numbers, such as uint8, which lack -1
    step._agree(chosen, wrong)
    step.rows, index = step.send(x), step.send(chosen)
    own = step._owner(index) == step._groups.group
    step.topk_index = xp.where(own, index, xp.full_like(index, -1))
    if topk_weights is not None:
        weights = step.send(topk_weights)
        step.topk_weights = xp.where(own, weights, xp.zeros_like(weights))
    return step


def timeline(comm: Comm, count: int, op: Union[str, int] = "tensor_alltoall", type: int = FLOAT32) -> List[LaneSpan]:
    """Returns when lanes were busy with chunks in the last run of that plan on this rank, in us from its start; empty before the first."""
    type_size(type)
    n, given = ctypes.c_size_t(), (comm._handle, op_number(op), number("count", count, SIZE), type)
    comm._check(lib.moecclPlanTimeline(*given, None, 0, ctypes.byref(n)))
    spans = (_abi.moecclLaneSpan_t * max(1, n.value))()
    comm._check(lib.moecclPlanTimeline(*given, spans, n.value, ctypes.byref(n)))
    return [record(LaneSpan, span) for span in spans[:n.value]]
