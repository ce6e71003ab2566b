# SPDX-License-Identifier: Apache-2.0
"""Runs DeepEP's own tests, unchanged, against bindings/deep_ep on CPU tensors: test_intranode.py and test_low_latency.py of v1.2.1;
test_hybrid_ep.py, test_graphed_hybrid_ep.py and test_low_latency.py (nvfp4) of the branch hybrid-ep; and of the branch main ElasticBuffer's
tests (elastic) and test_low_latency.py --shrink-test (shrink), in which ranks 1, 3 and 5 leave.

    python3 tests/torch/run_deep_ep_suite.py CHECKOUT [--only intranode|low_latency|hybrid|graphed_hybrid|nvfp4|elastic|shrink] ...

CHECKOUT is a clone of github.com/deepseek-ai/DeepEP, or its git directory. Needs torch, moeccl and deep_ep (in the tree
PYTHONPATH=build/bindings/python:bindings/deep_ep). This process stands in for CUDA: tensors that a test asks for on "cuda" are made
on the CPU, torch.cuda's events are clocks, what a test captures in a CUDA graph runs at once and is not replayed, process groups
are gloo's, and benchmarks repeat less often. All assertions are the tests' own. Exits with 77 where torch or the checkout is missing."""
import argparse
import contextlib
import math
import os
import runpy
import subprocess
import sys
import tempfile
import time

import deep_ep_elastic_suite as elastic

# By the name of --only: where a test lies in the checkout, and its file.
SUITES = {"intranode": ("v1.2.1", "test_intranode.py"), "low_latency": ("v1.2.1", "test_low_latency.py"),
          "hybrid": ("hybrid-ep", "test_hybrid_ep.py"), "graphed_hybrid": ("hybrid-ep", "test_graphed_hybrid_ep.py"),
          "nvfp4": ("hybrid-ep", "test_low_latency.py")}


def skip(reason):
    print(f"skipped: {reason}", file=sys.stderr)
    sys.exit(77)


def extract(checkout, revision, folder):
    """Writes the tests of a revision into `folder`, outside this repository; they import each other."""
    for name in [file for of, file in SUITES.values() if of == revision] + ["utils.py"]:
        extract_file(checkout, revision, f"tests/{name}", os.path.join(folder, name))


def extract_file(checkout, revision, path, target):
    for where in (revision, f"origin/{revision}"):  # a clone has branches only there
        shown = subprocess.run(["git", "-C", checkout, "-c", "safe.directory=*", "show", f"{where}:{path}"], capture_output=True)
        if shown.returncode == 0:
            break
    else:
        skip(f"{checkout} has no {revision}:{path}: {shown.stderr.decode().strip()}")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target, "wb") as out:
        out.write(shown.stdout)


class Clock:
    """torch.cuda.Event on a CPU, where every earlier call has already finished."""

    def __init__(self, enable_timing=False):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, later):
        return (later.at - self.at) * 1e3


class Graph:
    """torch.cuda.CUDAGraph, whose work has run when it was captured."""

    def replay(self):
        pass


def stand_in_for_cuda():
    import torch
    import torch.distributed as dist
    import torch.multiprocessing
    import engines

    class CpuForCuda(engines.CpuForCuda):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            # The product that keeps a GPU busy during communication takes minutes here.
            if function is torch.randn and args and args[0] == (8192, 8192):
                args = ((256, 256), )
            # Zeros that only flush a GPU's cache.
            if function is torch.zeros and math.prod(args[0] if isinstance(args[0], tuple) else args[:1]) >= 1 << 25:
                args = (1, )
            return super().__torch_function__(function, types, args, kwargs)

    def in_rank(rank, test_loop, *args):
        torch.set_num_threads(1)
        with CpuForCuda():
            test_loop(rank, *args)

    def spawn(test_loop, args=(), nprocs=1):
        torch.multiprocessing.start_processes(in_rank, (test_loop, ) + args, nprocs, start_method="fork")

    init = dist.init_process_group

    def init_process_group(backend=None, device_id=None, **params):
        init(backend="gloo", **params)

    gather = dist.all_gather_into_tensor

    def all_gather_into_tensor(out, mine, *args, **kwargs):
        gather(out.view(-1, *mine.shape[1:]), mine, *args, **kwargs)  # gloo only accepts concatenated blocks

    dist.all_gather_into_tensor = all_gather_into_tensor
    torch.multiprocessing.spawn = spawn
    dist.init_process_group = init_process_group
    torch.set_default_device = lambda device: None
    torch.cuda.set_device = torch.cuda.synchronize = lambda *_: None
    torch.cuda.Event = Clock
    torch.cuda.Stream = torch.cpu.Stream
    torch.cuda.stream = torch.cuda.graph = lambda *_: contextlib.nullcontext()
    torch.cuda.CUDAGraph = Graph
    torch.cuda.profiler.start = torch.cuda.profiler.stop = lambda: None


def shorten_benchmarks():
    import utils
    whole = utils.bench

    def bench(fn, num_warmups=2, num_tests=5, post_fn=None):
        return whole(fn, num_warmups, num_tests, post_fn)

    def bench_kineto(fn, kernel_names, num_kernels_per_period=1, **_):
        """Runs the calls once; there are no kernels to time separately."""
        fn()
        nan = float("nan")
        return tuple(nan if num_kernels_per_period == 1 else [nan] * num_kernels_per_period for _ in kernel_names)

    utils.bench, utils.bench_kineto = bench, bench_kineto


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout")
    parser.add_argument("--only", choices=(*SUITES, "elastic", "shrink"))
    parser.add_argument("--elastic-test", help="with --only elastic: ep, barrier, engram, pp or agrs, to run only this one")
    for name, default in (("processes", 2), ("tokens", 64), ("experts", 16), ("topk", 4)):
        parser.add_argument(f"--num-{name}", type=int, default=default)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--use-logfmt", action="store_true")
    args = parser.parse_args()
    try:
        import torch  # noqa: F401
    except ImportError as failure:
        skip(f"no torch: {failure}")
    import deep_ep
    print(f"deep_ep is {os.path.dirname(deep_ep.__file__)}", flush=True)
    stand_in_for_cuda()
    sys.dont_write_bytecode = True
    for test, (revision, file) in SUITES.items():
        if args.only not in (None, test):
            continue
        with tempfile.TemporaryDirectory() as folder:
            extract(args.checkout, revision, folder)
            run_in(folder, file, arguments_of(test, args))
    if args.only in (None, "elastic", "shrink"):
        run_main(args)


def run_main(args):
    """Runs the tests of the branch main."""
    with tempfile.TemporaryDirectory() as folder:
        for path in elastic.TESTS + elastic.MODULES:
            extract_file(args.checkout, elastic.REVISION, path, os.path.join(folder, path))
        elastic.stand_in()
        elastic.lend_modules(folder)
        for path, argv in elastic.runs(args):
            kind = "shrink" if "--shrink-test" in argv else "elastic"
            if args.only in (None, kind) and args.elastic_test in (None, argv[0][len("test_"):-len(".py")]):
                run_file(os.path.join(folder, path, argv[0]), argv)


def arguments_of(test, args):
    """Returns the arguments of a test. Those of branch hybrid-ep take most of theirs from the environment."""
    # UE8M0 scales, which test_low_latency.py always tries, and hybrid-ep's fp8 need rows of 512 elements.
    hidden = args.hidden if test == "intranode" else -(-args.hidden // 512) * 512
    count = ["--num-processes", str(args.num_processes)]
    if "hybrid" in test:
        os.environ.update(HIDDEN_DIM=str(hidden), MAX_NUM_OF_TOKENS_PER_RANK=str(args.num_tokens),
                          NUM_TOKENS_PER_RANK=str(args.num_tokens), TOPK=str(args.num_topk),
                          NUM_LOCAL_EXPERTS=str(args.num_experts // args.num_processes), ITERATIONS="1")
        return count
    return count + ["--num-tokens", str(args.num_tokens), "--hidden", str(hidden), "--num-experts", str(args.num_experts),
                    "--num-topk", str(args.num_topk)] + ["--use-logfmt"] * (test == "low_latency" and args.use_logfmt)


def run_in(folder, file, arguments):
    sys.path.insert(0, folder)
    sys.modules.pop("utils", None)  # each revision has its own
    shorten_benchmarks()
    run_file(os.path.join(folder, file), [file] + arguments)
    sys.path.remove(folder)


def run_file(path, argv):
    began, sys.argv = time.monotonic(), argv
    runpy.run_path(path, run_name="__main__")  # raises the error of a rank that failed
    print(f"{' '.join(argv)}: passed in {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
