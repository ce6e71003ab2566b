# SPDX-License-Identifier: Apache-2.0
"""The wheel's build backend: meson-python's, which then sets the tag py3-none-PLATFORM.

meson-python takes every file next to a platform's Python packages for an extension module of the current interpreter. Ours is
a plain library that ctypes opens, so one wheel serves every Python 3 interpreter."""
import os
import subprocess
import sys

import mesonpy
from mesonpy import build_editable, build_sdist, get_requires_for_build_editable, get_requires_for_build_sdist
from mesonpy import get_requires_for_build_wheel

__all__ = ["build_editable", "build_sdist", "build_wheel", "get_requires_for_build_editable", "get_requires_for_build_sdist",
           "get_requires_for_build_wheel"]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Builds the wheel and returns its file name."""
    made = mesonpy.build_wheel(wheel_directory, config_settings, metadata_directory)
    tagged = subprocess.run([sys.executable, "-m", "wheel", "tags", "--remove", "--python-tag", "py3", "--abi-tag", "none",
                             os.path.join(wheel_directory, made)], check=True, stdout=subprocess.PIPE, text=True)
    return os.path.basename(tagged.stdout.split()[-1])
