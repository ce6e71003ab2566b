# SPDX-License-Identifier: Apache-2.0
"""Clipping of gradients where each rank has other experts: all ranks must scale by the same factor."""
import math
import struct

import torch
from torch import nn

from ._group import largest, largest_in
from .experts import check_plain, expert_parameters
from .layer import moe_layers
from .wrapped import refuse_fsdp1


def _sorted(grads):
    """Returns lists of gradients that torch computes with together: plain tensors, and DTensors of one mesh, by type."""
    lists = {}
    for grad in grads:
        lists.setdefault((getattr(grad, "device_mesh", None), grad.dtype), []).append(grad)
    return lists


def _norms(grads, norm_type):
    """Returns the norms of gradients as numbers. Those of a DTensor's parts are joined, which is collective."""
    norms = []
    for (mesh, dtype), some in _sorted(grads).items():
        # A norm in 16 bits has few digits, and that of float16 may be too large for the type.
        wide = {"dtype": torch.float32} if dtype in (torch.float16, torch.bfloat16) else {}
        of_each = torch.stack([n.to(some[0].device) for n in torch._foreach_norm(some, norm_type, **wide)])
        norm = torch.linalg.vector_norm(of_each, norm_type)
        norms.append(float(norm if mesh is None else norm.full_tensor()))
    return norms


def _joined(norms, norm_type):
    return 0.0 if not norms else float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64, device="cpu"), norm_type))


def _expert_gradients(layer):
    """Returns the gradients of this rank's experts, each replica of an expert only on one rank."""
    counted = layer.placement.counted()
    if counted is not None:
        check_plain(layer.experts, "clip_grad_norm_() with replicas")
    grads = [p.grad for p in layer.experts.parameters() if p.grad is not None]
    grads = [g if counted is None else g[counted] for g in grads]
    return [g for g in grads if g.numel()]  # no elements have no largest one


def _of_all_ranks(comm, norm):
    every = torch.empty(comm.size, dtype=torch.float64, device="cpu")
    comm.all_gather(torch.tensor([norm], dtype=torch.float64, device="cpu"), every)
    return every.tolist()


def _agreed(norm, layers):
    """Returns the largest of all ranks' norms, or NaN. They may differ in the last bits, for example on different processors."""
    (bits,) = struct.unpack("q", struct.pack("d", abs(norm)))  # which have the order of the numbers, and NaN is the largest
    for comm in {id(layer.comm): layer.comm for layer in layers}.values():
        bits = largest(comm, bits)
    for data in {id(layer.data_group): layer.data_group for layer in layers if layer.data_group is not None}.values():
        bits = largest_in(data, bits)
    return struct.unpack("d", struct.pack("q", bits))[0]


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
    """Scales the gradients of a model with MoE layers so that their norm is at most max_norm, and returns the norm before that.

    It is torch.nn.utils.clip_grad_norm_ for the whole model, whose experts are on several ranks: parameters that all ranks have, and
    the parts of FSDP2's, count once, and so does every expert, however many replicas it has. All ranks scale by the same factor. With
    torch's function each rank would scale by its own, and parameters that are equal on all ranks would not stay equal.

    norm_type may be math.inf. The call is collective. Call it where torch's function would be called."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: give the model, not its parameters, because its layers know which are experts")
    refuse_fsdp1(model, "gradients")
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}: give a number above 0, or math.inf")
    layers = moe_layers(model)
    experts = {id(p) for p in expert_parameters(model)}
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norms = _norms([p.grad for p in model.parameters() if p.grad is not None and id(p) not in experts], norm_type)
    for comm in {id(layer.comm): layer.comm for layer in layers}.values():
        here = [g for layer in layers if layer.comm is comm for g in _expert_gradients(layer)]
        norms += _of_all_ranks(comm, _joined(_norms(here, norm_type), norm_type))
    total = _agreed(_joined(norms, norm_type), layers)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(f"the norm of the gradients is {total}: with error_if_nonfinite=False they would be scaled by it")
    factor = max_norm / (total + 1e-6)
    if not factor >= 1:
        for some in _sorted(grads).values():
            torch._foreach_mul_(some, factor)
    kind = {"dtype": torch.promote_types(torch.float32, grads[0].dtype), "device": grads[0].device} if grads else {"device": "cpu"}
    return torch.tensor(total, **kind)
