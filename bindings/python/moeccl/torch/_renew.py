# SPDX-License-Identifier: Apache-2.0
"""New communicators for the layers of a model, after a failure."""
from torch import nn

import moeccl
from ._group import Group, successors
from .expert_parallel import ExpertParallel
from .layer import MoELayer
from .placement import Hybrid


def _left_out(layer):
    """Returns what the layer's compressed gradients left out; None if there is nothing, or if close() has ended it."""
    try:
        return layer.placement.remainders.get_extra_state()["remainders"] if layer.placement.hybrid and layer.placement.remainders else None
    except moeccl.Error:
        return None


def _renew_placement(placement, comm, left_out):
    """Gives a placement a new communicator. Experts stay where they are."""
    if placement.hybrid is None:
        placement.comm = comm
        return
    made = Hybrid(placement.n_experts, comm, placement.domains, placement.ratio)
    for name in ("comm", "experts_comm", "hybrid", "_owned", "_migration", "_shared", "_begun"):
        setattr(placement, name, getattr(made, name))
    if placement.remainders is not None:
        placement.remainders.renew(left_out)


def _renew_ep(ep, comm):
    ep.close()
    ep.comm = comm


def _checked_successors(comms, group):
    found = successors(comms, group)
    for comm, made in found.items():
        if (comm.rank, comm.size) != (made.rank, made.size):
            raise ValueError(f"the layers' experts are those of rank {comm.rank} of {comm.size}, and the new communicator has rank {made.rank} "
                             f"of {made.size}: give a group of as many ranks, in the same order, or make the model again and use "
                             "load_full_state_dict()")
    return found


def _eps_of(model, layers):
    """Returns the ExpertParallels that modules hold besides those of the layers, each once, however many modules hold it."""
    found = {id(v): v for m in model.modules() for v in vars(m).values() if isinstance(v, ExpertParallel)}
    return [ep for ep in found.values() if not any(ep is layer.ep for layer in layers)]


def renew(model: nn.Module, group: Group = None) -> None:
    """Gives the MoE layers of a model new communicators, with the old ones' options, after abort(), close() or a failure. Weights,
    placements and the optimizer stay as they are; steps whose backward pass has not run are lost. After close(), so is what
    compressed gradients left out. A copy of the model, and another model over the same group, needs a call of its own. A GradScaler
    gets a new communicator by itself.

    group: what takes the place of the layers' groups, as a ProcessGroup or a moeccl.Comm with as many ranks. None: the same groups, which
    must work. The call is collective. It closes the groups' old communicators where close() has not."""
    layers = [m for m in model.modules() if isinstance(m, MoELayer)]
    left_out = [_left_out(layer) for layer in layers]  # before any communicator is closed
    eps = _eps_of(model, layers)
    found = _checked_successors([m.comm for m in (*layers, *eps)], group)
    for layer, own in zip(layers, left_out):
        layer.comm = found[layer.comm]
        layer.handle = layer.step = None
        _renew_placement(layer.placement, layer.comm, own)
        _renew_ep(layer.ep, layer.comm)
        layer.ep._hybrid = layer.placement.hybrid
        if layer._replacing is not None:
            layer._replacing.renew()
    for ep in eps:
        _renew_ep(ep, found[ep.comm])
