# SPDX-License-Identifier: Apache-2.0
"""The group that users hold: torch's ProcessGroup with the backend in it, and a direct path to the backend for callers in Python.

torch calls a Backend written in Python through its C++ side, which offers callers only wait() and get_future() of the works and
costs tens of microseconds per call. Calls in Python on this group reach the backend directly and get its own works. C++ callers
(DDP's reducer, functional collectives) and all calls that are not defined here reach the same backend through torch."""
from typing import Any, List, Optional

import torch
from torch.distributed import (AllreduceCoalescedOptions, AllreduceOptions, AllToAllOptions, BarrierOptions, PrefixStore, ProcessGroup,
                               ReduceOp)
from torch._C._distributed_c10d import (AllgatherOptions, BroadcastOptions, GatherOptions, ReduceOptions, ReduceScatterOptions,
                                        ScatterOptions)

from .backend import Backend


def _options(kind: Any, given: Any, timeout: Any, **fields: Any) -> Any:
    """Returns the options of a call that were passed in any of torch's forms: as one object, or as arguments."""
    if isinstance(given, kind):
        return given
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    if timeout is not None:
        made.timeout = timeout
    return made


def _listed(thing: Any) -> Any:
    return thing if isinstance(thing, (list, tuple)) else [thing]


def _nested(thing: Any) -> Any:
    """Returns a list of lists, from a list of lists or from one list."""
    return thing if not thing or isinstance(thing[0], (list, tuple)) else [thing]


class Group(ProcessGroup):
    """A process group whose CPU and CUDA backend is moeccl."""

    def __init__(self, store: Any, backend: Backend, devices: List[torch.device]) -> None:
        super().__init__(store, backend.rank(), backend.size())
        self._begin(backend)
        self._set_default_backend(ProcessGroup.BackendType.CUSTOM)
        for device in devices:
            self._register_backend(device, ProcessGroup.BackendType.CUSTOM, backend)

    def _begin(self, backend: Backend) -> None:
        self._backend = backend
        self._all_reduce = backend.allreduce
        self._splits = 0
        backend.supports_splitting = hasattr(ProcessGroup, "split_group")  # an older torch would make the group of a split itself

    def getBackendName(self) -> str:
        return "moeccl"

    def register_pre_hook(self, *_: Any) -> None:
        raise RuntimeError("calls on a group of moeccl do not pass torch's hooks: make it with "
                           "pg_options=moeccl.distributed.Options(direct=False), in torch 2.14 or newer")

    register_post_hook = register_pre_hook

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, **kw: Any) -> Any:
        if type(opts) is AllreduceOptions and type(tensors) is list:
            return self._all_reduce(tensors, opts)
        if type(opts) is not AllreduceOptions:
            op = kw.get("op", ReduceOp.SUM if opts is None else opts)
            opts = _options(AllreduceOptions, kw.get("opts", opts), timeout, reduceOp=op)
        return self._backend.allreduce(_listed(tensors), opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, **kw: Any) -> Any:
        if isinstance(tensors, torch.Tensor):
            opts = _options(BroadcastOptions, None, timeout, rootRank=kw.get("root", opts))
        return self._backend.broadcast(_listed(tensors), opts if opts is not None else BroadcastOptions())

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self._backend.allreduce_coalesced(tensors, opts if opts is not None else AllreduceCoalescedOptions())

    def reduce(self, tensors: Any, opts: Any = None, op: Any = ReduceOp.SUM, timeout: Any = None, **kw: Any) -> Any:
        if isinstance(tensors, torch.Tensor):
            opts = _options(ReduceOptions, None, timeout, rootRank=kw.get("root", opts), reduceOp=op)
        return self._backend.reduce(_listed(tensors), opts if opts is not None else ReduceOptions())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        return self._backend.allgather(_nested(outputs), _listed(inputs), _options(AllgatherOptions, opts, timeout))

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self._backend.all_gather_single(output, input, opts if opts is not None else AllgatherOptions())

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._backend.all_gather_single_coalesced(outputs, inputs, opts if opts is not None else AllgatherOptions())

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._backend.allgather_coalesced(outputs, inputs, opts if opts is not None else AllgatherOptions())

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, **kw: Any) -> Any:
        if isinstance(inputs, torch.Tensor):
            opts = _options(GatherOptions, None, timeout, rootRank=kw.get("root", opts))
        return self._backend.gather(_nested(outputs), _listed(inputs), opts if opts is not None else GatherOptions())

    def gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self._backend.gather_single(output, input, opts if opts is not None else GatherOptions())

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, **kw: Any) -> Any:
        if isinstance(outputs, torch.Tensor):
            opts = _options(ScatterOptions, None, timeout, rootRank=kw.get("root", opts))
        return self._backend.scatter(_listed(outputs), _nested(inputs), opts if opts is not None else ScatterOptions())

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, **kw: Any) -> Any:
        if not isinstance(opts, ReduceScatterOptions):
            op = kw.get("op", ReduceOp.SUM if opts is None else opts)
            opts = _options(ReduceScatterOptions, None, timeout, reduceOp=op)
        return self._backend.reduce_scatter(_listed(outputs), _nested(inputs), opts)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self._backend.reduce_scatter_single(output, input, opts if opts is not None else ReduceScatterOptions())

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._backend.reduce_scatter_single_coalesced(outputs, inputs, opts if opts is not None else ReduceScatterOptions())

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None,
                          timeout: Any = None) -> Any:
        opts = _options(AllToAllOptions, opts, timeout)
        return self._backend.all_to_all_single(output, input, output_splits, input_splits, opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        return self._backend.alltoall(outputs, inputs, _options(AllToAllOptions, opts, timeout))

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        return self._backend.barrier(_options(BarrierOptions, opts, timeout))

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        return self._backend.send(tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        return self._backend.recv(tensors, peer, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._backend.recv_anysource(tensors, tag)

    recvAnysource = recv_anysource

    def _start_coalescing(self, device: Any) -> None:
        self._backend.start_coalescing()

    def _end_coalescing(self, device: Any) -> Any:
        return self._backend.end_coalescing()

    def split_group(self, new_ranks: List[int], timeout: Any = None, opts: Any = None, group_name: Optional[str] = None,
                    group_desc: Optional[str] = None, device_types: Any = None) -> Optional["Group"]:
        """Makes a group of some of this group's ranks, in their order; returns None on the others. It replaces torch's own split,
        which cannot take None from a Backend in Python."""
        self._splits += 1
        name = group_name or f"{self.group_name}:split:{self._splits}"
        # Groups that are split off at once have one name, and their ranks the same numbers.
        store = PrefixStore(f"{name}/{min(new_ranks, default=0)}/", self.get_group_store())
        made = self._backend.split(store, list(new_ranks), opts, timeout, name)
        if made is None:
            return None
        group = type(self)(store, made, list(device_types or self._device_types))
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split:{self._splits}")
        return group
