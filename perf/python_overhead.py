#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the cost of a call through Python with that of the C function through ctypes: 8-byte all_reduce on one rank, median of
rounds, in us of this thread's processor time, on which other programs have no effect.

  PYTHONPATH=build/bindings/python python3 perf/python_overhead.py"""
import argparse
import array
import statistics
import time

import moeccl
from moeccl import _abi

CALLS, ROUNDS = 20000, 9


def timed(call):
    """Returns the median and least microseconds of a call."""
    rounds = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        for _ in range(CALLS):
            call()
        rounds.append((time.thread_time() - begin) / CALLS * 1e6)
    return statistics.median(rounds), min(rounds)


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    [comm] = moeccl.init_all(1)
    plain = array.array("f", [1.0, 1.0])
    at, handle, raw = plain.buffer_info()[0], comm.handle, _abi.lib().moecclAllReduce
    rows = [("C function by ctypes", lambda: raw(at, at, 2, _abi.moecclFloat32, _abi.moecclSum, handle, None)),
            ("array.array", lambda: comm.all_reduce(plain))]
    try:
        import numpy
        vector = numpy.ones(2, numpy.float32)
        rows.append(("NumPy", lambda: comm.all_reduce(vector)))
    except ImportError:
        pass
    try:
        import torch
        tensor = torch.ones(2)
        rows.append(("torch", lambda: comm.all_reduce(tensor)))
    except ImportError:
        pass
    for name, call in rows:
        print("{:24} median {:6.2f} us, least {:6.2f} us".format(name, *timed(call)))


if __name__ == "__main__":
    main()
