# SPDX-License-Identifier: Apache-2.0
"""Measures moeccl.jax: an all_reduce inside jax.jit beside the call of the Python package, and dispatch and combine beside JAX's own
all_to_all over gloo, on the CPU. It needs JAX.

    LIBMOECCL=build/libmoeccl.so PYTHONPATH=build/bindings/python python3 perf/jax_bench.py [--ranks 2] [--runs 5] [--tokens 1024] ...

Ranks are processes. The first table has microseconds, the second one milliseconds. A figure is the median of --runs runs, of which each has the
median (in brackets: the least) of --steps steps of the slowest rank; the implementations take turns. JAX's own way pads each expert's rows to a
capacity factor of 1.25 and drops the rest; MoECCL drops none."""
import argparse
import functools
import multiprocessing
import os
import socket
import statistics
import time

SIZES = (8, 4096, 65536, 1 << 20, 4 << 20)
IN_A_LOOP = 100


def timed(step, steps, before=lambda: None):
    """Returns the median and the least seconds of step(); before() lets all ranks begin together."""
    seconds = []
    for _ in range(steps):
        before()
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds), min(seconds)


def all_reduces(args, comm, jax, jnp, np, moeccl):
    """Returns the figures of each size: the Python package's call, a call in a loop of one program, a program of one call, one of none."""
    rows = []
    for size in SIZES:
        x = jnp.ones(max(1, size // 4), jnp.float32)
        there, back = np.ones(x.size, np.float32), np.empty(x.size, np.float32)
        loop = jax.jit(lambda x: jax.lax.fori_loop(0, IN_A_LOOP, lambda _, u: moeccl.jax.all_reduce(u, comm, moeccl.AVG), x))
        one = jax.jit(lambda x: moeccl.jax.all_reduce(x, comm))
        none = jax.jit(lambda x: x + 1)
        for program in (loop, one, none):
            jax.block_until_ready(program(x))
        looped = timed(lambda: jax.block_until_ready(loop(x)), 5)
        rows.append([timed(lambda: comm.all_reduce(there, back), args.steps), tuple(s / IN_A_LOOP for s in looped),
                     timed(lambda: jax.block_until_ready(one(x)), args.steps), timed(lambda: jax.block_until_ready(none(x)), args.steps)])
    return rows


def choices(args, jax, jnp, rank):
    x = jax.random.normal(jax.random.PRNGKey(rank), (args.tokens, args.hidden))
    scores = jax.random.normal(jax.random.PRNGKey(rank + 1000), (args.tokens, args.experts))
    weights, index = jax.lax.top_k(jax.nn.softmax(scores), args.top_k)
    return x, index.astype(jnp.int32), weights


def programs(jax, exchange):
    """Returns a forward pass, and one with the backward pass to tokens and weights."""
    return jax.jit(exchange), jax.jit(jax.grad(lambda x, i, w: (exchange(x, i, w) ** 2).sum(), (0, 2)))


def ours(args, rank, address, results):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import moeccl
    import moeccl.jax
    with moeccl.Comm(args.ranks, address, rank) as comm:
        rows = all_reduces(args, comm, jax, jnp, np, moeccl)
        ep = moeccl.jax.ExpertParallel(comm, args.experts, args.top_k, args.hidden, args.tokens)

        def exchange(x, i, w):
            rows, _, routing = ep.dispatch(x, i, w)
            return ep.combine(rows, routing)

        x, i, w = choices(args, jax, jnp, rank)
        difference = float(jnp.abs(exchange(x, i, w) - x * w.sum(1, keepdims=True)).max())
        if difference > 1e-5:
            raise SystemExit(f"dispatch and combine are wrong by {difference}")
        together = functools.partial(comm.all_reduce, np.ones(1, np.float32))
        for program in programs(jax, exchange):
            jax.block_until_ready(program(x, i, w))
            rows.append([timed(lambda p=program: jax.block_until_ready(p(x, i, w)), args.steps, together)])
        ep.close()
    results.put(rows)


def gloos(args, rank, address, results):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, args.ranks, rank)
    split, n, k, hidden = PartitionSpec("r"), args.ranks, args.top_k, args.hidden
    mesh = Mesh(jax.devices(), ("r",))
    whole = [jax.make_array_from_process_local_data(NamedSharding(mesh, split), np.asarray(a)) for a in choices(args, jax, jnp, rank)]
    room = int(args.tokens * k / args.experts * 1.25)

    def exchange(x, i, w):
        expert = i.reshape(-1)
        place = jnp.cumsum(jax.nn.one_hot(expert, args.experts, dtype=jnp.int32), 0)[jnp.arange(expert.size), expert] - 1
        fits = place < room
        rows = jnp.zeros((args.experts, room, hidden)).at[expert, jnp.where(fits, place, room)].set(x[jnp.arange(expert.size) // k], mode="drop")
        there = jax.lax.all_to_all(rows.reshape(n, -1, hidden), "r", 0, 0)
        back = jax.lax.all_to_all(there, "r", 0, 0).reshape(args.experts, room, hidden)
        mine = jnp.where(fits[:, None], back[expert, jnp.minimum(place, room - 1)], 0).reshape(-1, k, hidden)
        return (mine * w[..., None]).sum(1)

    shard = functools.partial(jax.shard_map, mesh=mesh)
    sums = jax.jit(shard(lambda v: jax.lax.psum(v, "r"), in_specs=split, out_specs=PartitionSpec()))
    one = jax.make_array_from_process_local_data(NamedSharding(mesh, split), np.ones(1, np.float32))
    rows = []
    for program in programs(jax, shard(exchange, in_specs=(split,) * 3, out_specs=split)):
        jax.block_until_ready(program(*whole))
        rows.append([timed(lambda p=program: jax.block_until_ready(p(*whole)), args.steps, lambda: jax.block_until_ready(sums(one)))])
    results.put(rows)


def run(args, target, address):
    """Returns the slowest rank's figures, each with its median and least seconds."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=target, args=(args, rank, address, results)) for rank in range(args.ranks)]
    for process in ranks:
        process.start()
    all_rows = [results.get(timeout=300) for _ in ranks]
    for process in ranks:
        process.join()
    return [[tuple(max(of) for of in zip(*cells)) for cells in zip(*rows)] for rows in zip(*all_rows)]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def cell(figures, unit, digits):
    """figures: one for each run."""
    return f"{unit * statistics.median(f[0] for f in figures):.{digits}f} ({unit * min(f[1] for f in figures):.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 2), ("runs", 5), ("steps", 60), ("tokens", 1024), ("hidden", 256), ("experts", 8), ("top-k", 2)):
        parser.add_argument("--" + name, type=int, default=value)
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    import moeccl
    mine, theirs = [], []
    for _ in range(args.runs):
        mine.append(run(args, ours, bytes(moeccl.unique_id())))
        theirs.append(run(args, gloos, f"127.0.0.1:{free_port()}"))
    print("| all_reduce of | `comm.all_reduce` | in a loop of one program | a program of one call | a program that adds 1 |\n|-|-|-|-|-|")
    for at, size in enumerate(SIZES):
        print(f"| {size} B | " + " | ".join(cell([r[at][column] for r in mine], 1e6, 1) for column in range(4)) + " |")
    print("\n| dispatch and combine | moeccl.jax | all_to_all over gloo |\n|-|-|-|")
    for at, name in enumerate(("forward", "forward and backward")):
        print(f"| {name} | {cell([r[len(SIZES) + at][0] for r in mine], 1e3, 2)} | {cell([r[at][0] for r in theirs], 1e3, 2)} |")
    with open("/proc/loadavg", encoding="ascii") as load:
        print(f"\n{args.ranks} ranks on {len(os.sched_getaffinity(0))} cores, load {load.read().split()[0]}, {time.strftime('%F %T')}")


if __name__ == "__main__":
    main()
