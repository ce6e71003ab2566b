# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel AllToAll between nodes, and when each lane of a plan was busy (include/moeccl/pipeline.h)."""
import ctypes
from typing import Any, List, Optional, Sequence, Union

from . import _abi
from ._abi import LaneSpan, TensorGroups
from ._arrays import record
from ._buffers import Buffer, common_type, type_size
from ._errors import SIZE, number
from ._library import lib
from .comm import Comm
from .constants import FLOAT32
from .plan import op_number
from .streams import give_back, stream_handle


def tensor_groups(comm: Comm) -> TensorGroups:
    """Returns how the communicator's topology groups its ranks: n_groups, this rank's group and index, n_ranks of the group."""
    groups = _abi.moecclTensorGroups_t()
    comm._check(lib.moecclTensorGroups(comm._handle, ctypes.byref(groups)))
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


def timeline(comm: Comm, count: int, op: Union[str, int] = "tensor_alltoall", type: int = FLOAT32) -> List[LaneSpan]:
    """Returns when lanes were busy with chunks in the last run of that plan on this rank, in us from its start; empty before the first."""
    type_size(type)
    n, given = ctypes.c_size_t(), (comm._handle, op_number(op), number("count", count, SIZE), type)
    comm._check(lib.moecclPlanTimeline(*given, None, 0, ctypes.byref(n)))
    spans = (_abi.moecclLaneSpan_t * max(1, n.value))()
    comm._check(lib.moecclPlanTimeline(*given, spans, n.value, ctypes.byref(n)))
    return [record(LaneSpan, span) for span in spans[:n.value]]
