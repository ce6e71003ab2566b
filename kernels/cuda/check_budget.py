#!/usr/bin/env python3
"""Holds what ptxas says of every kernel to kernels/cuda/budget.txt: registers, stack and spilled bytes, the most over all
targets. A kernel without a line, and a line without a kernel, are findings too.

  check_budget.py BUDGET REPORT...           exits 1 when a kernel is over its budget
  check_budget.py --write BUDGET REPORT...   writes the budget: registers rounded up to 8, the unit of allocation"""
import sys

HEADER = """# The most that a kernel may take on any target: registers, stack bytes, spilled bytes (stores and loads together).
# Written by kernels/cuda/check_budget.py --write; checked by the test cuda_budget where nvcc exists.
"""


def measured(reports):
    most = {}
    for report in reports:
        with open(report, encoding="utf-8") as text:
            for line in text:
                kernel, target, *figures = line.split()
                registers, stack, stores, loads, _ = map(int, figures)
                row = most.setdefault(kernel, [0, 0, 0, ""])
                for i, value in enumerate((registers, stack, stores + loads)):
                    if value > row[i]:
                        row[i], row[3] = value, target
    return most


def main():
    arguments = sys.argv[1:]
    write = arguments[0] == "--write"
    budget_file, *reports = arguments[1:] if write else arguments
    most = measured(reports)
    if write:
        with open(budget_file, "w", encoding="utf-8") as out:
            out.write(HEADER)
            for kernel, (registers, stack, spill, _) in sorted(most.items()):
                out.write(f"{kernel} {(registers + 7) // 8 * 8} {stack} {spill}\n")
        return 0
    with open(budget_file, encoding="utf-8") as text:
        budget = {f[0]: tuple(map(int, f[1:])) for f in map(str.split, text) if f and f[0] != "#"}
    bad = 0
    for kernel in sorted(budget.keys() | most.keys()):
        if kernel not in most:
            print(f"{kernel} has a budget and was not compiled: remove its line")
        elif kernel not in budget:
            print(f"{kernel} has no budget: check_budget.py --write adds it")
        elif any(m > b for m, b in zip(most[kernel], budget[kernel])):
            print(f"{kernel} takes registers, stack, spill {most[kernel][:3]} on sm_{most[kernel][3]}, budget {budget[kernel]}")
        else:
            continue
        bad += 1
    print(f"{len(most)} kernels, {bad} findings")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
