"""MoECCL from Python: the C interface over buffers (NumPy arrays, array.array, bytearray, memoryview), by ctypes alone.

    import moeccl, numpy as np
    comm = moeccl.Comm.from_env()              # under mpirun, torchrun or srun; or Comm(n_ranks, id, rank)
    x = np.ones(1024, np.float32)
    comm.all_reduce(x)                         # in place
    comm.all_gather(x, out)                    # out[n_ranks, 1024]

Buffers are C-contiguous; their element type is taken from the buffer (`type=` overrides it: bfloat16 in a uint16 array).
Counts are the sizes of the buffers, so that they cannot disagree with them. A call without a stream blocks, without holding
the interpreter lock: thread ranks run side by side. Failures raise moeccl.Error with MoECCL's sentence and `.code`. The
library is found in LIBMOECCL, beside the installation, or by the dynamic linker."""
import contextlib
import ctypes
import os
import threading

INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8E4M3, FLOAT8E5M2 = range(12)
SUM, PROD, MAX, MIN, AVG = range(5)
ROWS, EXPERT_MAJOR = 0, 1  # layouts of a MoE layer
ID_BYTES = 128


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
                ("algorithm", ctypes.c_char_p), ("scale_bytes", _size), ("scaled_row_bytes", _size)]


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
_LONG = {4: (INT32, UINT32), 8: (INT64, UINT64)}[ctypes.sizeof(ctypes.c_long)]
_TYPES = {"b": INT8, "B": UINT8, "c": UINT8, "?": UINT8, "i": INT32, "I": UINT32, "l": _LONG[0], "L": _LONG[1],
          "q": INT64, "Q": UINT64, "e": FLOAT16, "f": FLOAT32, "d": FLOAT64}


class _View:
    """A buffer while it is lent to MoECCL. None is no buffer of no elements."""

    def __init__(self, thing, writable=False):
        self.data, self.bytes, self._view, self.format = None, 0, None, None
        if thing is None:
            return
        view = _PyBuffer()
        flags = _C_CONTIGUOUS | _FORMAT | (_WRITABLE if writable else 0)
        _get_buffer(thing, ctypes.byref(view), flags)  # raises BufferError (NumPy: ValueError) with its reason
        self._view = view
        self.data, self.bytes = self._view.buf, self._view.len
        self.format = (self._view.format or b"B").decode().lstrip("@=<")

    def type(self):
        if self.format not in _TYPES:
            raise TypeError(f"elements of format {self.format!r} have no MoECCL type: give type=")
        return _TYPES[self.format]

    def release(self):
        if self._view is not None:
            view, self._view = self._view, None
            _release_buffer(ctypes.byref(view))

    def __del__(self):  # where a later argument was refused
        self.release()


def _check(code, comm=None):
    if code != 0:
        raise Error(code, _lib.moecclGetLastError(comm).decode())


def _count(view, type_):
    size = _lib.moecclTypeSize(type_)
    if size == 0 or view.bytes % size:
        raise ValueError(f"{view.bytes} bytes are no whole number of elements of type {type_}")
    return view.bytes // size


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
    """Calls inside are issued together at its end: sends and receives in any order, several ranks from one thread."""
    _check(_lib.moecclGroupStart())
    _open.depth = getattr(_open, "depth", 0) + 1
    try:
        yield
    finally:
        _open.depth -= 1
        code = _lib.moecclGroupEnd()
        if _open.depth == 0:
            views, _open.views = getattr(_open, "views", []), []
            for view in views:
                view.release()
    _check(code)


class _Open(threading.local):
    """The calling thread's open group and the buffers lent to it."""


_open = _Open()


def _config(options):
    config = _Config(size=ctypes.sizeof(_Config))
    for name, value in options.items():
        if name not in {f[0] for f in _Config._fields_[1:]}:
            raise TypeError(f"unknown option {name}: there are " + ", ".join(f[0] for f in _Config._fields_[1:]))
        setattr(config, name, value.encode() if isinstance(value, str) else value)
    return config


def init_all(n_ranks, **options):
    """n_ranks communicators in this process; drive them from one thread each, or in group()s."""
    handles, config = (_void * n_ranks)(), _config(options)
    _check(_lib.moecclCommInitAll(handles, _int(n_ranks), ctypes.byref(config)))
    return [Comm._of(h) for h in handles]


class Comm:
    """One rank's communicator. Options: timeout_ms, init_timeout_ms, deterministic, pace, topology, staging_bytes, name."""

    def __init__(self, n_ranks, id, rank, **options):
        handle, config = _void(), _config(options)
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
        self._check(_lib.moecclCommSplit(self._handle, _int(color), _int(key), ctypes.byref(made), None))
        return Comm._of(made.value) if made.value else None

    def abort(self):
        """Ends operations here and at the peers; from any thread. close() it afterwards."""
        self._check(_lib.moecclCommAbort(self._handle))

    def close(self):
        handle, self._handle = self._handle, _void()
        if handle.value:
            _check(_lib.moecclCommDestroy(handle))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _run(self, function, send, recv, blocks, tail, type_):
        """blocks: (blocks of `send`, blocks of `recv`) that one count stands for; the larger buffer decides it."""
        out = _View(recv, writable=True)
        views = [_View(send) if send is not None else out, out]
        try:
            given = views[0] if views[0].data is not None else out
            kind = given.type() if type_ is None else type_
            counts = [_count(v, kind) for v in views]
            sides = [(c, b) for c, b, v in zip(counts, blocks, views) if v.data is not None]
            if any(c % b for c, b in sides) or len({c // b for c, b in sides}) > 1:
                raise ValueError(f"{function}: {counts[0]} and {counts[1]} elements do not fit {self.size} ranks")
            count = sides[0][0] // sides[0][1] if sides else 0
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
        self._run("moecclAllReduce", *((None, send) if recv is None else (send, recv)), (1, 1), (_int(op),), type)

    def reduce(self, send, recv=None, root=0, op=SUM, type=None):
        """The same on the root alone; recv there is a buffer, elsewhere None."""
        self._run("moecclReduce", send, recv, (1, 1), (_int(op), _int(root)), type)

    def broadcast(self, buffer, root=0, type=None):
        self._run("moecclBroadcast", None, buffer, (1, 1), (_int(root),), type)

    def all_gather(self, send, recv, type=None):
        """recv[size, ...]: block r is rank r's send."""
        self._run("moecclAllGather", send, recv, (1, self.size), (), type)

    def reduce_scatter(self, send, recv, op=SUM, type=None):
        """recv = reduction of this rank's block of every send[size, ...]."""
        self._run("moecclReduceScatter", send, recv, (self.size, 1), (_int(op),), type)

    def all_to_all(self, send, recv, type=None):
        """recv[r] = block `rank` of rank r's send[size, ...]."""
        self._run("moecclAllToAll", send, recv, (self.size, self.size), (), type)

    def gather(self, send, recv=None, root=0, type=None):
        self._run("moecclGather", send, recv, (1, self.size), (_int(root),), type)

    def scatter(self, send, recv, root=0, type=None):
        """send[size, ...] on the root, None elsewhere."""
        if self.rank == root:
            self._run("moecclScatter", send, recv, (self.size, 1), (_int(root),), type)
        else:
            self._message_like("moecclScatter", recv, root, type)

    def _message_like(self, function, recv, root, type_):
        view = _View(recv, writable=True)
        try:
            kind = view.type() if type_ is None else type_
            self._check(getattr(_lib, function)(None, _void(view.data), _size(_count(view, kind)), _int(kind), _int(root),
                                                self._handle, None))
        finally:
            self._give_back([view])

    def all_to_allv(self, send, send_counts, recv, recv_counts, type=None):
        """Dense blocks of unequal lengths, in the order of the ranks: send_counts[r] elements go to rank r."""
        views = [_View(send), _View(recv, writable=True)]
        try:
            kind = views[0].type() if type is None else type
            arrays = []
            for view, counts in zip(views, (send_counts, recv_counts)):
                if len(counts) != self.size or sum(counts) > _count(view, kind):
                    raise ValueError(f"counts {list(counts)} do not fit {self.size} ranks and {view.bytes} bytes")
                starts = [sum(counts[:r]) for r in range(self.size)]
                arrays.append([(_size * self.size)(*map(int, counts)), (_size * self.size)(*map(int, starts))])
            self._check(_lib.moecclAllToAllv(_void(views[0].data), *arrays[0], _void(views[1].data), *arrays[1],
                                             _int(kind), self._handle, None))
        finally:
            self._give_back(views)

    def _message(self, function, buffer, peer, type_, writable):
        view = _View(buffer, writable)
        try:
            kind = view.type() if type_ is None else type_
            self._check(getattr(_lib, function)(_void(view.data), _size(_count(view, kind)), _int(kind), _int(peer),
                                                self._handle, None))
        finally:
            self._give_back([view])

    def send(self, buffer, peer, type=None):
        self._message("moecclSend", buffer, peer, type, False)

    def recv(self, buffer, peer, type=None):
        self._message("moecclRecv", buffer, peer, type, True)


class Moe:
    """A MoE layer's static description on a communicator. Options: expert_rank, align_rows, capacity, memory_cap_bytes,
    algorithm. hidden_bytes: bytes of one token's row. Collective."""

    def __init__(self, comm, hidden_bytes, n_experts, top_k, max_tokens, type=FLOAT32, layout=EXPERT_MAJOR,
                 expert_rank=None, algorithm=None, **options):
        self.comm, self.top_k = comm, top_k
        config = _MoeConfig(size=ctypes.sizeof(_MoeConfig), hidden_bytes=hidden_bytes, type=type, top_k=top_k,
                            n_experts=n_experts, max_tokens=max_tokens, layout=layout,
                            algorithm=algorithm.encode() if algorithm else None)
        if expert_rank is not None:
            owners = (ctypes.c_int32 * n_experts)(*map(int, expert_rank))
            config.expert_rank = ctypes.addressof(owners)
        for name, value in options.items():
            if name not in ("align_rows", "capacity", "memory_cap_bytes"):
                raise TypeError(f"unknown option {name}: there are align_rows, capacity, memory_cap_bytes")
            setattr(config, name, value)
        self._handle = _void()
        comm._check(_lib.moecclMoeCreate(ctypes.byref(self._handle), comm._handle, ctypes.byref(config)))

    def routing(self, topk_index, topk_weight=None):
        """One step's routing of topk_index[tokens, top_k] (int32) and topk_weight (float32, or None for ones)."""
        return Routing(self, topk_index, topk_weight)

    def close(self):
        handle, self._handle = self._handle, _void()
        if handle.value:
            _check(_lib.moecclMoeDestroy(handle))


class Routing:
    """Where every token goes. n_rows is the number of rows that dispatch writes on this rank. Collective."""

    def __init__(self, moe, topk_index, topk_weight):
        self._moe, self._handle = moe, _void()
        index, weight = _View(topk_index), _View(topk_weight)
        try:
            if index.data is not None and index.type() != INT32 or weight.data is not None and weight.type() != FLOAT32:
                raise TypeError("topk_index holds int32 and topk_weight float32")
            tokens = _count(index, INT32) // moe.top_k
            if topk_weight is not None and weight.bytes != index.bytes:
                raise ValueError("topk_index and topk_weight differ in size")
            moe.comm._check(_lib.moecclRoutingCreate(ctypes.byref(self._handle), moe._handle, _void(index.data),
                                                     _void(weight.data), _size(tokens)))
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
        return info

    def _run(self, function, source, target):
        views = [_View(source), _View(target, writable=True)]
        try:
            self._moe.comm._check(getattr(_lib, function)(self._handle, _void(views[0].data), _void(views[1].data), None))
        finally:
            for view in views:
                view.release()

    def dispatch(self, tokens, rows):
        """rows[n_rows, ...] = the tokens that this rank's experts need."""
        self._run("moecclDispatch", tokens, rows)

    def combine(self, rows, tokens):
        """tokens[n_tokens, ...] = weighted sums over each token's experts."""
        self._run("moecclCombine", rows, tokens)

    def dispatch_backward(self, grad_rows, grad_tokens):
        self._run("moecclDispatchBackward", grad_rows, grad_tokens)

    def close(self):
        handle, self._handle = self._handle, _void()
        if handle.value:
            _check(_lib.moecclRoutingDestroy(handle))
