# SPDX-License-Identifier: Apache-2.0
"""Loss scaling where each rank has other experts: all ranks must skip the same steps."""
import torch

from ._group import comm_of, largest


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler that skips a step on all ranks if any rank has an inf or NaN in a gradient. With torch's own, only the rank
    whose expert has it would skip, and parameters and scales that are equal on all ranks would not stay equal.

    group: all ranks that train the model, as a ProcessGroup, a moeccl.Comm, or None for the default group. The other arguments are
    torch's. The constructor is collective, and so is unscale_() or, without it, step()."""

    def __init__(self, device="cuda", *scales, group=None, **options):
        super().__init__(device, *scales, **options)
        self._comm = comm_of(group) if self._enabled else None

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        """What unscale_() and step() with a fused optimizer call."""
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found = found or {found_inf.device: found_inf}  # no gradients
        if largest(self._comm, int(any(bool(flag) for flag in found.values()))):
            for flag in found.values():
                flag.fill_(1.0)
        return found
