# SPDX-License-Identifier: Apache-2.0
"""HierMoE: duplication rates, and speed-ups of the hierarchical AlltoAll on the links of Fig. 9."""
import re
import subprocess

from . import Closed

PAPER = "HierMoE"
COMMAND = "perf/papers --only hiermoe"


def row(item, paper, ours, rule, how="simulated", **more):
    return {"paper": PAPER, "item": item, "paper_value": paper, "ours": ours, "rule": rule, "how": how, "command": COMMAND} | more


def sources(build, quick):
    def table_2():
        """Counted over 200,000 tokens by perf/studies/dedup_rates."""
        done = subprocess.run([f"{build}/perf/dedup_rates"], capture_output=True, text=True, check=True)
        for groups, k, counted, paper in re.findall(r"^ +(\d+) +(\d+) +([\d.]+) +\d+ +(\d+) ", done.stdout, re.M):
            yield row(f"Table II, R = {groups}, K = {k}, %", int(paper), float(counted), ["points", 1.1], how="counted",
                      command="build/perf/dedup_rates")

    if not quick:
        yield Closed(PAPER, table_2)
