#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles one .cu to a fatbin for TARGETS, such as 80,90, and records what ptxas and the disassembler report of every kernel.

  compile.py NVCC PTXAS TARGETS SOURCE_ROOT INPUT.cu OUTPUT.fatbin OUTPUT.ptxas DEPFILE
  compile.py --origin NVCC PTXAS   prints the driver that the images need (as cuDriverGetVersion counts) and their tools
  compile.py --version NVCC        prints its version, such as 12.8.93
  compile.py --find-ptxas NVCC     prints a ptxas of CUDA 12 if this machine has one, or nothing

A driver loads what a toolkit of its own major version made: cubins of CUDA 13 (ELF ABI 8, and zstd in the fatbin) need
R580, those of CUDA 12 (ABI 7, LZ4) need R525. PTXAS is a ptxas of CUDA 12, for an nvcc of CUDA 13; empty: nvcc's own.
PTX then gets the oldest version that its target has, and ptxas rejects what that version does not know.

Each line of OUTPUT.ptxas: kernel target registers stack_bytes spill_store_bytes spill_load_bytes shared_bytes batches.
A batch is at least four 16-byte loads from global memory in flight before the first of them is used; "-" if no
cuobjdump was found."""
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

TARGETS = {"80": "8.0", "90": "8.0", "100": "8.6"}  # and the version of PTX
PTX = "100"  # for what is newer than the targets; a single target is compiled once, for both
BATCH = 4


def main():
    if sys.argv[1] == "--origin":
        print(origin(*sys.argv[2:]))
        return 0
    if sys.argv[1] == "--version":
        print(".".join(map(str, version_of(sys.argv[2]))))
        return 0
    if sys.argv[1] == "--find-ptxas":
        print(find_ptxas(sys.argv[2]))
        return 0
    nvcc, ptxas, targets, root, source, fatbin, report, depfile = sys.argv[1:]
    targets = targets.split(",")
    front = [nvcc, "-std=c++20", "-O3", "-fmad=false", "-I", root, "-Werror", "all-warnings"]
    depend = ["-MD", "-MF", depfile, "-MT", fatbin]
    text = with_ptxas(front, depend, ptxas, targets, source, fatbin) if ptxas else with_nvcc(front, depend, targets, source, fatbin)
    batches = loads_in_flight(nvcc, fatbin)
    with open(report, "w", encoding="utf-8") as out:
        for kernel, target, figures in lines(text):
            count = "-" if batches is None else batches.get((kernel, target), 0)
            out.write(f"{kernel} {target} {figures} {count}\n")
    return 0


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(" ".join(command) + "\n" + done.stdout + done.stderr)
        sys.exit(1)
    return done.stdout + done.stderr


def with_nvcc(front, depend, targets, source, fatbin):
    command = front + depend + ["-Xptxas", "-v", "-fatbin", "-Xfatbin", "-compress-all", "-o", fatbin, source]
    if len(targets) == 1:
        return run(command + ["-gencode", f"arch=compute_{targets[0]},code=[sm_{targets[0]},compute_{targets[0]}]"])
    for target in targets:
        command += ["-gencode", f"arch=compute_{target},code=sm_{target}"]
    return run(command + ["-gencode", f"arch=compute_{PTX},code=compute_{PTX}"])


def with_ptxas(front, depend, ptxas, targets, source, fatbin):
    with tempfile.TemporaryDirectory() as folder:
        said, images, newest = "", [], PTX if len(targets) > 1 else targets[0]
        for target, version in TARGETS.items():
            if target not in (*targets, newest):
                continue
            ptx, cubin = f"{folder}/{target}.ptx", f"{folder}/{target}.cubin"
            run(front + depend + ["-arch", f"compute_{target}", "-ptx", "-o", ptx, source])
            with open(ptx, encoding="utf-8") as text:
                lower = re.sub(r"^\.version .*$", f".version {version}", text.read(), count=1, flags=re.M)
            with open(ptx, "w", encoding="utf-8") as text:
                text.write(lower)
            if target not in targets:
                continue
            said += run([ptxas, "--warning-as-error", "-arch", f"sm_{target}", "-O3", "-v", "--fmad", "false", ptx, "-o", cubin])
            images.append(f"--image3=kind=elf,sm={target},file={cubin}")
        images.append(f"--image3=kind=ptx,sm={newest},file={folder}/{newest}.ptx")
        # LZ4, which every driver unpacks; the default is zstd. -compress-all compresses PTX as well.
        run([beside(front[0], "fatbinary"), f"--create={fatbin}", "-64", "--compress-mode=speed", "--compress-all"] + images)
        return said


def beside(nvcc, tool):
    return os.path.join(os.path.dirname(os.path.realpath(shutil.which(nvcc) or nvcc)), tool)


def version_of(tool):
    found = re.search(r"V(\d+)\.(\d+)\.(\d+)", run([tool, "--version"]))
    return tuple(map(int, found.groups()))


def origin(nvcc, ptxas):
    made = version_of(nvcc)
    by, major = "nvcc " + ".".join(map(str, made)), made[0]
    if ptxas:
        assembler = version_of(ptxas)
        by, major = by + " with ptxas " + ".".join(map(str, assembler)), assembler[0]
    return f"{major * 1000} {by}"


def find_ptxas(nvcc):
    """Finds a ptxas of CUDA 12, from 12.8 on (sm_100): next to nvcc's toolkit or in the wheel nvidia-cuda-nvcc-cu12."""
    if version_of(nvcc)[0] < 13:
        return ""
    places = glob.glob("/usr/local/cuda-12*/bin/ptxas")
    places += [path + "/nvidia/cuda_nvcc/bin/ptxas" for path in sys.path]
    for path in places:
        if os.access(path, os.X_OK) and (12, 8) <= version_of(path)[:2] < (13, 0):
            return path
    return ""


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
            yield kernel, target, f"{m.group(1)} {' '.join(map(str, stack))} {shared.group(1) if shared else 0}"
            kernel = None


def loads_in_flight(nvcc, fatbin):
    tools = [beside(nvcc, "cuobjdump"), shutil.which("cuobjdump") or ""]
    tools += [path for place in sys.path for path in glob.glob(place + "/nvidia/cu*/bin/cuobjdump")]
    tool = next((t for t in tools if t and os.access(t, os.X_OK)), None)
    return count_batches(run([tool, "-sass", fatbin])) if tool else None


def count_batches(sass):
    """Counts the batches of each function. Loads stay in flight until an instruction names one of their registers."""
    batches, kernel, target, waiting, n = {}, None, None, set(), 0
    for line in sass.splitlines():
        if m := re.match(r"\s*arch = sm_(\w+)", line):
            target = m.group(1)
        elif m := re.search(r"Function : (\w+)", line):
            kernel, waiting, n = (m.group(1), target), set(), 0
        elif m := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);", line):
            registers = [int(r) for r in re.findall(r"\bR(\d+)\b", m.group(2))]
            if m.group(1).startswith("LDG.E.128"):
                waiting |= {registers[0] + i for i in range(4)}
                n += 1
            elif waiting & set(registers) or m.group(1) == "EXIT":
                batches[kernel] = batches.get(kernel, 0) + (n >= BATCH)
                waiting, n = set(), 0
    return batches


if __name__ == "__main__":
    sys.exit(main())
