# SPDX-License-Identifier: Apache-2.0
"""Rows that travel in 8 bits per element, with a scale for each block of 128, as DeepSeek-V3's dispatch sends them."""
import torch
from torch.autograd.function import once_differentiable

from ._calls import call, memory, stream_of
from .functions import Dispatch

BLOCK = 128
KINDS = (torch.float8_e4m3fn, torch.float8_e5m2)


def n_scales(hidden):
    return -(-hidden // BLOCK)


def quantize(x, kind):
    """x[T, hidden] -> rows[T, hidden] of `kind` and scales[T, blocks] in float32: the largest element of a block becomes kind's largest."""
    hidden, most = x.shape[1], torch.finfo(kind).max
    blocks = torch.nn.functional.pad(x.float(), (0, -hidden % BLOCK)).view(x.shape[0], n_scales(hidden), BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    # Below this a scale would be denormal, and such a block becomes zeros.
    scales = torch.where(largest > most * torch.finfo(torch.float32).tiny, largest / most, torch.ones_like(largest))
    rows = (blocks / scales).clamp(-most, most).to(kind).flatten(1)[:, :hidden]
    return rows.contiguous(), scales.flatten(1)


def dequantize(rows, scales, dtype):
    """The inverse: rows[R, hidden] and scales[R, blocks] -> [R, hidden] of `dtype`."""
    wide = scales.repeat_interleave(BLOCK, dim=1)[:, :rows.shape[1]]
    return (rows.float() * wide).to(dtype)


class QuantizedDispatch(torch.autograd.Function):
    """x[T, hidden] -> rows[R, hidden], which the experts get as they were quantized. The backward pass is moecclDispatchBackward, exact,
    and takes the quantization for the identity."""

    @staticmethod
    def forward(ctx, x, handle, kind):
        ctx.handle = handle
        given, scales = quantize(x, kind)
        rows, arrived = given.new_empty((handle.n_rows, x.shape[1])), scales.new_empty((handle.n_rows, scales.shape[1]))
        call(handle.comm, "moecclDispatchScaled", handle.routing, memory(given), memory(scales), memory(rows), memory(arrived), stream_of(x))
        return dequantize(rows, arrived, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows):
        return *Dispatch.backward(ctx, grad_rows), None
