#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""run_torch_ucc.py DIR: runs the test scripts of torch_ucc (the folder test/ of its sources, not here) with moeccl under the name that they
ask for, on 2 or 4 processes each; they compare with gloo. PYTHONPATH and LIBMOECCL name the package, as in docs/pytorch.md.

Two scripts need a GPU whatever their arguments and are left out; so is the benchmark."""
import os
import subprocess
import sys
import tempfile

WORLD, PAIRS = 4, ("torch_sendrecv_test.py",)  # processes per script, and the scripts that need two
# Stands in for torch_ucc's module, which registers the name "ucc" when it is imported.
MODULE = """import torch.distributed as dist
import moeccl.distributed as m
dist.Backend.register_backend("ucc", m._create, extended_api=True, devices=["cpu"])
"""


def run(folder, name, modules):
    """Returns whether all processes of one script ended well, and their output."""
    world = 2 if name in PAIRS else WORLD
    env = os.environ | {"PYTHONPATH": f'{modules}:{folder}:{os.environ.get("PYTHONPATH", "")}', "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
                        "OMPI_COMM_WORLD_SIZE": str(world)}
    ranks = [subprocess.Popen([sys.executable, os.path.join(folder, name), "--backend", "gloo"], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, env=env | {"OMPI_COMM_WORLD_RANK": str(r), "OMPI_COMM_WORLD_LOCAL_RANK": str(r)})
             for r in range(world)]
    said, good = "", True
    for rank in ranks:
        try:
            said += rank.communicate(timeout=300)[0]
            good = good and rank.returncode == 0
        except subprocess.TimeoutExpired:
            rank.kill()
            good = False
    return good and "Failed" not in said, said


def main():
    if len(sys.argv) != 2 or not os.path.isdir(sys.argv[1]):
        sys.exit(__doc__)
    folder, failed = os.path.realpath(sys.argv[1]), 0
    without_gpu = {"torch_pg_ucc_test.py": "sets a CUDA device at once", "blocking_wait_test.py": "ends without CUDA"}
    with tempfile.TemporaryDirectory() as modules:
        with open(os.path.join(modules, "torch_ucc.py"), "w", encoding="utf-8") as f:
            f.write(MODULE)
        for name in sorted(os.listdir(folder)):
            if not name.endswith("_test.py"):
                continue
            if name in without_gpu:
                print(f"left out  {name}: {without_gpu[name]}")
                continue
            good, said = run(folder, name, modules)
            failed += not good
            lines = [line for line in said.splitlines() if line.strip()]
            print(f'{"passed" if good else "FAILED"}    {name}: {sum("OK" in line for line in lines)} sizes'
                  + ("" if good else "\n    " + "\n    ".join(lines[-12:])), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
