# SPDX-License-Identifier: Apache-2.0
"""Runs the scripts that count tests, delete folders and draw the demo on small inputs."""
import copy
import importlib.machinery
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as tree

TOOLS = os.path.join(os.path.dirname(os.path.realpath(__file__)), "../../tools")

JUNIT = """<testsuites><testsuite name="s">
<testcase classname="A" name="passes" status="run"/>
<testcase classname="A" name="fails" status="run"><failure message="no"/></testcase>
<testcase classname="A" name="dies"><error message="signal 6"/></testcase>
<testcase classname="A" name="skips"><skipped/></testcase>
</testsuite></testsuites>"""


def result(algo, plan, p50, node_bytes, wrong=0):
    levels = [{"name": "node", "rows": 10, "bytes": node_bytes}, {"name": "gpu", "rows": 20, "bytes": 5000000}]
    return {"algo": algo, "plan": plan, "emulated": True, "nwrong": wrong, "time_us": {"p50": p50, "p99": p50 * 2},
            "predicted_us": p50 * 0.9, "logical_bytes": 1, "levels": levels}


RESULTS = {"results": [result("flat", "flat", 300000, 28000000), result("2dh", "2dh", 280000, 28000000),
                       result("hier:2", "hier:2", 60000, 7000000), result("auto", "hier:2", 61000, 7000000)]}


# A project of scripts: as a gtest program, one writes its results where Meson asks for them.
PROJECT = """project('p', version: '1')
foreach name, protocol : {'sleeps': 'exitcode', 'hangs': 'gtest', 'dies': 'gtest', 'leaks': 'gtest', 'skips': 'exitcode', 'good': 'gtest'}
  test(name, files('program'), args: name, protocol: protocol, suite: name == 'good' ? 'other' : 's', timeout: name in ['sleeps', 'hangs'] ? 1 : 30)
endforeach
"""
PROGRAM = """#!/bin/bash
results=${2#--gtest_output=xml:}
case $1 in
  sleeps|hangs) [ -e good ] || exec sleep 60 ;;
  skips) exit 77 ;;
  dies) [ -e good ] || kill -SEGV $$ ;;
esac
echo '<testsuites><testsuite name="S"><testcase classname="S" name="x" status="run"/></testsuite></testsuites>' >"${results:-/dev/null}"
[ "$1" != leaks ] || [ -e good ] || exit 23
"""


class Scripts(unittest.TestCase):
    def run_script(self, name, *args):
        done = subprocess.run([sys.executable, os.path.join(TOOLS, name), *args], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    def test_count_names_what_failed(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "log.xml")
            with open(path, "w", encoding="utf-8") as f:
                f.write(JUNIT)
            code, out, _ = self.run_script("count_tests.py", path)
        self.assertEqual(code, 0)
        self.assertEqual(out.splitlines(), ["FAILED: A.fails", "FAILED: A.dies", "skipped: A.skips", "1 2 1"])

    def test_a_second_run_takes_the_place_of_the_first_and_is_said(self):
        first = """<testsuites><testsuite name="moeccl.moeccl:unit / unit_a.S"><testcase classname="S" name="x"><failure/></testcase>
<testcase classname="S" name="y"/></testsuite><testsuite name="moeccl"><testcase classname="moeccl" name="moeccl:lint / b"><error/></testcase>
<testcase classname="moeccl" name="moeccl:lint / c"/></testsuite></testsuites>"""
        again = """<testsuites><testsuite name="moeccl.moeccl:unit / unit_a.S"><testcase classname="S" name="x"/>
<testcase classname="S" name="y"/></testsuite><testsuite name="moeccl"><testcase classname="moeccl" name="moeccl:lint / b"><error/></testcase>
</testsuite></testsuites>"""
        with tempfile.TemporaryDirectory() as folder:
            paths = [os.path.join(folder, name) for name in ("first.xml", "again.xml")]
            for path, text in zip(paths, (first, again)):
                with open(path, "w", encoding="utf-8") as f:
                    f.write(text)
            self.assertEqual(self.run_script("count_tests.py", "--failed", paths[0])[1].split(), ["unit_a", "b"])
            self.assertEqual(self.run_script("count_tests.py", "--failed", paths[0] + "x")[1].split(), [])
            out = self.run_script("count_tests.py", *paths)[1].splitlines()
        self.assertEqual(out, ["unsteady: moeccl:unit / unit_a failed (x) and passed when it ran again alone",
                               "FAILED: moeccl.moeccl:lint / b", "3 1 0"])

    def test_count_of_nothing_is_a_failure(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "log.xml")
            with open(path, "w", encoding="utf-8") as f:
                f.write("<testsuites/>")
            self.assertNotEqual(self.run_script("count_tests.py", path)[0], 0)
            self.assertNotEqual(self.run_script("count_tests.py", path + "x")[0], 0)

    @unittest.skipUnless(shutil.which("meson") and shutil.which("ninja"), "needs meson and ninja")
    def test_a_program_that_hangs_dies_or_leaks_is_a_failure(self):
        run = f""". {TOOLS}/lib.sh; . {TOOLS}/counted.sh; cd "$1"; logs=$1/logs; run "${{@:2}}"; finish"""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in (("meson.build", PROJECT), ("program", PROGRAM)):
                with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
                    f.write(text)
            os.chmod(os.path.join(folder, "program"), 0o755)
            subprocess.run(["meson", "setup", "build"], cwd=folder, check=True, capture_output=True)

            def outcome(*args):
                done = subprocess.run(["bash", "-c", run, "test", folder, *args], capture_output=True, text=True, check=False)
                lines = done.stdout.splitlines()
                return done.returncode, [line for line in lines if line.startswith("FAILED")], lines[-1]
            good = os.path.join(folder, "build/good")
            with open(good, "w", encoding="utf-8"):
                pass
            self.assertEqual(outcome("build", "all"), (0, [], "5 passed, 0 failed"))
            os.remove(good)
            bad = ["FAILED: p.p:s / dies", "FAILED: p.p:s / hangs (its time limit is over)", "FAILED: p.p:s / sleeps (its time limit is over)",
                   "FAILED: p:s / leaks (exit 23)"]
            code, lines, last = outcome("build", "all")
            self.assertEqual((code, sorted(lines), last), (1, bad, "2 passed, 4 failed"))
            junit = os.path.join(folder, "build/meson-logs/all.junit.xml")
            self.assertEqual(sorted(self.run_script("count_tests.py", "--failed", junit)[1].split()), ["dies", "hangs", "leaks", "sleeps"])
            # Up to three programs run again; these fail again.
            code, lines, last = outcome("build", "some", "dies", "leaks", "good")
            self.assertEqual((code, len(lines), last), (1, 2, "2 passed, 2 failed"))
            self.assertTrue(os.path.exists(os.path.join(folder, "build/meson-logs/some-again.junit.xml")))
            # Meson's own failure.
            self.assertEqual(outcome("build", "none", "nosuch")[0], 1)

    def test_folders_of_others_are_not_deleted(self):
        with tempfile.TemporaryDirectory() as folder:
            kept = os.path.join(folder, "kept")
            with open(kept, "w", encoding="utf-8"):
                pass
            for tool, option in (("gpu-bundle", "--folder"), ("packages", "--output")):
                for value in ([folder], ["."], []):
                    done = subprocess.run([os.path.join(TOOLS, tool), option, *value], cwd=folder, capture_output=True, text=True, check=False)
                    self.assertEqual(done.returncode, 2, done.stderr)
                    self.assertIn("would be deleted" if value else "needs a value", done.stderr)
            self.assertEqual(os.listdir(folder), ["kept"])

    def test_help_from_another_folder(self):
        for tool in ("build", "test", "sanitize", "site", "packages", "fuzz", "gpu-bundle", "tidy", "rdma-vm"):
            done = subprocess.run(["./" + tool, "--help"], cwd=TOOLS, capture_output=True, text=True, check=False)
            self.assertEqual((done.returncode, done.stderr), (0, ""), tool)
            self.assertIn("tools/" + tool, done.stdout)

    def test_an_unknown_fuzz_target_comes_with_those_that_exist(self):
        done = subprocess.run([os.path.join(TOOLS, "fuzz"), "1", "nosuch"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr, r"no target nosuch; there are: .*\bhwloc_xml\b")

    def test_compare_net_without_root_ends(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "unshare")
            with open(path, "w", encoding="utf-8") as f:
                f.write("#!/bin/sh\nexit 1\n")
            os.chmod(path, 0o755)
            done = subprocess.run([os.path.join(TOOLS, "../perf/compare_net"), "--run", "true"], capture_output=True, text=True, check=False, timeout=30,
                                  env=os.environ | {"PATH": folder + ":" + os.environ["PATH"]})
        self.assertEqual(done.returncode, 1)
        self.assertIn("needs root", done.stderr)

    def test_compare_net_names_what_is_wrong_before_it_makes_hosts(self):
        for arguments, said in ((["--ranks", "4"], "--ranks 4: give those of each host, such as 4+4"), (["--rate"], "--rate needs a value"),
                                (["--run"], "--run needs a program"), (["--run", "/nosuch"], "--run /nosuch: there is no such program"),
                                (["--build", "/nosuch"], "there is no /nosuch/perf/compare_mpi: run tools/build")):
            done = subprocess.run([os.path.join(TOOLS, "../perf/compare_net"), *arguments], capture_output=True, text=True, check=False, timeout=30)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(said, done.stderr)

    def test_a_wrong_argument_ends_a_script_before_it_builds(self):
        for tool, argument, said in (("sanitize", "tread", "unknown kind tread"), ("tidy", "--nosuch", "unknown option --nosuch"),
                                     ("tidy", "/nosuch.cc", "no file /nosuch.cc"), ("demo", "--nosuch", "unknown argument --nosuch"),
                                     ("../examples/training/processes", "--nosuch", "processes N PROGRAM"),
                                     ("../examples/training/processes", "4", "processes N PROGRAM")):
            done = subprocess.run([os.path.join(TOOLS, tool), argument], capture_output=True, text=True, check=False, timeout=30)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(said, done.stderr)

    def test_npy2trace_names_a_file_that_is_not_there(self):
        code, _, errors = self.run_script("../perf/npy2trace", "/nosuch.npy", "-o", "/nosuch/trace")
        self.assertEqual((code, errors), (1, "/nosuch.npy: No such file or directory\n"))

    def test_the_scoreboards_list_ends_when_its_reader_does(self):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run([sys.executable, os.path.join(TOOLS, "scoreboard"), "--list"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
        os.close(writer)
        self.assertEqual(done.stderr, "")

    def scoreboard(self):
        spec = importlib.util.spec_from_loader("scoreboard", importlib.machinery.SourceFileLoader("scoreboard", os.path.join(TOOLS, "scoreboard")))
        scoreboard = importlib.util.module_from_spec(spec)
        sys.dont_write_bytecode = True
        spec.loader.exec_module(scoreboard)
        return scoreboard

    def test_each_line_of_the_scoreboard_that_ran_says_on_which_commit(self):
        scoreboard = self.scoreboard()
        for number, row in scoreboard.read().items():
            if row["date"] > "2026-11-29":
                self.assertRegex(row.get("commit", ""), r"^[0-9a-f]{7,40}\+?$", f"line {number}: run it again")
                self.assertGreater(row.get("cases", 0), 0, f"line {number}: no test of it ran")

    def test_the_scoreboard_records_commit_cases_and_figures(self):
        scoreboard = self.scoreboard()
        log = ("[       OK ] A.x (1 ms)\n[          ] 50 trials (AQueuePairBreaks): the last rank returned at most 900 ms after the event\n"
               "[       OK ] A.y (1 ms)\n[       OK ] A.x (1 ms)\nRan 9 tests in 1.8s\n  faults: 4 cases, ended with 0, 9.1 s\n")
        self.assertEqual(scoreboard.cases_of(log), 15)
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "program")
            with open(program, "w", encoding="utf-8") as f:
                f.write("#!/bin/sh\ncat <<'E'\n" + log + 'E\necho "$SCALE trials of scale"\n')
            os.chmod(program, 0o755)
            good, figures, cases = scoreboard.Step(program, SCALE=1.0).run(True)
            self.assertEqual((good, cases), (True, 15))
            self.assertEqual(figures, "50 trials (AQueuePairBreaks): the last rank returned at most 900 ms after the event")
            scoreboard.RECORD, scoreboard.PAGE = (os.path.join(folder, name) for name in ("r.json", "r.md"))
            scoreboard.LINES = {1: ("a promise", [scoreboard.Step(program)])}
            scoreboard.commit = lambda: "0123abcd+"
            arguments, sys.argv = sys.argv, ["scoreboard"]
            try:
                with self.assertRaises(SystemExit) as end:
                    scoreboard.main()
            finally:
                sys.argv = arguments
            self.assertEqual(end.exception.code, 0)
            self.assertEqual([scoreboard.read()["1"][key] for key in ("commit", "cases", "size")], ["0123abcd+", 15, "full"])
            with open(scoreboard.PAGE, encoding="utf-8") as f:
                self.assertIn(" | 15 | full | 0123abcd+ | ", f.read())

    def test_the_scoreboard_runs_all_rdma_faults_and_the_checks_of_symbols_and_style(self):
        lines = self.scoreboard().LINES
        self.assertEqual(lines[29][1][0].numbers, {"MOECCL_TEST_RDMA_SCALE": 1.0})
        self.assertEqual([step.command.split()[0] for step in lines[28][1]],
                         ["tests/abi/interface_test.py", "tools/check-floors", "shim/nccl_preload_test", "tools/tidy"])

    def test_a_line_of_the_scoreboard_that_runs_no_test_fails(self):
        scoreboard = self.scoreboard()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "program")
            for said, good in (("[  PASSED  ] 0 tests.", False), ("[  SKIPPED ] a.b\n[  PASSED  ] 0 tests.", None), ("[  PASSED  ] 1 test.", True)):
                with open(path, "w", encoding="utf-8") as f:
                    f.write(f"#!/bin/sh\necho '{said}'\n")
                os.chmod(path, 0o755)
                self.assertEqual(scoreboard.Step(path, "No.Such").run(False)[0], good, said)

    def draw(self, results):
        with tempfile.TemporaryDirectory() as folder:
            source, target = os.path.join(folder, "in.json"), os.path.join(folder, "out.svg")
            with open(source, "w", encoding="utf-8") as f:
                json.dump(results, f)
            code, out, err = self.run_script("draw_demo.py", source, target)
            return code, out, err, tree.parse(target).getroot()

    def test_demo_draws_every_algorithm_and_says_emulated(self):
        code, out, _, svg = self.draw(RESULTS)
        self.assertEqual(code, 0)
        words = " ".join(t.text for t in svg.iter("{http://www.w3.org/2000/svg}text"))
        for word in ("flat", "2dh", "hier:2", "auto (hier:2)", "EMULATED"):
            self.assertIn(word, words)
        self.assertIn("4.0x fewer", out)
        self.assertIn("5.0x faster", out)

    def test_demo_draws_inside_the_frame(self):
        wide = copy.deepcopy(RESULTS)
        for r in wide["results"]:
            r["time_us"]["p50"], r["predicted_us"] = 98765432, 300
            for level in r["levels"]:
                level["bytes"] = 98765432100
        svg = self.draw(wide)[3]
        width = float(svg.get("width"))
        columns = {}
        for text in svg.iter("{http://www.w3.org/2000/svg}text"):
            if text.get("text-anchor") == "start":
                left, right = float(text.get("x")), float(text.get("x")) + 0.58 * float(text.get("font-size")) * len(text.text)
                self.assertLessEqual(right, width, text.text)
                columns.setdefault(text.get("y"), []).append((left, right, text.text))
        for row in columns.values():
            row.sort()
            for (_, right, words), (left, _, _) in zip(row, row[1:]):
                self.assertLessEqual(right, left, words)

    def test_demo_fails_on_wrong_values(self):
        wrong = copy.deepcopy(RESULTS)
        wrong["results"][2]["nwrong"] = 3
        code, _, err, _ = self.draw(wrong)
        self.assertEqual(code, 1)
        self.assertIn("3 WRONG", err)


if __name__ == "__main__":
    unittest.main()
