# SPDX-License-Identifier: Apache-2.0
"""The backend: torch's collectives on a communicator of the library.

A call with asyncOp False runs on the calling thread. Every other call gets its own host stream, and calls with CUDA tensors use
the current CUDA stream. The library runs the operations of a group in the order of their calls, whatever they run on."""
import atexit
import ctypes
import threading
from datetime import timedelta
from typing import Any, Dict, List, Optional, Sequence, Set

import torch
from torch._C._distributed_c10d import Backend as _TorchBackend

from .. import _abi
from .._library import lib
from ..comm import fill
from . import barriers, calls, meeting, reducing, sparse
from .failure import failure, milliseconds
from .kinds import OPERATORS, TYPES, kind_of
from .messages import Messages
from .work import DoneWork, StreamWork, Streams, Work

_profiled = torch.autograd._profiler_enabled
_MEETING_MS = 60000.0  # the least time to form a group, however short its operations' timeout is: the library's own default
_TOGETHER_BYTES = 1 << 18  # coalesced tensors up to this size are reduced as one
_DONE = DoneWork("a blocking call", [])  # shared by all calls whose work torch does not pass on
# Backends live here until they are shut down, because torch's wrapper for DETAIL keeps only the C++ half of a backend.
_alive: Set[Any] = set()


@atexit.register
def _end_all() -> None:
    """Ends groups that were not destroyed: their threads must end before the interpreter does."""
    for backend in list(_alive):
        if backend._streams.busy():
            backend.abort()
        backend.shutdown()


_FIELDS = ("deterministic", "pace", "topology", "staging_bytes", "priority", "cuda_sms")


class Options(_TorchBackend.Options):
    """pg_options of a group: its timeout, and the fields of moecclConfig_t (include/moeccl/comm.h) by name, as in
    Options(topology="node:2 gpu:4", deterministic=1).

    With direct False, every call goes through torch's C++ side, where torch's hooks and flight recorder see it. This costs tens of
    microseconds, and works then offer only wait() and get_future()."""

    def __init__(self, timeout: Optional[timedelta] = None, direct: bool = True, **config: Any) -> None:
        if timeout is None:
            super().__init__("moeccl")
        else:
            super().__init__("moeccl", timeout=timeout)
        for name in config:
            if name not in _FIELDS:
                raise TypeError(f"unknown option {name}: there are timeout, direct, " + ", ".join(_FIELDS))
        self.direct, self.config = direct, config


def _configured(options: Any, timeout_ms: float, name: str, skip: Sequence[str] = ()) -> _abi.moecclConfig_t:
    config = _abi.moecclConfig_t()
    fill(config, {field: value for field, value in getattr(options, "config", {}).items() if field not in skip})
    config.timeout_ms = meeting.clamp_ms(timeout_ms)
    config.init_timeout_ms = meeting.clamp_ms(max(timeout_ms, _MEETING_MS))
    config.name = name.encode()[:31]
    return config


class Backend(_TorchBackend):
    """One rank's side of a process group."""

    def __init__(self, store: Any, rank: int, size: int, options: Any, group_name: str, split_from: Optional[int] = None) -> None:
        super().__init__(rank, size)
        self._store, self._options, self._name = store, options, group_name
        self._rank, self._size = rank, size
        self._lock = threading.Lock()  # a communicator is used by one thread at a time
        self._streams = Streams()
        self._sequence = 0
        self._byte = torch.zeros(1, dtype=torch.uint8)
        self._comm_ms: float = milliseconds(options._timeout) or 1800000.0
        self._limit_ms: Optional[float] = None  # set by set_timeout() if shorter than the communicator's
        self._prefix = meeting.prefix(store, rank)
        self._cuda: Dict[int, int] = {}
        self._handle: int = split_from if split_from is not None else self._meet("cpu")
        self._closed = False
        self._monitored = 0
        priority = getattr(options, "config", {}).get("priority", 0)
        self._messages = Messages(store, f"{self._prefix}/messages", rank, size, self._comm_ms, priority, self.failed)
        _alive.add(self)

    def _meet(self, what: str) -> int:
        config = _configured(self._options, self._comm_ms, self._name)
        return meeting.meet(self._store, f"{self._prefix}/{what}", self._size, self._rank, config)

    @property
    def options(self) -> Any:
        return self._options

    supports_splitting = False  # a Group sets it; torch itself cannot take None from a Backend in Python

    # torch asks for these, and its own implementations recurse without end for a Backend in Python.
    supports_coalescing = property(lambda self: False)
    supports_shrinking = property(lambda self: False)
    supports_reconfigure = property(lambda self: False)
    supports_window = property(lambda self: False)
    _supports_time_estimate = property(lambda self: False)

    @property
    def comm_handle(self) -> int:
        """The moecclComm_t for CPU tensors, for calls of moeccl._abi, which are ordered with the group's calls in program order."""
        return self._handle

    def name(self) -> str:
        return "moeccl"

    getBackendName = name

    # Running calls.

    def _comm(self, tensor: torch.Tensor) -> int:
        if self._closed:
            raise RuntimeError(f"the group {self._name!r} is closed: make a new one")
        if tensor.is_cpu:
            return self._handle
        if not tensor.is_cuda:
            raise ValueError(f"a tensor is on {tensor.device}: moeccl takes tensors on cpu and cuda")
        index = tensor.device.index
        if index not in self._cuda:
            with torch.cuda.device(tensor.device):
                torch.cuda.current_stream().synchronize()  # makes the device's context this thread's
                self._cuda[index] = self._meet(f"cuda/{len(self._cuda)}")
        return self._cuda[index]

    def _run(self, what: str, comm: int, made: calls.Made, outputs: Any, opts: Any, limit_ms: Optional[float] = None) -> Any:
        if _profiled():
            with torch.profiler.record_function(f"moeccl:{what}"):
                return self._issue(what, comm, made, outputs, opts, limit_ms)
        return self._issue(what, comm, made, outputs, opts, limit_ms)

    def _issue(self, what: str, comm: int, made: calls.Made, outputs: Any, opts: Any, limit_ms: Optional[float]) -> Any:
        every, after = made
        self._sequence += 1
        if comm != self._handle:
            return self._run_on_cuda(what, comm, every, after, outputs)
        if limit_ms is None:
            limit_ms = self._limit_ms
        if getattr(opts, "asyncOp", True) is False and limit_ms is None:
            with self._lock:
                for call in every:
                    code = call[0](*call[1:-1], None)
                    if code != 0:
                        raise failure(self._said(what), code, comm)
            if after is not None:
                with torch.no_grad():
                    after()
            return _DONE
        if limit_ms is None and hasattr(opts, "timeout"):
            limit_ms = milliseconds(opts.timeout)
            if limit_ms is not None and limit_ms >= self._comm_ms:
                limit_ms = None
        work = StreamWork(self._streams, self._said(what), outputs, comm, every, after, limit_ms)
        refused = None
        with self._lock:
            for call in every:
                code = call[0](*call[1:-1], work.stream)
                if code != 0:
                    refused = failure(self._said(what), code, comm)
                    break
            work.issued(refused)
        if getattr(opts, "asyncOp", True) is False:
            work.wait()
        return work

    def _run_on_cuda(self, what: str, comm: int, every: Sequence[Any], after: calls.After, outputs: Any) -> Work:
        """Runs calls on the caller's current stream, as torch's own kernels do, so that later work on it comes after."""
        from . import cuda
        return cuda.run(self, what, comm, every, after, outputs)

    def failed(self) -> Optional[Exception]:
        """Returns the error that has broken the group, or None."""
        result = ctypes.c_int()
        code = lib.moecclCommGetAsyncError(self._handle, ctypes.byref(result)) or result.value
        return None if code in (_abi.moecclSuccess, _abi.moecclInProgress) else failure(self._said("a call"), code, self._handle)

    def _said(self, what: str) -> str:
        return f"{what} of rank {self._rank} of {self._size} in group {self._name or '0'}"

    # Collectives. If torch has an old and a new name, both are defined, because torch's versions forward to each other.

    def broadcast(self, tensors: List[torch.Tensor], opts: Any) -> Work:
        t = self._one("broadcast", tensors)
        comm = self._comm(t)
        return self._run("broadcast", comm, calls.broadcast(comm, self._rank, self._size, t, opts.rootRank), tensors, opts)

    def allreduce(self, tensors: List[torch.Tensor], opts: Any) -> Work:
        t = tensors[0]
        comm = self._comm(t)
        op = OPERATORS.get(kind_of(opts.reduceOp))
        kind = TYPES.get(t.dtype)
        if len(tensors) == 1 and op is not None and kind is not None and t.dtype is not torch.bool and t.is_contiguous() and \
                t.layout is torch.strided:
            at = t.data_ptr()
            if comm == self._handle and self._limit_ms is None and not _profiled() and getattr(opts, "asyncOp", True) is False:
                self._sequence += 1  # does the work of _issue() without the overhead that small calls do not need
                with self._lock:
                    code = lib.moecclAllReduce(at, at, t.numel(), kind, op, comm, None)
                    if code != 0:
                        raise failure(self._said("allreduce"), code, comm)
                return _DONE
            return self._run("allreduce", comm, ([(lib.moecclAllReduce, at, at, t.numel(), kind, op, comm, t)], None), tensors, opts)
        t = self._one("allreduce", tensors)
        if t.is_sparse:
            return self.allreduce_sparse(tensors, opts)
        return self._run("allreduce", comm, reducing.all_reduce(comm, self._size, "allreduce", t, opts.reduceOp), tensors, opts)

    def allreduce_sparse(self, tensors: List[torch.Tensor], opts: Any) -> Work:
        return sparse.all_reduce(self, self._one("allreduce", tensors), opts)

    def allreduce_coalesced(self, tensors: List[torch.Tensor], opts: Any) -> Work:
        if not tensors:
            return DoneWork("allreduce_coalesced", [])
        comm = self._comm(tensors[0])
        made = reducing.all_reduce_coalesced(comm, self._size, tensors, opts.reduceOp, _TOGETHER_BYTES)
        return self._run("allreduce_coalesced", comm, made, tensors, opts)

    def reduce(self, tensors: List[torch.Tensor], opts: Any) -> Work:
        t = self._one("reduce", tensors)
        comm = self._comm(t)
        made = reducing.reduce(comm, self._rank, self._size, t, opts.reduceOp, opts.rootRank)
        return self._run("reduce", comm, made, tensors, opts)

    def allgather(self, outputs: List[List[torch.Tensor]], inputs: List[torch.Tensor], opts: Any) -> Work:
        t = self._one("allgather", inputs)
        comm = self._comm(t)
        return self._run("allgather", comm, calls.all_gather_list(comm, self._size, outputs[0], t), outputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        comm = self._comm(input)
        return self._run("all_gather_single", comm, calls.all_gather_single(comm, self._size, output, input), [output], opts)

    _allgather_base = all_gather_single

    def allgather_coalesced(self, outputs: List[List[torch.Tensor]], inputs: List[torch.Tensor], opts: Any) -> Work:
        """outputs[rank][i] = rank's inputs[i]."""
        if len(outputs) != self._size or any(len(o) != len(inputs) for o in outputs):
            raise ValueError(f"allgather_coalesced: give {self._size} lists of {len(inputs)} output tensors each")
        made = [calls.all_gather_list(self._comm(t), self._size, [o[i] for o in outputs], t) for i, t in enumerate(inputs)]
        return self._run_all("allgather_coalesced", inputs, made, outputs, opts)

    def all_gather_single_coalesced(self, outputs: List[torch.Tensor], inputs: List[torch.Tensor], opts: Any) -> Work:
        made = [calls.all_gather_single(self._comm(t), self._size, o, t) for o, t in zip(outputs, inputs)]
        return self._run_all("all_gather_single_coalesced", inputs, made, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: List[List[torch.Tensor]], inputs: List[torch.Tensor], opts: Any) -> Work:
        t = self._one("gather", inputs)
        comm = self._comm(t)
        targets = outputs[0] if outputs else None
        return self._run("gather", comm, calls.gather(comm, self._rank, self._size, targets, t, opts.rootRank), outputs, opts)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        comm = self._comm(input)
        return self._run("gather_single", comm, calls.gather(comm, self._rank, self._size, [output], input, opts.rootRank),
                         [output], opts)

    gather_into_tensor = gather_single

    def scatter(self, outputs: List[torch.Tensor], inputs: List[List[torch.Tensor]], opts: Any) -> Work:
        t = self._one("scatter", outputs)
        comm = self._comm(t)
        sources = inputs[0] if inputs else None
        return self._run("scatter", comm, calls.scatter(comm, self._rank, self._size, t, sources, opts.rootRank), outputs, opts)

    def reduce_scatter(self, outputs: List[torch.Tensor], inputs: List[List[torch.Tensor]], opts: Any) -> Work:
        t = self._one("reduce_scatter", outputs)
        comm = self._comm(t)
        made = reducing.reduce_scatter_list(comm, self._size, t, inputs[0], opts.reduceOp)
        return self._run("reduce_scatter", comm, made, outputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        comm = self._comm(input)
        made = reducing.reduce_scatter(comm, self._size, "reduce_scatter_single", output, input, opts.reduceOp)
        return self._run("reduce_scatter_single", comm, made, [output], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: List[torch.Tensor], inputs: List[torch.Tensor], opts: Any) -> Work:
        what = "reduce_scatter_single_coalesced"
        made = [reducing.reduce_scatter(self._comm(t), self._size, what, o, t, opts.reduceOp) for o, t in zip(outputs, inputs)]
        return self._run_all(what, inputs, made, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, output_splits: Sequence[int],
                          input_splits: Sequence[int], opts: Any) -> Work:
        comm = self._comm(input)
        made = calls.all_to_all_single(comm, self._size, output, input, output_splits, input_splits)
        return self._run("all_to_all_single", comm, made, [output], opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: List[torch.Tensor], inputs: List[torch.Tensor], opts: Any) -> Work:
        if not inputs:
            raise ValueError(f"all_to_all: no input tensors for {self._size} ranks: give one for each")
        comm = self._comm(inputs[0])
        return self._run("all_to_all", comm, calls.all_to_all_list(comm, self._size, outputs, inputs), outputs, opts)

    def barrier(self, opts: Any) -> Work:
        at = self._byte.data_ptr()
        call = (lib.moecclAllReduce, at, at, 1, _abi.moecclUint8, _abi.moecclMax, self._handle, self._byte)
        self._comm(self._byte)
        limit = milliseconds(getattr(opts, "timeout", None))
        return self._run("barrier", self._handle, ([call], None), [], opts, limit if limit and limit < self._comm_ms else None)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        self._monitored += 1
        given: timedelta = getattr(opts, "timeout", opts)
        ms = given.total_seconds() * 1000
        if ms < 0:  # no timeout was given
            ms = self._limit_ms or self._comm_ms
        barriers.monitored(self._store, f"{self._prefix}/monitored/{self._monitored}", self._rank, self._size, ms, wait_all_ranks)

    # Point to point.

    def send(self, tensors: List[torch.Tensor], peer: int, tag: int = 0) -> Work:
        return self._message("send", tensors, peer, tag)

    def recv(self, tensors: List[torch.Tensor], peer: int, tag: int = 0) -> Work:
        return self._message("recv", tensors, peer, tag)

    def recv_anysource(self, tensors: List[torch.Tensor], tag: int = 0) -> Work:
        return self._message("recv_anysource", tensors, None, tag)

    recvAnysource = recv_anysource

    def _message(self, what: str, tensors: List[torch.Tensor], peer: Optional[int], tag: int) -> Work:
        t = self._one(what, tensors)
        comm = self._comm(t)
        if comm != self._handle:
            from . import cuda
            return cuda.message(self, what, comm, t, peer, tag)
        if what == "send" and peer is not None:
            return self._messages.send(t, peer, tag)
        return self._messages.receive(t, peer, tag)

    # The group's life.

    def split(self, store: Any, ranks: Sequence[int], opts: Any = None, timeout: Optional[timedelta] = None,
              name: str = "") -> Optional["Backend"]:
        """Makes a backend of some ranks of this one, in their order. All ranks of this backend call it."""
        if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= r < self._size for r in ranks):
            raise ValueError(f"split: ranks are {list(ranks)}: give different ones from 0 to {self._size - 1}")
        inside = self._rank in ranks
        made = ctypes.c_void_p()
        color, key = (min(ranks), list(ranks).index(self._rank)) if inside else (-1, 0)
        timeout = timeout or getattr(opts, "_timeout", None) or self._options._timeout
        config = _configured(self._options, milliseconds(timeout) or self._comm_ms, name, ("topology", "pace"))
        with self._lock:
            code = lib.moecclCommSplit(self._handle, color, key, ctypes.byref(made), ctypes.byref(config))
        if code != 0:
            raise failure(self._said("split"), code, self._handle)
        if not inside:
            return None
        own = Options(timeout, **getattr(self._options, "config", {}))
        above = list(self._options.global_ranks_in_group)
        own.global_ranks_in_group = [above[r] for r in ranks] if len(above) == self._size else list(ranks)
        own.group_name = name
        return Backend(store, key, len(ranks), own, name, made.value)

    def set_timeout(self, timeout: timedelta) -> None:
        ms = milliseconds(timeout)
        if ms is None:
            raise ValueError(f"timeout is {timeout}: give more than 0")
        self._options._timeout = timeout
        self._messages.timeout_ms = ms
        self._limit_ms = ms if ms < self._comm_ms else None

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: sequence numbers begin with 0 on all ranks."""

    def abort(self) -> None:
        """Ends all operations, on this rank and on the peers; waiting calls fail."""
        for comm in (self._handle, *self._cuda.values()):
            if comm:
                lib.moecclCommAbort(comm)
        self._messages.abort()

    def shutdown(self) -> None:
        """Finishes the collectives in flight and frees the communicators."""
        if self._closed:
            return
        self._closed = True
        _alive.discard(self)
        self._messages.close()
        self._streams.close()
        with self._lock:
            comms, self._handle, self._cuda = (self._handle, *self._cuda.values()), 0, {}
            for comm in comms:
                lib.moecclCommDestroy(comm)

    # Helpers.

    def _run_all(self, what: str, inputs: Sequence[torch.Tensor], made: Sequence[calls.Made], outputs: Any, opts: Any) -> Work:
        if not made:
            return DoneWork(what, [])
        every: List[Any] = []
        last: calls.After = None
        for some, after in made:
            every += some
            last = calls.both(last, after)
        return self._run(what, self._comm(inputs[0]), (every, last), outputs, opts)

    @staticmethod
    def _one(what: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(tensors) != 1:
            raise ValueError(f"{what}: {len(tensors)} tensors: give one")
        return tensors[0]


__all__ = ["Backend", "Options"]
