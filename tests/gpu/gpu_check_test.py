#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests tools/gpu-bundle and the gpu-check in it end to end on the emulated driver: the bundle is unpacked elsewhere and runs there
without a network. Some tests plant rungs that fail or hang.

  gpu_check_test.py BUILD_DIR SOURCE_DIR"""
import fcntl
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest

BUILD, SOURCE = "", ""  # the arguments
PLANTED_FAILURE, PLANTED_HANG = "device", "images"


def without_network(command):
    """Returns the command, run in its own network namespace with only loopback where this user may create one."""
    inner = [sys.executable, os.path.realpath(__file__), "--loopback"] + command
    allowed = subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode == 0
    return ["unshare", "-n"] + inner if allowed else command


def loopback_up():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        up_and_running, set_flags = 0x41, 0x8914
        fcntl.ioctl(s, set_flags, struct.pack("16sh22x", b"lo", up_and_running))


class GpuCheck(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.archive = os.path.join(cls.folder.name, "gpu.tar.gz")
        made = subprocess.run([os.path.join(SOURCE, "tools/gpu-bundle"), "--build", BUILD, "--emulated", "--output", cls.archive],
                              capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise AssertionError(made.stdout + made.stderr)
        with tarfile.open(cls.archive) as archive:
            archive.extractall(cls.folder.name)
        cls.bundle = os.path.join(cls.folder.name, "moeccl-gpu")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def start(self, *arguments, **variables):
        # Only the bundle: no library path, no variables of the build tools, another folder.
        self.out = tempfile.mkdtemp(dir=self.folder.name)
        environment = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "TMPDIR", "MOECCL_TEST_PATIENCE")}
        environment |= {"OUT": self.out} | variables
        command = without_network([os.path.join(self.bundle, "gpu-check"), "--emulated", *arguments])
        return subprocess.Popen(command, env=environment, cwd="/", text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def run_check(self, *arguments, **variables):
        process = self.start(*arguments, **variables)
        said = process.communicate(timeout=500)[0]
        return process.returncode, said, self.rows()

    def rows(self):
        rows = {}
        with open(os.path.join(self.out, "gpu-table.md"), encoding="utf-8") as table:
            for line in list(table)[4:]:
                name, result, figure, target, error, seconds = (c.strip() for c in line.strip().strip("|").split("|"))
                self.assertNotIn(name, rows)
                rows[name] = {"result": result, "figure": figure, "target": target, "error": error, "seconds": seconds}
        return rows

    def rungs(self):
        listed = subprocess.run([os.path.join(self.bundle, "bin/gpu_ladder"), "--list"], capture_output=True, text=True, check=True)
        return ["ladder." + line.split()[0] for line in listed.stdout.splitlines()]

    def test_the_archive_travels(self):
        self.assertLess(os.path.getsize(self.archive), 40 << 20)

    def test_no_run_path_leads_out_of_it(self):
        for folder in ("bin", "lib"):
            for name in os.listdir(os.path.join(self.bundle, folder)):
                path = os.path.join(self.bundle, folder, name)
                if os.path.isfile(path):
                    with open(path, "rb") as file:
                        self.assertNotIn(b"$ORIGIN/../..", file.read(), path)

    def test_a_build_without_kernels_is_refused(self):
        done = subprocess.run([os.path.join(SOURCE, "tools/gpu-bundle"), "--build", BUILD, "--output", self.archive + ".none"],
                              capture_output=True, text=True, check=False, env=os.environ | {"MOECCL_TEST_LADDER_NO_IMAGES": "1"})
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("-Dcuda=enabled", done.stderr)
        self.assertFalse(os.path.exists(self.archive + ".none"))

    def test_all_of_it_passes_on_the_emulation(self):
        began = time.monotonic()
        code, said, rows = self.run_check()
        bad = {name: row for name, row in rows.items() if row["result"] not in ("ok", "not run")}
        self.assertEqual(bad, {}, said)
        self.assertEqual(code, 0, said)
        for rung in self.rungs():
            self.assertEqual(rows[rung]["result"], "ok", rung)
        # Each row that the page of results expects is there, or another row says why it is not.
        with open(os.path.join(SOURCE, "docs/gpu-results.md"), encoding="utf-8") as page:
            wanted = dict(re.findall(r"^\| `([\w.-]+)` \| ([^|]*) \|", page.read(), re.M))
        instead = {"mps": "mps", "nccl": "nccl-tests", "torch": "torch", "nccl_ep": "nccl_ep", "memcheck": "sanitizer"}
        names = list(rows)
        self.assertLess(names.index("graphs.replays"), names.index("bench.driver-copy"), "what no GPU has run comes before what has")
        for name, target in wanted.items():
            row = rows.get(name) or rows.get(instead.get(name.split(".")[0], ""))
            self.assertIsNotNone(row, f"{name} of docs/gpu-results.md is no row")
            if name in rows:
                self.assertEqual(row["target"], target.strip())
        self.assertTrue(os.path.getsize(os.path.join(self.out, "gpu-logs.tar.gz")) > 1000)
        print(f"{len(rows)} rows in {time.monotonic() - began:.0f} s", file=sys.stderr)

    def test_a_failing_rung_and_a_hanging_one_keep_none_from_running(self):
        code, said, rows = self.run_check("--only", "ladder", MOECCL_TEST_LADDER_FAIL=PLANTED_FAILURE, MOECCL_TEST_LADDER_HANG=PLANTED_HANG)
        self.assertNotEqual(code, 0)
        self.assertEqual(list(rows), self.rungs(), said)
        for name, row in rows.items():
            wanted = {"ladder." + PLANTED_FAILURE: "FAILED", "ladder." + PLANTED_HANG: "HUNG"}.get(name, "ok")
            self.assertEqual(row["result"], wanted, f"{name}: {row}")
        self.assertIn("planted by the test", rows["ladder." + PLANTED_FAILURE]["error"])

    def test_the_ladder_finds_what_a_driver_is_strict_about(self):
        strict = {"MOECCL_CUDA_DRIVER": os.path.join(self.bundle, "lib/libemulated_cuda.so"), "MOECCL_TEST_CUDA_CHANNELS": "1",
                  "MOECCL_TEST_CUDA_IMPLICIT_SYNC": "1"}
        done = subprocess.run([os.path.join(self.bundle, "bin/gpu_ladder"), "waits-8", "waits-8-high", "calls", "captures"], env=os.environ | strict,
                              capture_output=True, text=True, check=False)
        found = {line.split("|")[0].strip(): line.split("|")[3].strip() for line in done.stdout.splitlines()}
        # One of 8 channels carries the stores; on a busy machine other waits may look held up too.
        self.assertGreaterEqual(int(found["waits-8"].split()[0]), 8)
        self.assertRegex(found["waits-8"], r" [1-7] may wait at once")
        self.assertIn("0 of 64 waits hold up their store one at a time, all may wait at once", found["waits-8-high"])
        self.assertRegex(found["calls"], "wait for the kernel:.* MemFree .*HostAlloc")
        self.assertRegex(found["captures"], r"global: HostAlloc 900/901 .*; relaxed: all allowed")

    def test_the_ladder_finds_how_many_streams_may_wait_where_channels_are_a_pool(self):
        pool = {"MOECCL_CUDA_DRIVER": os.path.join(self.bundle, "lib/libemulated_cuda.so"), "MOECCL_TEST_CUDA_CHANNELS": "1",
                "MOECCL_TEST_CUDA_CHANNEL_POOL": "1"}
        done = subprocess.run([os.path.join(self.bundle, "bin/gpu_ladder"), "waits-8-high"], env=os.environ | pool,
                              capture_output=True, text=True, check=False)
        self.assertRegex(done.stdout, r"0 of 64 waits hold up their store one at a time, [1-7] may wait at once")

    def test_each_test_gives_a_result_for_every_test_whatever_hangs(self):
        out = tempfile.mkdtemp(dir=self.folder.name)
        quiet, quick, refused = ("CudaErrors.AMissingRankIsATimeoutThatNamesIt", "CudaErrors.MixedMemoryIsRefusedWithARemedy",
                                 "CudaModules.TooNewForTheDriverAreNotTriedAndSayWhichOneTheyNeed")
        driver = {"OUT": out, "MOECCL_CUDA_DRIVER": os.path.join(self.bundle, "lib/libemulated_cuda.so")}
        command = [os.path.join(self.bundle, "each_test.py"), "--processes", "1"]
        # The first one writes nothing while it waits for the missing rank, so it counts as one that hangs.
        done = subprocess.run([*command, "--hang", "1.5", quiet, quick, refused], env=os.environ | driver, capture_output=True, text=True, check=False)
        with open(os.path.join(out, "each-test.txt"), encoding="utf-8") as table:
            rows = {c[3]: c[1] for c in ([f.strip() for f in line.split("|")] for line in table)}
        self.assertEqual(rows, {quiet: "HUNG", quick: "ok", refused: "ok"}, done.stdout + done.stderr)
        self.assertEqual(done.returncode, 1)
        done = subprocess.run([*command, quick], env=os.environ | driver, capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stdout.splitlines()[-1]), (0, "1 ok"), done.stdout + done.stderr)

    def test_rows_are_there_at_once_and_after_sigterm(self):
        process = self.start("--only", "ladder", MOECCL_TEST_LADDER_HANG=PLANTED_HANG)
        for _ in range(1000):
            time.sleep(0.05)
            if os.path.exists(os.path.join(self.out, "gpu-table.md")) and "ladder.device" in self.rows():
                break
        self.assertEqual(self.rows()["ladder.device"]["result"], "ok")
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
        self.assertNotEqual(process.returncode, 0)
        self.assertIn("stopped", self.rows())
        self.assertIn("ladder.device", said)
        time.sleep(0.5)
        left = [p for p in os.listdir("/proc") if p.isdigit() and self.program_of(p).startswith(self.bundle)]
        self.assertEqual(left, [], "processes that outlive the script")

    @staticmethod
    def program_of(process):
        try:
            return os.readlink(f"/proc/{process}/exe")
        except OSError:
            return ""

    def test_what_would_run_nothing_is_refused(self):
        for arguments, patience, said in ((["--only", "tets"], "1", "--only tets is no part: there are ladder,new"),
                                          (["--only"], "1", "--only names no part"), (["--only", ","], "1", "--only names no part"),
                                          (["--nccl-tests", "/nosuch"], "1", "--nccl-tests /nosuch is no folder"),
                                          (["--onyl", "tests"], "1", "unknown option --onyl"),
                                          (["--emulated"], "0.5", "MOECCL_TEST_PATIENCE is 0.5, and 1 is the least")):
            done = subprocess.run([os.path.join(SOURCE, "tools/gpu-check"), *arguments], capture_output=True, text=True, check=False,
                                  env=os.environ | {"MOECCL_TEST_PATIENCE": patience})
            self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
            self.assertIn(said, done.stderr)
        code, said, rows = self.run_check("--only", "programs")
        self.assertEqual({row["result"] for row in rows.values()}, {"not run"})
        self.assertIn("nothing was run", said)
        self.assertEqual(code, 1)

    def test_a_program_that_runs_no_test_has_failed(self):
        # gtest gives the last of many shards no test.
        code, _, rows = self.run_check("--only", "tests", GTEST_TOTAL_SHARDS="100000", GTEST_SHARD_INDEX="99999")
        self.assertNotEqual(code, 0)
        self.assertEqual(rows["walk.threads"]["result"], "FAILED")
        self.assertIn("0 tests ran", rows["walk.threads"]["error"])

    def test_after_a_hang_the_rest_of_its_family_is_left_out(self):
        copy = os.path.join(self.folder.name, "hangs")
        shutil.copytree(self.bundle, copy)
        with open(os.path.join(copy, "bin/cuda_api_test"), "w", encoding="utf-8") as program:
            program.write("#!/bin/bash\ncase $* in *CudaMemory*) while sleep 0.3; do echo a line of a log; done ;; esac\necho '[  PASSED  ] 3 tests.'\n")
        before, self.bundle = self.bundle, copy
        try:
            code, _, rows = self.run_check("--only", "tests", MOECCL_TEST_STEP_S="1", MOECCL_TEST_PATIENCE="1")
        finally:
            self.bundle = before
        self.assertNotEqual(code, 0)
        self.assertEqual(rows["memory.threads"]["result"], "HUNG")
        self.assertEqual(rows["memory.processes"]["result"], "not run")
        self.assertIn("memory.threads hung", rows["memory.processes"]["error"])
        self.assertEqual(rows["walk.threads"], rows["walk.threads"] | {"result": "ok", "figure": "3 tests"})

    def test_a_program_that_goes_on_does_not_hang_and_does_not_go_on_for_ever(self):
        copy = os.path.join(self.folder.name, "goes-on")
        shutil.copytree(self.bundle, copy)
        with open(os.path.join(copy, "bin/cuda_api_test"), "w", encoding="utf-8") as program:
            program.write("#!/bin/bash\ncase $* in *CudaMemory*) n=5 ;; *CudaErrors*) n=1000 ;; *) n=0 ;; esac\n"
                          "for ((i = 0; i < n; ++i)); do sleep 0.6; echo '[       OK ] A.Test (600 ms)'; done\necho '[  PASSED  ] 5 tests.'\n")
        before, self.bundle = self.bundle, copy
        try:
            _, _, rows = self.run_check("--only", "tests", MOECCL_TEST_STEP_S="2", MOECCL_TEST_PATIENCE="1")
        finally:
            self.bundle = before
        self.assertEqual(rows["memory.threads"], rows["memory.threads"] | {"result": "ok", "figure": "5 tests"})
        self.assertEqual(rows["errors.threads"]["result"], "out of time")
        self.assertRegex(rows["errors.threads"]["error"], "^[1-9] tests passed")
        self.assertEqual(rows["hosts.errors"]["result"], "ok")

    def sanitizer(self, script):
        path = os.path.join(tempfile.mkdtemp(dir=self.folder.name), "sanitizer")
        with open(path, "w", encoding="utf-8") as f:
            f.write("#!/bin/bash\n" + script)
        os.chmod(path, 0o755)
        return self.run_check("--only", "sanitizer", MOECCL_TEST_SANITIZER=path)

    def test_a_sanitizer_that_misses_the_planted_error_is_no_witness(self):
        code, _, rows = self.sanitizer('echo "ERROR SUMMARY: 0 errors"\n')
        self.assertNotEqual(code, 0)
        self.assertEqual([rows[f"{tool}.planted"]["result"] for tool in ("memcheck", "racecheck")], ["FAILED"] * 2)
        self.assertNotIn("memcheck.clean", rows)
        code, _, rows = self.sanitizer("""case $* in
          *plant-write) echo "Invalid __global__ write of size 4 bytes"; exit 9 ;;
          *plant-race) echo "RACECHECK SUMMARY: 1 hazard displayed"; exit 9 ;;
        esac\n""")
        self.assertEqual(code, 0)
        self.assertEqual([rows[n]["result"] for n in ("memcheck.planted", "memcheck.clean", "racecheck.planted", "racecheck.clean")], ["ok"] * 4)


if __name__ == "__main__":
    if sys.argv[1] == "--loopback":
        loopback_up()
        os.execv(sys.argv[2], sys.argv[2:])
    BUILD, SOURCE = (os.path.realpath(a) for a in sys.argv[1:3])
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
