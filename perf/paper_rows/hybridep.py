# SPDX-License-Identifier: Apache-2.0
"""HybridEP: the stream model of Eq. 1 to 12, Algorithm 1's counts, and the large-scale figures."""
import re
import subprocess

from . import Closed, Program, rows_of

PAPER = "HybridEP"
row = rows_of(PAPER, "perf/papers --only hybridep", "closed form")


def table_4():
    """Finds the p that minimises Eq. 10, rounded to the nearest of the sizes 1, 2, 4 and 8 of a node of 8 GPUs."""
    from moeccl import solve
    why = ("Eq. 11 with the printed 0.049 ms before the experts gives 0.98 and 0.95; with 0.49 ms it gives the printed optima, so we "
           "consider the printed figure a misprint")
    for name, p_paper, latency, data, expert, more in (
            ("Mix-1", 0.75, 0.049e-3, 8e6, 4.7e6, {"why": why}), ("Mix-2", 0.5, 0.049e-3, 8e6, 2.35e6, {"why": why}),
            ("Mix-1 with 0.49 ms", 0.75, 0.49e-3, 8e6, 4.7e6, {}), ("Mix-2 with 0.49 ms", 0.5, 0.49e-3, 8e6, 2.35e6, {}),
            ("AG-only-1", 0.0, 0.099e-3, 3e6, 0.094e6, {}), ("AG-only-2", 0.0, 0.099e-3, 3e6, 0.047e6, {})):
        p, _ = solve.domain_proportion(8, 16e9, latency, data, expert)
        nearest = min((0.0, 0.5, 0.75, 1.0), key=lambda c: abs(c - p))
        yield row(f"Table IV, {name}, p", p_paper, nearest, ["equal"], **more)


TABLE_7 = {8: ((56, 24, 8, 0), (0, 8, 24, 56)), 16: ((240, 112, 48, 16, 0), (0, 16, 48, 112, 240)),
           32: ((992, 480, 224, 96, 32, 0), (0, 32, 96, 224, 480, 992))}


def table_7():
    """Evaluates Algorithm 1 for each pair of GPUs."""
    from moeccl import solve
    for gpus, (all_to_all, all_gather) in TABLE_7.items():
        problem = solve.domain_problem([1e9], scale=[gpus])
        counted = []
        for k in range(len(all_to_all)):
            links = [solve.domain_link(problem, [1 << k], 0, m, n) for m in range(gpus) for n in range(gpus)]
            counted.append((links.count("all_to_all"), links.count("all_gather")))
        yield row(f"Table VII, EP size {gpus}, AlltoAll", list(all_to_all), [c[0] for c in counted], ["equal"])
        yield row(f"Table VII, EP size {gpus}, AllGather", list(all_gather), [c[1] for c in counted], ["equal"])


def judge(given):
    """Returns the rules for the rows of hybridep_paper, which simulate plans, and for those of fused_perf."""
    item, paper = given["item"], given["paper_value"]
    if item.endswith("forward"):
        return None  # the paper's figures are whole iterations: docs/performance-papers.md
    if item.endswith("compressed return"):  # an extension of ours, with goals of this project
        return {"paper_value": None, "rule": ["at least", 2.5 if "Cluster-L, 48" in item else 1.25], "why": "encoded gradients return to their owners "
                "(moecclGradientReturnReduce), which the paper does not do"}
    if item.startswith("Fig. 15 a"):
        return {"rule": ["at least", 0.255], "why": "an update saves the second read of the expert; here the scan and the choice of the largest residuals, "
                "which remain, take more time than that"}
    if item.startswith("Fig. 15 b"):
        return {"rule": ["at least", 0.3825], "why": "the processor's time on a shared machine"}
    if item.startswith("Table VI"):
        rule = ["at least", round(0.95 * paper, 3)]
        if "48" in item:
            layer_ms = {"Cluster-S": "27 ms in each of 12 layers", "Cluster-M": "283 ms in each of 12 layers", "Cluster-L": "439 ms in each of 16 layers"}
            return {"rule": rule, "why": f'the paper\'s two columns differ by {layer_ms[item.split(", ")[1]]}, while our gather of experts as they are takes '
                    f'{given["gather_ms"]:g} ms, so that Partition, the slower column, is faster here (each expert enters a data centre once); gradients return '
                    "as they are in both columns, which bounds the ratio at 2 (docs/performance-papers.md)"}
        return {"rule": rule, "why": "gradients return uncompressed over the same links, in both columns, which bounds the ratio near 2; for the forward pass "
                "alone it is larger (docs/performance-papers.md)"}
    if item.startswith("Table V,"):
        return {"rule": ["at least", round(0.95 * paper, 3)]}
    if item.startswith("Fig. 13"):
        more = {} if given["ours"] >= 1.18 else {
            "why": "experts of 8 MB and more are not worth moving without the codec on 10 Gbit/s: there, deduplication alone makes a layer 1.12 to 1.29 times as "
                   "fast, and the rest of the iteration is the same on both sides. How much of a gather the paper's work before the experts hides (Eq. 11) is not printed"}
        return {"rule": ["in", 1.18, 2.57]} | more
    return {"rule": ["within", 0.15], "why": "the paper does not print its configuration, and domains of 400 do not divide 1000 data centres: in plans the slowest "
            "rank, in the domain of 200, sends 0.80 of its rows to other domains instead of 0.60, with which Eq. 10 gives 1.18 at 1 Gbps"}


def sources(build, quick):
    def figure_17():
        """Evaluates Eq. 10 at 1000 data centres, with the data sizes that docs/solvers.md fits to the two curves' ends."""
        done = subprocess.run([f"{build}/perf/bench_fig17"], capture_output=True, text=True, check=True)
        paper = {("Fixed domain size", "1"): 1.45, ("Fixed domain size", "25.6"): 1.05, ("Fixed p", "1"): 3.76, ("Fixed p", "25.6"): 1.31}
        for part, gbps, ours in re.findall(r"^(Fixed [a-z ]+), ([\d.]+) Gbps, 1000 data centres: ([\d.]+)$", done.stdout, re.M):
            if (part, gbps) in paper:
                yield row(f"Fig. 17, {part.lower()}, 1000 data centres, {gbps} Gbps", paper[part, gbps], float(ours), ["within", 0.02], how="fitted",
                          command="build/perf/bench_fig17")

    yield Closed(PAPER, table_4)
    yield Closed(PAPER, table_7)
    if not quick:
        yield Closed(PAPER, figure_17)
        for part in ("Table V", "Table VI", "Fig. 13", "Fig. 17a"):
            yield Program(PAPER, build, ["studies/hybridep_paper", "--moeccl", build + "/tools/moeccl", "--only", part], judge=judge)
        yield Program(PAPER, build, ["perf/fused_perf"], judge=judge)
