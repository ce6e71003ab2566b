# SPDX-License-Identifier: Apache-2.0
"""The small layer of the tests, and its inputs."""
import array

import moeccl

TOKENS, HIDDEN, EXPERTS, TOP_K = 6, 4, 4, 2


def floats(n, value=0.0):
    return array.array("f", [value] * n)


def choices(rank, tokens=TOKENS):
    return array.array("i", [(rank + t + 2 * j) % EXPERTS for t in range(tokens) for j in range(TOP_K)])


def layer(comm, **options):
    return moeccl.Moe(comm, 4 * HIDDEN, n_experts=EXPERTS, top_k=TOP_K, max_tokens=TOKENS, **options)
