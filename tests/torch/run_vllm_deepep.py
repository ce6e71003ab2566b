# SPDX-License-Identifier: Apache-2.0
"""Drives vLLM's DeepEP backends, unchanged, on bindings/deep_ep and CPU tensors.

    python3 tests/torch/run_vllm_deepep.py CHECKOUT [--only ht|ll|v2|fault] [--num-processes 4]

CHECKOUT is the source of vLLM 0.33 (the unpacked sdist, or a clone at its tag). What it imports must be installed: torch, triton and the
packages that an ImportError names. Everything between the router's choices and the layer's output is vLLM's: the managers of all2all.py
make the buffers, FusedMoEKernel calls prepare_async and finalize_async of deepep_ht.py, deepep_ll.py and deepep_v2.py, and vLLM's triton
kernels quantize rows and convert expert numbers. The output is compared with a dense layer on every rank. "fault" is the low-latency
backend with vLLM's fault tolerance: the last rank's process ends, and the others go on without its experts.

Stand-ins: the experts are plain torch, as a class of vLLM's interface for experts, because vLLM's own need compiled extensions; triton's
kernels run in its interpreter; tensors that vLLM asks for on "cuda" are made on the CPU, and torch.accelerator.synchronize() does
nothing; vLLM does not ask NCCL for its network (EP_DISABLE_GIN, as DeepEP's). Exits with 77 where something is missing."""
import argparse
import functools
import itertools
import os
import sys
import tempfile

os.environ.update(EP_DISABLE_GIN="1", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", VLLM_LOGGING_LEVEL="ERROR",
                  VLLM_DEEPEPLL_NVFP4_DISPATCH="1")
try:
    import torch
    import torch.multiprocessing as multiprocessing
    import deep_ep
    import engines
    from engines import HIDDEN, INNER, MOST, N_EXPERTS, TOP_K
except ImportError as failure:
    print(f"skipped: {failure}", file=sys.stderr)
    sys.exit(77)


def define_experts():
    """Returns classes of experts in plain torch: on rows with choices, and in batches, also with exponents as scales, and of NVFP4."""
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate, TopKWeightAndReduceNoOP

    class OnRows(mk.FusedMoEExpertsModular):
        @staticmethod
        def activation_format():
            return mk.FusedMoEActivationFormat.Standard

        def finalize_weight_and_reduce_impl(self):
            return TopKWeightAndReduceNoOP()

        def workspace_shapes(self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation):
            return (0, ), (0, ), (M, K)

        def supports_packed_ue8m0_act_scales(self):
            return False

        def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, expert_map, a1q_scale, expert_tokens_meta, **_):
            local = torch.where(topk_ids >= 0, expert_map[topk_ids.clamp(min=0)], -1)
            if expert_tokens_meta is not None and expert_tokens_meta.expert_num_tokens is not None:
                counts = expert_tokens_meta.expert_num_tokens.tolist()
                assert counts == [(local == e).sum().item() for e in range(w1.size(0))], (counts, local)
            output.copy_(engines.on_rows(engines.from_fp8(hidden_states, a1q_scale), local, topk_weights, w1, w2))

    class InBatches(OnRows):
        @staticmethod
        def activation_format():
            return mk.FusedMoEActivationFormat.BatchedExperts

        def finalize_weight_and_reduce_impl(self):
            return TopKWeightAndReduceDelegate()

        def workspace_shapes(self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation):
            return (0, ), (0, ), (local_num_experts, M, K)

        def apply(self, output, hidden_states, w1, w2, a1q_scale, expert_tokens_meta, **_):
            output.copy_(engines.in_batches(hidden_states, a1q_scale, expert_tokens_meta.expert_num_tokens, w1, w2))

    class InBatchesOfExponents(InBatches):
        def supports_packed_ue8m0_act_scales(self):
            return True

    class InBatchesOfFp4(InBatches):
        def workspace_shapes(self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation):
            return (0, ), (0, ), (local_num_experts, M, 2 * K)

        def apply(self, output, hidden_states, w1, w2, a1q_scale, expert_tokens_meta, **_):
            output.copy_(engines.in_batches(hidden_states.permute(1, 2, 0), a1q_scale, expert_tokens_meta.expert_num_tokens, w1, w2,
                                            engines.GLOBAL_SCALE))

    made = OnRows, InBatches, InBatchesOfExponents, InBatchesOfFp4
    for each in made:
        each.__abstractmethods__ = frozenset()  # the other methods tell for which models and machines vLLM may choose the experts
    return made


def make_kernel(prepare_finalize, experts, quant, n_ranks):
    """Returns a FusedMoEKernel. quant: the arguments of vLLM's configuration of quantized rows."""
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig, RoutingMethodType
    config = FusedMoEConfig(
        num_experts=N_EXPERTS, experts_per_token=TOP_K, hidden_dim=HIDDEN, intermediate_size=INNER, num_local_experts=N_EXPERTS // n_ranks,
        num_logical_experts=N_EXPERTS, moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(), activation=MoEActivation.SILU,
        in_dtype=torch.bfloat16, device="cpu", routing_method=RoutingMethodType.TopK, max_num_tokens=MOST)
    batched = experts.activation_format() == mk.FusedMoEActivationFormat.BatchedExperts
    room = {"max_num_tokens": MOST, "num_dispatchers": n_ranks} if batched else {}
    return mk.FusedMoEKernel(prepare_finalize, experts(moe_config=config, quant_config=FusedMoEQuantConfig.make(**quant), **room))


FP8_BLOCKS = {"quant_dtype": torch.float8_e4m3fn, "block_shape": [128, 128]}


def throughput_kernels(group):
    """Yields (name, FusedMoEKernel, what becomes of tokens on the way) for the ways in which vLLM uses "deepep_high_throughput"."""
    from vllm.distributed.device_communicators import all2all
    from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_ht
    on_rows = define_experts()[0]
    manager = all2all.DeepEPHTAll2AllManager(group)
    buffer = manager.get_handle({})
    manager.set_num_sms(16)
    assert deep_ep.Buffer.num_sms == 16
    for kind, quant, on_the_way in (("bf16", {}, None), ("fp8", FP8_BLOCKS, as_vllm_quantizes)):
        made = deepep_ht.DeepEPHTPrepareAndFinalize(buffer, num_dispatchers=group.size(), dp_size=group.size(),
                                                    rank_expert_offset=group.rank() * (N_EXPERTS // group.size()))
        yield f"deepep_high_throughput, {kind}", make_kernel(made, on_rows, quant, group.size()), on_the_way
    manager.destroy()


def low_latency_kernels(group, manager=None):
    """Does the same for "deepep_low_latency"."""
    from vllm.distributed.device_communicators import all2all
    from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_ll
    _, in_batches, of_exponents, of_fp4 = define_experts()
    manager = manager or all2all.DeepEPLLAll2AllManager(group)
    buffer = manager.get_handle(dict(max_num_tokens_per_dp_rank=MOST, token_hidden_size=HIDDEN, num_ep_ranks=group.size(),
                                     num_global_experts=N_EXPERTS, num_local_experts=N_EXPERTS // group.size()))
    for kind, experts, quant, on_the_way in (
            ("bf16", in_batches, {}, None), ("fp8", in_batches, FP8_BLOCKS, engines.as_fp8),
            ("UE8M0", of_exponents, FP8_BLOCKS, lambda x: engines.as_fp8(x, powers=True)),
            ("NVFP4", of_fp4, {"quant_dtype": "nvfp4", "a1_gscale": torch.tensor(engines.GLOBAL_SCALE)},
             lambda x: engines.as_fp4(x, engines.GLOBAL_SCALE))):
        made = deepep_ll.DeepEPLLPrepareAndFinalize(buffer, max_tokens_per_rank=MOST, num_dispatchers=group.size(),
                                                    use_fp8_dispatch=quant is FP8_BLOCKS)
        kernel = make_kernel(made, experts, quant, group.size())
        assert made.use_ue8m0_dispatch == (kind == "UE8M0")
        yield f"deepep_low_latency, {kind}", kernel, on_the_way
    manager.destroy()


def v2_kernels(group):
    """Does the same for "deepep_v2"."""
    from vllm.distributed.device_communicators import all2all
    from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_v2
    on_rows = define_experts()[0]
    for kind, quant, on_the_way in (("bf16", {}, None), ("fp8", FP8_BLOCKS, as_vllm_quantizes)):
        manager, fp8 = all2all.DeepEPV2All2AllManager(group), bool(quant)
        buffer = manager.get_handle(dict(num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOP_K, num_experts=N_EXPERTS,
                                         use_fp8_dispatch=fp8))
        assert manager.max_sms_used() > 0
        for decode in (False, True):
            made = deepep_v2.DeepEPV2PrepareAndFinalize(
                buffer, num_dispatchers=group.size(), dp_size=group.size(), rank_expert_offset=group.rank() * (N_EXPERTS // group.size()),
                num_experts=N_EXPERTS, num_topk=TOP_K, use_fp8_dispatch=fp8, use_cudagraph=decode)
            yield f"deepep_v2 for {'decode' if decode else 'prefill'}, {kind}", make_kernel(made, on_rows, quant, group.size()), on_the_way
        manager.destroy()


def as_vllm_quantizes(x):
    """Returns x as vLLM's fp8 kernel leaves it. In the interpreter it cuts numbers off, where torch and a GPU round them."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
    return engines.from_fp8(*per_token_group_quant_fp8(x, 128))


def output_of(kernel, problem):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    experts = torch.full((N_EXPERTS, ), -1, dtype=torch.int32)
    experts[problem.here] = torch.arange(problem.n_local, dtype=torch.int32)
    return kernel.apply(hidden_states=problem.x, w1=problem.w1, w2=problem.w2, topk_weights=problem.weights, topk_ids=problem.idx,
                        activation=MoEActivation.SILU, global_num_experts=N_EXPERTS, expert_map=experts, apply_router_weight_on_input=False)


def drive(backend, rank, group, config):
    """Compares two steps of each kernel of a backend with the dense layer, also with a rank that has no tokens."""
    from vllm.forward_context import set_forward_context
    n_ranks = group.size()
    for name, kernel, on_the_way in BACKENDS[backend](group):
        for counts in ([40 + 3 * r for r in range(n_ranks)], [0] + [33] * (n_ranks - 1)):
            problem, across = engines.Problem(rank, counts, on_the_way), torch.tensor(counts, dtype=torch.int)
            with set_forward_context(None, config, num_tokens=counts[rank], num_tokens_across_dp=across):
                worst = max(problem.difference(output_of(kernel, problem), TOLERANCE) for _ in range(2))
            if rank == n_ranks - 1:
                print(f"{n_ranks} ranks, {name}, tokens {counts}: output {worst:.1e}", flush=True)


def lose_a_rank(number, rank, group, config):
    """Lets the last rank's process end between two steps of the low-latency kernel of this number, and checks what vLLM's manager tells
    the others."""
    from vllm.distributed.device_communicators import all2all
    config.parallel_config.enable_fault_tolerance = True
    manager, last = all2all.DeepEPLLAll2AllManager(group), group.size() - 1
    assert manager.support_fault_tolerance
    name, kernel, on_the_way = next(itertools.islice(low_latency_kernels(group, manager), number, None))
    problem = engines.Problem(rank, [40] * group.size(), on_the_way)
    found = [problem.difference(output_of(kernel, problem), TOLERANCE)]
    assert not manager.query_fault()
    torch.distributed.barrier(group)
    if rank == last:
        os._exit(0)
    problem.lose(last)
    for _ in range(2):
        found.append(problem.difference(output_of(kernel, problem), TOLERANCE))
        assert manager.query_fault() and manager.query_active_mask().tolist() == [0] * last + [1]
        manager.clean_buffers()
        assert not manager.query_fault()
    if rank == 0:
        print(f"{group.size()} ranks, {name}, and one ends: output {max(found):.1e}", flush=True)
    manager.destroy()
    os._exit(0)  # the process group waits for the rank that has ended


BACKENDS, TOLERANCE = {"ht": throughput_kernels, "ll": low_latency_kernels, "v2": v2_kernels}, 1e-2


def run(rank, n_ranks, meeting, job):
    torch.set_num_threads(1)
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.v1.worker.workspace import init_workspace_manager
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    init_workspace_manager(torch.device("cpu"))
    with set_current_vllm_config(config), engines.CpuForCuda():
        parallel_state.init_distributed_environment(n_ranks, rank, f"file://{meeting}", rank, "gloo")
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=n_ranks, backend="gloo")
        # So that vLLM tells the decode mode all ranks' numbers of tokens.
        config.parallel_config.data_parallel_size, config.parallel_config.data_parallel_rank = n_ranks, rank
        job(rank, parallel_state.get_ep_group().cpu_group, config)
    torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout")
    parser.add_argument("--only", choices=(*BACKENDS, "fault"))
    parser.add_argument("--num-processes", type=int, default=4)
    args = parser.parse_args()
    sys.path.insert(0, args.checkout)
    try:
        import vllm
        from vllm.distributed.device_communicators import all2all  # noqa: F401 (once here, rather than in each process)
        from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_ht, deepep_ll, deepep_v2  # noqa: F401
    except ImportError as failure:
        engines.skip(failure)
    print(f"vllm is {os.path.dirname(vllm.__file__)}, deep_ep is {os.path.dirname(deep_ep.__file__)}", flush=True)
    torch.accelerator.synchronize = lambda *_: None
    jobs = [functools.partial(drive, backend) for backend in BACKENDS if args.only in (None, backend)]
    if args.only in (None, "fault"):
        jobs += [functools.partial(lose_a_rank, number) for number in range(4)]
    for job in jobs:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.start_processes(run, (args.num_processes, folder + "/meeting", job), args.num_processes, start_method="fork")


if __name__ == "__main__":
    main()
