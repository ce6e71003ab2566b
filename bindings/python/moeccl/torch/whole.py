# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the whole model, which any number of ranks can load, with any placement of the experts."""
from typing import Any, Dict, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import moeccl
from ._group import largest
from .experts import check_plain
from .layer import MoELayer, moe_layers
from .wrapped import distributed_as, is_a, is_distributed

# Names that wrappers put into the path of a module. state_dict() leaves out the first two itself, and torch.compile's is left out here.
_UNNAMED = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")


def in_state(path):
    """Returns a module's or parameter's path, or a key of state_dict(), as the keys of a full state have it."""
    return ".".join(part for part in path.split(".") if part not in _UNNAMED)


def _renamed(state, names):
    """Returns a state whose keys are names(key). Its versions of modules, which load_state_dict() reads, have the new names too."""
    made = type(state)((names(key), value) for key, value in state.items())
    if hasattr(state, "_metadata"):
        made._metadata = type(state._metadata)((names(path), value) for path, value in state._metadata.items())
    return made


def _layers(model):
    """Returns the layers with the prefixes of their keys; a layer that is used twice has two."""
    for layer in moe_layers(model):  # which refuses experts of unknown ranks
        check_plain(layer.experts, "a full state")
    found = [(in_state(path), m) for path, m in model.named_modules(remove_duplicate=False) if isinstance(m, MoELayer)]
    return [(f"{path}." if path else "", m) for path, m in found]


def _unwrapped(model):
    """Returns the module in DistributedDataParallel and torch.compile, whichever is the outer one."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif is_a(model, "OptimizedModule"):
            model = model._orig_mod
        else:
            return model


def _is_root(root, layers):
    if root is None:
        return True
    if layers:
        return layers[0][1].comm.rank == root
    return not dist.is_initialized() or dist.get_rank() == root


def _gathered(layer, tensor, root, places):
    """Returns [n_experts, ...] at the root or everywhere, from the slots of all ranks. places: [ranks, slots] the expert in each; -1:
    none."""
    comm, (n_ranks, most) = layer.comm, places.shape
    tensor = tensor.full_tensor() if is_distributed(tensor) else tensor  # over the ranks that hold the same experts
    block = torch.zeros((most, *tensor.shape[1:]), dtype=tensor.dtype, device="cpu")
    block[:tensor.shape[0]] = tensor.detach()
    here = root is None or root == comm.rank
    every = torch.empty((n_ranks, *block.shape), dtype=block.dtype, device="cpu") if here else None
    if block.numel() and root is None:
        comm.all_gather(block, every, type=moeccl.UINT8)
    elif block.numel():
        comm.gather(block, every, root, type=moeccl.UINT8)
    if not here:
        return None
    whole = torch.zeros((layer.n_experts, *block.shape[1:]), dtype=block.dtype, device="cpu")
    filled = places >= 0
    whole[places[filled]] = every[filled]  # replicas of an expert differ by rounding at most
    return whole


def _places(layer):
    numbers = layer.experts.numbers()
    most = largest(layer.comm, len(numbers))
    places = torch.empty((layer.comm.size, most), dtype=torch.int64, device="cpu")
    layer.comm.all_gather(torch.tensor(numbers + [-1] * (most - len(numbers)), dtype=torch.int64, device="cpu"), places)
    return places


@torch.no_grad()
def full_state_dict(model: nn.Module, root: Optional[int] = None) -> Dict[str, Any]:
    """Returns the state_dict() that one process with all experts would have, on the CPU: an expert's tensors are [n_experts, ...].

    load_full_state_dict() loads it on any number of ranks; one process can also load it with load_state_dict(). root: the only rank of
    the layers' communicators that gets it, the others get {}; None: all. With several expert-parallel groups it counts in each of them. DDP,
    FSDP1, checkpoint_wrapper and torch.compile leave nothing in the keys, and parts of FSDP's parameters are joined. What compressed
    gradients have left out (gradient_ratio) is not in it. The call is collective."""
    model = _unwrapped(model)
    layers, state = _layers(model), _renamed(model.state_dict(), in_state)
    for key, value in state.items():
        if torch.is_tensor(value):
            state[key] = (value.full_tensor() if is_distributed(value) else value.detach()).cpu()
    for prefix, layer in layers:
        places = _places(layer)
        for name, parameter in layer.experts.named_parameters(recurse=False):
            state[f"{prefix}experts.{name}"] = _gathered(layer, parameter, root, places)
        state[f"{prefix}experts._extra_state"] = torch.arange(layer.n_experts, device="cpu")
        if f"{prefix}remainders._extra_state" in state:
            state[f"{prefix}remainders._extra_state"] = {"remainders": None}
    return state if _is_root(root, layers) else {}


def _own_rows(layer, key, whole, order):
    """Returns the rows of this rank's slots, replicas included. order: {expert: row}."""
    if whole.shape[0] != len(order) or not order.keys() >= set(layer.experts.numbers()):
        raise ValueError(f"{key} has {whole.shape[0]} experts, and the layer has {layer.n_experts} on all ranks: give what full_state_dict() "
                         "returned")
    return whole[torch.tensor([order[e] for e in layer.experts.numbers()], dtype=torch.int64, device="cpu")]


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Dict[str, Any], strict: bool = True, assign: bool = False) -> Any:
    """Loads what full_state_dict() returned: each rank takes the experts in its slots, which may be others than when it was saved. All
    ranks need the state; torch.load(file, mmap=True) reads only what they take. Returns what load_state_dict() does. The call is
    collective for FSDP's parameters."""
    model = _unwrapped(model)
    own, state = model.state_dict(), _renamed(state, in_state)
    given = _renamed(state, lambda key: key)
    for prefix, layer in _layers(model):
        numbers = state.get(f"{prefix}experts._extra_state")
        order = {int(e): row for row, e in enumerate(range(layer.n_experts) if numbers is None else numbers)}
        for name, _ in layer.experts.named_parameters(recurse=False):
            key = f"{prefix}experts.{name}"
            if key in state:
                given[key] = _own_rows(layer, key, state[key], order)
        given[f"{prefix}experts._extra_state"] = layer.experts.get_extra_state()
    for key, value in own.items():
        name = in_state(key)
        if name in given and not is_distributed(given[name]):
            given[name] = distributed_as(value, given[name])
    names = {in_state(path): path for path in (*own, *getattr(own, "_metadata", ()))}
    return model.load_state_dict(_renamed(given, lambda key: names.get(key, key)), strict=strict, assign=assign)
