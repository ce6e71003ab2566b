# SPDX-License-Identifier: Apache-2.0
"""Checks of HybridEPBuffer's arguments: each error names the argument, its value and an acceptable value."""
import typing

import torch

from . import _native
from ._check import _INDEX, check_expert_numbers, check_shape, check_tensor, require
from ._hybrid import ONE_BYTE, Rows


class Given(typing.NamedTuple):
    """The arguments of a dispatch that say what goes where."""
    hidden: torch.Tensor
    scaling_factor: torch.Tensor
    probs: torch.Tensor
    routing_map: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    num_of_experts: int


def check_same(gather, **numbers):
    """Checks numbers of 1 or more, which all ranks must give alike; all ranks raise the same error. The call is
    collective."""
    told = gather(numbers)
    for name, first in told[0].items():
        for rank, theirs in enumerate(told):
            require(theirs[name] == first, ValueError, "ranks 0 and {} differ in {}, {} and {}: give the same on all "
                    "ranks", rank, name, first, theirs[name])
        require(first >= 1, ValueError, "{} is {}: give 1 or more", name, first)


def check_hidden(given, use_fp8=None):
    """Checks the rows of a dispatch and returns them. use_fp8: whether they must be quantized; None for either."""
    hidden, scales = given.hidden, given.scaling_factor
    _check_rows(hidden, tuple(_native.TYPES) + ONE_BYTE, "[tokens, hidden_dim] of bfloat16, float16, float32 or "
                "float64, or of uint8 or fp8 with scaling_factor")
    quantized = hidden.dtype in ONE_BYTE
    require(use_fp8 is None or use_fp8 == quantized, ValueError, "hidden is {}, and use_fp8 is {}: give rows of one "
            "byte per element with use_fp8=True, and others with use_fp8=False", hidden.dtype, use_fp8)
    if not quantized:
        return Rows(hidden)
    check_tensor("scaling_factor", scales)
    require(scales.dim() == 2 and scales.size(0) == hidden.size(0) and scales.size(1) > 0, ValueError,
            "scaling_factor is {}: give [{}, n]", list(scales.shape), hidden.size(0))
    return Rows(hidden, scales)


def check_combined(hidden, least):
    _check_rows(hidden, tuple(_native.TYPES), "[rows, hidden_dim] of bfloat16, float16, float32 or float64")
    require(hidden.size(0) >= least, ValueError, "hidden has {} rows: the handle's dispatch brought {}, give as many",
            hidden.size(0), least)


def _check_rows(hidden, kinds, what):
    check_shape("hidden", hidden, kinds, (None, None), what)
    require(hidden.size(1) > 0, ValueError, "hidden has {} columns: give 1 or more", hidden.size(1))


def check_routing(given, n_experts):
    """Returns (bool [T, n_experts], or None where neither routing_map nor topk_idx is given; float32 probs of that
    shape, or None)."""
    n, routing_map, probs = given.hidden.size(0), given.routing_map, given.probs
    if routing_map is not None:
        check_shape("routing_map", routing_map, (torch.bool, ), (n, n_experts), f"bool [{n}, {n_experts}]")
    elif given.topk_idx is not None:
        return from_choices(given.topk_idx, given.topk_weights, n, n_experts)
    if probs is not None:
        check_shape("probs", probs, (torch.float32, ), (n, n_experts), f"float32 [{n}, {n_experts}]")
    return routing_map, probs


def from_choices(topk_idx, topk_weights, n, n_experts):
    """Returns (bool [n, n_experts], the choices topk_idx[n, k]; float32 [n, n_experts], their weights, or None without)."""
    check_shape("topk_idx", topk_idx, _INDEX, (n, None), f"int64 [{n}, k], a row for each of hidden's")
    check_expert_numbers(topk_idx, n_experts)
    index = topk_idx.long() + 1  # 0: no choice
    marked = torch.zeros((n, n_experts + 1), dtype=torch.bool, device=index.device).scatter_(1, index, True)
    if topk_weights is None:
        return marked[:, 1:], None
    check_shape("topk_weights", topk_weights, (torch.float32, ), tuple(topk_idx.shape),
                f"float32 {list(topk_idx.shape)}, as topk_idx")
    probs = torch.zeros((n, n_experts + 1), dtype=torch.float32, device=index.device)
    return marked[:, 1:], probs.scatter_(1, index, topk_weights.detach())[:, 1:]


def check_padding(pad_multiple, num_permuted_tokens, non_blocking):
    """Returns (the multiple, the number or None)."""
    require(pad_multiple is None or pad_multiple >= 0, ValueError,
            "pad_multiple is {}: give a multiple, or None for no padding", pad_multiple)
    align, most = pad_multiple or 1, None if num_permuted_tokens is None else int(num_permuted_tokens)
    require(not non_blocking or most is not None, ValueError,
            "num_permuted_tokens is None: non_blocking needs the number of rows")
    require(most is None or most >= 0, ValueError, "num_permuted_tokens is {}: give 0 or more", most)
    require(not non_blocking or most % align == 0, ValueError, "num_permuted_tokens is {}: with non_blocking give a "
            "multiple of pad_multiple, which is {}", most, align)
    return align, most


def check_same_padding(pad_multiple, state):
    require(pad_multiple is None or (pad_multiple or 1) == state.align, ValueError,
            "pad_multiple is {}: it was {} in the handle's dispatch, give the same or None", pad_multiple, state.align)
