# SPDX-License-Identifier: Apache-2.0
"""Rows that travel in 8 bits per element, with a scale for each block of 128, as DeepSeek-V3's dispatch sends them."""
import torch
from torch.autograd.function import once_differentiable

from ._calls import call, memory, stream_of
from ._memory import new_rows
from .functions import Dispatch

BLOCK = 128
_AT_ONCE = 1 << 18  # elements that the CPU converts at a time, so that the steps in float32 stay in its cache
KINDS = (torch.float8_e4m3fn, torch.float8_e5m2)


def n_scales(hidden):
    return -(-hidden // BLOCK)


def quantize(x, kind):
    """x[T, hidden] -> rows[T, hidden] of `kind` and scales[T, blocks] in float32: the largest element of a block becomes kind's largest."""
    rows = new_rows(torch.empty(0, dtype=kind, device=x.device), x.shape)
    scales = x.new_empty((x.shape[0], n_scales(x.shape[1])), dtype=torch.float32)
    most = torch.finfo(kind).max
    for some in _slices(x):
        blocks = _blocks(x[some])
        largest = blocks.abs().amax(-1, keepdim=True)
        # Below this a scale would be denormal, and such a block becomes zeros.
        scale = torch.where(largest > most * torch.finfo(torch.float32).tiny, largest / most, torch.ones_like(largest))
        rows[some] = (blocks / scale).clamp_(-most, most).flatten(1)[:, :x.shape[1]]
        scales[some] = scale.flatten(1)
    return rows, scales


def dequantize(rows, scales, dtype):
    """The inverse: rows[R, hidden] and scales[R, blocks] -> [R, hidden] of `dtype`."""
    out = new_rows(torch.empty(0, dtype=dtype, device=rows.device), rows.shape)
    for some in _slices(rows):
        wide, factor = _widened(rows[some])
        out[some] = (_blocks(wide) * (scales[some] * factor).unsqueeze(-1)).flatten(1)[:, :rows.shape[1]]
    return out


def _widened(rows):
    """Returns rows as floats, and the power of two by which these are to be multiplied. On the CPU torch converts 8 bits element by
    element, and the 16 bits that are made of them here in vectors, six times as fast."""
    if rows.is_cuda:
        return rows, 1.0
    bits = rows.view(torch.int8)
    if rows.dtype is torch.float8_e5m2:  # the upper half of a float16
        return bits.to(torch.int16).bitwise_left_shift_(8).view(torch.float16), 1.0
    if int((bits & 0x7f).max()) == 0x7f:  # not a number, which no shift makes of it
        return rows, 1.0
    # The exponent's bias is 7, and that of float16 is 15. The sign is extended, so it is in bit 14 too, where it must not be.
    return bits.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080).view(torch.float16), 256.0


def _slices(rows):
    """Returns slices of the rows: all of them at once on a GPU."""
    n = rows.shape[0]
    step = max(1, n if rows.is_cuda else _AT_ONCE // max(1, rows.shape[1]))
    return [slice(at, min(at + step, n)) for at in range(0, n, step)]


def _blocks(rows):
    """rows[n, hidden] -> [n, blocks, 128] in float32, with zeros behind the end of each row."""
    wide, missing = rows.float(), -rows.shape[1] % BLOCK
    if missing > 0:
        wide = torch.nn.functional.pad(wide, (0, missing))
    return wide.reshape(rows.shape[0], n_scales(rows.shape[1]), BLOCK)


def move_scaled(handle, x, kind):
    """x[T, hidden] -> rows[R, hidden], which travel as `kind`."""
    given, scales = quantize(x, kind)
    rows, arrived = new_rows(given, (handle.n_rows, x.shape[1])), new_rows(scales, (handle.n_rows, scales.shape[1]))
    call(handle.comm, "moecclDispatchScaled", handle.routing, memory(given), memory(scales), memory(rows), memory(arrived), stream_of(x))
    return dequantize(rows, arrived, x.dtype)


class QuantizedDispatch(torch.autograd.Function):
    """x[T, hidden] -> rows[R, hidden], which the experts get as they were quantized. The backward pass is moecclDispatchBackward, exact,
    and takes the quantization for the identity."""

    @staticmethod
    def forward(ctx, x, anchor, handle, kind):
        ctx.handle = handle
        return move_scaled(handle, x, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows):
        return *Dispatch.backward(ctx, grad_rows), None
