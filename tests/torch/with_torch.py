# SPDX-License-Identifier: Apache-2.0
"""Imported first by the tests of this folder. Where torch cannot be imported, they run in the interpreter that
MOECCL_TEST_TORCH_PYTHON names (a virtual environment with torch), or are skipped with exit code 77."""
import os
import sys

try:
    import torch  # noqa: F401
except ImportError as missing:
    other = os.environ.pop("MOECCL_TEST_TORCH_PYTHON", None)
    if other is not None:
        os.execv(other, [other, *sys.argv])
    print(f"skipped: torch cannot be imported ({missing}): MOECCL_TEST_TORCH_PYTHON may name an interpreter that has it")
    sys.exit(77)
