# SPDX-License-Identifier: Apache-2.0
"""Imported first by the tests of this folder: they are skipped with exit code 77 where jax cannot be imported."""
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python"))
try:
    import jax  # noqa: F401
except ImportError as missing:
    print(f"skipped: jax cannot be imported ({missing}): pip install jax")
    sys.exit(77)
