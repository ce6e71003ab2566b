# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the optimizer that any number of ranks can load, with any placement of the experts."""
import json
from typing import Any, Dict, Optional

import torch
from torch import nn

from ._agree import texts_of_all
from .whole import _gathered, _is_root, _layers, _own_rows, _places, _unwrapped, in_state
from .wrapped import distributed_as, is_distributed, refuse_fsdp1


def _names(model, optimizer):
    """Returns {parameter: name} for the model, which has all of the optimizer's parameters."""
    refuse_fsdp1(model, "parameters")
    names = {}
    for name, parameter in model.named_parameters():
        names.setdefault(parameter, in_state(name))
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise ValueError(f"parameter {j} of the optimizer's group {i} ({list(parameter.shape)}) is not one of the model's: give the "
                                 "model that the optimizer was made for")
    return names


def _expert_layers(layers):
    """Returns {parameter: layer} for the experts of all layers."""
    return {p: layer for _, layer in layers for p in layer.experts.stacked()}


def _form_of(state):
    """Returns what an expert parameter's state consists of: for a tensor its type and the shape for one expert, null for a value."""
    return {key: [str(v.dtype).removeprefix("torch."), list(v.shape[1:]), v.shape[0]] if torch.is_tensor(v) and v.dim() else None
            for key, v in state.items()}


def _agreed_form(name, layer, state):
    """Returns _form_of() the parameter's state on the ranks that have experts. All ranks raise the same error where these differ."""
    n_slots = layer.experts.n_slots
    said = [json.loads(text) for text in texts_of_all(layer.comm, json.dumps([n_slots, _form_of(state)]))]
    forms = []
    for rank, (slots, form) in enumerate(said):
        for key, one in form.items():
            if one is not None and one.pop() != slots:
                raise ValueError(f"the optimizer's {key} of {name} has no row for each of the {slots} experts on rank {rank}, and cannot be "
                                 "joined: save each rank's optimizer.state_dict()")
        forms += [(rank, form)] if slots else []
    for rank, form in forms:
        if form != forms[0][1]:
            raise ValueError(f"the optimizer's state of {name} is {form} on rank {rank} and {forms[0][1]} on rank {forms[0][0]}: call this "
                             "after the same step on all ranks")
    return forms[0][1] if forms else {}


def _joined(name, layer, state, root, places):
    """Returns the state of an expert parameter, with tensors [n_experts, ...]."""
    whole, first = {}, next(r for r in range(layer.comm.size) if places[r, 0] >= 0)
    for key, one in _agreed_form(name, layer, state).items():
        if one is not None:
            kind, shape = getattr(torch, one[0]), one[1]
            mine = state[key] if layer.experts.n_slots else torch.empty((0, *shape), dtype=kind, device="cpu")
            whole[key] = _gathered(layer, mine, root, places)
        else:  # a rank without experts may have made no step for them
            value, kind = state.get(key), ""
            if torch.is_tensor(value):
                value, kind = value.item(), str(value.dtype).removeprefix("torch.")
            value, kind = json.loads(texts_of_all(layer.comm, json.dumps([value, kind]))[first])
            whole[key] = torch.tensor(value, dtype=getattr(torch, kind), device="cpu") if kind else value
    return whole


@torch.no_grad()
def full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, root: Optional[int] = None) -> Dict[str, Any]:
    """Returns the optimizer's state for the whole model, on the CPU, by the names of the parameters: {"state": {name: {...}},
    "param_groups": [{..., "params": [names]}]}. The state of an expert is [n_experts, ...], as in full_state_dict().

    load_full_optimizer_state_dict() loads it on any number of ranks. root: the only rank of the layers' communicators that gets it, the
    others get {}; None: all. Each tensor of an expert's state must have a row for each expert, as Adam's moments do. Parts of FSDP2's
    state are joined. The call is collective."""
    model = _unwrapped(model)
    layers, names = _layers(model), _names(model, optimizer)
    owners = _expert_layers(layers)
    places = {id(layer): _places(layer) for _, layer in layers}
    state, held = {}, {p for group in optimizer.param_groups for p in group["params"]}
    for parameter, name in names.items():  # in the model's order: that of the optimizer may differ between ranks
        mine = optimizer.state.get(parameter, {}) if parameter in held else {}
        if parameter in owners and parameter in held:
            layer = owners[parameter]
            mine = _joined(name, layer, mine, root, places[id(layer)])
        else:
            mine = {key: (v.full_tensor() if is_distributed(v) else v.detach()).cpu().clone() if torch.is_tensor(v) else v
                    for key, v in mine.items()}
        if mine:
            state[name] = mine
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups} if _is_root(root, layers) else {}


def _group_for(i, mine, groups):
    """Returns the saved group that has the parameters `mine` of the optimizer's group i."""
    for saved in groups:
        if set(mine) <= set(saved["params"]):
            return saved
    raise ValueError(f"no group of the saved optimizer has all parameters of group {i} ({', '.join(mine[:3])}{', ...' * (len(mine) > 3)}): make "
                     "the optimizer with groups as it had when it was saved")


def _own_state(name, parameter, state, layer):
    """Returns a copy of this rank's part of a parameter's state: the optimizer would otherwise work in the tensors that were given."""
    state = {key: v.clone() if torch.is_tensor(v) and (layer is None or not v.dim()) else v for key, v in state.items()}
    if layer is not None:
        order = {e: e for e in range(layer.n_experts)}
        state = {key: _own_rows(layer, f"the optimizer's {key} of {name}", v, order) if torch.is_tensor(v) and v.dim() else v
                 for key, v in state.items()}
    return {key: distributed_as(parameter, v) if torch.is_tensor(v) and v.shape == parameter.shape else v for key, v in state.items()}


@torch.no_grad()
def load_full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state: Dict[str, Any]) -> None:
    """Loads what full_optimizer_state_dict() returned into an optimizer of the same class: each rank takes the state of the experts in its
    slots, replicas included. Load the model, or set its placement, first. Options of the groups (lr, betas, ...) are those that were
    saved. All ranks need the state; the call is collective for FSDP2's parameters."""
    model = _unwrapped(model)
    names, owners = _names(model, optimizer), _expert_layers(_layers(model))
    given, groups, place = {}, [], 0
    for i, group in enumerate(optimizer.param_groups):
        mine = [names[p] for p in group["params"]]
        groups.append({**_group_for(i, mine, state["param_groups"]), "params": list(range(place, place + len(mine)))})
        for name, parameter in zip(mine, group["params"]):
            if name in state["state"]:
                given[place] = _own_state(name, parameter, state["state"][name], owners.get(parameter))
            place += 1
    optimizer.load_state_dict({"state": given, "param_groups": groups})
