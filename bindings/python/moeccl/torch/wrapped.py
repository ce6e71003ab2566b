# SPDX-License-Identifier: Apache-2.0
"""Finds wrappers that take a rank's experts for parameters that all ranks have, which would destroy the model silently."""
import weakref

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ._group import ranks_of

_checked = weakref.WeakKeyDictionary()  # for each DistributedDataParallel: the layers that are right in it


def _have_other_experts(comm, ranks):
    """Returns True if some of the ranks have other experts than this one. Ranks of other expert-parallel groups have the same."""
    own = ranks_of(comm)
    return own is not None and len(set(own) & set(ranks)) > 1


def check_parameter(parameter, comm):
    """Refuses a parameter of this rank's experts that fully_shard cut into parts for ranks with other experts."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is not None and _have_other_experts(comm, mesh.mesh.flatten().tolist()):
        raise ValueError("this rank's experts would be sharded over ranks that have other experts, whose parts would then be joined: call "
                         "fully_shard(model, ignored_params=set(moeccl.torch.expert_parameters(model)))")


def check(layer):
    """Refuses a forward pass in a wrapper that does not leave the layer's experts out."""
    experts = layer.experts.stacked()
    for parameter in experts:
        check_parameter(parameter, layer.comm)
    wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if wrapper is None or layer in _checked.setdefault(wrapper, weakref.WeakSet()):
        return
    held = {id(p) for p in getattr(wrapper, "_module_parameters", ())}
    if any(id(p) in held for p in experts) and _have_other_experts(layer.comm, dist.get_process_group_ranks(wrapper.process_group)):
        raise RuntimeError("DistributedDataParallel does not leave out the experts, which are others on each rank. Its constructor has "
                           "already replaced those of all ranks by rank 0's: make the model again, or load its checkpoint, and call "
                           "DistributedDataParallel(moeccl.torch.ignore_experts(model))")
    _checked[wrapper].add(layer)
