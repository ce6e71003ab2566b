# SPDX-License-Identifier: Apache-2.0
"""allreduce of sparse tensors: each rank gathers all ranks' indices and values and sums them."""
from typing import Any

import torch
from torch.distributed import ReduceOp

from . import calls
from .kinds import kind_of
from .reducing import sparse_sizes
from .work import DoneWork, Work


class _Now:
    """Options for a call that runs on this thread."""
    asyncOp = False


def all_reduce(backend: Any, tensor: torch.Tensor, opts: Any) -> Work:
    """Reduces a sparse tensor. It completes before it returns, because the sizes must be known first."""
    if not tensor.is_sparse or kind_of(opts.reduceOp) != ReduceOp.SUM:
        raise ValueError(f"allreduce of a sparse tensor: layout {tensor.layout} and {kind_of(opts.reduceOp).name}: give torch.sparse_coo and SUM")
    if not tensor.is_cpu:
        raise ValueError(f"allreduce of a sparse tensor on {tensor.device}: give one on cpu")
    size, comm = backend.size(), backend.comm_handle
    indices, values, count = sparse_sizes(tensor)
    counts = torch.empty(size, dtype=count.dtype, device=count.device)
    _gather(backend, comm, counts, count)
    most = max(1, int(counts.max()))
    parts = []
    for own in (indices.t().contiguous(), values):
        padded = torch.zeros((most, *own.shape[1:]), dtype=own.dtype, device=own.device)
        padded[:own.shape[0]] = own
        every = torch.empty((size, *padded.shape), dtype=own.dtype, device=own.device)
        _gather(backend, comm, every, padded)
        parts.append(torch.cat([every[r, :n] for r, n in enumerate(counts.tolist())]))
    with torch.no_grad():
        summed = torch.sparse_coo_tensor(parts[0].t(), parts[1], tensor.shape, device=tensor.device).coalesce()
        tensor.copy_(summed)
    return DoneWork("allreduce", [tensor])


def _gather(backend: Any, comm: int, target: torch.Tensor, source: torch.Tensor) -> None:
    backend._run("allreduce", comm, ([calls.all_gather(comm, target, source)], None), [target], _Now)
