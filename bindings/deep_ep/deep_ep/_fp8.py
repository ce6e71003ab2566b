# SPDX-License-Identifier: Apache-2.0
"""Rows in fp8 (e4m3) with a scale for every 128 elements, as low_latency_dispatch sends them."""
import torch

GROUP = 128
_LARGEST = 448.0  # e4m3's largest value
_LEAST = 1e-4  # lower bound for a group's largest element


def quantise(x, round_scale, use_ue8m0):
    """Returns x[T, H] as (fp8 [T, H], scales). scales are float [T, H / 128], powers of two with round_scale; with
    use_ue8m0 they are the exponents, four to an int32, [T, H / 512]. A row is scale * fp8."""
    groups = x.view(x.size(0), x.size(1) // GROUP, GROUP).float()
    scales = groups.abs().amax(dim=2).clamp(min=_LEAST) / _LARGEST
    if round_scale:
        fraction, exponent = torch.frexp(scales)  # scales = fraction * 2**exponent, 0.5 <= fraction < 1
        scales = torch.ldexp(torch.ones_like(scales), exponent - (fraction == 0.5).to(exponent.dtype))
    rows = (groups / scales.unsqueeze(2)).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(x.shape)
    if use_ue8m0:
        scales = (scales.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)
    return rows, scales
