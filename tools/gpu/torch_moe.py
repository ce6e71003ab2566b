#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""moeccl.Comm, torch.distributed's backend "moeccl" and MoELayer on CUDA tensors, in processes that all use device 0. Each result
is compared with the same one on CPU tensors.

  PYTHONPATH=bindings/python LIBMOECCL=.../libmoeccl.so.0 tools/gpu/torch_moe.py [N_PROCESSES]     exits 0 when they agree"""
import faulthandler
import os
import sys

STEPS, TOKENS, HIDDEN, EXPERTS, TOP_K = 10, 512, 256, 8, 2


def collectives(comm, device):
    """Returns the results of one operation of each kind of moeccl.Comm, on the CPU."""
    import torch

    rank, world = comm.rank, comm.size
    made = torch.Generator().manual_seed(rank)
    x = torch.randn(100 * world * world, generator=made).to(device)
    results = {}

    def keep(name, tensor):
        results[name] = tensor.detach().cpu().clone()

    stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else None
    y = torch.empty_like(x)
    comm.all_reduce(x, y, stream=stream)
    keep("all_reduce", y)
    y = torch.empty(x.numel() * world, device=device)
    comm.all_gather(x, y, stream=stream)
    keep("all_gather", y)
    y = torch.empty(x.numel() // world, device=device)
    comm.reduce_scatter(x, y, stream=stream)
    keep("reduce_scatter", y)
    y = torch.empty_like(x)
    comm.all_to_all(x, y, stream=stream)
    keep("all_to_all", y)
    sent = [50 * (rank + p + 1) for p in range(world)]  # two ranks send each other the same number
    y = torch.empty(sum(sent), device=device)
    comm.all_to_allv(x[:sum(sent)], sent, y, sent, stream=stream)
    keep("all_to_allv", y)
    y = x.clone()
    comm.broadcast(y, world - 1, stream=stream)
    keep("broadcast", y)
    y = x.clone()
    comm.all_reduce(y)  # without a stream the call waits
    keep("blocking", y)
    return results


def c10d(rank, world, device):
    """The same for torch.distributed's backend "moeccl"."""
    import torch
    import torch.distributed as dist

    x = torch.randn(1000, generator=torch.Generator().manual_seed(rank)).to(device)
    results = {}
    y = x.clone()
    dist.all_reduce(y)
    results["c10d all_reduce"] = y.cpu()
    y = torch.empty(x.numel() * world, device=device)
    dist.all_gather_into_tensor(y, x)
    results["c10d all_gather"] = y.cpu()
    y = torch.empty_like(x)
    there, here = (rank + 1) % world, (rank - 1) % world
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, there), dist.P2POp(dist.irecv, y, here)]):
        work.wait()
    results["c10d batch"] = y.cpu()
    work = dist.all_reduce(y := x.clone(), async_op=True)
    work.wait()
    results["c10d asynchronous"] = y.cpu()
    dist.barrier()
    return results


def losses_of(rank, device):
    import torch
    import moeccl.torch

    torch.manual_seed(5)
    layer = moeccl.torch.MoELayer(HIDDEN, EXPERTS, TOP_K, ffn=512)
    layer = layer.to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(TOKENS, HIDDEN, generator=data).to(device)
        loss = ((layer(x) - x.roll(1, 1)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def worker(rank, world, port):
    import torch
    import torch.distributed as dist
    import moeccl.torch

    faulthandler.dump_traceback_later(25, exit=True)  # the log then says where a rank waits
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    device, host = torch.device("cuda:0"), torch.device("cpu")
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    dist.init_process_group("moeccl", rank=rank, world_size=world)
    comm = moeccl.torch.comm_of()
    on_device, on_host = collectives(comm, device), collectives(comm, host)
    on_device.update(c10d(rank, world, device))
    on_host.update(c10d(rank, world, host))
    for name, value in on_host.items():
        apart = float((on_device[name] - value).abs().max())
        assert apart < 1e-5, f"rank {rank}: {name} on the device is {apart} from the one on the host"
    if rank == 0:
        print(f"{len(on_host)} operations agree", flush=True)
    on_device, on_host = losses_of(rank, device), losses_of(rank, host)
    worst = max(abs(a - b) / abs(b) for a, b in zip(on_device, on_host))
    assert worst < 1e-3, f"rank {rank}: losses on the device {on_device}, on the host {on_host}"
    if rank == 0:
        print(f"{world} processes on one device (torch {torch.__version__}): MoELayer's loss {on_device[0]:.4f} -> "
              f"{on_device[-1]:.4f}, the host's {on_host[-1]:.4f}; largest relative difference {worst:.1e}", flush=True)
    moeccl.torch.close()
    dist.destroy_process_group()


def main():
    import torch.multiprocessing as processes

    world = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    processes.spawn(worker, (world, 29500 + os.getpid() % 1000), nprocs=world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
