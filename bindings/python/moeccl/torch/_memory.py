# SPDX-License-Identifier: Apache-2.0
"""Reusable memory for results: fresh pages cost several times as much as moving the rows into them.

On 4 processes that each dispatch 4096 tokens of 2048 bfloat16 into 60 MB, a dispatch takes 12 ms of processor time into
reused memory and 61 ms into new memory (docs/performance-pytorch.md)."""
import threading

import torch

_LEAST = 1 << 20  # smaller tensors come from torch, whose allocator keeps such memory
_n_users = getattr(torch._C, "_storage_Use_Count", None)  # 1: only the pool holds the storage. Without it memory is not kept


def _room(n_bytes):
    """Rounds n_bytes up to one of eight sizes per power of two, so that steps of similar size share memory."""
    step = 1 << (n_bytes.bit_length() - 4)
    return -(-n_bytes // step) * step


class Memory:
    """Storages that are lent as tensors and return when the last view of the tensor is gone. Lent and free ones
    together never exceed the most that was lent at once. A caller may resize a lent one, and so free its memory at once
    (Megatron's resize_(0)). It then does not return, nor do those that numpy() has made fixed in size, or share_memory_()
    visible to another process."""

    def __init__(self):
        self._lock = threading.Lock()  # backward passes may run on threads of their own
        self._free = []  # least recently used first
        self._lent = []  # (storage, its bytes when it was lent)
        self._kept, self._most = 0, 0

    def empty(self, shape, dtype, device):
        """Returns an uninitialized tensor. torch itself keeps CUDA memory for the next call."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        n_bytes = dtype.itemsize
        for extent in shape:
            n_bytes *= extent
        if n_bytes < _LEAST or _n_users is None:
            return torch.empty(shape, dtype=dtype, device="cpu")
        # Not a view: it has the inference mode of the call, and versions of its own.
        with self._lock:
            storage = self._take(_room(n_bytes))
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape)

    def drop(self):
        """Frees all storages that are not lent."""
        with self._lock:
            self._collect()
            self._free, self._kept = [], 0
            self._most = sum(room for _, room in self._lent)

    def _collect(self):
        lent, self._lent = self._lent, []
        for storage, room in lent:
            if _n_users(storage._cdata) > 1:
                self._lent.append((storage, room))
            elif storage.nbytes() == room and storage.resizable() and not storage.is_shared():
                self._free.append(storage)
                self._kept += room

    def _take(self, room):
        self._collect()
        for at in range(len(self._free) - 1, -1, -1):
            if self._free[at].nbytes() == room:
                storage = self._free.pop(at)
                self._kept -= room
                break
        else:
            storage = torch.empty(room, dtype=torch.uint8, device="cpu").untyped_storage()
        self._lent.append((storage, room))
        lent = sum(room for _, room in self._lent)
        self._most = max(self._most, lent)
        while self._free and lent + self._kept > self._most:
            self._kept -= self._free.pop(0).nbytes()
        return storage


_of_layers = Memory()  # one for all layers: the gradients of one take the memory that another's have left


def new_rows(like, shape):
    """Returns an uninitialized tensor of the type and on the device of `like`."""
    return _of_layers.empty(shape, like.dtype, like.device)


def empty_cache() -> None:
    """Frees the memory that this process's layers keep on the CPU for their next steps, as torch.cuda.empty_cache() does for CUDA memory.
    Tensors that are in use keep theirs."""
    _of_layers.drop()
