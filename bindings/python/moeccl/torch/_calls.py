# SPDX-License-Identifier: Apache-2.0
"""Calls of the C interface on tensors, whose memory goes to the library without a copy."""
import ctypes
import functools

import torch

import moeccl
from moeccl import _abi, _library
from moeccl._buffers import address
from moeccl._owned import OfThisProcess, at_the_end
from moeccl.streams import stream_handle

DTYPES = {
    torch.float32: _abi.moecclFloat32, torch.float64: _abi.moecclFloat64, torch.float16: _abi.moecclFloat16,
    torch.bfloat16: _abi.moecclBfloat16, torch.int64: _abi.moecclInt64, torch.int32: _abi.moecclInt32,
    torch.int8: _abi.moecclInt8, torch.uint8: _abi.moecclUint8,
}
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # types that combine sums


# Decorates what torch.compile must not trace: a graph ends before the call, which runs as without torch.compile. Not
# torch.compiler.disable, with which importing this package would import the compiler. The first call imports it.
uncompiled = torch._disable_dynamo


def call(comm, name, *arguments):
    """Calls the C function `name`; a failure raises moeccl.Error with the communicator's error text."""
    if torch.cuda.is_initialized():
        _after_the_current_stream(arguments)
    code = getattr(_library.lib, name)(*arguments)
    if code != 0:
        sentence = _library.lib.moecclGetLastError(comm.handle if comm is not None else None)
        raise moeccl.Error(code, sentence.decode(errors="replace"))


def _after_the_current_stream(arguments):
    """Makes a call without a stream read what the current stream writes. By itself the library orders it after the default stream."""
    if any(isinstance(a, ctypes.c_void_p) for a in arguments):
        return
    for device in {a._tensor.device for a in arguments if isinstance(a, _Memory) and a._tensor.is_cuda}:
        if torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
            torch.cuda.current_stream(device).synchronize()


def dtype_of(tensor):
    """Returns the library's number for a tensor's element type."""
    if tensor.dtype not in DTYPES:
        raise TypeError(f"the tensor holds {tensor.dtype}: give one of {', '.join(str(d) for d in DTYPES)}")
    return DTYPES[tensor.dtype]


@functools.lru_cache(None)
def _byte_on(device):
    return torch.empty(1, dtype=torch.uint8, device=device)


def _place_of(tensor):
    """An empty tensor has no address. On a GPU it gets one all the same, by which the library sees that the call is one on CUDA memory."""
    return address(tensor) or (_byte_on(tensor.device).data_ptr() if tensor.is_cuda else None)


class _Memory:
    """A tensor's address as an argument of a C function. It holds the tensor, because a frame that torch.compile splits gives up a
    tensor after its last use by name, which would be the use that takes the address."""
    __slots__ = ("_as_parameter_", "_tensor")

    def __init__(self, tensor):
        self._tensor, self._as_parameter_ = tensor, _place_of(tensor)


def memory(tensor):
    """Returns the memory of a contiguous tensor as an argument of a C function; None for no tensor."""
    if tensor is None:
        return None
    if not (tensor.is_cpu or tensor.is_cuda) or not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} on {tensor.device}: the library takes contiguous "
                         "tensors on cpu and cuda")
    return _Memory(tensor)


def stream_of(tensor):
    """Returns the current stream of a CUDA tensor's device; None, which makes a call block, for other tensors."""
    if tensor.is_cuda:
        return ctypes.c_void_p(stream_handle(torch.cuda.current_stream(tensor.device)))
    return None


def int32s(values):
    """Makes an array of C's int32_t."""
    values = [int(v) for v in values]
    return (ctypes.c_int32 * len(values))(*values)


def is_whole(tensor):
    """Returns whether a tensor holds whole numbers."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def as_int32(tensor):
    """Converts whole numbers to int32; what does not fit becomes the number nearest to it, which the library refuses, instead of another
    expert's."""
    return tensor.clamp(-2**31, 2**31 - 1).to(torch.int32) if tensor.dtype == torch.int64 else tensor.to(torch.int32)


def int32s_of(tensor):
    """Returns an int32 CPU tensor's memory as a pointer for a C structure; the tensor must outlive it."""
    if tensor.dtype != torch.int32 or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(f"a tensor of {tensor.dtype} and shape {tuple(tensor.shape)} on {tensor.device}: a C structure takes contiguous int32 "
                         "on cpu")
    return ctypes.cast(address(tensor), ctypes.POINTER(ctypes.c_int32))


def numbers_of(name, values, n, limit):
    """Returns the caller's n whole numbers below `limit` as an int32 CPU tensor of its own."""
    given = torch.as_tensor(values, device="cpu")
    if not is_whole(given):
        raise TypeError(f"{name} holds {given.dtype}: give whole numbers")
    if tuple(given.shape) != (n,):
        raise ValueError(f"{name} has shape {tuple(given.shape)}: give {n} numbers")
    if n and not 0 <= int(given.min()) <= int(given.max()) < limit:
        raise ValueError(f"{name} has numbers from {int(given.min())} to {int(given.max())}: give numbers from 0 to {limit - 1}")
    return given.to(torch.int32, copy=True).contiguous()


def listed(pointer, n):
    """Returns n numbers from a C pointer as a list."""
    return [int(v) for v in pointer[:n]] if n else []


class Owned(OfThisProcess):
    """A handle of the library with the name of its Destroy function; it is destroyed with this object.

    waits: the destruction waits for the communicator's operations, so it is left to the next creation (moeccl._owned.Leftovers)."""

    def __init__(self, comm, create, destroy, *arguments, waits=False):
        self._destroy, self._handle, self._waits = destroy, ctypes.c_void_p(), waits
        self.comm = comm
        comm._leftovers.clear()
        call(comm, create, ctypes.byref(self._handle), *arguments)
        self.handle = self._handle.value

    def close(self):
        handle, self._handle = self._handle, None
        if handle is not None and handle.value:
            getattr(_library.lib, self._destroy)(handle)

    def __del__(self):
        if getattr(self, "_handle", None) is None or at_the_end():
            return
        if self._waits and self._handle.value:
            self.comm._leftovers.add(getattr(_library.lib, self._destroy), self._handle)
        else:
            self.close()
