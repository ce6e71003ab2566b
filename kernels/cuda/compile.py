#!/usr/bin/env python3
"""Compiles one .cu to a fatbin for all targets and notes what ptxas says of registers, stack and spills.

  compile.py NVCC SOURCE_ROOT INPUT.cu OUTPUT.fatbin OUTPUT.ptxas DEPFILE

Each line of OUTPUT.ptxas: kernel target registers stack_bytes spill_store_bytes spill_load_bytes shared_bytes"""
import re
import subprocess
import sys

TARGETS = ("80", "90", "100")
PTX = "100"  # for what is newer than the targets


def main():
    nvcc, root, source, fatbin, report, depfile = sys.argv[1:]
    command = [nvcc, "-std=c++20", "-O3", "-fmad=false", "-I", root, "-Werror", "all-warnings", "-Xptxas", "-v", "-fatbin", "-Xfatbin", "-compress-all",
               "-MD", "-MF", depfile, "-MT", fatbin, "-o", fatbin, source]
    for target in TARGETS:
        command += ["-gencode", f"arch=compute_{target},code=sm_{target}"]
    command += ["-gencode", f"arch=compute_{PTX},code=compute_{PTX}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        return 1
    with open(report, "w", encoding="utf-8") as out:
        out.write("\n".join(lines(done.stderr)) + "\n")
    return 0


def lines(text):
    kernel = target = None
    stack = (0, 0, 0)
    for line in text.splitlines():
        if m := re.search(r"Compiling entry function '(\w+)' for 'sm_(\w+)'", line):
            kernel, target = m.groups()
        elif m := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack = m.groups()
        elif (m := re.search(r"Used (\d+) registers", line)) and kernel:
            shared = re.search(r"(\d+) bytes smem", line)
            yield f"{kernel} {target} {m.group(1)} {' '.join(map(str, stack))} {shared.group(1) if shared else 0}"
            kernel = None


if __name__ == "__main__":
    sys.exit(main())
