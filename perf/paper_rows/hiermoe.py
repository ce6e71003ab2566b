# SPDX-License-Identifier: Apache-2.0
"""HierMoE: duplication rates, and speed-ups of the hierarchical AlltoAll on the links of Fig. 9."""
import re
import subprocess

from . import Closed, Program, rows_of

PAPER = "HierMoE"
row = rows_of(PAPER, "perf/papers --only hiermoe", "simulated")


def judge(given):
    """Returns the rules for the rows of hiermoe_tables: one routing for the rows without swaps (uniform, even sources, 1024 tokens per GPU),
    and one for those with swaps (zipf 0.5), as a uniform routing leaves nothing to gain by a swap."""
    item = given["item"]
    if item.endswith("HD-MoE over HD2-MoE"):
        if "bound" not in given:
            return {"rule": ["within", 0.15]}
        return {"rule": ["within", 0.15], "why": f'by Eq. 1-6 with Fig. 9\'s figures and the paper\'s own speed-up of HD-MoE, this ratio is at most about '
                f'{given["bound"]:.2f} whatever the routing (docs/performance-papers.md); the paper\'s times also include what those equations leave out'}
    if item.endswith("HierMoE over HD-MoE"):
        return {"rule": ["points", 0.05], "why": "choices that are independent of one another (zipf 0.5) leave little to gain; where a token's choices "
                "come from one cluster of experts, swaps gain 26 to 38 % by the same equations (bench_swap, docs/expert-swap.md)"}
    if item.endswith("over HD2-MoE-Smart"):
        return {"why": "as for HD-MoE over HD2-MoE: Eq. 1-6 with Fig. 9's figures keep HD2-MoE nearer to HD-MoE than the paper's measurements do"}
    if item.endswith("over Tutel-2DH"):
        return {"why": "Eq. 3 without deduplication gives 2DH's time; what Tutel does besides, such as its copies between the two steps, has no figure"}
    if item.endswith("HierMoE"):
        return {"rule": ["within", 0.15], "why": "with the skewed routing Megatron-LM's fullest GPU receives the duplicates of all popular experts, so "
                "deduplication alone gains more than it does in the paper; with a uniform routing it gains what the rows of HD-MoE show"}
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

    def section_v_e():
        """Swaps a pair every so many iterations, on 7 of bench_swap's routings, and takes the mean gain after 200 iterations: even a
        swap every 8 iterations then has 25, as many as most routings have use for."""
        cases = [(f"a swap every {n} iterations", ["--every", str(n)], paper) for n, paper in ((1, 1.17), (2, 1.17), (4, 1.15), (8, 1.13))]
        for what, options, paper in cases + [("plain maximum", ["--max", "1"], 1.13), ("log-sum-exp", ["--max", "2"], 1.16)]:
            options = ["--models", "0", "--stride", "8", "--iterations", "200", *options]
            # It exits with 1 where a routing is slower.
            done = subprocess.run([f"{build}/perf/bench_swap", *options], capture_output=True, text=True, check=False)
            mean = re.search(r"held out: least [\d.]+, mean ([\d.]+)", done.stdout)
            if not mean:
                raise RuntimeError(f"bench_swap: exit {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}")
            yield row(f"Section V-E, HierMoE over HD-MoE, {what}", paper, float(mean[1]), ["points", 0.05], how="closed form",
                      command="build/perf/bench_swap " + " ".join(options), why="the routing is another than in the paper's training")

    if not quick:
        yield Closed(PAPER, table_2)
        yield Closed(PAPER, section_v_e)
        yield Program(PAPER, build, ["perf/hiermoe_tables"], judge=judge)
        run = ["examples/training_run", "--warm", "9", "--rounds", "5", "--steps", "2"]
        yield Program(PAPER, build, [*run, "--data", "even", "--features", "flat,auto"])
        run = ["examples/training_run", "--warm", "40", "--rounds", "5", "--steps", "2", "--keep-places"]
        yield Program(PAPER, build, [*run, "--data", "skewed", "--features", "auto,swap"])
