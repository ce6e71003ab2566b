# SPDX-License-Identifier: Apache-2.0
"""Drives SGLang's DeepEP dispatchers, unchanged, on bindings/deep_ep and CPU tensors.

    python3 tests/torch/run_sglang_deepep.py CHECKOUT [--only v1|v2] [--num-processes 4]

CHECKOUT is a folder that holds the package sglang 0.5.23: the unpacked wheel, or python/ of a clone at its tag. What it imports must be
installed: torch, triton and the packages that an ImportError names. DeepEPDispatcher of token_dispatcher/deepep.py runs in its modes
normal, low_latency and auto, and DeepEPv2Dispatcher of deepep_v2.py as for prefill, with rows by token and by expert, and for decode.
They make their buffers themselves. The output is compared with a dense layer on every rank.

Stand-ins: the experts and the CUDA kernel that quantizes rows are plain torch; SGLang is told that DeepGEMM is there, in its forms for
Hopper and for Blackwell (UE8M0); the device has 132 SMs; torchvision is an empty module; tensors that SGLang asks for on "cuda" are
made on the CPU. Exits with 77 where something is missing."""
import argparse
import functools
import importlib.abc
import importlib.machinery
import os
import sys
import tempfile
import types
from unittest import mock

os.environ.update(CUDA_VISIBLE_DEVICES="", SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK="64",
                  SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK="64")
try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as multiprocessing
    import deep_ep
    import engines
    from engines import HIDDEN, N_EXPERTS, TOP_K
    from transformers.utils import import_utils
except ImportError as failure:
    print(f"skipped: {failure}", file=sys.stderr)
    sys.exit(77)


class Torchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for torchvision, from which SGLang's models take image transforms."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.InterpolationMode = mock.MagicMock()
        return module

    def exec_module(self, module):
        pass


def quantize(x, x_q, x_s, group_size, eps, fp8_min, fp8_max, *, scale_ue8m0, fuse_silu_and_mul, masked_m):
    """Stands in for SGLang's kernel: fills x_q and x_s, whose type and strides SGLang has chosen."""
    rows, scales = engines.to_fp8(x, powers=scale_ue8m0)
    x_q.copy_(rows)
    if x_s.dtype == torch.int32:  # exponents, four to an int32
        scales = (scales.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)
    x_s.copy_(scales)


def load(checkout):
    """Imports SGLang's dispatchers and puts the stand-ins in place."""
    import_utils.is_torchvision_available(), import_utils.is_torchvision_v2_available()  # transformers remembers that it is not there
    sys.meta_path.append(Torchvision())
    sys.path.insert(0, checkout)
    try:
        from sglang.kernels.ops.quantization import fp8_kernel
        from sglang.srt.layers.moe.token_dispatcher import deepep, deepep_v2
    except ImportError as failure:
        engines.skip(failure)
    assert deepep.use_deepep and deepep_v2.use_deepep_v2, "SGLang found no deep_ep"
    fp8_kernel._run_per_token_group_quant_8bit_kernel = quantize
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(multi_processor_count=132)


def say_deep_gemm(blackwell):
    from sglang.srt.layers import deep_gemm_wrapper
    deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = True
    deep_gemm_wrapper.DEEPGEMM_BLACKWELL = deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0 = blackwell
    deep_gemm_wrapper.DEEPGEMM_NEED_TMA_ALIGNED_SCALES = not blackwell


def experts_on_rows(given, problem):
    """The experts of the normal mode and of V2's layout by token. Counts are rounded up to 128."""
    if hasattr(given, "num_recv_tokens_per_expert"):
        counts = [-(-(given.topk_ids == e).sum().item() // 128) * 128 for e in range(problem.n_local)]
        assert list(given.num_recv_tokens_per_expert) == counts, (given.num_recv_tokens_per_expert, counts)
    rows = engines.from_fp8(given.hidden_states, given.hidden_states_scale)
    return engines.on_rows(rows, given.topk_ids, given.topk_weights, problem.w1, problem.w2).bfloat16()


def experts_on_groups(given, problem):
    """The experts of V2's layout by expert, whose groups begin at multiples of 128. No other row may be read."""
    out, begin = torch.full(given.hidden_states.shape, float("nan"), dtype=torch.bfloat16), 0
    for number, end in enumerate(given.psum_num_recv_tokens_per_expert.tolist()):
        here = slice(begin, end)
        scales = None if given.hidden_states_scale is None else given.hidden_states_scale[here]
        rows = engines.expert(engines.from_fp8(given.hidden_states[here], scales), problem.w1[number], problem.w2[number])
        out[here] = rows * given.topk_weights[here].unsqueeze(1)
        begin = -(-end // 128) * 128
    return out


def outputs_of_v1(dispatcher, problem):
    """Returns the layer's output by way of DeepEPDispatcher."""
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    given = dispatcher.dispatch(problem.x, StandardTopKOutput(problem.weights, problem.idx, None))
    if isinstance(given, deepep.DeepEPNormalDispatchOutput):
        made = deepep.DeepEPNormalCombineInput(experts_on_rows(given, problem), given.topk_ids, given.topk_weights)
    else:
        fp4 = engines.GLOBAL_SCALE if given.hidden_states.dtype == torch.uint8 else None
        rows = engines.in_batches(given.hidden_states, given.hidden_states_scale, given.masked_m, problem.w1, problem.w2, fp4)
        made = deepep.DeepEPLLCombineInput(rows, given.topk_ids, given.topk_weights)
    return dispatcher.combine(made)


def outputs_of_v2(dispatcher, problem):
    """Returns the layer's output by way of DeepEPv2Dispatcher."""
    from sglang.srt.layers.moe.token_dispatcher import deepep_v2
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    given = dispatcher.dispatch(problem.x, StandardTopKOutput(problem.weights, problem.idx, None))
    if given.is_expanded:
        return dispatcher.combine(deepep_v2.DeepEPv2CombineInput(experts_on_groups(given, problem), None))
    return dispatcher.combine(deepep_v2.DeepEPv2CombineInput(experts_on_rows(given, problem), given.topk_weights))


def ways_of_v1(group, kind):
    """Yields (name, what sets the phase, DeepEPDispatcher)."""
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPDispatcher
    from sglang.srt.layers.moe.utils import DeepEPMode
    from sglang.srt.runtime_context import get_resources
    for mode in DeepEPMode:
        get_resources().buffers.clear()  # a process has one buffer, in one mode
        for later in (False, True):
            dispatcher = DeepEPDispatcher(
                group=group, router_topk=TOP_K, permute_fusion=True, num_experts=N_EXPERTS, num_local_experts=N_EXPERTS // group.size(),
                hidden_size=HIDDEN, params_dtype=torch.bfloat16, deepep_mode=mode, async_finish=later, return_recv_hook=later)
            if kind == "nvfp4":
                if mode.enable_normal():
                    continue  # only low-latency rows are NVFP4
                dispatcher.set_quant_config({"input_global_scale": torch.tensor([engines.GLOBAL_SCALE])})
            else:
                dispatcher.set_quant_config({"dispatcher_output_dtype": kind})
            for extend in (True, False):
                if mode.is_auto() or extend == mode.is_normal():
                    yield (f"{mode.value}{', prefill' if extend else ', decode'}{', later' if later else ''}",
                           functools.partial(set_is_extend_in_batch, extend), dispatcher)


def ways_of_v2(group, kind):
    """Yields (name, what sets the phase, DeepEPv2Dispatcher)."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch
    from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2Dispatcher
    for extend, expand in ((True, False), (True, True), (False, True)):
        with envs.SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND.override(expand):
            dispatcher = DeepEPv2Dispatcher(
                group=group, router_topk=TOP_K, num_experts=N_EXPERTS, num_local_experts=N_EXPERTS // group.size(), hidden_size=HIDDEN,
                params_dtype=torch.bfloat16, use_fp8_dispatch=kind == "fp8")
        dispatcher.prebuild()
        yield (f"v2, {'prefill' if extend else 'decode'}{', by expert' if expand else ', by token'}",
               functools.partial(set_is_extend_in_batch, extend), dispatcher)


def run(rank, n_ranks, meeting, only):
    torch.set_num_threads(1)
    from sglang.srt.runtime_context import get_context
    dist.init_process_group("gloo", init_method=f"file://{meeting}", world_size=n_ranks, rank=rank)
    group = dist.group.WORLD
    get_context().override_server_args(deepep_v2_mode="direct").install()
    parts = {"v1": (ways_of_v1, outputs_of_v1), "v2": (ways_of_v2, outputs_of_v2)}
    forms = {"bf16": ("bf16", False, None), "fp8": ("fp8", False, engines.as_fp8),
             "UE8M0": ("fp8", True, functools.partial(engines.as_fp8, powers=True)),
             "NVFP4": ("nvfp4", True, functools.partial(engines.as_fp4, global_scale=engines.GLOBAL_SCALE))}
    with engines.CpuForCuda():
        for part, form in ((part, form) for part in parts for form in forms if only in (None, part) and (part, form) != ("v2", "NVFP4")):
            kind, blackwell, on_the_way = forms[form]
            say_deep_gemm(blackwell)
            ways, outputs = parts[part]
            for name, phase, dispatcher in ways(group, kind):
                for counts in ([40 + 3 * r for r in range(n_ranks)], [0] + [33] * (n_ranks - 1)):
                    problem = engines.Problem(rank, counts, on_the_way, distinct=True)
                    phase()
                    worst = max(problem.difference(outputs(dispatcher, problem), 1e-2) for _ in range(2))  # two steps
                    if rank == n_ranks - 1:
                        print(f"{n_ranks} ranks, {name}, {form}, tokens {counts}: output {worst:.1e}", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout")
    parser.add_argument("--only", choices=("v1", "v2"))
    parser.add_argument("--num-processes", type=int, default=4)
    args = parser.parse_args()
    load(args.checkout)
    print(f"deep_ep is {os.path.dirname(deep_ep.__file__)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(run, (args.num_processes, folder + "/meeting", args.only), args.num_processes, start_method="fork")


if __name__ == "__main__":
    main()
