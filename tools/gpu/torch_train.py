#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small model with data-parallel processes that all use device 0, with backend nccl under the shim, and again with
backend gloo on the CPU. The losses and the weights must agree.

  LD_PRELOAD=.../libmoeccl-nccl.so tools/gpu/torch_train.py [N_PROCESSES]     exits 0 when they agree; needs PyTorch"""
import faulthandler
import os
import sys

STEPS, WIDTH, BATCH = 20, 64, 32


def train(rank, world, backend, port):
    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(25)  # the log then says where a rank waits
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    device = torch.device("cuda:0" if backend == "nccl" else "cpu")
    if backend == "nccl":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, rank=rank, world_size=world)
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)).to(device)
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=data).to(device)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    # A mixture of experts needs uneven all-to-all, which PyTorch builds from grouped sends and receives.
    sends = [torch.full((rank + p + 1,), float(rank), device=device) for p in range(world)]
    receives = [torch.empty(rank + p + 1, device=device) for p in range(world)]
    if backend == "nccl":
        dist.all_to_all(receives, sends)
        for p, got in enumerate(receives):
            assert bool((got == p).all()), f"all_to_all: rank {rank} has {got} from {p}"
    weights = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    return losses, weights


def worker(rank, world, backend, port, folder):
    import torch

    losses, weights = train(rank, world, backend, port)
    if rank == 0:
        torch.save((losses, weights), os.path.join(folder, backend))


def main():
    import tempfile

    import torch
    import torch.multiprocessing as processes

    world = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as folder:
        for i, backend in enumerate(("nccl", "gloo")):
            processes.spawn(worker, (world, backend, 29500 + os.getpid() % 1000 + i, folder), nprocs=world)
        (l_nccl, w_nccl), (l_gloo, w_gloo) = (torch.load(os.path.join(folder, b)) for b in ("nccl", "gloo"))
    worst = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(l_nccl, l_gloo))
    apart = float((w_nccl - w_gloo).abs().max())
    print(f"{world} processes on one device: loss {l_nccl[0]:.4f} -> {l_nccl[-1]:.4f}; gloo's {l_gloo[-1]:.4f}; "
          f"largest relative difference {worst:.2e}, of a weight {apart:.2e}")
    return 0 if worst < 1e-3 and apart < 1e-3 and l_nccl[-1] < l_nccl[0] else 1


if __name__ == "__main__":
    sys.exit(main())
