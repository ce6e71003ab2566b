# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of one group below in a machine of tools/rdma-vm, or in two, and reports all their cases as one gtest program would:
`session.py BUILD_DIR GROUP [--gtest_output=xml:FILE]`. Exit code 77: the machine is not available here.

`session.py BUILD_DIR GROUP --list` prints the programs' names, and `session.py BUILD_DIR GROUP PATTERN...` runs only those whose name
contains a PATTERN. Their output goes to BUILD_DIR/meson-logs/rdma-GROUP/NAME.log; its end is shown when a program fails."""
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as tree

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# Set for every program: the network between the hosts, and a longer patience for an emulated processor.
COMMON = {"MOECCL_NET": "verbs", "MOECCL_TEST_REQUIRE_NET": "verbs", "MOECCL_TEST_PATIENCE": "5"}
FIGURES = "[          ] "  # begins the lines of a gtest program's log that are shown in any case

# How many of the faults are tried; all of them take half an hour.
FAULTS = float(os.environ.get("MOECCL_TEST_RDMA_SCALE", os.environ.get("MOECCL_TEST_SCALE", "0.2")))


class Program:
    """One program on the machine: a gtest program of the build, or a script of this folder.

    hosts: where run_ranks() places its processes, see tests/support/hosts.h. machine: the number of the machine, where there are
    two. survives: whether the machine is left at the end, and so the program's report."""

    def __init__(self, name, command, hosts="", filter="", limit_s=300, machine=None, survives=True, **environment):
        self.name, self.limit_s, self.machine, self.survives = name, limit_s, machine, survives
        self.script = (ROOT / command[0]).exists()
        self.command = command
        self.environment = COMMON | ({"MOECCL_TEST_HOSTS": hosts} if hosts else {}) | environment
        self.filter = filter

    def line(self, build, out, shared):
        """Returns the shell commands that run it; its output, exit status and times go to files of `out`. shared: several machines
        get the commands, and the first one that comes to the program runs it."""
        base = ROOT if self.script else build
        words = [str(base / self.command[0])] + [str(build) if word == "BUILD" else word for word in self.command[1:]]
        if not self.script:
            words += [f"--gtest_output=xml:{out / self.name}.xml"] + ([f"--gtest_filter={self.filter}"] if self.filter else [])
        given = [f"{name}={value}" for name, value in self.environment.items()]
        files = shlex.quote(str(out / self.name))
        lines = (f"started=$(date +%s.%N)\n"
                 f"env {shlex.join(given)} timeout -k 5 {self.limit_s} {shlex.join(words)} >{files}.log 2>&1\n"
                 f"echo $? $started $(date +%s.%N) >{files}.ended\n")
        if shared:
            return f"if mkdir {files}.taken 2>/dev/null; then\n{lines}fi\n"
        return lines if self.machine is None else f'if [ "$MACHINE" = {self.machine} ]; then\n{lines}fi\n'


def on_both(name, command, filter, survivors=2, **environment):
    """Returns a program on each of two machines, with a rank on each. survivors: 1 if it ends the second machine."""
    return [Program(f"{name}_m{k}", command, "1+1", filter, machine=k, survives=k < survivors, **environment) for k in range(2)]


def conformance(hosts, worlds, **shapes):
    """Returns programs: two hundred random cases of all collectives, and the features that take several calls."""
    of_features = [Program(f"{name}_{hosts}", [f"tests/{name}_conformance_test"], hosts, shapes[name]) for name in shapes]
    plain = Program(f"plain_{hosts}", ["tests/conformance_test"], hosts, worlds, MOECCL_TEST_SCALE="1.5",
                    MOECCL_TEST_MOST_BYTES=str(256 << 10))
    return [plain] + of_features


GROUPS = {
    "links": [Program(f"smoke_{case}", ["tests/rdma/smoke", case]) for case in ["devices", "pingpong", "write", "cable"]] +
             [Program("link_contract", ["tests/unit_transport"], filter="*LinkContract*/verbs:VerbsOnADevice*", NCCL_IB_HCA="rxe0")],
    # The shapes are small, because each MoE shape runs both layouts, forward and backward, with every algorithm.
    "conformance":
        conformance("1+1", "*_2processes", moe="*TwoHostsOfOne", experts="*TwoRanks", hybrid="*TwoHostsOfOne", replace="*TwoHostsOfOne",
                    pipeline="*ALayer*/2") +
        conformance("2+2", "*_4processes", moe="*ChoicesLeftEmpty:*CapacityDrops", experts="*ManySmallChunks", hybrid="*ManySmallChunks",
                    replace="*TwoNodesInTurn", migration="*FiftyTimesSmall", swap="*FourRanksAuto") +
        conformance("3+1", "*_4processes", moe="*ChoicesLeftEmpty:*NoTokensOnSomeRanks", experts="*ManySmallChunks", hybrid="*BothLevels",
                    replace="*TwoNodesInTurn"),
    # Machines with their own kernels, clocks and memory, which are clones as to their names and process numbers.
    "machines":
        on_both("plain_verbs", ["tests/conformance_test"], "*/3_2processes", MOECCL_TEST_SCALE="0.05") +
        on_both("moe_tcp", ["tests/moe_conformance_test"], "*TwoHostsOfOne", MOECCL_NET="tcp", MOECCL_TEST_REQUIRE_NET="tcp",
                MOECCL_ENCRYPT="1") +
        on_both("faults_tcp", ["tests/rdma/machine_fault_test"], "*ItsPowerFails", 1, MOECCL_NET="tcp", MOECCL_TEST_REQUIRE_NET="tcp",
                MOECCL_TEST_PATIENCE="2"),
    # These limits are what the library promises, so no patience applies except the caller's. MOECCL_TEST_SCALE=1 kills
    # 50 ranks, breaks 50 queue pairs, pulls 10 cables and freezes 5 ranks.
    "faults": [Program("faults", ["tests/rdma/rdma_fault_test"], limit_s=600 if FAULTS < 0.5 else 3600,
                       MOECCL_TEST_PATIENCE=os.environ.get("MOECCL_FAULT_PATIENCE", "1"),
                       MOECCL_TEST_SCALE=str(FAULTS))],
    "rates": [Program(name, [f"tests/rdma/{name}", "BUILD"], limit_s=400) for name in ["rates", "dispatch"]],
}

# Groups that two machines of one processor share, because they compute most of the time. With two processors, a machine
# needs nearly as long and interprets twice: ranks wait for each other, and processors for each other's locks.
SHARED = ["conformance"]

# Not part of the tests, because they measure times on a machine that others use too.
BY_HAND = ["rates"]


def run(build, group, programs, out):
    """Returns the exit code of the first machine that failed, which is not that of the programs."""
    shared = group in SHARED and len(programs) > 1 and (os.cpu_count() or 1) > 1
    lines = "".join(p.line(build, out, shared) for p in programs)
    options = ["--cpus", "1"] if shared else []
    if programs[0].machine is not None:
        options = ["--machines", "2"]
        lines = "hostname same\ndate -s \"+$((MACHINE * 3)) hours\" >/dev/null\n" + lines
    (out / "programs").write_text(lines)
    # The time of all programs, plus the boot while others use this machine.
    limit = 60 + sum(p.limit_s for p in programs if not p.machine)
    started = time.monotonic()
    command = [ROOT / "tools/rdma-vm", *options, "--time", str(limit), "--write", out, "sh", out / "programs"]
    machines = [subprocess.Popen(command) for _ in range(2 if shared else 1)]
    codes = [machine.wait() for machine in machines]
    print(f"rdma {group}: {len(programs)} programs in {time.monotonic() - started:.0f} s")
    return next((code for code in codes if code != 0), 0)


def suites_of(program, out):
    """Returns the program's report as elements of gtest's XML; a result that it did not live to report is a failure."""
    ended, report = out / f"{program.name}.ended", out / f"{program.name}.xml"
    code, seconds = None, 0.0
    if ended.exists() and len(ended.read_text().split()) == 3:
        status, begin, end = ended.read_text().split()
        code, seconds = int(status), float(end) - float(begin)
    log = out / f"{program.name}.log"
    text = log.read_text(errors="replace") if log.exists() else "it was not started\n"
    how = "did not end, or was not run" if code is None else f"ended with {code}"
    print("".join(f"{line}\n" for line in text.splitlines() if line.startswith(FIGURES)), end="")
    suites = []
    if report.exists() and not program.script:
        try:
            suites = list(tree.parse(report).getroot().iter("testsuite"))
        except tree.ParseError:
            pass
    for suite in suites:
        suite.set("name", f"{program.name}.{suite.get('name')}")
        for case in suite.iter("testcase"):
            case.set("classname", f"{program.name}.{case.get('classname')}")
    passed = sum(case.find("failure") is None and case.get("status") == "run" for suite in suites for case in suite.iter("testcase"))
    print(f"  {program.name}: {passed} cases, {how}, {seconds:.1f} s")
    told = any(case.find("failure") is not None for suite in suites for case in suite.iter("testcase"))
    if code != 0 and not told or not suites or not any(True for suite in suites for _ in suite.iter("testcase")):
        # A script, or a program that died or ran no test.
        suite = tree.Element("testsuite", name=program.name, tests="1")
        case = tree.SubElement(suite, "testcase", name=program.name, classname="rdma", status="run", time=f"{seconds:.3f}")
        if code == 77:
            tree.SubElement(case, "skipped", message=text[-500:])
        elif code != 0 or not program.script:
            tree.SubElement(case, "failure", message=how).text = text[-4000:]
        suites.append(suite)
    if any(suite.find(".//failure") is not None for suite in suites):
        print(f"--- {program.name}, the end of {log}:\n{text[-6000:]}", file=sys.stderr)
    return suites


def main(arguments):
    if arguments == ["--groups"]:
        print(" ".join(group for group in GROUPS if group not in BY_HAND))
        return 0
    build, group, *rest = arguments
    build = pathlib.Path(build).resolve()
    report = [a.removeprefix("--gtest_output=xml:") for a in rest if a.startswith("--gtest_output=xml:")]
    patterns = [a for a in rest if not a.startswith("--")]
    programs = [p for p in GROUPS[group] if not patterns or any(x in p.name for x in patterns)]
    if "--list" in rest:
        print("\n".join(p.name for p in programs))
        return 0
    for path in report:
        pathlib.Path(path).unlink(missing_ok=True)
    out = build / "meson-logs" / f"rdma-{group}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    code = run(build, group, programs, out)
    if code == 77:
        return 77
    all_suites = tree.Element("testsuites", name="rdma")
    for program in filter(lambda p: p.survives, programs):
        all_suites.extend(suites_of(program, out))
    for path in report:
        tree.ElementTree(all_suites).write(path, encoding="utf-8", xml_declaration=True)
    if code not in (0, 124):
        print(f"tools/rdma-vm ended with {code}", file=sys.stderr)
    failed = any(suite.find(".//failure") is not None for suite in all_suites)
    return 1 if failed or code != 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
