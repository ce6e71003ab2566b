# SPDX-License-Identifier: Apache-2.0
"""torch.distributed's backend "moeccl".

    import torch.distributed as dist
    import moeccl.distributed              # not needed if moeccl is installed and torch is 2.14 or newer
    dist.init_process_group("moeccl")      # under torchrun

The group handles CPU tensors, and CUDA tensors if torch has CUDA. `moeccl.distributed.Options(...)` are its pg_options.
docs/pytorch.md says what is supported and what differs from gloo and nccl."""
import os
from typing import Any

import torch
import torch.distributed as dist

from ._c10d.base import IS_TORCHS, BaseOptions  # first, because it names a torch that is too old
from ._c10d.backend import Backend
from ._c10d.failure import BackendError
from ._c10d.group import Group
from ._c10d.making import Asked
from ._c10d.options import Options, timeout_of, warn_of_others
from ._c10d.plain import PlainGroup, check_alone, take_batches
from ._c10d.untraced import leave_untraced

NAME = "moeccl"


def _devices() -> Any:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _create(given: Any, pg_options: Any) -> Any:
    """Makes a group for init_process_group(), or, since torch 2.14, a backend if it is one of several or torch wraps it."""
    asked = Asked(given)
    if pg_options is None:
        pg_options = Options(given.timeout)
    elif not isinstance(pg_options, BaseOptions):
        raise TypeError(f"pg_options is a {type(pg_options).__name__}: give moeccl.distributed.Options")
    elif not isinstance(pg_options, Options):
        if asked.alone:
            warn_of_others(pg_options)
        pg_options = Options(given.timeout)
    pg_options._timeout = timeout_of(given.timeout, pg_options)
    pg_options.global_ranks_in_group = given.global_ranks_in_group
    pg_options.group_name = given.group_id
    if not IS_TORCHS:
        check_alone(asked.backends)
        if not pg_options.direct:
            raise ValueError(f"Options(direct=False) needs torch 2.14 or newer, and this is torch {torch.__version__}: leave direct "
                             "True, or install a newer torch")
    backend = Backend(given.store, given.group_rank, given.group_size, pg_options, given.group_id)
    if IS_TORCHS and (not pg_options.direct or _torch_looks() or not asked.alone):
        return backend
    made = (Group if IS_TORCHS else PlainGroup)(given.store, backend, [torch.device(d) for d in _devices()])
    if asked.device is not None:
        made.bound_device_id = asked.device
    return made


def _torch_looks() -> bool:
    """Returns True if torch inspects every call: it then wraps the backend, or adds a check for NaNs to the group."""
    return dist.get_debug_level() == dist.DebugLevel.DETAIL or os.environ.get("TORCH_DIST_NAN_CHECK") == "1"


def check(group: Any = None) -> None:
    """Raises the error that has broken a group of moeccl; None means the default group. Call it before a checkpoint is saved: an operation
    on CUDA tensors fails after its call has returned, and DDP does not ask. It waits for the group's CUDA devices."""
    group = dist.group.WORLD if group is None else group
    found = [getattr(b, "wrapped_pg", b) for b in (group._get_backend(device) for device in group._device_types)]
    backends = [b for b in found if isinstance(b, Backend)]
    if not backends:
        raise ValueError(f"check: the group's backend is {dist.get_backend(group)}: give a group of {NAME}")
    for backend in backends:
        backend.check()


def register() -> None:
    """Registers "moeccl" with torch. It is torch's entry point, and importing this module calls it."""
    if NAME.upper() not in dist.Backend._plugins:
        if not IS_TORCHS:
            take_batches()
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=_devices())


register()
leave_untraced("moeccl._c10d", "moeccl._buffers")

__all__ = ["Backend", "BackendError", "Group", "Options", "check", "register"]
