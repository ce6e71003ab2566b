# SPDX-License-Identifier: Apache-2.0
"""Runs DeepEP v1.2.1's own test_intranode.py and test_low_latency.py, unchanged, against bindings/deep_ep on CPU tensors.

    python3 tests/torch/run_deep_ep_suite.py CHECKOUT [--only intranode|low_latency] [--num-processes 2] [--hidden 256] ...

CHECKOUT is a clone of github.com/deepseek-ai/DeepEP, or its git directory; the tests are taken from its tag v1.2.1. Needs torch,
moeccl and deep_ep (in the tree PYTHONPATH=build/bindings/python:bindings/deep_ep). This process stands in for CUDA: tensors that
a test asks for on "cuda" are made on the CPU, torch.cuda's events are clocks, process groups are gloo's, and benchmarks repeat
less often. All assertions are the tests' own. Exits with 77 where torch or the checkout is missing."""
import argparse
import os
import runpy
import subprocess
import sys
import tempfile
import time

TAG = "v1.2.1"
FILES = ("test_intranode.py", "test_low_latency.py", "utils.py")


def skip(reason):
    print(f"skipped: {reason}", file=sys.stderr)
    sys.exit(77)


def extract(checkout, folder):
    """Writes the tests of the tag into `folder`, outside this repository."""
    for name in FILES:
        shown = subprocess.run(["git", "-C", checkout, "-c", "safe.directory=*", "show", f"{TAG}:tests/{name}"],
                               capture_output=True)
        if shown.returncode != 0:
            skip(f"{checkout} has no {TAG}:tests/{name}: {shown.stderr.decode().strip()}")
        with open(os.path.join(folder, name), "wb") as out:
            out.write(shown.stdout)


class Clock:
    """torch.cuda.Event on a CPU, where every earlier call has already finished."""

    def __init__(self, enable_timing=False):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, later):
        return (later.at - self.at) * 1e3


def stand_in_for_cuda():
    import torch
    import torch.distributed as dist
    import torch.multiprocessing
    from torch.overrides import TorchFunctionMode

    class CpuForCuda(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            # The product that keeps a GPU busy during communication takes minutes here.
            if function is torch.randn and args and args[0] == (8192, 8192):
                args = ((256, 256), )
            return function(*args, **kwargs)

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

    def all_gather_into_tensor(out, mine, **kwargs):
        gather(out.view(-1, *mine.shape[1:]), mine, **kwargs)  # gloo only accepts concatenated blocks

    dist.all_gather_into_tensor = all_gather_into_tensor
    torch.multiprocessing.spawn = spawn
    dist.init_process_group = init_process_group
    torch.set_default_device = lambda device: None
    torch.cuda.set_device = torch.cuda.synchronize = lambda *_: None
    torch.cuda.Event = Clock


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
    parser.add_argument("--only", choices=("intranode", "low_latency"))
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
    with tempfile.TemporaryDirectory() as folder:
        extract(args.checkout, folder)
        sys.path.insert(0, folder)
        sys.dont_write_bytecode = True
        shorten_benchmarks()
        for test in ("intranode", "low_latency"):
            if args.only not in (None, test):
                continue
            # UE8M0 scales, which test_low_latency.py always tries, need rows of 512 elements.
            hidden = args.hidden if test == "intranode" else -(-args.hidden // 512) * 512
            sys.argv = [f"test_{test}.py", "--num-processes", str(args.num_processes), "--num-tokens", str(args.num_tokens),
                        "--hidden", str(hidden), "--num-experts", str(args.num_experts), "--num-topk", str(args.num_topk)]
            if test == "low_latency" and args.use_logfmt:
                sys.argv.append("--use-logfmt")
            began = time.monotonic()
            runpy.run_path(os.path.join(folder, sys.argv[0]), run_name="__main__")  # raises the error of a rank that failed
            print(f"{' '.join(sys.argv)}: passed in {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
