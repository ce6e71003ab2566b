# SPDX-License-Identifier: Apache-2.0
"""Counts the cases of a JUnit file that `meson test` wrote. Prints a line for each failed case, then `PASSED FAILED SKIPPED`.

A gtest program counts each of its cases, and each script counts as one. A program that Meson saw fail counts as one failed case at
least: the JUnit file says nothing about a time limit, nor about the exit status of a gtest program that wrote its results. That is
read from the other file of the same run, NAME.json beside NAME.junit.xml.

  count_tests.py FILE [AGAIN]     AGAIN: a later run of some of the programs, whose cases replace the earlier ones
  count_tests.py --failed FILE    prints the names of the programs that failed, as `meson test` takes them"""
import json
import os
import signal
import sys
import xml.etree.ElementTree as tree

BAD = ("FAIL", "ERROR", "TIMEOUT", "INTERRUPT", "UNEXPECTEDPASS")


def program_of(suite, case):
    """Returns `project:suite / name` of the program that a case belongs to."""
    name = suite.get("name", "")
    return name.split(".", 1)[1].rsplit(".", 1)[0] if " / " in name else case.get("name", "")


def bad(case):
    return case.find("failure") is not None or case.find("error") is not None


def how_it_ended(run):
    """Returns what Meson saw of a program that failed."""
    code = run.get("returncode") or 0
    if run["result"] == "TIMEOUT":
        return "its time limit is over"
    if run["result"] == "INTERRUPT":
        return "interrupted"
    if code < 0:
        return signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    return f"exit {code}"


def failed_programs(path):
    """Returns {program: how it ended} of the programs that Meson saw fail."""
    log = path.removesuffix(".junit.xml") + ".json"
    if log == path + ".json" or not os.path.exists(log):
        return {}
    with open(log, encoding="utf-8", errors="replace") as file:
        runs = [json.loads(line) for line in file if line.strip()]
    return {run["name"]: how_it_ended(run) for run in runs if run["result"] in BAD}


def cases(path):
    """Returns pairs of a program's name and a case."""
    found = [(program_of(suite, case), case) for suite in tree.parse(path).getroot().iter("testsuite") for case in suite.iter("testcase")]
    for program, why in failed_programs(path).items():
        own = [case for name, case in found if name == program]
        if any(bad(case) for case in own):
            continue
        # Either the one case that Meson wrote for the program, or the program beside the cases that it reported.
        case = next((case for case in own if case.get("name") == program), None)
        if case is None:
            case = tree.Element("testcase", name=program)
            found.append((program, case))
        case.set("name", f"{program} ({why})")
        tree.SubElement(case, "failure")
    return found


def main():
    if sys.argv[1] == "--failed":
        names = dict.fromkeys(program for program, case in cases(sys.argv[2]) if bad(case)) if os.path.exists(sys.argv[2]) else {}
        print("\n".join(name.split(" / ")[-1] for name in names))
        return 0
    found = cases(sys.argv[1])
    if len(sys.argv) > 2:
        again = cases(sys.argv[2])
        replaced = {program for program, _ in again}
        for program in sorted(replaced):
            first = [case for p, case in found if p == program and bad(case)]
            if first and not any(bad(case) for p, case in again if p == program):
                print(f'unsteady: {program} failed ({", ".join(case.get("name", "") for case in first)}) and passed when it ran again alone')
        found = [pair for pair in found if pair[0] not in replaced] + again
    passed = failed = skipped = 0
    for _, case in found:
        name = f'{case.get("classname", "")}.{case.get("name", "")}'.strip(".")
        if bad(case):
            failed += 1
            print(f"FAILED: {name}")
        elif case.find("skipped") is not None or case.get("result") == "skipped" or case.get("status") == "notrun":
            skipped += 1
            print(f"skipped: {name}")
        else:
            passed += 1
    print(passed, failed, skipped)
    return 0 if passed + failed + skipped > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
