# SPDX-License-Identifier: Apache-2.0
"""HierMoE: duplication rates, and speed-ups of the hierarchical AlltoAll on the links of Fig. 9."""
import re
import subprocess

from . import Closed, Program, rows_of

PAPER = "HierMoE"
row = rows_of(PAPER, "perf/papers --only hiermoe", "simulated")


def judge(given):
    """Returns the rules for the rows of hiermoe_tables, which all have one routing: uniform, even sources, 1024 tokens per GPU."""
    item = given["item"]
    if item.endswith("HD-MoE over HD2-MoE"):
        return {"rule": ["within", 0.15], "why": "by Eq. 1-6 with Fig. 9's figures, HD over HD2 is at most 1.25 whatever the routing (docs/performance-papers.md); the "
                "paper's times also include the time of its kernels"}
    if item.endswith("HierMoE over HD-MoE") or item.endswith("HierMoE"):
        return {"rule": ["within", 0.15], "why": "a uniform routing leaves nothing to gain by swapping experts; zipf 0.3 gives 1.04 to 1.06 over HD-MoE"}
    if item.endswith("HD2-MoE"):
        return {"rule": ["within", 0.15], "why": "Eq. 3 with Fig. 9's figures gives these times; the other costs of HD2-MoE are not published"}
    if "DeepSeek-V3" in item:
        return {"rule": ["within", 0.15], "why": "tokens that choose 4 of 8 groups save less than the paper's trained router does"}
    return {"rule": ["within", 0.15]}


def sources(build, quick):
    def table_2():
        """Counts duplicates over 200,000 tokens with perf/studies/dedup_rates."""
        done = subprocess.run([f"{build}/perf/dedup_rates"], capture_output=True, text=True, check=True)
        for groups, k, counted, paper in re.findall(r"^ +(\d+) +(\d+) +([\d.]+) +\d+ +(\d+) ", done.stdout, re.M):
            yield row(f"Table II, R = {groups}, K = {k}, %", int(paper), float(counted), ["points", 1.1], how="counted",
                      command="build/perf/dedup_rates")

    if not quick:
        yield Closed(PAPER, table_2)
        yield Program(PAPER, build, ["perf/hiermoe_tables"], judge=judge)
        run = ["examples/training_run", "--warm", "9", "--rounds", "5", "--steps", "2"]
        yield Program(PAPER, build, [*run, "--data", "even", "--features", "flat,auto"])
        run = ["examples/training_run", "--warm", "40", "--rounds", "5", "--steps", "2", "--keep-places"]
        yield Program(PAPER, build, [*run, "--data", "skewed", "--features", "auto,swap"])
