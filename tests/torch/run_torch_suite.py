#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""run_torch_suite.py: runs torch's own distributed tests under gloo and under moeccl on the same machine, and prints a table.

They are part of torch's wheel (torch/testing/_internal/distributed/distributed_test.py); no copy is here. Needs torch and, from
PyPI, expecttest, hypothesis and psutil. PYTHONPATH and LIBMOECCL name the package, as in docs/pytorch.md.

    tests/torch/run_torch_suite.py --world-size 2 4 --only 'all_reduce|isend'

Tests that only run for a backend named gloo are run with moeccl in gloo's place too (column "in gloo's place"). The exit status is
0 when every test that passes under gloo passes under moeccl in at least one of the two columns and fails in neither, apart from
the failures in gloo's place that REASONS explains."""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time

NAMES = {"gloo": "gloo", "moeccl": "moeccl", "place": "in gloo's place"}

# Tests that cannot pass in gloo's place; under the name moeccl they pass.
REASONS = {"test_ddp_logging_data_cpu": "DDP reads the options of gloo's own class, such as gloo_num_threads, from a group of that name"}


def child(which, only, results):
    """Runs the tests for this process's environment, and writes one JSON line for each."""
    import unittest

    import torch.multiprocessing
    import torch.distributed as dist
    if which != "gloo":
        import moeccl.distributed
    if which == "place":
        class Place(moeccl.distributed.Group):
            def getBackendName(self):
                return "gloo"

        def create(given, options):
            options = moeccl.distributed.Options(given.timeout)
            options.group_name, options.global_ranks_in_group = given.group_id, given.global_ranks_in_group
            backend = moeccl.distributed.Backend(given.store, given.group_rank, given.group_size, options, given.group_id)
            if dist.get_debug_level() == dist.DebugLevel.DETAIL:
                return backend
            group = Place(given.store, backend, [])
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(moeccl.distributed.torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
            return group
        dist.Backend.register_backend("gloo", create, extended_api=True, devices=["cpu"],
                                      _backend_type=dist.ProcessGroup.BackendType.GLOO)
    from torch.testing._internal import common_distributed
    if which == "moeccl":
        for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
            common_distributed.DistTestCases.backend_feature[feature].add("moeccl")
    from torch.testing._internal.distributed import distributed_test
    if which == "place":  # the tests ask the profiler for events named gloo
        distributed_test.PROFILING_SUPPORTED_BACKENDS.clear()
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()

    class TestSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    class Report(unittest.TestResult):
        def startTest(self, test):
            super().startTest(test)
            self.began, self.said = time.monotonic(), None

        def note(self, outcome, text=""):
            self.said = (outcome, text)

        def addSuccess(self, test):
            self.note("pass")

        def addSkip(self, test, reason):
            self.note("skip", reason)

        def addFailure(self, test, error):
            self.note("FAIL", self._exc_info_to_string(error, test))

        def addError(self, test, error):
            super().addError(test, error)
            self.note("FAIL", self._exc_info_to_string(error, test))

        def stopTest(self, test):
            outcome, text = self.said or ("FAIL", "no result")
            line = {"test": test._testMethodName, "outcome": outcome, "text": text, "seconds": time.monotonic() - self.began}
            with open(results, "a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
            print(f"{which} {outcome} {line['seconds']:.1f} s {line['test']} {text[:90]!r}", flush=True)

    suite = unittest.TestSuite(TestSuite(n) for n in unittest.TestLoader().getTestCaseNames(TestSuite) if re.search(only, n))
    suite.run(Report())


def run(which, world, only, seconds):
    with tempfile.TemporaryDirectory() as where:
        results = os.path.join(where, "results")
        env = dict(os.environ, BACKEND="moeccl" if which == "moeccl" else "gloo", WORLD_SIZE=str(world), TEMP_DIR=where,
                   MASTER_ADDR="127.0.0.1", DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(seconds), OMP_NUM_THREADS="1",
                   GLOO_SOCKET_IFNAME="lo")
        for name in ("barrier", "test_dir", "init_dir"):
            os.makedirs(os.path.join(where, name))
        subprocess.run([sys.executable, os.path.abspath(__file__), "--child", which, "--only", only, "--results", results], env=env,
                       check=False)
        if not os.path.exists(results):
            return {}
        with open(results, encoding="utf-8") as lines:
            return {r["test"]: r for r in map(json.loads, lines)}


def why(text):
    lines = [line for line in text.strip().splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"\s*(\w+\.)*\w*(Error|Exception)\b", line)]
    return (errors or lines or [""])[-1].strip()[:150]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--columns", nargs="+", choices=sorted(NAMES), default=["gloo", "moeccl", "place"])
    parser.add_argument("--seconds", type=int, default=90, help="the most that one test may take")
    parser.add_argument("--table", help="a file for the table")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.only, args.results)
        return 0
    try:
        import torch  # noqa: F401
        import expecttest  # noqa: F401
    except ImportError as missing:
        print(f"skipped: {missing}")
        return 77
    bad, table = 0, []
    for world in args.world_size:
        found = {which: run(which, world, args.only, args.seconds) for which in args.columns}
        tests = sorted(set().union(*(found[w] for w in args.columns)))
        counts = {w: {o: sum(r["outcome"] == o for r in found[w].values()) for o in ("pass", "FAIL", "skip")} for w in args.columns}
        table.append(f"World size {world}: " + "; ".join(
            f"{NAMES[w]} {c['pass']} passed, {c['FAIL']} failed, {c['skip']} skipped" for w, c in counts.items()) + ".\n")
        table.append("| test | " + " | ".join(NAMES[w] for w in args.columns) + " | reason |")
        table.append("|-|" + "-|" * (len(args.columns) + 1))
        for test in tests:
            got = {w: found[w].get(test, {"outcome": "none", "text": ""}) for w in args.columns}
            outcomes = [got[w]["outcome"] for w in args.columns]
            ours = [got[w]["outcome"] for w in args.columns if w != "gloo" and not (w == "place" and test in REASONS)]
            wrong = got.get("gloo", {"outcome": "pass"})["outcome"] == "pass" and ours and (
                any(o in ("FAIL", "none") for o in ours) or "pass" not in ours)
            bad += wrong
            if all(o == "skip" for o in outcomes):
                continue
            text = next((got[w]["text"] for w in reversed(args.columns) if got[w]["outcome"] == "FAIL"), "")
            text = text or next((got[w]["text"] for w in reversed(args.columns) if got[w]["outcome"] == "skip"), "")
            reason = REASONS.get(test) or why(text).replace("|", "\\|")
            table.append(f"| {test} | " + " | ".join(outcomes) + f" | {'**' if wrong else ''}{reason}{'**' if wrong else ''} |")
        table.append("")
    text = "\n".join(table)
    print(text)
    if args.table:
        with open(args.table, "w", encoding="utf-8") as out:
            out.write(text)
    print(f"{bad} tests that pass under gloo do not pass under moeccl")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
