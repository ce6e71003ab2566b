#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares what compile.py measures of every kernel, the worst over all targets, with kernels/cuda/budget.txt:
registers, stack and spilled bytes must not exceed it, and there must not be fewer batches of loads in flight. A kernel
without a line and a line without a kernel are findings too. A kernel that uses instructions of one target may
have an additional line for that target.

  check_budget.py BUDGET REPORT...           exits 1 when a kernel is over its budget
  check_budget.py --write BUDGET REPORT...   writes the budget: registers rounded up to 8, the unit of allocation"""
import sys

HEADER = """# The most that a kernel may use on any target: registers, stack bytes, spilled bytes (stores and loads
# together); and the least number of batches of at least four 16-byte loads in flight (compile.py, with a cuobjdump).
# kernel@90: on that target alone. Such lines are added by hand, and --write brings them up to date.
# Written by kernels/cuda/check_budget.py --write; checked by the test cuda_budget if nvcc exists.
"""


def measured(reports):
    """Returns by kernel and kernel@target: [registers, stack, spill, batches or None, the target that uses most]."""
    most = {}
    for report in reports:
        with open(report, encoding="utf-8") as text:
            for line in text:
                kernel, target, *figures, batches = line.split()
                registers, stack, stores, loads, _ = map(int, figures)
                for key in (kernel, f"{kernel}@{target}"):
                    row = most.setdefault(key, [0, 0, 0, None, ""])
                    for i, value in enumerate((registers, stack, stores + loads)):
                        if value > row[i]:
                            row[i], row[4] = value, target
                    if batches != "-":
                        row[3] = int(batches) if row[3] is None else min(row[3], int(batches))
    return most


def read(budget_file):
    with open(budget_file, encoding="utf-8") as text:
        return {f[0]: tuple(map(int, f[1:])) for f in map(str.split, text) if f and f[0] != "#"}


def main():
    arguments = sys.argv[1:]
    write = arguments[0] == "--write"
    budget_file, *reports = arguments[1:] if write else arguments
    most, budget = measured(reports), read(budget_file)
    targets = {key.partition("@")[2] for key in most}  # a build may leave some out (-Dgpu_targets)
    budget = {k: row for k, row in budget.items() if k.partition("@")[2] in targets}
    most = {k: row for k, row in most.items() if "@" not in k or k in budget}
    if write:
        with open(budget_file, "w", encoding="utf-8") as out:
            out.write(HEADER)
            for kernel, (registers, stack, spill, batches, _) in sorted(most.items()):
                out.write(f"{kernel} {(registers + 7) // 8 * 8} {stack} {spill} {batches or 0}\n")
        return 0
    bad = 0
    for kernel in sorted(budget.keys() | most.keys()):
        if kernel not in most:
            print(f"{kernel} has a budget and was not compiled: remove its line")
        elif kernel not in budget:
            print(f"{kernel} has no budget: check_budget.py --write adds it")
        elif any(m > b for m, b in zip(most[kernel][:3], budget[kernel])):
            print(f"{kernel} takes registers, stack, spill {most[kernel][:3]} on sm_{most[kernel][4]}, budget {budget[kernel][:3]}")
        elif most[kernel][3] is not None and most[kernel][3] < budget[kernel][3]:
            print(f"{kernel} has {most[kernel][3]} batches of loads in flight, budget {budget[kernel][3]}")
        else:
            continue
        bad += 1
    if any(row[3] is None for row in most.values()):
        print("loads in flight are not checked: no cuobjdump beside nvcc, on the path or from pip (nvidia-cuda-cuobjdump)")
    print(f"{sum('@' not in kernel for kernel in most)} kernels, {bad} findings")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
