#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sums the rank numbers of all ranks, and each rank prints the sum (docs/python.md). Start it with a launcher:
mpirun -n 4 python3 examples/python_allreduce.py"""
import array

import moeccl

with moeccl.Comm.from_env() as comm:
    x = array.array("d", [comm.rank] * 4)
    comm.all_reduce(x)
    print(f"rank {comm.rank} of {comm.size}: sum {x[0]:g}")
