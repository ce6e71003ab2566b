#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures moeccl.eplb on synthetic loads: balance (mean load of a GPU / load of the fullest, each summed over the layers), its upper
bound, time, and experts that GPUs have to receive when loads drift. With --upstream it runs DeepSeek's eplb.py beside (which needs torch).

  PYTHONPATH=build/bindings/python python3 perf/eplb_bench.py [--layers 58] [--upstream EPLB/eplb.py] [--drift]

Loads of a layer of E experts (--seed): uniform on 0 to 1; zipf:A, 1 / place^A times 0.8 to 1.2, at random places; clustered, 0.2 to 1 times
0.3 to 4.3 for each eighth of the experts; even, the normal deviation of a gate that is fair to 8192 tokens with 8 experts each. A time is
the least of --runs of this thread's processor time, for all layers and with the maps; torch uses one thread. A drift multiplies each load
by e^(0.1 x) at each of five steps, x normally distributed."""
import argparse
import gc
import importlib.util
import math
import random
import time

from moeccl import eplb

# experts, slots, groups, nodes, GPUs. 1 group on several nodes: the global policy.
SHAPES = {"V3 prefill, EP32": (256, 288, 8, 4, 32), "EP32": (256, 288, 1, 4, 32), "EP64": (256, 320, 1, 8, 64), "EP96": (256, 288, 1, 12, 96),
          "EP128": (256, 512, 1, 16, 128), "V3 decode, EP144": (256, 288, 1, 18, 144), "EP320": (256, 320, 1, 40, 320),
          "64 experts, EP16": (64, 96, 8, 2, 16), "16 experts, EP8": (16, 24, 1, 1, 8)}
WORKLOADS = ("even", "uniform", "zipf:0.5", "zipf:0.8", "zipf:1.2", "clustered")


def layer(workload, n_experts, rng):
    """Returns one layer's loads."""
    if workload == "even":
        mean = 8192 * 8 / n_experts
        return [max(0.0, rng.gauss(mean, math.sqrt(mean))) for _ in range(n_experts)]
    if workload == "uniform":
        return [rng.random() for _ in range(n_experts)]
    if workload == "clustered":
        heat = [0.3 + 4 * rng.random() ** 2 for _ in range(8)]
        return [(0.2 + 0.8 * rng.random()) * heat[e * 8 // n_experts] for e in range(n_experts)]
    exponent = float(workload.partition(":")[2])
    loads = [(0.8 + 0.4 * rng.random()) / place ** exponent for place in range(1, n_experts + 1)]
    rng.shuffle(loads)
    return loads


def balance(weight, physical, n_gpus):
    """Returns the balance of a placement, counted here and not by the solver."""
    mean = fullest = 0.0
    for loads, slots in zip(weight, physical):
        share = [load / max(1, slots.count(e)) for e, load in enumerate(loads)]
        width = len(slots) // n_gpus
        gpus = [sum(share[e] for e in slots[g * width:(g + 1) * width]) for g in range(n_gpus)]
        mean, fullest = mean + sum(gpus) / n_gpus, fullest + max(gpus)
    return mean / fullest


def moved(before, after, n_gpus):
    """Returns how many experts GPUs have to receive."""
    width = len(after[0]) // n_gpus
    return sum(len(set(new[at:at + width]) - set(old[at:at + width]))
               for old, new in zip(before, after) for at in range(0, len(new), width))


def least_ms(run, runs):
    """Returns the result and the least milliseconds, without Python's collection of garbage, which depends on what was done before."""
    best = math.inf
    for _ in range(runs):
        gc.collect()
        gc.disable()
        begin = time.thread_time()
        result = run()
        best = min(best, (time.thread_time() - begin) * 1e3)
        gc.enable()
    return result, best


def upstream_of(path):
    """Returns EPLB's function on lists, with only the maps of slots, or None."""
    if path is None:
        return None
    import torch
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("eplb", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda weight, *shape: module.rebalance_experts(torch.tensor(weight, dtype=torch.float64), *shape)[0].tolist()


def compare(args, theirs):
    print("| shape | loads | EPLB | moeccl | bound | EPLB ms | moeccl ms |\n|-|-|-|-|-|-|-|")
    for name, shape in SHAPES.items():
        for workload in WORKLOADS:
            rng = random.Random(args.seed)
            weight = [layer(workload, shape[0], rng) for _ in range(args.layers)]
            ours, ms = least_ms(lambda: eplb.rebalance(weight, *shape[1:]), args.runs)
            reached = balance(weight, ours.physical_to_logical_map, shape[4])
            assert abs(reached - ours.answer.balance) < 1e-9, "the solver counts another balance"
            greedy, slow = ours.answer.balance_greedy, "-"
            if theirs is not None:
                placed, their_ms = least_ms(lambda: theirs(weight, *shape[1:]), args.runs)
                greedy, slow = balance(weight, placed, shape[4]), f"{their_ms:.0f}"
            print(f"| {name} | {workload} | {greedy:.4f} | {reached:.4f} | {ours.answer.balance_bound:.4f} | {slow} | {ms:.0f} |", flush=True)


def drift(args, theirs):
    print("| shape | method | balance | experts received per layer and step | ms |\n|-|-|-|-|-|")
    costs = (0.0, 0.0003, 0.001, 0.01)  # of a move, as a share of a GPU's mean load
    for name in ("V3 prefill, EP32", "EP32", "EP64", "V3 decode, EP144"):
        shape = SHAPES[name]
        rng = random.Random(args.seed)
        weight = [layer("zipf:0.8", shape[0], rng) for _ in range(args.layers)]
        steps = []
        for _ in range(5):
            weight = [[load * math.exp(0.1 * rng.gauss(0, 1)) for load in loads] for loads in weight]
            steps.append(weight)
        mean = sum(map(sum, weight)) / args.layers / shape[4]
        methods = {"no expert moves": lambda w, old: old}
        methods["EPLB"] = (lambda w, old: theirs(w, *shape[1:])) if theirs is not None else (
            lambda w, old: eplb.rebalance(w, *shape[1:], max_work=-1).physical_to_logical_map)
        for cost in costs:
            methods[f"moeccl, price {100 * cost:g} %"] = lambda w, old, c=cost * mean: eplb.rebalance(
                w, *shape[1:], current=old, move_cost=c).physical_to_logical_map
        for method, run in methods.items():
            placed = run(steps[0], eplb.rebalance(steps[0], *shape[1:]).physical_to_logical_map)
            received, reached, ms = 0, 0.0, 0.0
            for weight in steps[1:]:
                after, taken = least_ms(lambda: run(weight, placed), 1)
                received, ms, placed = received + moved(placed, after, shape[4]), ms + taken, after
                reached += balance(weight, after, shape[4])
            n = len(steps) - 1
            print(f"| {name} | {method} | {reached / n:.4f} | {received / n / args.layers:.1f} | {ms / n:.0f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--upstream", help="DeepSeek's eplb.py")
    parser.add_argument("--drift", action="store_true", help="follow drifting loads instead")
    args = parser.parse_args()
    (drift if args.drift else compare)(args, upstream_of(args.upstream))


if __name__ == "__main__":
    main()
