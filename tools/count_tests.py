# SPDX-License-Identifier: Apache-2.0
"""Counts the cases of a JUnit file that `meson test` wrote. Prints a line for each failed case, then `PASSED FAILED SKIPPED`.

A gtest program counts each of its cases. A program that died before it could report counts as one, and so does each script.

  count_tests.py FILE [AGAIN]     AGAIN: a later run of some of the programs, whose cases replace the earlier ones
  count_tests.py --failed FILE    prints the names of the programs that failed, as `meson test` takes them"""
import os
import sys
import xml.etree.ElementTree as tree


def program_of(suite, case):
    """Returns `project:suite / name` of the program that a case belongs to."""
    name = suite.get("name", "")
    return name.split(".", 1)[1].rsplit(".", 1)[0] if " / " in name else case.get("name", "")


def bad(case):
    return case.find("failure") is not None or case.find("error") is not None


def cases(path):
    """Returns pairs of a program's name and a case."""
    return [(program_of(suite, case), case) for suite in tree.parse(path).getroot().iter("testsuite") for case in suite.iter("testcase")]


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
