# SPDX-License-Identifier: Apache-2.0
"""Counts the cases of a JUnit file that `meson test` wrote. Prints a line for each failed case, then `PASSED FAILED SKIPPED`.

A gtest program counts each of its cases; one that died before it could report, and each script, counts as one."""
import sys
import xml.etree.ElementTree as tree


def main():
    root = tree.parse(sys.argv[1]).getroot()
    passed = failed = skipped = 0
    for case in root.iter("testcase"):
        name = f'{case.get("classname", "")}.{case.get("name", "")}'.strip(".")
        if case.find("failure") is not None or case.find("error") is not None:
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
