# SPDX-License-Identifier: Apache-2.0
"""Communicators for torch.distributed groups."""
import os
import weakref

import torch
import torch.distributed as dist

import moeccl

_made = weakref.WeakKeyDictionary()  # for each process group: {options: Comm}
_alone = {}  # without a process group: {options: Comm}
_beside = weakref.WeakKeyDictionary()  # for each Comm that was made here: that of beside()
_options = weakref.WeakKeyDictionary()  # the options of each Comm that was made here


def _group_of(group):
    if group is None:
        if not dist.is_initialized():
            return None
        return dist.group.WORLD
    return group


def _send_id(group):
    """Makes the id of a new communicator on the group's first rank and sends it over the group."""
    rank, first = dist.get_rank(group), dist.get_global_rank(group, 0)
    given = [bytes(moeccl.unique_id()) if rank == 0 else None]
    dist.broadcast_object_list(given, src=first, group=group)
    return moeccl.UniqueId.from_bytes(given[0])


def comm_of(group=None, **options):
    """Returns the communicator that MoE layers over `group` share. group is a torch ProcessGroup of any backend, or a moeccl.Comm.

    None means the default group, or, in a process that no launcher started, a communicator of only this process. The first call for a group is
    collective. For a group of backend "moeccl" the communicator is separate from the group's own, so that a dispatch can run at the
    same time as the group's operations. Options are moeccl.Comm's: topology, pace, timeout_ms, staging_bytes, deterministic."""
    if isinstance(group, moeccl.Comm):
        if options:
            raise ValueError(f"options {', '.join(options)} belong to a communicator that is made here, and group is one "
                             "already: give them to moeccl.Comm")
        return group
    group = _group_of(group)
    key = tuple(sorted(options.items()))
    if group is None:
        n_ranks = os.environ.get("WORLD_SIZE", "1")
        if n_ranks not in ("", "1"):  # each rank would train alone
            raise RuntimeError(f"the launcher started {n_ranks} ranks (WORLD_SIZE), but there is no process group: call "
                               "torch.distributed.init_process_group first, or give group= a moeccl.Comm")
        return _join(_alone, key, options, 1, moeccl.unique_id, 0)
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is a {type(group).__name__}: give a torch.distributed ProcessGroup, a moeccl.Comm or None")
    return _join(_made.setdefault(group, {}), key, options, dist.get_world_size(group), lambda: _send_id(group), dist.get_rank(group),
                 getattr(group, "bound_device_id", None))


def _join(made, key, options, size, make_id, rank, device=None):
    """Returns made[key], which it makes if it is not there. A communicator serves the CUDA device that is current when it joins."""
    if key not in made:
        if torch.cuda.is_initialized() or device is not None and device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.current_stream().synchronize()  # makes the device's context this thread's
        made[key] = moeccl.Comm(size, make_id(), rank, **options)
        _options[made[key]] = options
    return made[key]


def beside(comm):
    """Returns a communicator of the same ranks and topology, so that two operations can run at once. All layers over `comm` share it:
    they use it in program order, as they use `comm`. The first call is collective. Returns `comm` itself if it was not made by
    comm_of(), because its topology is then unknown."""
    if comm not in _options:
        return comm
    if comm in _beside:
        return _beside[comm]
    options = _options[comm]
    # A paced communicator shares the paced lanes of `comm`; otherwise the topology is passed again.
    made = comm.split(0, comm.rank, **({"pace": 1} if options.get("pace") else {k: options[k] for k in ("topology",) if k in options}))
    _beside[comm] = made
    return made


def close(group=None):
    """Closes the communicators that comm_of() made for `group`. Call it when training is over, before destroy_process_group()."""
    group = _group_of(group)
    made = _alone if group is None else _made.pop(group, {})
    for comm in made.values():
        other = _beside.pop(comm, None)
        if other is not None:
            other.close()
        comm.close()
    made.clear()


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
