#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch_overhead.py: compares allreduce through torch.distributed on moeccl with the C call and with gloo, on this machine.

    PYTHONPATH=build/bindings/python LIBMOECCL=build/libmoeccl.so.0 python3 perf/torch_overhead.py [--ranks 2] [--table FILE]

The C call is moecclAllReduce through ctypes, on the same communicator and the same memory. It, the call through torch and the C call once more
take turns call by call, in an order that rotates, so that a change of the cores' speed meets all of them alike. "more than C" is the median of the
differences within a turn, "C against C" the same of the two C calls: what differs where nothing differs. The asynchronous call and gloo run in
blocks of their own. Each figure is the median over rounds (--rounds), of the slowest rank or, for differences, of the mean of the ranks: the
largest of several differences would be above 0 where there is none. Results are checked before they are timed."""
import argparse
import datetime
import math
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing

DIFFERENCES = ("more", "null")
SIZES = [8, 64, 512, 4096, 32768, 262144, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def in_turns(ways, repeats):
    """Calls the ways one after another, `repeats` times after a warm-up. Returns the microseconds of each way's calls."""
    names, times = list(ways), {name: [] for name in ways}
    for i in range(-3, repeats):
        for k in range(len(names)):
            name = names[(i + k) % len(names)]
            began = time.perf_counter_ns()
            ways[name]()
            if i >= 0:
                times[name].append((time.perf_counter_ns() - began) / 1000)
    return times


def figures_of(times):
    """Returns medians of the calls, and of the differences within a turn."""
    def more(name):
        return statistics.median(a - b for a, b in zip(times[name], times["C"]))
    return {"C": statistics.median(times["C"]), "torch": statistics.median(times["torch"]), "more": more("torch"), "null": more("C again")}


def rank_of(rank, size, where, rounds, results):
    torch.set_num_threads(1)
    import moeccl.distributed  # noqa: F401
    from moeccl import _abi
    from moeccl._library import lib
    dist.init_process_group("moeccl", store=dist.FileStore(where, size), rank=rank, world_size=size)
    gloo = dist.new_group(backend="gloo")
    handle = dist.group.WORLD._get_backend(torch.device("cpu")).comm_handle
    for bytes_ in SIZES:
        n = bytes_ // 4
        t = torch.ones(n)
        at = t.data_ptr()
        c_call = lambda: lib.moecclAllReduce(at, at, n, _abi.moecclFloat32, _abi.moecclMax, handle, None)  # noqa: E731
        turns = {"C": c_call, "torch": lambda: dist.all_reduce(t, dist.ReduceOp.MAX), "C again": c_call}
        blocks = {"async": lambda: dist.all_reduce(t, dist.ReduceOp.MAX, async_op=True).wait(),
                  "gloo": lambda: dist.all_reduce(t, dist.ReduceOp.MAX, group=gloo)}
        for name, call in (turns | blocks).items():
            t.fill_(rank)
            call()
            if not t.eq(size - 1).all():
                raise AssertionError(f"{name} is wrong")
        repeats = max(5, min(400, int(3e7 / (bytes_ + 5e4))))
        found = {}
        for _ in range(rounds):
            dist.barrier()
            figures = figures_of(in_turns(turns, max(40, repeats)))
            for name, call in blocks.items():
                dist.barrier()
                figures[name] = statistics.median(in_turns({name: call}, repeats)[name])
            slowest = torch.tensor(list(figures.values()), dtype=torch.float64)
            mean = slowest / size
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(mean)
            for name, most, us in zip(figures, slowest.tolist(), mean.tolist()):
                found.setdefault(name, []).append(us if name in DIFFERENCES else most)
        if rank == 0:
            results.put((bytes_, {name: statistics.median(v) for name, v in found.items()}))
    dist.destroy_process_group()


def text_of(bytes_):
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if bytes_ >= unit:
            return f"{bytes_ // unit} {name}"
    return f"{bytes_} B"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--table")
    args = parser.parse_args()
    fork = torch.multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    with tempfile.TemporaryDirectory() as where:
        ranks = [fork.Process(target=rank_of, args=(r, args.ranks, os.path.join(where, "store"), args.rounds, results))
                 for r in range(args.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        return 1
    lines = [f"{args.ranks} ranks, medians of {args.rounds} rounds, microseconds, {datetime.date.today()}, load "
             f"{os.getloadavg()[1]:.1f} on {os.cpu_count()} cores.", "",
             "| size | C call | torch, moeccl | more than C | C against C | torch, async + wait | torch, gloo | gloo / moeccl |", "|-|-|-|-|-|-|-|-|"]
    ratios = []
    for _ in SIZES:
        bytes_, found = results.get()
        ratios.append(found["gloo"] / found["torch"])
        shares = (f"{found[name]:+.1f} ({100 * found[name] / found['C']:+.1f} %)" for name in DIFFERENCES)
        lines.append(f"| {text_of(bytes_)} | {found['C']:.1f} | {found['torch']:.1f} | {' | '.join(shares)} | {found['async']:.1f} | "
                     f"{found['gloo']:.1f} | {ratios[-1]:.2f} |")
    lines.append(f"\nGeometric mean of gloo / moeccl: {math.exp(statistics.mean(map(math.log, ratios))):.2f}")
    print("\n".join(lines))
    if args.table:
        with open(args.table, "w", encoding="utf-8") as out:
            out.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
