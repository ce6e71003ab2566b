# SPDX-License-Identifier: Apache-2.0
"""Loss scaling where each rank has other experts: all ranks must skip the same steps."""
from typing import Any

import torch

from ._calls import uncompiled
from ._group import Group, comm_of, largest
from .aux_loss import set_scaler_scale


class _Scaled(torch.autograd.Function):
    """Returns a scaled loss, or a stage's output, as it is. Its backward pass begins with this, and gives auxiliary losses the scale
    until its end."""

    @staticmethod
    def forward(ctx, loss, scale):
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, grad):
        set_scaler_scale(ctx.scale)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: set_scaler_scale(1.0))
        return grad, None


@uncompiled
def _scaled(outputs, scale):
    if torch.is_tensor(outputs):
        return _Scaled.apply(outputs, scale)
    every = (_scaled(one, scale) for one in outputs)
    return type(outputs)(every) if isinstance(outputs, (list, tuple)) else every


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler that skips a step on all ranks if any rank has an inf or NaN in a gradient. With torch's own, only the rank
    whose expert has it would skip, and parameters and scales that are equal on all ranks would not stay equal.

    In the backward pass of a scaled loss, the gradients of the layers' auxiliary losses have the scale too. A stage of a pipeline before
    the last has no loss, so it returns scaler.stage_output(y) instead of y.

    group: all ranks that train the model, as a ProcessGroup, a moeccl.Comm, or None for the default group. The other arguments are
    torch's. The constructor is collective, and so is unscale_() or, without it, step()."""

    def __init__(self, device: str = "cuda", *scales: Any, group: Group = None, **options: Any) -> None:
        super().__init__(device, *scales, **options)
        self._group = group
        if self._enabled:
            comm_of(group)

    def scale(self, outputs: Any) -> Any:
        scaled = super().scale(outputs)
        return _scaled(scaled, self._scale) if self._enabled else scaled

    def stage_output(self, outputs: Any) -> Any:
        """Returns what a stage of a pipeline passes to the next one, a tensor or a list or tuple of tensors, as it is. Its gradients come
        from a scaled loss, so in the backward pass from here the layers' auxiliary losses get the scale as well."""
        if not self._enabled:
            return outputs
        super().scale((outputs if torch.is_tensor(outputs) else outputs[0]).new_ones(()))  # makes the scale, if this is its first use
        return _scaled(outputs, self._scale)

    def update(self, new_scale: Any = None) -> None:
        set_scaler_scale(1.0)  # a backward pass that failed has left its own
        super().update(new_scale)

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        """What unscale_() and step() with a fused optimizer call."""
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found = found or {found_inf.device: found_inf}  # no gradients
        if largest(comm_of(self._group), int(any(bool(flag) for flag in found.values()))):
            for flag in found.values():
                flag.fill_(1.0)
        return found
