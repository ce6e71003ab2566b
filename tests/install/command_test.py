# SPDX-License-Identifier: Apache-2.0
"""What the command `moeccl` answers to a newcomer's first calls and mistakes: command_test.py MOECCL"""
import json
import os
import pty
import re
import resource
import select
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

    def test_an_unknown_option_comes_before_what_it_makes_wrong(self):
        self.refuses(["plan", "allreduce", "--rank", "4"],
                     "moeccl plan: there is no option --rank (did you mean --ranks?): moeccl plan --help lists them")
        # Its value is taken for the operation, and the topology is missing.
        self.refuses(["simulate", "--ranks", "8"], "moeccl simulate: there is no option --ranks")
        self.refuses(["solve", "balance", "--load=x"], "moeccl solve balance: there is no option --load (did you mean --loads?)")
        self.refuses(["--rank"], "moeccl: there is no option --rank: moeccl --help")
        self.refuses(["plan", "-q", "allreduce"], "moeccl plan: there is no option -q: ")

    def test_loads_exclude_what_describes_a_generated_trace(self):
        for option in "--experts", "--topk", "--tokens", "--zipf":
            self.refuses(["solve", "balance", "--loads", __file__, option, "4"], option + " excludes --loads")

    def test_an_unknown_name_comes_with_those_that_exist(self):
        self.refuses(["plan", "allreduc"], '"allreduc" is not one of allreduce, reduce, broadcast')
        self.refuses(["plan", "allreduce", "--type", "bf16"], "--type", '"bf16" is not one of', "bfloat16")
        self.refuses(["simulate", "sendrecv", "--topology", "node:2"], '"sendrecv" is not one of dispatch, allreduce')

    def test_an_unknown_algorithm_comes_with_those_that_exist(self):
        code, _, errors = run("simulate", "allreduce", "--topology", "node:2", "--algo", "rng")
        self.assertEqual(code, 1)
        self.assertRegex(errors, r'no algorithm "rng" for allreduce: there are .*\bring\b')

    def test_bad_usage_of_any_kind_ends_with_2(self):
        self.refuses(["plan"], "op is required")
        self.refuses(["plan", "allreduce", "--ranks", "0"], "--ranks", "1 to 1024")
        self.refuses(["plan", "allreduce", "--count", "-5"], "--count", '"-5" is not a number from 0 on')
        for number in ("18446744073709551616", "1e6", "1.5"):
            self.refuses(["plan", "allreduce", "--count", number], "--count", f'"{number}" is not a whole number up to 18446744073709551615')
        self.refuses(["status", "me"], "pid", '"me" is not a number above 0')
        self.refuses([], "subcommand is required")

    def test_sizes_that_no_machine_has_are_refused(self):
        self.refuses(["check", "--memory-cap", "-1"], "--memory-cap", '"-1" is negative')
        self.refuses(["check", "--hidden-bytes", "-5"], "--hidden-bytes", '"-5" is not a number')
        self.refuses(["calibrate", "--max-bytes", "-64M"], "--max-bytes", '"-64M" is negative')
        self.refuses(["solve", "replicate", "--ranks", "2147483647"], "--ranks", "1 to 65536")
        self.refuses(["solve", "replicate", "--slots", "65536"], "--slots", "1 to 1024")
        self.refuses(["doctor", "--ranks", "65536"], "--ranks", "0 to 65535")

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
        self.assertIn("--memory-cap of 1024", errors)

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
            # Each fit that says little is marked, and only then the page advises to measure again.
            fits = [line.split() for line in out.split("r2\n")[1].split("\n\n")[0].splitlines() if not line.startswith("*")]
            for fit in fits:
                self.assertEqual(float(fit[3]) < 0.99, fit[4:] == ["*"], out)
            self.assertEqual("measure again" in out, any(float(fit[3]) < 0.99 for fit in fits), out)

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

    def test_calibrate_names_its_options(self):
        for options, said in ((["--max-bytes", "1"], "calibrate: --max-bytes is 1: give 1024 to 1073741824"),
                              (["--pace"], "--pace is 1 without a topology"),
                              (["--topology", "node:2 gpu:2"], 'has 4 ranks, the communicator has 2: give --topology or MOECCL_TOPOLOGY')):
            code, _, errors = run("calibrate", "--ranks", "2", "--threads", "--cache", *options)
            self.assertEqual(code, 1, errors)
            self.assertIn(said, errors)

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
        self.refuses(["solve", "domains", "--zipf", "1"], "--zipf")
        self.refuses(["solve", "domains", "--forward-only", "--lat-us", "1,2"], "excludes --forward-only")
        self.refuses(["solve", "sample", "--topology", "node:2 gpu:2", "--nodes", "4"], "excludes --")
        self.refuses(["solve", "chunks", "--monta", "--tensor", "4"], "excludes --monta")
        self.refuses(["solve", "chunks", "--r1", "8"], '"8" is not MB:EFFICIENCY')
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

    def test_simulate_takes_what_its_operation_uses(self):
        link = ["--topology", "node:2(bw=1GB/s) gpu:4"]
        self.refuses(["simulate", "allreduce", *link, "--tokens", "16"], "--tokens", "has no meaning for allreduce")
        self.refuses(["simulate", *link, "--count", "16"], "--count", "has no meaning for dispatch")
        self.refuses(["simulate", "expert_gather", *link], "--domain", "is needed for expert_gather")
        for option in "--tokens", "--seed":
            self.refuses(["simulate", *link, option, "-5"], option, '"-5" is not a number from 0 on')
        self.refuses(["simulate", "allreduce", *link, "--count", "-1"], "--count", '"-1" is not a number from 0 on')
        code, _, errors = run("simulate", *link, "--domain", "2")
        self.assertEqual((code, errors), (1, "simulate: the number of --domain sizes is 1: the topology has 2 levels, give a domain size for each\n"))
        code, out, errors = run("simulate", *link, "--tokens", "16", "--domain", "2,1", "--layout", "expert", "--json")
        self.assertEqual(code, 0, errors)
        page = json.loads(out)
        self.assertEqual([page[k] for k in ("layout", "domain", "row_bytes", "topk", "experts", "routing", "seed", "algorithms")],
                         ["ExpertMajor", [2, 1], 14336, 8, 256, "uniform", 1, "auto"])

    def test_a_long_call_shows_on_a_terminal_that_it_is_at_work(self):
        minutes = [COMMAND, "simulate", "--topology", "node:256(bw=50GB/s,lat=5us) gpu:8(bw=450GB/s)", "--experts", "2048", "--tokens", "4096"]
        here, terminal = pty.openpty()
        with (subprocess.Popen(minutes, stdout=subprocess.DEVNULL, stderr=terminal) as shown,
              subprocess.Popen(minutes, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as piped):
            os.close(terminal)
            said, deadline = b"", time.monotonic() + 30
            while b"so far" not in said and time.monotonic() < deadline:
                if select.select([here], [], [], 1)[0]:
                    said += os.read(here, 1000)
            for process in shown, piped:
                process.send_signal(signal.SIGINT)
            self.assertRegex(said.decode(), r"simulate: \d+ s so far, Ctrl-C ends it")
            self.assertEqual(shown.wait(30), -signal.SIGINT)
            self.assertEqual(piped.communicate(timeout=30)[1], b"")
        os.close(here)

    def test_a_command_without_a_result_fails(self):
        code, out, errors = run("simulate", "expert_gather", "--topology", "dc:2 gpu:2", "--domain", "2,1", "--algorithm", "direct")
        self.assertEqual((code, out), (1, ""))
        self.assertIn("simulate: no candidate of expert_gather can be simulated: direct: ranks of several hosts", errors)
        code, out, errors = run("solve", "layout", "--gpus", "1", "--gpu-gb", "1")
        self.assertEqual((code, out), (1, ""))
        self.assertIn("no layout fits into 1 GB: give more --gpus or --gpu-gb", errors)

    def test_a_topology_is_a_text_or_a_file_for_all_commands(self):
        with tempfile.NamedTemporaryFile("w", suffix=".levels") as file:
            file.write("node:2(bw=1GB/s) gpu:4\n")
            file.flush()
            for command in (["topo", file.name], ["plan", "allreduce", "--topology", file.name], ["simulate", "allreduce", "--topology", file.name],
                            ["check", "--topology", file.name]):
                code, _, errors = run(*command)
                self.assertEqual(code, 0, errors)
        for command in ["topo"], ["plan", "allreduce", "--topology"], ["simulate", "allreduce", "--topology"], ["check", "--topology"]:
            code, _, errors = run(*command, "nosuch")
            self.assertEqual(code, 1)
            self.assertIn("nosuch: cannot be opened: No such file or directory", errors)

    def test_messages_name_options_and_why_a_file_cannot_be_read(self):
        for arguments, said in ((["check", "--experts", "7"], "--topk is 8: between 1 and 7 are possible"),
                                (["check", "--ranks", "-1"], "--ranks is -1"),
                                (["check", "--memory-cap", "1K"], "--memory-cap of 1024 leaves too little"),
                                (["check", "--algo", "hier:9"], '--algorithm "hier:9" is not one of'),
                                (["plan", "allreduce", "--topology", "node:2 gpu:4", "--ranks", "3"],
                                 "the communicator has 3: give --topology or MOECCL_TOPOLOGY that many"),
                                (["solve", "replicate", "--trace", "nosuch"], "--trace nosuch: cannot be opened: No such file"),
                                (["solve", "balance", "--loads", "nosuch"], "--loads nosuch: cannot be opened: No such file")):
            code, _, errors = run(*arguments)
            self.assertEqual(code, 1, errors)
            self.assertIn(said, errors)
            self.assertNotIn("config.", errors)

    def test_plans_have_the_ranks_of_their_topology(self):
        code, out, errors = run("plan", "allreduce", "--topology", "node:2(bw=1GB/s,lat=20us) gpu:4")
        self.assertEqual(code, 0, errors)
        self.assertIn("ranks 8,", out)
        self.assertIn("can run on 6 ranks", run("check", "--topology", "node:2 gpu:3", "--experts", "12")[1])
        self.refuses(["plan", "alltoallv", "--count", "5"], "--count", "has no meaning for alltoallv")

    def test_doctor_reports_settings_with_which_no_communicator_can_be_made(self):
        for name, value, said in (("MOECCL_TOPOLOGY", "nosuch.json", "MOECCL_TOPOLOGY: nosuch.json: cannot be opened: No such file"),
                                  ("MOECCL_PROFILE", "nosuch", "MOECCL_PROFILE: "), ("MOECCL_SECRET_FILE", "nosuch", "MOECCL_SECRET_FILE: "),
                                  ("MOECCL_DEBUG", "foo", 'MOECCL_DEBUG: "foo" is not accepted')):
            code, out, errors = run("doctor", "--ranks", "2", **{name: value})
            self.assertEqual(code, 1, out + errors)
            self.assertIn("settings\n  BAD   " + said, out)
        self.assertIn("settings\n  ok ", run("doctor", "--ranks", "2", MOECCL_TOPOLOGY="node:2 gpu:4")[1])

    def test_doctor_reports_a_network_that_is_asked_for_and_not_here(self):
        code, out, errors = run("doctor", "--ranks", "2", MOECCL_NET="plugin:NoSuchNet")
        self.assertEqual(code, 1, out + errors)
        self.assertIn('settings\n  BAD   MOECCL_NET is "plugin:NoSuchNet", which this host cannot use', out)
        self.assertIn("ranks of other hosts: no network\n", out)
        self.assertIn('not tcp: MOECCL_NET is "plugin:NoSuchNet"\n', out)
        self.assertIn("not plugin: no net plugin named NoSuchNet", out)
        self.assertIn('not verbs: MOECCL_NET is "tcp"\n', run("doctor", "--ranks", "2", MOECCL_NET="tcp")[1])

    def test_solvers_say_whose_figures_they_use(self):
        code, out, errors = run("solve", "swap", "--tokens", "64")
        self.assertEqual(code, 0, errors)
        self.assertIn("with the AlltoAlls of HierMoE's Fig. 9", out)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            fit = {"alpha_ns": 1000, "bytes_per_ns": 10}
            json.dump({"moeccl_profile": 1, "alltoall": {"standard": fit, "inter": [fit], "intra": [fit]}}, file)
            file.flush()
            code, out, errors = run("solve", "swap", "--tokens", "64", "--groups", "2,8", "--profile", file.name)
            self.assertEqual(code, 0, errors)
            self.assertIn(f"with the AlltoAlls of {file.name}", out)
            code, _, errors = run("solve", "swap", "--tokens", "64", "--profile", file.name)
            self.assertEqual(code, 1)
            self.assertIn('4 levels of --groups need "alltoall" with its "standard" and 3 fits', errors)
        code, out, errors = run("solve", "replicate", "--row-bytes", "8192", "--inter-gbs", "50", "--compute-us", "1")
        self.assertEqual(code, 0, errors)
        self.assertIn("predicted for 0.16384 us per token between nodes (8192 bytes at 50 GB/s) and 1 us per token of a rank", out)

    def solved(self, *arguments):
        code, out, errors = run("solve", *arguments)
        self.assertEqual(code, 0, errors)
        return out

    def test_balance_reads_loads_or_counts_a_trace(self):
        self.assertIn("2 layers of 256 experts in 288 slots of 32 GPUs; 8 groups, each on one of 4 nodes", self.solved("balance"))
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            def loads(text, *more):
                file.seek(0)
                file.truncate()
                file.write(text)
                file.flush()
                return ["balance", "--loads", file.name, "--replicas", "6", "--gpus", "2", "--nodes", "2", "--groups", "1", *more]
            out = self.solved(*loads("1 2 3 4\n4,3,2,1\n"))
            self.assertIn("2 layers of 4 experts in 6 slots of 2 GPUs; on any GPU, since 2 nodes do not divide 1 groups", out)
            self.assertRegex(out, r"this placement +1\.0000\nupper bound +1\.0000\n")
            out = self.solved(*loads("9 6 5 5 4 3\n", "--max-work", "-1"))
            eplb, ours = (re.search(name + r" +(\d\.\d+)", out).group(1) for name in ("EPLB's method", "this placement"))
            self.assertEqual(eplb, ours)
            better = re.search(r"this placement +(\d\.\d+)", self.solved(*loads("9 6 5 5 4 3\n"))).group(1)
            self.assertGreater(float(better), float(eplb))
            for text, said in (("1 2\n3\n", "line 2: there are 1 loads: the lines before have 2"), ("1 x 2\n", 'line 1: "x 2" is not a number'),
                               ("1 nan\n", "--loads[0][1] is nan: give a number from 0"), ("\n", "has no loads"),
                               ("1 2 3 4 5 6 7\n", "--replicas is 6: give a multiple of --gpus (2) from the experts (7)")):
                code, _, errors = run("solve", *loads(text))
                self.assertEqual(code, 1)
                self.assertIn(said, errors)
            self.refuses(["solve", *loads("1 2\n", "--trace", "x.trace")], "excludes --")

    def test_domains_are_chosen_for_a_step_as_the_library_runs_it(self):
        shape = ["domains", "--tokens", "8192", "--topk", "8", "--experts", "256", "--hidden-bytes", "14336", "--scale", "2,8",
                 "--gbps", "1.25,128", "--expert-mb", "30", "--pre-ms", "20"]
        step = self.solved(*shape)
        self.assertIn("use domains 1x8, gain 0.5 %", step)
        for part in "AllGather", "AlltoAll", "codec 0;", "backward", "return of the gradients":
            self.assertIn(part, step)
        self.assertIn("use domains 2x1, gain 50.7 %", self.solved(*shape, "--forward-only"))  # Eq. 8 counts every row
        def of_a_step(*more):
            return float(re.search(r"of a step, top-8 of 256 experts: EP \d+, domains (\d+)", self.solved(*shape, *more)).group(1))
        for option in ["--lat-us", "1e5,1e5"], ["--expert-ms", "100"], ["--backward-ms", "1000"]:
            self.assertGreater(of_a_step(*option), of_a_step() + 1e5, option)
        self.assertGreater(of_a_step("--compression", "50"), of_a_step("--compression", "50", "--codec-gbs", "0,0"))
        small = ["--compression", "50", "--codec-gbs", "0,0"]
        self.assertLess(of_a_step(*small, "--gradient-ratio", "50"), of_a_step(*small) / 2)  # the way back was most of the step

    def test_solvers_take_a_cluster_from_a_profile_or_a_topology(self):
        profile = ["--profile", os.path.join(os.path.dirname(__file__), "../../docs/profiles/hiermoe-a6000.json")]
        links = "node 1.418 GB/s, 497 us; qpi 4.274 GB/s, 301 us; nvl 24.27 GB/s, 149 us; gpu 30.49 GB/s, 204 us"
        pages = {name: self.solved(name, *profile) for name in ("sample", "replicate", "domains", "chunks", "layout")}
        for page in pages.values():
            self.assertIn(links, page)
        self.assertIn("32 devices on 4 nodes", pages["sample"])
        self.assertIn("(32 ranks, 4 nodes)", pages["replicate"])
        self.assertIn("(4096 bytes at 11.3422 GB/s)", pages["replicate"])  # a node's eight ranks together
        self.assertIn("level 3: domains of", pages["domains"])
        self.assertIn("t = 8, e = 4, B1 = 1.418, B2 = 4.274", pages["chunks"])
        # An option overrides the cluster. A latency counts: Eq. 5 takes 497 us for each of two operations at least.
        self.assertIn("B1 = 25,", self.solved("chunks", *profile, "--inter-gbs", "25"))
        predicted = [float(self.solved("sample", *profile, *more).split("predicted us")[1].split()[0]) for more in ([], ["--inter-us", "0"])]
        self.assertAlmostEqual(predicted[0] - predicted[1], 2 * 497, delta=1)
        topology = ["--topology", "node:32(bw=8GB/s,lat=20us) gpu:2(bw=100GB/s)"]
        self.assertIn("node 4 GB/s, 20 us; gpu 100 GB/s, 0 us (the topology)", self.solved("domains", *topology))
        for name, said in (("layout", "layouts fit"), ("replicate", "at 8 GB/s")):
            self.assertIn(said, self.solved(name, *topology))
        # Nodes of data centres: the slowest line between nodes counts. Nothing crosses a level of one group.
        centres = ["--topology", "dc:2(bw=1GB/s,lat=20ms) node:4(bw=50GB/s,lat=5us) gpu:8(bw=450GB/s)"]
        self.assertIn("8 nodes of 8 GPUs, 0.03125 GB/s of a GPU between nodes and 450 inside\n", self.solved("layout", *centres))
        self.assertIn("t = 8, e = 8, B1 = 0.03125, B2 = 450,", self.solved("chunks", *centres))
        self.assertIn("level 0: domains of 1 of 1 workers", self.solved("domains", "--topology", "node:1 gpu:8(bw=100GB/s)"))
        self.assertIn("(the topology; the page goes by --gbps)\n", self.solved("domains", *topology, "--gbps", "10,100"))
        for wrong, said in ((["--topology", "node:2 gpu:1+2"], "level gpu differ in size"), (["--topology", "node:2 gpu:2"], "level node has no bandwidth"),
                            (["--profile", "nosuch"], "--profile nosuch: cannot be opened: No such file")):
            code, _, errors = run("solve", "domains", *wrong)
            self.assertEqual(code, 1)
            self.assertIn(said, errors)

    def test_a_profile_that_was_measured_gives_links_between_hosts_their_lines(self):
        line = {"alpha_ns": 2000, "bytes_per_ns": 10}
        measured = {"moeccl_profile": 1, "topology": "node:2 gpu:4", "machine": {"host_level": 0, "host_copy_bytes_per_ns": 40, "encode_bytes_per_ns": 3,
                    "decode_bytes_per_ns": 5}, "levels": [{"name": "node", **line}, {"name": "gpu", "alpha_ns": 500, "bytes_per_ns": 7}]}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(measured, file)
            file.flush()
            # Inside a host a ping-pong of two ranks says nothing of four that copy at the same time.
            self.assertIn("node 2.5 GB/s, 2 us; gpu 10 GB/s, 0 us", self.solved("domains", "--profile", file.name))
            code, _, errors = run("solve", "domains", "--profile", file.name, "--topology", "node:2(bw=1GB/s)")
            self.assertEqual(code, 1)
            self.assertIn("has 2 levels, the topology 1", errors)
        for wrong, said in (({**measured, "machine": 3}, "type_error"), ({"topology": "node:2 gpu:2"}, "this is not a profile"),
                            ({"moeccl_profile": 1}, "names no topology: give --topology")):
            with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                json.dump(wrong, file)
                file.flush()
                code, _, errors = run("solve", "chunks", "--profile", file.name)
                self.assertEqual(code, 1)
                self.assertIn(f"--profile {file.name}", errors)
                self.assertIn(said, errors)

    def test_chunks_have_efficiencies_and_contention(self):
        for tokens, strategy in (8192, "O1"), (65536, "O2"), (262144, "O3"):  # MoNTA's own choices
            self.assertIn(f"take {strategy} with", self.solved("chunks", "--monta", "--tokens", str(tokens)))
        # Its set, option by option.
        own = ["--hidden-bytes", "31250", "--r1", "8:0.427,32:0.632,256:0.741", "--r2", "64:0.726,256:0.776,2048:0.803", "--r3", "64:0.8",
               "--o3-r2", "64:0.60,1024:0.70,2048:0.76", "--start-us", "0", "--chunk-us", "300"]
        self.assertIn("take O1 with 1 chunk:", self.solved("chunks", *own))
        self.assertNotIn("without --o3-r2", self.solved("chunks", *own))
        self.assertIn("without --o3-r2", self.solved("chunks"))

    def test_solvers_speak_of_options(self):
        code, out, errors = run("solve", "swap", "--experts", "16", "--tokens", "64")
        self.assertEqual(code, 0, errors)
        self.assertIn("groups 4,8,16,", out)
        code, _, errors = run("solve", "swap", "--experts", "16", "--tokens", "64", "--groups", "4,32")
        self.assertEqual(code, 1)
        self.assertIn("--groups[1] is 32: there are between 1 and --experts (16) groups", errors)
        code, _, errors = run("solve", "replicate", "--ranks", "3")
        self.assertEqual(code, 1)
        self.assertIn("--ranks 3 with --slots 16 have 48 slots: 256 experts need one each", errors)
        self.refuses(["solve", "swap", "--trace", "file", "--experts", "16"], "--trace excludes --experts")

    def test_calibrate_has_no_hint_about_launchers_where_there_is_one(self):
        code, _, errors = run("calibrate")
        self.assertEqual(code, 1)
        self.assertIn("no launcher started this process", errors)
        self.assertIn("or give --ranks", errors)
        code, _, errors = run("calibrate", RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MOECCL_INIT_TIMEOUT_MS="200")
        self.assertEqual(code, 1)
        self.assertTrue(errors.startswith("init: "), errors)
        self.assertNotIn("--ranks", errors)
        self.refuses(["calibrate", "--threads"], "--threads requires --ranks")

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
