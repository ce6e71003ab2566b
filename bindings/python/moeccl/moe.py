# SPDX-License-Identifier: Apache-2.0
"""Layers of experts: routing, dispatch and combine (include/moeccl/moe.h).

T is the number of tokens of this rank, R the number of rows that dispatch writes here (Routing.n_rows); a row has `hidden_bytes` bytes."""
import ctypes
from typing import Any, Optional, Sequence, Tuple

from . import _abi
from ._buffers import Buffer, Held, type_size
from ._errors import INT32, SIZE, Error, check, number, of_kind, text
from ._library import lib
from ._owned import OfThisProcess, Owned
from ._pages import page
from .comm import Comm
from .constants import EXPERT_MAJOR, FLOAT32
from .constants import INT32 as INT32_TYPE
from .streams import give_back, stream_handle

_byref = ctypes.byref
_nothing = ctypes.c_float()
_NAMED = ("size", "hidden_bytes", "type", "top_k", "n_experts", "expert_rank", "max_tokens", "layout", "algorithm")
_KINDS = {name: kind for name, kind, *_ in _abi.moecclMoeConfig_t._fields_}
_OPTIONS = [name for name in _KINDS if name not in _NAMED]


def _config(hidden_bytes: int, n_experts: int, top_k: int, max_tokens: int, type: int = FLOAT32, layout: int = EXPERT_MAJOR,
            expert_rank: Optional[Sequence[int]] = None, algorithm: Optional[str] = None, **options: Any) -> Any:
    """Makes the moecclMoeConfig_t from Moe's arguments."""
    numbers = {"hidden_bytes": hidden_bytes, "n_experts": n_experts, "top_k": top_k, "max_tokens": max_tokens}
    for name, value in options.items():
        if name not in _OPTIONS:
            raise TypeError(f"unknown option {name}: there are {', '.join(_OPTIONS)}")
        numbers[name] = value
    config = _abi.moecclMoeConfig_t()
    for name, value in numbers.items():
        setattr(config, name, number(name, value, SIZE if _KINDS[name] is ctypes.c_size_t else INT32))
    type_size(type)
    config.type, config.layout = type, number("layout", layout)
    config.algorithm = text("algorithm", algorithm) or None
    if expert_rank is not None:
        ranks = [number("a rank of expert_rank", r) for r in expert_rank]
        if len(ranks) != config.n_experts:
            raise ValueError(f"expert_rank has {len(ranks)} ranks for {config.n_experts} experts: give one for each")
        config.expert_rank = (ctypes.c_int32 * len(ranks))(*ranks)
    return config


class Moe(OfThisProcess):
    """A MoE layer's static description on a communicator. The constructor is collective.

    hidden_bytes: bytes of one token's row. type: element type of a row in combine. layout: EXPERT_MAJOR or ROWS. expert_rank:
    [n_experts] the owner of each expert; None: contiguous. Options: align_rows, capacity, memory_cap_bytes, trials,
    scale_bytes, scaled_row_bytes, staging_bytes, deterministic, as in moecclMoeConfig_t."""

    def __init__(self, comm: Comm, hidden_bytes: int, n_experts: int, top_k: int, max_tokens: int, type: int = FLOAT32,
                 layout: int = EXPERT_MAJOR, expert_rank: Optional[Sequence[int]] = None, algorithm: Optional[str] = None,
                 **options: Any) -> None:
        config = _config(hidden_bytes, n_experts, top_k, max_tokens, type, layout, expert_rank, algorithm, **options)
        handle = ctypes.c_void_p()
        of_kind("comm", comm, Comm)._leftovers.clear()
        comm._check(lib.moecclMoeCreate(_byref(handle), comm._handle, _byref(config)))
        self._set(comm, handle.value, config)

    @property
    def handle(self) -> int:
        """The moecclMoe_t as a number; 0 after close()."""
        return self._handle or 0

    @staticmethod
    def check(n_ranks: int, topology: Optional[str] = None, **shape: Any) -> None:
        """Raises Error with the limit and the remedy unless such a layer can run on n_ranks ranks of a topology.

        shape: Moe's arguments after comm. The call needs no communicator and is not collective."""
        message = ctypes.create_string_buffer(1024)
        config = _config(**shape)
        code = lib.moecclMoeCheck(_byref(config), number("n_ranks", n_ranks), text("topology", topology), message, len(message))
        if code != 0:
            raise Error(code, message.value.decode(errors="replace"))

    @staticmethod
    def query_size(n_ranks: int, topology: Optional[str] = None, **shape: Any) -> int:
        """Returns the most bytes of staging and tables that such a layer will hold on one rank. Arguments: see check()."""
        size, config = ctypes.c_size_t(), _config(**shape)
        check(lib.moecclMoeQuerySize(_byref(config), number("n_ranks", n_ranks), text("topology", topology), _byref(size)))
        return size.value

    @classmethod
    def _of(cls, comm: Comm, handle: Optional[int], config: Any) -> "Moe":
        made = cls.__new__(cls)
        made._set(comm, handle, config)
        return made

    def _set(self, comm: Comm, handle: Optional[int], config: Any) -> None:
        self.comm, self.top_k, self.row_bytes, self.type = comm, config.top_k, config.hidden_bytes, config.type
        self.scaled_row_bytes, self.scale_bytes = config.scaled_row_bytes or config.hidden_bytes, config.scale_bytes
        self.n_experts, self.max_tokens, self.layout = config.n_experts, config.max_tokens, config.layout
        # This rank's places for experts.
        self.n_slots = sum(config.expert_rank[e] == comm.rank for e in range(self.n_experts)) if config.expert_rank else \
            self.n_experts // comm.size + (comm.rank < self.n_experts % comm.size)
        self._handle, self._owned = handle, Owned(handle, lib.moecclMoeDestroy)

    def routing(self, topk_index: Any, topk_weight: Any = None) -> "Routing":
        """Makes one step's routing from topk_index[tokens, top_k] (int32) and topk_weight (float32, or None for ones)."""
        return Routing(self, topk_index, topk_weight)

    def close(self) -> None:
        """Frees the layer; the end of the last object that uses it does the same."""
        self._owned.close()
        self._handle = None


class Routing(OfThisProcess):
    """Where every token goes. n_rows is the number of rows that dispatch writes on this rank. The constructor is collective."""

    def __init__(self, moe: Moe, topk_index: Any, topk_weight: Any = None) -> None:
        self._moe = moe
        self._handle: Optional[int] = None
        index, weight = Buffer(topk_index), Buffer(topk_weight)
        try:
            n_tokens = self._tokens(index, weight)
            handle = ctypes.c_void_p()
            moe.comm._leftovers.clear()
            moe.comm._check(lib.moecclRoutingCreate(_byref(handle), moe._handle, index.data, weight.data, n_tokens))
            self._handle, self._owned = handle.value, Owned(handle.value, lib.moecclRoutingDestroy, moe.comm._leftovers)
        finally:
            index.release()
            weight.release()
        self._read()

    def update(self, topk_index: Any, topk_weight: Any = None) -> None:
        """Sets the next step's choices, as in Moe.routing(), and reuses this routing's memory. The call is collective. After a failure
        the routing is empty."""
        index, weight = Buffer(topk_index), Buffer(topk_weight)
        try:
            n_tokens = self._tokens(index, weight)
            self._moe.comm._check(lib.moecclRoutingUpdate(self._handle, index.data, weight.data, n_tokens))
        finally:
            index.release()
            weight.release()
        self._read()

    def update_on_stream(self, topk_index: Any, topk_weight: Any, stream: Any, n_tokens: Any = None) -> None:
        """Does the same in the order of a CUDA stream, with all arrays in CUDA memory; the host waits for nothing.

        n_tokens: a uint64 in CUDA memory that says how many rows of topk_index are tokens; None: all. Afterwards the counts are
        only on the device (device_info()), buffers need room for max_tokens and device_info().most_rows rows, and info() has
        no information until the next update()."""
        index, weight, count = Buffer(topk_index), Buffer(topk_weight), Buffer(n_tokens)
        try:
            if count.present and count.bytes != 8:
                raise ValueError(f"n_tokens has {count.bytes} bytes: give one uint64 in CUDA memory")
            given = self._tokens(index, weight)
            self._moe.comm._check(lib.moecclRoutingUpdateOnStream(self._handle, index.data, weight.data, given, count.data,
                                                                  stream_handle(stream)))
        finally:
            give_back([index, weight, count, Held(self)], stream)
        self._on_device = True
        self.n_tokens, self.n_rows = self._moe.max_tokens, self.device_info().most_rows

    def _tokens(self, index: Buffer, weight: Buffer) -> int:
        top_k = self._moe.top_k
        for name, buffer, wanted, words in (("topk_index", index, INT32_TYPE, "int32"), ("topk_weight", weight, FLOAT32, "float32")):
            if buffer.present and buffer.own_type() != wanted:
                raise TypeError(f"{name} holds elements of format {buffer.format!r}: give {words} (of a tensor: {name}.to(torch.{words}))")
        for name, buffer in (("topk_index", index), ("topk_weight", weight)):
            if buffer.bytes % (4 * top_k) or len(buffer.shape) > 1 and buffer.shape[-1] != top_k:
                raise ValueError(f"{name} has shape {buffer.shape}: give [tokens, {top_k}], as top_k says")
        if weight.present and weight.bytes != index.bytes:
            raise ValueError("topk_index and topk_weight differ in size")
        return int(index.bytes // (4 * top_k))

    def _read(self) -> None:
        info = self.info()
        self._on_device = False
        self.n_rows, self.n_tokens, self.n_unique, self.n_dropped = (
            info.n_rows, info.n_tokens, info.n_unique, info.n_dropped)

    @property
    def handle(self) -> int:
        """The moecclRouting_t as a number; 0 after close()."""
        return self._handle or 0

    def info(self) -> Any:
        """Returns the C structure moecclRoutingInfo_t; its pointers are valid as long as this routing lives."""
        info = _abi.moecclRoutingInfo_t()
        self._moe.comm._check(lib.moecclRoutingGetInfo(self._handle, _byref(info)))
        info.routing = self
        return info

    def device_info(self) -> Any:
        """Returns moecclRoutingDeviceInfo_t: where kernels find the counts, for CUDA graphs. Raises Error (moecclUnsupported) elsewhere."""
        info = _abi.moecclRoutingDeviceInfo_t()
        self._moe.comm._check(lib.moecclRoutingGetDeviceInfo(self._handle, _byref(info)))
        return info

    def explain(self) -> str:
        """Returns a page for a person: candidates and their predicted times, the choice and the reason, rows and bytes per level, steps."""
        return page(lambda *room: lib.moecclMoeExplain(self._handle, *room), self._moe.comm)

    def _run(self, function: str, source: Tuple[str, Any, int], target: Tuple[str, Any, int], sums: bool, stream: Any) -> None:
        """Runs a function. source, target: (name, buffer, rows). sums: the rows' elements have the layer's type."""
        buffers = [Buffer(source[1]), Buffer(target[1], True)]
        try:
            for (name, _, rows), buffer in zip((source, target), buffers):
                self._fits(function, name, buffer, rows, self._moe.row_bytes, sums)
            self._moe.comm._check(getattr(lib, function)(self._handle, buffers[0].data, buffers[1].data, stream_handle(stream)))
        finally:
            give_back([*buffers, Held(self)], stream)

    def _fits(self, function: str, name: str, buffer: Buffer, rows: int, row: int, sums: bool) -> None:
        """Checks that a buffer holds that many rows. After update_on_stream() that is the most, and the buffer may hold more."""
        if buffer.bytes != rows * row and not (self._on_device and buffer.bytes > rows * row):
            raise ValueError(f"{function}: {name} has {buffer.bytes} bytes, {rows} rows of {row} bytes are {rows * row}")
        if sums:
            buffer.holds(f"{function}: {name}", self._moe.type, "the layer")

    def dispatch(self, tokens: Any, rows: Any, stream: Any = None) -> None:
        """rows[n_rows, ...] = the tokens that this rank's experts need."""
        self._run("moecclDispatch", ("tokens", tokens, self.n_tokens), ("rows", rows, self.n_rows), False, stream)

    def combine(self, rows: Any, tokens: Any, stream: Any = None) -> None:
        """tokens[n_tokens, ...] = weighted sums over each token's experts."""
        self._run("moecclCombine", ("rows", rows, self.n_rows), ("tokens", tokens, self.n_tokens), True, stream)

    def dispatch_backward(self, grad_rows: Any, grad_tokens: Any, stream: Any = None) -> None:
        """grad_tokens[n_tokens, ...] = for each token the plain sum of grad_rows[n_rows, ...] over its rows."""
        self._run("moecclDispatchBackward", ("grad_rows", grad_rows, self.n_rows),
                  ("grad_tokens", grad_tokens, self.n_tokens), True, stream)

    def dispatch_scaled(self, tokens: Any, scales: Any, rows: Any, row_scales: Any, stream: Any = None) -> None:
        """Dispatches quantized rows (fp8) and their scales in one operation.

        tokens[n_tokens, scaled_row_bytes] and scales[n_tokens, scale_bytes] arrive as rows[n_rows, scaled_row_bytes] and
        row_scales[n_rows, scale_bytes]; padding is zeros in both. The layer needs scale_bytes."""
        given = (("tokens", tokens, self.n_tokens), ("scales", scales, self.n_tokens), ("rows", rows, self.n_rows),
                 ("row_scales", row_scales, self.n_rows))
        buffers = [Buffer(thing, n > 1) for n, (_, thing, _) in enumerate(given)]
        try:
            for n, ((name, _, rows_), buffer) in enumerate(zip(given, buffers)):
                self._fits("moecclDispatchScaled", name, buffer, rows_,
                           self._moe.scale_bytes if n % 2 else self._moe.scaled_row_bytes, False)
            self._moe.comm._check(lib.moecclDispatchScaled(self._handle, *[b.data for b in buffers], stream_handle(stream)))
        finally:
            give_back([*buffers, Held(self)], stream)

    def combine_backward(self, grad_tokens: Any, grad_rows: Any, rows: Any = None, grad_weight: Any = None,
                         stream: Any = None) -> None:
        """grad_rows[n_rows, ...] = the gradient of combine's input, from grad_tokens[n_tokens, ...].

        With rows[n_rows, ...], the input of combine, and grad_weight[n_tokens, top_k] (float32) it also computes the gradient of
        the weights (EXPERT_MAJOR only) and blocks. Either all ranks pass grad_weight or none does."""
        buffers = [Buffer(grad_tokens), Buffer(grad_rows, True), Buffer(rows), Buffer(grad_weight, True)]
        try:
            self._fits("moecclCombineBackward", "grad_tokens", buffers[0], self.n_tokens, self._moe.row_bytes, True)
            self._fits("moecclCombineBackward", "grad_rows", buffers[1], self.n_rows, self._moe.row_bytes, True)
            if grad_weight is not None:
                self._fits("moecclCombineBackward", "rows", buffers[2], self.n_rows, self._moe.row_bytes, True)
                wanted = 4 * self.n_tokens * self._moe.top_k
                if buffers[3].own_type() != FLOAT32 or buffers[3].bytes != wanted:
                    raise ValueError(f"grad_weight has {buffers[3].bytes} bytes of format {buffers[3].format!r}: give float32 "
                                     f"[{self.n_tokens}, {self._moe.top_k}], {wanted} bytes")
            pointer: Any = buffers[3].data
            if grad_weight is not None and not pointer:
                pointer = _byref(_nothing)  # no tokens, but not NULL, which requests the weights' gradient
            self._moe.comm._check(lib.moecclCombineBackward(self._handle, buffers[0].data, buffers[1].data, buffers[2].data, pointer,
                                                            stream_handle(stream)))
        finally:
            give_back([*buffers, Held(self)], stream)

    def close(self) -> None:
        """Frees the routing; the pointers of its info() become invalid. After the end of the last object that uses it, info() and calls on
        a Stream included, the communicator's next creation of a layer, routing or replacement, or its close(), does the same."""
        self._owned.close()
        self._handle = None
