# SPDX-License-Identifier: Apache-2.0
"""What the command `moeccl` answers to a newcomer's first calls and mistakes: command_test.py MOECCL"""
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import unittest

COMMAND = os.path.abspath(sys.argv.pop(1))


def run(*arguments, cwd=None, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MOECCL_")}
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=60, env=environment | variables, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


class Command(unittest.TestCase):
    def refuses(self, arguments, *said):
        code, _, errors = run(*arguments)
        self.assertEqual(code, 2, errors)
        for words in said:
            self.assertIn(words, errors)
        self.assertNotIn("->", errors)  # the numbers of an enumeration

    def test_version(self):
        for argument in "version", "--version":
            code, out, _ = run(argument)
            self.assertEqual(code, 0)
            self.assertRegex(out, r"^MoECCL \d+\.\d+\.\d+\n$")

    def test_an_unknown_command_is_named(self):
        self.refuses(["bogus"], 'there is no command "bogus"', "moeccl --help")
        self.refuses(["solve", "bogus"], 'there is no command "bogus"', "moeccl solve --help")

    def test_an_unknown_name_comes_with_those_that_exist(self):
        self.refuses(["plan", "allreduc"], '"allreduc" is not one of allreduce, reduce, broadcast')
        self.refuses(["plan", "allreduce", "--type", "bf16"], "--type", '"bf16" is not one of', "bfloat16")
        self.refuses(["simulate", "sendrecv", "--topology", "node:2"], '"sendrecv" is not one of dispatch, allreduce')

    def test_bad_usage_of_any_kind_ends_with_2(self):
        self.refuses(["plan"], "op is required")
        self.refuses(["plan", "allreduce", "--ranks", "0"], "--ranks", "1 to 1024")
        self.refuses(["plan", "allreduce", "--rank", "4"], "--rank")
        self.refuses(["plan", "allreduce", "--count", "-5"], "--count", '"-5" is not a number from 0 on')
        self.refuses(["status", "me"], "pid", '"me" is not a number above 0')
        self.refuses([], "subcommand is required")

    def test_sizes_that_no_machine_has_are_refused(self):
        self.refuses(["check", "--memory-cap", "-1"], "--memory-cap", '"-1" is negative')
        self.refuses(["check", "--hidden-bytes", "-5"], "--hidden-bytes", '"-5" is not a number')
        self.refuses(["calibrate", "--max-bytes", "-64M"], "--max-bytes", '"-64M" is negative')
        self.refuses(["solve", "replicate", "--ranks", "2147483647"], "--ranks", "1 to 65536")
        self.refuses(["solve", "replicate", "--slots", "65536"], "--slots", "1 to 1024")

    def test_help_lists_names_without_numbers(self):
        code, out, _ = run("plan", "--help")
        self.assertEqual(code, 0)
        self.assertIn("bfloat16", out)
        self.assertNotIn("->", out)

    def test_names_are_taken(self):
        code, out, errors = run("plan", "alltoall", "--type", "bfloat16", "--ranks", "2", "--count", "1000")
        self.assertEqual(code, 0, errors)
        self.assertIn("AllToAll with", out)
        self.assertIn("1000 elements of 2 B", out)

    def test_bytes_have_units(self):
        code, _, errors = run("check", "--memory-cap", "256M")
        self.assertEqual(code, 0, errors)
        code, _, errors = run("check", "--memory-cap", "1K")
        self.assertEqual(code, 1, errors)
        self.assertIn("memory_cap_bytes of 1024", errors)

    def test_info_says_what_a_communicator_found(self):
        code, _, errors = run("plan", "allreduce", "--topology", "node:2 gpu:2", MOECCL_DEBUG="INFO")
        self.assertEqual(code, 0, errors)
        self.assertRegex(errors, r"INFO communicator of 4 ranks: 4 on this host, which has \d+ cores for them; topology node:2 gpu:2; "
                         r"all ranks are threads of this process and reach each other's buffers; kernels \w+; MoECCL \d")
        self.assertEqual(errors.count("communicator of"), 1)  # rank 0 speaks for all
        _, _, errors = run("plan", "allreduce")
        self.assertEqual(errors, "")

    def test_calibrate_measures_again_into_the_cache_and_leaves_no_file(self):
        with tempfile.TemporaryDirectory() as folder:
            def calibrate(*more):
                budget = str(int(3000 * float(os.environ.get("MOECCL_TEST_PATIENCE", "1"))))
                return run("calibrate", "--ranks", "2", "--threads", "--budget", budget, "--max-bytes", "64K", *more, cwd=folder, XDG_CACHE_HOME=folder)
            kept = []
            for _ in range(2):
                code, out, errors = calibrate("--cache")
                self.assertEqual(code, 0, errors)
                self.assertIn("profile in the user's cache", out)
                self.assertEqual(os.listdir(folder), ["moeccl"])
                names = os.listdir(os.path.join(folder, "moeccl"))
                self.assertEqual(len(names), 1)
                with open(os.path.join(folder, "moeccl", names[0]), encoding="utf-8") as f:
                    kept.append(f.read())
            self.assertNotEqual(kept[0], kept[1])
            sizes = [point[0] for plan in json.loads(kept[1])["plans"] for point in plan["points"]]
            self.assertLessEqual(max(sizes), 64 << 10)

    def test_calibrate_sees_at_once_that_its_output_cannot_be_written(self):
        for path in "/nosuch/profile.json", "/tmp":
            code, _, errors = run("calibrate", "--ranks", "2", "--output", path)
            self.assertEqual(code, 1)
            self.assertIn(f"--output {path}", errors)

    def test_output_that_cannot_be_written_is_a_failure(self):
        for arguments in (["topo", "node:2 gpu:2"], ["version"], ["plan", "allreduce"], ["solve", "replicate"], ["--help"]):
            with open("/dev/full", "w", encoding="utf-8") as full:
                done = subprocess.run([COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
            self.assertEqual(done.returncode, 1, arguments)
            self.assertIn("the output cannot be written", done.stderr)

    def test_calibrate_says_that_it_cannot_fork(self):
        def few_processes():
            if os.geteuid() == 0:  # a limit does not hold for root, so one process beside the first as nobody
                resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            else:
                resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))

        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o777)
            done = subprocess.run([COMMAND, "calibrate", "--ranks", "4", "--output", folder + "/profile.json"], capture_output=True, text=True,
                                  timeout=30, preexec_fn=few_processes, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("of 4 cannot be forked: Resource temporarily unavailable", done.stderr)

    def test_prediction_needs_a_step_before(self):
        code, _, errors = run("solve", "sample", "--predict")
        self.assertEqual(code, 1)
        self.assertIn("--step 1", errors)
        code, out, errors = run("solve", "sample", "--predict", "--step", "1")
        self.assertEqual(code, 0, errors)
        self.assertIn("predicted", out)

    def test_prediction_needs_a_next_layer(self):
        code, _, errors = run("solve", "sample", "--layer", "1", "--step", "1", "--predict")
        self.assertEqual(code, 1)
        self.assertIn("layer 1 is the last one of the trace", errors)

    def test_solve_takes_what_it_uses(self):
        self.refuses(["solve", "chunks", "--zipf", "1"], "--zipf")
        self.refuses(["solve", "domains", "--experts", "16"], "--experts")
        self.refuses(["solve", "swap", "--zipf", "nan"], "--zipf", '"nan" is not a number from 0 to 10')
        self.refuses(["solve", "chunks", "--inter-gbs", "-3"], "--inter-gbs", '"-3" is not a number above 0')
        self.refuses(["solve", "layout", "--recompute", "7"], "--recompute")
        code, out, errors = run("solve", "swap", "--groups", "4,8,16", "--tokens", "64", "--tokens", "128")
        self.assertEqual(code, 0, errors)
        self.assertIn("tokens 128", out)

    def test_simulate_says_that_it_knows_no_link(self):
        for topology, links in (("node:2 gpu:4", "none"), ("node:2(bw=1GB/s) gpu:4", "topology")):
            code, out, errors = run("simulate", "allreduce", "--topology", topology)
            self.assertEqual(code, 0, errors)
            self.assertEqual("links without a cost" in out, links == "none")
            code, out, _ = run("simulate", "--topology", topology, "--tokens", "16", "--json")
            page = json.loads(out)
            self.assertEqual((page["links"], page["op"], page["ranks"], page["tokens"]), (links, "dispatch", 8, 128))
            self.assertIn("critical_path", page["candidates"][0])

    def test_one_is_no_plural(self):
        self.assertIn(" on 1 rank: ", run("simulate", "allreduce", "--topology", "gpu:1")[1])
        self.assertIn("can run on 1 rank;", run("check", "--ranks", "1")[1])

    def test_calibrate_leaves_no_file_when_it_is_interrupted(self):
        with tempfile.TemporaryDirectory() as folder:
            child = subprocess.Popen([COMMAND, "calibrate", "--ranks", "2", "--cache"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                     env=os.environ | {"TMPDIR": folder, "XDG_CACHE_HOME": folder})
            time.sleep(1)
            child.send_signal(signal.SIGINT)
            child.wait(30)
            self.assertEqual(os.listdir(folder), [])

    def test_status_goes_on_after_a_process_that_does_not_answer(self):
        code, _, errors = run("status", "999999998", "999999999")
        self.assertEqual(code, 1)
        for pid in "999999998", "999999999":
            self.assertIn(f"pid {pid}", errors)


if __name__ == "__main__":
    unittest.main()
