# SPDX-License-Identifier: Apache-2.0
"""Where perf/papers takes its rows from. A row is a dict: paper, item, paper_value, ours, rule, how ("run", "simulated", "solved" or "closed
form"), command, and why, where the two differ."""
import json
import os
import subprocess


class Closed:
    """A function that yields rows."""

    def __init__(self, paper, function):
        self.paper, self.name, self.rows = paper, function.__name__, function


class Program:
    """A program that prints a row for each line that begins with "{"."""

    def __init__(self, paper, build, command, limit=600):
        self.paper, self.name, self.limit = paper, " ".join(command), limit
        self.command = [os.path.join(build, command[0])] + command[1:]

    def rows(self):
        done = subprocess.run(self.command, capture_output=True, text=True, timeout=self.limit, check=False)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        yield from rows
        if done.returncode != 0 or not rows:
            raise RuntimeError(f"exit {done.returncode}, {len(rows)} rows: {(done.stderr or done.stdout).strip()[-300:]}")


def sources(build, quick):
    """All sources, in the order of the page."""
    from . import hiermoe, hybridep, monta, netmoe, replication
    for part in (hiermoe, netmoe, hybridep, monta, replication):
        yield from part.sources(build, quick)
