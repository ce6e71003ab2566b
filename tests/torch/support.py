# SPDX-License-Identifier: Apache-2.0
"""Registers tests by name, and makes a gloo group to compare with."""
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.testing
from moeccl._c10d.base import VERSION  # torch's, as in (2, 15)

TESTS = []


class Test:
    def __init__(self, body, sizes, init, status, skipped):
        self.body, self.sizes, self.init, self.status, self.skipped = body, sizes, init, status, skipped
        self.name, self.module = body.__name__, body.__module__


def test(*sizes, init=True, status=None, since=None, what=None):
    """init: the ranks have already joined a group of all. status: the expected exit status by rank, where it is not 0. since: the
    version of torch that the test needs, for `what`; an older one skips it."""
    def add(body):
        skipped = None
        if since is not None and VERSION < since:
            skipped = f"needs torch {since[0]}.{since[1]} for {what}, this is {torch.__version__}"
        TESTS.append(Test(body, sizes or (1, 2, 3, 4), init, status or {}, skipped))
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
