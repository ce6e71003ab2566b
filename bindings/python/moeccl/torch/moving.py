# SPDX-License-Identifier: Apache-2.0
"""What moves with the experts that change their slots: parameters, gradients, the optimizers' states, and what the caller keeps."""
import json

import torch

from ._agree import texts_of_all, wrong_in_groups
from ._calls import DTYPES
from .experts import check_plain


def several(given):
    """Returns a list of what is one thing, a list or tuple of them, or None."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _state_of(label, owner, optimizers):
    """Returns (label, tensor) for each tensor of the optimizers' states that has a row for each slot."""
    found = []
    for key, value in ((k, v) for optimizer in optimizers for k, v in optimizer.state.get(owner, {}).items()):
        if torch.is_tensor(value) and value.shape[:1] == owner.shape[:1]:
            found.append((f"the optimizer's {key} of {label}", value))
            continue
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        shapes = [list(v.shape) for v in inside if torch.is_tensor(v) and v.numel() > 1]  # one number is for all slots, as Adam's step
        if shapes:
            raise ValueError(f"the optimizer's {key} of {label} has shape {shapes[0]}, without a row for each of the {owner.shape[0]} slots, "
                             "and cannot move with the experts: give them an optimizer whose state has one, such as Adam")
    return found


def _of_owner(label, owner, optimizers):
    """Returns (label, tensor) for a parameter, or a tensor that stands for it: itself, its gradient and its states."""
    found = [(label, owner.data)]
    if owner.grad is not None:
        found.append((f"the gradient of {label}", owner.grad))
    return found + _state_of(label, owner, optimizers)


def _belongings(path, layer, optimizers, maps, copies):
    """Returns (label, tensor) for all tensors [slots, ...] that belong to the layer's experts. maps: dictionaries {parameter: tensors};
    copies: copies of the layer."""
    found = []
    check_plain(layer.experts, "rebalance()")
    trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in layer.experts.named_parameters(recurse=False):
        label = f"{path}.experts.{name}" if path else f"experts.{name}"
        owners = {label: parameter}
        for i, tensor in enumerate(t for m in maps if parameter in m for t in several(m[parameter])):
            owners[f"also[{label}]" + (f"[{i}]" if i else "")] = tensor
        if optimizers and parameter.requires_grad and not any(id(owner) in trained for owner in owners.values()):
            raise ValueError(f"{label} is in no param_groups of the optimizer that was given, whose state moves with the experts: give all "
                             "optimizers as a list, with also={parameter: master} if they have master weights instead")
        for i, copied in enumerate(copies):
            owners[f"{label} in copy {i}"] = getattr(copied.experts, name)
        for what, owner in owners.items():
            if not torch.is_tensor(owner) or owner.shape[:1] != parameter.shape[:1]:
                given = f"has shape {list(owner.shape)}" if torch.is_tensor(owner) else f"is a {type(owner).__name__}"
                raise ValueError(f"{what} {given}: give a tensor with a row for each of the {parameter.shape[0]} slots")
            found += _of_owner(what, owner, optimizers)
    tensors = {}  # by memory: what is given twice moves once
    for label, tensor in found:
        if hasattr(tensor, "full_tensor"):
            raise TypeError(f"{label} is a DTensor, of which this rank has a part, and experts move whole: leave the experts out of "
                            "fully_shard (ignored_params), or rebalance() out")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{label} holds {tensor.dtype}: give one of {', '.join(map(str, DTYPES))}")
        if tensor.numel():
            tensors.setdefault((tensor.device, tensor.data_ptr()), (label, tensor))
    return list(tensors.values())


def _copies(i, layer, n_layers, models):
    """Returns the i-th layer of each copy of the model; models: the layers of each."""
    found = []
    for layers in models:
        if len(layers) != n_layers:
            raise ValueError(f"a copy in also= has {len(layers)} MoE layers and the model {n_layers}: give copies of what is rebalanced")
        mine = [(name, p.shape) for name, p in layer.experts.named_parameters(recurse=False)]
        if [(name, p.shape) for name, p in layers[i].experts.named_parameters(recurse=False)] != mine:
            raise ValueError(f"MoE layer {i} of a copy in also= has experts of other shapes: give copies of what is rebalanced")
        if not layer.placement.same_as(layers[i].placement):
            raise ValueError(f"MoE layer {i} of a copy in also= has its experts in other slots: give the copy to every rebalance(), or load "
                             "full_state_dict() into it")
        found.append(layers[i])
    return found


def _checked_arguments(layers, optimizers, also):
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer or a list of them")
    maps, models = [a for a in also if isinstance(a, dict)], [a for a in also if isinstance(a, list)]
    if len(maps) + len(models) < len(also):
        kinds = ", ".join(type(a).__name__ for a in also if not isinstance(a, (dict, list)))
        raise TypeError(f"also has {kinds}: give {{parameter: tensor}}, copies of the model, or a list of such")
    parameters = {p for _, layer in layers for p in layer.experts.parameters()}
    for given in maps:
        if not any(torch.is_tensor(key) and key in parameters for key in given):
            raise ValueError("also has a dictionary without a parameter of the experts among its keys: give {parameter: tensor}, such as "
                             "dict(zip(expert_parameters(model), masters))")
    return maps, models


def _raise_together(layer, failure, tensors):
    """Raises on all ranks of all groups that hold the layer's experts if anything is wrong on one."""
    sums = None if failure else layer.placement.checksums(layer.experts)
    form = [f"{label}, {t.dtype} {list(t.shape[1:])}" for label, t in tensors]
    said = [json.loads(text) for text in texts_of_all(layer.comm, json.dumps([failure and str(failure), form, sums]))]
    wrong = next((f"rank {r}: {text}" for r, (text, _, _) in enumerate(said) if text), None)
    for r, (_, theirs, _) in enumerate(said):
        odd = sorted(set(theirs) ^ set(said[0][1]))
        if odd and not wrong:
            has, lacks = (r, 0) if odd[0] in theirs else (0, r)
            wrong = f"rank {has} moves {odd[0]}, and rank {lacks} does not: give all ranks the same"
    wrong = wrong or layer.placement.drift([one[2] for one in said], [t for _, t in tensors])
    if layer.data_group is not None:
        wrong = wrong_in_groups(layer, wrong)
    if failure:
        raise failure
    if wrong:
        raise ValueError(wrong)


@torch.no_grad()
def move_experts(layers, optimizer, also):
    """Rebalances the layers [(path, layer)] and returns how many slots changed. also: dictionaries {parameter: tensors}, and for copies of
    the model lists of their layers. The call is collective; all ranks raise, before anything moves, if the arguments of one are wrong."""
    optimizers, moves, failure = several(optimizer), [], None
    try:
        maps, models = _checked_arguments(layers, optimizers, also)
    except (TypeError, ValueError) as error:
        failure = error
    for i, (path, layer) in enumerate(layers):
        if not layer.placement.moves:
            continue
        tensors, copies = [], []
        try:
            if not failure:
                copies = _copies(i, layer, len(layers), models)
                tensors = _belongings(path, layer, optimizers, maps, copies)
        except (TypeError, ValueError) as error:
            failure = error
        moves.append((layer, tensors, copies))
        _raise_together(layer, failure, tensors)
    if failure:
        raise failure
    moved = 0
    for layer, tensors, copies in moves:
        moved += layer.placement.rebalance([t for _, t in tensors], layer)
        for copied in copies:
            copied.placement.follow(layer.placement)
    return moved
