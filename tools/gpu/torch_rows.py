#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's index_select and index_add on rows of 7168 bf16, to compare with bench_cuda's gather and weighted sum: prints
GB/s of the bytes that each must move. Needs PyTorch with CUDA."""
import torch

TOKENS, HIDDEN, TOP_K, REPEATS = 16384, 7168, 8, 20


def gb_per_s(what, n_bytes):
    for _ in range(3):
        what()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(REPEATS):
        what()
    end.record()
    torch.cuda.synchronize()
    return n_bytes * REPEATS / begin.elapsed_time(end) / 1e6


def main():
    rows = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    index = torch.randperm(TOKENS, device="cuda")
    out = torch.empty_like(rows)
    row_bytes = HIDDEN * 2
    select = gb_per_s(lambda: torch.index_select(rows, 0, index, out=out), 2 * TOKENS * row_bytes)
    tokens = TOKENS // TOP_K
    into = torch.arange(TOKENS, device="cuda") % tokens
    total = torch.zeros(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    add = gb_per_s(lambda: total.index_add_(0, into, rows), (TOKENS + 2 * tokens) * row_bytes)
    print(f"torch index_select {select:8.1f} GB/s\ntorch index_add    {add:8.1f} GB/s")


if __name__ == "__main__":
    main()
