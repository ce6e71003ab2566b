# SPDX-License-Identifier: Apache-2.0
"""The parts of MoECCL that this package needs: a communicator, its layers and their routings, on tensors' addresses."""
import collections
import ctypes
import itertools
import os
import typing

import moeccl
import torch
from moeccl import _abi
from moeccl._buffers import address
from moeccl._errors import check
from moeccl._library import lib
from moeccl.torch._calls import stream_of

TYPES = {torch.bfloat16: moeccl.BFLOAT16, torch.float16: moeccl.FLOAT16, torch.float32: moeccl.FLOAT32,
         torch.float64: moeccl.FLOAT64}
ROWS, EXPERT_MAJOR = moeccl.ROWS, moeccl.EXPERT_MAJOR
MOST_CHOICES = 64  # largest top_k of a layer, moecclMoeConfig_t
_STAGING = 16 << 20  # the default of moecclConfig_t
_STAGING_A_RANK = 4 * (32 << 10)
_IN_PROGRESS = _abi.moecclInProgress


def _address(tensor):
    return address(tensor) if tensor is not None else None


def ready(tensor):
    """Waits until the CUDA stream has made this tensor, for calls that have no stream."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def copied(pointer, n, dtype, device):
    """Copies n numbers of a C array, which are of this type, into a tensor."""
    if n == 0:
        return torch.empty(0, dtype=dtype, device=device)
    array = (type(pointer.contents) * n).from_address(ctypes.addressof(pointer.contents))
    return torch.frombuffer(array, dtype=dtype).to(device, copy=True)


def int32_tensor(pointer, n, device):
    """Copies n numbers of a C array of int32 into a tensor."""
    return copied(pointer, n, torch.int32, device)


class Shape(typing.NamedTuple):
    """The parameters of a layer; they are the same on all ranks."""
    row_bytes: int
    type: int
    top_k: int
    n_experts: int
    max_tokens: int
    layout: int
    scale_bytes: int = 0
    scaled_row_bytes: int = 0
    align_rows: int = 0
    ordered: bool = False  # sums are in the order of a token's choices

    def config(self):
        config = _abi.moecclMoeConfig_t()
        config.hidden_bytes, config.type, config.top_k = self.row_bytes, self.type, self.top_k
        config.n_experts, config.max_tokens, config.layout = self.n_experts, self.max_tokens, self.layout
        config.scale_bytes, config.scaled_row_bytes = self.scale_bytes, self.scaled_row_bytes
        config.align_rows = self.align_rows
        config.algorithm = b"flat:ordered" if self.ordered else None
        return config


def staging_of(n_ranks):
    """Returns the staging bytes of a low-latency Buffer's communicator; 0 for MoECCL's default. A layer needs room for about four
    rows of each rank: the default has it for rows of 14 KiB on up to 290 ranks, and this for rows of 32 KiB on any number."""
    staging = n_ranks * _STAGING_A_RANK
    return 0 if staging <= _STAGING or os.environ.get("MOECCL_STAGING_BYTES") else staging


def query_bytes(shape, n_ranks):
    """Returns the most bytes that a layer of this shape holds on a rank of a low-latency Buffer."""
    config, found = shape.config(), ctypes.c_size_t()
    config.staging_bytes = staging_of(n_ranks)
    check(lib.moecclMoeQuerySize(ctypes.byref(config), n_ranks, None, ctypes.byref(found)))
    return found.value


class Routing:
    """One routing, lent by its layer and returned when it is no longer referenced."""

    def __init__(self, layer, raw):
        self.layer, self._raw = layer, raw

    def __del__(self):
        self.layer.spare.append(self._raw)

    @property
    def shape(self):
        return self.layer.shape

    @property
    def comm(self):
        return self.layer.owner

    def update(self, index, weight=None):
        """Sets the choices. The call is collective. index: int32 [T, top_k]; weight: float32 of that shape or None."""
        ready(index)
        self.layer.check(lib.moecclRoutingUpdate(self._raw, _address(index), _address(weight), index.size(0)))

    def info(self):
        info = _abi.moecclRoutingInfo_t()
        self.layer.check(lib.moecclRoutingGetInfo(self._raw, ctypes.byref(info)))
        return info

    def dispatch(self, rows, out):
        self.layer.check(lib.moecclDispatch(self._raw, _address(rows), _address(out), stream_of(out)))

    def dispatch_scaled(self, rows, scales, out, out_scales):
        self.layer.check(lib.moecclDispatchScaled(self._raw, _address(rows), _address(scales), _address(out),
                                                  _address(out_scales), stream_of(out)))

    def combine(self, rows, out):
        self.layer.check(lib.moecclCombine(self._raw, _address(rows), _address(out), stream_of(out)))


class Layer:
    """A layer and the routings that it has made."""

    def __init__(self, owner, shape):
        self.shape, self.spare, self.owner = shape, collections.deque(), owner
        self._made, self._raw = [], ctypes.c_void_p()
        config = shape.config()
        self.check(lib.moecclMoeCreate(ctypes.byref(self._raw), owner.raw, ctypes.byref(config)))

    def check(self, code):
        self.owner.check(code)

    def routing(self, index, weight=None):
        """Returns a routing of these choices. The call is collective."""
        try:
            routing = Routing(self, self.spare.pop())
        except IndexError:
            raw = ctypes.c_void_p()
            ready(index)
            self.check(lib.moecclRoutingCreate(ctypes.byref(raw), self._raw, _address(index), _address(weight),
                                               index.size(0)))
            self._made.append(raw)
            return Routing(self, raw)
        routing.update(index, weight)
        return routing

    def close(self):
        for raw in self._made:
            lib.moecclRoutingDestroy(raw)
        lib.moecclMoeDestroy(self._raw)
        self._made = []


class Communicator:
    """This rank's communicator, its layers by shape, and the collectives for data that layers do not carry."""

    def __init__(self, n_ranks, rank, id, name="deep_ep", **options):
        """options: staging_bytes, timeout_ms and others of moeccl.Comm."""
        self._take(moeccl.Comm(n_ranks, id, rank, name=name, **options))

    def _take(self, comm):
        self.comm = comm
        self.size, self.rank, self._layers = comm.size, comm.rank, {}
        self._max_tokens, self._scratch = 64, {}
        self.members = list(range(comm.size))  # the numbers that its ranks have in their Buffer
        self.calls = (0, True)  # the number of the last call of _shrink.py, and whether it is complete

    def shrunk(self, exclude=()):
        """Returns a communicator of the ranks that stay: all but `exclude`, or without it all that are not gone. This one stays as it is.
        The call is collective over the ranks that stay."""
        made = Communicator.__new__(Communicator)
        made._take(self.comm.shrink(exclude))
        return made

    def failed(self):
        """Returns whether an operation has failed such that the communicator takes no further ones."""
        return self.comm.async_error() not in (0, _IN_PROGRESS)

    def finish(self):
        """Waits until this rank's operations have finished, also those on CUDA streams, and raises what the communicator has failed with."""
        self.comm.finalize()

    @property
    def raw(self):
        if self.comm is None:
            raise RuntimeError("the Buffer was destroyed: make a new one")
        return self.comm.handle

    def check(self, code):
        check(code, self.comm.handle if self.comm is not None else None)

    def layer(self, shape):
        """Returns the layer of this shape. The call is collective if the shape is new."""
        found = self._layers.get(shape)
        if found is None:
            found = self._layers[shape] = Layer(self, shape)
        return found

    def room_for(self, n_tokens):
        """Returns max_tokens for layers with steps of n_tokens, which all ranks pass alike. It doubles, so it rarely
        changes."""
        while self._max_tokens < n_tokens:
            self._max_tokens *= 2
        return self._max_tokens

    def scratch(self, n_rows, columns, dtype, device, use="parts"):
        """Returns an uninitialized tensor that is valid until the next call of this method for the same use."""
        if device.type != "cpu":
            return torch.empty((n_rows, columns), dtype=dtype, device=device)
        size, kept = n_rows * columns * dtype.itemsize, self._scratch.get(use)
        if kept is None or kept.numel() < size:
            self._scratch[use] = None  # before the larger one is made
            kept = self._scratch[use] = torch.empty(size, dtype=torch.uint8, device="cpu")
        return kept[:size].view(dtype).view(n_rows, columns)

    def all_to_all(self, send):
        """Sends block r of the int32 CPU tensor send[size, n] to rank r and returns the received blocks."""
        recv = torch.empty_like(send)
        self.check(lib.moecclAllToAll(_address(send), _address(recv), send.size(1), moeccl.INT32, self.raw,
                                      None))
        return recv

    def all_to_all_v(self, send, send_counts, recv, recv_counts):
        """Exchanges rows of one type and width; send_counts[r] of them go to rank r."""
        arrays = []
        for counts in (send_counts, recv_counts):
            row_bytes = send.size(1) * send.element_size()
            starts = itertools.accumulate((c * row_bytes for c in counts), initial=0)
            arrays.append([(ctypes.c_size_t * self.size)(*(c * row_bytes for c in counts)),
                           (ctypes.c_size_t * self.size)(*itertools.islice(starts, self.size))])
        self.check(lib.moecclAllToAllv(_address(send), *arrays[0], _address(recv), *arrays[1], moeccl.UINT8,
                                       self.raw, stream_of(recv)))

    def all_gather(self, blocks):
        """Fills the uint8 CPU tensor blocks[size, n], of which this rank's row holds its own data."""
        self.check(lib.moecclAllGather(_address(blocks[self.rank]), _address(blocks), blocks.size(1), moeccl.UINT8, self.raw, None))

    def barrier(self):
        """Returns when all ranks have called it."""
        self.all_to_all(torch.zeros((self.size, 1), dtype=torch.int32, device="cpu"))

    def send(self, tensor, peer):
        """Sends a contiguous CPU tensor."""
        self.check(lib.moecclSend(_address(tensor), tensor.nbytes, moeccl.UINT8, peer, self.raw, None))

    def recv(self, tensor, peer):
        """Fills a contiguous CPU tensor."""
        self.check(lib.moecclRecv(_address(tensor), tensor.nbytes, moeccl.UINT8, peer, self.raw, None))

    def close(self):
        if self.comm is None:
            return
        for layer in self._layers.values():
            layer.close()
        comm, self.comm, self._layers, self._scratch = self.comm, None, {}, {}
        comm.close()
