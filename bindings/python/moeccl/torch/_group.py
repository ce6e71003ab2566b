# SPDX-License-Identifier: Apache-2.0
"""Communicators for torch.distributed groups."""
import os
import weakref

import torch
import torch.distributed as dist

import moeccl

_made = weakref.WeakKeyDictionary()  # for each process group: {options: Comm}
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
        comm = moeccl.Comm(1, moeccl.unique_id(), 0, **options)
        _options[comm] = options
        return comm
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is a {type(group).__name__}: give a torch.distributed ProcessGroup, a moeccl.Comm or None")
    made = _made.setdefault(group, {})
    if key not in made:
        made[key] = moeccl.Comm(dist.get_world_size(group), _send_id(group), dist.get_rank(group), **options)
        _options[made[key]] = options
    return made[key]


def beside(comm):
    """Makes a communicator of the same ranks and topology, so that two operations can run at once. Returns `comm` itself if it was
    not made by comm_of(), because its topology is then unknown. The call is collective."""
    if comm not in _options:
        return comm
    options = _options[comm]
    # A paced communicator shares the paced lanes of `comm`; otherwise the topology is passed again.
    return comm.split(0, comm.rank, **({"pace": 1} if options.get("pace") else {k: options[k] for k in ("topology",) if k in options}))


def close(group=None):
    """Closes the communicators that comm_of() made for `group`. Call it when training is over, before destroy_process_group()."""
    for comm in _made.pop(_group_of(group), {}).values():
        comm.close()


def largest(comm, value):
    """Returns the largest of all ranks' numbers. The call is collective."""
    number = torch.tensor([value], dtype=torch.int64)
    comm.all_reduce(number, op=moeccl.MAX)
    return int(number)
