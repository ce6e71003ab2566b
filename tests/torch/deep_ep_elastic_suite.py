# SPDX-License-Identifier: Apache-2.0
"""What run_deep_ep_suite.py runs of DeepEP's branch main: tests/elastic, and tests/legacy/test_low_latency.py --shrink-test, with the modules
of main's deep_ep.utils that they import."""
import math
import os
import sys
import types

REVISION = "main"
TESTS = [f"tests/elastic/test_{name}.py" for name in ("ep", "barrier", "engram", "pp", "agrs")] + ["tests/legacy/test_low_latency.py"]
MODULES = [f"deep_ep/utils/{name}.py" for name in ("comm", "envs", "gate", "math", "refs", "semantic", "testing")]


def runs(args):
    """Returns the folders of the tests and their command lines. Sizes that the tests choose for GPUs are smaller here."""
    n = ["--num-processes", str(args.num_processes)]
    ep = ["test_ep.py", *n, "--num-tokens", str(args.num_tokens), "--hidden", str(args.hidden), "--num-experts",
          str(args.num_experts), "--num-topk", str(args.num_topk)]
    engram = ["test_engram.py", *n, "--num-qps", "8", "--num-entries", "1000", "--num-tokens", "64", "--num-entries-per-token", "5"]
    elastic = [[*ep, "--deterministic"], [*ep, "--do-cpu-sync", "0", "--masked-ratio", "0.3"],
               [*ep, "--allow-multiple-reduction", "0", "--masked-ratio", "0.3"],
               [*ep, "--allow-hybrid-mode", "0", "--unbalanced-ratio", "2.0", "--test-first-only"],
               ["test_barrier.py", *n], engram, [*engram, "--use-fp8"],
               ["test_pp.py", *n, "--num-tokens", "256", "--hidden", "1024"],
               ["test_agrs.py", *n, "--num-max-inflight-agrs", "2", "--num-stress-iterations", "1"]]
    shrink = ["test_low_latency.py", "--shrink-test", "--num-processes", "6", "--num-tokens", "32", "--hidden", "512", "--num-experts", "18",
              "--num-topk", "4"]  # ranks 1, 3 and 5 leave
    return [("tests/elastic", argv) for argv in elastic] + [("tests/legacy", shrink)]


def no_kernels(fn, kernel_names, **_):
    """Stands in for bench_kineto: runs the calls once; there are no kernels to time."""
    fn()
    nan = float("nan")
    return tuple(nan for _ in kernel_names) if isinstance(kernel_names, tuple) else nan


def stand_in():
    """Stands in for what these tests use of CUDA beside run_deep_ep_suite.py's."""
    import torch
    import torch.distributed as dist

    def as_bytes(tensor):
        return tensor.contiguous().view(tensor.size(0), math.prod(tensor.shape[1:])).view(torch.uint8)

    gather, exchange = dist.all_gather_into_tensor, dist.all_to_all_single

    def all_gather_into_tensor(out, mine, *args, **kwargs):
        gather(as_bytes(out.view(-1, *mine.shape[1:])), as_bytes(mine), *args, **kwargs)  # gloo has no fp8

    def all_to_all_single(out, mine, *args, **kwargs):
        exchange(as_bytes(out), as_bytes(mine), *args, **kwargs)

    dist.all_gather_into_tensor, dist.all_to_all_single = all_gather_into_tensor, all_to_all_single
    torch.cuda._sleep = lambda cycles: None
    torch.compile = lambda *_, **__: lambda function: function


def lend_modules(folder):
    """Lets main's modules of deep_ep.utils be imported beside this package's. What the tests call of them needs nothing of DeepEP's
    compiled module."""
    import deep_ep.utils
    sys.modules["deep_ep._C"] = types.ModuleType("deep_ep._C")
    deep_ep.utils.__path__ = [os.path.join(folder, "deep_ep", "utils")]
    import deep_ep.utils.envs
    import deep_ep.utils.testing
    deep_ep.utils.testing.bench_kineto = no_kernels
    deep_ep.utils.envs.get_rdma_gbs = lambda: 50.0  # there is no ibstat; the figure only serves to choose how long to sleep
