# SPDX-License-Identifier: Apache-2.0
"""What the perf programs answer to values that they cannot use, and what they write: perf_test.py PROGRAM..."""
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

PROGRAMS = {os.path.basename(path): os.path.abspath(path) for path in sys.argv[1:]}
del sys.argv[1:]
SWEEP = ["--topology", "gpu:2", "--levels", "2", "-b", "64K", "-x", "4K", "-n", "1", "-w", "0"]


def run(program, *arguments, stdout=subprocess.PIPE, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MOECCL_")}
    done = subprocess.run([PROGRAMS[program], *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60,
                          env=environment | variables, check=False)
    return done.returncode, done.stdout, done.stderr


class Perf(unittest.TestCase):
    def refuses(self, program, arguments, said, **variables):
        code, _, errors = run(program, *arguments, **variables)
        self.assertEqual(code, 1, errors)
        self.assertIn(said, errors)

    def measured(self, program, *arguments, **variables):
        """Returns the output, its lines of figures and the JSON."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "results.json")
            code, out, errors = run(program, *arguments, "-J", path, **variables)
            self.assertEqual(code, 0, out + errors)
            with open(path, encoding="utf-8") as file:
                return out, [line for line in out.splitlines() if line[:1] == " "], json.load(file)

    def check_line_of_nccl_tests(self, program, size, count, type_, *arguments, op="none", in_place_checked=True, **bandwidths):
        """A line and its result are those that nccl-tests 2.19.6 (a0b82b2) writes, apart from the times."""
        usual = ["--ranks", "4", "-b", "4K", "-e", "4K", "-n", "3"]
        out, lines, result = self.measured(program, *usual, *arguments)
        figure, wrong = r" +(\d[\d.e+]*)", ("0", "0" if in_place_checked else "N/A")
        pattern = rf"{size:12}  {count:12}  {type_:>8}  {op:>6}  {-1:6}{figure * 3} +{wrong[0]}{figure * 3} +{wrong[1]}"
        self.assertEqual(len(lines), 1, out)
        self.assertRegex(lines[0], "^" + pattern + "$")
        self.assertEqual(len(lines[0]), 12 + 14 + 10 + 8 + 8 + 2 * (9 + 8 + 8 + 8))
        line = result["results"][0]
        self.assertEqual([line[key] for key in ("size", "count", "type", "redop", "root")], [size, count, type_, op, "    -1"])
        places = [line["out_of_place"], line["in_place"]]
        self.assertEqual([set(place) for place in places], [{"time", "alg_bw", "bus_bw", "nwrong"}] * 2)
        self.assertEqual([place["nwrong"] for place in places], [0, 0 if in_place_checked else None])
        for place in places:
            self.assertAlmostEqual(place["alg_bw"] / (size / place["time"] / 1e3), bandwidths.get("alg", 1))
            self.assertAlmostEqual(place["bus_bw"] / place["alg_bw"], bandwidths.get("bus", 1))
        self.assertAlmostEqual(result["average_bus_bandwidth"]["bandwidth"], (places[0]["bus_bw"] + places[1]["bus_bw"]) / 2)

    def test_lines_and_json_are_those_of_nccl_tests(self):
        self.check_line_of_nccl_tests("all_reduce_perf", 4096, 1024, "float", op="sum", bus=1.5)
        self.check_line_of_nccl_tests("all_reduce_perf", 4096, 2048, "half", "-d", "float16", "-o", "max", op="max", bus=1.5)
        self.check_line_of_nccl_tests("all_reduce_perf", 4096, 4096, "f8e4m3", "-d", "f8e4m3", op="sum", bus=1.5)
        self.check_line_of_nccl_tests("sendrecv_perf", 4096, 512, "double", "-d", "float64", in_place_checked=False)
        self.check_line_of_nccl_tests("hypercube_perf", 4096, 256, "float", alg=0.75)
        self.check_line_of_nccl_tests("hypercube_perf", 4096, 256, "float", "--ranks", "1", "-g", "4", "--stream", "1", alg=0.75)

    def test_a_hypercube_needs_a_power_of_two(self):
        for ranks in ("1", "2", "8"):
            _, _, result = self.measured("hypercube_perf", "--ranks", ranks, "-b", "8", "-e", "64K", "-f", "8", "-n", "3", "-m", "2")
            self.assertEqual(result["out_of_bounds"]["count"], 0)
        self.refuses("hypercube_perf", ["--ranks", "6"], "hypercube_perf runs on a power of two of ranks, not on 6")

    def test_results_are_never_overwritten(self):
        usual = ["--ranks", "1", "-b", "8", "-e", "8", "-n", "1"]
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "r")
            for name in ("r", "r.0", "r.1"):
                code, out, errors = run("all_reduce_perf", *usual, "-J", path)
                self.assertEqual(code, 0, errors)
                self.assertIn(f"# Writing JSON output to {os.path.join(folder, name)}\n", out)
            self.assertEqual(sorted(os.listdir(folder)), ["r", "r.0", "r.1"])
            for name in os.listdir(folder):
                with open(os.path.join(folder, name), encoding="utf-8") as file:
                    self.assertEqual(json.load(file)["version"], 3)
        code, out, errors = run("all_reduce_perf", *usual, "-J", "/dev/null")
        self.assertEqual(code, 0, errors)
        self.assertIn("# Writing JSON output to /dev/null\n", out)

    def test_a_device_that_is_not_taken_is_said(self):
        _, out, _ = run("all_reduce_perf", "--ranks", "1", "-b", "8", "-e", "8", "-n", "1", NCCL_TESTS_DEVICE="1")
        self.assertIn("# note: NCCL_TESTS_DEVICE has no effect: ranks take the devices of CUDA_VISIBLE_DEVICES in turn", out)

    def test_sizes_without_anything_to_measure_are_refused(self):
        self.refuses("expert_all_reduce_perf", ["-b", "8M"], "-b is 8388608 and -e is 4194304: give sizes with -b at most -e")
        self.refuses("alltoall_allgather_perf", ["-b", "512K"], "-b is 524288 and -e is 262144")

    def test_memory_that_a_program_cannot_use_is_not_offered(self):
        for program in ("expert_all_reduce_perf", "alltoall_allgather_perf", "replace_perf"):
            self.refuses(program, ["--mem", "cuda"], '"cuda" is not one of heap, malloc')
        self.refuses("hybrid_perf", ["--mem", "heap"], "--mem")

    def test_rows_and_choices_that_hybrid_perf_cannot_use_are_refused(self):
        for row in ("0", "6"):
            self.refuses("hybrid_perf", [*SWEEP, "--row", row], f"--row is {row}: give a multiple of 4 bytes")
        self.refuses("hybrid_perf", [*SWEEP, "-k", "3"], "-k is 3: give at most the number of experts, 2")
        self.refuses("hybrid_perf", [*SWEEP, "-k", "-1"], "--topk")
        code, out, errors = run("hybrid_perf", *SWEEP, "-k", "2")
        self.assertEqual(code, 0, errors)
        self.assertIn("best", out)

    def test_launchers_that_contradict_each_other_are_refused(self):
        mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
        for ranks in ("1", "2"):
            self.refuses("all_reduce_perf", ["-b", "8", "-e", "8", "--ranks", ranks], "unset RANK and WORLD_SIZE if they are left over",
                         RANK="0", WORLD_SIZE="1", **mpi)
        self.refuses("all_reduce_perf", [], "are not a rank and a number of ranks", RANK="0x", WORLD_SIZE="1")

    def test_a_trace_has_its_own_experts(self):
        with tempfile.NamedTemporaryFile() as trace:  # 4 tokens choose two of 4 experts
            numbers = [1, 1, 1, 4, 2, 4] + [0, 1, 2, 3] * 2
            trace.write(b"MOETRACE" + b"".join(n.to_bytes(4, "little") for n in numbers))
            trace.flush()
            usual = ["--ranks", "2", "--hidden", "16", "--iters", "1", "--algo", "flat", "--routing", "trace:" + trace.name]
            self.refuses("dispatch_combine_perf", [*usual, "--experts", "16"], "--experts is 16, and the trace has 4: leave --experts out")
            self.refuses("dispatch_combine_perf", [*usual, "--topk", "3"], "--topk is 3, and the trace has 2: leave --topk out")
            code, out, errors = run("dispatch_combine_perf", *usual, "--experts", "4")
            self.assertEqual(code, 0, errors)
            self.assertIn("top-2 of 4 experts", out)

    def test_each_process_has_its_times(self):
        _, _, result = self.measured("all_reduce_perf", "--procs", "2", "--ranks", "2", "-b", "8", "-e", "8", "-n", "5", "-I", "1")
        times = result["results"][0]["out_of_place_per_iter"]
        rows = times["per_process_max_times_us"]
        self.assertEqual([len(row) for row in rows], [5, 5])
        self.assertEqual([max(both) for both in zip(*rows)], times["times_us"])

    def test_a_rank_that_the_kernel_kills_is_named(self):
        command = [PROGRAMS["all_reduce_perf"], "--procs", "2", "-b", "8", "-e", "8", "-n", "100000000"]
        parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        children = []
        while len(children) < 2:
            time.sleep(0.1)
            with open(f"/proc/{parent.pid}/task/{parent.pid}/children", encoding="ascii") as file:
                children = file.read().split()
        os.kill(int(children[1]), signal.SIGKILL)
        _, errors = parent.communicate(timeout=60)
        self.assertEqual(parent.returncode, 1)
        self.assertIn(f"process 1 ({children[1]}) ended by signal 9; the kernel ends processes when memory runs out", errors)

    def test_sizes_that_no_memory_holds_are_refused(self):
        usual = ["--iters", "1", "--algo", "flat"]
        self.refuses("dispatch_combine_perf", [*usual, "--hidden", "9223372036854775807"], "--hidden")
        self.refuses("dispatch_combine_perf", [*usual, "--tokens", "2147483647", "--topk", "64"], "layer cannot run")
        self.refuses("dispatch_combine_perf", [*usual, "--align", "1000000000"], "layer cannot run")
        if "asan" not in PROGRAMS["moe_drift"] and "tsan" not in PROGRAMS["moe_drift"]:  # those end a process that asks for so much
            self.refuses("moe_drift", ["--tokens", "9999999999999"], "there is not enough memory for a run of these sizes")
        self.refuses("bench_swap", ["--every", "0"], '"0" is not a number above 0')
        self.refuses("all_reduce_perf", ["-t", "100", "-g", "100000000"],
                     "1 (processes) x 100 (threads) x 100000000 (-g) are too many: a communicator has at most 65535 ranks")
        self.refuses("all_reduce_perf", ["--procs", "100000"], '"100000" is not a whole number from 1 to 1024')

    def test_numbers_are_finite(self):
        self.refuses("swap_perf", ["--zipf", "nan"], '"nan" is not a number from 0 to 10')
        self.refuses("replace_perf", ["--locality", "nan"], '"nan" is not a number from 0 to 1')
        self.refuses("dispatch_combine_perf", ["--seed", "-1"], '"-1" is not a number from 0 on')
        self.refuses("dispatch_combine_perf", ["--ranks", "2", "--trace-layer", "1"], "only with --routing trace:PATH")
        self.refuses("dispatch_combine_perf", ["--seed", "18446744073709551616"], '"18446744073709551616" is not a whole number up to')
        for size in ("-4", "0", "x"):
            code, _, errors = run("plan_accuracy", "--size", size)
            self.assertEqual(code, 2)
            self.assertIn(f"--size {size}: not a size", errors)

    def test_a_file_that_cannot_be_written_is_refused_at_once(self):
        for program in PROGRAMS:
            if program in ("bench_swap", "plan_accuracy", "expert_all_reduce_perf"):
                continue
            self.refuses(program, ["-J", "/nosuch/file"], "cannot write /nosuch/file: No such file or directory")

    def test_an_option_that_contradicts_another_is_refused(self):
        self.refuses("hybrid_perf", [*SWEEP, "--ranks", "4"], "--ranks is 4, and --levels has 2 ranks")
        self.refuses("hybrid_perf", [*SWEEP, "--pace"], "--pace")

    def test_the_last_of_a_repeated_option_counts(self):
        code, out, errors = run("dispatch_combine_perf", "--ranks", "2", "--tokens", "9", "--tokens", "8", "--hidden", "16", "--iters", "1", "--algo", "flat")
        self.assertEqual(code, 0, errors)
        self.assertIn("2 ranks of 8 tokens", out)

    def test_json_has_the_shape_of_the_run(self):
        with tempfile.NamedTemporaryFile() as file:
            code, _, errors = run("dispatch_combine_perf", "--ranks", "2", "--tokens", "8", "--hidden", "16", "--iters", "1", "--algo", "flat", "--backward",
                                  "-J", file.name)
            self.assertEqual(code, 0, errors)
            run_of = json.load(file)
        config = run_of["config"]
        self.assertEqual([config[key] for key in ("ranks", "tokens", "mem", "align", "backward", "update")], [2, 8, "heap", 1, True, False])
        self.assertEqual([r["predicted_us"] for r in run_of["results"]], [None])  # no link has figures

    def test_groups_of_processes_run_side_by_side(self):
        usual = ["-b", "64", "-e", "64", "-n", "2"]
        out, _, result = self.measured("all_reduce_perf", "--procs", "2", "--ranks", "2", *usual, NCCL_TESTS_SPLIT="MOD 2")
        self.assertEqual([device["group"] for device in result["config"]["devices"]], [0, 0, 1, 1])
        self.assertIn("NCCL_TESTS_SPLIT MOD 2: groups of 2 ranks run side by side", out)
        code, out, errors = run("all_reduce_perf", "--procs", "4", *usual, NCCL_TESTS_SPLIT_MASK="1")
        self.assertEqual(code, 0, errors)
        self.assertIn("groups of 2 ranks", out)
        self.refuses("all_reduce_perf", ["--ranks", "4"], "names no groups", NCCL_TESTS_SPLIT="half")

    def test_a_thread_drives_several_ranks_of_paced_links(self):
        code, _, errors = run("all_reduce_perf", "-g", "2", "--pace", "--topology", "gpu:2(bw=1GB/s)", "-b", "64", "-e", "64", "-n", "2")
        self.assertEqual(code, 0, errors)

    def test_output_that_cannot_be_written_is_a_failure(self):
        with open("/dev/full", "w", encoding="utf-8") as full:
            code, _, errors = run("all_reduce_perf", "-b", "8", "-e", "8", "-n", "1", stdout=full)
        self.assertEqual(code, 1)
        self.assertIn("the output cannot be written", errors)


if __name__ == "__main__":
    unittest.main()
