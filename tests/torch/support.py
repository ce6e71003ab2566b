# SPDX-License-Identifier: Apache-2.0
"""Registers tests by name, and makes a gloo group to compare with."""
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.testing
from moeccl._c10d.base import IS_TORCHS  # False up to torch 2.13

TESTS = []


class Test:
    def __init__(self, body, sizes, init, status, needs):
        self.body, self.sizes, self.init, self.status, self.needs = body, sizes, init, status, needs
        self.name, self.module = body.__name__, body.__module__


def test(*sizes, init=True, status=None, needs=None):
    """init: the ranks have already joined a group of all. status: the expected exit status by rank, where it is not 0. needs: what the
    test asks of torch beyond version 2.6; it is skipped where torch's Backends cannot be Python's."""
    def add(body):
        TESTS.append(Test(body, sizes or (1, 2, 3, 4), init, status or {}, None if IS_TORCHS else needs))
        return body
    return add


def gloo():
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=60))


def same(mine, other, what=""):
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, equal_nan=True, msg=lambda m: f"{what}: {m}")


def raises(kinds, words, body):
    """Checks that body() raises one of these kinds with all of the words in its message, and returns the exception."""
    try:
        body()
    except kinds as failure:
        text = str(failure)
        for word in words:
            assert word in text, f"{word!r} is not in: {text}"
        return failure
    raise AssertionError(f"nothing was raised; expected {kinds} with {words}")
