# SPDX-License-Identifier: Apache-2.0
"""The group for a torch up to 2.13, whose Backend no class in Python can be."""
import functools
from datetime import timedelta
from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .backend import Backend
from .group import Group


class PlainGroup(Group):
    """A group whose methods torch's C++ side calls itself. It holds no torch Backend, so it cannot be one of several backends of a
    group, and torch's wrapper for DETAIL does not apply to it."""

    def __init__(self, store: Any, backend: Backend, devices: List[torch.device]) -> None:
        ProcessGroup.__init__(self, backend.rank(), backend.size())
        self._begin(backend)
        self._store, self._devices = store, list(devices)
        self._its_name = self._its_desc = ""

    # torch keeps these in the group's Backends.

    @property
    def group_name(self) -> str:
        return self._its_name

    def _set_group_name(self, name: str) -> None:
        self._its_name = name

    @property
    def group_desc(self) -> str:
        return self._its_desc

    def _set_group_desc(self, desc: str) -> None:
        self._its_desc = desc

    @property
    def _device_types(self) -> List[torch.device]:
        return self._devices

    @property
    def options(self) -> Any:
        return self._backend.options

    def _get_backend(self, device: Any) -> Backend:
        return self._backend

    def get_group_store(self) -> Any:
        return self._store

    def name(self) -> str:
        return "moeccl"

    def monitored_barrier(self, timeout: Optional[timedelta] = None, wait_all_ranks: bool = False) -> None:
        self._backend.monitored_barrier(timedelta(-1) if timeout is None else timeout, wait_all_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        self._backend.set_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self._backend._get_sequence_number_for_group()

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing, as in the backend."""

    def abort(self) -> None:
        self._backend.abort()

    def shutdown(self) -> None:
        self._backend.shutdown()


def check_alone(backends: Dict[str, str]) -> None:
    """Raises if torch is about to make a group of several backends: it would give all devices of that group to this one. backends:
    their names by device."""
    if len(set(backends.values())) > 1:
        asked = ",".join(f"{device}:{name}" for device, name in backends.items())
        raise ValueError(f"a group of the backends {asked} needs torch 2.14 or newer, and this is torch {torch.__version__}: give "
                         "moeccl alone, which takes tensors on cpu and cuda, or install a newer torch")


def take_batches() -> None:
    """Makes batch_isend_irecv begin and end a batch for a PlainGroup too. torch 2.7 to 2.13 do it only for their own class of
    groups, and without a batch two ranks that send each other CUDA tensors would wait for ever, each for its own send."""
    given = dist.distributed_c10d.batch_isend_irecv

    @functools.wraps(given)
    def batch_isend_irecv(p2p_op_list: List[Any]) -> List[Any]:
        group = (getattr(p2p_op_list[0], "group", None) if p2p_op_list else None) or dist.group.WORLD
        if not isinstance(group, PlainGroup) or not group._backend.supports_coalescing:
            return given(p2p_op_list)
        dist.distributed_c10d._check_p2p_op_list(p2p_op_list)
        group._backend.start_coalescing()
        try:
            for one in p2p_op_list:
                one.op(one.tensor, one.peer, one.group, one.tag)
        except BaseException:
            group._backend.batch = None
            raise
        return [group._backend.end_coalescing()]

    dist.distributed_c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv
