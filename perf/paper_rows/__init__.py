# SPDX-License-Identifier: Apache-2.0
"""The sources of the rows of perf/papers. A row is a dict: paper, item, paper_value, ours, rule, how ("run", "simulated", "solved", "closed
form" or "fitted"), command, and, where the two figures differ, why. A row whose paper_value is None is a goal of this project."""
import json
import os
import subprocess
import threading

HERE = os.path.dirname(os.path.realpath(__file__))


def rows_of(paper, command, usually):
    """Returns a function that makes a row of a paper; `usually` is how its figures are obtained unless the row says something else."""
    def row(item, paper_value, ours, rule, how=usually, **more):
        return {"paper": paper, "item": item, "paper_value": paper_value, "ours": ours, "rule": rule, "how": how, "command": command} | more
    return row


def on_ranks(n_ranks, topology, work):
    """Runs work(comm) on ranks that are threads of this process."""
    import moeccl
    failed = []

    def run(comm):
        try:
            work(comm)
        except BaseException as failure:
            failed.append(failure)
            comm.abort()

    threads = [threading.Thread(target=run, args=(comm,)) for comm in moeccl.init_all(n_ranks, pace=True, topology=topology)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failed:
        raise RuntimeError(str(failed[0]))


class Closed:
    """A function that yields rows."""

    def __init__(self, paper, function):
        self.paper, self.name, self.rows = paper, function.__name__, function


class Program:
    """A program that prints a row for each line that begins with "{". A command is in the build folder or in perf/. judge(row) returns the
    fields that a row lacks, its rule and its reason, or None when the row is left out. Rows for which the paper prints no figure are
    left out unless the program gives them a rule, which makes them goals."""

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
            more = self.judge(row) if row["paper_value"] is not None or "rule" in row else None
            if more is not None:
                yield row | more
        if done.returncode != 0 or not rows:
            raise RuntimeError(f"exit {done.returncode}, {len(rows)} rows: {(done.stderr or done.stdout).strip()[-300:]}")


def sources(build, quick):
    """Yields all sources, in the order of the page."""
    from . import hiermoe, hybridep, monta, netmoe, replication
    for part in (hiermoe, netmoe, hybridep, monta, replication):
        yield from part.sources(build, quick)
