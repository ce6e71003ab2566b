#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""run_mooncake.py DIR: runs Mooncake's tests of its torch.distributed backend (the folder mooncake-pg/tests of its sources, not here) on the CPU,
with moeccl under the names that they ask for. PYTHONPATH and LIBMOECCL name the package, as in docs/pytorch.md.

Tests that call functions of Mooncake itself are left out: recovery of failed ranks in place (test_pg_elastic.py), and the fault detection of
test_pg_p2p.py, which asks which ranks are active."""
import os
import subprocess
import sys
import tempfile

TESTS = ("test_pg_collectives.py", "test_pg_p2p.py", "test_pg_init_functional.py")
LEFT_OUT = "fault_detection"
# Stands in for Mooncake's module, which registers its name and its options when it is imported. The options name the
# ranks that take part, which are all ranks here.
MODULE = """import datetime
import torch.distributed as dist
import moeccl.distributed as m
for name in ("mooncake-cpu", "mooncake"):
    dist.Backend.register_backend(name, m._create, extended_api=True, devices=["cpu"])


def MooncakeBackendOptions(*_):
    return m.Options(datetime.timedelta(seconds=60))


def set_device_filter(filters):
    pass
"""
# Runs a file's tests for the CPU, except those left out.
RUN = """import sys, unittest
tests = unittest.TestLoader().loadTestsFromName(sys.argv[1])
def each(suite):
    for t in suite:
        yield from each(t) if isinstance(t, unittest.TestSuite) else [t]
chosen = [t for t in each(tests) if "CPU" in type(t).__name__.upper() and sys.argv[2] not in t.id()]
result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(chosen))
sys.exit(not result.wasSuccessful() or result.testsRun == 0)
"""


def main():
    if len(sys.argv) != 2 or not os.path.isdir(sys.argv[1]):
        sys.exit(__doc__)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        os.makedirs(os.path.join(folder, "mooncake"))
        for name, text in (("__init__.py", ""), ("pg.py", MODULE), ("ep.py", "from .pg import *\n")):
            with open(os.path.join(folder, "mooncake", name), "w", encoding="utf-8") as f:
                f.write(text)
        env = os.environ | {"PYTHONPATH": f'{folder}:{os.path.realpath(sys.argv[1])}:{os.environ.get("PYTHONPATH", "")}', "OMP_NUM_THREADS": "1"}
        for name in TESTS:
            done = subprocess.run([sys.executable, "-c", RUN, name[:-3], LEFT_OUT], env=env, capture_output=True, text=True,
                                  timeout=600, check=False)
            good = done.returncode == 0 and "Ran " in done.stderr
            failed += not good
            lines = (done.stdout + done.stderr).strip().splitlines()
            ran = next((line for line in lines if line.startswith("Ran ")), "no test ran")
            print(f'{"passed" if good else "FAILED"}    {name}: {ran}' + ("" if good else "\n    " + "\n    ".join(lines[-12:])))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
