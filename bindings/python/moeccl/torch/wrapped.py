# SPDX-License-Identifier: Apache-2.0
"""Finds wrappers that take a rank's experts for parameters that all ranks have, which would destroy the model silently."""
import weakref

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ._group import ranks_of

_checked = weakref.WeakKeyDictionary()  # for each DistributedDataParallel: the layers that are right in it
_layers = weakref.WeakSet()  # those that have run


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


def is_a(thing, name):
    """Returns whether an object has a class of this name, which is not imported for that."""
    return any(c.__name__ == name for c in type(thing).__mro__)


def is_distributed(value):
    """Returns whether a tensor is a DTensor."""
    return hasattr(value, "full_tensor")


def distributed_as(parameter, value):
    """Returns this rank's part of a value if it has a part of the parameter; otherwise the value."""
    if not is_distributed(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(value.to(parameter.device_mesh.device_type), parameter.device_mesh, parameter.placements)


def refuse_fsdp1(model, what):
    """Refuses a model whose parameters, or their gradients, are parts without knowing it."""
    if any(is_a(m, "FullyShardedDataParallel") for m in model.modules()):
        raise TypeError(f"FullyShardedDataParallel has parts of {what} that do not say so: use FSDP2's fully_shard")


def check(layer):
    """Refuses a forward pass in a wrapper that does not leave the layer's experts out."""
    _layers.add(layer)
    experts = [*layer.experts.stacked(), *layer.experts.parameters()]  # what FSDP1 and parametrize leave of them is one of the two
    for parameter in experts:
        check_parameter(parameter, layer.comm)
        if layer.comm.size > 1 and getattr(parameter._base, "_is_flat_param", False):
            raise TypeError("FullyShardedDataParallel has split this rank's experts among ranks. Whether these have the same experts is not "
                            "visible here, and the parts of others must not be joined. Make the model again, and call "
                            "FullyShardedDataParallel(model, ignored_states=moeccl.torch.expert_parameters(model)), or use fully_shard, "
                            "which also splits experts among ranks that have the same ones")
    wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if wrapper is None or layer in _checked.setdefault(wrapper, weakref.WeakSet()):
        return
    held = {id(p) for p in getattr(wrapper, "_module_parameters", ())}
    if any(id(p) in held for p in experts) and _have_other_experts(layer.comm, dist.get_process_group_ranks(wrapper.process_group)):
        raise TypeError("DistributedDataParallel does not leave out the experts, which are others on each rank. Its constructor has "
                        "already replaced those of all ranks by rank 0's: make the model again, or load its checkpoint, and call "
                        "DistributedDataParallel(moeccl.torch.ignore_experts(model))")
    _checked[wrapper].add(layer)


def _check_optimizer(optimizer, *_):
    """Refuses a step that would replace experts by those of the rank that keeps their part of the optimizer's state."""
    if not is_a(optimizer, "ZeroRedundancyOptimizer"):
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    ranks = dist.get_process_group_ranks(optimizer.process_group)
    for layer in _layers:
        if any(id(p) in held for p in layer.experts.parameters()) and _have_other_experts(layer.comm, ranks):
            raise TypeError("ZeroRedundancyOptimizer has the experts, which are others on each rank, and would replace those of all ranks by "
                            "one rank's: give it the other parameters, and give moeccl.torch.expert_parameters(model) to another optimizer")


register_optimizer_step_pre_hook(_check_optimizer)
