# SPDX-License-Identifier: Apache-2.0
"""MoNTA: the performance model of Eq. 5 to 16 and Table 8."""
from . import Closed, Program, rows_of

PAPER = "MoNTA"
row = rows_of(PAPER, "perf/papers --only monta", "closed form")
INTER = ((8e6, 0.427), (32e6, 0.632), (256e6, 0.741))
INTRA = ((64e6, 0.726), (256e6, 0.776))
COPY = ((64e6, 0.8),)


def table_8():
    """256 MB on 16 A800: t = 8, e = 2, 25 and 200 GB/s; the copy's 0.05 ms at 80 % mean 1.6 TB/s."""
    from moeccl import solve
    both = {"tensor": 8, "expert": 2, "inter_bandwidth": 25e9, "intra_bandwidth": 200e9}
    p = solve.chunk_problem(INTER, INTRA, COPY, bytes=256e6, copy_bandwidth=1.6e12, **both)
    base, o1 = solve.chunk_time(p, "baseline"), solve.chunk_time(p, "o1")
    o2, o3 = solve.chunk_time(p, "o2", 4), solve.chunk_time(p, "o3", 4)
    yield row("Table 8, baseline, ms", 6.909, base / 1e3, ["within", 0.01])
    yield row("Table 8, O1: AlltoAll + AllGather, ms", 2.455, o1 / 1e3, ["within", 0.01])
    yield row("Table 8, O2 in 4 chunks, ms", 0.374 + 4 * (0.385 + 0.05), o2 / 1e3, ["within", 0.01])
    yield row("Table 8, O3 in 4 chunks, ms", 0.374 + 4 * 0.385 + 0.05, o3 / 1e3, ["within", 0.01])
    plain = solve.chunk_problem(bytes=256e6, copy_bandwidth=1e18, **both)
    whole = solve.chunk_time(plain, "baseline")
    all_to_all = whole / 8
    yield row("Eq. 12, AlltoAll over AllGather", 4 / 7, all_to_all / (solve.chunk_time(plain, "o1") - all_to_all), ["within", 0.01])
    yield row("Eq. 13, limit of O3 over baseline", 7 / 32, solve.chunk_time(plain, "o3", 100000) / whole, ["within", 0.01])
    # The printed ratios give the baseline the strategy's own r1.
    yield row("Eq. 14, O1 over baseline at 8K", 0.31, o1 / (base * 0.741 / 0.632), ["within", 0.05])
    yield row("Eq. 15, O2 over baseline at 8K", 0.176, o2 / (base * 0.741 / 0.427), ["within", 0.05])
    yield row("Eq. 16, O3 over baseline at 8K", 0.164, o3 / (base * 0.741 / 0.427), ["within", 0.05])
    # The effect of O1 on a step in which AlltoAll takes 22 %.
    share = 0.22 * o1 / base
    yield row("Fig. 17, end-to-end latency of O1, %", -13.0, 100 * (share - 0.22), ["within", 0.1])
    yield row("AlltoAll's share of the step with O1, %", 10.0, 100 * share / (0.78 + share), ["within", 0.1])


def sources(build, quick):
    yield Closed(PAPER, table_8)
    if not quick:
        yield Program(PAPER, build, ["perf/paper_placement", PAPER])
