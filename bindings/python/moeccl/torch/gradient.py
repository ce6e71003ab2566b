# SPDX-License-Identifier: Apache-2.0
"""Gradients of travelling experts that return to their owners compressed (include/moeccl/gradient.h)."""
import copy
import ctypes

import torch
from torch import nn

from moeccl import _abi
from ._calls import Owned, call, dtype_of, memory

FLOATS = (torch.float32, torch.bfloat16)


class _Pointed:
    """Memory on a CUDA device as torch.as_tensor() takes it."""

    def __init__(self, address, shape):
        self.__cuda_array_interface__ = {"data": (address, False), "shape": shape, "typestr": "<f4", "version": 3}


class Remainders(nn.Module):
    """The way back of gradients, and what it has not brought to the owners yet: this rank's share of the module's state_dict()."""

    def __init__(self, placement, ratio):
        super().__init__()
        self._placement, self.ratio = placement, float(ratio)
        self._return, self._kind = None, None  # made by the first gradients
        self._loaded = None  # what a checkpoint gave before that

    def __deepcopy__(self, memo):
        """A copy begins without remainders. It belongs to the copy of the placement, which may have made it already."""
        placement = copy.deepcopy(self._placement, memo)
        return Remainders(placement, self.ratio) if placement.remainders is self else placement.remainders

    def sum_at_owners(self, grad):
        """Returns [own, count]: for each own expert, its gradient in grad[held, count] plus what the other holders send."""
        if self._return is None or self._kind != (grad.shape[1], grad.dtype, grad.device):
            self._create(grad)
        own = grad.new_empty((len(self._placement.own), grad.shape[1]))
        call(self._placement.comm, "moecclGradientReturnReduce", self._return.handle, 0, memory(grad), memory(own), None)
        return own

    def renew(self, kept):
        """Begins a new way back, over the placement's new communicator, with the remainders `kept` of the old one."""
        self._return, self._kind, self._loaded = None, None, kept

    def _create(self, grad):
        if grad.dtype not in FLOATS:
            raise TypeError(f"gradient_ratio goes with experts of {' and '.join(map(str, FLOATS))}, and these are {grad.dtype}")
        kept = self.get_extra_state()["remainders"] if self._return is not None else self._loaded
        self._check(kept, grad.shape[1])
        config = _abi.moecclGradientReturnConfig_t(count=grad.shape[1], type=dtype_of(grad), ratio=self.ratio,
                                                   device_memory=int(grad.is_cuda))
        made = Owned(self._placement.comm, "moecclGradientReturnCreate", "moecclGradientReturnDestroy", self._placement.hybrid,
                     None, ctypes.byref(config))
        self._return, self._kind, self._loaded = made, (grad.shape[1], grad.dtype, grad.device), None
        if kept is not None:
            self._memory().copy_(kept)

    def _check(self, kept, count):
        shape = (len(self._placement.held) - len(self._placement.own), count)
        if kept is not None and tuple(kept.shape) != shape:
            raise ValueError(f"the checkpoint's remainders have shape {tuple(kept.shape)}: this rank keeps {shape}")

    def _memory(self):
        """Returns the library's remainders as a tensor [experts of other ranks, count]."""
        info = _abi.moecclGradientReturnInfo_t()
        call(self._placement.comm, "moecclGradientReturnGetInfo", self._return.handle, 0, ctypes.byref(info))
        count, _, device = self._kind
        shape = (info.n_remainders, count)
        address = ctypes.cast(info.remainders, ctypes.c_void_p).value
        if info.n_remainders * count == 0:
            return torch.empty(shape, device=device)
        if device.type == "cuda":
            return torch.as_tensor(_Pointed(address, shape), device=device)
        return torch.frombuffer((ctypes.c_float * (shape[0] * count)).from_address(address), dtype=torch.float32).view(shape)

    def get_extra_state(self):
        return {"remainders": self._loaded if self._return is None else self._memory().to("cpu", copy=True)}

    def set_extra_state(self, state):
        kept = state["remainders"]
        if self._return is None:
            self._loaded = kept
        elif kept is None:
            self._memory().zero_()
        else:
            self._check(kept, self._kind[0])
            self._memory().copy_(kept)
