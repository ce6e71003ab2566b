# SPDX-License-Identifier: Apache-2.0
"""Communicators and their collectives.

Every call on a communicator may take `stream`: a moeccl.Stream, a CUDA stream (torch's or CuPy's object, or its number), or
None, which makes it block without holding the interpreter lock. `type` overrides the buffers' own element type (bfloat16 in a
uint16 array). A buffer whose size or type does not fit the call raises ValueError or TypeError before anything is sent."""
import ctypes
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple, Union

from . import _abi
from ._buffers import Buffer, Held, common_type, plain
from ._errors import INT32, INT64, SIZE, check, listed, number, real, text
from ._library import lib
from ._owned import Leftovers, OfThisProcess
from .constants import AVG, ID_BYTES, SUM
from .memory import RedOp, Registration
from .streams import at_group_end, give_back, in_group, stream_handle

_MOST_RANKS = 65535
_byref = ctypes.byref


class UniqueId(_abi.moecclUniqueId):
    """The meeting point of the ranks and the key that admits them. Pass bytes(id) on over a channel that you trust."""

    @classmethod
    def from_bytes(cls, data: bytes) -> "UniqueId":
        """Makes an id from the bytes that another rank sent."""
        if len(data) != ID_BYTES:
            raise ValueError(f"an id has {ID_BYTES} bytes, not {len(data)}")
        return cls.from_buffer_copy(data)


def version() -> int:
    """Returns the library's version as one number: 100 is 0.1.0."""
    value = ctypes.c_int()
    check(lib.moecclGetVersion(_byref(value)))
    return value.value


def unique_id() -> UniqueId:
    """Makes an id and its meeting point in this process. Call it on one rank, once per communicator."""
    made = UniqueId()
    check(lib.moecclGetUniqueId(_byref(made)))
    return made


def fill(struct: Any, options: Any, skip: Sequence[str] = ()) -> None:
    """Sets the fields of a structure from keyword options and rejects values that do not fit their C type."""
    numbers = (ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_double, ctypes.c_char_p)
    kinds = {name: kind for name, kind, *_ in struct._fields_ if name != "size" and name not in skip and kind in numbers}
    for name, value in options.items():
        if name not in kinds:
            raise TypeError(f"unknown option {name}: there are " + ", ".join(kinds))
        kind = kinds[name]
        if kind is ctypes.c_char_p:
            setattr(struct, name, text(name, value))
        elif kind is ctypes.c_double:
            setattr(struct, name, real(name, value))
        else:
            limits = SIZE if kind is ctypes.c_size_t else INT64 if kind is ctypes.c_int64 else INT32
            setattr(struct, name, number(name, value, limits))


def _config(options: Any) -> _abi.moecclConfig_t:
    config = _abi.moecclConfig_t()
    fill(config, options)
    return config


def init_all(n_ranks: int, **options: Any) -> List["Comm"]:
    """Makes n_ranks communicators in this process. Drive each from its own thread, or all in group()s. Options: see Comm."""
    n_ranks = number("n_ranks", n_ranks, (1, _MOST_RANKS))
    handles, config = (ctypes.c_void_p * n_ranks)(), _config(options)
    comms = [Comm.__new__(Comm) for _ in range(n_ranks)]

    def joined() -> None:
        for comm, handle in zip(comms, handles):
            comm._handle = handle

    for rank, comm in enumerate(comms):
        comm._begin(rank, n_ranks, config.deterministic)
    if in_group():
        at_group_end(joined)
    check(lib.moecclCommInitAll(handles, n_ranks, _byref(config)))
    joined()
    return comms


class Comm(OfThisProcess):
    """One rank's communicator; `rank` is its number, `size` the number of ranks, and `deterministic` as the option says.

    Options: timeout_ms, init_timeout_ms, deterministic, pace, topology, staging_bytes, name, priority, cuda_sms, as in
    moecclConfig_t (include/moeccl/comm.h). The constructor blocks until all ranks have joined; in a group() they join at its end, and the
    object can be used after it."""
    _handle: Optional[int]
    _instead = "give it bytes(moeccl.unique_id()) and call moeccl.Comm(n_ranks, id, rank) there; save a model as its state_dict()"

    def __init__(self, n_ranks: int, id: Union[UniqueId, bytes], rank: int, **options: Any) -> None:
        handle, config = ctypes.c_void_p(), _config(options)
        meeting = id if isinstance(id, UniqueId) else UniqueId.from_bytes(id)
        n_ranks, rank = number("n_ranks", n_ranks), number("rank", rank)
        self._begin(rank, n_ranks, config.deterministic)

        def joined() -> None:
            self._handle = handle.value

        if in_group():
            at_group_end(joined)
        check(lib.moecclCommInitRankConfig(_byref(handle), n_ranks, meeting, rank, _byref(config)))
        joined()

    @classmethod
    def _of(cls, handle: Optional[int], deterministic: int) -> "Comm":
        comm, rank, size = cls.__new__(cls), ctypes.c_int(), ctypes.c_int()
        check(lib.moecclCommUserRank(handle, _byref(rank)))
        check(lib.moecclCommCount(handle, _byref(size)))
        comm._begin(rank.value, size.value, deterministic)
        comm._handle = handle
        return comm

    @classmethod
    def from_env(cls, **options: Any) -> "Comm":
        """Joins as the rank that the launcher (torchrun, mpirun, srun) assigned."""
        handle, config = ctypes.c_void_p(), _config(options)
        check(lib.moecclCommInitEnv(_byref(handle), _byref(config)))
        return cls._of(handle.value, config.deterministic)

    def _begin(self, rank: int, size: int, deterministic: int) -> None:
        """Sets everything but the handle, which comes when all ranks have joined."""
        self._handle = None
        self._closed, self._leftovers = False, Leftovers()
        self._registrations: Set[Registration] = set()  # those that are not closed, also if the caller keeps none
        self._before_close: List[Callable[["Comm"], None]] = []  # of others that use the handle: they stop with it
        self.rank, self.size, self.deterministic = rank, size, bool(deterministic)

    def _successor(self, handle: Optional[int], options: Dict[str, Any]) -> "Comm":
        """Returns the communicator of a handle that was made from this one, whose options it has unless some were given."""
        return Comm._of(handle, options.get("deterministic", 0) if options else self.deterministic)

    @property
    def handle(self) -> int:
        """The moecclComm_t as a number, for calls of moeccl._abi; 0 after close(), and before the end of the group that makes it."""
        return self._handle or 0

    def _check(self, code: int) -> None:
        if code != 0:
            if self._handle is None and not self._closed:
                raise ValueError("the communicator has not joined: use it after the end of the group that makes it")
            if self._handle is None:
                raise ValueError("the communicator is closed")
            check(code, self._handle)

    def split(self, color: int, key: int = 0, **options: Any) -> Optional["Comm"]:
        """Makes a new communicator of the ranks of one color, ordered by (key, rank); returns None for a negative color.

        The call is collective. Without options it inherits this communicator's options except topology and pace."""
        made = ctypes.c_void_p()
        config = _byref(_config(options)) if options else None
        self._check(lib.moecclCommSplit(self._handle, number("color", color), number("key", key), _byref(made), config))
        return self._successor(made.value, options) if made.value else None

    def shrink(self, exclude: Sequence[int] = (), abort: bool = False, **options: Any) -> "Comm":
        """Makes a new communicator of the ranks that stay, in their order: all except `exclude`, or all that are not gone if it is empty.

        It serves the ranks that remain after a failure, whatever the state of this communicator, which must still be closed. Every
        rank that stays makes the same call. abort: ends this rank's operations first. Options as for split()."""
        made, gone = ctypes.c_void_p(), [number("a rank of exclude", r) for r in listed("exclude", exclude)]
        ranks = (ctypes.c_int * len(gone))(*gone) if gone else None
        config = _byref(_config(options)) if options else None
        flags = _abi.MOECCL_SHRINK_ABORT if abort else _abi.MOECCL_SHRINK_DEFAULT
        self._check(lib.moecclCommShrink(self._handle, ranks, len(gone), _byref(made), config, flags))
        return self._successor(made.value, options)

    def unique_id(self) -> UniqueId:
        """Makes the id under which new ranks and this communicator's ranks meet. Call it on one rank, for one grow()."""
        made = UniqueId()
        self._check(lib.moecclCommGetUniqueId(self._handle, _byref(made)))
        return made

    def grow(self, n_ranks: int, id: Union[UniqueId, bytes, None] = None, **options: Any) -> "Comm":
        """Makes a new communicator of this one's ranks, followed by new ranks, which call Comm(n_ranks, id, rank).

        The call is collective. Pass `id` on the rank that has it from unique_id(), None on the others. Options as for split()."""
        made = ctypes.c_void_p()
        meeting = UniqueId.from_bytes(id) if isinstance(id, bytes) else id
        config = _byref(_config(options)) if options else None
        self._check(lib.moecclCommGrow(self._handle, number("n_ranks", n_ranks), _byref(meeting) if meeting else None, -1,
                                       _byref(made), config))
        return self._successor(made.value, options)

    def revoke(self) -> None:
        """Ends operations on all ranks and forbids later ones. Any thread may call it. Call shrink() or close() afterwards."""
        self._check(lib.moecclCommRevoke(self._handle))

    def set_priority(self, priority: int) -> None:
        """Sets the class of this rank's later calls (moeccl.PRIORITY_...; 0: by operation). All ranks should pass the same."""
        self._check(lib.moecclCommSetPriority(self._handle, number("priority", priority)))

    def async_error(self) -> int:
        """Returns 0, moecclInProgress (6) while operations run on streams, or the communicator's error."""
        result = ctypes.c_int()
        self._check(lib.moecclCommGetAsyncError(self._handle, _byref(result)))
        return result.value

    def memory_usage(self) -> int:
        """Returns the bytes that this communicator holds on this rank: control, staging and tables."""
        size = ctypes.c_size_t()
        self._check(lib.moecclCommMemoryUsage(self._handle, _byref(size)))
        return size.value

    def traffic(self) -> List[_abi.Traffic]:
        """Returns [size]: payload bytes and messages that this rank has stored into other ranks' memory since it joined."""
        to = (_abi.moecclTraffic_t * self.size)()
        self._check(lib.moecclCommTraffic(self._handle, to, self.size))
        return [_abi.Traffic(one.bytes, one.messages) for one in to]

    def register(self, buffer: Any) -> Registration:
        """Registers ordinary memory that will be used repeatedly, so that transports that need pinned memory can pin it. The memory is
        held until close() of the result or of this communicator, whether or not the result is kept."""
        return Registration(self, buffer)

    def premul_sum(self, scalar: Any, type: int) -> RedOp:
        """Makes an operator for op= that multiplies this rank's input by a scalar of the type and sums the products."""
        return RedOp(self, scalar, type)

    def finalize(self) -> None:
        """Waits until this rank's operations have finished. This call is not collective."""
        self._check(lib.moecclCommFinalize(self._handle))

    def abort(self) -> None:
        """Ends operations here and at the peers. Any thread may call it. Call close() afterwards."""
        self._check(lib.moecclCommAbort(self._handle))

    def close(self) -> None:
        """Waits for this rank's operations and frees the communicator."""
        if self._handle is not None:
            while self._before_close:
                self._before_close.pop()(self)
            self._leftovers.clear()
            check(lib.moecclCommDestroy(self._handle))  # refused while a group holds calls on it
            self._handle, self._closed = None, True
            self._leftovers.end()
            for registration in list(self._registrations):
                registration.close()

    def __enter__(self) -> "Comm":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _run(self, function: str, send: Any, recv: Any, blocks: Tuple[int, int], type_: Optional[int], op: Any = None,
             root: Any = None, stream: Any = None) -> None:
        """Runs a collective. blocks: (number of blocks in `send`, number of blocks in `recv`), each of `count` elements."""
        if type_ is None and recv is not None and self._run_plain(function, send, recv, blocks, op, root, stream):
            return
        out = Buffer(recv, True)
        buffers = [out] if send is None else [Buffer(send), out]
        try:
            first = buffers[0]
            tail = [] if op is None else [number("op", op)]
            if root is not None:
                tail.append(number("root", root))
            kind = common_type(function, buffers, type_, op == SUM or op == AVG)
            sides = [(b.count(kind), n) for b, n in zip((first, out), blocks) if b.present]
            if any(c % n for c, n in sides) or len({c // n for c, n in sides}) > 1:
                raise ValueError(f"{function}: {first.count(kind)} and {out.count(kind)} elements do not fit {self.size} ranks")
            self._check(getattr(lib, function)(first.data, out.data, sides[0][0] // sides[0][1], kind, *tail, self._handle,
                                               stream_handle(stream)))
        finally:
            give_back([*buffers, Held(op.scalar)] if isinstance(op, RedOp) else buffers, stream)

    def _run_plain(self, function: str, send: Any, recv: Any, blocks: Tuple[int, int], op: Any, root: Any, stream: Any) -> bool:
        """Does the same for buffers that plain() handles. Returns False, with nothing done, for others and for bad arguments."""
        out = plain(recv)
        if out is None:
            return False
        first = out if send is None else plain(send)
        if first is None or first[2] != out[2]:
            return False
        count, rest = divmod(first[1], blocks[0])
        if rest or count * blocks[1] != out[1] or not (op is None or op.__class__ is int and -2**31 <= op < 2**31):
            return False
        handle = None if stream is None else stream_handle(stream)
        call = getattr(lib, function)
        if root is None:
            if op is None:
                code = call(first[0], out[0], count, out[2], self._handle, handle)
            else:
                code = call(first[0], out[0], count, out[2], op, self._handle, handle)
        else:
            if root.__class__ is not int or not -2**31 <= root < 2**31:
                return False
            tail = (root,) if op is None else (op, root)
            code = call(first[0], out[0], count, out[2], *tail, self._handle, handle)
        if stream is not None or in_group():
            give_back((Held(first[3]), Held(out[3])), stream)
        if code != 0:
            if self._handle is None and not self._closed:
                self._check(code)
            check(code, self._handle)
        return True

    def all_reduce(self, send: Any, recv: Any = None, op: int = SUM, type: Optional[int] = None, stream: Any = None) -> None:
        """recv = reduction of send over ranks; without recv the call works in place."""
        if recv is None:
            self._run("moecclAllReduce", None, send, (1, 1), type, op, None, stream)
        else:
            self._run("moecclAllReduce", send, recv, (1, 1), type, op, None, stream)

    def reduce(self, send: Any, recv: Any = None, root: int = 0, op: int = SUM, type: Optional[int] = None,
               stream: Any = None) -> None:
        """Does the same only for the root. recv is a buffer there and None elsewhere."""
        self._run("moecclReduce", send, recv, (1, 1), type, op, root, stream)

    def broadcast(self, buffer: Any, root: int = 0, type: Optional[int] = None, stream: Any = None) -> None:
        """buffer = the root's buffer."""
        self._run("moecclBroadcast", None, buffer, (1, 1), type, None, root, stream)

    def all_gather(self, send: Any, recv: Any, type: Optional[int] = None, stream: Any = None) -> None:
        """recv[size, ...]: block r is rank r's send."""
        self._run("moecclAllGather", send, recv, (1, self.size), type, None, None, stream)

    def reduce_scatter(self, send: Any, recv: Any, op: int = SUM, type: Optional[int] = None, stream: Any = None) -> None:
        """recv = reduction of this rank's block of every send[size, ...]."""
        self._run("moecclReduceScatter", send, recv, (self.size, 1), type, op, None, stream)

    def all_to_all(self, send: Any, recv: Any, type: Optional[int] = None, stream: Any = None) -> None:
        """recv[r] = block `rank` of rank r's send[size, ...]."""
        self._run("moecclAllToAll", send, recv, (self.size, self.size), type, None, None, stream)

    def gather(self, send: Any, recv: Any = None, root: int = 0, type: Optional[int] = None, stream: Any = None) -> None:
        """At the root, recv[size, ...]: block r is rank r's send. Elsewhere recv is None."""
        self._run("moecclGather", send, recv, (1, self.size), type, None, root, stream)

    def scatter(self, send: Any, recv: Any, root: int = 0, type: Optional[int] = None, stream: Any = None) -> None:
        """recv = this rank's block of the root's send[size, ...]. On other ranks than the root, send is None."""
        if self.rank == root:
            self._run("moecclScatter", send, recv, (self.size, 1), type, None, root, stream)
            return
        buffer = Buffer(recv, True)
        try:
            kind = common_type("moecclScatter", [buffer], type)
            self._check(lib.moecclScatter(None, buffer.data, buffer.count(kind), kind, number("root", root), self._handle,
                                          stream_handle(stream)))
        finally:
            give_back([buffer], stream)

    def all_to_allv(self, send: Any, send_counts: Sequence[int], recv: Any, recv_counts: Sequence[int],
                    type: Optional[int] = None, stream: Any = None) -> None:
        """Exchanges dense blocks of unequal lengths, in the order of the ranks: send_counts[r] elements go to rank r."""
        buffers = [Buffer(send), Buffer(recv, True)]
        try:
            kind = common_type("moecclAllToAllv", buffers, type)
            arrays = []
            for buffer, given in zip(buffers, (send_counts, recv_counts)):
                counts = [number("a count", c, SIZE) for c in given]
                if len(counts) != self.size or sum(counts) > buffer.count(kind):
                    raise ValueError(f"counts {counts} do not fit {self.size} ranks and {buffer.bytes} bytes")
                starts = [0] * self.size
                for r in range(1, self.size):
                    starts[r] = starts[r - 1] + counts[r - 1]
                array = ctypes.c_size_t * self.size
                arrays.append([array(*counts), array(*starts)])
            self._check(lib.moecclAllToAllv(buffers[0].data, *arrays[0], buffers[1].data, *arrays[1], kind, self._handle,
                                            stream_handle(stream)))
        finally:
            give_back(buffers, stream)

    def _message(self, function: str, thing: Any, peer: int, type_: Optional[int], writable: bool, stream: Any) -> None:
        """Runs Send or Recv."""
        buffer = Buffer(thing, writable)
        try:
            kind = common_type(function, [buffer], type_)
            self._check(getattr(lib, function)(buffer.data, buffer.count(kind), kind, number("peer", peer), self._handle,
                                               stream_handle(stream)))
        finally:
            give_back([buffer], stream)

    def send(self, buffer: Any, peer: int, type: Optional[int] = None, stream: Any = None) -> None:
        """Sends to a peer, which receives in the order of the calls. Outside a group the call may block until the peer receives; a message that
        fits into the link's slots returns before."""
        self._message("moecclSend", buffer, peer, type, False, stream)

    def recv(self, buffer: Any, peer: int, type: Optional[int] = None, stream: Any = None) -> None:
        """Receives the peer's next message; raises moeccl.Error (moecclMismatch) if its size or type differs."""
        self._message("moecclRecv", buffer, peer, type, True, stream)
