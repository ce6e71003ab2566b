# SPDX-License-Identifier: Apache-2.0
"""The backend: torch's collectives on a communicator of the library.

A call with asyncOp False runs on the calling thread. Every other call gets its own host stream, and calls with CUDA tensors use
CUDA streams (cuda.py). The library runs the operations of a group in the order of their calls, whatever they run on."""
import ctypes
import threading
import warnings
from datetime import timedelta
from typing import Any, Dict, List, Optional, Sequence

import torch

from .. import _abi
from .._buffers import address
from .._library import lib
from . import barriers, calls, cuda, ending, meeting, reducing, sparse
from .base import Base
from .batches import Batch
from .deadlines import Deadlines
from .failure import BackendError, failure, milliseconds
from .kinds import OPERATORS, TYPES, kind_of
from .messages import Messages
from .options import config_of, configured, options_of_split
from .work import DoneWork, StreamWork, Streams, Work, copy_back

_profiled = torch.autograd._profiler_enabled
_TOGETHER_BYTES = 1 << 18  # coalesced tensors up to this size are reduced as one
_DONE = DoneWork("a blocking call", [])  # shared by all calls whose work torch does not pass on


class Backend(Base):
    """One rank's side of a process group."""

    def __init__(self, store: Any, rank: int, size: int, options: Any, group_name: str, split_from: Optional[int] = None) -> None:
        super().__init__(rank, size)
        self._store, self._options, self._name = store, options, group_name
        self._rank, self._size = rank, size
        self._lock = threading.Lock()  # a communicator is used by one thread at a time
        self._ending = threading.Lock()  # held by the thread that shuts down
        self._freeing = threading.Lock()  # held while communicators are aborted or given up to be freed, not while they run
        self.deadlines = Deadlines()
        self._streams = Streams(self._abort_cpu, self.deadlines)
        self._sequence = 0
        self.batch: Optional[Batch] = None  # between start_coalescing() and end_coalescing()
        self._byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._comm_ms: float = milliseconds(options._timeout) or 1800000.0
        self._limit_ms: Optional[float] = None  # set by set_timeout() if shorter than the communicator's
        self._cuda: Dict[int, int] = {}
        self.cuda_side = cuda.Side()
        self._handle: int = split_from if split_from is not None else self._meet("moeccl")
        self._prefix = meeting.prefix(self._handle)
        self._closed = self._aborted = False
        self._monitored = barriers.Monitored(store, f"{self._prefix}/monitored", rank, size)
        self._messages = Messages(store, f"{self._prefix}/messages", rank, size, self._comm_ms, config_of(options).get("priority", 0),
                                  self.failed, self.deadlines)
        ending.alive.add(self)

    def _meet(self, key: str) -> int:
        config = configured(self._options, self._comm_ms, self._name)
        return meeting.meet(self._store, key, self._size, self._rank, config)

    @property
    def options(self) -> Any:
        return self._options

    supports_splitting = False  # a Group sets it; torch itself cannot take None from a Backend in Python

    # torch asks for these, and its own implementations recurse without end for a Backend in Python.
    supports_coalescing = property(lambda self: torch.cuda.is_available())  # messages of CPU tensors need no batches
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
        self._check_open()
        if tensor.is_cpu:
            return self._handle
        if not tensor.is_cuda:
            raise ValueError(f"a tensor is on {tensor.device}: moeccl takes tensors on cpu and cuda")
        if tensor.device.index not in self._cuda:
            self._begin_on(tensor.device)
        return self._cuda[tensor.device.index]

    def _begin_on(self, device: torch.device) -> None:
        """Makes the communicator of a CUDA device, whose ranks meet over the group's own and not over the store: a dead rank is reported
        at once."""
        with self._lock:
            self._check_open()
            if device.index in self._cuda:  # by another thread
                return
            with torch.cuda.device(device):
                torch.cuda.current_stream().synchronize()  # makes the device's context this thread's
                config = configured(self._options, self._comm_ms, self._name)
                made = meeting.meet_over(self._handle, self._said(f"the first call on {device}"), self._size, self._rank, config)
            with self._freeing:
                self._cuda[device.index] = made

    def _check_open(self) -> None:
        if not self._closed:
            return
        if self._aborted:
            raise BackendError(_abi.moecclAborted, f"the group {self._name!r} was aborted: make a new one")
        raise RuntimeError(f"the group {self._name!r} is closed: make a new one")

    def _run(self, what: str, comm: int, made: calls.Made, outputs: Any, opts: Any, limit_ms: Optional[float] = None) -> Work:
        if _profiled():
            with torch.profiler.record_function(f"moeccl:{what}"):
                return self._issue(what, comm, made, outputs, opts, limit_ms)
        return self._issue(what, comm, made, outputs, opts, limit_ms)

    def _issue(self, what: str, comm: int, made: calls.Made, outputs: Any, opts: Any, limit_ms: Optional[float]) -> Work:
        every, after = made
        self._sequence += 1
        if limit_ms is None:
            limit_ms = self._limit_ms
        asynchronous = getattr(opts, "asyncOp", True) is not False
        if limit_ms is None and asynchronous and hasattr(opts, "timeout"):
            limit_ms = milliseconds(opts.timeout)
            if limit_ms is not None and limit_ms >= self._comm_ms:
                limit_ms = None
        if comm in self._cuda.values():
            return cuda.run(self, what, comm, made, outputs, asynchronous, limit_ms)
        if not asynchronous and limit_ms is None:
            with self._lock:
                self._check_open()
                for call in every:
                    code = call[0](*call[1:-1], None)
                    if code != 0:
                        raise failure(self._said(what), code, comm)
                earlier = self._streams.in_flight()
            for one in earlier:
                one.complete()
            if after is not None:
                copy_back(after)
            return _DONE
        work = StreamWork(self._streams, self._said(what), outputs, comm, every, after, limit_ms)
        refused = None
        with self._lock:
            self._check_open()
            for call in every:
                code = call[0](*call[1:-1], work.stream)
                if code != 0:
                    refused = failure(self._said(what), code, comm)
                    break
            work.issued(refused)
        if self.batch is not None:
            self.batch.works.append(work)
        if not asynchronous:
            work.wait()
        return work

    def _is_plain(self, opts: Any, output: torch.Tensor, input: torch.Tensor) -> bool:
        """Returns whether a call blocks and its tensors can be given to the library as they are."""
        dtype = input.dtype
        return getattr(opts, "asyncOp", True) is False and self._limit_ms is None and dtype in TYPES and output.dtype is dtype and \
            input.is_cpu and output.is_cpu and input.layout is torch.strided and output.layout is torch.strided and \
            input.is_contiguous() and output.is_contiguous() and not input.is_neg() and not output.is_neg() and not _profiled()

    def _run_now(self, what: str, function: Any, *arguments: Any) -> Work:
        """Does the work of _issue() for a plain call without the overhead that small calls do not need."""
        self._sequence += 1
        with self._lock:
            self._check_open()
            code = function(*arguments, self._handle, None)
            if code != 0:
                raise failure(self._said(what), code, self._handle)
            earlier = self._streams.in_flight()
        for one in earlier:
            one.complete()
        return _DONE

    def failed(self) -> Optional[Exception]:
        """Returns the error that has broken the group, or None."""
        return self.error_of(self._said("a call"), self._handle)

    def error_of(self, what: str, comm: int) -> Optional[Exception]:
        """Returns the error that has broken one of the group's communicators, or None."""
        result = ctypes.c_int()
        with self._freeing:
            if comm == 0 or comm != self._handle and comm not in self._cuda.values():  # it has been freed
                return BackendError(_abi.moecclAborted, f"{what}: the group was aborted") if self._aborted else None
            code = lib.moecclCommGetAsyncError(comm, ctypes.byref(result)) or result.value
            if code in (_abi.moecclSuccess, _abi.moecclInProgress):
                return None
            return self.cuda_side.expired.get(comm) or failure(what, code, comm)

    def runs(self) -> bool:
        """Returns whether an operation of the group's communicators runs, on whatever thread or stream. A work that has run and that
        nobody has waited for does not."""
        result = ctypes.c_int()
        with self._freeing:
            for comm in (self._handle, *self._cuda.values()):
                if comm and lib.moecclCommGetAsyncError(comm, ctypes.byref(result)) == 0 and result.value == _abi.moecclInProgress:
                    return True
        return False

    def check(self) -> None:
        """Waits for the group's CUDA devices, and raises the error that has broken one of its communicators."""
        self._check_open()
        for index in self._cuda:
            torch.cuda.synchronize(index)
        for comm in (self._handle, *self._cuda.values()):
            error = self.error_of(self._said("check"), comm)
            if error is not None:
                raise error

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
        if len(tensors) == 1 and op is not None and kind is not None and t.dtype is not torch.bool and \
                t.layout is torch.strided and t.is_contiguous() and not t.is_neg():  # no type in TYPES is conjugated
            at = address(t)
            if comm == self._handle and self._limit_ms is None and getattr(opts, "asyncOp", True) is False and not _profiled():
                return self._run_now("allreduce", lib.moecclAllReduce, at, at, t.numel(), kind, op)
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
        return self._run("allgather", comm, calls.all_gather_list(comm, self._rank, self._size, outputs[0], t), outputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        if self._is_plain(opts, output, input) and output.numel() == input.numel() * self._size:
            return self._run_now("all_gather_single", lib.moecclAllGather, address(input), address(output), input.numel(),
                                 TYPES[input.dtype])
        comm = self._comm(input)
        return self._run("all_gather_single", comm, calls.all_gather_single(comm, self._size, output, input), [output], opts)

    _allgather_base = all_gather_single

    def allgather_coalesced(self, outputs: List[List[torch.Tensor]], inputs: List[torch.Tensor], opts: Any) -> Work:
        """outputs[rank][i] = rank's inputs[i]."""
        if len(outputs) != self._size or any(len(o) != len(inputs) for o in outputs):
            raise ValueError(f"allgather_coalesced: give {self._size} lists of {len(inputs)} output tensors each")
        made = [calls.all_gather_list(self._comm(t), self._rank, self._size, [o[i] for o in outputs], t)
                for i, t in enumerate(inputs)]
        return self._run_all("allgather_coalesced", inputs, made, outputs, opts)

    def all_gather_single_coalesced(self, outputs: List[torch.Tensor], inputs: List[torch.Tensor], opts: Any) -> Work:
        what = "all_gather_single_coalesced"
        made = [calls.all_gather_single(self._comm(t), self._size, o, t) for o, t in calls.pairs(what, outputs, inputs)]
        return self._run_all(what, inputs, made, outputs, opts)

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
        made = reducing.reduce_scatter_list(comm, self._rank, self._size, t, inputs[0], opts.reduceOp)
        return self._run("reduce_scatter", comm, made, outputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        op = OPERATORS.get(kind_of(opts.reduceOp))
        if op is not None and self._is_plain(opts, output, input) and input.numel() == output.numel() * self._size and \
                input.dtype is not torch.bool:
            return self._run_now("reduce_scatter_single", lib.moecclReduceScatter, address(input), address(output), output.numel(),
                                 TYPES[input.dtype], op)
        comm = self._comm(input)
        made = reducing.reduce_scatter(comm, self._size, "reduce_scatter_single", output, input, opts.reduceOp)
        return self._run("reduce_scatter_single", comm, made, [output], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: List[torch.Tensor], inputs: List[torch.Tensor], opts: Any) -> Work:
        what = "reduce_scatter_single_coalesced"
        made = [reducing.reduce_scatter(self._comm(t), self._size, what, o, t, opts.reduceOp)
                for o, t in calls.pairs(what, outputs, inputs)]
        return self._run_all(what, inputs, made, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, output_splits: Sequence[int],
                          input_splits: Sequence[int], opts: Any) -> Work:
        if type(output_splits) is list and type(input_splits) is list and not output_splits and not input_splits and \
                self._is_plain(opts, output, input):
            blocks = calls.even_blocks_of(self._size, output, input)
            if blocks is not None:
                # Not AllToAll: a rank cannot see whether others give split sizes, and all ranks must make the same call.
                return self._run_now("all_to_all_single", lib.moecclAllToAllv, address(input), *blocks, address(output), *blocks,
                                     TYPES[input.dtype])
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
        if getattr(opts, "asyncOp", False) is False:  # it waits for the GPU, as with nccl; on an older torch, which does not say, always
            for index in list(self._cuda):
                torch.cuda.current_stream(index).synchronize()
        at = self._byte.data_ptr()
        call = (lib.moecclAllReduce, at, at, 1, _abi.moecclUint8, _abi.moecclMax, self._handle, self._byte)
        self._comm(self._byte)
        limit = milliseconds(getattr(opts, "timeout", None))
        return self._run("barrier", self._handle, ([call], None), [], opts, limit if limit and limit < self._comm_ms else None)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        given: timedelta = getattr(opts, "timeout", opts)
        ms = given.total_seconds() * 1000
        if ms < 0:  # no timeout was given
            ms = self._limit_ms or self._comm_ms
        self._monitored.wait(ms, wait_all_ranks)

    # Point to point.

    def send(self, tensors: List[torch.Tensor], peer: int, tag: int = 0) -> Optional[Work]:
        return self._message("send", tensors, peer, tag)

    def recv(self, tensors: List[torch.Tensor], peer: int, tag: int = 0) -> Optional[Work]:
        return self._message("recv", tensors, peer, tag)

    def recv_anysource(self, tensors: List[torch.Tensor], tag: int = 0) -> Optional[Work]:
        return self._message("recv_anysource", tensors, None, tag)

    recvAnysource = recv_anysource

    def _message(self, what: str, tensors: List[torch.Tensor], peer: Optional[int], tag: int) -> Optional[Work]:
        try:
            t = self._one(what, tensors)
            comm = self._comm(t)
            if not t.is_cpu:
                return cuda.message(self, what, comm, t, peer, tag)
            send = what == "send" and peer is not None
            work = self._messages.send(t, peer or 0, tag) if send else self._messages.receive(t, peer, tag)
        except BaseException:
            self.batch = None  # torch does not end a batch in which a call has failed
            raise
        if self.batch is not None:
            self.batch.works.append(work)
        return work

    def start_coalescing(self) -> None:
        self.batch = Batch()

    def end_coalescing(self) -> Work:
        batch, self.batch = self.batch, None
        return batch.end(self) if batch is not None else DoneWork("a batch", [])

    # The group's life.

    def split(self, store: Any, ranks: Sequence[int], opts: Any = None, timeout: Optional[timedelta] = None,
              name: str = "") -> Optional["Backend"]:
        """Makes a backend of some ranks of this one, in their order. All ranks of this backend call it."""
        if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= r < self._size for r in ranks):
            raise ValueError(f"split: ranks are {list(ranks)}: give different ones from 0 to {self._size - 1}")
        inside = self._rank in ranks
        made = ctypes.c_void_p()
        color, key = (min(ranks), list(ranks).index(self._rank)) if inside else (-1, 0)
        own = options_of_split(self._options, opts, timeout)
        timeout = own._timeout
        config = configured(own, milliseconds(timeout) or self._comm_ms, name)
        with self._lock:
            code = lib.moecclCommSplit(self._handle, color, key, ctypes.byref(made), ctypes.byref(config))
        if code != 0:
            raise failure(self._said("split"), code, self._handle)
        if not inside:
            return None
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
        if ms > self._comm_ms:
            warnings.warn(f"set_timeout: collectives of group {self._name or '0'} go on to fail after {self._comm_ms:.0f} ms, the timeout "
                          f"with which it was made; only messages wait for {timeout}: make the group with the longest timeout that it "
                          "needs", stacklevel=2)

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: sequence numbers begin with 0 on all ranks."""

    def abort(self) -> None:
        """Ends all operations, on this rank and on the peers; waiting calls fail. The group's memory, descriptors and threads are
        freed in the background, because a call that is still on its way out may belong to the thread that aborts."""
        self.stop()
        try:
            threading.Thread(target=self.shutdown, name="moeccl-abort", daemon=True).start()
        except RuntimeError:  # at the interpreter's end no thread can start; ending.py does it then
            pass

    def stop(self) -> None:
        """Ends all operations, and frees nothing."""
        self._aborted = True
        self._abort_cpu()
        with self._freeing:
            for comm in self._cuda.values():
                lib.moecclCommAbort(comm)
        self._messages.abort()

    def _abort_cpu(self) -> None:
        with self._freeing:
            if self._handle:
                lib.moecclCommAbort(self._handle)

    def shutdown(self) -> None:
        """Finishes the collectives in flight and frees the communicators."""
        with self._ending:
            if self._closed:
                return
            self._closed = True
            self._messages.close()
            self._streams.close()
            self.deadlines.close()
            with self._lock:
                with self._freeing:
                    comms, self._handle, self._cuda = (self._handle, *self._cuda.values()), 0, {}
                for comm in comms:
                    lib.moecclCommDestroy(comm)
            ending.alive.discard(self)

    # Helpers.

    def _run_all(self, what: str, inputs: Sequence[torch.Tensor], made: Sequence[calls.Made], outputs: Any, opts: Any) -> Work:
        if not made:
            return DoneWork(what, [])
        calls.on_one_device(what, inputs)
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


__all__ = ["Backend"]
