# SPDX-License-Identifier: Apache-2.0
"""The scale of balancing losses, whose gradients join the backward pass without a mention in the training loop."""
import torch

from ._calls import uncompiled

_loss_scale = [1.0]
_scaler_scale = [1.0]  # a tensor in the backward pass of a loss that moeccl.torch.GradScaler has scaled


def set_aux_loss_scale(scale: float) -> None:
    """Sets the factor for the gradients of auxiliary losses. Use that of the main loss, such as 1 / micro-batches. The scale of
    moeccl.torch.GradScaler joins it by itself."""
    _loss_scale[0] = float(scale)


def set_scaler_scale(scale):
    """Sets the factor that a GradScaler adds to that of set_aux_loss_scale(); `scale` may be a tensor of one element."""
    _scaler_scale[0] = scale


def loss_gradient(loss):
    """Returns the gradient of a balancing loss, with the scale of now."""
    scale = _scaler_scale[0]
    scale = scale.to(loss.device) if torch.is_tensor(scale) else scale  # not float(), which would wait for the device
    return (torch.full_like(loss, _loss_scale[0]) * scale).to(loss.dtype).reshape(loss.shape)


class _Attach(torch.autograd.Function):
    """Returns y as it is. The backward pass also starts the auxiliary loss's gradient, as if it had been added to the loss."""

    @staticmethod
    def forward(ctx, y, loss):
        ctx.save_for_backward(loss)
        ctx.mark_dirty(y)  # not y.view_as(y), a view that callers could not change in place
        return y

    @staticmethod
    def backward(ctx, grad):
        (loss,) = ctx.saved_tensors
        return grad, loss_gradient(loss)


@uncompiled  # the scale is that of the time of the backward pass
def attach_loss(y, loss):
    return _Attach.apply(y, loss)
