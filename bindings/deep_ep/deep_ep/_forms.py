# SPDX-License-Identifier: Apache-2.0
"""The forms in which low_latency_dispatch sends rows: bfloat16, fp8 with a scale for every 128 elements, and NVFP4 with a scale for every 16.

A form makes the tensors that a dispatch returns, turns x into what travels, and puts what arrives into its place."""
import torch

_GROUP8, _GROUP4 = 128, 16
_LARGEST8, _LARGEST4 = 448.0, 6.0  # of e4m3 and e2m1
_LEAST = 1e-4  # lower bound for a group's largest element in fp8
_TILE = 128  # rows of a tile of NVFP4's scales
# Where the nearest of e2m1's numbers 0, 0.5, 1, 1.5, 2, 3, 4 and 6 changes. What lies in the middle goes to the even one.
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


class Bfloat16:
    """Rows as they are."""
    # What a Buffer tells forms apart by, the argument that asks for the form, and what the columns of x are a multiple of.
    key, argument, multiple = "bfloat16", None, 1

    def buffers(self, n, room, hidden, device):
        """Returns (rows, scales or None) for n experts with room for these rows each, as the caller gets them."""
        return torch.zeros((n, room, hidden), dtype=torch.bfloat16, device=device), None

    def quantise(self, x):
        """Returns x[T, hidden] as (rows [T, n], scales [T, m] or None) to send."""
        return x, None

    def place(self, rows, scales, expert, received, received_scales):
        """Puts what arrived for an expert, [R, n] and [R, m], into the caller's tensors."""
        rows[expert, :len(received)].copy_(received)
        if received_scales is not None:
            scales[expert, :len(received)].copy_(received_scales)


class Fp8(Bfloat16):
    """Rows in e4m3. Scales are floats, column-major; with round_scale powers of two, and with use_ue8m0 their exponents, four to an
    int32. A row is scale * fp8."""

    def __init__(self, round_scale, use_ue8m0):
        self._round, self._exponents = round_scale, use_ue8m0
        self.key = self.argument = "use_ue8m0" if use_ue8m0 else "use_fp8"
        self.multiple = _GROUP8 * (4 if use_ue8m0 else 1)

    def buffers(self, n, room, hidden, device):
        rows = torch.zeros((n, room, hidden), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)  # torch 2.4 has no zeros of it
        width = hidden // self.multiple
        columns = torch.zeros((n, width, room), dtype=torch.int32 if self._exponents else torch.float32, device=device)
        # A single column gets a stride of 1, so that it can be viewed as bytes.
        return rows, columns.transpose(1, 2) if width > 1 else columns.view(n, room, 1)

    def quantise(self, x):
        groups = x.view(x.size(0), x.size(1) // _GROUP8, _GROUP8).float()
        scales = groups.abs().amax(dim=2).clamp(min=_LEAST) / _LARGEST8
        if self._round:
            fraction, exponent = torch.frexp(scales)  # scales = fraction * 2**exponent, 0.5 <= fraction < 1
            scales = torch.ldexp(torch.ones_like(scales), exponent - (fraction == 0.5).to(exponent.dtype))
        rows = (groups / scales.unsqueeze(2)).clamp(-_LARGEST8, _LARGEST8).to(torch.float8_e4m3fn).view(x.shape)
        if self._exponents:
            scales = (scales.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)
        return rows, scales


class Fp4(Bfloat16):
    """Rows in e2m1, two to a byte, the first in its lower half. Scales are e4m3, in tiles of 128 rows as Blackwell's tensor cores read them.
    An element is e2m1 * scale / global_scale.

    The caller gets DeepEP's views: rows [room, hidden / 2, experts], and scales [32, 4, tiles, 4, hidden / 64, experts], where row t's scale k
    is at [t % 32, t % 128 // 32, t // 128, k % 4, k // 4]."""
    key = argument = "use_nvfp4"
    multiple = 4 * _GROUP4

    def __init__(self, global_scale):
        self._global = global_scale

    def buffers(self, n, room, hidden, device):
        tiles = -(-room // _TILE)
        scales = torch.zeros((n, tiles, hidden // self.multiple, 32, 4, 4), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        rows = torch.zeros((n, room, hidden // 2), dtype=torch.uint8, device=device)
        return rows.permute(1, 2, 0), scales.permute(3, 4, 1, 5, 2, 0)

    def quantise(self, x):
        groups = x.view(x.size(0), x.size(1) // _GROUP4, _GROUP4).float()
        scales = (self._global * groups.abs().amax(dim=2) / _LARGEST4).clamp(max=_LARGEST8).to(torch.float8_e4m3fn)
        divisor = scales.float()
        factor = torch.where(divisor > 0, self._global / divisor, 0.0)
        numbers = groups * factor.unsqueeze(2)
        middles = torch.tensor(_MIDDLES, device=x.device)
        middles[1::2] = torch.nextafter(middles[1::2], torch.zeros_like(middles[1::2]))  # from there up to the even number
        codes = torch.bucketize(numbers.abs(), middles, out_int32=True).to(torch.uint8) | torch.signbit(numbers).to(torch.uint8) << 3
        codes = codes.view(x.size(0), x.size(1) // 2, 2)
        return codes[:, :, 0] | codes[:, :, 1] << 4, scales

    def place(self, rows, scales, expert, received, received_scales):
        n, width = received_scales.shape
        rows[:n, :, expert].copy_(received)
        tiles = -(-n // _TILE)
        whole = received_scales.new_zeros((tiles * _TILE, width), dtype=torch.uint8)
        whole[:n].copy_(received_scales.view(torch.uint8))
        scales.view(torch.uint8)[:, :, :tiles, :, :, expert].copy_(whole.view(tiles, 4, 32, width // 4, 4).permute(2, 1, 0, 4, 3))
