# SPDX-License-Identifier: Apache-2.0
"""The sources of the rows of perf/papers. A row is a dict: paper, item, paper_value, ours, rule, how ("run", "simulated", "solved" or "closed
form"), command, and, where the two figures differ, why."""
import json
import os
import subprocess

HERE = os.path.dirname(os.path.realpath(__file__))


def rows_of(paper, command, usually):
    """Returns a function that makes a row of a paper; `usually` is how its figures are obtained unless the row says something else."""
    def row(item, paper_value, ours, rule, how=usually, **more):
        return {"paper": paper, "item": item, "paper_value": paper_value, "ours": ours, "rule": rule, "how": how, "command": command} | more
    return row


class Closed:
    """A function that yields rows."""

    def __init__(self, paper, function):
        self.paper, self.name, self.rows = paper, function.__name__, function


class Program:
    """A program that prints a row for each line that begins with "{". A command is in the build folder or in perf/. judge(row) returns the
    fields that a row lacks, its rule and its reason, or None when the row is left out. Rows for which the paper prints no figure are
    always left out."""

    def __init__(self, paper, build, command, limit=600, judge=lambda row: {}):
        self.paper, self.name, self.limit, self.judge = paper, " ".join(command), limit, judge
        source = os.path.join(HERE, "..", command[0])
        self.command = [source if os.path.exists(source) else os.path.join(build, command[0])] + command[1:]

    def rows(self):
        try:
            done = subprocess.run(self.command, capture_output=True, text=True, timeout=self.limit, check=False)
        except subprocess.TimeoutExpired as e:
            raise RuntimeError(f"not over after {self.limit} s") from e
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        for row in rows:
            more = self.judge(row) if row["paper_value"] is not None else None
            if more is not None:
                yield row | more
        if done.returncode != 0 or not rows:
            raise RuntimeError(f"exit {done.returncode}, {len(rows)} rows: {(done.stderr or done.stdout).strip()[-300:]}")


def sources(build, quick):
    """Yields all sources, in the order of the page."""
    from . import hiermoe, hybridep, monta, netmoe, replication
    for part in (hiermoe, netmoe, hybridep, monta, replication):
        yield from part.sources(build, quick)
