#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch.compile with moeccl.torch: compares one graph for the whole layer with the layer uncompiled, on 2 and 4 processes.

Run with LIBMOECCL and PYTHONPATH as meson sets them. `compile_test.py --ranks N [CASE...]` runs all cases, or those named."""
import os
import sys
import unittest

import with_torch  # noqa: F401 (skips where there is no torch)
import layer_test
import torch
from moeccl.torch._traced import KNOWN, LEAST_TORCH, VERSION

LIMIT_S = 560  # compiling takes seconds


def all_cases():
    with open(os.path.join(os.path.dirname(os.path.realpath(__file__)), "compile_cases.py"), encoding="utf-8") as f:
        return [f"compile_cases.{line[4:line.index('(')]}" for line in f if line.startswith("def case_")]


@unittest.skipUnless(VERSION >= LEAST_TORCH, f"needs torch {LEAST_TORCH[0]}.{LEAST_TORCH[1]}, this is {torch.__version__}")
class CompileTest(unittest.TestCase):
    """Has one test method per world size; each case is a subtest."""

    def test_torch_takes_the_operators(self):
        self.assertTrue(KNOWN)

    def world(self, n, cases):
        for case, said in layer_test.run_world(n, cases, LIMIT_S).items():
            with self.subTest(case=case, ranks=n):
                wrong = {r: text for r, text in said.items() if text}
                self.assertFalse(wrong, "\n".join(f"rank {r}: {text}" for r, text in wrong.items()))

    def test_2_ranks(self):
        self.world(2, all_cases())

    def test_4_ranks(self):
        self.world(4, ["compile_cases.case_one_graph_gives_the_results_of_the_layer", "compile_cases.case_calls_keep_the_order_of_the_program"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ranks"]:
        for name, texts in layer_test.run_world(int(sys.argv[2]), [c for c in all_cases() if not sys.argv[3:] or c.split(".")[1] in sys.argv[3:]],
                                                LIMIT_S).items():
            bad = {r: t for r, t in texts.items() if t}
            print("FAILED" if bad else "ok", name, *(f"\nrank {r}: {t}" for r, t in bad.items()))
    else:
        unittest.main()
