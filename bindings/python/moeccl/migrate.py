# SPDX-License-Identifier: Apache-2.0
"""Asynchronous migration of experts inside their domains (include/moeccl/migrate.h).

Call send() after the optimizer's step, begin() before the layer's attention, and wait() when the experts are needed."""
import ctypes
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import _abi
from ._abi import CodecError, MigrationInfo
from ._arrays import record
from ._buffers import Buffer, type_size
from ._errors import SIZE, check, number, of_kind, real
from ._library import lib
from ._owned import OfThisProcess, at_the_end
from .codec import expert_use, update_callback
from .comm import Comm
from .constants import FLOAT32
from .hybrid import Hybrid

_byref = ctypes.byref


class Migration(OfThisProcess):
    """The queues of a model's layers. The constructor is collective: all ranks pass the same. Use it from one thread at a time.

    count: elements of an expert. ratio: of the codec; 0: 50; 1: experts travel as they are, without a shared expert. comm: another
    communicator of the hybrid's ranks, which lets dispatch and gather run at the same time. depth: entries of each queue."""

    def __init__(self, hybrid: Hybrid, count: int, type: int = FLOAT32, ratio: float = 0, n_layers: int = 1, depth: int = 0,
                 comm: Optional[Comm] = None) -> None:
        config = _abi.moecclMigrationConfig_t()
        size = type_size(type)
        config.count, config.type, config.ratio = number("count", count, SIZE), type, real("ratio", ratio)
        config.n_layers, config.depth = number("n_layers", n_layers), number("depth", depth)
        of_kind("hybrid", hybrid, Hybrid)
        self._comm, self._n_own, self._n_held, self._expert, self._ratio = comm or hybrid.comm, hybrid.n_own, hybrid.n_held, count * size, ratio
        handle = ctypes.c_void_p()
        self._comm._check(lib.moecclMigrationCreate(_byref(handle), hybrid._handle, comm._handle if comm else None, _byref(config)))
        self._handle: Optional[int] = handle.value
        self._element, self._type = size, type
        self._encoded: Dict[int, Buffer] = {}  # the shared experts of layers that wait_encoded() switched
        # Of each layer's gathers that have begun, oldest first, the buffers that the library writes and reads; none after begin().
        self._flights: Dict[int, List[Tuple[Buffer, ...]]] = {}

    @property
    def handle(self) -> int:
        """The moecclMigration_t as a number; 0 after close()."""
        return self._handle or 0

    def info(self, layer: int = 0) -> MigrationInfo:
        """Returns the layer's epoch (switches so far), its queues, and bytes on the wire and in memory."""
        info = _abi.moecclMigrationInfo_t()
        self._comm._check(lib.moecclMigrationGetInfo(self._handle, number("layer", layer), _byref(info)))
        return record(MigrationInfo, info)

    def _fits(self, name: str, buffer: Buffer, experts: int) -> None:
        buffer.holds(name, self._type, "the migration")
        if buffer.bytes != experts * self._expert:
            raise ValueError(f"{name} has {buffer.bytes} bytes: {experts} experts of {self._expert} bytes are {experts * self._expert}")

    def send(self, experts: Any, shared: Any = None, layer: int = 0) -> List[CodecError]:
        """Appends experts[n_own, count] to the layer's send queue and returns the encoding error of each. The call is local.

        shared[count]: the base of the residual; None with ratio 1. All input is read before the call returns."""
        return self._send(experts, shared, layer, lambda *given: lib.moecclMigrationSend(*given))

    def send_fused(self, experts: Any, update: Callable[[int, int, int], None], shared: Any = None, layer: int = 0) -> List[CodecError]:
        """Does the same, with each block of 65536 elements after update(expert, first, count), the optimizer's step on it. An exception in
        `update` ends the call, and nothing is queued."""
        step = update_callback(update)

        def call(handle: Any, number_of: int, given: Any, base: Any, errors: Any) -> int:
            result: int = lib.moecclMigrationSendFused(handle, number_of, given, base, step.address, None, errors)
            step.check()
            return result

        return self._send(experts, shared, layer, call)

    def _send(self, experts: Any, shared: Any, layer: int, call: Callable[..., int]) -> List[CodecError]:
        given, base = Buffer(experts), Buffer(shared)
        errors = (_abi.moecclCodecError_t * max(1, self._n_own))()
        try:
            self._fits("experts", given, self._n_own)
            if base.present or self._ratio != 1:
                self._fits("shared", base, 1)
            self._comm._check(call(self._handle, number("layer", layer), given.data, base.data, errors))
        finally:
            given.release()
            base.release()
        return [record(CodecError, e) for e in errors[:self._n_own]]

    def begin(self, layer: int = 0) -> None:
        """Starts the gather of the oldest entry of the send queue and returns at once. The call is collective; all ranks use one order."""
        self._comm._check(lib.moecclMigrationBegin(self._handle, number("layer", layer)))
        self._flights.setdefault(layer, []).append(())

    def begin_into(self, held: Any, shared: Any = None, layer: int = 0) -> None:
        """Does the same, and a thread of the library decodes into held[n_held, count] after the gather. Do not touch the buffers
        until wait()."""
        out, base = Buffer(held, True), Buffer(shared)
        try:
            self._fits("held", out, self._n_held)
            if base.present or self._ratio != 1:
                self._fits("shared", base, 1)
            self._comm._check(lib.moecclMigrationBeginInto(self._handle, number("layer", layer), base.data, out.data))
        except BaseException:
            out.release()
            base.release()
            raise
        self._flights.setdefault(layer, []).append((out, base))

    def wait_expert(self, index: int, layer: int = 0) -> None:
        """Waits until expert `index` of a gather from begin_into() is in its `held`; wait() must still be called."""
        self._comm._check(lib.moecclMigrationWaitExpert(self._handle, number("layer", layer), number("index", index)))

    def test(self, layer: int = 0) -> bool:
        """Returns True if wait() would not block."""
        done = ctypes.c_int()
        self._comm._check(lib.moecclMigrationTest(self._handle, number("layer", layer), _byref(done)))
        return bool(done.value)

    def wait(self, held: Any = None, shared: Any = None, layer: int = 0) -> int:
        """Waits for the oldest gather, writes held[n_held, count] and returns the new epoch, on all ranks or on none. If begin_into()
        started that gather, pass no buffers, or those that it got.

        When a rank dies, is stopped or aborts meanwhile, ranks may be one epoch apart, each with the experts of its own
        epoch: after a shrink, compare the least and the greatest epoch over the new communicator."""
        epoch, out, base = ctypes.c_uint64(), Buffer(held, True), Buffer(shared)
        flights = self._flights.get(layer)
        try:
            if not (flights and flights[0]):
                self._fits("held", out, self._n_held)
                if base.present or self._ratio != 1:
                    self._fits("shared", base, 1)
            self._comm._check(lib.moecclMigrationWait(self._handle, number("layer", layer), base.data, out.data, _byref(epoch)))
        finally:
            out.release()
            base.release()
            self._release_landed(layer)
        self._drop_encoded(layer)
        return epoch.value

    def _release_landed(self, layer: int) -> None:
        """Releases the buffers of gathers that the library has taken from its queue: it uses the others' buffers until it ends."""
        flights = self._flights.get(layer, [])
        while len(flights) > (self.info(layer).to_receive if flights else 0):
            for buffer in flights.pop(0):
                buffer.release()

    def _drop_encoded(self, layer: int) -> None:
        buffer = self._encoded.pop(layer, None)
        if buffer is not None:
            buffer.release()

    def wait_encoded(self, shared: Any = None, layer: int = 0) -> int:
        """Works as wait() without decoding: the experts stay encoded for use_expert() until the layer's next switch. Until then `shared`
        must not change."""
        epoch, base = ctypes.c_uint64(), Buffer(shared)
        try:
            if base.present or self._ratio != 1:
                self._fits("shared", base, 1)
            self._comm._check(lib.moecclMigrationWaitEncoded(self._handle, number("layer", layer), base.data, _byref(epoch)))
        except BaseException:
            base.release()
            raise
        finally:
            self._release_landed(layer)
        self._drop_encoded(layer)
        self._encoded[layer] = base
        return epoch.value

    def use_expert(self, index: int, use: Callable[[int, memoryview], None], layer: int = 0, first: int = 0, count: int = 0,
                   row: int = 0) -> None:
        """Passes the held expert `index` to use(first, bytes), as Codec.decode_fused() does."""
        given, callback = expert_use(use, self._element, first, count, row)
        result = lib.moecclMigrationUseExpert(self._handle, number("layer", layer), number("index", index), _byref(given))
        callback.check()
        self._comm._check(result)

    def close(self) -> None:
        """Waits for gathers that have begun and frees the queues."""
        if self._handle is not None:
            check(lib.moecclMigrationDestroy(self._handle))
            self._handle = None
            for buffers in sum(self._flights.values(), []):
                for buffer in buffers:
                    buffer.release()
            self._flights = {}
            for layer in list(self._encoded):
                self._drop_encoded(layer)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None and not at_the_end(self._flights, self._encoded):
            lib.moecclMigrationDestroy(self._handle)  # ends the gathers, which use the buffers
