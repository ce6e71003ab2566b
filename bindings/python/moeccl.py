"""MoECCL from Python: the C interface over buffers (NumPy arrays, array.array, bytearray, memoryview), by ctypes alone.

    import moeccl, numpy as np
    comm = moeccl.Comm.from_env()              # under mpirun, torchrun or srun; or Comm(n_ranks, id, rank)
    x = np.ones(1024, np.float32)
    comm.all_reduce(x)                         # in place
    comm.all_gather(x, out)                    # out[n_ranks, 1024]

Buffers are C-contiguous; their element type is taken from the buffer (`type=` overrides it: bfloat16 in a uint16 array).
Counts are the sizes of the buffers, so that they cannot disagree with them; a buffer of another size or type than the
call needs raises ValueError or TypeError before anything is sent. A call without a stream blocks, without holding
the interpreter lock: thread ranks run side by side. Failures raise moeccl.Error with MoECCL's sentence and `.code`. The
library is found in LIBMOECCL, beside the installation, or by the dynamic linker."""
import contextlib
import ctypes
import operator
import os
import threading

INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8E4M3, FLOAT8E5M2 = range(12)
SUM, PROD, MAX, MIN, AVG = range(5)
ROWS, EXPERT_MAJOR = 0, 1  # layouts of a MoE layer
ID_BYTES = 128
_MOST_RANKS = 65536
_INT32 = (-2**31, 2**31 - 1)
_SIZE = (0, 2**64 - 1)


class Error(RuntimeError):
    """A failed call: str() is MoECCL's sentence, code its moecclResult_t, name the code's name."""

    def __init__(self, code, sentence):
        self.code, self.name = code, _lib.moecclGetErrorString(code).decode()
        super().__init__(f"{self.name}: {sentence}")


def _load():
    here = os.path.dirname(os.path.realpath(__file__))
    named = os.environ.get("LIBMOECCL")  # not MOECCL_...: the library would warn of a variable that it does not know
    tried = [named] if named else [os.path.join(here, "..", "libmoeccl.so.0"), "libmoeccl.so.0", "libmoeccl.so"]
    for name in tried:
        try:
            return ctypes.CDLL(name)
        except OSError as failure:
            last = failure
    raise ImportError(f"libmoeccl is not found ({last}): name its file in LIBMOECCL")


_lib = _load()
_lib.moecclGetErrorString.restype = ctypes.c_char_p
_lib.moecclGetLastError.restype = ctypes.c_char_p
_lib.moecclGetLastError.argtypes = [ctypes.c_void_p]
_lib.moecclTypeSize.restype = ctypes.c_size_t

_void, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class UniqueId(ctypes.Structure):
    """Where ranks meet, and the key that admits them: pass bytes(id) on over a channel that you trust."""
    _fields_ = [("internal", ctypes.c_char * ID_BYTES)]

    @classmethod
    def from_bytes(cls, data):
        if len(data) != ID_BYTES:
            raise ValueError(f"an id has {ID_BYTES} bytes, not {len(data)}")
        return cls.from_buffer_copy(data)


class _Config(ctypes.Structure):
    _fields_ = [("size", _size), ("timeout_ms", ctypes.c_int32), ("init_timeout_ms", ctypes.c_int32),
                ("deterministic", ctypes.c_int32), ("pace", ctypes.c_int32), ("topology", ctypes.c_char_p),
                ("staging_bytes", _size), ("name", ctypes.c_char_p), ("priority", ctypes.c_int32),
                ("cuda_sms", ctypes.c_int32)]


class _MoeConfig(ctypes.Structure):
    _fields_ = [("size", _size), ("hidden_bytes", _size), ("type", _int), ("top_k", ctypes.c_int32),
                ("n_experts", ctypes.c_int32), ("expert_rank", _void), ("max_tokens", _size), ("layout", _int),
                ("align_rows", ctypes.c_int32), ("capacity", ctypes.c_int32), ("memory_cap_bytes", _size),
                ("algorithm", ctypes.c_char_p), ("scale_bytes", _size), ("scaled_row_bytes", _size),
                ("staging_bytes", _size), ("deterministic", ctypes.c_int32), ("trials", ctypes.c_int32)]


class _LevelTraffic(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char * 32), ("rows", ctypes.c_uint64), ("bytes", ctypes.c_uint64),
                ("metadata_bytes", ctypes.c_uint64)]


class _RoutingInfo(ctypes.Structure):
    _fields_ = [("size", _size), ("n_tokens", _size), ("n_rows", _size), ("n_unique", _size),
                ("n_local_experts", ctypes.c_int32)] + [
        (name, ctypes.POINTER(kind)) for name, kind in (
            ("local_experts", ctypes.c_int32), ("expert_counts", ctypes.c_int32), ("expert_offsets", ctypes.c_int64),
            ("row_source", ctypes.c_int32), ("row_token", ctypes.c_int32), ("choice_offsets", ctypes.c_int64),
            ("choice_expert", ctypes.c_int32), ("choice_weight", ctypes.c_float), ("drop_counts", ctypes.c_int32))] + [
        ("n_dropped", ctypes.c_uint64), ("logical_bytes", ctypes.c_uint64), ("n_levels", ctypes.c_int32),
        ("levels", _LevelTraffic * 8), ("algorithm", ctypes.c_char * 32), ("emulated", ctypes.c_int32),
        ("predicted_dispatch_us", ctypes.c_double), ("predicted_combine_us", ctypes.c_double),
        ("measured_dispatch_us", ctypes.c_double), ("measured_combine_us", ctypes.c_double)]


class _PyBuffer(ctypes.Structure):  # CPython's Py_buffer
    _fields_ = [("buf", _void), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
                ("readonly", _int), ("ndim", _int), ("format", ctypes.c_char_p), ("shape", _void), ("strides", _void),
                ("suboffsets", _void), ("internal", _void)]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), _int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_PyBuffer)]
_WRITABLE, _FORMAT, _C_CONTIGUOUS = 0x1, 0x4, 0x8 | 0x10 | 0x20
_SIGNED, _UNSIGNED = {1: INT8, 4: INT32, 8: INT64}, {1: UINT8, 4: UINT32, 8: UINT64}
# By the letter of a buffer's format and the size of its elements: what "l" is differs between exporters.
_TYPES = ({letter: _SIGNED for letter in "bilqn"} | {letter: _UNSIGNED for letter in "BcILQN?"} |
          {"e": {2: FLOAT16}, "f": {4: FLOAT32}, "d": {8: FLOAT64}})


def _number(name, value, limits):
    """A whole number that fits where C has it: ctypes would cut what does not."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}: give a whole number") from None
    if not limits[0] <= number <= limits[1]:
        raise ValueError(f"{name} is {number}: give a number from {limits[0]} to {limits[1]}")
    return number


def _text(name, value):
    text = value.encode() if isinstance(value, str) else value
    if text is not None and (not isinstance(text, bytes) or b"\0" in text):
        raise TypeError(f"{name} is {value!r}: give a text without NUL")
    return text


def _type_size(type_):
    size = _lib.moecclTypeSize(_int(_number("type", type_, _INT32)))
    if size == 0:
        raise ValueError(f"type is {type_}: give one of moeccl.INT8 to moeccl.FLOAT8E5M2")
    return size


class _View:
    """A buffer while it is lent to MoECCL. None is no buffer of no elements."""

    def __init__(self, thing, writable=False):
        self.data, self.bytes, self._view, self.format, self.shape = None, 0, None, None, ()
        self.present, self.itemsize = thing is not None, 1
        if thing is None:
            return
        view = _PyBuffer()
        flags = _C_CONTIGUOUS | _FORMAT | (_WRITABLE if writable else 0)
        _get_buffer(thing, ctypes.byref(view), flags)  # raises BufferError (NumPy: ValueError) with its reason
        self._view = view
        self.data, self.bytes, self.itemsize = view.buf, view.len, max(1, view.itemsize)
        self.format = (view.format or b"B").decode().lstrip("@=<")
        if view.shape:
            self.shape = tuple(ctypes.cast(view.shape, ctypes.POINTER(ctypes.c_ssize_t))[:view.ndim])
        if "O" in self.format:
            raise TypeError("the buffer holds Python objects, which mean nothing to other ranks")

    def own_type(self):
        """The MoECCL type of its elements, None where there is none."""
        return _TYPES.get(self.format, {}).get(self.itemsize)

    def type(self):
        own = self.own_type()
        if own is None:
            raise TypeError(f"elements of format {self.format!r} have no MoECCL type: give type=")
        return own

    def count(self, type_):
        """Its elements when they are of type_."""
        size = _type_size(type_)
        if self.present and 1 not in (size, self.itemsize) and size != self.itemsize:
            raise TypeError(f"type= has {size} bytes, the buffer's elements have {self.itemsize}")
        if self.bytes % size:
            raise ValueError(f"{self.bytes} bytes are no whole number of elements of type {type_}")
        return self.bytes // size

    def release(self):
        if self._view is not None:
            view, self._view = self._view, None
            _release_buffer(ctypes.byref(view))

    def __del__(self):  # where a later argument was refused
        self.release()


def _check(code, comm=None):
    if code != 0:
        raise Error(code, _lib.moecclGetLastError(comm).decode(errors="replace"))


def _common_type(function, views, type_, op=None):
    """The type of all buffers of a call, or type_; what is summed has numbers for elements."""
    views = [v for v in views if v.present]
    if not views:
        raise TypeError(f"{function}: give a buffer")
    if type_ is not None:
        return type_
    kinds = {v.type() for v in views}
    if len(kinds) > 1:
        raise TypeError(f"{function}: the buffers' elements differ, {' and '.join(v.format for v in views)}: give two of "
                        "one type, or type=")
    if op in (SUM, AVG) and any(v.format == "?" for v in views):
        raise TypeError(f"{function}: truth values have no sum: use MAX (any) or MIN (all), or type=UINT8 for bytes")
    return kinds.pop()


def version():
    value = _int()
    _check(_lib.moecclGetVersion(ctypes.byref(value)))
    return value.value


def unique_id():
    """Makes an id and its meeting point in this process: on one rank, for one communicator."""
    made = UniqueId()
    _check(_lib.moecclGetUniqueId(ctypes.byref(made)))
    return made


@contextlib.contextmanager
def group():
    """Calls inside are issued together at its end: sends and receives in any order, several ranks from one thread.

    An exception that leaves the outermost group abandons it: nothing is issued."""
    _check(_lib.moecclGroupStart())
    _open.depth = getattr(_open, "depth", 0) + 1
    end = _lib.moecclGroupEnd
    try:
        yield
    except BaseException:
        if _open.depth == 1:
            end = _lib.moecclGroupCancel
        raise
    finally:
        _open.depth -= 1
        code = end()
        if _open.depth == 0:
            views, _open.views = getattr(_open, "views", []), []
            for view in views:
                view.release()
    _check(code)


class _Open(threading.local):
    """The calling thread's open group and the buffers lent to it."""


_open = _Open()


def _config(options):
    config, kinds = _Config(size=ctypes.sizeof(_Config)), dict(_Config._fields_[1:])
    for name, value in options.items():
        if name not in kinds:
            raise TypeError(f"unknown option {name}: there are " + ", ".join(kinds))
        if kinds[name] is ctypes.c_char_p:
            setattr(config, name, _text(name, value))
        else:
            setattr(config, name, _number(name, value, _SIZE if kinds[name] is _size else _INT32))
    return config


def init_all(n_ranks, **options):
    """n_ranks communicators in this process; drive them from one thread each, or in group()s."""
    n_ranks = _number("n_ranks", n_ranks, (1, _MOST_RANKS))
    handles, config = (_void * n_ranks)(), _config(options)
    _check(_lib.moecclCommInitAll(handles, _int(n_ranks), ctypes.byref(config)))
    return [Comm._of(h) for h in handles]


class Comm:
    """One rank's communicator. Options: timeout_ms, init_timeout_ms, deterministic, pace, topology, staging_bytes, name."""

    def __init__(self, n_ranks, id, rank, **options):
        handle, config = _void(), _config(options)
        id = id if isinstance(id, UniqueId) else UniqueId.from_bytes(id)
        n_ranks, rank = _number("n_ranks", n_ranks, _INT32), _number("rank", rank, _INT32)
        _check(_lib.moecclCommInitRankConfig(ctypes.byref(handle), _int(n_ranks), id, _int(rank), ctypes.byref(config)))
        self._set(handle.value)

    @classmethod
    def _of(cls, handle):
        comm = cls.__new__(cls)
        comm._set(handle)
        return comm

    @classmethod
    def from_env(cls, **options):
        """The rank that the launcher says: torchrun, mpirun, srun."""
        handle, config = _void(), _config(options)
        _check(_lib.moecclCommInitEnv(ctypes.byref(handle), ctypes.byref(config)))
        return cls._of(handle.value)

    def _set(self, handle):
        self._handle = _void(handle)
        rank, count = _int(), _int()
        self._check(_lib.moecclCommUserRank(self._handle, ctypes.byref(rank)))
        self._check(_lib.moecclCommCount(self._handle, ctypes.byref(count)))
        self.rank, self.size = rank.value, count.value

    def _check(self, code):
        _check(code, self._handle)

    def split(self, color, key=0):
        """Ranks of one color form a new communicator; a negative color joins none: None."""
        made = _void()
        color, key = _number("color", color, _INT32), _number("key", key, _INT32)
        self._check(_lib.moecclCommSplit(self._handle, _int(color), _int(key), ctypes.byref(made), None))
        return Comm._of(made.value) if made.value else None

    def abort(self):
        """Ends operations here and at the peers; from any thread. close() it afterwards."""
        self._check(_lib.moecclCommAbort(self._handle))

    def close(self):
        if self._handle.value:
            _check(_lib.moecclCommDestroy(self._handle))  # refused while a group holds calls on it
            self._handle = _void()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _run(self, function, send, recv, blocks, type_, op=None, root=None):
        """blocks: (blocks of `send`, blocks of `recv`) that one count stands for."""
        out = _View(recv, writable=True)
        views = [_View(send) if send is not None else out, out]
        try:
            tail = [_int(_number(n, v, _INT32)) for n, v in (("op", op), ("root", root)) if v is not None]
            kind = _common_type(function, views, type_, op)
            counts = [v.count(kind) for v in views]
            sides = [(c, b) for c, b, v in zip(counts, blocks, views) if v.present]
            if any(c % b for c, b in sides) or len({c // b for c, b in sides}) > 1:
                raise ValueError(f"{function}: {counts[0]} and {counts[1]} elements do not fit {self.size} ranks")
            count = sides[0][0] // sides[0][1]
            data = [_void(v.data) for v in views]
            self._check(getattr(_lib, function)(*data, _size(count), _int(kind), *tail, self._handle, None))
        finally:
            self._give_back(views if views[0] is not out else [out])

    @staticmethod
    def _give_back(views):
        if getattr(_open, "depth", 0):  # the group's end uses them
            _open.views = getattr(_open, "views", []) + views
            return
        for view in views:
            view.release()

    def all_reduce(self, send, recv=None, op=SUM, type=None):
        """recv = reduction of send over ranks; without recv in place."""
        self._run("moecclAllReduce", *((None, send) if recv is None else (send, recv)), (1, 1), type, op=op)

    def reduce(self, send, recv=None, root=0, op=SUM, type=None):
        """The same on the root alone; recv there is a buffer, elsewhere None."""
        self._run("moecclReduce", send, recv, (1, 1), type, op=op, root=root)

    def broadcast(self, buffer, root=0, type=None):
        self._run("moecclBroadcast", None, buffer, (1, 1), type, root=root)

    def all_gather(self, send, recv, type=None):
        """recv[size, ...]: block r is rank r's send."""
        self._run("moecclAllGather", send, recv, (1, self.size), type)

    def reduce_scatter(self, send, recv, op=SUM, type=None):
        """recv = reduction of this rank's block of every send[size, ...]."""
        self._run("moecclReduceScatter", send, recv, (self.size, 1), type, op=op)

    def all_to_all(self, send, recv, type=None):
        """recv[r] = block `rank` of rank r's send[size, ...]."""
        self._run("moecclAllToAll", send, recv, (self.size, self.size), type)

    def gather(self, send, recv=None, root=0, type=None):
        self._run("moecclGather", send, recv, (1, self.size), type, root=root)

    def scatter(self, send, recv, root=0, type=None):
        """send[size, ...] on the root, None elsewhere."""
        if self.rank == root:
            self._run("moecclScatter", send, recv, (self.size, 1), type, root=root)
            return
        view = _View(recv, writable=True)
        try:
            kind = _common_type("moecclScatter", [view], type)
            self._check(_lib.moecclScatter(None, _void(view.data), _size(view.count(kind)), _int(kind),
                                           _int(_number("root", root, _INT32)), self._handle, None))
        finally:
            self._give_back([view])

    def all_to_allv(self, send, send_counts, recv, recv_counts, type=None):
        """Dense blocks of unequal lengths, in the order of the ranks: send_counts[r] elements go to rank r."""
        views = [_View(send), _View(recv, writable=True)]
        try:
            kind = _common_type("moecclAllToAllv", views, type)
            arrays = []
            for view, given in zip(views, (send_counts, recv_counts)):
                counts = [_number("a count", c, _SIZE) for c in given]
                if len(counts) != self.size or sum(counts) > view.count(kind):
                    raise ValueError(f"counts {counts} do not fit {self.size} ranks and {view.bytes} bytes")
                starts = [sum(counts[:r]) for r in range(self.size)]
                arrays.append([(_size * self.size)(*counts), (_size * self.size)(*starts)])
            self._check(_lib.moecclAllToAllv(_void(views[0].data), *arrays[0], _void(views[1].data), *arrays[1],
                                             _int(kind), self._handle, None))
        finally:
            self._give_back(views)

    def _message(self, function, buffer, peer, type_, writable):
        view = _View(buffer, writable)
        try:
            kind = _common_type(function, [view], type_)
            self._check(getattr(_lib, function)(_void(view.data), _size(view.count(kind)), _int(kind),
                                                _int(_number("peer", peer, _INT32)), self._handle, None))
        finally:
            self._give_back([view])

    def send(self, buffer, peer, type=None):
        self._message("moecclSend", buffer, peer, type, False)

    def recv(self, buffer, peer, type=None):
        self._message("moecclRecv", buffer, peer, type, True)


class Moe:
    """A MoE layer's static description on a communicator. Options: expert_rank, align_rows, capacity, memory_cap_bytes, trials,
    algorithm. hidden_bytes: bytes of one token's row. Collective."""

    def __init__(self, comm, hidden_bytes, n_experts, top_k, max_tokens, type=FLOAT32, layout=EXPERT_MAJOR,
                 expert_rank=None, algorithm=None, **options):
        numbers = {"hidden_bytes": hidden_bytes, "n_experts": n_experts, "top_k": top_k, "max_tokens": max_tokens}
        for name, value in options.items():
            if name not in ("align_rows", "capacity", "memory_cap_bytes", "trials"):
                raise TypeError(f"unknown option {name}: there are align_rows, capacity, memory_cap_bytes, trials")
            numbers[name] = value
        config, kinds = _MoeConfig(size=ctypes.sizeof(_MoeConfig)), dict(_MoeConfig._fields_)
        for name, value in numbers.items():
            setattr(config, name, _number(name, value, _SIZE if kinds[name] is _size else _INT32))
        _type_size(type)
        config.type, config.layout = type, _number("layout", layout, _INT32)
        config.algorithm = _text("algorithm", algorithm) or None
        if expert_rank is not None:
            ranks = [_number("a rank of expert_rank", r, _INT32) for r in expert_rank]
            if len(ranks) != config.n_experts:
                raise ValueError(f"expert_rank has {len(ranks)} ranks for {config.n_experts} experts: give one for each")
            owners = (ctypes.c_int32 * len(ranks))(*ranks)
            config.expert_rank = ctypes.addressof(owners)
        self.comm, self.top_k, self.row_bytes, self.type = comm, config.top_k, config.hidden_bytes, config.type
        self._handle = _void()
        comm._check(_lib.moecclMoeCreate(ctypes.byref(self._handle), comm._handle, ctypes.byref(config)))

    def routing(self, topk_index, topk_weight=None):
        """One step's routing of topk_index[tokens, top_k] (int32) and topk_weight (float32, or None for ones)."""
        return Routing(self, topk_index, topk_weight)

    def close(self):
        if self._handle.value:
            _check(_lib.moecclMoeDestroy(self._handle))
            self._handle = _void()


class Routing:
    """Where every token goes. n_rows is the number of rows that dispatch writes on this rank. Collective."""

    def __init__(self, moe, topk_index, topk_weight):
        self._moe, self._handle = moe, _void()
        index, weight = _View(topk_index), _View(topk_weight)
        try:
            if index.present and index.type() != INT32 or weight.present and weight.type() != FLOAT32:
                raise TypeError("topk_index holds int32 and topk_weight float32")
            for name, view in (("topk_index", index), ("topk_weight", weight)):
                if view.bytes % (4 * moe.top_k) or len(view.shape) > 1 and view.shape[-1] != moe.top_k:
                    raise ValueError(f"{name} has shape {view.shape}: give [tokens, {moe.top_k}], as top_k says")
            if weight.present and weight.bytes != index.bytes:
                raise ValueError("topk_index and topk_weight differ in size")
            moe.comm._check(_lib.moecclRoutingCreate(ctypes.byref(self._handle), moe._handle, _void(index.data),
                                                     _void(weight.data), _size(index.bytes // (4 * moe.top_k))))
        finally:
            index.release()
            weight.release()
        info = self.info()
        self.n_rows, self.n_tokens, self.n_unique, self.n_dropped = (
            info.n_rows, info.n_tokens, info.n_unique, info.n_dropped)

    def info(self):
        """The C structure moecclRoutingInfo_t; its pointers live as long as this routing."""
        info = _RoutingInfo(size=ctypes.sizeof(_RoutingInfo))
        self._moe.comm._check(_lib.moecclRoutingGetInfo(self._handle, ctypes.byref(info)))
        info.routing = self
        return info

    def _run(self, function, source, target, sums):
        """source, target: (name, buffer, rows). sums: the rows' elements are of the layer's type."""
        views = [_View(source[1]), _View(target[1], writable=True)]
        try:
            for (name, _, rows), view in zip((source, target), views):
                if view.bytes != rows * self._moe.row_bytes:
                    raise ValueError(f"{function}: {name} has {view.bytes} bytes, {rows} rows of {self._moe.row_bytes} "
                                     f"bytes are {rows * self._moe.row_bytes}")
                own = view.own_type() if view.itemsize > 1 else None  # bytes, or what NumPy has no name for, may be any
                if sums and own not in (None, self._moe.type):
                    raise TypeError(f"{function}: {name} holds elements of format {view.format!r}, the layer's type is "
                                    f"{self._moe.type}")
            self._moe.comm._check(getattr(_lib, function)(self._handle, _void(views[0].data), _void(views[1].data), None))
        finally:
            Comm._give_back(views)

    def dispatch(self, tokens, rows):
        """rows[n_rows, ...] = the tokens that this rank's experts need."""
        self._run("moecclDispatch", ("tokens", tokens, self.n_tokens), ("rows", rows, self.n_rows), False)

    def combine(self, rows, tokens):
        """tokens[n_tokens, ...] = weighted sums over each token's experts."""
        self._run("moecclCombine", ("rows", rows, self.n_rows), ("tokens", tokens, self.n_tokens), True)

    def dispatch_backward(self, grad_rows, grad_tokens):
        self._run("moecclDispatchBackward", ("grad_rows", grad_rows, self.n_rows),
                  ("grad_tokens", grad_tokens, self.n_tokens), True)

    def close(self):
        if self._handle.value:
            _check(_lib.moecclRoutingDestroy(self._handle))
            self._handle = _void()
