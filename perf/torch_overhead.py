#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch_overhead.py: compares allreduce through torch.distributed on moeccl with the C call and with gloo, on this machine.

    PYTHONPATH=build/bindings/python LIBMOECCL=build/libmoeccl.so.0 python3 perf/torch_overhead.py [--ranks 2] [--table FILE]

Each figure is the slowest rank's median over rounds of a round's median call (--rounds; in each round the ways take turns). The C
call is moecclAllReduce through ctypes in a loop, on the same communicator and the same memory. Results are checked before they are
timed."""
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

SIZES = [8, 64, 512, 4096, 32768, 262144, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


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
        ways = {"C": lambda: lib.moecclAllReduce(at, at, n, _abi.moecclFloat32, _abi.moecclMax, handle, None),
                "torch": lambda: dist.all_reduce(t, dist.ReduceOp.MAX),
                "async": lambda: dist.all_reduce(t, dist.ReduceOp.MAX, async_op=True).wait(),
                "gloo": lambda: dist.all_reduce(t, dist.ReduceOp.MAX, group=gloo)}
        for name, call in ways.items():
            t.fill_(rank)
            call()
            if not t.eq(size - 1).all():
                raise AssertionError(f"{name} is wrong")
        repeats = max(5, min(400, int(3e7 / (bytes_ + 5e4))))
        found = {name: [] for name in ways}
        for _ in range(rounds):
            for name, call in ways.items():
                dist.barrier()
                for _warm in range(3):
                    call()
                times = []
                for _i in range(repeats):
                    began = time.perf_counter_ns()
                    call()
                    times.append(time.perf_counter_ns() - began)
                slowest = torch.tensor(statistics.median(times) / 1000)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                found[name].append(slowest.item())
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
    lines = [f"{args.ranks} ranks, medians of {args.rounds} alternating rounds, microseconds, {datetime.date.today()}, load "
             f"{os.getloadavg()[1]:.1f} on {os.cpu_count()} cores.", "",
             "| size | C call | torch, moeccl | more than C | torch, async + wait | torch, gloo | gloo / moeccl |", "|-|-|-|-|-|-|-|"]
    ratios = []
    for _ in SIZES:
        bytes_, found = results.get()
        ratios.append(found["gloo"] / found["torch"])
        more = found["torch"] - found["C"]
        lines.append(f"| {text_of(bytes_)} | {found['C']:.1f} | {found['torch']:.1f} | {more:+.1f} ({100 * more / found['C']:+.0f} %) | "
                     f"{found['async']:.1f} | {found['gloo']:.1f} | {ratios[-1]:.2f} |")
    lines.append(f"\nGeometric mean of gloo / moeccl: {math.exp(statistics.mean(map(math.log, ratios))):.2f}")
    print("\n".join(lines))
    if args.table:
        with open(args.table, "w", encoding="utf-8") as out:
            out.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
