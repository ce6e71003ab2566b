# SPDX-License-Identifier: Apache-2.0
"""Re-placing combine: samples go to the rank where this layer's combine and the next dispatch cross the fewest slow links
(include/moeccl/replace.h). T and R are as in moeccl.moe; combine's input has rows() rows."""
import array
import ctypes
from typing import Any, List, Optional, Tuple

from . import _abi
from ._abi import ReplaceInfo
from ._arrays import Given, made, record
from ._buffers import Buffer, Held
from ._errors import INT64, SIZE, check, number, of_kind, real
from ._library import lib
from ._owned import OfThisProcess, Owned
from .constants import FLOAT32
from .moe import Moe, Routing, _nothing
from .streams import give_back, stream_handle

_byref = ctypes.byref
MODES = {"solve": _abi.moecclReplaceSolve, "keep": _abi.moecclReplaceKeep, "given": _abi.moecclReplaceGiven}


class Replacement(OfThisProcess):
    """A layer's re-placing combine. The constructor is collective: all ranks pass the same arguments.

    sample_tokens: tokens of a sample; each rank's number of tokens is a multiple. mode: "solve", "keep" or "given". residual: combine's
    input has rows for a residual connection: 1 (or True) for the dispatched row, 2 for rows of the caller. use_next: begin() gets the
    next layer's counts (1) or choices (2). min_gain: least predicted gain, less Begin's time, for which samples move. refine_pairs: as in
    solve.samples()."""

    def __init__(self, moe: Moe, sample_tokens: int = 1, mode: str = "solve", residual: int = 0, use_next: int = 0,
                 min_gain: float = 0, refine_pairs: int = 0) -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}: there are {', '.join(MODES)}")
        config = _abi.moecclReplaceConfig_t()
        config.sample_tokens, config.mode = number("sample_tokens", sample_tokens, SIZE), MODES[mode]
        config.residual, config.use_next = number("residual", residual), number("use_next", use_next)
        config.min_gain = real("min_gain", min_gain)
        config.refine_pairs = number("refine_pairs", refine_pairs, INT64)
        self._moe, self._comm, self._routing = of_kind("moe", moe, Moe), moe.comm, None  # type: Moe, Any, Optional[Routing]
        self._sample_tokens, self._use_next, self._residual = config.sample_tokens, int(use_next), int(residual)
        self._given = mode == "given"
        handle = ctypes.c_void_p()
        self._comm._leftovers.clear()
        self._comm._check(lib.moecclReplaceCreate(_byref(handle), moe._handle, _byref(config)))
        self._handle: Optional[int] = handle.value
        self._owned = Owned(handle.value, lib.moecclReplaceDestroy, self._comm._leftovers)

    @property
    def handle(self) -> int:
        """The moecclReplacement_t as a number; 0 after close()."""
        return self._handle or 0

    def begin(self, routing: Routing, next_counts: Any = None, placement: Any = None) -> None:
        """Sends every rank all choices and starts a thread that solves. Call it once per step, after the routing. It is collective.

        next_counts: int32 [samples of this rank, n_experts] with use_next 1, [T, top_k] with 2. placement: int32 [samples of all ranks],
        with mode "given", which exchanges its length first: a wrong one raises ValueError on all ranks. The routing must not be updated or
        closed before the step's last call here."""
        n_samples = routing.n_tokens // self._sample_tokens
        shape = (routing.n_tokens, self._moe.top_k) if self._use_next == 2 else (n_samples, self._moe.n_experts)
        following = Given("next_counts", next_counts, ctypes.c_int32, shape if next_counts is not None else None)
        homes = Given("placement", placement, ctypes.c_int32)
        if self._given:
            self._check_homes(n_samples, homes.count)
        elif placement is not None:
            raise ValueError('placement is for a replacement with mode "given": leave it out')
        self._comm._check(lib.moecclReplaceBegin(self._handle, routing._handle, following.address, homes.address))
        self._routing = routing

    def _check_homes(self, n_samples: int, n_homes: int) -> None:
        """Checks on all ranks that each has given the home of every rank's samples; the library cannot see where an array ends."""
        every = made(ctypes.c_int64, 2 * self._comm.size)
        self._comm.all_gather(array.array("q", [n_samples, n_homes]), every)
        total = sum(every[::2])
        for rank, n in enumerate(every[1::2]):
            if n != total:
                raise ValueError(f"placement has {n} numbers on rank {rank}: all ranks have {total} samples, give the home of each")

    def rows(self) -> int:
        """Returns the rows of combine's input in this step: those of dispatch's output, then the residual's. It does not wait."""
        n_rows = ctypes.c_size_t()
        self._comm._check(lib.moecclReplaceRows(self._handle, _byref(n_rows)))
        return n_rows.value

    def _run(self, function: str, stream: Any, streamed: bool, *given: Tuple[str, Any, bool, int]) -> None:
        """Runs a function. given: (name, buffer, whether it is written, rows)."""
        buffers = [Buffer(thing, written) for _, thing, written, _ in given]
        try:
            for (name, thing, _, rows), buffer in zip(given, buffers):
                row = 4 * self._moe.top_k if name == "grad_weight" else self._moe.row_bytes
                if (thing is not None or rows) and buffer.bytes != rows * row and not (thing is None and name in _MAY_BE_NONE):
                    raise ValueError(f"{function}: {name} has {buffer.bytes} bytes, {rows} rows of {row} bytes are {rows * row}")
                if name != "grad_weight":
                    buffer.holds(f"{function}: {name}", self._moe.type, "the layer")
            tail = (stream_handle(stream),) if streamed else ()
            data: List[Any] = [b.data for b in buffers]
            for n, (name, thing, _, _) in enumerate(given):
                if name == "grad_weight" and thing is not None and not data[n]:
                    data[n] = _byref(_nothing)  # no tokens, but not NULL, which requests the weights' gradient
            self._comm._check(getattr(lib, function)(self._handle, *data, *tail))
        finally:
            give_back([*buffers, Held((self, self._routing))], stream)

    def _step(self) -> Routing:
        if self._routing is None:
            raise ValueError("begin() comes first in a step")
        return self._routing

    def residual(self, x: Any, dispatched: Any, rows: Any) -> None:
        """Puts the residual into combine's input rows[rows(), ...], from x[T, ...] and dispatch's output dispatched[R, ...], which is
        None with residual 2.

        With EXPERT_MAJOR it fills the rows after the first R. With ROWS it also adds to those, so the experts' outputs must be
        there before."""
        r = self._step()
        self._run("moecclReplaceResidual", None, False, ("x", x, False, r.n_tokens), ("dispatched", dispatched, False, r.n_rows),
                  ("rows", rows, True, self.rows()))

    def combine(self, rows: Any, tokens: Any, stream: Any = None) -> None:
        """tokens[T, ...] of the samples that are now on this rank, from rows[rows(), ...]. The call waits for the solver and is
        collective."""
        self._run("moecclReplaceCombine", stream, True, ("rows", rows, False, self.rows()), ("tokens", tokens, True, self._step().n_tokens))

    def combine_backward(self, grad_tokens: Any, grad_rows: Any, rows: Any = None, grad_weight: Any = None, stream: Any = None) -> None:
        """Runs combine's backward pass: grad_tokens[T, ...] is for the tokens that are now on this rank, and grad_rows is [rows(), ...].
        With rows and grad_weight[T, top_k] (float32) it computes the gradient of the weights of the tokens that this rank brought."""
        n, r = self.rows(), self._step()
        if grad_weight is not None and Buffer(grad_weight).own_type() != FLOAT32:
            raise TypeError("grad_weight holds float32")
        self._run("moecclReplaceCombineBackward", stream, True, ("grad_tokens", grad_tokens, False, r.n_tokens),
                  ("grad_rows", grad_rows, True, n), ("rows", rows, False, n), ("grad_weight", grad_weight, True, r.n_tokens))

    def residual_backward(self, grad_rows: Any, grad_dispatched: Any = None, grad_x: Any = None) -> None:
        """Adds the residual's rows of grad_rows[rows(), ...] to grad_dispatched[R, ...] (before Routing.dispatch_backward) and to
        grad_x[T, ...] (after it); either may be None."""
        r = self._step()
        self._run("moecclReplaceResidualBackward", None, False, ("grad_rows", grad_rows, False, self.rows()),
                  ("grad_dispatched", grad_dispatched, True, r.n_rows), ("grad_x", grad_x, True, r.n_tokens))

    def info(self) -> ReplaceInfo:
        """Returns the decision: placement, the samples that are now on this rank, bytes between nodes, times. It waits for the solver."""
        info = _abi.moecclReplaceInfo_t()
        self._comm._check(lib.moecclReplaceGetInfo(self._handle, _byref(info)))
        return record(ReplaceInfo, info, placement=tuple(info.placement[:info.n_samples]),
                      local_samples=tuple(info.local_samples[:info.n_local]))

    def close(self) -> None:
        """Frees the replacement. After the end of the last object that uses it, the communicator's next creation of a layer, routing or
        replacement, or its close(), does the same."""
        self._owned.close()
        self._handle = None


_MAY_BE_NONE = ("grad_dispatched", "grad_x", "grad_weight", "rows")
