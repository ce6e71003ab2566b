#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch_compile.py: compares training steps of examples/pytorch_moe.py's model uncompiled, compiled with a graph that breaks at each MoE
layer, and compiled with fullgraph=True, where the layers are in the graph.

    PYTHONPATH=build/bindings/python LIBMOECCL=build/libmoeccl.so.0 torchrun --nproc-per-node 2 perf/torch_compile.py [--compiler inductor]

Each block of the transformer is compiled by itself, as torchtitan does. The three models start from the same weights, read the same batches, and
take turns step by step, so that a change of the machine's load meets all of them. A figure is the median of the slowest rank. The losses are
compared before anything is printed. Compiling takes minutes with inductor."""
import argparse
import importlib.util
import os
import time
from unittest import mock

import torch
import torch.distributed as dist

FOLDER = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def example():
    spec = importlib.util.spec_from_file_location("pytorch_moe", os.path.join(FOLDER, "examples", "pytorch_moe.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="inductor", help="backend of torch.compile")
    for name, value in (("steps", 40), ("warm-up", 3), ("layers", 4), ("hidden", 256), ("ffn", 512), ("experts", 8), ("top-k", 2), ("batch", 4),
                        ("length", 64), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    options.topology, options.pace, options.algorithm, options.float8, options.sums = None, False, "flat", False, "moeccl"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    import moeccl.torch
    from moeccl.torch import _traced
    source = example()
    # A torch that cannot trace the layers breaks the graph at them.
    kinds = {"uncompiled": {}, "with breaks": {"KNOWN": False}, "fullgraph": {"KNOWN": True}}
    runs = {}
    for kind in kinds:
        runs[kind] = source.Run(options, "moeccl")
        for block in runs[kind].model.blocks if kinds[kind] else ():
            block.compile(backend=options.compiler, fullgraph=kind == "fullgraph")
    began = time.perf_counter()
    for _ in range(options.warm_up + options.steps):
        for kind, run in runs.items():
            with mock.patch.multiple(_traced, **kinds[kind]) if kinds[kind] else mock.patch.dict({}):
                run.step()
        if dist.get_rank() == 0 and len(run.times) == 1:
            print(f"compiled within {time.perf_counter() - began:.0f} s", flush=True)
    results = {kind: run.result() for kind, run in runs.items()}
    if dist.get_rank() == 0:
        expected, times = results["uncompiled"][0], {}
        for kind, (losses, ms) in results.items():
            apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected))
            assert apart < 1e-3, f"the losses of {kind} differ by {apart}"
            times[kind] = ms[options.warm_up:]
            between = sorted(b / a for a, b in zip(times["uncompiled"], times[kind]))
            print(f"{kind}: {source.median(times[kind]):.1f} ms a step, {source.median(between):.2f} of uncompiled in the same turn; losses differ by "
                  f"at most {apart:.1e}", flush=True)
    moeccl.torch.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
