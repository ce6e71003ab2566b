# SPDX-License-Identifier: Apache-2.0
"""Drives backend "deepepv2" of Megatron-LM's transformer/moe/fused_a2a.py, unchanged, on deep_ep.ElasticBuffer and CPU tensors.

    python3 tests/torch/run_megatron_deepepv2.py CHECKOUT [--ref dev] [--num-processes 4]

CHECKOUT is a clone of github.com/NVIDIA/Megatron-LM, or its git directory; the file is taken from the ref, by default the branch dev.
Runs forward and backward of deepepv2_dispatch and deepepv2_combine around experts with weights, and compares the output and the
gradients of tokens, router probabilities and the experts' weights with the same layer computed densely on every rank. Needs torch, moeccl
and deep_ep; exits with 77 where one or the file is missing."""
import argparse
import os
import subprocess
import sys
import tempfile
import types

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as multiprocessing
    import deep_ep
except ImportError as failure:
    print(f"skipped: {failure}", file=sys.stderr)
    sys.exit(77)

N_EXPERTS, TOP_K, HIDDEN = 8, 3, 256
PATH = "megatron/core/transformer/moe/fused_a2a.py"


def load(checkout, ref):
    """Returns Megatron's module. It imports nothing else of Megatron than a decorator that marks functions."""
    for where in (ref, f"origin/{ref}"):
        shown = subprocess.run(["git", "-C", checkout, "-c", "safe.directory=*", "show", f"{where}:{PATH}"], capture_output=True)
        if shown.returncode == 0:
            break
    else:
        print(f"skipped: {checkout} has no {ref}:{PATH}: {shown.stderr.decode().strip()}", file=sys.stderr)
        sys.exit(77)
    for name in ("megatron", "megatron.core", "megatron.core.utils"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["megatron.core.utils"].internal_api = lambda thing: thing
    module = types.ModuleType("fused_a2a")
    exec(compile(shown.stdout, PATH, "exec"), vars(module))
    return module


def experts(rows, indices, probs, weights):
    """Applies each row's experts and weights the results; -1 means none."""
    out = rows * 0  # keeps the graph connected where no expert has rows
    for expert in range(weights.size(0)):
        row, choice = (indices == expert).nonzero(as_tuple=True)
        if row.numel():
            value = torch.tanh(rows[row] @ weights[expert]) * probs[row, choice].unsqueeze(1).to(rows.dtype)
            out = out.index_add(0, row, value)
    return out


def difference(name, got, expected, tolerance):
    got, expected = (torch.zeros(1) if t is None else t.double() for t in (got, expected))
    found = ((got - expected).norm() / (expected.norm() + 1e-30)).item() if expected.numel() else 0.0
    if not found <= tolerance:
        raise AssertionError(f"{name}: relative difference {found:.2e}, {tolerance:.0e} is allowed")
    return f"{name} {found:.1e}"


def layer(fused_a2a, group, dtype, n_tokens, asynchronous, tolerance):
    n_local = N_EXPERTS // group.size()
    shared, own = torch.Generator().manual_seed(7), torch.Generator().manual_seed(100 + group.rank())
    weights = (torch.randn((N_EXPERTS, HIDDEN, HIDDEN), generator=shared) / 16).to(dtype)
    x, grad = (torch.randn((n_tokens, HIDDEN), generator=own).to(dtype) for _ in range(2))
    probs = torch.rand((n_tokens, TOP_K), generator=own)
    indices = torch.rand((n_tokens, N_EXPERTS), generator=own).topk(TOP_K, dim=1).indices
    dense = [t.clone().requires_grad_() for t in (x, probs, weights)]
    expected = experts(dense[0], indices, *dense[1:])
    expected.backward(grad)
    weight_grads = (dense[2].grad if dense[2].grad is not None else torch.zeros_like(weights)).float()
    dist.all_reduce(weight_grads, group=group)
    here = slice(group.rank() * n_local, (group.rank() + 1) * n_local)

    mine = [t.clone().requires_grad_() for t in (x, probs, weights[here])]
    buffer = fused_a2a.get_elastic_buffer(group, 64 * group.size(), HIDDEN, TOP_K)
    how = {"async_finish": asynchronous, "allocate_on_comm_stream": asynchronous}
    rows, local, row_probs, counts, handle = fused_a2a.deepepv2_dispatch(
        buffer, mine[0], indices, mine[1], N_EXPERTS, num_max_tokens_per_rank=64 * group.size(), expert_alignment=1, num_sms=0, **how)
    assert counts.tolist() == [(local == e).sum().item() for e in range(n_local)], (counts, local)
    out, _ = fused_a2a.deepepv2_combine(buffer, experts(rows, local, row_probs, mine[2]), handle, num_sms=0, **how)
    out.backward(grad)
    got = (out, mine[0].grad, mine[1].grad, torch.zeros_like(weights[here]) if mine[2].grad is None else mine[2].grad)
    right = (expected, dense[0].grad, dense[1].grad, weight_grads[here])
    return ", ".join(difference(name, *pair, tolerance)
                     for name, *pair in zip(("output", "x.grad", "probs.grad", "weights.grad"), got, right))


def run(rank, n_ranks, meeting, checkout, ref):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", world_size=n_ranks, rank=rank)
    fused_a2a = load(checkout, ref)
    assert fused_a2a.HAVE_DEEP_EP_V2, "Megatron found no ElasticBuffer"
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        for asynchronous in (False, True):
            for n_tokens in (40 + 9 * rank, 0 if rank == 0 else 33):
                said = layer(fused_a2a, dist.group.WORLD, dtype, n_tokens, asynchronous, tolerance)
                if rank == n_ranks - 1:
                    print(f"{n_ranks} ranks, {dtype}, async_finish={asynchronous}, {n_tokens} tokens on rank {rank}: {said}", flush=True)
    fused_a2a._elastic_buffer.destroy()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout")
    parser.add_argument("--ref", default="dev")
    parser.add_argument("--num-processes", type=int, default=4)
    args = parser.parse_args()
    load(args.checkout, args.ref)
    print(f"deep_ep is {os.path.dirname(deep_ep.__file__)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(run, (args.num_processes, folder + "/meeting", args.checkout, args.ref), args.num_processes,
                                        start_method="fork")


if __name__ == "__main__":
    main()
