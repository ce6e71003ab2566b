# SPDX-License-Identifier: Apache-2.0
"""What run_vllm_deepep.py and run_sglang_deepep.py share: an MoE layer in plain torch, on rows as the engines' dispatchers bring them and
densely on every rank. CpuForCuda, which puts CPU tensors in place of CUDA tensors, also serves the other scripts."""
import sys

import torch

N_EXPERTS, TOP_K, HIDDEN, INNER, MOST = 8, 3, 2048, 128, 64  # MOST tokens of a rank
GLOBAL_SCALE = 448 * 6 / 8  # of NVFP4: no element of x is larger than 8


class CpuForCuda(torch.overrides.TorchFunctionMode):
    """Makes tensors on the CPU, and in ordinary memory, where a program asks for CUDA tensors and for pinned memory."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {**(kwargs or {})}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)


def skip(reason):
    print(f"skipped: {reason}", file=sys.stderr)
    sys.exit(77)


def expert(rows, w1, w2):
    """Returns one expert's output for rows[n, HIDDEN], in fp32."""
    gate, up = (rows.float() @ w1.float().t()).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up) @ w2.float().t()


def from_fp8(rows, scales):
    """Returns rows as fp32. scales: None, or one for each 128 elements, as floats or as exponents four to an int32."""
    if scales is None:
        return rows.float()
    if scales.dtype == torch.int32:
        scales = (scales.contiguous().view(torch.uint8).to(torch.int32) << 23).view(torch.float32)
    return (rows.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)).flatten(-2)


def to_fp8(x, powers=False):
    """Returns (fp8 [n, H], scales float32 [n, H / 128]). powers: scales are rounded up to powers of two."""
    groups = x.float().view(x.size(0), x.size(1) // 128, 128)
    scales = groups.abs().amax(2).clamp(min=1e-10) / 448
    if powers:
        scales = scales.log2().ceil().exp2()
    return (groups / scales.unsqueeze(2)).to(torch.float8_e4m3fn).view(x.shape), scales


def from_fp4(rows, scales, global_scale):
    """Returns fp32 [experts, room, H] of NVFP4 as DeepEP's branch hybrid-ep gives it: rows [room, H / 2, experts] and scales in tiles."""
    codes = torch.stack([rows & 15, rows >> 4], dim=2).flatten(1, 2).permute(2, 0, 1).long()
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])[codes]
    by_row = scales.float().permute(5, 2, 1, 0, 4, 3).flatten(4, 5).flatten(1, 3)  # [experts, rows of whole tiles, H / 16]
    return numbers * (by_row / global_scale).repeat_interleave(16, dim=2)[:, :numbers.size(1)]


def as_fp8(x, powers=False):
    """Returns x as fp8 leaves it."""
    return from_fp8(*to_fp8(x, powers))


def as_fp4(x, global_scale):
    """Returns x as NVFP4 leaves it."""
    groups = x.float().view(x.size(0), x.size(1) // 16, 16)
    scales = (global_scale * groups.abs().amax(2) / 6).to(torch.float8_e4m3fn).float().unsqueeze(2)
    numbers = torch.tensor([0, 1, 2, 4, 0.5, 1.5, 3, 6])  # those with an even code first, because the middle goes to them
    nearest = (groups.abs() * (global_scale / scales)).unsqueeze(3).sub(numbers).abs().argmin(3)
    return (numbers[nearest] * scales / global_scale * groups.sign()).view(x.shape)


def on_rows(rows, local, weights, w1, w2):
    """Returns for each of rows[n, HIDDEN] the weighted sum of its experts' outputs; local[n, k] names experts here, -1 none."""
    total = torch.zeros(rows.shape, dtype=torch.float32)
    for number in range(w1.size(0)):
        row, choice = (local == number).nonzero(as_tuple=True)
        total.index_add_(0, row, expert(rows[row], w1[number], w2[number]) * weights[row, choice].unsqueeze(1))
    return total


def in_batches(rows, scales, counts, w1, w2, global_scale=None):
    """Returns the experts' outputs for rows[experts, room, HIDDEN], of which each has counts[e]. The others are NaN: nobody may read them.
    global_scale: of rows in NVFP4."""
    if global_scale is not None:
        rows, scales = from_fp4(rows, scales, global_scale), None
    out = torch.full(rows.shape, float("nan"), dtype=torch.bfloat16)
    for number, n in enumerate(counts.tolist()):
        out[number, :n] = expert(from_fp8(rows[number, :n], None if scales is None else scales[number, :n]), w1[number], w2[number])
    return out


class Problem:
    """A rank's inputs, and the dense layer's output for them. on_the_way: what becomes of tokens on the way to the experts, fp32 of x, or None
    for nothing. As in vLLM's tests, a token may name an expert twice, unless `distinct`."""

    def __init__(self, rank, counts, on_the_way, distinct=False):
        shared, own = torch.Generator().manual_seed(7), torch.Generator().manual_seed(100 + rank)
        w1 = (torch.randn((N_EXPERTS, 2 * INNER, HIDDEN), generator=shared) / HIDDEN**0.5).bfloat16()
        w2 = (torch.randn((N_EXPERTS, HIDDEN, INNER), generator=shared) / INNER**0.5).bfloat16()
        n, self.n_local = counts[rank], N_EXPERTS // len(counts)
        self.x = torch.randn((n, HIDDEN), generator=own).bfloat16()
        self.idx = torch.randint(0, N_EXPERTS, (n, TOP_K), generator=own)
        if distinct:
            self.idx = torch.rand((n, N_EXPERTS), generator=own).topk(TOP_K, dim=1).indices
        self.weights = torch.rand((n, TOP_K), generator=own)
        self.here = slice(rank * self.n_local, (rank + 1) * self.n_local)
        self.w1, self.w2 = w1[self.here], w2[self.here]
        x = on_the_way(self.x) if on_the_way is not None and n else self.x.float()
        self.dense = lambda choices: on_rows(x, choices, self.weights, w1, w2)
        self.expected = self.dense(self.idx)

    def lose(self, rank):
        """Expects from now on the output without this rank's experts."""
        self.expected = self.dense(self.idx.masked_fill(self.idx // self.n_local == rank, -1))

    def difference(self, found, tolerance):
        """Returns the relative difference of the layer's output, and raises AssertionError if it is too large."""
        assert found.shape == self.expected.shape and found.dtype == torch.bfloat16, (found.shape, found.dtype)
        worst = ((found.float() - self.expected).norm() / (self.expected.norm() + 1e-30)).item() if found.numel() else 0.0
        if not worst <= tolerance:
            raise AssertionError(f"relative difference {worst:.2e}, {tolerance:.0e} is allowed")
        return worst
