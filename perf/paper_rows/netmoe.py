# SPDX-License-Identifier: Apache-2.0
"""NetMoE: the time of its solver and the savings of a re-placement."""
import random
import time

from . import Closed, Program, rows_of

PAPER = "NetMoE"
row = rows_of(PAPER, "perf/papers --only netmoe", "solved")
TABLE_4 = ((2, 0.08), (4, 0.48), (8, 1.48), (16, 10.82), (24, 31.09))


def table_4():
    """Measures solving for 16 devices on 2 nodes, the minimum of 9 runs; the paper's column KM is the limit."""
    from moeccl import solve
    dice = random.Random(4)
    for per_device, km_ms in TABLE_4:
        n = 16 * per_device
        # Each sample prefers a few of the 32 experts.
        gather = []
        for _ in range(n):
            counts = [0] * 32
            liked = dice.sample(range(32), 6)
            for _ in range(2048):
                counts[dice.choice(liked) if dice.random() < 0.5 else dice.randrange(32)] += 1
            gather.append(counts)
        problem = solve.sample_problem(n, 32, 16, 2, gather, beta_intra_us=1 / 400e3, beta_inter_us=1 / 100e3)
        times = []
        for _ in range(9):
            began = time.perf_counter()
            solve.samples(problem)
            times.append(1e3 * (time.perf_counter() - began))
        yield row(f"Table 4, I/J = {per_device}, ms to solve", km_ms, min(times), ["at most", km_ms])


def sources(build, quick):
    yield Closed(PAPER, table_4)
    if not quick:
        yield Program(PAPER, build, ["perf/paper_placement", PAPER])
        yield Program(PAPER, build, ["examples/training_run", "--data", "even", "--features", "flat,flat re-placing", "--warm", "9", "--rounds", "5", "--steps", "2"])
