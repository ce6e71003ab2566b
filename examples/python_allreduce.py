#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Each rank contributes its number; all print the sum: mpirun -n 4 python3 examples/python_allreduce.py (docs/python.md)."""
import array

import moeccl

with moeccl.Comm.from_env() as comm:
    x = array.array("d", [comm.rank] * 4)
    comm.all_reduce(x)
    print(f"rank {comm.rank} of {comm.size}: sum {x[0]:g}")
