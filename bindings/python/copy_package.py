#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""copy_package.py FROM TO STAMP DEPFILE: makes TO hold the Python sources of FROM and keeps the files generated in TO.

The dependency file names directories too, so that a new file is noticed without configuring again."""
import filecmp
import os
import shutil
import sys

GENERATED = {"_abi.py"}


def main(source, target, stamp, depfile):
    seen, kept = [], set(GENERATED)
    for where, folders, names in os.walk(source):
        folders[:] = sorted(f for f in folders if f != "__pycache__")
        seen.append(where)
        inside = os.path.relpath(where, source)
        os.makedirs(os.path.join(target, inside), exist_ok=True)
        for name in sorted(n for n in names if n.endswith((".py", ".pyi", ".typed"))):
            path = os.path.join(where, name)
            copy = os.path.join(target, inside, name)
            seen.append(path)
            kept.add(os.path.normpath(os.path.join(inside, name)))
            if not os.path.exists(copy) or not filecmp.cmp(path, copy, shallow=False):
                shutil.copyfile(path, copy)
    for where, folders, names in os.walk(target):
        folders[:] = [f for f in folders if f != "__pycache__"]
        for name in names:
            if os.path.normpath(os.path.join(os.path.relpath(where, target), name)) not in kept:
                os.remove(os.path.join(where, name))
    with open(depfile, "w", encoding="utf-8") as out:
        out.write(f"{os.path.basename(stamp)}: " + " ".join(s.replace(" ", "\\ ") for s in seen) + "\n")
    with open(stamp, "w", encoding="utf-8"):
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
