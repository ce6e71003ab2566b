# SPDX-License-Identifier: Apache-2.0
"""Communicators for torch.distributed groups."""
import os
import weakref
from typing import Any, Union

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import moeccl
from moeccl._c10d.meeting import clamp_ms

Group = Union[dist.ProcessGroup, DeviceMesh, moeccl.Comm, None]  # that a communicator is made for; None: the default group

_made = weakref.WeakKeyDictionary()  # for each process group: {options: Comm}
_alone = {}  # without a process group: {options: Comm}
_beside = weakref.WeakKeyDictionary()  # for each Comm that was made here: that of beside()
_origins = weakref.WeakKeyDictionary()  # for each Comm that was made here: its _Origin
_MEETING_MS = 60000  # the least time for ranks to meet, as for a group of backend "moeccl"


class _Origin:
    """What a communicator was made from; it outlives close(), for renew()."""

    def __init__(self, group, asked, options):
        self._default = group is None or group is dist.group.WORLD  # the next default group takes the place of this one
        self._group = None if group is None else weakref.ref(group)  # weak, because the group's communicators are kept with it
        self.ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self.asked, self.options = asked, options

    def group(self):
        group = None if self._default else self._group()
        if group is None and not self._default:
            raise ValueError("the process group of the layers has gone: give renew() a new one")
        return group


def group_of(group):
    """Returns the process group of a DeviceMesh with one dimension, and for None the default group, if there is one; otherwise `group`."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names
            one = f"mesh[{names[-1]!r}]" if names else "mesh.get_group(1)"
            raise ValueError(f"group is a DeviceMesh with the dimensions {list(names or range(group.ndim))}: give one dimension of it, such as {one}")
        return group.get_group()
    if group is None:
        if not dist.is_initialized():
            return None
        return dist.group.WORLD
    return group


def _send_id(group):
    """Makes the id of a new communicator on the group's first rank and sends it over the group."""
    rank, first = dist.get_rank(group), dist.get_global_rank(group, 0)
    largest_in(group, 0)  # all ranks are here before the id is made, because an id that no rank joins ends after the init timeout
    given = [bytes(moeccl.unique_id()) if rank == 0 else None]
    dist.broadcast_object_list(given, src=first, group=group)
    return moeccl.UniqueId.from_bytes(given[0])


def comm_of(group: Group = None, **options: Any) -> moeccl.Comm:
    """Returns the communicator that MoE layers over `group` share. group is a torch ProcessGroup of any backend, a DeviceMesh with one
    dimension, or a moeccl.Comm.

    None means the default group, or, in a process that no launcher started, a communicator of only this process. The first call for a group
    is collective. For a group of backend "moeccl" the communicator is separate from the group's own, so that a dispatch can run at the
    same time as the group's operations. Options are moeccl.Comm's: topology, pace, timeout_ms, staging_bytes, deterministic."""
    if isinstance(group, moeccl.Comm):
        if options:
            raise ValueError(f"options {', '.join(options)} belong to a communicator that is made here, and group is one "
                             "already: give them to moeccl.Comm")
        return group
    group = group_of(group)
    key = tuple(sorted(options.items()))
    if group is None:
        n_ranks = os.environ.get("WORLD_SIZE", "1")
        if n_ranks not in ("", "1"):  # each rank would train alone
            raise RuntimeError(f"the launcher started {n_ranks} ranks (WORLD_SIZE), but there is no process group: call "
                               "torch.distributed.init_process_group first, or give group= a moeccl.Comm")
        return _join(_alone, key, _Origin(None, options, options), moeccl.unique_id, 0)
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is a {type(group).__name__}: give a torch.distributed ProcessGroup, a DeviceMesh, a moeccl.Comm or None")
    return _join(_made.setdefault(group, {}), key, _Origin(group, options, {**_timeouts(group, options), **options}),
                 lambda: _send_id(group), dist.get_rank(group), getattr(group, "bound_device_id", None))


def _timeout_ms(group):
    """Returns a process group's timeout in milliseconds; None if its backends do not say it."""
    found = []
    for device in ("cpu", "cuda"):
        try:
            backend = group._get_backend(torch.device(device))
            backend = getattr(backend, "wrapped_pg", backend)  # torch's wrapper for TORCH_DISTRIBUTED_DEBUG=DETAIL
            found.append(backend.options._timeout.total_seconds() * 1000)
        except (AttributeError, RuntimeError):  # no such backend, or one without options
            pass
    return max(found, default=None)


def _timeouts(group, options):
    """Returns the options that follow from the group's timeout, but for those that the caller or the environment gives."""
    limit = options.get("timeout_ms", None if os.environ.get("MOECCL_TIMEOUT_MS") else _timeout_ms(group))
    if limit is None or limit <= 0:
        return {}
    meeting = {} if os.environ.get("MOECCL_INIT_TIMEOUT_MS") else {"init_timeout_ms": clamp_ms(max(limit, _MEETING_MS))}
    return {"timeout_ms": clamp_ms(limit), **meeting}


def _join(made, key, origin, make_id, rank, device=None):
    """Returns made[key], which it makes if it is not there. A communicator serves the CUDA device that is current when it joins."""
    if key not in made:
        if torch.cuda.is_initialized() or device is not None and device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.current_stream().synchronize()  # makes the device's context this thread's
        made[key] = moeccl.Comm(len(origin.ranks), make_id(), rank, **origin.options)
        _origins[made[key]] = origin
    return made[key]


def ranks_of(comm):
    """Returns the ranks of the default group that `comm` has; None if they are not known, because comm_of() did not make it."""
    if comm in _origins:
        return _origins[comm].ranks
    return list(range(comm.size)) if dist.is_initialized() and dist.get_world_size() == comm.size else None


def beside(comm):
    """Returns a communicator of the same ranks, topology and options, so that two operations can run at once. All layers over `comm`
    share it: they use it in program order, as they use `comm`. The first call is collective. Returns `comm` itself if it was not made
    by comm_of(), because its topology is then unknown."""
    if comm not in _origins:
        return comm
    if comm not in _beside:
        options = dict(_origins[comm].options)
        if options.get("pace"):
            options.pop("topology", None)  # the two then share the paced lanes of `comm`
        _beside[comm] = comm.split(0, comm.rank, **options)
    return _beside[comm]


def _comms(group):
    """Returns the communicators that comm_of() and beside() made for `group`, which may also be a moeccl.Comm itself."""
    if isinstance(group, moeccl.Comm):
        made = [group]
    else:
        group = group_of(group)
        made = list((_alone if group is None else _made.get(group, {})).values())
    return [*(_beside[comm] for comm in made if comm in _beside), *made]


def abort(group: Group = None) -> None:
    """Ends the operations of the communicators that comm_of() made for `group`, here at once and on the other ranks as soon as they
    notice. Any thread may call it, such as one that watches over training. The layers can go on after renew()."""
    for comm in _comms(group):
        if comm.handle:
            comm.abort()


def revoke(comm):
    """Ends the operations of a communicator and of that beside it on all ranks, at once."""
    for one in _comms(comm):
        if one.handle:
            one.revoke()


def _end(comm):
    other = _beside.pop(comm, None)
    if other is not None:
        other.close()
    comm.close()


def _end_all(made):
    for comm in made.values():
        _end(comm)
    made.clear()


def close(group: Group = None) -> None:
    """Closes the communicators that comm_of() made for `group`. Call it before destroy_process_group() in a process that goes on; a process
    that ends need not call it."""
    group = group_of(group)
    _end_all(_alone if group is None else _made.pop(group, {}))


def successors(comms, group=None):
    """Returns {comm: the communicator that takes its place}, with the same options, and the same ranks unless `group` has others. If one
    is not closed, all communicators of its group are, before any is made. The call is collective."""
    if isinstance(group, moeccl.Comm):
        return dict.fromkeys(comms, group)
    if any(comm not in _origins for comm in comms):
        raise ValueError("the layers have a moeccl.Comm that the caller made: give renew() a new one as group")
    groups = {comm: _origins[comm].group() if group is None else group for comm in comms}
    for made in (_alone, *_made.values()):
        if any(known in groups for known in made.values()):
            _end_all(made)
    for comm in groups:  # those of a default group that was made again are not in _made
        _end(comm)
    return {comm: comm_of(of, **_origins[comm].asked) for comm, of in groups.items()}


def largest(comm, value):
    """Returns the largest of all ranks' numbers. The call is collective."""
    number = torch.tensor([value], dtype=torch.int64, device="cpu")
    comm.all_reduce(number, op=moeccl.MAX)
    return int(number)


def largest_in(group, value):
    """Returns the largest of the numbers of a torch process group's ranks. The call is collective."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return max(values)
