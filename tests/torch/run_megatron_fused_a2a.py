# SPDX-License-Identifier: Apache-2.0
"""Drives megatron-core's transformer/moe/fused_a2a.py, unchanged, on bindings/deep_ep and CPU tensors.

python3 tests/torch/run_megatron_fused_a2a.py [--num-processes 4]

Runs forward and backward of fused_dispatch and fused_combine around experts with weights, and of hybrid_ep_dispatch and
hybrid_ep_combine, also from the flex dispatcher's manager for backend "hybridep". Compares the output and the gradients
of tokens, router probabilities and the experts' weights with the same layer computed densely on every rank. Needs
torch, moeccl, deep_ep and megatron-core (pip install --no-deps megatron-core, and packaging); exits with 77 where one
is missing."""
import argparse
import sys
import tempfile
import types

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as multiprocessing
    from engines import CpuForCuda
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher
except ImportError as failure:
    print(f"skipped: {failure}", file=sys.stderr)
    sys.exit(77)

N_EXPERTS, TOP_K, HIDDEN = 8, 3, 256


def experts(rows, indices, probs, weights, first):
    """Applies each row's experts and weights the results; indices count from `first`, and -1 means none."""
    out = rows * 0  # keeps the graph connected where no expert has rows
    for local in range(weights.size(0)):
        row, choice = (indices == first + local).nonzero(as_tuple=True)
        if row.numel():
            value = torch.tanh(rows[row] @ weights[local]) * probs[row, choice].unsqueeze(1).to(rows.dtype)
            out = out.index_add(0, row, value)
    return out


def grad_of(tensor):
    """Returns its gradient, or zeros where no row reached it."""
    return tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)


def compare(name, got, expected, tolerance):
    got, expected = got.double(), expected.double()
    worst = ((got - expected).norm() / (expected.norm() + 1e-30)).item() if expected.numel() else 0.0
    if got.shape != expected.shape or not worst <= tolerance:
        raise AssertionError(f"{name}: shapes {list(got.shape)} and {list(expected.shape)}, relative difference {worst:.2e}, "
                             f"{tolerance:.0e} is allowed")
    return f"{name} {worst:.1e}"


def grouped(rows, probs, counts, weights):
    """Applies each local expert to its group of rows and weights the results; the rest of the rows gives zeros."""
    parts, first = [], 0
    for weight, count in zip(weights, counts):
        here = slice(first, first + count)
        parts.append(torch.tanh(rows[here] @ weight) * probs[here].unsqueeze(1).to(rows.dtype))
        first += count
    return torch.cat(parts + [rows[first:] * 0])


class Problem:
    """The inputs of this rank, and the output and the gradients of the dense layer. Each token has TOP_K experts or,
    with a capacity, each expert that many of the tokens."""

    def __init__(self, group, dtype, n_tokens, capacity=None):
        self.group, self.n_local, rank = group, N_EXPERTS // group.size(), group.rank()
        shared = torch.Generator().manual_seed(7)
        weights = (torch.randn((N_EXPERTS, HIDDEN, HIDDEN), generator=shared) / 16).to(dtype)
        own = torch.Generator().manual_seed(100 + rank)
        x = torch.randn((n_tokens, HIDDEN), generator=own).to(dtype)
        scores = torch.rand((n_tokens, N_EXPERTS), generator=own)
        self.indices = scores.topk(TOP_K, dim=1).indices
        if capacity is not None:
            chosen = torch.zeros_like(scores).scatter_(0, scores.topk(capacity, dim=0).indices, 1)
            self.indices = torch.where(chosen > 0, torch.arange(N_EXPERTS), -1)
        probs = torch.rand(self.indices.shape, generator=own)
        self.grad = torch.randn((n_tokens, HIDDEN), generator=own).to(dtype)
        dense = [t.clone().requires_grad_() for t in (x, probs, weights)]
        self.output = experts(dense[0], self.indices, dense[1], dense[2], 0)
        self.output.backward(self.grad)
        self.grads = [grad_of(t) for t in dense]
        weight_grads = self.grads[2].float()
        dist.all_reduce(weight_grads, group=group)
        here = slice(rank * self.n_local, (rank + 1) * self.n_local)
        self.grads[2] = weight_grads[here]
        self.x, self.probs, self.weights = (t.clone().requires_grad_() for t in (x, probs, weights[here]))

    def by_expert(self):
        """Returns the routing map and the probabilities as [tokens, experts]."""
        column, blank = self.indices + 1, torch.zeros((self.indices.size(0), N_EXPERTS + 1))
        return (blank > 0).scatter(1, column, True)[:, 1:], blank.scatter(1, column, self.probs)[:, 1:]

    def check(self, output, tolerance):
        """Compares this output and its gradients. Returns the relative differences."""
        output.backward(self.grad)
        mine = (self.x.grad, self.probs.grad, grad_of(self.weights))
        return ", ".join(compare(name, got, expected, tolerance) for name, got, expected in zip(
            ("output", "x.grad", "probs.grad", "weights.grad"), (output, *mine), (self.output, *self.grads)))


def layer(group, dtype, n_tokens, asynchronous, tolerance):
    problem = Problem(group, dtype, n_tokens)
    how = {"async_finish": asynchronous, "allocate_on_comm_stream": asynchronous}
    rows, local, probs, counts, handle = fused_a2a.fused_dispatch(
        problem.x, problem.indices, problem.probs, N_EXPERTS, group, **how)
    assert counts.tolist() == [(local == e).sum().item() for e in range(problem.n_local)], (counts, local)
    out, _ = fused_a2a.fused_combine(experts(rows, local, probs, problem.weights, 0), group, handle, **how)
    return problem.check(out, tolerance)


def hybrid_layer(group, dtype, n_tokens, align, most, tolerance):
    """align: pad_multiple. most: num_permuted_tokens, or None to let dispatch find the number."""
    problem = Problem(group, dtype, n_tokens)
    chosen, probs = problem.by_expert()
    rows, row_probs, _, counts, handle = fused_a2a.hybrid_ep_dispatch(
        problem.x, chosen, probs, group, problem.n_local, num_permuted_tokens=most, pad_multiple=align)
    assert align is None or not any(c % align for c in counts.tolist()), counts
    n = most if most is not None else counts.sum()
    out = fused_a2a.hybrid_ep_combine(grouped(rows, row_probs, counts.tolist(), problem.weights), handle, n, align)
    return problem.check(out, tolerance)


def managed_layer(group, dtype, n_tokens, fp8, capacity_factor, rank_capacity_factor, tolerance):
    """Does the same by way of the flex dispatcher's manager. fp8: the experts compute in it, so rows are padded.
    capacity_factor: each expert takes a fixed number of tokens, or None. rank_capacity_factor: ranks have room for a
    fixed number of rows, or None; megatron-core 0.16.1 does not know it."""
    config = types.SimpleNamespace(  # with what 0.16.1 and the branch dev of August 2026 read
        moe_permute_fusion=False, moe_permute_fusion_into_hybridep=True, moe_expert_capacity_factor=capacity_factor,
        moe_pad_expert_input_to_capacity=capacity_factor is not None, moe_router_topk=TOP_K,
        moe_expert_rank_capacity_factor=rank_capacity_factor,
        moe_hybridep_num_sms=16, moe_flex_dispatcher_num_sms=16, moe_hybridep_num_sms_preprocessing=None,
        moe_hybridep_num_blocks_permute=16, moe_hybridep_num_blocks_unpermute=None,
        moe_hybridep_pad_variable_tokens=False,
        fp8="hybrid" if fp8 else None, fp4=None, fp8_recipe="delayed", use_transformer_engine_op_fuser=False)
    capacity = None
    if capacity_factor is not None:
        capacity = token_dispatcher.get_capacity(n_tokens * TOP_K, N_EXPERTS, capacity_factor)
    problem = Problem(group, dtype, n_tokens, capacity)
    with CpuForCuda():
        manager = token_dispatcher._HybridEPManager(group, problem.n_local, N_EXPERTS, config)
    for step in range(2):  # a layer's manager serves every step
        problem.x.grad = problem.probs.grad = problem.weights.grad = None
        manager.setup_metadata(*problem.by_expert())
        rows, probs = manager.get_permuted_hidden_states_by_experts(manager.dispatch(problem.x))
        counts = manager.get_number_of_tokens_per_expert().tolist()
        room = rows.size(0) - sum(counts)
        assert (room >= 0 if rank_capacity_factor else room == 0), (counts, rows.size(0))
        assert not fp8 or not any(c % manager.pad_multiple for c in counts), counts
        rows = grouped(rows, probs, counts, problem.weights)
        said = problem.check(manager.combine(manager.get_restored_hidden_states_by_experts(rows)), tolerance)
    return said


def run(rank, n_ranks, meeting):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", world_size=n_ranks, rank=rank)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        for asynchronous in (False, True):
            for n_tokens in (40 + 9 * rank, 0 if rank == 0 else 33):
                said = layer(dist.group.WORLD, dtype, n_tokens, asynchronous, tolerance)
                if rank == n_ranks - 1:
                    print(f"{n_ranks} ranks, {dtype}, async_finish={asynchronous}, {n_tokens} tokens on rank {rank}: {said}", flush=True)
        for align in (None, 16):
            for most in (None, 16 * 64):
                for n_tokens in (40 + 9 * rank, 0 if rank == 0 else 33):
                    said = hybrid_layer(dist.group.WORLD, dtype, n_tokens, align, most, tolerance)
                    if rank == n_ranks - 1:
                        print(f"{n_ranks} ranks, hybridep, {dtype}, pad_multiple={align}, num_permuted_tokens={most}, "
                              f"{n_tokens} tokens on rank {rank}: {said}", flush=True)
        for fp8, factor, rank_factor in ((False, None, None), (True, None, None), (False, 1.0, None),
                                         (True, None, 4.0)):
            said = managed_layer(dist.group.WORLD, dtype, 40, fp8, factor, rank_factor, tolerance)
            if rank == n_ranks - 1:
                print(f"{n_ranks} ranks, manager of hybridep, {dtype}, fp8={fp8}, capacity factors {factor} and "
                      f"{rank_factor}: {said}", flush=True)
    for buffer in (fused_a2a._buffer, fused_a2a._hybrid_ep_buffer):
        assert buffer.group is dist.group.WORLD
        buffer.destroy()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-processes", type=int, default=4)
    n = parser.parse_args().num_processes
    import deep_ep
    import megatron.core
    assert fused_a2a.HAVE_DEEP_EP and fused_a2a.HAVE_HYBRIDEP, "megatron-core found no deep_ep"
    print(f"megatron-core {megatron.core.__version__}, deep_ep is {deep_ep.__file__}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(run, (n, folder + "/meeting"), n, start_method="fork")


if __name__ == "__main__":
    main()
