#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of cuda_api_test in several processes side by side, and gives a result for every single test. A test that
hangs or crashes is named, its process is ended, and the rest goes on in a new one. For a GPU that is lent for minutes.

  moeccl-gpu/each_test.py [--seconds N] [--processes N] [--hang N] [FILTER...]
    --seconds N     stops after so many seconds (180)
    --processes N   how many processes (4)
    --hang N        a process that writes nothing for so many seconds hangs (20)
    FILTER          gtest patterns, in order of importance (all tests)

Rows go to stdout and to $OUT/each-test.txt at once: seconds | result | ms | test | first lines of what went wrong. Whole
logs are in logs/each-test. The exit code is 1 when a test did not pass or was not reached."""
import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
API = os.path.join(HERE, "bin", "cuda_api_test")
STACKS = os.path.join(HERE, "lib", "stacks.so")
STACKS = STACKS if os.path.exists(STACKS) else ""
LOGS = os.path.join(HERE, "logs", "each-test")
RESULT = re.compile(r"^\[ *(OK|FAILED|SKIPPED) *\] (\S+?)(?:,.*?)? \((\d+) ms\)$", re.M)


class Table:
    def __init__(self) -> None:
        self.began = time.time()
        self.lock = threading.Lock()
        self.count: dict[str, int] = {}
        self.file = open(os.path.join(os.environ.get("OUT", HERE), "each-test.txt"), "w", encoding="utf-8")

    def row(self, result: str, ms: str, test: str, why: str = "") -> None:
        with self.lock:
            self.count[result] = self.count.get(result, 0) + 1
            line = f"{time.time() - self.began:6.1f} | {result:<7} | {ms:>6} | {test} | {' '.join(why.split())[:240]}"
            for to in (self.file, sys.stdout):
                print(line, file=to, flush=True)


def names_of(patterns: list[str]) -> dict[str, int]:
    """Returns the tests in the order of the patterns, each with the number of its pattern."""
    names: dict[str, int] = {}
    for number, pattern in enumerate(patterns):
        listed = subprocess.run([API, "--gtest_list_tests", f"--gtest_filter={pattern}"], capture_output=True, text=True, check=True)
        suite = ""
        for line in listed.stdout.splitlines():
            name = line.split("#")[0].strip()
            if not line.startswith(" "):
                suite = name if name.endswith(".") else ""
            elif suite and suite + name not in names:
                names[suite + name] = number
    return names


def run(tests: list[str], rank: dict[str, int], number: int, end: float, hang: float, table: Table) -> None:
    """Runs the tests one after the other. A process runs those of one pattern, because gtest keeps to an order of its own."""
    while tests:
        if time.time() > end - 1:
            for name in tests:
                table.row("no time", "", name)
            return
        path = os.path.join(LOGS, f"{number}-{len(tests)}.log")
        with open(path, "w", encoding="utf-8") as log:
            now_run = [t for t in tests if rank[t] == rank[tests[0]]]
            process = subprocess.Popen([API, "--gtest_filter=" + ":".join(now_run)], stdout=log, stderr=subprocess.STDOUT,
                                       stdin=subprocess.DEVNULL, start_new_session=True,
                                       env={**os.environ, **({"LD_PRELOAD": STACKS} if STACKS else {})})
        size, moved, n_rows, text = -1, time.time(), 0, ""
        while True:
            ended = process.poll() is not None
            if (now := os.path.getsize(path)) != size or ended:
                size, moved = now, time.time()
                with open(path, encoding="utf-8", errors="replace") as log:
                    text = log.read()
                found = list(RESULT.finditer(text))
                for m in found[n_rows:]:
                    begun = text.rfind(f"[ RUN      ] {m[2]}\n", 0, m.end())
                    table.row("ok" if m[1] == "OK" else m[1], m[3], m[2], "" if m[1] == "OK" else text[begun + len(m[2]) + 14:m.start()])
                    tests.remove(m[2])
                n_rows = len(found)
            if ended or time.time() - moved > hang or time.time() > end:
                break
            time.sleep(0.2)
        try:
            if not ended and STACKS:
                os.killpg(process.pid, signal.SIGUSR2)  # all threads write their stacks to the log
                time.sleep(1.5)
                with open(path, "a", encoding="utf-8") as log:  # a process may hang in the kernel
                    subprocess.run(["ps", "-o", "pid,ppid,stat,wchan:24,args", "-g", str(process.pid)], stdout=log, check=False)
            os.killpg(process.pid, signal.SIGKILL)  # also what the tests have forked
        except ProcessLookupError:
            pass
        started = re.findall(r"^\[ RUN      \] (\S+)$", text, re.M)
        if len(started) > n_rows:
            result = "CRASHED" if ended else "cut" if time.time() > end else "HUNG"
            table.row(result, "", started[-1], text[text.rfind("[ RUN") + len(started[-1]) + 13:])
            tests.remove(started[-1])
        elif ended and (left := [t for t in now_run if t in tests]):
            table.row("CRASHED", "", " ".join(left), text[-240:])
            tests[:] = [t for t in tests if t not in left]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--hang", type=float, default=20)
    parser.add_argument("filters", nargs="*", default=["*"])
    args = parser.parse_args()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("MOECCL_TIMEOUT_MS", "10000")
    if subprocess.run([API, "--gtest_list_tests"], capture_output=True, check=False).returncode != 0:  # as gpu-check does
        os.environ["LD_LIBRARY_PATH"] = os.path.join(HERE, "lib", "cxx") + ":" + os.environ.get("LD_LIBRARY_PATH", "")
    os.makedirs(LOGS, exist_ok=True)
    table = Table()
    tests = names_of(args.filters)
    if not tests:
        print(f"no test matches {' '.join(args.filters)}: see bin/cuda_api_test --gtest_list_tests", file=sys.stderr)
        return 2
    end = table.began + args.seconds
    order = list(tests)
    threads = [threading.Thread(target=run, args=(order[i::args.processes], tests, i, end, args.hang, table))
               for i in range(args.processes)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    print(", ".join(f"{n} {what}" for what, n in sorted(table.count.items())))
    return 0 if set(table.count) <= {"ok", "SKIPPED"} else 1


if __name__ == "__main__":
    sys.exit(main())
