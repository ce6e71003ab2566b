# SPDX-License-Identifier: Apache-2.0
"""Finds and loads libmoeccl: from LIBMOECCL, else next to the package (wheel, build folder, prefix), else by the dynamic linker."""
import ctypes
import os
import sysconfig

from . import _abi

HERE = os.path.dirname(os.path.realpath(__file__))
# In a build folder and in a prefix's lib/python3.N/site-packages the library is three directories up; Debian's lib has a folder
# for each architecture, and other systems have a lib64.
_UP = os.path.join(HERE, "..", "..", "..")
FOLDERS = (HERE, _UP, os.path.join(_UP, sysconfig.get_config_var("MULTIARCH") or ""), os.path.join(_UP, "..", "lib64"))


def _load() -> ctypes.CDLL:
    named = os.environ.get("LIBMOECCL")  # not MOECCL_...: the library warns about unknown variables with that prefix
    soname = f"libmoeccl.so.{_abi.MOECCL_VERSION_MAJOR}"
    beside = [os.path.join(folder, soname) for folder in FOLDERS]
    tried = [named] if named else [p for p in beside if os.path.exists(p)] + [soname, "libmoeccl.so"]
    failures = []
    for name in tried:
        try:
            loaded = ctypes.CDLL(name)
        except OSError as failure:
            failures.append(str(failure))
            continue
        try:
            _abi.declare(loaded)
        except AttributeError as failure:
            raise ImportError(f"{name} is older than this Python package ({failure}): name a newer one in LIBMOECCL") from None
        return loaded
    raise ImportError(f"libmoeccl is not found ({'; '.join(failures)}): name its file in LIBMOECCL")


lib: ctypes.CDLL = _load()
