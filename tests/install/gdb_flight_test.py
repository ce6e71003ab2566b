# SPDX-License-Identifier: Apache-2.0
"""gdb with tools/gdb/moeccl.py reports which operation runs on which rank of a program that hangs, in the process and in its core,
with a fully stripped library. Usage: gdb_flight_test.py LIBRARY"""
import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
SCRIPT = os.path.join(ROOT, "tools/gdb/moeccl.py")
LIBRARY = os.path.realpath(sys.argv.pop(1))


def gdb(*arguments, commands=()):
    command = ["gdb", "-nx", "-batch", *arguments, "-iex", "set debuginfod enabled off", "-x", SCRIPT]
    for c in commands:
        command += ["-ex", c]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, stdin=subprocess.DEVNULL,
                          env={**os.environ, "DEBUGINFOD_URLS": ""})
    return done.stdout + done.stderr


class GdbFlight(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.place = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.place.cleanup)
        cls.program = os.path.join(cls.place.name, "hang")
        stripped = os.path.join(cls.place.name, "libmoeccl.so.0")
        subprocess.run(["strip", "-s", "-o", stripped, LIBRARY], check=True)
        os.symlink("libmoeccl.so.0", os.path.join(cls.place.name, "libmoeccl.so"))
        subprocess.run(["cc", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-I", os.path.join(ROOT, "include"),
                        os.path.join(HERE, "hang.c"), "-o", cls.program, "-s", "-L", cls.place.name, "-lmoeccl", "-lpthread",
                        "-Wl,-rpath," + cls.place.name], check=True)
        cls.process = subprocess.Popen([cls.program], stdout=subprocess.PIPE, text=True)
        cls.addClassCleanup(cls.end_process)
        if cls.process.stdout.readline() != "rank 1 is done\n":
            raise AssertionError("the program has not come as far as its hang")
        time.sleep(0.1)  # rank 0 enters its third operation
        cls.core = os.path.join(cls.place.name, "core")
        cls.live = gdb("-p", str(cls.process.pid), commands=["moeccl-flight", "moeccl-flight 1", "moeccl-flight none",
                                                             f"generate-core-file {cls.core}"])
        if "ptrace" in cls.live and "not permitted" in cls.live:
            cls.doClassCleanups()
            print("skipped: ptrace is not permitted here")
            os._exit(77)

    @classmethod
    def end_process(cls):
        cls.process.kill()
        cls.process.wait()
        cls.process.stdout.close()

    def said(self, out, timed):
        self.assertRegex(out, r"rank 0 of 2, host memory: 3 operations")
        self.assertRegex(out, r"rank 1 of 2, host memory: 2 operations")
        running = r"  #3 allreduce count 1234 float32 sum root 0 plan .* RUNNING" + (r" for \d+\.\d+ s" if timed else "") + ", since "
        self.assertEqual(len([l for l in out.splitlines() if "RUNNING" in l]), 2 if timed else 1, out)
        self.assertRegex(out, running)
        self.assertRegex(out, r"  #2 allreduce count 1234 float32 sum root 0 plan \w+.* done")

    def test_process(self):
        self.said(self.live, timed=True)

    def test_what_a_rank_has_heard_of_its_peer(self):
        self.assertRegex(self.live, r"rank 0 of 2.*\n(  #.*\n)+  newest operation that it has heard of: rank 1 #2\n")

    def test_wrong_argument(self):
        self.assertIn("'none' is no number of operations", self.live)

    def test_core(self):
        self.said(gdb(self.program, self.core, commands=["moeccl-flight"]), timed=False)

    def test_no_process(self):
        self.assertIn("no process and no core", gdb(commands=["moeccl-flight"]))

    def test_process_without_moeccl(self):
        with subprocess.Popen(["sleep", "60"]) as other:
            try:
                self.assertIn("no loaded library has MoECCL's directory", gdb("-p", str(other.pid), commands=["moeccl-flight"]))
            finally:
                other.kill()


if __name__ == "__main__":
    if shutil.which("gdb") is None:
        print("skipped: no gdb (tools/deps installs it)")
        sys.exit(77)
    unittest.main()
