# SPDX-License-Identifier: Apache-2.0
"""Compiles abi_check.cc: MoECCL's declarations of XLA's FFI against the header of the installed jaxlib.

    python3 tests/jax/abi_test.py"""
import os
import subprocess
import unittest

import with_jax  # noqa: F401
import jax

HERE = os.path.dirname(os.path.abspath(__file__))


class Abi(unittest.TestCase):
    def test_layouts_and_values_are_xlas(self):
        command = [os.environ.get("CXX", "g++"), "-std=c++20", "-fsyntax-only", "-isystem", jax.ffi.include_dir(),
                   f"-I{HERE}/../..", os.path.join(HERE, "abi_check.cc")]
        run = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(run.returncode, 0, run.stderr)


if __name__ == "__main__":
    unittest.main()
