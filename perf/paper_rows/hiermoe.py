# SPDX-License-Identifier: Apache-2.0
"""HierMoE: duplication rates, and speed-ups of the hierarchical AlltoAll on the links of Fig. 9."""
import re
import subprocess

from . import Closed, Program, rows_of

PAPER = "HierMoE"
row = rows_of(PAPER, "perf/papers --only hiermoe", "simulated")


# The routing's two parameters were chosen so that these come out.
FITTED = ("Table IV, K=8 E=128 G=32, HD-MoE", "Table IV, K=8 E=128 G=32, HierMoE", "Table IV, K=8 E=128 G=32, HierMoE over HD-MoE")


def judge(given):
    """Returns the rules for the rows of hiermoe_tables: one routing for all of them, of even sources with 1024 tokens on each GPU. Eight
    clusters of experts, whose popularity is zipf 0.15, are scattered over the GPUs, and 57 % of a token's choices come from its cluster."""
    item, bound = given["item"], given.get("bound")
    rule = {"rule": ["within", 0.15]}
    if item in FITTED:
        rule["how"] = "fitted"
    if item.endswith("HD-MoE over HD2-MoE"):
        if bound is None:
            return rule
        return rule | {"why": f"by Eq. 1-6 with Fig. 9's figures and the paper's own speed-up of HD-MoE, this ratio is at most about {bound:.2f} whatever the "
                       "routing (docs/performance-papers.md); the paper's times also include what those equations leave out"}
    if item.startswith("Section V-E"):
        return {"rule": ["points", 0.05], "why": "the maxima differ by less than the routing's chance: a swap is chosen on the tokens of one iteration, and "
                "counts on those of later ones"}
    if item.endswith("HierMoE over HD-MoE"):
        if "DeepSeek-V3" in item:
            return rule | {"rule": ["points", 0.05], "why": "a token's choices lie in 4 groups of 32 neighbouring experts, on two nodes at the least: most of the "
                           "duplicates that swaps would make are there without them"}
        return rule | {"rule": ["points", 0.05], "why": "the routing was chosen for 128 experts on 32 GPUs; with 64 experts a cluster has 8 of them, and 8 GPUs "
                       "hold 16 each, so that more of the duplicates that swaps would make are there without them"}
    if item.endswith("over HD2-MoE-Smart"):
        return {"why": f"by Eq. 1-6 with Fig. 9's figures and the paper's own speed-ups, HierMoE is at most {bound:.2f} times as fast as HD2-MoE, and nothing "
                "is printed of what SmartMoE's swaps lose besides"}
    if item.endswith("over Tutel-2DH"):
        return {"why": f"by Eq. 3 with Fig. 9's figures, the paper's own speed-up over Megatron-LM gives at most {bound:.2f}; what Tutel does besides, such as its "
                "copies between the two steps, has no figure"}
    if item.endswith("HD2-MoE"):
        if bound is None:
            return rule
        return rule | {"why": f"by Eq. 1-6 with Fig. 9's figures, HD2-MoE is at least {bound:.2f} times as fast as Megatron-LM where HD-MoE is as fast as "
                       "in the paper; the other costs of HD2-MoE are not published"}
    if "DeepSeek-V3" in item:
        return rule | {"why": "tokens choose in 4 of 8 groups, as many as DeepSeek-V3 allows; a router whose tokens keep to 3 of them gives 2.49 for HD-MoE and "
                       "2.52 for HierMoE"}
    return rule


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
