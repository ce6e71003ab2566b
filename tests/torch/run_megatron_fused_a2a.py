# SPDX-License-Identifier: Apache-2.0
"""Drives megatron-core's transformer/moe/fused_a2a.py, unchanged, on bindings/deep_ep and CPU tensors.

    python3 tests/torch/run_megatron_fused_a2a.py [--num-processes 4]

Runs forward and backward of fused_dispatch and fused_combine around experts with weights, and compares the output and the
gradients of tokens, router probabilities and the experts' weights with the same layer computed densely on every rank. Needs torch,
moeccl, deep_ep and megatron-core (pip install --no-deps megatron-core, and packaging); exits with 77 where one is missing."""
import argparse
import sys
import tempfile

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as multiprocessing
    from megatron.core.transformer.moe import fused_a2a
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


def layer(group, dtype, n_tokens, asynchronous, tolerance):
    rank, n = group.rank(), group.size()
    n_local = N_EXPERTS // n
    shared = torch.Generator().manual_seed(7)
    weights = (torch.randn((N_EXPERTS, HIDDEN, HIDDEN), generator=shared) / 16).to(dtype)
    own = torch.Generator().manual_seed(100 + rank)
    x = torch.randn((n_tokens, HIDDEN), generator=own).to(dtype)
    probs = torch.rand((n_tokens, TOP_K), generator=own)
    indices = torch.rand((n_tokens, N_EXPERTS), generator=own).topk(TOP_K, dim=1).indices
    grad = torch.randn((n_tokens, HIDDEN), generator=own).to(dtype)

    dense = [t.clone().requires_grad_() for t in (x, probs, weights)]
    expected = experts(dense[0], indices, dense[1], dense[2], 0)
    expected.backward(grad)
    grads = [grad_of(t) for t in dense]
    weight_grads = grads[2].float()
    dist.all_reduce(weight_grads, group=group)

    mine = [t.clone().requires_grad_() for t in (x, probs, weights[rank * n_local:(rank + 1) * n_local])]
    rows, local, local_probs, counts, handle = fused_a2a.fused_dispatch(
        mine[0], indices, mine[1], N_EXPERTS, group, async_finish=asynchronous, allocate_on_comm_stream=asynchronous)
    assert counts.tolist() == [(local == e).sum().item() for e in range(n_local)], (counts, local)
    out, _ = fused_a2a.fused_combine(experts(rows, local, local_probs, mine[2], 0), group, handle, async_finish=asynchronous,
                                     allocate_on_comm_stream=asynchronous)
    out.backward(grad)
    return ", ".join((compare("output", out, expected, tolerance), compare("x.grad", mine[0].grad, grads[0], tolerance),
                      compare("probs.grad", mine[1].grad, grads[1], tolerance),
                      compare("weights.grad", grad_of(mine[2]), weight_grads[rank * n_local:(rank + 1) * n_local], tolerance)))


def run(rank, n_ranks, meeting):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", world_size=n_ranks, rank=rank)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        for asynchronous in (False, True):
            for n_tokens in (40 + 9 * rank, 0 if rank == 0 else 33):
                said = layer(dist.group.WORLD, dtype, n_tokens, asynchronous, tolerance)
                if rank == n_ranks - 1:
                    print(f"{n_ranks} ranks, {dtype}, async_finish={asynchronous}, {n_tokens} tokens on rank {rank}: {said}", flush=True)
    assert fused_a2a._buffer.group is dist.group.WORLD
    fused_a2a._buffer.destroy()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-processes", type=int, default=4)
    n = parser.parse_args().num_processes
    import deep_ep
    import megatron.core
    assert fused_a2a.HAVE_DEEP_EP, "megatron-core found no deep_ep"
    print(f"megatron-core {megatron.core.__version__}, deep_ep is {deep_ep.__file__}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(run, (n, folder + "/meeting"), n, start_method="fork")


if __name__ == "__main__":
    main()
